"""unique on CPUs: see docs/kernels/selection.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedsearch.config import Config
from schedsearch.launch import Grid, NumbaArray
from schedsearch.ops.unique import UniqueParams, sliced
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.parts.casts import i64
from schedsearch.templates.selection.unique_cuda import arrays_of
from schedsearch.templates.selection.unique_kernels import comes_before, differs, wide_key
from schedsearch.workload import Workload

_RUNS = (4, 8, 16, 32)


class UniqueCpu(Template[UniqueParams]):
    """One thread sorts the places of elements or slices by merging, and numbers those that differ from the one before."""

    name = "unique_cpu"
    version = 1
    op = "unique"
    kind = "cpu"

    def validate(self, workload: Workload[UniqueParams], target: Target) -> str | None:
        return None

    def space(self, workload: Workload[UniqueParams], target: Target) -> ConfigSpace:
        return ConfigSpace((Knob("run", _RUNS, "neighbours that are sorted by insertion, before they are merged"),))

    def default(self, workload: Workload[UniqueParams], target: Target, space: ConfigSpace) -> Config:
        return Config(run=_RUNS[1])

    def kernel(self, workload: Workload[UniqueParams], target: Target, config: Config) -> KernelSource:
        _, count, _ = sliced(workload.params)
        arrays = arrays_of(workload)
        spaces = {name: NumbaArray(name, "int64", (count,), (8,)) for name in ("order", "other", "numbers")}
        names = "y", "indices", "inverse", "counts", "y_extents", "indices_extents", "counts_extents"
        params = (arrays["x"], *spaces.values(), *(arrays[name] for name in names))
        step = KernelStep(_unique_kernel(workload, config["run"]), params, Grid(1), 1)
        return KernelSource("cpu", "native", (step,), dict.fromkeys(spaces, 8 * count))


def _unique_kernel(workload: Workload[UniqueParams], run: int) -> Callable[..., None]:
    """The kernel (x, order, other, numbers, *outputs, start, stop) of one item."""
    p = workload.params
    outer, count, inner = sliced(p)
    key, before, different = wide_key(p.dtype), comes_before(workload), differs(workload)
    shape, axis, as_found = workload.outputs[0].shape, 0 if p.flat else p.axis, p.order == "first"

    def unique(
        x: Any, order: Any, other: Any, numbers: Any, y: Any, indices: Any, inverse: Any, counts: Any, y_extents: Any,
        indices_extents: Any, counts_extents: Any, start: Any, stop: Any,
    ) -> None:  # fmt: skip
        for first in range(0, count, run):
            for at in range(first, min(first + run, count)):
                to = i64(at)
                while to > first and before(x, key(x[at * inner]), at, key(x[order[to - 1] * inner]), order[to - 1]):
                    order[to] = order[to - 1]
                    to = i64(to - 1)
                order[to] = at
        width = i64(run)
        while width < count:
            for first in range(0, count, 2 * width):
                left, right = i64(first), i64(min(first + width, count))
                middle, end = i64(right), i64(min(first + 2 * width, count))
                for to in range(first, end):
                    from_left = right >= end
                    if left < middle and right < end:
                        a, b = order[left], order[right]
                        from_left = before(x, key(x[a * inner]), a, key(x[b * inner]), b)
                    if from_left:
                        other[to] = order[left]
                        left = i64(left + 1)
                    else:
                        other[to] = order[right]
                        right = i64(right + 1)
            for at in range(count):
                order[at] = other[at]
            width = i64(2 * width)
        found = i64(0)
        for at in range(count):
            if at > 0 and different(x, order[at], order[at - 1]):
                found = i64(found + 1)
            numbers[at] = found
        found = i64(found + 1)
        for at in range(count):  # `other` says for each kind which one it is in y
            other[at] = -1
        for at in range(count):
            inverse[order[at]] = numbers[at]
        if as_found:
            next_one = i64(0)
            for place in range(count):
                if other[inverse[place]] < 0:
                    other[inverse[place]] = next_one
                    next_one = i64(next_one + 1)
        for at in range(count):
            number, place = numbers[at], order[at]
            to = other[number] if as_found else number
            if at == 0 or numbers[at - 1] != number:
                indices[to], counts[to] = place, 0
                for row in range(outer):
                    for i in range(inner):
                        y[(row * count + to) * inner + i] = x[(row * count + place) * inner + i]
            counts[to] += 1
            inverse[place] = to
        for place in range(len(shape)):
            y_extents[place] = found if place == axis else shape[place]
        indices_extents[0] = found
        counts_extents[0] = found

    return unique
