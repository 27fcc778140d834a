"""depthwise_conv1d on CPUs: see docs/kernels/depthwise_conv1d.md."""

from __future__ import annotations

from typing import Literal

import numpy as np

from schedsearch.config import Config
from schedsearch.launch import Grid, Int64, Pointer
from schedsearch.ops.depthwise_conv1d import DepthwiseConv1dParams
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.depthwise_conv1d.cpu_kernels import Mode, correlate_kernel, reduce_kernel, weight_kernel
from schedsearch.templates.depthwise_conv1d.parts import small
from schedsearch.templates.parts.cpu_threads import busy_threads, threads_knob
from schedsearch.workload import Workload

_MAX_ITEMS = 2**31 - 1
_SUMS = 1 << 14  # of an item, on the stack
_FEWEST_STEPS = 16


class DepthwiseConv1dCpu(Template[DepthwiseConv1dParams]):
    """A work item computes some steps of some channels; its sums stay in the cache. Any sizes share one machine code."""

    name = "depthwise_conv1d_cpu"
    version = 1
    op = "depthwise_conv1d"
    kind = "cpu"

    def validate(self, workload: Workload[DepthwiseConv1dParams], target: Target) -> str | None:
        p = workload.params
        items = p.n * p.c * -(-(max(p.t, p.steps) + p.reach) // _FEWEST_STEPS)
        return None if items <= _MAX_ITEMS else f"x has {items} parts; allowed: less than 2**31"

    def space(self, workload: Workload[DepthwiseConv1dParams], target: Target) -> ConfigSpace:
        last = workload.params.layout == "NTC"
        return ConfigSpace(
            (
                Knob("channels", (16, 32, 64, 128, 256, 512) if last else (1,), "channels of a work item, side by side"),
                Knob("steps", (16, 32, 64, 128, 256, 1024, 4096), "steps of a work item"),
                threads_knob(target),
            ),
            (
                Constraint(
                    f"a work item has at most {_SUMS} sums", lambda k: np.asarray(k["channels"]) * k["steps"] <= _SUMS
                ),
            ),
        )

    def default(self, workload: Workload[DepthwiseConv1dParams], target: Target, space: ConfigSpace) -> Config:
        """Sums that fit in the first-level cache."""
        last = workload.params.layout == "NTC"
        threads = busy_threads(workload, target, space.values["threads"])
        return Config(channels=128 if last else 1, steps=32 if last else 1024, threads=threads)

    def reuse(self, workload: Workload[DepthwiseConv1dParams]) -> Literal["never", "verified", "trusted"]:
        """Batch, length and channels reach the kernels at run time."""
        return "trusted"

    def representative(self, workload: Workload[DepthwiseConv1dParams]) -> Workload[DepthwiseConv1dParams]:
        """Two rows of some hundred steps: several runs and blocks, none of them whole."""
        return small(workload)

    def kernel(self, workload: Workload[DepthwiseConv1dParams], target: Target, config: Config) -> KernelSource:
        p = workload.params
        block, steps, threads = config["channels"], config["steps"], config["threads"]

        def correlation(mode: Mode, buffers: tuple[str, ...], source_steps: int, out_steps: int, offset: int) -> KernelStep:
            begins = p.reach if mode == "gradient" and p.initial_state else 0
            items = p.n * -(-p.c // block) * -(-(out_steps + begins) // steps)
            sizes = (p.n, p.c, source_steps, out_steps, offset)
            pointers = tuple(Pointer(name, optional=True) for name in buffers)
            kernel = correlate_kernel(p, mode, block, steps)
            return KernelStep(kernel, (*pointers, *map(Int64, sizes)), Grid(items), min(threads, items))

        left = p.padding[0]
        if p.forward:
            buffers = ("x", "weight", "bias", "initial_state", "seq_idx", "none", "none", "y", "final_state")
            return KernelSource("cpu", "native", (correlation("forward", buffers, p.t, p.steps, -left),))
        made, dz, spaces = [], "dy", {"parts": 4 * p.n * (p.taps + 1) * p.c}
        if p.silu:
            dz, spaces["dz"] = "dz", 4 * p.n * p.steps * p.c
            buffers = ("x", "weight", "bias", "initial_state", "seq_idx", "dy", "none", "dz", "none")
            made.append(correlation("slope", buffers, p.t, p.steps, -left))
        buffers = (dz, "weight", "none", "none", "seq_idx", "none", "d_final_state", "dx", "d_initial_state")
        made.append(correlation("gradient", buffers, p.steps, p.t, left - p.reach))
        pointers = (Pointer(name, optional=True) for name in ("x", dz, "initial_state", "seq_idx", "parts"))
        items = p.n * -(-p.c // block)
        sizes = (p.n, p.c, p.t, p.steps, left)
        made.append(KernelStep(weight_kernel(p, block), (*pointers, *map(Int64, sizes)), Grid(items), min(threads, items)))
        outputs = (Pointer("parts"), Pointer("dw"), Pointer("db", optional=True), Int64(p.n), Int64(p.c))
        made.append(KernelStep(reduce_kernel(p), outputs, Grid(p.c), 1))
        return KernelSource("cpu", "native", tuple(made), spaces)
