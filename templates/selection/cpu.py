"""topk and nonzero on CPUs: see docs/kernels/selection.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from schedsearch.config import Config
from schedsearch.launch import Grid, NumbaArray
from schedsearch.ops.nonzero import NonZeroParams
from schedsearch.ops.params import MAX_INT
from schedsearch.ops.softmax import along
from schedsearch.ops.topk import TopKParams
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.parts.casts import i64
from schedsearch.templates.parts.cpu_threads import busy_threads, threads_knob
from schedsearch.templates.selection.keys import index_of, is_nonzero, key_of, pair, words_of
from schedsearch.templates.selection.topk_cuda import arrays_of
from schedsearch.templates.selection.topk_kernels import extents_writer, used_lengths
from schedsearch.workload import Workload

_PARTS = (1, 4, 16, 64)


class TopKCpu(Template[TopKParams]):
    """A work item has one row. It keeps the best k numbers so far in a heap, the worst of them on top."""

    name = "topk_cpu"
    version = 1
    op = "topk"
    kind = "cpu"

    def validate(self, workload: Workload[TopKParams], target: Target) -> str | None:
        _, length, _ = along(workload.params)
        return None if length <= MAX_INT else f"x has {length} numbers along the axis; allowed: less than 2**31"

    def space(self, workload: Workload[TopKParams], target: Target) -> ConfigSpace:
        return ConfigSpace((threads_knob(target),))

    def default(self, workload: Workload[TopKParams], target: Target, space: ConfigSpace) -> Config:
        return Config(threads=busy_threads(workload, target, space.values["threads"]))

    def kernel(self, workload: Workload[TopKParams], target: Target, config: Config) -> KernelSource:
        outer, _, inner = along(workload.params)
        rows = outer * inner
        x, y, indices, x_extents, y_extents = arrays_of(workload)
        heaps = NumbaArray("heaps", "int64", (rows * workload.params.k,), (8,))
        params = (x, x_extents, y, indices, y_extents, heaps)
        step = KernelStep(topk_kernel(workload), params, Grid(rows), min(rows, config["threads"]))
        return KernelSource("cpu", "native", (step,), {"heaps": 8 * rows * workload.params.k})


class NonZeroCpu(Template[NonZeroParams]):
    """Work items count the elements of their parts, and write them behind those of the items before."""

    name = "nonzero_cpu"
    version = 1
    op = "nonzero"
    kind = "cpu"

    def validate(self, workload: Workload[NonZeroParams], target: Target) -> str | None:
        return None

    def space(self, workload: Workload[NonZeroParams], target: Target) -> ConfigSpace:
        size = math.prod(workload.params.x)
        parts = tuple(n for n in _PARTS if n == 1 or n * 64 <= size)
        return ConfigSpace((Knob("parts", parts, "work items, which are parts of x"), threads_knob(target)))

    def default(self, workload: Workload[NonZeroParams], target: Target, space: ConfigSpace) -> Config:
        return Config(parts=space.values["parts"][-1], threads=busy_threads(workload, target, space.values["threads"]))

    def kernel(self, workload: Workload[NonZeroParams], target: Target, config: Config) -> KernelSource:
        size = math.prod(workload.params.x)
        part = -(-size // config["parts"])
        items = -(-size // part)
        threads = min(items, config["threads"])
        x, counts = words_of("x", workload.params.dtype, size), NumbaArray("counts", "int64", (items,), (8,))
        y, y_extents = (NumbaArray(spec.name, "int64", (spec.size,), (8,)) for spec in workload.outputs)
        steps = (
            KernelStep(_count_kernel(workload, part), (x, counts), Grid(items), threads),
            KernelStep(_place_kernel(workload, part), (x, counts, y, y_extents), Grid(items), threads),
        )
        return KernelSource("cpu", "native", steps, {"counts": 8 * items})


def topk_kernel(workload: Workload[TopKParams]) -> Callable[..., None]:
    """The kernel (x, x_extents, y, indices, y_extents, heaps, start, stop) over rows."""
    p = workload.params
    _, length, inner = along(p)
    k, key, used, write_extents = p.k, key_of(p.dtype, p.largest), used_lengths(workload), extents_writer(workload)

    def topk(
        x: Any, x_extents: Any, y: Any, indices: Any, y_extents: Any, heaps: Any, start: Any, stop: Any
    ) -> None:  # fmt: skip
        if start == 0:
            write_extents(y_extents, x_extents)
        for row in range(start, stop):
            first = i64(row // inner * length * inner + row % inner)
            heap, count = i64(row * k), i64(0)
            for item in range(used(row, x_extents)):
                number = pair(key(x[first + item * inner]), item)
                if count < k:
                    at = i64(count)
                    count = i64(count + 1)
                    while at > 0 and heaps[heap + (at - 1) // 2] < number:
                        heaps[heap + at] = heaps[heap + (at - 1) // 2]
                        at = i64((at - 1) // 2)
                    heaps[heap + at] = number
                elif number < heaps[heap]:
                    sink(heaps, heap, k, number, 0)
            for last in range(count - 1, -1, -1):  # the worst of those that are left
                item = index_of(heaps[heap])
                to = i64((row // inner * k + last) * inner + row % inner)
                y[to] = x[first + item * inner]
                indices[to] = item
                sink(heaps, heap, last, heaps[heap + last], 0)

    return topk


def sink(heaps: Any, heap: Any, size: Any, number: Any, place: Any) -> None:
    """Puts a number in a place of a heap of `size` numbers that begins at `heap`, the largest on top; the numbers below the
    place are a heap already."""
    at = i64(place)
    sinking = size > 0
    while sinking:
        child = i64(2 * at + 1)
        if child + 1 < size and heaps[heap + child + 1] > heaps[heap + child]:
            child = i64(child + 1)
        sinking = child < size and heaps[heap + child] > number
        if sinking:
            heaps[heap + at] = heaps[heap + child]
            at = i64(child)
    if size > 0:
        heaps[heap + at] = number


def _count_kernel(p: Workload[NonZeroParams], part: int) -> Callable[..., None]:
    size, holds = math.prod(p.params.x), is_nonzero(p.params.dtype)

    def count(x: Any, counts: Any, start: Any, stop: Any) -> None:
        for item in range(start, stop):
            total = 0
            for at in range(item * part, min(item * part + part, size)):
                total += i64(holds(x[at]))
            counts[item] = total

    return count


def _place_kernel(workload: Workload[NonZeroParams], part: int) -> Callable[..., None]:
    p = workload.params
    size, holds, rank = math.prod(p.x), is_nonzero(p.dtype), len(p.x)
    strides, items = tuple(math.prod(p.x[axis + 1 :]) for axis in range(rank)), -(-size // part)

    def places(x: Any, counts: Any, y: Any, y_extents: Any, start: Any, stop: Any) -> None:
        for item in range(start, stop):
            to = 0
            for other in range(item):
                to += counts[other]
            if item == items - 1:
                y_extents[0] = rank
                y_extents[1] = to + counts[item]
            for at in range(item * part, min(item * part + part, size)):
                if holds(x[at]):
                    rest = at
                    for axis in range(rank):
                        y[axis * size + to] = rest // strides[axis]
                        rest = rest % strides[axis]
                    to += 1

    return places
