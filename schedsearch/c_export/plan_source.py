"""A launch plan as the C data that `runtime/schedsearch_runtime.c` launches from: what `CudaBoundKernel` packs, in C."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schedsearch.c_export.chosen import Chosen, needed, pointer_names
from schedsearch.c_export.text import string
from schedsearch.launch import LaunchPlan, Param, Pointer, Step, TensorMap, number_bits
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.target import Architecture
from schedsearch.workload import Workload

WORKSPACE_ALIGNMENT = 256  # at least, as cuMemAlloc gives it
# CUtensorMapDataType of cuda.h
TENSOR_MAP_DTYPES = {
    "UINT8": 0, "UINT16": 1, "UINT32": 2, "INT32": 3, "UINT64": 4, "INT64": 5, "FLOAT16": 6, "FLOAT32": 7, "FLOAT64": 8,
    "BFLOAT16": 9,
}  # fmt: skip
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}


@dataclass(frozen=True)
class Memory:
    """Where the workspaces of a plan are in the memory that callers give.

    Attributes:
        offsets: name -> (bytes from the start of its memory, whether that is the prepared memory).
        scratch_bytes: of the workspaces that every call needs.
        prepared_bytes: of those that only constant steps write. In a plain call they follow the others.
    """

    offsets: Mapping[str, tuple[int, bool]]
    scratch_bytes: int
    prepared_bytes: int
    alignment: int

    @classmethod
    def of(cls, plan: LaunchPlan) -> Memory:
        alignment = max([WORKSPACE_ALIGNMENT, *(plan.alignments.get(name, 1) for name in plan.workspaces)])
        sizes = {False: 0, True: 0}
        offsets = {}
        for name in sorted(plan.workspaces):
            prepared = name in plan.constant_workspaces
            offsets[name] = (sizes[prepared], prepared)
            sizes[prepared] += -(-plan.workspaces[name] // alignment) * alignment
        return cls(offsets, sizes[False], sizes[True], alignment)

    @property
    def workspace_bytes(self) -> int:
        return self.scratch_bytes + self.prepared_bytes


def plan_source(chosen: Chosen) -> str:
    """The definition of `code`, and of the tables and variables that it points to."""
    plan, workload = chosen.plan, chosen.workload
    memory, pointers = Memory.of(plan), pointer_names(workload)
    addresses = {name: number for number, name in enumerate((*pointers, *memory.offsets))}
    scalars = {scalar.name: number for number, scalar in enumerate(workload.scalars)}
    parts = [_step_source(number, step, addresses, scalars) for number, step in enumerate(plan.steps)]
    parts.append(_array("schedsearch_step", "steps", (_step_row(n, step, addresses) for n, step in enumerate(plan.steps))))
    parts.append(_array("uint64_t", "alignments", (str(plan.alignments.get(name, 1)) for name in pointers)))
    workspaces = [f"{{{offset}, {int(prepared)}}}" for offset, prepared in memory.offsets.values()]
    parts.append(_array("schedsearch_workspace", "workspaces", workspaces))
    parts.append(_array("schedsearch_range", "ranges", _ranges(workload)))
    major, minor, exactly = _capability(plan.arch)
    masks = [_mask(pointers, needed(plan, pointers, constant=constant)) for constant in (None, True, False)]
    fields = [
        "image", str(len(chosen.artifact.code)), major, minor, exactly,
        "steps", str(len(plan.steps)), "alignments", *masks,
        "workspaces" if workspaces else "NULL", str(len(workspaces)), str(memory.alignment),
        "ranges" if workload.scalars else "NULL", "&state", "loaded",
    ]  # fmt: skip
    parts.append(
        "static schedsearch_state state;\n"
        f"static schedsearch_loaded_step loaded[SCHEDSEARCH_MAX_DEVICES * {len(plan.steps)}];\n"
    )
    parts.append(f"static const struct schedsearch_code code = {{\n    {', '.join(fields)}\n}};\n")
    return "\n".join(part for part in parts if part)


def _capability(arch: str) -> tuple[str, str, str]:
    """Major and minor compute capability, and whether code for it runs on no later one: see `Target.runs`."""
    of = Architecture.parse(arch)
    return str(of.major), str(of.minor), str(int(of.suffix == "a"))


def _mask(names: Sequence[str], chosen: Iterable[str]) -> str:
    return f"{sum(1 << names.index(name) for name in chosen):#x}"


def _array(kind: str, name: str, rows: Iterable[str]) -> str:
    lines = [f"    {row}," for row in rows]
    return "\n".join([f"static const {kind} {name}[] = {{", *lines, "};", ""]) if lines else ""


def _step_source(number: int, step: Step, addresses: Mapping[str, int], scalars: Mapping[str, int]) -> str:
    maps = [param for param in step.params if isinstance(param, TensorMap)]
    params = [row for param in step.params for row in _param_rows(param, addresses, scalars, maps)]
    return "\n".join(
        part
        for part in (
            _array("schedsearch_map", f"maps_{number}", (_map_row(each, addresses) for each in maps)),
            f"static schedsearch_kept_map kept_{number}[{len(maps)}][SCHEDSEARCH_KEPT_MAPS];\n" if maps else "",
            _array("schedsearch_param", f"params_{number}", params),
        )
        if part
    )


def _step_row(number: int, step: Step, addresses: Mapping[str, int]) -> str:
    maps = sum(isinstance(param, TensorMap) for param in step.params)
    words = sum(len(param.words) if param.kind == "array" else 1 for param in step.params)
    # The launcher computes a persistent grid for the card at hand; it replaces the extent along x.
    grid = step.grid.shape or (1 if step.grid.blocks_per_sm else step.grid.blocks(1, step.cluster), 1, 1)
    restored = [addresses[name] for name in step.buffers] if step.restores else [-1, -1]
    fields = [
        string(step.entry),
        f"params_{number}" if words else "NULL", words,
        f"maps_{number}" if maps else "NULL", maps, f"kept_{number}" if maps else "NULL",
        _list(grid), _list(step.block_shape or (step.block_threads, 1, 1)),
        step.dynamic_shared_bytes, step.cluster, step.grid.blocks_per_sm, step.grid.work_items,
        int(step.constant), *restored,
    ]  # fmt: skip
    return f"{{{', '.join(map(str, fields))}}}"


def _param_rows(
    param: Param, addresses: Mapping[str, int], scalars: Mapping[str, int], maps: Sequence[TensorMap]
) -> list[str]:
    """The parameters that the driver gets: one, or several for an array. See `CudaBoundKernel._pack_param`."""

    def value(bits: int) -> str:
        return f"{{SCHEDSEARCH_VALUE, 0, {bits % 2**64:#x}}}"

    def address(buffer: str) -> str:
        return f"{{SCHEDSEARCH_ADDRESS, {addresses[buffer]}, 0}}"

    if isinstance(param, TensorMap):
        return [f"{{SCHEDSEARCH_MAP, {next(n for n, each in enumerate(maps) if each is param)}, 0}}"]
    if isinstance(param, Pointer):
        return [address(param.buffer) if param.buffer in addresses else value(0)]
    if param.kind == "array":
        return [address(param.buffer) if word is None else value(word) for word in param.words]
    if param.kind == "scalar":
        return [f"{{SCHEDSEARCH_SCALAR, {scalars[param.name]}, 0}}"]
    if param.kind == "number":
        return [value(number_bits(param.value, param.dtype))]
    if param.kind == "literal":
        return [value(0)]  # the kernel ignores it
    if param.kind == "f32":
        return [value(int.from_bytes(struct.pack("<f", param.value), "little"))]
    return [value(param.value)]


def _map_row(param: TensorMap, addresses: Mapping[str, int]) -> str:
    fields: list[Any] = [
        addresses[param.buffer], TENSOR_MAP_DTYPES[dtype_of(param.dtype).tma], len(param.dims),
        _list(param.dims, 5), _list(param.strides_bytes, 5), _list(param.element_strides, 5), _list(param.box, 5),
        _list(param.lower, 3), _list(param.upper, 3), param.channels_per_pixel, param.pixels_per_column,
        _SWIZZLES[param.swizzle_bytes], _PROMOTIONS[param.l2_promotion_bytes],
    ]  # fmt: skip
    return f"{{{', '.join(map(str, fields))}}}"


def _list(values: Sequence[int], length: int = 3) -> str:
    return f"{{{', '.join(map(str, [*values, *[0] * (length - len(values))]))}}}"


def _ranges(workload: Workload) -> list[str]:
    """The allowed numbers of each scalar; see `Kernel`."""
    rows = [dtype_of(scalar.number) if scalar.number else None for scalar in workload.scalars]
    return [f"{{{row.lowest:.1f}, {row.largest:.1f}}}" if row else "{1.0, 0.0}" for row in rows]
