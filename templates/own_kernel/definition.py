"""What a user says about a tunable kernel: its formulations, knobs, rules, workspaces and reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from schedsearch.backend.code_identity import code_digest
from schedsearch.backend.shipping import pack, unpack
from schedsearch.errors import UsageError
from schedsearch.ops.own_kernel import OWN_KERNEL, Hints, OwnKernelParams, arguments_of
from schedsearch.space import Columns, Constraint, Knob
from schedsearch.templates.own_kernel.launches import (
    ArrayShape,
    Extents,
    Knobs,
    Launch,
    evaluate,
    shapes_of,
    workspace_shape,
)
from schedsearch.templates.own_kernel.rules import predicate
from schedsearch.workload import Workload

ROUNDOFFS = 16  # that every kernel may have, beside one for each addend
FORMULATION = "formulation"  # the knob that chooses one, if there are several

Value: TypeAlias = int | str | bool


@dataclass(frozen=True)
class Formulation:
    """One way to compute the outputs: kernels in a row, with knobs of their own.

    Attributes:
        name: of the function that was decorated.
        launches: in the order in which they run.
        workspaces: array between the launches -> (shape, dtype), or a function that returns them.
        default: the author's own choice.
    """

    name: str
    launches: tuple[Launch, ...]
    workspaces: Mapping[str, Any]
    knobs: Mapping[str, tuple[Value, ...]]
    rules: tuple[str, ...]
    default: Mapping[str, Value]

    @property
    def arguments(self) -> tuple[str, ...]:
        """What a caller gives: the parameters of all launches in the order in which they first occur."""
        names = dict.fromkeys(name for launch in self.launches for name in launch.parameters)
        return tuple(name for name in names if name not in self.workspaces)

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """The functions that decide how it is launched."""
        found = [each for launch in self.launches for each in launch.functions]
        return found + [each for each in self.workspaces.values() if callable(each)]


@dataclass(frozen=True)
class Planned:
    """One configuration for one workload: each launch with its extents, and the shapes of the workspaces."""

    launches: tuple[tuple[Launch, Extents], ...]
    workspaces: Mapping[str, ArrayShape]


@dataclass(frozen=True)
class Definition:
    """A tunable kernel. `schedsearch.tunable` explains the fields and checks them.

    Attributes:
        code: digest of everything that decides what the kernel computes and how it is launched.
        parameters: names of the arguments of a call, in order.
        formulations: that compete; the first is the author's own.
        module: that defines it.
        verified_once: whether machine code that was verified for one size serves others unverified.
        scalars: scalar -> value for verification and timing, of the last call of `tune`.
        measured: argument -> (lowest, highest) number of the last call of `tune`, for integers.
    """

    name: str
    code: str
    module: str
    parameters: tuple[str, ...]
    formulations: tuple[Formulation, ...]
    reference: Callable[..., Any] | None
    reduction: Any
    flops: Any
    inputs: Mapping[str, tuple[float, float]]
    verified_once: bool = False
    scalars: dict[str, float] = field(default_factory=dict)
    measured: dict[str, tuple[float, float]] = field(default_factory=dict)

    @functools.cached_property
    def knobs(self) -> Mapping[str, tuple[Value, ...]]:
        """The knobs of all formulations, with the values of all, and before them the one that chooses a formulation."""
        found: dict[str, tuple[Value, ...]] = {}
        if len(self.formulations) > 1:
            found[FORMULATION] = tuple(each.name for each in self.formulations)
        for each in self.formulations:
            for name, values in each.knobs.items():
                found[name] = tuple(dict.fromkeys((*found.get(name, ()), *values)))
        return found

    @functools.cached_property
    def default(self) -> Mapping[str, Value]:
        """The author's own choice: the first formulation with its default."""
        return self.completed(self.formulations[0], self.formulations[0].default)

    def completed(self, formulation: Formulation, values: Mapping[str, Value]) -> dict[str, Value]:
        """A configuration: values of a formulation's knobs, and the first value of every knob that it lacks."""
        chosen: dict[str, Value] = {FORMULATION: formulation.name} if len(self.formulations) > 1 else {}
        return {name: chosen.get(name, values.get(name, known[0])) for name, known in self.knobs.items()}

    def formulation(self, config: Mapping[str, Any]) -> Formulation:
        if len(self.formulations) == 1:
            return self.formulations[0]
        return next(each for each in self.formulations if each.name == config[FORMULATION])

    def plan(self, workload: Workload[OwnKernelParams], config: Mapping[str, Any]) -> Planned:
        """What a configuration launches.

        Raises:
            UsageError: a function of the definition raised, or returned something that cannot be launched.
        """
        formulation, known = self.formulation(config), shapes_of(arguments_of(workload.params))
        workspaces = {
            name: workspace_shape(name, evaluate(f"workspace {name}", given, known, Knobs(**config)))
            for name, given in formulation.workspaces.items()
        }
        known = {**known, **workspaces}
        return Planned(tuple((each, each.extents(known, config)) for each in formulation.launches), workspaces)

    def constraints(self) -> list[Constraint]:
        """The user's rules, and for several formulations which values each of them has."""
        found = []
        for each in self.formulations:
            holds = self._where(each)
            found += [Constraint(rule, holds(predicate(rule, tuple(each.knobs)))) for rule in each.rules]
            for name, values in self.knobs.items():
                own = tuple(Knob(name, each.knobs[name]).values) if name in each.knobs else (values[0],)
                if name != FORMULATION and set(own) != set(values):
                    what = "has" if name in each.knobs else "does not use"
                    found.append(Constraint(f"{each.name} {what} {name} ({own[0]} ...)", holds(_among(name, own))))
        return found

    def _where(self, formulation: Formulation) -> Callable[[Callable[[Columns], Any]], Callable[[Columns], Any]]:
        """Limits a predicate to the configurations of one formulation."""
        if len(self.formulations) == 1:
            return lambda holds: holds
        return lambda holds: lambda columns: (columns[FORMULATION] != formulation.name) | holds(columns)

    def hints(self, params: OwnKernelParams) -> Hints:
        """What the definition knows about a workload, given by its parameters."""
        known = {**shapes_of(arguments_of(params)), **self.scalars}
        reduction = evaluate("reduction", self.reduction, known)
        flops = evaluate("flops", self.flops, known)
        return Hints(int(flops), ROUNDOFFS + int(reduction), {**self.measured, **self.inputs}, self.scalars)


def _among(name: str, allowed: tuple[Value, ...]) -> Callable[[Columns], Any]:
    return lambda columns: np.isin(columns[name], np.array(allowed))


def code_of(formulations: Sequence[Formulation], reference: Callable[..., Any] | None) -> str:
    """Digest of everything that decides what some formulations compute, and how they are launched, as it is now.

    Raises:
        UsageError: a kernel captures a value whose changes cannot be noticed.
    """
    exact: list[Any] = []
    for each in formulations:
        for launch in each.launches:
            always = {"grid": launch.grid, "block": launch.block, "shared": launch.shared}
            exact += [launch.function, list({**always, **launch.changed_settings}.items())]
        exact.append(list(each.workspaces.items()))
    return code_digest(exact, [reference])


DEFINITIONS: dict[str, Definition] = {}


def register(definition: Definition) -> None:
    """Makes a definition known in this process, and to the processes that workloads of it are sent to."""
    DEFINITIONS[definition.code] = definition
    OWN_KERNEL.sources[definition.code] = lambda: _packed(definition)


def _packed(definition: Definition) -> bytes:
    """Raises UsageError if a captured value changed since `definition` got its digest."""
    if code_of(definition.formulations, definition.reference) != definition.code:
        raise UsageError(
            f"a value that {definition.name} captures changed after its task was made; make the task again, or call "
            f"{definition.name}.tune"
        )
    return pack(definition, (definition.module,))


def _unpacked(data: bytes, code: str) -> Definition:
    """A definition of another process. Modules are imported here anew, and may hold other values than there.

    Raises:
        UsageError: they do.
    """
    definition: Definition = unpack(data)
    if code_of(definition.formulations, definition.reference) != code:
        raise UsageError(
            f"{definition.name} uses values of modules that were changed after their import, and a process that compiles "
            f"it gets those of the files; change the files, or pass the values as arguments, or by globals of "
            f"{definition.module}"
        )
    return definition


def find(code: str) -> Definition | None:
    """The definition with this digest, if this process made or received it."""
    received = OWN_KERNEL.received.pop(code, None)
    if received is not None and code not in OWN_KERNEL.sources:
        DEFINITIONS[code] = _unpacked(received, code)
        OWN_KERNEL.sources[code] = lambda: received
    return DEFINITIONS.get(code)


def definition_of(workload: Workload[OwnKernelParams]) -> Definition:
    """Raises UsageError if this process does not know the kernel's source."""
    found = find(workload.params.code)
    if found is None:
        raise UsageError(unknown(workload))
    return found


def unknown(workload: Workload[OwnKernelParams]) -> str:
    return (
        f"the source of {workload.params.kernel} (code {workload.params.code}) is not known in this process; import "
        "the module that "
        "defines it. If it was edited since, tune it again"
    )


def _hints(params: OwnKernelParams) -> Hints:
    found = find(params["code"])
    return Hints() if found is None else found.hints(params)


OWN_KERNEL.hints = _hints
