"""How to launch a compiled kernel, as data. Records store it, and deployment executes it without the template.

A `LaunchPlan` is a chain of steps over named buffers: the workload's arguments and outputs, and workspaces.
A step's parameters have the order of the kernel's signature.

A plan comes from a template or from a file, so nothing in it is taken on trust. `LaunchPlan.check` asks three things: every
value is one that its type in `launch_rules` allows; the values of a class go together, as its `mistake` says; and the plan
names only arguments, outputs and scalars of its workload and its own workspaces, with no tensor map beyond its buffer.
Sizes that a kernel takes as plain numbers (`Int32`, `Int64`) mean something to the kernel only. The artifact's signature
covers them, see `schedsearch.records.trust`.
"""

from __future__ import annotations

import json
import math
import struct
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from schedsearch import launch_rules as rules
from schedsearch.errors import PlanError
from schedsearch.fields import Codec, Count, FieldError, Matches, Within, unless_default
from schedsearch.identity import canonical_json, sha256_hex
from schedsearch.launch_rules import MAX_BLOCK_THREADS, MAX_GRID_X, TENSOR_MAP_BYTES, finite, integers
from schedsearch.ops.dtypes import DTYPES, SCALAR_FORMATS
from schedsearch.text import quoted, type_text
from schedsearch.typed import JsonObject

if TYPE_CHECKING:
    from schedsearch.workload import Workload

__all__ = [
    "MAX_BLOCK_THREADS", "MAX_GRID_X", "TENSOR_MAP_ALIGNMENT", "TENSOR_MAP_BYTES", "Artifact", "Float32", "Grid",
    "Int32", "Int64", "LaunchPlan", "Literal", "NumbaArray", "Number", "Param", "Pointer", "Scalar", "Step",
    "TensorMap", "number_bits",
]  # fmt: skip

TENSOR_MAP_ALIGNMENT = 64
MAX_PLAN_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Pointer:
    """The address of a buffer as an unsigned 64-bit integer, on the CPU too.

    Attributes:
        optional: the workload may lack the buffer; the address is then 0.
    """

    buffer: rules.Name
    kind: typing.Literal["pointer"] = "pointer"
    optional: bool = unless_default(False)


@dataclass(frozen=True)
class Int32:
    value: Annotated[int, integers(32)]
    kind: typing.Literal["i32"] = "i32"


@dataclass(frozen=True)
class Int64:
    value: Annotated[int, integers(64)]
    kind: typing.Literal["i64"] = "i64"


@dataclass(frozen=True)
class Float32:
    value: Annotated[float, finite("float32")]
    kind: typing.Literal["f32"] = "f32"


@dataclass(frozen=True)
class Scalar:
    """A number given at call time; `name` is one of the workload's `scalars`. `dtype` is a key of `SCALAR_FORMATS`."""

    name: rules.Name
    kind: typing.Literal["scalar"] = "scalar"
    dtype: rules.ScalarFormat = unless_default("float32")


@dataclass(frozen=True)
class Number:
    """A number of any format that a kernel takes as a scalar; `dtype` is a key of `SCALAR_FORMATS`."""

    value: int | float | bool
    dtype: rules.ScalarFormat
    kind: typing.Literal["number"] = "number"

    def mistake(self) -> str:
        """A value that the format does not have."""
        if self.dtype in rules.LARGEST_FLOAT:
            fits, allowed = type(self.value) is not bool, finite(self.dtype).broken(self.value)
        elif self.dtype == "bool":
            fits, allowed = type(self.value) is bool, ""
        else:
            bits = int(self.dtype.removeprefix("u").removeprefix("int"))
            fits, allowed = type(self.value) is int, integers(bits, signed=self.dtype[0] != "u").broken(self.value)
        return "" if fits and not allowed else f"value is {quoted(self.value)}; allowed: {allowed or f'a {self.dtype}'}"


@dataclass(frozen=True)
class Literal:
    """A constant of the kernel: Numba compiles the value into the code. The parameter exists, but the kernel ignores it."""

    value: Annotated[int, integers(64)] | bool | Annotated[str, Count(0, rules.MAX_TEXT)]
    kind: typing.Literal["literal"] = "literal"


@dataclass(frozen=True)
class NumbaArray:
    """An array as Numba passes it: no meminfo, no parent, number of items, item size, address, shape, strides.

    Every part is a parameter of eight bytes. The kernel gets shape and strides at run time.
    """

    buffer: rules.Name
    dtype: rules.Format
    shape: Annotated[tuple[rules.ArrayExtent, ...], Count(1, rules.MAX_RANK)]
    strides_bytes: tuple[rules.ArrayStride, ...]
    kind: typing.Literal["array"] = "array"

    def mistake(self) -> str:
        """Strides that do not belong to the shape or to the elements."""
        if len(self.strides_bytes) != len(self.shape):
            return f"an array of {len(self.shape)} dimensions has {len(self.strides_bytes)} strides; allowed: one for each"
        wrong = [stride for stride in self.strides_bytes if stride % DTYPES[self.dtype].nbytes]
        return f"a stride is {wrong[0]}; allowed: multiples of {DTYPES[self.dtype].nbytes}" if wrong else ""

    @property
    def reach(self) -> int:
        """Bytes from its address to the end of its last element."""
        return DTYPES[self.dtype].nbytes + sum((n - 1) * step for n, step in zip(self.shape, self.strides_bytes))

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

    buffer: rules.Name
    dtype: rules.Format
    dims: tuple[rules.MapExtent, ...]
    strides_bytes: tuple[rules.MapStride, ...]
    element_strides: tuple[rules.ElementStride, ...]
    box: tuple[rules.BoxExtent, ...] = ()
    lower: tuple[rules.Corner, ...] = ()
    upper: tuple[rules.Corner, ...] = ()
    channels_per_pixel: Annotated[int, Within(0, 256)] = 0
    pixels_per_column: rules.PixelsPerColumn = 0
    swizzle_bytes: rules.SwizzleBytes = 0
    l2_promotion_bytes: rules.PromotionBytes = 0
    kind: typing.Literal["tensor_map"] = "tensor_map"

    @property
    def is_im2col(self) -> bool:
        return not self.box

    @property
    def reach(self) -> int:
        """Bytes from its address to the end of its last element."""
        steps = (DTYPES[self.dtype].nbytes, *self.strides_bytes)
        return steps[0] + sum((extent - 1) * step for extent, step in zip(self.dims, steps))

    def mistake(self) -> str:
        """Numbers that do not belong to one tiled or im2col map."""
        rank, im2col = len(self.dims), self.is_im2col
        least = 3 if im2col else 1
        if not least <= rank <= 5:
            return f"a tensor map of {rank} dimensions; allowed: {least} to 5"
        corners = rank - 2 if im2col else 0
        lengths = {"strides_bytes": rank - 1, "element_strides": rank, "lower": corners, "upper": corners}
        for name, length in (lengths if im2col else {**lengths, "box": rank}).items():
            if len(getattr(self, name)) != length:
                return f"{name} has {len(getattr(self, name))} numbers; allowed: {length} for {rank} dimensions"
        channels, pixels = Within(1, 256) if im2col else Within(0, 0), Within(1, 1024) if im2col else Within(0, 0)
        corner = Within(-rules.CORNERS[rank], rules.CORNERS[rank] - 1) if im2col else Within(0, 0)
        for name, value, rule in (
            ("channels_per_pixel", self.channels_per_pixel, channels),
            ("pixels_per_column", self.pixels_per_column, pixels),
            *(("a corner", value, corner) for value in (*self.lower, *self.upper)),
        ):
            if allowed := rule.broken(value):
                return f"{name} is {value}; allowed: {allowed}"
        width = (self.channels_per_pixel if im2col else self.box[0]) * DTYPES[self.dtype].nbytes
        if width % 16 or 0 < self.swizzle_bytes < width:
            most = f", and at most the swizzle's {self.swizzle_bytes}" if self.swizzle_bytes else ""
            return f"the box is {width} bytes wide; allowed: a multiple of 16{most}"
        return ""


Param = Pointer | Int32 | Int64 | Float32 | Scalar | TensorMap | Number | Literal | NumbaArray
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

    work_items: rules.WorkItems
    blocks_per_sm: rules.BlocksPerSm = 0
    shape: tuple[int, ...] = unless_default(())

    def blocks(self, sms: int, cluster: int = 1) -> int:
        """Blocks on a device with `sms` multiprocessors. Raises ValueError beyond 2**31-1 blocks."""
        blocks = math.ceil(self.work_items / cluster) * cluster
        if self.blocks_per_sm:
            blocks = min(blocks, max(sms * self.blocks_per_sm // cluster, 1) * cluster)
        if not 0 < blocks <= MAX_GRID_X:
            raise ValueError(f"a grid of {blocks} blocks is not possible; allowed: 1 to {MAX_GRID_X} along x")
        return blocks

    def mistake(self) -> str:
        """A shape that CUDA or the number of work items does not allow."""
        return _wrong_shape("shape", self.shape, (MAX_GRID_X, rules.MAX_GRID_YZ, rules.MAX_GRID_YZ), self.work_items)


def _wrong_shape(what: str, shape: tuple[int, ...], limits: tuple[int, int, int], product: int) -> str:
    """What is wrong with extents along x, y and z; there may be none."""
    if not shape:
        return ""
    if len(shape) != 3:
        return f"{what} has {len(shape)} numbers; allowed: none or 3"
    for extent, limit in zip(shape, limits):
        if allowed := Within(1, limit).broken(extent):
            return f"{what} {shape} has an extent of {extent}; allowed: {allowed}"
    return f"{what} {shape} has the product {math.prod(shape)}; allowed: {product}" if math.prod(shape) != product else ""


@dataclass(frozen=True)
class Step:
    """One kernel launch. On the CPU `block_threads` is the number of threads that share the work items.

    Attributes:
        constant: the step reads constant arguments (`ArgSpec.constant`) and workspaces of other constant steps only, and no
            later step changes what it writes. With the same constants it need not run again: see `Kernel.prepare`.
        block_shape: extents of the block along x, y and z, whose product is `block_threads`; empty if it uses x only.
        restores: the step copies its first buffer, an argument, to its second, an output that later steps update in place.
            It is left out where both are the same memory.
        early: on a GPU, each block waits for all kernels before it in the stream before it writes, or reads anything but
            `ahead`. It may be launched while the one before it still runs (programmatic dependent launch).
        ahead: the buffers that it may read before. It must not be launched early where a kernel in front writes one.
    """

    entry: rules.Name
    params: tuple[Param, ...]
    grid: Grid
    block_threads: rules.BlockThreads
    dynamic_shared_bytes: rules.SharedBytes = unless_default(0)
    cluster: rules.Cluster = unless_default(1)
    constant: bool = unless_default(False)
    block_shape: tuple[int, ...] = unless_default(())
    restores: bool = unless_default(False)
    early: bool = unless_default(False)
    ahead: tuple[rules.Name, ...] = unless_default(())

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of the buffers that the step reads or writes, in the order of its parameters."""
        return tuple(dict.fromkeys(param.buffer for param in self.params if isinstance(param, BUFFER_PARAMS)))

    def mistake(self) -> str:
        """Fields that do not go together on any device."""
        if self.restores and sum(isinstance(param, Pointer | NumbaArray) for param in self.params) != 2:
            return "it restores, but it does not have two buffers: an argument and an output"
        if unknown := set(self.ahead) - set(self.buffers):
            return f"it reads {min(unknown)} ahead, which is none of its buffers"
        if self.grid.shape and (self.cluster != 1 or self.grid.blocks_per_sm):
            return "a grid with a shape is neither persistent nor in clusters"
        nbytes = sum(rules.PARAM_BYTES[param.kind] for param in self.params)
        if nbytes > rules.MAX_PARAM_BYTES:
            return f"{nbytes} bytes of parameters; allowed: up to {rules.MAX_PARAM_BYTES}"
        limits = MAX_BLOCK_THREADS, MAX_BLOCK_THREADS, rules.MAX_BLOCK_Z
        return _wrong_shape("block_shape", self.block_shape, limits, self.block_threads)

    def mistake_on(self, kind: typing.Literal["cuda", "cpu"]) -> str:
        """What such a device does not have."""
        if kind == "cpu":
            wrong = [
                "dynamic_shared_bytes" if self.dynamic_shared_bytes else "",
                "cluster" if self.cluster != 1 else "",
                "grid.blocks_per_sm" if self.grid.blocks_per_sm else "",
                "grid.shape" if self.grid.shape else "",
                "block_shape" if self.block_shape else "",
                "early" if self.early else "",
                "tensor map" if any(isinstance(param, TensorMap) for param in self.params) else "",
            ]
            return next((f"a CPU kernel takes no {name}; allowed: leave it out" for name in wrong if name), "")
        blocks = math.ceil(self.grid.work_items / self.cluster) * self.cluster
        if blocks > MAX_GRID_X and not self.grid.blocks_per_sm:
            return f"a grid of {blocks} blocks is not possible; allowed: 1 to {MAX_GRID_X} along x"
        return ""


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
    steps: Annotated[tuple[Step, ...], Count(1, rules.MAX_STEPS)]
    workspaces: Annotated[Mapping[rules.Name, rules.WorkspaceBytes], rules.AtMostNames] = unless_default({})
    alignments: Annotated[Mapping[rules.Name, rules.Alignment], rules.AtMostNames] = unless_default({})

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
        """Canonical JSON. Fields that were added later are left out at their default, so that no identity changed."""
        return canonical_json(_CODEC.write(self))

    @classmethod
    def from_json(cls, text: str) -> LaunchPlan:
        """Reads what this or an earlier version of schedsearch wrote.

        Raises:
            PlanError: the text is not a plan, has an unknown or a missing field, or breaks a rule; it says where.
        """
        return _read(_of_today(_parsed(text)))

    def mistake(self) -> str:
        """Fields that do not go together."""
        arch, allowed = _ARCH[self.kind]
        if wrong := Matches(arch, allowed).broken(self.arch):
            return f"arch is {quoted(self.arch)}; allowed: {wrong}"
        found = ((number, step.mistake_on(self.kind)) for number, step in enumerate(self.steps))
        return next((f"step {number}: {text}" for number, text in found if text), "")

    def check(self, workload: Workload | None = None) -> None:
        """Checks that the plan is sound and, if a workload is given, that it may be launched for it.

        Raises:
            PlanError: a value is not allowed, or does not fit the workload; the text says where it stands.
        """
        if "_sound" not in self.__dict__:  # neither read nor checked before; it cannot have changed
            _read(_CODEC.write(self))
            self.__dict__["_sound"] = True
        if workload is not None and (text := next(_misfits(self, workload), "")):
            raise PlanError(text)


_CODEC = Codec()
_ARCH = {
    "cuda": (r"sm_[0-9]{2,4}[af]?", "sm_80, sm_90a, sm_120f and the like"),
    "cpu": (r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}", "the name of a CPU"),
}


def _read(data: object) -> LaunchPlan:
    try:
        plan = _CODEC.read(LaunchPlan, data)
    except FieldError as error:
        raise PlanError(f"the launch plan: {error}") from None
    plan.__dict__["_sound"] = True
    return plan


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


def _distinct(pairs: list[tuple[str, Any]]) -> JsonObject:
    data = dict(pairs)
    if len(data) != len(pairs):
        names = [name for name, _ in pairs]
        raise PlanError(f"the field {quoted(max(names, key=names.count))} occurs twice; allowed: once")
    return data


def _not_json(text: str) -> NoReturn:
    raise PlanError(f"{text} is not a JSON number; allowed: finite numbers")


def _of_today(data: object) -> Any:
    """A plan with the fields of earlier versions, which databases still hold, as today's plans have them."""
    if not isinstance(data, dict):
        return data
    for name in ("prepared", "zeroed"):  # of the first version, always empty
        if data.pop(name, None):
            raise PlanError(f"{name} of the first version is not empty; tune again")
    for step in steps if isinstance(steps := data.get("steps"), list) else ():
        if isinstance(step, dict) and step.pop("weight_only", False):  # steps that read nothing but the weight
            step["constant"] = True
    return data


def _misfits(plan: LaunchPlan, workload: Workload) -> Iterator[str]:
    """Why a sound plan cannot be launched for a workload."""
    arguments = {spec.name: spec.span_bytes for spec in (*workload.signature, *workload.outputs)}
    scalars = {scalar.name: scalar.dtype for scalar in workload.scalars}
    if shadowed := sorted(arguments.keys() & plan.workspaces.keys()):
        yield f"the workspace {shadowed[0]!r} has the name of an argument"
    nbytes = {**plan.workspaces, **arguments}
    optional: set[str] = set()
    for number, step in enumerate(plan.steps):
        for param in step.params:
            if isinstance(param, Scalar) and param.name not in scalars:
                yield f"step {number} takes a scalar {param.name!r}; {workload.op} has {', '.join(scalars) or 'none'}"
            elif isinstance(param, Scalar) and param.dtype != scalars[param.name]:
                yield f"step {number} takes {param.name} as {param.dtype}; {workload.op} has it as {scalars[param.name]}"
            elif isinstance(param, Pointer) and param.optional and param.buffer not in nbytes:
                optional.add(param.buffer)
            elif isinstance(param, BUFFER_PARAMS) and param.buffer not in nbytes:
                yield f"step {number} takes a buffer {param.buffer!r}; the workload and the plan have {', '.join(nbytes)}"
            elif isinstance(param, TensorMap | NumbaArray) and param.reach > nbytes[param.buffer]:
                what = "a tensor map" if isinstance(param, TensorMap) else "an array"
                yield (
                    f"step {number} has {what} that reaches {param.reach} bytes into {param.buffer}, which has "
                    f"{nbytes[param.buffer]}"
                )
    for name in plan.alignments:
        if name not in nbytes and name not in optional:
            yield f"alignments name {name!r}, which is neither an argument nor a workspace"
    if changing := sorted(set(plan.constants) - set(workload.constants) - optional):
        allowed = ", ".join(workload.constants) or "no argument"
        yield (
            f"a step that is marked constant reads {', '.join(changing)}, which may change between calls; allowed: {allowed}"
        )


@dataclass(frozen=True)
class Artifact:
    """Machine code and how to launch it. Its identity is the sha256 of both."""

    code: bytes
    plan: LaunchPlan

    @property
    def sha256(self) -> str:
        return sha256_hex(self.plan.to_json().encode() + b"\0" + self.code)
