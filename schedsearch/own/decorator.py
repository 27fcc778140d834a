"""`schedsearch.tunable`: a plain Numba-CUDA function, with knobs as keyword-only parameters, becomes a tunable kernel.

See docs/decisions/110-own-kernels-are-one-operator.md.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, TypeVar

from schedsearch.backend.code_identity import names_read
from schedsearch.errors import NoValidConfigError, UntunedWarning, UsageError, did_you_mean, warn_user
from schedsearch.measurement import DEFAULT_DB
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.own_kernel import Role, parameters_of
from schedsearch.own.arguments import Given, integer_range, is_array, read
from schedsearch.own.calls import Launches
from schedsearch.own.declared import (
    check_function,
    check_names,
    check_options,
    check_written,
    formulation,
    jit_settings,
    plain_function,
)
from schedsearch.own.habits import Called
from schedsearch.runtime.deploy import explain
from schedsearch.runtime.explanation import Explanation
from schedsearch.runtime.fallback import LEVELS
from schedsearch.runtime.kernel import Kernel, Step
from schedsearch.session.summary import RunSummary
from schedsearch.session.tune import tune
from schedsearch.task import Task
from schedsearch.templates.own_kernel.definition import FORMULATION, Definition, Value, code_of, register
from schedsearch.templates.own_kernel.launches import Launch
from schedsearch.text import type_text
from schedsearch.typed import DeviceFunction
from schedsearch.workload import Workload

VERIFY = ("each size", "once")
_Function = TypeVar("_Function", bound=DeviceFunction)


def tunable(
    *,
    knobs: Mapping[str, Sequence[Value]],
    grid: object,
    block: object,
    outputs: Iterable[str] = (),
    inplace: Iterable[str] = (),
    rules: Iterable[str] = (),
    shared: object = 0,
    before: Iterable[Launch] = (),
    workspaces: Mapping[str, object] | None = None,
    default: Mapping[str, Value] | None = None,
    reference: Callable[..., object] | None = None,
    reduction: object = 1,
    flops: object = 0,
    inputs: Mapping[str, tuple[float, float]] | None = None,
    verify: Literal["each size", "once"] = "each size",
    db: str | os.PathLike[str] = DEFAULT_DB,
    **settings: object,
) -> Callable[[DeviceFunction], Tunable]:
    """Makes a kernel tunable.

    The function is a kernel as for `numba.cuda.jit`, without that decorator. Its keyword-only parameters are knobs. They
    are constants when Numba compiles it. `grid`, `block` and the other functions take, by name, any arguments of the kernel
    (arrays without numbers: `.shape`, `.size`, `.strides`, `.dtype`) and the knobs as `k`.

    Args:
        knobs: name -> its values, integers, booleans or strings. A knob that only `grid` or `block` reads need not be a
            parameter of the kernel.
        grid: blocks along x, y and z: a number, a tuple, or a function that returns one.
        block: threads of a block along x, y and z, in the same way.
        outputs: names of the arrays that the kernel fills. It must write every element.
        inplace: names of the arrays that it reads and changes, such as accumulators. While tuning they are restored before
            every launch.
        rules: expressions over knobs that must hold, e.g. "tile * tile <= 1024".
        shared: bytes of dynamic shared memory.
        before: kernels that run before this one, e.g. `[schedsearch.Launch(block_sums, grid=..., block=...)]`. A call takes
            the arguments of all kernels in the order in which they first occur.
        workspaces: array that one of the kernels writes and a later one reads -> (shape, dtype), or a function that returns
            them. Callers do not pass it.
        default: the author's own choice, for the knobs whose first value it is not.
        reference: computes the outputs (those of `outputs` and `inplace`, in the order of the parameters) from all other
            arguments and those of `inplace`, as NumPy arrays of float64 or int64. Without one, kernels are compared with the
            default configuration.
        reduction: how many numbers are added up for one element of an output; it bounds the allowed rounding errors.
        flops: floating-point operations of a launch; with 0 results are shown in GB/s.
        inputs: argument -> (lowest, highest) number to verify with; integers are also timed with them. By default floats are
            within +-4, and integers in the range of the arrays that `tune` gets.
        verify: whether a call with other sizes than those that were tuned verifies the kernel once for each size and
            process, or uses the verified machine code as it is.
        db: file of the records.
        settings: `cluster`, `blocks_per_sm`, `max_registers`, `min_blocks_per_sm`, `fastmath`: see `schedsearch.Launch`.

    Raises:
        UsageError: a knob, rule or name does not fit the function; the text says which, and what is allowed.

    Examples:
        >>> @schedsearch.tunable(
        ...     knobs={"threads": (128, 256, 512)}, block=lambda k: k.threads,
        ...     grid=lambda x, k: -(-x.size // k.threads), outputs=["y"], reference=lambda x: 2 * x)
        ... def double(x, y):
        ...     i = cuda.grid(1)
        ...     if i < x.size:
        ...         y[i] = 2 * x[i]
        >>> double.tune(x, y, trials=3)
        >>> double(x, y)
    """
    check_options(settings, tunable)
    for option, names in (("outputs", outputs), ("inplace", inplace)):
        if isinstance(names, str):
            raise UsageError(f"{option} is a list of names, got the string {names!r}; write {option}=[{names!r}]")
    if verify not in VERIFY:
        raise UsageError(f"verify is {verify!r}{did_you_mean(str(verify), VERIFY)}; allowed: {', '.join(VERIFY)}")
    if reference is not None and not callable(reference):
        raise UsageError(f"reference is {type_text(reference)}; give a function over NumPy arrays, or leave it out")
    for argument, given in (inputs or {}).items():
        if not _is_range(given):
            raise UsageError(f"inputs of {argument} is {given!r}; give the lowest and the highest number: (0, 1)")
    outputs, inplace = tuple(outputs), tuple(inplace)
    settings = {"grid": grid, "block": block, "shared": shared, **settings}

    def decorate(function: Callable[..., object]) -> Tunable:
        launched = {**jit_settings(function), **settings}
        made = formulation(function, launched, before, workspaces or {}, knobs, rules, default or {})
        name = plain_function(function).__qualname__.replace("<locals>.", "")
        check_names(name, made.arguments, [*outputs, *inplace], inplace, inputs or {})
        check_written(made, (*outputs, *inplace))
        for what, each in {"reduction": reduction, "flops": flops}.items():
            check_function(what, each, made.arguments)
        definition = Definition(
            name, code_of([made], reference), plain_function(function).__module__, made.arguments, (made,), reference,
            reduction, flops, dict(inputs or {}), verify == "once",
        )  # fmt: skip
        return Tunable(definition, outputs, inplace, db)

    return decorate


def _is_range(given: object) -> bool:
    return (
        isinstance(given, tuple | list)
        and len(given) == 2
        and all(isinstance(number, Real) for number in given)
        and bool(given[0] <= given[1])
    )


class Tunable(Called):
    """A kernel that can be tuned, called and bound. Arrays may be of torch, CuPy, Numba or NumPy, by place or by name.

    Attributes:
        definition: what the decorator was given.
    """

    def __init__(
        self,
        definition: Definition,
        outputs: tuple[str, ...],
        inplace: tuple[str, ...],
        db: str | os.PathLike[str],
    ) -> None:
        self.__name__ = self.__qualname__ = definition.name
        self.__doc__ = definition.formulations[0].launches[-1].function.__doc__
        self.__module__ = definition.module
        self._db = db
        self._outputs, self._inplace = outputs, inplace
        self._told: set[Workload] = set()  # untuned ones, which the user knows of
        self._define(definition)

    def _define(self, definition: Definition) -> None:
        self.definition = definition
        read = frozenset().union(*(names_read(each) for made in definition.formulations for each in made.functions))
        self._fixed = read & set(definition.parameters)
        register(definition)
        self._launches = self._make_launches()
        by_place = [inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in definition.parameters]
        self.__signature__ = inspect.Signature(by_place)  # for help() and editors; a call also takes stream=

    def alternative(
        self,
        *,
        knobs: Mapping[str, Sequence[Value]],
        grid: object,
        block: object,
        rules: Iterable[str] = (),
        shared: object = 0,
        before: Iterable[Launch] = (),
        workspaces: Mapping[str, object] | None = None,
        default: Mapping[str, Value] | None = None,
        **settings: object,
    ) -> Callable[[_Function], _Function]:
        """Adds another formulation of the same operator, which competes in the same budget.

        The knob `formulation` chooses one by the name of its function. Formulations may share knobs: each has its own values
        of them. The kernel takes the same arguments by the same names. Outputs, reference and rounding bound hold for all
        formulations. Records that were made without the alternative are not used.

        Args: as for `schedsearch.tunable`.

        Raises:
            UsageError: as `schedsearch.tunable`; or the name or the arguments do not fit.

        Examples:
            >>> @double.alternative(knobs={"each": (2, 4)}, block=256, grid=lambda x, k: -(-x.size // (256 * k.each)))
            ... def double_several(x, y, *, each):
            ...     for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
            ...         y[i] = 2 * x[i]
        """
        check_options(settings, Tunable.alternative)
        launched = {"grid": grid, "block": block, "shared": shared, **settings}

        def decorate(function: _Function) -> _Function:
            given = {**jit_settings(function), **launched}
            made = formulation(function, given, before, workspaces or {}, knobs, rules, default or {})
            known = self.definition
            if any(made.name == each.name for each in known.formulations):
                raise UsageError(f"{known.name} has a formulation {made.name!r} already; give the function another name")
            if FORMULATION in {*made.knobs, *known.knobs} and len(known.formulations) == 1:
                raise UsageError(f"a knob is named {FORMULATION!r}, as the one that chooses a formulation; rename it")
            if set(made.arguments) != set(known.parameters):
                raise UsageError(
                    f"{made.name} takes {', '.join(made.arguments)}; allowed: {', '.join(known.parameters)}, as "
                    f"{known.name} does; name what it does not share in workspaces="
                )
            check_written(made, (*self._outputs, *self._inplace))
            formulations = (*known.formulations, made)
            code = code_of(formulations, known.reference)
            self._launches.close()
            self._define(dataclasses.replace(known, code=code, formulations=formulations))
            return function

        return decorate

    @property
    def db(self) -> str | os.PathLike[str]:
        """File of the records."""
        return self._db

    @db.setter
    def db(self, path: str | os.PathLike[str]) -> None:
        self._launches.close()
        self._db = path
        self._launches = self._make_launches()

    def _make_launches(self) -> Launches:
        return Launches(self._db, self._read, self._workload, LEVELS, self._notice)

    @property
    def py_func(self) -> DeviceFunction:
        """The function that was decorated."""
        return self.definition.formulations[0].launches[-1].function

    def __call__(self, *args: Any, stream: Any = None, **named: Any) -> None:
        """Runs the kernel with the best record for these shapes and number formats, else with the configuration of the most
        similar record that is legal here, else with the default. A warning says once for each of them that they are not
        tuned. On a GPU a call only enqueues.

        Args:
            args, named: in the order of the function's parameters, or by name. All arrays are on one device, which the
                kernel runs on.
            stream: an integer handle, or a torch or CuPy stream; default: the library's current one.

        Raises:
            ArgumentError: an array or number is not possible, or an output overlaps another array.
            NoRecordError, WrongResultError: no configuration works; the text has the reasons.
        """
        self._launches.call(self._in_order(args, named) if named else args, stream)

    def bind(self, *args: object, **named: object) -> Step:
        """Packs the arguments once; the result, called with a stream, only launches. Raises the errors of a call."""
        return self._launches.bind(self._in_order(args, named))

    def tune(
        self,
        *args: Any,
        trials: int | None = None,
        time_s: float | None = None,
        db: str | os.PathLike[str] | None = None,
        target: str = "auto",
        restrict: Mapping[str, Sequence[Value]] | None = None,
        **options: Any,
    ) -> RunSummary:
        """Searches for fast configurations, and records everything that was measured.

        Args:
            args: as in a call, also by name; only shapes, strides and dtypes matter, and the range of integers. An array may
                be given as text, like "4096x4096:float32". Or one list of argument tuples, to tune several shapes.
            trials, time_s: the budget for each shape, or for all.
            db: file of the records; default: that of the decorator.
            target: auto (the device of the arrays, or any if there are only texts), cpu, cuda or cuda:N.
            restrict: knob -> the only values to try.
            options: as for `schedsearch.tune`, `progress` among them.

        Raises:
            ArgumentError: as in a call.
            NoValidConfigError: every trial failed; the text has the first reason, and where the kernel is.
            UsageError, DeviceError, DatabaseError, Interrupted: as `schedsearch.tune`.
        """
        args = self._in_order(args, {name: options.pop(name) for name in self.definition.parameters if name in options})
        several = len(args) == 1 and isinstance(args[0], list)
        calls = [tuple(each) for each in args[0]] if several else [args]
        given = [self._read(each) for each in calls]
        tasks = [self.task(*each, restrict=restrict) for each in calls]
        if target == "auto":
            devices = {each.view.device for seen in given for each in seen if each.view is not None}
            if len(devices) > 1:
                raise UsageError("the arrays are on several devices; move them to one, or give target=")
            for kind, ordinal in devices:
                target = "cpu" if kind == "cpu" else f"cuda:{ordinal}"
        path = self.db if db is None else db
        try:
            return tune(tasks, os.fspath(path), target=target, trials=trials, time_s=time_s, **options)
        except NoValidConfigError as error:
            raise NoValidConfigError(f"{error}. {self.__name__} is {self._place}", error.summary) from None
        finally:
            self._told.clear()
            self._launches.forget()

    @property
    def _place(self) -> str:
        code = self.py_func.__code__
        return f"in {code.co_filename}, line {code.co_firstlineno}"

    def _notice(self, kernel: Kernel) -> None:
        """Warns once that a kernel was not tuned for what it is called with."""
        workload = kernel.workload
        if kernel.level in ("exact", "same_architecture") or self.definition.verified_once or workload in self._told:
            return
        self._told.add(workload)
        config = ", ".join(f"{name}={value}" for name, value in kernel.config.items())
        what = "your own choice" if kernel.level == "default" else "the configuration of similar arrays"
        warn_user(
            f"{workload.label} is not tuned on this device and runs with {what} ({config}). {self.__name__}.tune(...) with "
            f"the same arguments finds its best configuration and keeps it in {os.fspath(self.db)}",
            UntunedWarning,
        )

    def _parameters(self) -> Sequence[str]:
        return self.definition.parameters

    def _knobs(self) -> Mapping[str, Sequence[Value]]:
        return self.definition.knobs

    def task(self, *args: Any, restrict: Mapping[str, Sequence[Value]] | None = None, **named: Any) -> Task:
        """What `tune` gives to `schedsearch.tune` for some arguments, for runs with tasks of several kernels."""
        args = self._in_order(args, named)
        given = self._read(args)
        self._note_numbers(args, given)
        return Task(self._workload(given), restrict=dict(restrict or {}))

    def workload(self, *args: Any, **named: Any) -> Workload:
        """The workload of a call: its shapes, strides, number formats and fixed scalars. Arrays may be strings."""
        return self._workload(self._read(self._in_order(args, named)))

    def explain(self, *args: object, target: str = "auto", **named: object) -> Explanation:
        """Which configuration a call would use, and why."""
        return explain(self.workload(*args, **named), self.db, target=target)

    def close(self) -> None:
        """Unloads the kernels; a later call loads them again."""
        self._launches.close()

    def _read(self, args: tuple[object, ...]) -> list[Given]:
        names = self.definition.parameters
        if len(args) != len(names):
            raise UsageError(f"{self.definition.name} takes {len(names)} arguments ({', '.join(names)}), got {len(args)}")
        return [read(name, value, self._role(name, value)) for name, value in zip(names, args)]

    def _role(self, name: str, value: object) -> Role:
        if name in self._outputs:
            return "out"
        if name in self._inplace:
            return "inout"
        if is_array(value):
            return "in"
        return "fixed" if name in self._fixed else "scalar"

    def _workload(self, given: Sequence[Given]) -> Workload:
        self._look_again()
        by = "default" if self.definition.reference is None else "reference"
        arguments = [each.argument for each in given]
        return Workload("own_kernel", parameters_of(self.definition.name, self.definition.code, arguments, by))

    def _look_again(self) -> None:
        """Takes the identity of what would be built now: captured values may have changed."""
        known = self.definition
        code = code_of(known.formulations, known.reference)
        if code != known.code:
            self.definition = dataclasses.replace(known, code=code)
            register(self.definition)

    def _note_numbers(self, args: Sequence[object], given: Sequence[Given]) -> None:
        """Remembers the scalars and the ranges of integers that verification and timing use."""
        for value, each in zip(args, given):
            argument = each.argument
            if argument.role == "scalar":
                self.definition.scalars[argument.name] = each.value
            elif argument.role == "in" and each.view is not None and not dtype_of(argument.dtype).is_float:
                found = integer_range(value)
                self.definition.measured.update({} if found is None else {argument.name: found})

    def __repr__(self) -> str:
        return f"<tunable {self.definition.name}, knobs {', '.join(self.definition.knobs)}>"
