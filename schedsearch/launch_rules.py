"""The rules that every launch plan obeys, and those that it obeys for its workload.

A plan comes from a template or from a file, so nothing in it is taken on trust. `problem` checks a plan by itself: types,
ranges, CUDA's limits. `misfit` checks it against the workload that it is launched for: it may only name arguments, outputs,
scalars and its own workspaces, and no tensor map may reach beyond its buffer.

Sizes that a kernel takes as plain numbers (`Int32`, `Int64`) mean something to the kernel only. The artifact's signature
covers them, see `schedsearch.records.trust`.

Sources of the limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" and "Kernel Parameter
Limits"; CUDA driver API, "Tensor Map Object Management".

See docs/decisions/018-launch-plans-are-checked.md.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from schedsearch.ops.dtypes import DTYPES, MAX_RANK, SCALAR_FORMATS

if TYPE_CHECKING:
    from schedsearch.launch import Grid, LaunchPlan, NumbaArray, Number, Step, TensorMap
    from schedsearch.workload import Workload

MAX_GRID_X = 2**31 - 1
MAX_GRID_YZ = 2**16 - 1
MAX_BLOCK_THREADS = 1024
MAX_BLOCK_Z = 64
MAX_BLOCKS_PER_SM = 32
MAX_CLUSTER = 16
MAX_SHARED_BYTES = 227 << 10
MAX_PARAM_BYTES = 32_764
TENSOR_MAP_BYTES = 128

MAX_STEPS = 64
MAX_NAMES = 256  # workspaces, and alignments
MAX_WORKSPACE_BYTES = 1 << 40
MAX_ALIGNMENT = 1 << 16
MAX_WORK_ITEMS = 1 << 48  # the CPU multiplies it by the number of threads, in 64 bits

MAX_TEXT = 255  # characters of a literal
_PARAM_BYTES = {
    "pointer": 8, "i32": 4, "i64": 8, "f32": 4, "scalar": 8, "tensor_map": TENSOR_MAP_BYTES, "number": 8, "literal": 8,
    "array": 8 * (5 + 2 * MAX_RANK),
}  # fmt: skip
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_ARCH = {"cuda": re.compile(r"sm_[0-9]{2,4}[a-z]?"), "cpu": re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")}
_LARGEST_FLOAT32 = (2**24 - 1) * 2.0**104
_LARGEST_FLOAT64 = sys.float_info.max
_CORNERS = {3: 2**15, 4: 2**7, 5: 2**4}  # rank -> an im2col corner is in [-limit, limit)


def problem(plan: LaunchPlan) -> str | None:
    """The first rule that a plan breaks, with what it got and what is allowed; None if it is sound."""
    return next(_problems(plan), None)


def misfit(plan: LaunchPlan, workload: Workload) -> str | None:
    """Why a sound plan cannot be launched for a workload; None if it can.

    Memory stays within bounds as far as a plan decides it: each tensor map lies inside its argument or workspace.
    """
    return next(_misfits(plan, workload), None)


def _problems(plan: LaunchPlan) -> Iterator[str]:
    if not isinstance(plan.kind, str) or plan.kind not in _ARCH:
        yield f"kind is {shown(plan.kind)}; allowed: {', '.join(_ARCH)}"
        return
    if not isinstance(plan.arch, str) or not _ARCH[plan.kind].fullmatch(plan.arch):
        allowed = "sm_80, sm_90a and the like" if plan.kind == "cuda" else "the name of a CPU"
        yield f"arch is {shown(plan.arch)}; allowed: {allowed}"
    yield from _sizes("workspaces", plan.workspaces, MAX_WORKSPACE_BYTES)
    alignment_problems = list(_sizes("alignments", plan.alignments, MAX_ALIGNMENT))
    yield from alignment_problems
    for name, size in () if alignment_problems else plan.alignments.items():
        if size & (size - 1):
            yield f"alignments[{name!r}] is {size}; allowed: a power of two"
    if not 1 <= len(plan.steps) <= MAX_STEPS:
        yield f"{len(plan.steps)} steps; allowed: 1 to {MAX_STEPS}"
    for number, step in enumerate(plan.steps):
        for text in _step(step, plan.kind):
            yield f"step {number}: {text}"


def _sizes(what: str, sizes: Mapping[str, int], limit: int) -> Iterator[str]:
    if len(sizes) > MAX_NAMES:
        yield f"{len(sizes)} {what}; allowed: up to {MAX_NAMES}"
    for name, size in sizes.items():
        yield from _name(f"a name in {what}", name)
        yield from _whole(f"{what}[{name!r}]", size, 1, limit)


def _step(step: Step, kind: str) -> Iterator[str]:
    cuda = kind == "cuda"
    yield from _name("entry", step.entry)
    yield from _whole("block_threads", step.block_threads, 1, MAX_BLOCK_THREADS)
    yield from _whole("dynamic_shared_bytes", step.dynamic_shared_bytes, 0, MAX_SHARED_BYTES if cuda else 0)
    cluster_problems = list(_whole("cluster", step.cluster, 1, MAX_CLUSTER if cuda else 1))
    yield from cluster_problems
    yield from _flag("constant", step.constant)
    yield from _flag("restores", step.restores)
    if step.restores and sum(param.kind in ("pointer", "array") for param in step.params) != 2:
        yield "it restores, but it does not have two buffers: an argument and an output"
    yield from _grid(step.grid, cuda, 1 if cluster_problems else step.cluster)
    yield from _shape("grid.shape", step.grid.shape, (MAX_GRID_X, MAX_GRID_YZ, MAX_GRID_YZ), step.grid.work_items, cuda)
    limits = MAX_BLOCK_THREADS, MAX_BLOCK_THREADS, MAX_BLOCK_Z
    yield from _shape("block_shape", step.block_shape, limits, step.block_threads, cuda)
    if step.grid.shape and (step.cluster != 1 or step.grid.blocks_per_sm):
        yield "a grid with a shape is neither persistent nor in clusters"
    nbytes = sum(_PARAM_BYTES.get(param.kind, 0) for param in step.params)
    if nbytes > MAX_PARAM_BYTES:
        yield f"{nbytes} bytes of parameters; allowed: up to {MAX_PARAM_BYTES}"
    for number, param in enumerate(step.params):
        for text in _param(param, cuda):
            yield f"parameter {number}: {text}"


def _grid(grid: Grid, cuda: bool, cluster: int) -> Iterator[str]:
    wrong = list(_whole("grid.work_items", grid.work_items, 1, MAX_WORK_ITEMS))
    wrong += _whole("grid.blocks_per_sm", grid.blocks_per_sm, 0, MAX_BLOCKS_PER_SM if cuda else 0)
    yield from wrong
    if cuda and not wrong and not grid.blocks_per_sm:
        blocks = math.ceil(grid.work_items / cluster) * cluster
        if blocks > MAX_GRID_X:
            yield f"a grid of {blocks} blocks is not possible; allowed: 1 to {MAX_GRID_X} along x"


def _shape(what: str, shape: tuple[Any, ...], limits: tuple[int, ...], product: Any, cuda: bool) -> Iterator[str]:
    """The rules of extents along x, y and z; none are allowed, too."""
    if not shape:
        return
    if not cuda or len(shape) != len(limits):
        yield f"{what} has {len(shape)} numbers; allowed: {f'none or {len(limits)}' if cuda else 'none on a CPU'}"
        return
    wrong = [text for n, limit in enumerate(limits) for text in _whole(f"{what}[{n}]", shape[n], 1, limit)]
    yield from wrong
    if not wrong and math.prod(shape) != product:
        yield f"{what} {shape} has the product {math.prod(shape)}; allowed: {shown(product)}, as the total says"


def _param(param: Any, cuda: bool) -> Iterator[str]:
    if param.kind == "pointer":
        yield from _name("buffer", param.buffer)
        yield from _flag("optional", param.optional)
    elif param.kind in ("i32", "i64"):
        bits = int(param.kind[1:])
        yield from _whole("value", param.value, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    elif param.kind == "f32":
        if type(param.value) not in (int, float) or not abs(param.value) <= _LARGEST_FLOAT32:
            yield f"value is {shown(param.value)}; allowed: a finite float32"
    elif param.kind == "scalar":
        yield from _name("name", param.name)
        yield from _scalar_format(param.dtype)
    elif param.kind == "number":
        yield from _number(param)
    elif param.kind == "literal":
        if isinstance(param.value, str):
            if len(param.value) > MAX_TEXT:
                yield f"value is a string of {len(param.value)} characters; allowed: up to {MAX_TEXT}"
        elif type(param.value) is not bool:
            yield from _whole("value", param.value, -(2**63), 2**63 - 1)
    elif param.kind == "array":
        yield from _array(param)
    elif not cuda:
        yield "a CPU kernel takes no tensor map"
    else:
        yield from _tensor_map(param)


def _scalar_format(dtype: Any) -> Iterator[str]:
    if not isinstance(dtype, str) or dtype not in SCALAR_FORMATS:
        yield f"dtype is {shown(dtype)}; allowed: {', '.join(SCALAR_FORMATS)}"


def _number(param: Number) -> Iterator[str]:
    wrong = list(_scalar_format(param.dtype))
    yield from wrong
    if wrong:
        return
    if param.dtype.startswith("float"):
        largest = _LARGEST_FLOAT32 if param.dtype == "float32" else _LARGEST_FLOAT64
        if type(param.value) not in (int, float) or not abs(param.value) <= largest:
            yield f"value is {shown(param.value)}; allowed: a finite {param.dtype}"
    elif param.dtype == "bool":
        yield from _flag("value", param.value)
    else:
        bits, signed = int(param.dtype.removeprefix("u").removeprefix("int")), not param.dtype.startswith("u")
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
        yield from _whole("value", param.value, low, high)


def _array(param: NumbaArray) -> Iterator[str]:
    yield from _name("buffer", param.buffer)
    if not isinstance(param.dtype, str) or param.dtype not in DTYPES:
        yield f"dtype is {shown(param.dtype)}; allowed: {', '.join(DTYPES)}"
        return
    if not 1 <= len(param.shape) <= MAX_RANK or len(param.strides_bytes) != len(param.shape):
        yield (
            f"an array of {len(param.shape)} dimensions with {len(param.strides_bytes)} strides; allowed: 1 to {MAX_RANK}, "
            "a stride for each"
        )
    yield from _wholes("shape", param.shape, 1, 2**40)
    yield from _wholes("strides_bytes", param.strides_bytes, 0, 2**43, multiple=DTYPES[param.dtype].nbytes)


def _tensor_map(param: TensorMap) -> Iterator[str]:
    """The limits of cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col without interleaving."""
    yield from _name("buffer", param.buffer)
    if not isinstance(param.dtype, str) or param.dtype not in DTYPES:
        yield f"dtype is {shown(param.dtype)}; allowed: {', '.join(DTYPES)}"
        return
    itemsize = DTYPES[param.dtype].nbytes
    rank, im2col = len(param.dims), param.is_im2col
    if not (3 if im2col else 1) <= rank <= 5:
        yield f"a tensor map of {rank} dimensions; allowed: {3 if im2col else 1} to 5"
        return
    corners = rank - 2 if im2col else 0
    lengths = {"strides_bytes": rank - 1, "element_strides": rank, "lower": corners, "upper": corners}
    for name, length in lengths.items():
        if len(getattr(param, name)) != length:
            yield f"{name} has {len(getattr(param, name))} numbers; allowed: {length} for {rank} dimensions"
    if not im2col and len(param.box) != rank:
        yield f"box has {len(param.box)} numbers; allowed: {rank} for {rank} dimensions"
    yield from _wholes("dims", param.dims, 1, 2**32)
    yield from _wholes("strides_bytes", param.strides_bytes, 0, 2**40 - 16, multiple=16)
    yield from _wholes("element_strides", param.element_strides, 1, 8)
    if im2col:
        limit = _CORNERS[rank]
        yield from _wholes("lower", param.lower, -limit, limit - 1)
        yield from _wholes("upper", param.upper, -limit, limit - 1)
        yield from _whole("channels_per_pixel", param.channels_per_pixel, 1, 256)
        yield from _whole("pixels_per_column", param.pixels_per_column, 1, 1024)
        inner = param.channels_per_pixel
    else:
        yield from _wholes("box", param.box, 1, 256)
        yield from _whole("channels_per_pixel", param.channels_per_pixel, 0, 0)
        yield from _whole("pixels_per_column", param.pixels_per_column, 0, 0)
        inner = param.box[0]
    for name, allowed in (("swizzle_bytes", (0, 32, 64, 128)), ("l2_promotion_bytes", (0, 64, 128, 256))):
        if type(getattr(param, name)) is not int or getattr(param, name) not in allowed:
            yield f"{name} is {shown(getattr(param, name))}; allowed: {', '.join(map(str, allowed))}"
            return
    if type(inner) is int and (inner * itemsize % 16 or 0 < param.swizzle_bytes < inner * itemsize):
        most = f", and at most the swizzle's {param.swizzle_bytes}" if param.swizzle_bytes else ""
        yield f"the box is {inner * itemsize} bytes wide; allowed: a multiple of 16{most}"


def _misfits(plan: LaunchPlan, workload: Workload) -> Iterator[str]:
    arguments = {spec.name: spec.span_bytes for spec in (*workload.signature, *workload.outputs)}
    scalars = {scalar.name: scalar.dtype for scalar in workload.scalars}
    if shadowed := sorted(arguments.keys() & plan.workspaces.keys()):
        yield f"the workspace {shadowed[0]!r} has the name of an argument"
    nbytes = {**plan.workspaces, **arguments}
    optional: set[str] = set()
    for number, step in enumerate(plan.steps):
        for param in step.params:
            if param.kind == "scalar" and param.name not in scalars:
                yield f"step {number} takes a scalar {param.name!r}; {workload.op} has {', '.join(scalars) or 'none'}"
            elif param.kind == "scalar" and param.dtype != scalars[param.name]:
                yield f"step {number} takes {param.name} as {param.dtype}; {workload.op} has it as {scalars[param.name]}"
            elif param.kind == "pointer" and param.optional and param.buffer not in nbytes:
                optional.add(param.buffer)
            elif param.kind in ("pointer", "tensor_map", "array") and param.buffer not in nbytes:
                yield f"step {number} takes a buffer {param.buffer!r}; the workload and the plan have {', '.join(nbytes)}"
            elif param.kind in ("tensor_map", "array") and (reach := _reach(param)) > nbytes[param.buffer]:
                what = "a tensor map" if param.kind == "tensor_map" else "an array"
                yield (
                    f"step {number} has {what} that reaches {reach} bytes into {param.buffer}, which has "
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


def _reach(param: TensorMap | NumbaArray) -> int:
    """Bytes from the address of a tensor map or an array to the end of its last element."""
    if param.kind == "array":
        return DTYPES[param.dtype].nbytes + sum((n - 1) * step for n, step in zip(param.shape, param.strides_bytes))
    steps = (DTYPES[param.dtype].nbytes, *param.strides_bytes)
    return steps[0] + sum((extent - 1) * step for extent, step in zip(param.dims, steps))


def _whole(what: str, value: Any, low: int, high: int) -> Iterator[str]:
    if type(value) is not int or not low <= value <= high:
        yield f"{what} is {shown(value)}; allowed: {f'an integer from {low} to {high}' if low < high else low}"


def _wholes(what: str, values: tuple[Any, ...], low: int, high: int, multiple: int = 1) -> Iterator[str]:
    for number, value in enumerate(values):
        if (wrong := next(_whole(f"{what}[{number}]", value, low, high), None)) is not None:
            yield wrong
        elif value % multiple:
            yield f"{what}[{number}] is {value}; allowed: multiples of {multiple}"


def _flag(what: str, value: Any) -> Iterator[str]:
    if type(value) is not bool:
        yield f"{what} is {shown(value)}; allowed: true or false"


def _name(what: str, value: Any) -> Iterator[str]:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        yield f"{what} is {shown(value)}; allowed: letters, digits and underscores, up to 255, no digit first"


def shown(value: Any) -> str:
    """A value in a message, at most 60 characters of it."""
    text = repr(value) if not isinstance(value, int) or value.bit_length() < 256 else "a huge number"
    return text if len(text) <= 60 else f"{text[:57]}..."
