"""Depthwise convolution and its gradients on the CPU: sums over taps of planes that stay in the cache.

The algorithm, for every pixel and channel:

    y[p, q, o] = epilogue(sum over i, l of x[p * stride + i * dilation - top, ..., c] * weight[o, i, l])

The schedule: a work item copies the rows that it needs to planes in fast memory, with the padding written out (`cpu_plan`
says in which order). Each tap is then one load at a constant distance and one fused multiply-add. Vectors hold channels in
NHWC and neighbouring pixels in NCHW, so neither layout needs a transposition. dx is a sum over taps of dy; rows and columns
with another remainder by the stride have other taps. dw is summed in parts, in a fixed order, and then the parts are added:
every call returns the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from schedsearch.config import Config
from schedsearch.launch import Grid, Param, Pointer
from schedsearch.ops.depthwise_conv2d import DepthwiseConv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.window import output_hw
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.conv2d.cpu_tiles import lanes_of, thread_counts, vector_registers
from schedsearch.templates.depthwise_conv2d.cpu_kernels import correlate_kernel, gradient_finish, reduce_kernel, sum_kernel
from schedsearch.templates.depthwise_conv2d.cpu_plan import Plan, forward_plan, grad_input_plan
from schedsearch.templates.parts.cpu_epilogue import OPERAND_DTYPES, CpuEpilogue
from schedsearch.templates.parts.cpu_threads import busy_threads
from schedsearch.templates.parts.stages import epilogue_problem
from schedsearch.workload import Workload

FLOATS = ("float16", "bfloat16", "float32")
_BLOCKS = (4, 8, 16, 32)
_TILES = (1, 2, 3, 4, 6, 8)
_ROWS = (1, 2, 4, 7, 8, 14, 16, 28, 56, 112)
_SPLITS = (1, 2, 4, 8, 16, 32)
_STACK_BYTES = 1 << 20  # of a thread's work item; threads have 8 MiB
_CACHE_BYTES = 1 << 17  # of the second-level cache, in which the default keeps a work item


class DepthwiseConv2dCpu(Template[DepthwiseConv2dParams]):
    """depthwise_conv2d in every direction, layout and format of floats on a CPU."""

    name = "depthwise_conv2d_cpu"
    version = 1
    op = "depthwise_conv2d"
    kind = "cpu"

    def validate(self, workload: Workload[DepthwiseConv2dParams], target: Target) -> str | None:
        p = workload.params
        if not dtype_of(p.dtype).is_float:
            return f"dtype is {p.dtype}; allowed: {', '.join(FLOATS)}"
        if (least := _stack_bytes(workload, _BLOCKS[0], 1)) > _STACK_BYTES:
            return (
                f"a row of w={p.w} for a kernel of {p.r}x{p.s} takes {least} bytes of fast memory; allowed: {_STACK_BYTES}"
            )
        return epilogue_problem(workload, dtypes=OPERAND_DTYPES) if p.epilogue else None

    def space(self, workload: Workload[DepthwiseConv2dParams], target: Target) -> ConfigSpace:
        rows = _row_values(workload)
        table = {(block, each): _stack_bytes(workload, block, each) for block in _BLOCKS for each in rows}

        def stack_bytes(k: Any) -> Any:
            return np.array([table[key] for key in zip(k["block"].tolist(), k["rows"].tolist())])

        return ConfigSpace(
            [
                Knob("block", _BLOCKS, "lanes of a vector: channels in NHWC, pixels in NCHW"),
                Knob("tile", _TILES, "vectors that are computed together, with the weights in registers"),
                Knob("rows", rows, "rows of results of a work item"),
                Knob("splits", _splits(workload), "parts of the sum of dw, which threads share"),
                Knob("threads", thread_counts(target.sms), "threads that share the work items"),
            ],
            [
                Constraint(
                    f"a work item takes at most {_STACK_BYTES} bytes of the stack",
                    lambda k: k["stack_bytes"] <= _STACK_BYTES,
                ),
            ],
            {"stack_bytes": stack_bytes},
        )

    def default(self, workload: Workload[DepthwiseConv2dParams], target: Target, space: ConfigSpace) -> Config:
        """Vectors of a register, or of a row's pixels if these are fewer; and the most rows that stay in the cache and leave
        each thread two work items."""
        p = workload.params
        values = {knob.name: [int(value) for value in knob.values] for knob in space.knobs}
        threads = busy_threads(workload, target, values["threads"])
        extent = p.c if p.layout == "NHWC" else output_hw(p)[1]
        block = min(lanes_of(target), max(_BLOCKS[0], 1 << (extent - 1).bit_length()))
        blocks = p.n * (math.ceil(p.c / block) if p.layout == "NHWC" else p.c)

        def fits(rows: int) -> bool:
            tiles = blocks * math.ceil(max(values["rows"]) / rows)
            return _stack_bytes(workload, block, rows) <= _CACHE_BYTES and tiles >= 2 * threads

        rows = max((rows for rows in values["rows"] if fits(rows)), default=1)
        items = blocks // p.n
        splits = next((split for split in values["splits"] if split * items >= 2 * threads), max(values["splits"]))
        tile = max(value for value in values["tile"] if value <= (vector_registers(target) - 10) // 4)
        return Config({"block": block, "tile": tile, "rows": rows, "splits": splits, "threads": threads})

    def plain(self, workload: Workload[DepthwiseConv2dParams], target: Target, space: ConfigSpace) -> Config | None:
        """One vector at a time, one row for each work item, on all cores."""
        values = space.values
        return Config(
            {
                "block": lanes_of(target), "tile": 1, "rows": values["rows"][0], "splits": values["splits"][0],
                "threads": values["threads"][-1],
            }
        )  # fmt: skip

    def kernel(self, workload: Workload[DepthwiseConv2dParams], target: Target, config: Config) -> KernelSource:
        halves = [workload]
        if workload.params.direction == "grad_both":
            halves = [
                workload.replace(direction="grad_input", deterministic=False),
                workload.replace(direction="grad_weight"),
            ]
        steps: list[KernelStep] = []
        workspaces: dict[str, int] = {}
        for half in halves:
            if half.params.direction == "grad_weight":
                plan = forward_plan(half, config)
                steps += _weight_gradient(half, plan, config)
                workspaces["parts"] = 4 * config["splits"] * plan.channels * plan.output_factor * plan.taps
            else:
                steps.append(_sums_over_taps(half, config))
        aligned = {spec.name: dtype_of(spec.dtype).nbytes for spec in (*workload.signature, *workload.outputs)}
        return KernelSource("cpu", "native", tuple(steps), workspaces, alignments=aligned)


def _sums_over_taps(workload: Workload[DepthwiseConv2dParams], config: Config) -> KernelStep:
    """The step that computes y or dx."""
    p = workload.params
    forward = p.direction == "forward"
    plan = (forward_plan if forward else grad_input_plan)(workload, config)
    source, weight = workload.signature[:2]
    finish, operands, stages = None, _before(workload), None
    if p.epilogue:
        epilogue = CpuEpilogue(workload)
        finish, operands, stages = epilogue.apply, epilogue.params, epilogue.vector_stages
    elif p.accumulate:
        finish = gradient_finish(workload.output, True)
    kernel = correlate_kernel(plan, source, weight, workload.output, finish, stages)
    arguments = (Pointer(source.name), Pointer("weight"), Pointer(workload.output.name), *operands)
    return KernelStep(kernel, arguments, Grid(plan.items), config["threads"])


def _weight_gradient(workload: Workload[DepthwiseConv2dParams], plan: Plan, config: Config) -> tuple[KernelStep, KernelStep]:
    """The steps that compute parts of dw and add them."""
    splits, threads = config["splits"], config["threads"]
    finish = gradient_finish(workload.output, workload.params.accumulate)
    reduce = reduce_kernel(plan, workload.signature[0], workload.signature[1], splits)
    add = sum_kernel(plan, workload.output, splits, finish)
    arguments = (Pointer("parts"), Pointer("dw"), *_before(workload))
    return (
        KernelStep(reduce, (Pointer("x"), Pointer("dy"), Pointer("parts")), Grid(plan.blocks * splits), threads),
        KernelStep(add, arguments, Grid(plan.channels * plan.output_factor), threads),
    )


def _before(workload: Workload[DepthwiseConv2dParams]) -> tuple[Param, ...]:
    return tuple(Pointer(spec.name) for spec in workload.signature if spec.aliases == workload.output.name)


def _row_values(workload: Workload[DepthwiseConv2dParams]) -> tuple[int, ...]:
    """Rows of a work item: up to all rows of the results."""
    config = Config({"block": _BLOCKS[0], "rows": 1, "tile": 1})
    most = max(plan.all_rows for plan in _plans(workload, config).values())
    return (*(rows for rows in _ROWS if rows < most), most)


def _splits(workload: Workload[DepthwiseConv2dParams]) -> tuple[int, ...]:
    """Parts of dw, at most one for each image's row; one where dw is not computed."""
    if workload.params.direction not in ("grad_weight", "grad_both"):
        return (1,)
    return tuple(split for split in _SPLITS if split <= workload.params.n * output_hw(workload.params)[0])


def _plans(workload: Workload[DepthwiseConv2dParams], config: Config) -> dict[str, Plan]:
    """The plans of a workload's kernels, by direction."""
    plans = {"grad_input": grad_input_plan, "grad_weight": forward_plan, "forward": forward_plan}
    wanted = ("grad_input", "grad_weight") if workload.params.direction == "grad_both" else (workload.params.direction,)
    return {direction: plans[direction](workload, config) for direction in wanted}


def _stack_bytes(workload: Workload[DepthwiseConv2dParams], block: int, rows: int) -> int:
    """Of a work item with the largest tile."""
    plans = _plans(workload, Config({"block": block, "rows": rows, "tile": _TILES[-1]}))
    return max(plan.stack_bytes + 4 * plan.rows * plan.columns * plan.place for plan in plans.values())
