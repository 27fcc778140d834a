"""fill_margin on GPUs and CPUs: see docs/kernels/arrange.md.

The elements beyond the extent along one axis form a slab: `margin` neighbours for all places along the other axes. Threads
count through the slabs of all axes, one after the other. Where slabs cross, both write the same number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numba import cuda

from schedsearch.config import Config
from schedsearch.launch import Grid, NumbaArray
from schedsearch.launch_rules import MAX_GRID_X
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.fill_margin import FillMarginParams, margin_bits
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.own_kernel.copies import copy_on_cpu, copy_on_gpu
from schedsearch.templates.parts.casts import i64, u32, u64
from schedsearch.templates.parts.cpu_threads import SharedByThreads
from schedsearch.templates.parts.whole_reference import WholeReference
from schedsearch.workload import Workload

Array = np.ndarray[Any, np.dtype[Any]]
_THREADS = (128, 256, 512)
_COPY_THREADS = 256
_Fill = Callable[[Any, Any, Any, Any], None]


class FillMarginCuda(Template[FillMarginParams]):
    """A thread has an element of a slab."""

    name = "fill_margin_cuda"
    version = 1
    op = "fill_margin"
    kind = "cuda"

    def validate(self, workload: Workload[FillMarginParams], target: Target) -> str | None:
        blocks = max(-(-workload.output.size // _COPY_THREADS), -(-_slabs(workload) // _THREADS[0]))
        return None if blocks <= MAX_GRID_X else f"x needs {blocks} blocks; allowed: less than 2**31"

    def space(self, workload: Workload[FillMarginParams], target: Target) -> ConfigSpace:
        return ConfigSpace((Knob("threads", _THREADS, "threads of a block"),))

    def default(self, workload: Workload[FillMarginParams], target: Target, space: ConfigSpace) -> Config:
        return Config(threads=128)

    def kernel(self, workload: Workload[FillMarginParams], target: Target, config: Config) -> KernelSource:
        fill, threads, count = filling(workload), config["threads"], _slabs(workload)
        bits = margin_bits(workload.params.value, workload.params.dtype)[0]

        def fill_margin(y, x_extents) -> None:  # type: ignore[no-untyped-def]
            item = i64(cuda.blockIdx.x) * threads + cuda.threadIdx.x
            if item < count:
                fill(y, x_extents, item, bits)

        x, y, x_extents = _arrays(workload)
        copied = Grid(-(-workload.output.size // _COPY_THREADS))
        steps = (
            KernelStep(copy_on_gpu, (x, y), copied, _COPY_THREADS, restores=True),
            KernelStep(fill_margin, (y, x_extents), Grid(-(-count // threads)), threads),
        )
        return KernelSource("cuda", "native", steps)


class FillMarginCpu(SharedByThreads[FillMarginParams]):
    """Threads share the elements of the slabs."""

    name = "fill_margin_cpu"
    version = 1
    op = "fill_margin"

    def items(self, workload: Workload[FillMarginParams]) -> int:
        return _slabs(workload)

    def kernel(self, workload: Workload[FillMarginParams], target: Target, config: Config) -> KernelSource:
        fill, threads, count = filling(workload), config["threads"], _slabs(workload)
        bits, size = margin_bits(workload.params.value, workload.params.dtype)[0], workload.output.size

        def copy(x: Any, y: Any, start: Any, stop: Any) -> None:
            copy_on_cpu(x, y, size * start // threads, size * stop // threads)

        def fill_margin(y: Any, x_extents: Any, start: Any, stop: Any) -> None:
            for item in range(count * start // threads, count * stop // threads):
                fill(y, x_extents, item, bits)

        x, y, x_extents = _arrays(workload)
        steps = (
            KernelStep(copy, (x, y), Grid(threads), threads, restores=True),
            KernelStep(fill_margin, (y, x_extents), Grid(threads), threads),
        )
        return KernelSource("cpu", "native", steps)


class FillMarginReference(WholeReference[FillMarginParams]):
    def compute(self, workload: Workload[FillMarginParams], arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        p = workload.params
        y = np.array(arrays["x"])
        row = dtype_of(p.dtype)
        number = (row.lowest if row.is_float else int(row.lowest)) if p.value == "lowest" else 0
        for axis, (extent, width) in enumerate(zip(arrays["x_extents"], p.margin)):
            first = min(max(int(extent), 0), p.x[axis])
            y[(slice(None),) * axis + (slice(first, first + width),)] = number
        return {"y": y}


def filling(p: Workload[FillMarginParams]) -> _Fill:
    """`fill(y, x_extents, item, bits)`: writes an element of the slabs of all axes, if it is within the bound."""
    found: _Fill = _nothing
    for axis, width in enumerate(p.params.margin):
        if width:
            found = _slab_first(found, p, axis, width)
    return found


def _slab_first(others: _Fill, workload: Workload[FillMarginParams], axis: int, width: int) -> _Fill:
    """The slab of an axis before those of others, by divisions of 32 bits where the numbers allow it."""
    p = workload.params
    bound, inner = p.x[axis], math.prod(p.x[axis + 1 :])
    block = width * inner
    count = math.prod(p.x[:axis]) * block
    number = u32 if _slabs(workload) < 2**32 else u64

    def fill(y: Any, x_extents: Any, item: Any, bits: Any) -> None:
        if item >= count:
            others(y, x_extents, i64(item - count), bits)
            return
        outer = number(number(item) // number(block))
        rest = number(number(item) - number(outer * number(block)))
        above = number(rest // number(inner))
        place = i64(max(x_extents[axis], 0)) + i64(above)
        column = i64(number(rest - number(above * number(inner))))
        if place < bound:
            y[(i64(outer) * bound + place) * inner + column] = bits

    return fill


def _nothing(y: Any, x_extents: Any, item: Any, bits: Any) -> None:
    pass


def _slabs(p: Workload[FillMarginParams]) -> int:
    """Elements of all slabs."""
    return sum(p.output.size // extent * width for extent, width in zip(p.params.x, p.params.margin))


def _arrays(workload: Workload[FillMarginParams]) -> tuple[NumbaArray, NumbaArray, NumbaArray]:
    """x, y and x_extents as flat arrays; elements as their bits."""
    p = workload.params
    bits, nbytes = margin_bits(p.value, p.dtype)[1], dtype_of(p.dtype).nbytes
    x, y = (NumbaArray(name, bits, (workload.output.size,), (nbytes,)) for name in "xy")
    return x, y, NumbaArray("x_extents", "int64", (len(p.x),), (8,))
