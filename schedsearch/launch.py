"""How to launch a compiled kernel, as data. Records store it, and deployment executes it without the template.

A `LaunchPlan` is a chain of steps over named buffers: the workload's arguments and outputs, and workspaces.
A step's parameters have the order of the kernel's signature.

The limits come from the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

import json
import math
import struct
import typing
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, NoReturn

from schedsearch import launch_rules
from schedsearch.errors import PlanError, did_you_mean
from schedsearch.identity import canonical_json, sha256_hex
from schedsearch.launch_rules import MAX_BLOCK_THREADS, MAX_GRID_X, TENSOR_MAP_BYTES, shown
from schedsearch.ops.dtypes import DTYPES, SCALAR_FORMATS
from schedsearch.text import type_text

if TYPE_CHECKING:
    from schedsearch.workload import Workload

__all__ = [
    "MAX_BLOCK_THREADS",
    "MAX_GRID_X",
    "TENSOR_MAP_ALIGNMENT",
    "TENSOR_MAP_BYTES",
    "Artifact",
    "Float32",
    "Grid",
    "Int32",
    "Int64",
    "LaunchPlan",
    "Literal",
    "NumbaArray",
    "Number",
    "Param",
    "Pointer",
    "Scalar",
    "Step",
    "TensorMap",
    "number_bits",
]  # fmt: skip

TENSOR_MAP_ALIGNMENT = 64
MAX_PLAN_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Pointer:
    """The address of a buffer as an unsigned 64-bit integer, on the CPU too.

    Attributes:
        optional: the workload may lack the buffer; the address is then 0.
    """

    buffer: str
    kind: typing.Literal["pointer"] = "pointer"
    optional: bool = False


@dataclass(frozen=True)
class Int32:
    value: int
    kind: typing.Literal["i32"] = "i32"


@dataclass(frozen=True)
class Int64:
    value: int
    kind: typing.Literal["i64"] = "i64"


@dataclass(frozen=True)
class Float32:
    value: float
    kind: typing.Literal["f32"] = "f32"


@dataclass(frozen=True)
class Scalar:
    """A number given at call time; `name` is one of the workload's `scalars`. `dtype` is a key of `SCALAR_FORMATS`."""

    name: str
    kind: typing.Literal["scalar"] = "scalar"
    dtype: str = "float32"


@dataclass(frozen=True)
class Number:
    """A number of any format that a kernel takes as a scalar; `dtype` is a key of `SCALAR_FORMATS`."""

    value: int | float | bool
    dtype: str
    kind: typing.Literal["number"] = "number"


@dataclass(frozen=True)
class Literal:
    """A constant of the kernel: Numba compiles the value into the code. The parameter exists, but the kernel ignores it."""

    value: int | bool | str
    kind: typing.Literal["literal"] = "literal"


@dataclass(frozen=True)
class NumbaArray:
    """An array as Numba passes it: no meminfo, no parent, number of items, item size, address, shape, strides.

    Every part is a parameter of eight bytes. The kernel gets shape and strides at run time.
    """

    buffer: str
    dtype: str
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    kind: typing.Literal["array"] = "array"

    @property
    def words(self) -> tuple[int | None, ...]:
        """The parameters in order; None is the address."""
        return (0, 0, math.prod(self.shape), DTYPES[self.dtype].nbytes, None, *self.shape, *self.strides_bytes)

    @property
    def layout(self) -> typing.Literal["C", "F", "A"]:
        """Numba's word for the order of the elements: as in C, as in Fortran, or any."""
        extents = [(extent, stride) for extent, stride in zip(self.shape, self.strides_bytes) if extent != 1]
        for name, axes in (("C", extents[::-1]), ("F", extents)):
            step = DTYPES[self.dtype].nbytes
            for extent, stride in axes:
                if stride != step:
                    break
                step *= extent
            else:
                return "C" if name == "C" else "F"
        return "A"


@dataclass(frozen=True)
class TensorMap:
    """A CUtensorMap (128 bytes, 64-byte aligned, `__grid_constant__`), encoded over a buffer when it is bound.

    `dims`, `box` and `element_strides` run from the fastest axis (cuTensorMapEncode*'s order); `strides_bytes` leaves
    out the fastest. Tiled maps have `box`; im2col maps have `lower`/`upper` pixel corners (W, H order, rank-2 numbers),
    `channels_per_pixel` and `pixels_per_column`. Out-of-range elements read as zero.

    Source: CUDA driver API, "Tensor Map Object Management".
    """

    buffer: str
    dtype: str
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    element_strides: tuple[int, ...]
    box: tuple[int, ...] = ()
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()
    channels_per_pixel: int = 0
    pixels_per_column: int = 0
    swizzle_bytes: int = 0
    l2_promotion_bytes: int = 0
    kind: typing.Literal["tensor_map"] = "tensor_map"

    @property
    def is_im2col(self) -> bool:
        return not self.box


Param = Pointer | Int32 | Int64 | Float32 | Scalar | TensorMap | Number | Literal | NumbaArray
_PARAM_TYPES: dict[str, type] = {
    "pointer": Pointer,
    "i32": Int32,
    "i64": Int64,
    "f32": Float32,
    "scalar": Scalar,
    "tensor_map": TensorMap,
    "number": Number,
    "literal": Literal,
    "array": NumbaArray,
}


BUFFER_PARAMS = (Pointer, TensorMap, NumbaArray)


def number_bits(value: float, dtype: str) -> int:
    """The bits of a number in one of `SCALAR_FORMATS`, as an integer; raises struct.error if the format cannot hold it."""
    code = SCALAR_FORMATS[dtype]
    number = float(value) if code in "fd" else int(value)
    return int.from_bytes(struct.pack(f"<{code}", number), "little")


@dataclass(frozen=True)
class Grid:
    """How many blocks (CPU: work items) a step has.

    With `blocks_per_sm` the grid is persistent: min(work_items, sms * blocks_per_sm) blocks loop over the work items,
    computed for the card at hand. Otherwise each work item has a block of its own. A cluster rounds the grid up to a
    multiple of its size. A persistent grid is rounded down instead, and is no larger than the card runs at once. The grid
    uses x only, so the sole limit is 2**31-1, unless `shape` gives its extents along x, y and z, whose product is
    `work_items`.
    """

    work_items: int
    blocks_per_sm: int = 0
    shape: tuple[int, ...] = ()

    def blocks(self, sms: int, cluster: int = 1) -> int:
        """Blocks on a device with `sms` multiprocessors. Raises ValueError beyond 2**31-1 blocks."""
        blocks = math.ceil(self.work_items / cluster) * cluster
        if self.blocks_per_sm:
            blocks = min(blocks, max(sms * self.blocks_per_sm // cluster, 1) * cluster)
        if not 0 < blocks <= MAX_GRID_X:
            raise ValueError(f"a grid of {blocks} blocks is not possible; allowed: 1 to {MAX_GRID_X} along x")
        return blocks


@dataclass(frozen=True)
class Step:
    """One kernel launch. On the CPU `block_threads` is the number of threads that share the work items.

    Attributes:
        constant: the step reads constant arguments (`ArgSpec.constant`) and workspaces of other constant steps only, and no
            later step changes what it writes. With the same constants it need not run again: see `Kernel.prepare`.
        block_shape: extents of the block along x, y and z, whose product is `block_threads`; empty if it uses x only.
        restores: the step copies its first buffer, an argument, to its second, an output that later steps update in place.
            It is left out where both are the same memory.
    """

    entry: str
    params: tuple[Param, ...]
    grid: Grid
    block_threads: int
    dynamic_shared_bytes: int = 0
    cluster: int = 1
    constant: bool = False
    block_shape: tuple[int, ...] = ()
    restores: bool = False

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of the buffers that the step reads or writes, in the order of its parameters."""
        return tuple(dict.fromkeys(param.buffer for param in self.params if isinstance(param, BUFFER_PARAMS)))


@dataclass(frozen=True)
class LaunchPlan:
    """Steps in the order in which they run, one after the other on one stream.

    Attributes:
        kind: cuda (code is a cubin) or cpu (code is an archive of ELF objects).
        arch: what the code runs on: sm_90a, sm_80 ...; on the CPU LLVM's name of the processor.
        workspaces: name -> bytes of scratch buffers.
        alignments: buffer -> its address must be a multiple of this many bytes (1 unless named).
    """

    kind: typing.Literal["cuda", "cpu"]
    arch: str
    steps: tuple[Step, ...]
    workspaces: Mapping[str, int] = field(default_factory=dict)
    alignments: Mapping[str, int] = field(default_factory=dict)

    @property
    def constants(self) -> tuple[str, ...]:
        """Names of the arguments that constant steps read; empty when no step is constant."""
        return tuple(name for name in self._constant_buffers if name not in self.workspaces)

    @property
    def constant_workspaces(self) -> dict[str, int]:
        """name -> bytes of the workspaces that constant steps use; empty when no step is constant."""
        return {name: self.workspaces[name] for name in self._constant_buffers if name in self.workspaces}

    @property
    def _constant_buffers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for step in self.steps if step.constant for name in step.buffers))

    def to_json(self) -> str:
        """Canonical JSON without fields at their default, so that a field that is added later changes no identity."""
        data = _without_defaults(self)
        data["steps"] = [
            _without_defaults(step) | {"grid": _grid_json(step.grid), "params": [_param_json(p) for p in step.params]}
            for step in self.steps
        ]
        return canonical_json(data)

    @classmethod
    def from_json(cls, text: str) -> LaunchPlan:
        """Reads what this or an earlier version of schedsearch wrote.

        Raises:
            PlanError: the text is not a plan, has an unknown or a missing field, or breaks a rule of `launch_rules.problem`.
        """
        data = _fields(_parsed(text), cls, "the plan", older=("prepared", "zeroed"))
        for name in ("prepared", "zeroed"):  # fields of the first version, always empty; databases still hold them
            if data.pop(name, None):
                raise PlanError(f"{name} of the first version is not empty; tune again")
        for name in ("workspaces", "alignments"):
            if not isinstance(data.get(name, {}), dict):
                raise PlanError(f"{name} is {type_text(data[name])}; allowed: a mapping from names to numbers")
        steps = tuple(_step(step, f"step {number}") for number, step in enumerate(_list(data["steps"], "steps")))
        plan = cls(**{**data, "steps": steps})
        plan.check()
        return plan

    def check(self, workload: Workload | None = None) -> None:
        """Checks that the plan is sound and, if a workload is given, that it may be launched for it.

        Raises:
            PlanError: it breaks a rule of `schedsearch.launch_rules`; the text names the step and the field.
        """
        text = launch_rules.problem(self)
        if text is None and workload is not None:
            text = launch_rules.misfit(self, workload)
        if text is not None:
            raise PlanError(text)


def _without_defaults(value: LaunchPlan | Step) -> dict[str, Any]:
    defaults = {f.name: f.default_factory() if f.default_factory is not MISSING else f.default for f in fields(value)}
    return {name: item for name, item in asdict(value).items() if item != defaults[name]}


def _param_json(param: Param) -> dict[str, Any]:
    """All fields except those at their default that were added later: `Pointer.optional` and `Scalar.dtype`."""
    data = asdict(param)
    if not data.get("optional", True):
        del data["optional"]
    if isinstance(param, Scalar) and param.dtype == "float32":
        del data["dtype"]
    return data


def _grid_json(grid: Grid) -> dict[str, Any]:
    """All fields except a `shape` that has its default."""
    data = asdict(grid)
    if not grid.shape:
        del data["shape"]
    return data


def _parsed(text: str) -> Any:
    if not isinstance(text, str):
        raise PlanError(f"the plan is {type_text(text)}; allowed: JSON text")
    if len(text) > MAX_PLAN_CHARACTERS:
        raise PlanError(f"the plan has {len(text)} characters; allowed: up to {MAX_PLAN_CHARACTERS}")
    try:
        return json.loads(text, object_pairs_hook=_distinct, parse_constant=_not_json)
    except PlanError:
        raise
    except (ValueError, RecursionError) as error:
        raise PlanError(f"the plan is not JSON: {error}") from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        names = [name for name, _ in pairs]
        raise PlanError(f"the field {shown(max(names, key=names.count))} occurs twice; allowed: once")
    return data


def _not_json(text: str) -> NoReturn:
    raise PlanError(f"{text} is not a JSON number; allowed: finite numbers")


def _fields(data: Any, kind: type, where: str, older: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of an object for a dataclass: none is unknown, and none without a default is missing."""
    if not isinstance(data, dict):
        raise PlanError(f"{where} is {type_text(data)}; allowed: an object")
    known = {each.name: each for each in fields(kind)}
    for name in data:
        if name not in known and name not in older:
            raise PlanError(f"{where} has no field {shown(name)}{did_you_mean(name, known)}; allowed: {', '.join(known)}")
    for name, each in known.items():
        if name not in data and each.default is MISSING and each.default_factory is MISSING:
            raise PlanError(f"{where} lacks the field {name!r}")
    return dict(data)


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise PlanError(f"{where} is {type_text(value)}; allowed: a list")
    return value


def _step(step: Any, where: str) -> Step:
    data = _fields(step, Step, where, older=("weight_only",))
    extents = _fields(data["grid"], Grid, f"{where}, grid")
    grid = Grid(**extents | {"shape": tuple(_list(extents.get("shape", []), f"{where}, grid, shape"))})
    data["block_shape"] = tuple(_list(data.get("block_shape", []), f"{where}, block_shape"))
    params = _list(data["params"], f"{where}, params")
    data |= {"grid": grid, "params": tuple(_param(each, f"{where}, parameter {n}") for n, each in enumerate(params))}
    if data.pop("weight_only", False):  # the earlier name, for steps that read nothing but the weight
        data["constant"] = True
    return Step(**data)


def _param(param: Any, where: str) -> Param:
    name = param.get("kind") if isinstance(param, dict) else None
    kind = _PARAM_TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise PlanError(f"{where} is of the kind {shown(name)}; allowed: {', '.join(_PARAM_TYPES)}")
    data = _fields(param, kind, where)
    for each in fields(kind):
        if each.name in data and str(each.type).startswith("tuple"):
            data[each.name] = tuple(_list(data[each.name], f"{where}, {each.name}"))
    made: Param = kind(**data)
    return made


@dataclass(frozen=True)
class Artifact:
    """Machine code and how to launch it. Its identity is the sha256 of both."""

    code: bytes
    plan: LaunchPlan

    @property
    def sha256(self) -> str:
        return sha256_hex(self.plan.to_json().encode() + b"\0" + self.code)
