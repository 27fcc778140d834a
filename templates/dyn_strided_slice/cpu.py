"""dyn_strided_slice on a CPU: threads share the rows of the slice that they find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedsearch.backend.cpu_ops import as_array
from schedsearch.config import Config
from schedsearch.launch import Grid
from schedsearch.ops.dtypes import dtype
from schedsearch.ops.dyn_strided_slice import DynStridedSliceParams, count_of_size, count_to, first_position, sliced_by
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.dyn_strided_slice.cuda import parameters
from schedsearch.templates.parts.casts import i32, i64, u8, u16, u32, u64
from schedsearch.workload import Workload

_SHARES = 8  # of a thread


class DynStridedSliceCpu(Template[DynStridedSliceParams]):
    """Rows along the last dimension, which are copied where their elements are neighbours."""

    name = "dyn_strided_slice_cpu"
    op = "dyn_strided_slice"
    kind = "cpu"

    def validate(self, workload: Workload[DynStridedSliceParams], target: Target) -> str | None:
        return None

    def space(self, workload: Workload[DynStridedSliceParams], target: Target) -> ConfigSpace:
        return ConfigSpace((Knob("threads", tuple(range(1, target.sms + 1)), "threads that share the rows"),))

    def default(self, workload: Workload[DynStridedSliceParams], target: Target, space: ConfigSpace) -> Config:
        return Config(threads=target.sms)

    def kernel(self, workload: Workload[DynStridedSliceParams], target: Target, config: Config) -> KernelSource:
        shares = _SHARES * config["threads"]
        step = KernelStep(slice_kernel(workload, shares), parameters(workload), Grid(shares), config["threads"])
        return KernelSource("cpu", "native", (step,))


def slice_kernel(workload: Workload[DynStridedSliceParams], shares: int) -> Callable[..., None]:
    """The kernel (x, x_extents, begin, end, strides, y, y_extents, *strides, start, stop) over shares of the rows."""
    p = workload.params
    shape, bound, entry_of, rank, entries = p.x, p.bound, sliced_by(p), len(p.x), p.entries
    dynamic, strided, by_size = p.dynamic, p.strided, p.mode == "size"
    index = i64 if p.index_dtype == "int64" else i32
    element = {1: u8, 2: u16, 4: u32, 8: u64}[dtype(p.dtype).nbytes]
    nbytes, last = dtype(p.dtype).nbytes, rank - 1

    def slice_along(axis: Any, x_extents: Any, begin: Any, end: Any, strides: Any) -> Any:
        """(extent, first position, step, whether it is possible)"""
        extent = i64(shape[axis])
        if dynamic:
            extent = min(extent, max(as_array(x_extents, (rank,), i64)[axis], i64(0)))
        entry = entry_of[axis]
        if entry < 0:
            return extent, i64(0), i64(1), extent <= bound[axis]
        step = i64(1)
        if strided:
            step = i64(as_array(strides, (entries,), index)[entry])
        first = i64(as_array(begin, (entries,), index)[entry])
        stop = i64(as_array(end, (entries,), index)[entry])
        count, possible = i64(0), step != 0
        if by_size:
            count, possible = count_of_size(extent, first, stop), stop >= -1
        elif step != 0:
            count = count_to(extent, first, stop, step)
        return count, first_position(extent, first, step), step, possible and count <= bound[axis]

    def dyn_strided_slice(
        x: Any,
        x_extents: Any,
        begin: Any,
        end: Any,
        strides: Any,
        y: Any,
        y_extents: Any,
        *steps: Any,
        start: Any,
        stop: Any,
    ) -> None:
        extents_out = as_array(y_extents, (rank,), i64)
        possible, rows = True, i64(1)
        for axis in range(rank):
            extent, _, _, fits = slice_along(axis, x_extents, begin, end, strides)
            possible = possible and fits
            if axis < last:
                rows *= extent
        if start == 0:
            for axis in range(rank):
                extent, _, _, _ = slice_along(axis, x_extents, begin, end, strides)
                extents_out[axis] = extent if possible else i64(0)
        if not possible:
            rows = i64(0)
        length, first, step, _ = slice_along(last, x_extents, begin, end, strides)
        for row in range(rows * start // shares, rows * stop // shares):
            x_at, y_at, rest = first * steps[last], i64(0), row
            for back in range(1, rank):
                axis = last - back
                extent, from_, by, _ = slice_along(axis, x_extents, begin, end, strides)
                digit = rest % extent
                rest //= extent
                x_at += (from_ + digit * by) * steps[axis]
                y_at += digit * steps[rank + axis]
            x_step, y_step = step * steps[last], steps[rank + last]
            if x_step < 0:  # no place of an array is negative
                x_at += (length - 1) * x_step
            source = as_array(i64(x) + x_at * nbytes, (1,), element)
            out = as_array(i64(y) + y_at * nbytes, (1,), element)
            if x_step == 1 and y_step == 1:
                for i in range(length):
                    out[i] = source[i]
            elif x_step > 0:
                for i in range(length):
                    out[i * y_step] = source[i * x_step]
            else:
                for i in range(length):
                    out[i * y_step] = source[(i - length + 1) * x_step]

    return dyn_strided_slice
