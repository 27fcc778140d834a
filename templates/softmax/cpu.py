"""softmax on CPUs: see docs/kernels/bandwidth.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from schedsearch.backend.cpu_moves import read_op, write_op
from schedsearch.backend.cpu_ops import as_array
from schedsearch.backend.cpu_taps import stack_memory
from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.ops.softmax import SoftmaxParams, along
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.parts.casts import f32, i64
from schedsearch.templates.parts.cpu_elements import element_type, narrowed, widened
from schedsearch.templates.parts.cpu_functions import exp
from schedsearch.templates.parts.cpu_threads import busy_threads, threads_knob
from schedsearch.workload import Workload

_ROWS = (1, 4, 16, 64, 256)
_MAX_ITEMS = 2**31 - 1
_LANES = 16  # float32 of the widest vector


class SoftmaxCpu(Template[SoftmaxParams]):
    """A work item has neighbouring rows, and passes over them three times."""

    name = "softmax_cpu"
    version = 2
    op = "softmax"
    kind = "cpu"

    def validate(self, workload: Workload[SoftmaxParams], target: Target) -> str | None:
        items = _items(workload, _ROWS[-1])
        return None if items <= _MAX_ITEMS else f"x has {items} parts; allowed: less than 2**31"

    def space(self, workload: Workload[SoftmaxParams], target: Target) -> ConfigSpace:
        _, _, inner = along(workload.params)
        longest = _ROWS[0] if _folds(inner) > 1 else next((n for n in _ROWS if n >= inner), _ROWS[-1])
        rows = tuple(n for n in _ROWS if n <= longest and _items(workload, n) <= _MAX_ITEMS) or (longest,)
        return ConfigSpace(
            (
                Knob("rows", rows, "neighbouring rows of a work item, side by side in memory"),
                threads_knob(target),
            )
        )

    def default(self, workload: Workload[SoftmaxParams], target: Target, space: ConfigSpace) -> Config:
        """Rows that fill a line of the cache, or all that are side by side. As many threads as have enough
        to do."""
        values = space.values
        rows = max(n for n in values["rows"] if n <= max(64, values["rows"][0]))
        return Config(rows=rows, threads=busy_threads(workload, target, values["threads"]))

    def kernel(self, workload: Workload[SoftmaxParams], target: Target, config: Config) -> KernelSource:
        items = _items(workload, config["rows"])
        step = KernelStep(
            softmax_kernel(workload, config["rows"]),
            (Pointer("x"), Pointer("y")),
            Grid(items),
            min(config["threads"], items),
        )
        return KernelSource("cpu", "native", (step,))


def softmax_kernel(workload: Workload[SoftmaxParams], rows: int) -> Callable[..., None]:
    """The kernel (x, y, start, stop) over groups of `rows` neighbouring rows: the largest numbers, the sums, the results.

    Where few rows are side by side, a lane of a vector has every so many elements of its row, and lanes of a row meet after
    each of the first two passes.
    """
    p = workload.params
    _, length, inner = along(p)
    folds = _folds(inner)
    lanes = inner * folds if folds > 1 else rows
    parts, log, memory = -(-inner // rows), p.log, stack_memory(8 * lanes)
    element, widen, narrow, held = element_type(p.dtype), widened(p.dtype), narrowed(p.dtype), 2 * lanes
    read, write = read_op(element), write_op(element)
    pitch, steps, rest = (lanes, *divmod(length, folds)) if folds > 1 else (inner, length, 0)
    rest *= inner  # elements of the last step, which has not all lanes

    def place(item: Any) -> Any:
        """The first element and the lanes of a work item."""
        if folds > 1:
            return item * length * inner, i64(lanes)
        first = item % parts * rows
        return item // parts * length * inner + first, min(i64(rows), inner - first)

    def larger(source: Any, at: Any, found: Any, count: Any) -> None:
        for r in range(count):
            value = widen(read(source, at + r))
            found[r] = value if (value > found[r]) | (value != value) else found[r]

    def add(source: Any, at: Any, found: Any, count: Any) -> None:
        for r in range(count):
            found[lanes + r] += exp(f32(widen(read(source, at + r)) - found[r]))

    def finish(source: Any, out: Any, at: Any, found: Any, count: Any) -> None:
        for r in range(count):
            distance = f32(widen(read(source, at + r)) - found[r])
            if log:
                write(out, at + r, narrow(f32(distance - found[lanes + r])))
            else:
                write(out, at + r, narrow(f32(exp(distance) * found[lanes + r])))

    def softmax(x: Any, y: Any, start: Any, stop: Any) -> None:
        found = as_array(memory(), (held,), f32)  # the largest numbers, then the sums
        for item in range(start, stop):
            at, count = place(item)
            for r in range(count):
                found[r], found[lanes + r] = f32(-math.inf), f32(0)
            for i in range(steps):
                larger(x, at + i * pitch, found, count)
            larger(x, at + steps * pitch, found, rest)
            for r in range(inner, lanes if folds > 1 else 0):
                value = found[r]
                found[r % inner] = value if (value > found[r % inner]) | (value != value) else found[r % inner]
            for r in range(inner, lanes if folds > 1 else 0):
                found[r] = found[r % inner]
            for i in range(steps):
                add(x, at + i * pitch, found, count)
            add(x, at + steps * pitch, found, rest)
            for r in range(inner, lanes if folds > 1 else 0):
                found[lanes + r % inner] += found[lanes + r]
            for r in range(min(inner, count)):
                sums = found[lanes + r]
                found[lanes + r] = f32(math.log(sums)) if log else f32(f32(1) / sums)
            for r in range(inner, lanes if folds > 1 else 0):
                found[lanes + r] = found[lanes + r % inner]
            for i in range(steps):
                finish(x, y, at + i * pitch, found, count)
            finish(x, y, at + steps * pitch, found, rest)

    return softmax


def _folds(inner: int) -> int:
    """Elements of a row in a step, so that the rows side by side fill a vector together."""
    return -(-_LANES // inner) if inner < _LANES else 1


def _items(p: Workload[SoftmaxParams], rows: int) -> int:
    outer, _, inner = along(p.params)
    return outer if _folds(inner) > 1 else outer * -(-inner // rows)
