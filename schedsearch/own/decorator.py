"""`schedsearch.tunable`: a plain Numba-CUDA function, with knobs as keyword-only parameters, becomes a tunable kernel."""

from __future__ import annotations

import ast
import inspect
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

import numpy as np

from schedsearch.backend.code_identity import code_digest, names_read
from schedsearch.errors import UsageError, did_you_mean
from schedsearch.measurement import DEFAULT_DB
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.own_kernel import AFTER, Role, parameters_of
from schedsearch.own.arguments import Given, integer_range, is_array, read
from schedsearch.own.calls import BoundCall, Launches
from schedsearch.runtime.deploy import explain
from schedsearch.runtime.explain import Explanation
from schedsearch.runtime.ladder import RUNGS
from schedsearch.session.summary import RunSummary
from schedsearch.session.tune import tune
from schedsearch.space import Knob
from schedsearch.task import Task
from schedsearch.templates.own_kernel.definition import Definition, register
from schedsearch.templates.own_kernel.rules import predicate
from schedsearch.workload import Workload


def tunable(
    *,
    knobs: Mapping[str, Sequence[int | bool]],
    grid: Any,
    block: Any,
    outputs: Iterable[str] = (),
    inplace: Iterable[str] = (),
    rules: Iterable[str] = (),
    shared: Any = 0,
    default: Mapping[str, int | bool] | None = None,
    reference: Callable[..., Any] | None = None,
    reduction: Any = 1,
    flops: Any = 0,
    inputs: Mapping[str, tuple[float, float]] | None = None,
    db: str | os.PathLike[str] = DEFAULT_DB,
) -> Callable[[Callable[..., Any]], Tunable]:
    """Makes a kernel tunable.

    The function is a kernel as for `numba.cuda.jit`, without that decorator. Its keyword-only parameters are knobs. They
    are constants when Numba compiles it. `grid`, `block` and the other functions take, by name, any arguments of the kernel
    (arrays without numbers: `.shape`, `.size`, `.strides`, `.dtype`) and the knobs as `k`.

    Args:
        knobs: name -> its values, whole numbers or booleans. A knob that only `grid` or `block` reads need not be a
            parameter of the kernel.
        grid: blocks along x, y and z: a number, a tuple, or a function that returns one.
        block: threads of a block along x, y and z, in the same way.
        outputs: names of the arrays that the kernel fills. It must write every element.
        inplace: names of the arrays that it reads and changes, such as accumulators. While tuning they are restored before
            every launch.
        rules: expressions over knobs that must hold, e.g. "tile * tile <= 1024".
        shared: bytes of dynamic shared memory.
        default: the author's own choice, for the knobs whose first value it is not.
        reference: computes the outputs (those of `outputs` and `inplace`, in the order of the parameters) from all other
            arguments and those of `inplace`, as NumPy arrays of float64 or int64. Without one, kernels are compared with the
            default configuration.
        reduction: how many numbers are added up for one element of an output; it bounds the allowed rounding errors.
        flops: floating-point operations of a launch; with 0 results are shown in GB/s.
        inputs: argument -> (lowest, highest) number to verify with; integers are also timed with them. By default floats are
            within +-4, and integers in the range of the arrays that `tune` gets.
        db: file of the records.

    Raises:
        UsageError: a knob, rule or name does not fit the function; the text says which, and what is allowed.

    Example:
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
    if isinstance(outputs, str) or isinstance(inplace, str) or isinstance(rules, str):
        raise UsageError("outputs, inplace and rules are lists of names or rules, got one text; write outputs=['c']")
    outputs, inplace, rules = tuple(outputs), tuple(inplace), tuple(rules)
    if not isinstance(knobs, Mapping) or not all(isinstance(given, Iterable) for given in knobs.values()):
        raise UsageError(f"knobs is a mapping of lists, got {knobs!r}; write knobs={{'tile': (8, 16)}}")
    if wrong := [rule for rule in rules if not isinstance(rule, str)]:
        raise UsageError(f"a rule is a text over the knobs, got a {type(wrong[0]).__name__}; write 'tile * tile <= 1024'")

    def decorate(function: Callable[..., Any]) -> Tunable:
        plain = getattr(function, "py_func", function)
        if not isinstance(plain, FunctionType):
            raise UsageError(f"a tunable is a Python function, got a {type(function).__name__}")
        parameters, kernel_knobs = _parameters(plain)
        name = plain.__qualname__.replace("<locals>.", "")
        values = {knob: tuple(given) for knob, given in knobs.items()}
        first = {knob: given[0] for knob, given in values.items() if given}
        launch = {"grid": grid, "block": block, "shared": shared}
        functions = [each for each in launch.values() if callable(each)]
        constants = [each for each in launch.values() if not callable(each)]
        written = [*outputs, *inplace]
        _check_knobs(name, plain, kernel_knobs, values, functions)
        _check_default(name, first, values, default or {})
        _check_names(name, parameters, written, inplace, inputs or {})
        for what, each in {**launch, "reduction": reduction, "flops": flops}.items():
            _check_function(what, each, (*parameters, "k"))
        for rule in rules:
            predicate(rule, tuple(values))
        unnamed = sorted(written_arguments(plain) - {*written, *kernel_knobs})
        if unnamed:
            raise UsageError(f"{name} writes {', '.join(unnamed)}; name it in outputs=, or in inplace= if it is also read")
        code = code_digest([plain, *functions, lambda: constants], [reference])
        definition = Definition(
            name, code, plain, parameters, kernel_knobs, values, rules, grid, block, shared,
            {**first, **(default or {})}, reference, reduction, flops, dict(inputs or {}),
        )  # fmt: skip
        made = Tunable(definition, outputs, inplace, db)
        if problem := made.default_problem():
            raise UsageError(problem)
        register(definition)
        return made

    return decorate


class Tunable:
    """A kernel that can be tuned, called and bound. Arrays may be of torch, CuPy, Numba or NumPy.

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
        self.definition = definition
        self.__name__ = self.__qualname__ = definition.name
        self.__doc__ = definition.function.__doc__
        self.__module__ = definition.function.__module__
        self._db = db
        self._outputs, self._inplace = outputs, inplace
        fixed: set[str] = set()
        for each in (definition.grid, definition.block, definition.shared):
            fixed |= names_read(each) if callable(each) else frozenset()
        self._fixed = fixed & set(definition.parameters)
        self._launches = Launches(db, self._read, self._workload, RUNGS)

    @property
    def db(self) -> str | os.PathLike[str]:
        """File of the records."""
        return self._db

    @db.setter
    def db(self, path: str | os.PathLike[str]) -> None:
        self._launches.close()
        self._db = path
        self._launches = Launches(path, self._read, self._workload, RUNGS)

    def __call__(self, *args: Any, stream: Any = None) -> None:
        """Runs the kernel with the best record for these shapes and number formats, else with the configuration of the most
        similar record that is legal here, else with the default. On a GPU a call only enqueues.

        Args:
            args: in the order of the function's parameters. All arrays are on one device, which the kernel runs on.
            stream: an integer handle, or a torch or CuPy stream; default: the library's current one.

        Raises:
            ArgumentError: an array or number is not possible, or an output overlaps another array.
            NoRecordError, WrongResultError: no configuration works; the text has the reasons.
        """
        self._launches.call(args, stream)

    def bind(self, *args: Any) -> BoundCall:
        """Packs the arguments once; the result, called with a stream, only launches. Raises the errors of a call."""
        return self._launches.bind(args)

    def tune(
        self,
        *args: Any,
        trials: int | None = None,
        time_s: float | None = None,
        db: str | os.PathLike[str] | None = None,
        target: str = "auto",
        restrict: Mapping[str, Sequence[int | bool]] | None = None,
        **options: Any,
    ) -> RunSummary:
        """Searches for fast configurations, and records everything that was measured.

        Args:
            args: as in a call; only shapes, strides and number formats matter, and the range of integers. An array may be
                given as text, like "4096x4096:float32". Or one list of argument tuples, to tune several shapes.
            trials, time_s: the budget for each shape, or for all.
            db: file of the records; default: that of the decorator.
            target: auto (the device of the arrays, or any if there are only texts), cpu, cuda or cuda:N.
            restrict: knob -> the only values to try.
            options: as for `schedsearch.tune`.

        Raises:
            ArgumentError: as in a call.
            UsageError, DeviceError, DatabaseError, Interrupted: as `schedsearch.tune`.
        """
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
        finally:
            self._launches.forget()

    def task(self, *args: Any, restrict: Mapping[str, Sequence[int | bool]] | None = None) -> Task:
        """What `tune` gives to `schedsearch.tune` for some arguments, for runs with tasks of several kernels."""
        given = self._read(args)
        self._note_numbers(args, given)
        return Task(self._workload(given), restrict=dict(restrict or {}))

    def workload(self, *args: Any) -> Workload:
        """The workload of a call: its shapes, strides, number formats and fixed scalars. Arrays may be texts."""
        return self._workload(self._read(args))

    def explain(self, *args: Any, target: str = "auto") -> Explanation:
        """Which configuration a call would use, and why."""
        return explain(self.workload(*args), self.db, target=target)

    def close(self) -> None:
        """Unloads the kernels; a later call loads them again."""
        self._launches.close()

    def default_problem(self) -> str:
        """Why the default configuration breaks a rule; empty if it does not."""
        columns = {name: np.array([value]) for name, value in self.definition.default.items()}
        for rule in self.definition.rules:
            if not np.all(predicate(rule, tuple(columns))(columns)):
                return (
                    f"the default configuration {dict(self.definition.default)} of {self.definition.name} breaks the rule "
                    f"{rule!r}; give default={{...}}"
                )
        return ""

    def _read(self, args: tuple[Any, ...]) -> list[Given]:
        names = self.definition.parameters
        if len(args) != len(names):
            raise UsageError(f"{self.definition.name} takes {len(names)} arguments ({', '.join(names)}), got {len(args)}")
        return [read(name, value, self._role(name, value)) for name, value in zip(names, args)]

    def _role(self, name: str, value: Any) -> Role:
        if name in self._outputs:
            return "out"
        if name in self._inplace:
            return "inout"
        if is_array(value):
            return "in"
        return "fixed" if name in self._fixed else "scalar"

    def _workload(self, given: Sequence[Given]) -> Workload:
        by = "default" if self.definition.reference is None else "reference"
        arguments = [each.argument for each in given]
        return Workload("own_kernel", parameters_of(self.definition.name, self.definition.code, arguments, by))

    def _note_numbers(self, args: Sequence[Any], given: Sequence[Given]) -> None:
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


def _parameters(function: FunctionType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the positional and of the keyword-only parameters."""
    positional, knobs = [], []
    for name, each in inspect.signature(function).parameters.items():
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            raise UsageError(f"{function.__qualname__} takes *{name}; a tunable names every parameter")
        if each.kind is each.KEYWORD_ONLY:
            knobs.append(name)
        elif each.default is not each.empty:
            raise UsageError(
                f"{name} of {function.__qualname__} has a default; a tunable takes every argument from the caller"
            )
        else:
            positional.append(name)
    if not positional:
        raise UsageError(f"{function.__qualname__} has no arguments; a kernel takes arrays")
    return tuple(positional), tuple(knobs)


def _check_knobs(
    name: str,
    function: FunctionType,
    kernel_knobs: tuple[str, ...],
    knobs: Mapping[str, tuple[Any, ...]],
    functions: Sequence[Callable[..., Any]],
) -> None:
    if not knobs:
        raise UsageError(f"{name} has no knobs; give knobs={{'threads': (128, 256)}}")
    for knob, values in knobs.items():
        Knob(knob, values)
        if any(isinstance(value, str) for value in values):
            raise UsageError(f"knob {knob!r} of {name} has text among its values; allowed: whole numbers and booleans")
    for knob in kernel_knobs:
        if knob not in knobs:
            raise UsageError(
                f"{name} has the keyword-only parameter {knob!r}, which is not a knob{did_you_mean(knob, list(knobs))}; "
                "give knobs its values, or put it before the *"
            )
    read_by_kernel = names_read(function)
    read_outside = frozenset().union(*(names_read(each) for each in functions))
    for knob in knobs:
        if knob not in kernel_knobs and knob not in read_outside:
            hint = did_you_mean(knob, [*kernel_knobs, *read_outside])
            raise UsageError(
                f"knob {knob!r} is neither a keyword-only parameter of {name} nor read by grid, block or shared{hint}; "
                "remove it, or add it to the parameters after the *"
            )
        if knob in kernel_knobs and knob not in read_by_kernel and knob not in read_outside:
            raise UsageError(f"knob {knob!r} is not used by {name}, nor by grid, block or shared; remove it")


def _check_default(
    name: str, first: Mapping[str, Any], knobs: Mapping[str, tuple[Any, ...]], default: Mapping[str, Any]
) -> None:
    for knob, value in default.items():
        if knob not in knobs:
            raise UsageError(
                f"default of {name} names {knob!r}{did_you_mean(knob, list(knobs))}; the knobs are {', '.join(knobs)}"
            )
        if value not in knobs[knob]:
            raise UsageError(f"default of {name} has {knob}={value!r}; allowed: {', '.join(map(str, knobs[knob]))}")


def _check_names(
    name: str, parameters: tuple[str, ...], written: Sequence[str], inplace: Iterable[str], inputs: Mapping[str, Any]
) -> None:
    for each in (*written, *inputs):
        if each not in parameters:
            raise UsageError(
                f"{name} has no argument {each!r}{did_you_mean(each, parameters)}; it takes {', '.join(parameters)}"
            )
    if not written:
        raise UsageError(f"{name} names no outputs; give outputs=[...], or inplace=[...] for arrays that it updates")
    if twice := sorted({each for each in written if list(written).count(each) > 1}):
        raise UsageError(f"{twice[0]!r} of {name} is named twice; an argument is either an output or in place")
    for each in inplace:
        if each + AFTER in parameters:
            raise UsageError(f"{name} has arguments {each!r} and {each + AFTER!r}; rename the second")


def _check_function(what: str, given: Any, allowed: tuple[str, ...]) -> None:
    if not callable(given):
        return
    for parameter in inspect.signature(given).parameters.values():
        if parameter.name not in allowed:
            hint = did_you_mean(parameter.name, list(allowed))
            raise UsageError(f"{what} takes {parameter.name!r}{hint}; allowed: {', '.join(allowed)} (k holds the knobs)")


def written_arguments(function: FunctionType) -> set[str]:
    """Parameters that the function assigns elements of, as far as its source shows; empty without a source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return set()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            found.add(node.value.id)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("cuda.atomic.") and node.args:
            found |= {node.args[0].id} if isinstance(node.args[0], ast.Name) else set()
    return found & set(inspect.signature(function).parameters)
