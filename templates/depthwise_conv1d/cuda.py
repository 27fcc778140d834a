"""depthwise_conv1d on NVIDIA GPUs: see docs/kernels/depthwise_conv1d.md."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from schedsearch.config import Config
from schedsearch.launch import Grid, Int32, Param, Pointer
from schedsearch.launch_rules import MAX_GRID_X
from schedsearch.ops.depthwise_conv1d import DepthwiseConv1dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.depthwise_conv1d import cuda_any, cuda_rows
from schedsearch.templates.depthwise_conv1d.cuda_any import TAPS_OF_BLOCK, AnyPlan
from schedsearch.templates.depthwise_conv1d.cuda_rows import RowPlan, runs_of
from schedsearch.templates.depthwise_conv1d.parts import REDUCE_THREADS, reduce_blocks, reduce_kernel, small
from schedsearch.templates.parts.vectors import LEAST_CAPABILITY, MOST_BYTES
from schedsearch.workload import Workload

_BUSY_THREADS = 512  # of a multiprocessor, at least
_MOST_SPLITS = 256


def _pointer(name: str) -> Pointer:
    return Pointer(name, optional=True)


class _DepthwiseConv1d(Template[DepthwiseConv1dParams]):
    op = "depthwise_conv1d"
    kind = "cuda"

    def validate(self, workload: Workload[DepthwiseConv1dParams], target: Target) -> str | None:
        if problem := target.older_than(LEAST_CAPABILITY):
            return problem
        p = workload.params
        reached = max(p.t, p.steps) + 2 * p.reach + max(p.padding)
        if p.n * reached * 2 > MAX_GRID_X:
            return f"a batch of {p.n} has {p.n * reached} steps with their padding; allowed: less than 2**30"
        return None

    def reuse(self, workload: Workload[DepthwiseConv1dParams]) -> Literal["never", "verified", "trusted"]:
        """Batch, length and channels reach the kernels at run time."""
        return "trusted"

    def representative(self, workload: Workload[DepthwiseConv1dParams]) -> Workload[DepthwiseConv1dParams]:
        """Two rows of some hundred steps: several runs and blocks, none of them whole."""
        return small(workload)


def _launches(p: DepthwiseConv1dParams, rows: Any, length: Any, lane_blocks: Any) -> Any:
    """Blocks of runs; knobs may be arrays."""
    begins = 0 if p.forward else 2 * p.taps
    runs = -(-(max(p.steps, p.t + p.padding[0]) + begins) // (p.dilation * np.asarray(length))) + 1
    return lane_blocks * (-(-p.n * p.dilation * runs // rows))


class DepthwiseConv1dRows(_DepthwiseConv1d):
    """Few taps, channels side by side: threads stream vectors of channels through registers, forward and backward."""

    name = "depthwise_conv1d_rows_cuda"
    version = 1

    def validate(self, workload: Workload[DepthwiseConv1dParams], target: Target) -> str | None:
        p = workload.params
        if p.layout != "NTC":
            return f"layout is {p.layout}; allowed: NTC"
        if p.taps > cuda_rows.MOST_TAPS:
            return f"taps is {p.taps}; allowed: up to {cuda_rows.MOST_TAPS}"
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
            Knob("blocks_per_sm", (1, 4, 5, 6, 7, 8), "blocks that the compiler leaves registers for"),
        )
        most = 56 if p.forward else 22
        rules = (
            Constraint("a run has whole groups of rows", lambda k: k["length"] % np.asarray(k["ahead"]) == 0),
            Constraint("a block has whole runs", lambda k: k["lanes"] <= np.asarray(k["threads"])),
            Constraint(
                f"a thread holds at most {most} numbers of its window, or one vector",
                lambda k: (p.taps - 1 + np.asarray(k["ahead"])) * k["vector"] <= max(most, p.taps * vectors[0]),
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
        lengths = (64, 16, 8, 4, 1) if p.forward else (128, 32, 8, 1)
        deepest = (8, 4, 2, 1) if p.forward and plain else (4, 2, 1) if p.forward else (2, 1)
        for vector in reversed(wide):
            lanes = min(next((n for n in space.values["lanes"] if n * vector >= p.c), 32), 32)
            runs = p.n * p.c // vector * p.steps
            wanted = next((n for n in lengths if runs >= _BUSY_THREADS * target.sms * n), 4)
            for length in (wanted, *(n for n in lengths if n < wanted), 1):
                for ahead in deepest:
                    config = Config(
                        vector=vector, ahead=ahead, length=length, lanes=lanes, threads=threads,
                        blocks_per_sm=6 if p.forward and plain else 1,
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
            params: tuple[Param, ...] = (*map(_pointer, names), *sizes)
            kernel = cuda_rows.forward_kernel(p, plan)
            step = KernelStep(kernel, params, grid, plan.threads, min_blocks_per_sm=config["blocks_per_sm"])
            return KernelSource("cuda", "native", (step,), alignments=alignments)
        of_gradients = ("x", "weight", "bias", "dy", "initial_state", "d_final_state", "seq_idx", "dx", "d_initial_state")
        params = (*map(_pointer, of_gradients), Pointer("parts"), *sizes)
        kernel = cuda_rows.backward_kernel(p, plan)
        step = KernelStep(kernel, params, grid, plan.threads, min_blocks_per_sm=config["blocks_per_sm"])
        space = {"parts": 4 * run_blocks * (p.taps + 1) * p.c}
        return KernelSource("cuda", "native", (step, _reduction(p, run_blocks)), space, alignments)


def _reduction(p: DepthwiseConv1dParams, parts: int) -> KernelStep:
    return KernelStep(
        reduce_kernel(p.taps, p.weight_dtype, p.bias),
        (Pointer("parts"), Pointer("dw"), _pointer("db"), Int32(parts), Int32(p.c)),
        Grid(reduce_blocks(p.taps, p.c)),
        REDUCE_THREADS,
    )


class DepthwiseConv1dAny(_DepthwiseConv1d):
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
                cuda_any.weight_kernel(p, plan),
                (*map(_pointer, pointers), *map(Int32, sizes)),
                Grid(across * -(-p.taps // TAPS_OF_BLOCK) * splits),
                plan.threads,
            )
        )
        return KernelSource("cuda", "native", (*steps, _reduction(p, splits)), spaces)


def _runs(p: DepthwiseConv1dParams, mode: str, length: Any, lanes: Any) -> Any:
    """Runs of a phase of the dilation; groups of lanes whose steps are interleaved."""
    steps = p.steps
    if mode == "gradient":
        steps = p.t + (p.reach if p.initial_state else 0)
    return -(-steps // ((lanes if cuda_any.interleaved(p) else p.dilation) * length))


def _grid(p: DepthwiseConv1dParams, runs: Any, lanes: Any, rows: Any) -> tuple[Any, Any]:
    """Blocks side by side along the axis whose elements are neighbours, and one behind the other."""
    if p.layout == "NTC":
        return -(-p.c // lanes), -(-p.n * p.dilation * runs // rows)
    across = runs if cuda_any.interleaved(p) else -(-p.dilation * runs // lanes)
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
        cuda_any.correlate_kernel(p, plan, mode),
        (*map(_pointer, buffers), *map(Int32, sizes)),
        Grid(across * down),
        plan.threads,
    )
