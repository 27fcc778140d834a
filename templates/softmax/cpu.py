"""softmax on CPUs: see docs/kernels/bandwidth.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from schedsearch.backend.cpu_ops import as_array
from schedsearch.backend.cpu_taps import stack_memory
from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.ops.softmax import SoftmaxParams, along
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.parts.casts import f32
from schedsearch.templates.parts.cpu_elements import element_type, narrowed, widened
from schedsearch.templates.parts.cpu_threads import busy_threads, threads_knob
from schedsearch.workload import Workload

_ROWS = (1, 4, 16, 64, 256)
_MAX_ITEMS = 2**31 - 1


class SoftmaxCpu(Template[SoftmaxParams]):
    """A work item has neighbouring rows, and passes over them three times."""

    name = "softmax_cpu"
    version = 1
    op = "softmax"
    kind = "cpu"

    def validate(self, workload: Workload[SoftmaxParams], target: Target) -> str | None:
        items = _items(workload, _ROWS[-1])
        return None if items <= _MAX_ITEMS else f"x has {items} parts; allowed: less than 2**31"

    def space(self, workload: Workload[SoftmaxParams], target: Target) -> ConfigSpace:
        _, _, inner = along(workload.params)
        longest = next((n for n in _ROWS if n >= inner), _ROWS[-1])
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
    """The kernel (x, y, start, stop) over groups of `rows` neighbouring rows: the largest numbers, the sums, the results."""
    p = workload.params
    outer, length, inner = along(p)
    parts, size, log, memory = -(-inner // rows), outer * length * inner, p.log, stack_memory(8 * rows)
    element, widen, narrow, held = element_type(p.dtype), widened(p.dtype), narrowed(p.dtype), 2 * rows

    def softmax(x: Any, y: Any, start: Any, stop: Any) -> None:
        source, out = as_array(x, (size,), element), as_array(y, (size,), element)
        found = as_array(memory(), (held,), f32)  # the largest numbers, then the sums
        for item in range(start, stop):
            first = item % parts * rows
            count = min(rows, inner - first)
            at = item // parts * length * inner + first
            for r in range(count):
                found[r], found[rows + r] = f32(-math.inf), f32(0)
            for i in range(length):
                for r in range(count):
                    value = widen(source[at + i * inner + r])
                    found[r] = value if (value > found[r]) | (value != value) else found[r]
            for i in range(length):
                for r in range(count):
                    found[rows + r] += f32(math.exp(f32(widen(source[at + i * inner + r]) - found[r])))
            for r in range(count):
                found[rows + r] = f32(math.log(found[rows + r])) if log else f32(f32(1) / found[rows + r])
            for i in range(length):
                for r in range(count):
                    distance = f32(widen(source[at + i * inner + r]) - found[r])
                    if log:
                        out[at + i * inner + r] = narrow(f32(distance - found[rows + r]))
                    else:
                        out[at + i * inner + r] = narrow(f32(f32(math.exp(distance)) * found[rows + r]))

    return softmax


def _items(p: Workload[SoftmaxParams], rows: int) -> int:
    outer, _, inner = along(p.params)
    return outer * -(-inner // rows)
