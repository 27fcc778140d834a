"""Few taps with steps as neighbours, on NVIDIA GPUs: see docs/kernels/depthwise_conv1d.md."""

from __future__ import annotations

from typing import Any

import numpy as np

from schedsearch.config import Config
from schedsearch.launch import Grid, Int32, Param, Pointer
from schedsearch.launch_rules import MAX_GRID_X
from schedsearch.ops.depthwise_conv1d import DepthwiseConv1dParams
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep
from schedsearch.templates.depthwise_conv1d import cuda_lines_kernels
from schedsearch.templates.depthwise_conv1d.cuda import DepthwiseConv1dCuda, optional_pointer, reduction
from schedsearch.templates.depthwise_conv1d.cuda_lines_kernels import LinePlan
from schedsearch.templates.depthwise_conv1d.cuda_lines_parts import aligned
from schedsearch.templates.parts.vectors import MOST_BYTES
from schedsearch.workload import Workload

MOST_TAPS = 8
_MOST_REACH = 16  # steps in front of a vector that a thread reads again
_BUSY_THREADS = 900  # of a multiprocessor, at least
_MOST_SPLITS = 256


class DepthwiseConv1dLines(DepthwiseConv1dCuda):
    """Few taps, steps side by side: threads compute vectors of steps, forward and backward."""

    name = "depthwise_conv1d_lines_cuda"
    version = 1

    def validate(self, workload: Workload[DepthwiseConv1dParams], target: Target) -> str | None:
        p = workload.params
        if p.layout != "NCT":
            return f"layout is {p.layout}; allowed: NCT"
        if p.taps > MOST_TAPS or p.reach > _MOST_REACH:
            return f"{p.taps} taps reach {p.reach} steps; allowed: up to {MOST_TAPS} taps and {_MOST_REACH} steps"
        if p.steps != p.t:
            return f"y has {p.steps} steps and x {p.t}; allowed: the same number"
        if p.n * p.c * -(-p.t // aligned(p.dtype)) > MAX_GRID_X:
            return f"x has {p.n} x {p.c} x {p.t} elements; allowed: less than 2**31 vectors"
        return super().validate(workload, target)

    def space(self, workload: Workload[DepthwiseConv1dParams], target: Target) -> ConfigSpace:
        p, widest = workload.params, aligned(workload.params.dtype)
        lengths = (1, 2, 4, 8, 16) if p.forward else (1,)
        knobs = (
            Knob("vector", (widest, 2 * widest), "neighbouring steps of a thread"),
            Knob("ahead", (1, 2) if p.forward else (1,), "vectors that a thread loads at once"),
            Knob("length", lengths, "vectors of a thread"),
            Knob("lanes", (4, 8, 16, 32, 64, 128, 256), "threads side by side along a line"),
            Knob("threads", (64, 128, 256), "threads of a block"),
            Knob("blocks_per_sm", (1, 2, 4, 6, 8), "blocks that the compiler leaves registers for"),
        )
        rules = (
            Constraint("a thread has whole groups of vectors", lambda k: k["length"] % np.asarray(k["ahead"]) == 0),
            Constraint("a block has whole lines", lambda k: k["lanes"] <= np.asarray(k["threads"])),
            Constraint("there are less than 2**31 blocks", lambda k: k["blocks"] <= MAX_GRID_X),
            Constraint(
                "a multiprocessor runs at most 2048 threads", lambda k: k["blocks_per_sm"] * np.asarray(k["threads"]) <= 2048
            ),
        )
        return ConfigSpace(knobs, rules, {"blocks": lambda k: _blocks(p, k)})

    def default(self, workload: Workload[DepthwiseConv1dParams], target: Target, space: ConfigSpace) -> Config:
        """Whole warps along a line if it is long enough, and as many vectors of a thread as leave every multiprocessor
        threads: of few kinds, so that few machine codes serve all sequences."""
        p, widest = workload.params, aligned(workload.params.dtype)
        if not p.forward:
            vector = widest if p.seq_idx or p.initial_state or p.final_state or p.taps > 4 else 2 * widest
            lanes = next(n for n in (8, 32, 64) if n == 64 or _vectors_of_line(p, vector) <= n)
            return Config(vector=vector, ahead=1, length=1, lanes=lanes, threads=64, blocks_per_sm=1)
        of_line = _vectors_of_line(p, widest)
        lanes = next(n for n in (4, 8, 16, 32) if n == 32 or of_line <= n)
        threads = p.n * p.c * of_line
        length = next(
            n for n in (8, 4, 2, 1) if n == 1 or (threads >= n * _BUSY_THREADS * target.sms and of_line >= n * lanes)
        )
        plain = not (p.seq_idx or p.initial_state) and p.taps <= 4
        return Config(vector=widest, ahead=1, length=length, lanes=lanes, threads=128, blocks_per_sm=8 if plain else 1)

    def kernel(self, workload: Workload[DepthwiseConv1dParams], target: Target, config: Config) -> KernelSource:
        p = workload.params
        plan = LinePlan(*(config[name] for name in ("vector", "ahead", "lanes", "threads")))
        names = ("x", "dy", "y", "dx")
        given = {spec.name for spec in (*workload.signature, *workload.outputs)}
        alignments = {name: MOST_BYTES for name in names if name in given}
        of_line = _vectors_of_line(p, plan.vector)
        if p.forward:
            buffers = ("x", "weight", "bias", "initial_state", "seq_idx", "y", "final_state")
            across = -(-of_line // (plan.lanes * config["length"]))
            sizes = (p.c, p.t, p.n * p.c, across, config["length"] // plan.ahead)
            params: tuple[Param, ...] = (*map(optional_pointer, buffers), *map(Int32, sizes))
            kernel = cuda_lines_kernels.forward_kernel(p, plan)
            grid = Grid(across * -(-p.n * p.c // plan.rows))
            step = KernelStep(kernel, params, grid, plan.threads, min_blocks_per_sm=config["blocks_per_sm"])
            return KernelSource("cuda", "native", (step,), alignments=alignments)
        across = -(-p.c // plan.rows)
        wanted = min(-(-_BUSY_THREADS * target.sms // (across * plan.threads)), _MOST_SPLITS)
        of_batch = min(p.n, wanted)
        of_lines = max(1, min(wanted // of_batch, of_line // (2 * plan.lanes)))
        splits, shared = of_batch * of_lines, (p.c, p.t, p.n, across, of_batch, of_lines, of_line)
        pointers = ("x", "weight", "bias", "dy", "initial_state", "d_final_state", "seq_idx", "dx", "d_initial_state")
        params = (*map(optional_pointer, pointers), Pointer("parts"), *map(Int32, shared))
        kernel = cuda_lines_kernels.backward_kernel(p, plan)
        grid = Grid(across * splits)
        step = KernelStep(kernel, params, grid, plan.threads, min_blocks_per_sm=config["blocks_per_sm"])
        spaces = {"parts": 4 * splits * (p.taps + 1) * p.c}
        return KernelSource("cuda", "native", (step, reduction(p, splits)), spaces, alignments)


def _vectors_of_line(p: DepthwiseConv1dParams, vector: Any) -> Any:
    """The most vectors of a line, which may begin in the middle of an access."""
    widest = aligned(p.dtype)
    begins = 0 if p.t % widest == 0 else widest - 1
    return -(-(p.t + begins) // vector)


def _blocks(p: DepthwiseConv1dParams, k: Any) -> Any:
    of_line, rows = _vectors_of_line(p, np.asarray(k["vector"])), np.asarray(k["threads"]) // k["lanes"]
    if p.forward:
        return -(-of_line // (k["lanes"] * np.asarray(k["length"]))) * -(-p.n * p.c // rows)
    return -(-p.c // rows) * _MOST_SPLITS
