"""What a user says about a kernel: its function, knobs, rules, launch and roles of arguments."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np

from schedsearch.backend.shipping import pack, unpack
from schedsearch.errors import UsageError
from schedsearch.launch import MAX_BLOCK_THREADS, MAX_GRID_X
from schedsearch.launch_rules import MAX_BLOCK_Z, MAX_GRID_YZ
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.own_kernel import OWN_KERNEL, Argument, Hints, arguments_of
from schedsearch.workload import Workload

ROUNDOFFS = 16  # that every kernel may have, beside one for each addend


@dataclass(frozen=True)
class ArrayShape:
    """What `grid` and the like see of an array: everything but the numbers. Strides are in bytes, as NumPy's."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]


@dataclass(frozen=True)
class Definition:
    """A tunable kernel. `schedsearch.tunable` explains the fields and checks them.

    Attributes:
        code: digest of everything that decides what the kernel computes and how it is launched.
        parameters: names of the positional parameters, in order.
        kernel_knobs: names of the keyword-only parameters, in order.
        scalars: scalar -> value for verification and timing, of the last call of `tune`.
        measured: argument -> (lowest, highest) number of the last call of `tune`, for integers.
    """

    name: str
    code: str
    function: FunctionType
    parameters: tuple[str, ...]
    kernel_knobs: tuple[str, ...]
    knobs: Mapping[str, tuple[int | bool, ...]]
    rules: tuple[str, ...]
    grid: Any
    block: Any
    shared: Any
    default: Mapping[str, int | bool]
    reference: Callable[..., Any] | None
    reduction: Any
    flops: Any
    inputs: Mapping[str, tuple[float, float]]
    scalars: dict[str, float] = field(default_factory=dict)
    measured: dict[str, tuple[float, float]] = field(default_factory=dict)

    @functools.cached_property
    def positional(self) -> FunctionType:
        """The function with its keyword-only parameters made positional: they follow the others in `co_varnames`."""
        code = self.function.__code__
        code = code.replace(co_argcount=code.co_argcount + code.co_kwonlyargcount, co_kwonlyargcount=0)
        return FunctionType(code, self.function.__globals__, self.function.__name__, None, self.function.__closure__)

    def launch(
        self, workload: Workload, config: Mapping[str, Any]
    ) -> tuple[tuple[int, int, int], tuple[int, int, int], int]:
        """Extents of grid and block, and bytes of dynamic shared memory.

        Raises:
            UsageError: a function of the definition raised, or returned something that cannot be launched.
        """
        known = values_of(workload)
        k = SimpleNamespace(**config)
        grid = _extents("grid", self.name, _evaluate("grid", self.grid, known, k), (MAX_GRID_X, MAX_GRID_YZ, MAX_GRID_YZ))
        limits = (MAX_BLOCK_THREADS, MAX_BLOCK_THREADS, MAX_BLOCK_Z)
        block = _extents("block", self.name, _evaluate("block", self.block, known, k), limits)
        if math.prod(block) > MAX_BLOCK_THREADS:
            raise UsageError(f"block of {self.name} has {math.prod(block)} threads; allowed: up to {MAX_BLOCK_THREADS}")
        shared = _evaluate("shared", self.shared, known, k)
        if type(shared) is not int or shared < 0:
            raise UsageError(f"shared of {self.name} returned {shared!r}; allowed: a number of bytes")
        return grid, block, shared

    def hints(self, params: Mapping[str, Any]) -> Hints:
        """What the definition knows about a workload, given by its parameters."""
        known = {**_values(arguments_of(params)), **self.scalars}
        reduction = _evaluate("reduction", self.reduction, known)
        flops = _evaluate("flops", self.flops, known)
        return Hints(int(flops), ROUNDOFFS + int(reduction), {**self.measured, **self.inputs}, self.scalars)


DEFINITIONS: dict[str, Definition] = {}


def register(definition: Definition) -> None:
    """Makes a definition known in this process, and to the processes that workloads of it are sent to."""
    DEFINITIONS[definition.code] = definition
    OWN_KERNEL.sources[definition.code] = lambda: pack(definition, (definition.function.__module__,))


def find(code: str) -> Definition | None:
    """The definition with this digest, if this process made or received it."""
    received = OWN_KERNEL.received.pop(code, None)
    if received is not None and code not in OWN_KERNEL.sources:
        DEFINITIONS[code] = unpack(received)
        OWN_KERNEL.sources[code] = lambda: received
    return DEFINITIONS.get(code)


def definition_of(workload: Workload) -> Definition:
    """Raises UsageError if this process does not know the kernel's source."""
    found = find(workload.code)
    if found is None:
        raise UsageError(unknown(workload))
    return found


def unknown(workload: Workload) -> str:
    return (
        f"the source of {workload.kernel} (code {workload.code}) is not known in this process; import the module that "
        "defines it. If it was edited since, tune it again"
    )


def _hints(params: Mapping[str, Any]) -> Hints:
    found = find(params["code"])
    return Hints() if found is None else found.hints(params)


OWN_KERNEL.hints = _hints


def values_of(workload: Workload) -> dict[str, Any]:
    """What `grid` and the like may take by name: arrays without numbers, and the fixed scalars."""
    return _values(arguments_of(workload.params))


def _values(arguments: Sequence[Argument]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in arguments:
        if each.is_array:
            itemsize = dtype_of(each.dtype).nbytes
            found[each.name] = ArrayShape(each.shape, tuple(itemsize * stride for stride in each.strides), each.dtype)
        else:
            found[each.name] = each.value if each.role == "fixed" else None
    return found


def _evaluate(what: str, given: Any, known: Mapping[str, Any], k: Any = None) -> Any:
    """A constant, or the result of a function of some arguments, by name, and of the knobs `k`."""
    if not callable(given):
        return given
    names = inspect.signature(given).parameters
    try:
        return given(**{name: k if name == "k" else known[name] for name in names})
    except Exception as error:  # the user's own code
        raise UsageError(f"{what} raised {type(error).__name__}: {error}") from error


def _extents(what: str, name: str, given: Any, limits: tuple[int, int, int]) -> tuple[int, int, int]:
    extents = tuple(given) if isinstance(given, tuple | list) else (given,)
    extents = tuple(int(each) if isinstance(each, np.integer) else each for each in extents)
    if not 1 <= len(extents) <= 3 or any(type(each) is not int for each in extents):
        raise UsageError(f"{what} of {name} returned {given!r}; allowed: one to three whole numbers")
    extents = (*extents, 1, 1)[:3]
    for axis, extent, limit in zip("xyz", extents, limits):
        if not 1 <= extent <= limit:
            remedy = ""
            if what == "grid" and axis != "x" and extent > limit:
                remedy = f"; fold it: launch along x, and compute {axis} = cuda.blockIdx.x // blocks_of_x in the kernel"
            raise UsageError(f"{what} of {name} is {extent} along {axis}; allowed: 1 to {limit}{remedy}")
    return extents[0], extents[1], extents[2]
