"""What the templates of depthwise_conv1d on NVIDIA GPUs have in common: see docs/kernels/depthwise_conv1d.md."""

from __future__ import annotations

from typing import Literal

from schedsearch.launch import Grid, Int32, Pointer
from schedsearch.launch_rules import MAX_GRID_X
from schedsearch.ops.depthwise_conv1d import DepthwiseConv1dParams
from schedsearch.target import Target
from schedsearch.template import KernelStep, Template
from schedsearch.templates.depthwise_conv1d.parts import REDUCE_THREADS, reduce_blocks, reduce_kernel, small
from schedsearch.templates.parts.vectors import LEAST_CAPABILITY
from schedsearch.workload import Workload


def optional_pointer(name: str) -> Pointer:
    return Pointer(name, optional=True)


class DepthwiseConv1dCuda(Template[DepthwiseConv1dParams]):
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


def reduction(p: DepthwiseConv1dParams, parts: int) -> KernelStep:
    """The sums of the parts of dw and db."""
    return KernelStep(
        reduce_kernel(p.taps, p.weight_dtype, p.bias),
        (Pointer("parts"), Pointer("dw"), optional_pointer("db"), Int32(parts), Int32(p.c)),
        Grid(reduce_blocks(p.taps, p.c)),
        REDUCE_THREADS,
    )
