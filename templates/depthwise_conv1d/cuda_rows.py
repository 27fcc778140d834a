"""Few taps with channels as neighbours, on NVIDIA GPUs: see docs/kernels/depthwise_conv1d.md."""

from __future__ import annotations

from typing import Any

import numpy as np

from schedsearch.config import Config
from schedsearch.launch import Grid, Int32, Param, Pointer
from schedsearch.launch_rules import MAX_GRID_X
from schedsearch.ops.depthwise_conv1d import DepthwiseConv1dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep
from schedsearch.templates.depthwise_conv1d import cuda_rows_kernels
from schedsearch.templates.depthwise_conv1d.cuda import DepthwiseConv1dCuda, optional_pointer, reduction
from schedsearch.templates.depthwise_conv1d.cuda_rows_kernels import RowPlan, runs_of
from schedsearch.templates.depthwise_conv1d.cuda_rows_parts import window_rows
from schedsearch.templates.parts.vectors import MOST_BYTES
from schedsearch.workload import Workload

_BUSY_THREADS = 480  # of a multiprocessor, at least


def _launches(p: DepthwiseConv1dParams, rows: Any, length: Any, lane_blocks: Any) -> Any:
    """Blocks of runs; knobs may be arrays."""
    begins = 0 if p.forward else 2 * p.taps
    runs = -(-(max(p.steps, p.t + p.padding[0]) + begins) // (p.dilation * np.asarray(length))) + 1
    return lane_blocks * (-(-p.n * p.dilation * runs // rows))


class DepthwiseConv1dRows(DepthwiseConv1dCuda):
    """Few taps, channels side by side: threads stream vectors of channels through registers, forward and backward."""

    name = "depthwise_conv1d_rows_cuda"
    version = 1

    def validate(self, workload: Workload[DepthwiseConv1dParams], target: Target) -> str | None:
        p = workload.params
        if p.layout != "NTC":
            return f"layout is {p.layout}; allowed: NTC"
        if p.taps > cuda_rows_kernels.MOST_TAPS:
            return f"taps is {p.taps}; allowed: up to {cuda_rows_kernels.MOST_TAPS}"
        return super().validate(workload, target)

    def space(self, workload: Workload[DepthwiseConv1dParams], target: Target) -> ConfigSpace:
        p = workload.params
        widest = MOST_BYTES // dtype_of(p.dtype).nbytes
        vectors = tuple(n for n in (1, 2, 4, 8) if n <= widest and p.c % n == 0)
        longest = 1 << max(p.steps - 1, 0).bit_length()
        lengths = tuple(n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if n <= max(longest, 1))
        knobs = (
            Knob("vector", vectors, "neighbouring channels of a thread"),
            Knob("ahead", tuple(n for n in (1, 2, 4, 8) if n <= lengths[-1]), "rows that a thread loads at once"),
            Knob("length", lengths, "steps of a thread"),
            Knob("lanes", (8, 16, 32, 64, 128), "threads side by side along the channels"),
            Knob("threads", (64, 128, 256), "threads of a block"),
            Knob("blocks_per_sm", (1, 3, 4, 5, 6, 7, 8), "blocks that the compiler leaves registers for"),
        )
        most = 56 if p.forward else 22
        rules = (
            Constraint("a run has whole groups of rows", lambda k: k["length"] % np.asarray(k["ahead"]) == 0),
            Constraint("a block has whole runs", lambda k: k["lanes"] <= np.asarray(k["threads"])),
            Constraint(
                f"a thread holds at most {most} numbers of its window, or one vector",
                lambda k: window_rows(p.taps, k["ahead"]) * k["vector"] <= max(most, p.taps * vectors[0]),
            ),
            Constraint("there are less than 2**31 blocks", lambda k: k["blocks"] <= MAX_GRID_X),
            Constraint(
                "a multiprocessor runs at most 2048 threads", lambda k: k["blocks_per_sm"] * np.asarray(k["threads"]) <= 2048
            ),
        )
        derived = {
            "blocks": lambda k: _launches(
                p, np.asarray(k["threads"]) // k["lanes"], k["length"], -(-p.c // (np.asarray(k["vector"]) * k["lanes"]))
            )
        }
        return ConfigSpace(knobs, rules, derived)

    def default(self, workload: Workload[DepthwiseConv1dParams], target: Target, space: ConfigSpace) -> Config:
        """The widest vectors, and runs as long as leave every multiprocessor some blocks: of few lengths, so that
        few machine codes serve all sequences."""
        p, threads = workload.params, 128
        element = dtype_of(p.dtype).nbytes
        wide = [n for n in space.values["vector"] if n * element <= MOST_BYTES // 2 or n == 1]
        plain = not (p.seq_idx or p.initial_state or p.final_state) and p.taps <= 4 and element == 2
        lengths = (32, 8, 4, 1) if p.forward else (256, 64, 16, 4, 1)
        deepest = (8, 4, 2, 1) if p.forward and plain else (4, 2, 1) if p.forward or plain else (2, 1)
        for vector in reversed(wide):
            lanes = min(next((n for n in space.values["lanes"] if n * vector >= p.c), 32), 32)
            runs = p.n * p.c // vector * p.steps
            wanted = next((n for n in lengths if runs >= _BUSY_THREADS * target.sms * n), 4)
            for length in (wanted, *(n for n in lengths if n < wanted), 1):
                for ahead in deepest:
                    config = Config(
                        vector=vector, ahead=ahead, length=length, lanes=lanes, threads=threads,
                        blocks_per_sm=(6 if plain else 1) if p.forward else (4 if plain else 3),
                    )  # fmt: skip
                    if not space.check(config):
                        return config
        raise AssertionError("one channel and one row at a time always fit")

    def kernel(self, workload: Workload[DepthwiseConv1dParams], target: Target, config: Config) -> KernelSource:
        p = workload.params
        plan = RowPlan(*(config[name] for name in ("vector", "ahead", "length", "lanes", "threads")))
        lane_blocks, runs = -(-p.c // (plan.lanes * plan.vector)), runs_of(p, plan.length)
        run_blocks = -(-p.n * p.dilation * runs // plan.rows)
        sizes = [Int32(each) for each in (p.c, p.t, p.steps, p.padding[0], p.n, lane_blocks, runs)]
        nbytes = min(plan.vector * dtype_of(p.dtype).nbytes, MOST_BYTES)
        weight_bytes = min(plan.vector * dtype_of(p.weight_dtype).nbytes, MOST_BYTES)
        given = {spec.name for spec in (*workload.signature, *workload.outputs)}
        aligned = {"x": nbytes, "dy": nbytes, "y": nbytes, "dx": nbytes, "weight": weight_bytes, "bias": weight_bytes}
        alignments = {name: each for name, each in aligned.items() if name in given}
        grid = Grid(lane_blocks * run_blocks)
        if p.forward:
            names = ("x", "weight", "bias", "initial_state", "seq_idx", "y", "final_state")
            params: tuple[Param, ...] = (*map(optional_pointer, names), *sizes)
            kernel = cuda_rows_kernels.forward_kernel(p, plan)
            step = KernelStep(kernel, params, grid, plan.threads, min_blocks_per_sm=config["blocks_per_sm"])
            return KernelSource("cuda", "native", (step,), alignments=alignments)
        of_gradients = ("x", "weight", "bias", "dy", "initial_state", "d_final_state", "seq_idx", "dx", "d_initial_state")
        params = (*map(optional_pointer, of_gradients), Pointer("parts"), *sizes)
        kernel = cuda_rows_kernels.backward_kernel(p, plan)
        step = KernelStep(kernel, params, grid, plan.threads, min_blocks_per_sm=config["blocks_per_sm"])
        space = {"parts": 4 * run_blocks * (p.taps + 1) * p.c}
        return KernelSource("cuda", "native", (step, reduction(p, run_blocks)), space, alignments)
