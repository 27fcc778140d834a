"""layer_norm on CPUs: see docs/kernels/bandwidth.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from schedsearch.backend.cpu_ops import as_array
from schedsearch.backend.cpu_taps import stack_memory
from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.ops.layer_norm import LayerNormParams, rows_of
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.parts.casts import f32
from schedsearch.templates.parts.cpu_elements import element_type, narrowed, widened
from schedsearch.templates.parts.cpu_threads import busy_threads, threads_knob
from schedsearch.workload import Workload

_SUMS = (4, 8, 16, 32)
_MAX_ITEMS = 2**31 - 1


class LayerNormCpu(Template[LayerNormParams]):
    """A work item is a row, over which it passes three times: for the mean, the variance and the results."""

    name = "layer_norm_cpu"
    version = 1
    op = "layer_norm"
    kind = "cpu"

    def validate(self, workload: Workload[LayerNormParams], target: Target) -> str | None:
        rows, _ = rows_of(workload.params)
        return None if rows <= _MAX_ITEMS else f"x has {rows} rows; allowed: less than 2**31"

    def space(self, workload: Workload[LayerNormParams], target: Target) -> ConfigSpace:
        return ConfigSpace(
            (
                Knob("sums", _SUMS, "partial sums of a row, which the processor adds side by side"),
                threads_knob(target, "rows"),
            )
        )

    def default(self, workload: Workload[LayerNormParams], target: Target, space: ConfigSpace) -> Config:
        """Sums that fill two registers of AVX-512, or one row. As many threads as have enough to do."""
        return Config(sums=_SUMS[-1], threads=busy_threads(workload, target, space.values["threads"]))

    def kernel(self, workload: Workload[LayerNormParams], target: Target, config: Config) -> KernelSource:
        rows, _ = rows_of(workload.params)
        step = KernelStep(
            rows_kernel(workload, config["sums"]),
            (Pointer("x"), Pointer("scale"), Pointer("bias", optional=not workload.params.bias), Pointer("y")),
            Grid(rows),
            min(config["threads"], rows),
        )
        return KernelSource("cpu", "native", (step,))


def rows_kernel(workload: Workload[LayerNormParams], sums: int) -> Callable[..., None]:
    """The kernel (x, scale, bias, y, start, stop) over rows."""
    p = workload.params
    rows, length = rows_of(p)
    size, whole = rows * length, length // sums * sums
    epsilon, centred, has_bias = f32(p.epsilon), p.centred, p.bias
    element, widen, narrow, memory = element_type(p.dtype), widened(p.dtype), narrowed(p.dtype), stack_memory(4 * sums)

    def layer_norm(x: Any, scale: Any, bias: Any, y: Any, start: Any, stop: Any) -> None:
        source, out = as_array(x, (size,), element), as_array(y, (size,), element)
        factors, addends = as_array(scale, (length,), f32), as_array(bias, (length,), f32)
        part = as_array(memory(), (sums,), f32)
        for row in range(start, stop):
            at = row * length
            mean = f32(0)
            if centred:
                for s in range(sums):
                    part[s] = f32(0)
                for i in range(0, whole, sums):
                    for s in range(sums):
                        part[s] += widen(source[at + i + s])
                for i in range(whole, length):
                    part[0] += widen(source[at + i])
                for s in range(sums):
                    mean += part[s]
                mean = f32(mean / f32(length))
            for s in range(sums):
                part[s] = f32(0)
            for i in range(0, whole, sums):
                for s in range(sums):
                    distance = f32(widen(source[at + i + s]) - mean)
                    part[s] += f32(distance * distance)
            for i in range(whole, length):
                distance = f32(widen(source[at + i]) - mean)
                part[0] += f32(distance * distance)
            square = f32(0)
            for s in range(sums):
                square += part[s]
            inverse = f32(f32(1) / f32(math.sqrt(f32(f32(square / f32(length)) + epsilon))))
            for i in range(length):
                value = f32(f32(f32(widen(source[at + i]) - mean) * inverse) * factors[i])
                if has_bias:
                    value = f32(value + addends[i])
                out[at + i] = narrow(value)

    return layer_norm
