"""Any number of taps and either order of memory, on NVIDIA GPUs: see docs/kernels/depthwise_conv1d.md."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from schedsearch.config import Config
from schedsearch.launch import Grid, Int32
from schedsearch.launch_rules import MAX_GRID_X
from schedsearch.ops.depthwise_conv1d import DepthwiseConv1dParams
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep
from schedsearch.templates.depthwise_conv1d import cuda_any_kernels
from schedsearch.templates.depthwise_conv1d.cuda import DepthwiseConv1dCuda, optional_pointer, reduction
from schedsearch.templates.depthwise_conv1d.cuda_any_kernels import TAPS_OF_BLOCK, AnyPlan
from schedsearch.workload import Workload

_MOST_SPLITS = 256


class DepthwiseConv1dAny(DepthwiseConv1dCuda):
    """Any number of taps, either order of memory: a thread computes a run of steps of one channel."""

    name = "depthwise_conv1d_any_cuda"
    version = 1

    def space(self, workload: Workload[DepthwiseConv1dParams], target: Target) -> ConfigSpace:
        p = workload.params
        knobs = (
            Knob("length", (1, 2, 4, 8, 16), "steps of a thread"),
            Knob("lanes", (8, 16, 32, 64), "threads side by side along the axis whose elements are neighbours"),
            Knob("threads", (64, 128, 256), "threads of a block"),
        )
        rules = (
            Constraint("a block has whole rows", lambda k: k["lanes"] <= np.asarray(k["threads"])),
            Constraint("there are less than 2**31 blocks", lambda k: k["blocks"] <= MAX_GRID_X),
        )
        return ConfigSpace(
            knobs, rules, {"blocks": lambda k: _blocks(p, k["length"], k["lanes"], np.asarray(k["threads"]) // k["lanes"])}
        )

    def default(self, workload: Workload[DepthwiseConv1dParams], target: Target, space: ConfigSpace) -> Config:
        p = workload.params
        busy = p.n * p.steps * p.c >= 8 * 2048 * target.sms
        for length in (8 if busy else 2, 1, 2, 4, 8, 16):
            config = Config(length=length if p.steps > 1 else 1, lanes=32, threads=128)
            if not space.check(config):
                return config
        raise AssertionError("validate refuses what no run fits")

    def validate(self, workload: Workload[DepthwiseConv1dParams], target: Target) -> str | None:
        p = workload.params
        if _blocks(p, 16, 32, 4) > MAX_GRID_X:
            return f"x has {p.n} x {p.t} x {p.c} elements; allowed: so many that 2048 to a block make less than 2**31 blocks"
        return super().validate(workload, target)

    def kernel(self, workload: Workload[DepthwiseConv1dParams], target: Target, config: Config) -> KernelSource:
        p = workload.params
        plan = AnyPlan(config["length"], config["lanes"], config["threads"])
        if p.forward:
            buffers = ("x", "weight", "bias", "initial_state", "seq_idx", "none", "none", "y", "final_state")
            step = _correlation(p, plan, "forward", buffers, p.t, p.steps, -p.padding[0])
            return KernelSource("cuda", "native", (step,))
        steps, dz, spaces = [], "dy", {}
        if p.silu:
            dz, spaces["dz"] = "dz", 4 * p.n * p.steps * p.c
            buffers = ("x", "weight", "bias", "initial_state", "seq_idx", "dy", "none", "dz", "none")
            steps.append(_correlation(p, plan, "slope", buffers, p.t, p.steps, -p.padding[0]))
        buffers = (dz, "weight", "none", "none", "seq_idx", "none", "d_final_state", "dx", "d_initial_state")
        steps.append(_correlation(p, plan, "gradient", buffers, p.steps, p.t, p.padding[0] - p.reach))
        lanes = plan.lanes if p.layout == "NTC" else 1
        across, rows = -(-p.c // lanes), plan.threads // lanes
        splits = max(1, min(_MOST_SPLITS, p.steps // (rows * 8)))
        sizes = (p.c, p.t, p.steps, p.padding[0], p.n, across, splits)
        pointers = ("x", dz, "initial_state", "seq_idx", "parts")
        spaces["parts"] = 4 * splits * (p.taps + 1) * p.c
        steps.append(
            KernelStep(
                cuda_any_kernels.weight_kernel(p, plan),
                (*map(optional_pointer, pointers), *map(Int32, sizes)),
                Grid(across * -(-p.taps // TAPS_OF_BLOCK) * splits),
                plan.threads,
            )
        )
        return KernelSource("cuda", "native", (*steps, reduction(p, splits)), spaces)


def _runs(p: DepthwiseConv1dParams, mode: str, length: Any, lanes: Any) -> Any:
    """Runs of a phase of the dilation; groups of lanes whose steps are interleaved."""
    steps = p.steps
    if mode == "gradient":
        steps = p.t + (p.reach if p.initial_state else 0)
    return -(-steps // ((lanes if cuda_any_kernels.interleaved(p) else p.dilation) * length))


def _grid(p: DepthwiseConv1dParams, runs: Any, lanes: Any, rows: Any) -> tuple[Any, Any]:
    """Blocks side by side along the axis whose elements are neighbours, and one behind the other."""
    if p.layout == "NTC":
        return -(-p.c // lanes), -(-p.n * p.dilation * runs // rows)
    across = runs if cuda_any_kernels.interleaved(p) else -(-p.dilation * runs // lanes)
    return across, -(-p.n * p.c // rows)


def _blocks(p: DepthwiseConv1dParams, length: Any, lanes: Any, rows: Any) -> Any:
    """The most blocks of a kernel."""
    across, down = _grid(p, _runs(p, "forward" if p.forward else "gradient", length, lanes), lanes, rows)
    return across * down


def _correlation(
    p: DepthwiseConv1dParams,
    plan: AnyPlan,
    mode: Literal["forward", "slope", "gradient"],
    buffers: tuple[str, ...],
    steps: int,
    out_steps: int,
    offset: int,
) -> KernelStep:
    runs = _runs(p, mode, plan.length, plan.lanes)
    across, down = _grid(p, runs, plan.lanes, plan.rows)
    sizes = (p.c, steps, out_steps, offset, p.n, across, runs)
    return KernelStep(
        cuda_any_kernels.correlate_kernel(p, plan, mode),
        (*map(optional_pointer, buffers), *map(Int32, sizes)),
        Grid(across * down),
        plan.threads,
    )
