"""How a user launches a kernel: grid, block and limits, as constants or as functions of the arguments and the knobs."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import FunctionType, SimpleNamespace
from typing import Any, NoReturn

import numpy as np

from schedsearch.errors import UsageError, did_you_mean
from schedsearch.launch import MAX_BLOCK_THREADS, MAX_GRID_X
from schedsearch.launch_rules import MAX_BLOCK_Z, MAX_BLOCKS_PER_SM, MAX_CLUSTER, MAX_GRID_YZ
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.own_kernel import Argument, contiguous

MAX_REGISTERS = 255


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


class Knobs(SimpleNamespace):
    """The values of the knobs, by attribute."""

    def __getattr__(self, name: str) -> NoReturn:
        known = vars(self)
        raise AttributeError(f"there is no knob {name!r}{did_you_mean(name, list(known))}; the knobs are {', '.join(known)}")


@dataclass(frozen=True)
class Launch:
    """One kernel, and how it is launched. Each field but the first is a constant or a function, by name, of any arguments
    and workspaces of the tunable (arrays without numbers) and of the knobs `k`.

    Attributes:
        function: as for `schedsearch.tunable`.
        grid: blocks along x, y and z: a number or a tuple.
        block: threads of a block along x, y and z: a number or a tuple.
        shared: bytes of dynamic shared memory.
        cluster: blocks of a thread block cluster, along x; the grid must be a multiple of it. Needs sm_90 or newer.
        blocks_per_sm: makes the grid persistent: at most this many blocks for each multiprocessor of the card. The kernel
            then loops over `grid` blocks of work in steps of `cuda.gridDim.x`. 0: no limit.
        max_registers: of a thread; 0: as many as the compiler takes.
        min_blocks_per_sm: that the compiler leaves registers for.
        fastmath: computes with approximate division and square root, and without denormal numbers.
    """

    function: FunctionType
    grid: Any
    block: Any
    shared: Any = 0
    cluster: Any = 1
    blocks_per_sm: Any = 0
    max_registers: Any = 0
    min_blocks_per_sm: Any = 1
    fastmath: Any = False

    @property
    def settings(self) -> dict[str, Any]:
        """Everything but the function."""
        return {each.name: getattr(self, each.name) for each in fields(self)[1:]}

    @property
    def changed_settings(self) -> dict[str, Any]:
        """The settings that are not at their default, without grid, block and shared."""
        return {each.name: value for each in fields(self)[4:] if (value := getattr(self, each.name)) is not each.default}

    @property
    def functions(self) -> list[Callable[..., Any]]:
        return [each for each in self.settings.values() if callable(each)]

    @functools.cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the positional parameters, in order."""
        code = self.function.__code__
        return code.co_varnames[: code.co_argcount]

    @functools.cached_property
    def knobs(self) -> tuple[str, ...]:
        """Names of the keyword-only parameters, in order."""
        code = self.function.__code__
        return code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]

    @functools.cached_property
    def positional(self) -> FunctionType:
        """The function with its keyword-only parameters made positional: they follow the others in `co_varnames`."""
        code = self.function.__code__
        code = code.replace(co_argcount=code.co_argcount + code.co_kwonlyargcount, co_kwonlyargcount=0)
        return FunctionType(code, self.function.__globals__, self.function.__name__, None, self.function.__closure__)

    def extents(self, known: Mapping[str, Any], config: Mapping[str, Any]) -> Extents:
        """The launch for some arguments and knobs.

        Raises:
            UsageError: a function raised, or returned something that cannot be launched.
        """
        k, name = Knobs(**config), self.function.__name__
        given = {what: evaluate(what, value, known, k) for what, value in self.settings.items()}
        grid = _extents("grid", name, given["grid"], (MAX_GRID_X, MAX_GRID_YZ, MAX_GRID_YZ))
        block = _extents("block", name, given["block"], (MAX_BLOCK_THREADS, MAX_BLOCK_THREADS, MAX_BLOCK_Z))
        if math.prod(block) > MAX_BLOCK_THREADS:
            raise UsageError(f"block of {name} has {math.prod(block)} threads; allowed: up to {MAX_BLOCK_THREADS}")
        if type(given["shared"]) is not int or given["shared"] < 0:
            raise UsageError(f"shared of {name} returned {given['shared']!r}; allowed: a number of bytes")
        found = Extents(grid, block, **{what: value for what, value in given.items() if what not in ("grid", "block")})
        limits = {"cluster": (1, MAX_CLUSTER), "blocks_per_sm": (0, MAX_BLOCKS_PER_SM), "max_registers": (0, MAX_REGISTERS),
                  "min_blocks_per_sm": (1, MAX_BLOCKS_PER_SM)}  # fmt: skip
        for what, (low, high) in limits.items():
            if type(given[what]) is not int or not low <= given[what] <= high:
                raise UsageError(f"{what} of {name} is {given[what]!r}; allowed: an integer from {low} to {high}")
        if type(found.fastmath) is not bool:
            raise UsageError(f"fastmath of {name} is {found.fastmath!r}; allowed: True and False")
        if found.max_registers and found.min_blocks_per_sm > 1:
            raise UsageError(f"{name} has max_registers and min_blocks_per_sm; give one of them: both limit the registers")
        if grid[1:] != (1, 1) and (found.cluster > 1 or found.blocks_per_sm):
            raise UsageError(
                f"grid of {name} is {grid}; with clusters or blocks_per_sm it has x only: fold it with schedsearch.folded"
            )
        if grid[0] % found.cluster:
            raise UsageError(f"grid of {name} has {grid[0]} blocks; allowed: multiples of the cluster, {found.cluster}")
        return found


@dataclass(frozen=True)
class Extents:
    """A launch in numbers; the fields are those of `Launch`."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    cluster: int
    blocks_per_sm: int
    max_registers: int
    min_blocks_per_sm: int
    fastmath: bool


def folded(*blocks: int) -> int:
    """The blocks of a grid of several axes, along x alone: the `grid` of a kernel that takes its place by `unfolded`.

    CUDA allows 65,535 blocks along y and z, and 2**31 - 1 along x.

    Examples:
        >>> folded(3, 70000)
        210000
    """
    return math.prod(blocks)


def unfolded(block: int, blocks_x: int, blocks_y: int) -> tuple[int, int, int]:
    """The place (x, y, z) of a block in a grid that was `folded`: in kernels, with `cuda.blockIdx.x`.

    Args:
        block: its number along x.
        blocks_x, blocks_y: blocks along the first two axes.

    Examples:
        >>> unfolded(7, 3, 2)
        (1, 0, 1)
    """
    return block % blocks_x, block // blocks_x % blocks_y, block // (blocks_x * blocks_y)


def shapes_of(arguments: Sequence[Argument]) -> dict[str, Any]:
    """What the functions of a tunable may take by name: arrays without numbers, and the fixed scalars."""
    found: dict[str, Any] = {}
    for each in arguments:
        if each.is_array:
            itemsize = dtype_of(each.dtype).nbytes
            found[each.name] = ArrayShape(each.shape, tuple(itemsize * stride for stride in each.strides), each.dtype)
        else:
            found[each.name] = each.value if each.role == "fixed" else None
    return found


def workspace_shape(name: str, given: Any) -> ArrayShape:
    """The array that `workspaces` describes as (shape, dtype).

    Raises:
        UsageError: it describes none.
    """
    try:
        shape, dtype = given
        shape = tuple(int(extent) for extent in (shape if isinstance(shape, tuple | list) else (shape,)))
        nbytes = dtype_of(dtype).nbytes
    except (TypeError, ValueError, KeyError):
        raise UsageError(f"workspace {name} is {given!r}; allowed: a shape and a dtype, like ((1024,), 'float32')") from None
    if not shape or min(shape) < 1:
        raise UsageError(f"workspace {name} has shape {shape}; allowed: one axis or more, with elements")
    return ArrayShape(shape, tuple(nbytes * stride for stride in contiguous(shape)), dtype)


def evaluate(what: str, given: Any, known: Mapping[str, Any], k: Any = None) -> Any:
    """A constant, or the result of a function of some arguments, by name, and of the knobs `k`.

    Raises:
        UsageError: the function raised.
    """
    if not callable(given):
        return given
    try:
        return given(**{name: k if name == "k" else known[name] for name in _parameters(given)})
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's own code, `sys.exit` included
        raise UsageError(f"{what} raised {type(error).__name__}: {error}") from error


@functools.lru_cache(maxsize=1024)
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _extents(what: str, name: str, given: Any, limits: tuple[int, int, int]) -> tuple[int, int, int]:
    extents = tuple(given) if isinstance(given, tuple | list) else (given,)
    extents = tuple(int(each) if isinstance(each, np.integer) else each for each in extents)
    if not 1 <= len(extents) <= 3 or any(type(each) is not int for each in extents):
        raise UsageError(f"{what} of {name} returned {given!r}; allowed: one to three integers")
    extents = (*extents, 1, 1)[:3]
    for axis, extent, limit in zip("xyz", extents, limits):
        if not 1 <= extent <= limit:
            remedy = ""
            if what == "grid" and axis != "x" and extent > limit:
                remedy = (
                    "; fold it: grid=lambda ...: schedsearch.folded(blocks_x, blocks_y), and in the kernel x, y, z = "
                    "unfolded(cuda.blockIdx.x, blocks_x, blocks_y)"
                )
            raise UsageError(f"{what} of {name} is {extent} along {axis}; allowed: 1 to {limit}{remedy}")
    return extents[0], extents[1], extents[2]
