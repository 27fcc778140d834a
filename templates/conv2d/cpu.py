"""fp32 convolution on the CPU: a direct convolution over NCHW[x]c data with a register tile of accumulators.

The algorithm, for every output pixel and channel:

    y[n, p, q, k] = epilogue(sum over c, r, s of x[n, p * stride + r * dilation - top, ..., c] * w[k, r, s, c])

The schedule: x is packed into channel blocks with its padding written out (NCHW[x]c). The weights are packed into
OIHW[x]i[x]o tiles in the order in which the kernel reads them. Then every register tile of `ow_tile` pixels x `oc_vectors`
vectors of `block` output channels walks (channel block, r, s, channel). A fused multiply-add takes one weight vector and one
broadcast value of x (Georganas et al., "Anatomy of High-Performance Deep Learning Convolutions on SIMD Architectures",
SC18). A depthwise convolution keeps `block` channels in a vector and multiplies elementwise.
"""

from __future__ import annotations

import numpy as np

from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.ops import Layout
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.space import ConfigSpace, Constraint
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.conv2d.cpu_kernels import (
    Plan,
    Shape,
    convolve_kernel,
    pack_weight_kernel,
    pack_x_kernel,
    pad_x_kernel,
)
from schedsearch.templates.conv2d.cpu_tiles import (
    cheapest_tile,
    lanes_of,
    plain_tile,
    tile_space,
    updates_in_place,
    useful_share,
)
from schedsearch.templates.parts.cpu_epilogue import CpuEpilogue
from schedsearch.templates.parts.cpu_threads import busy_threads
from schedsearch.templates.parts.stages import epilogue_problem
from schedsearch.workload import Workload


class Conv2dCpu(Template[Conv2dParams]):
    """conv2d in fp32 on a CPU, NHWC or NCHW, groups included: direct, over packed channel blocks, in SIMD registers."""

    name = "conv2d_cpu"
    version = 2
    op = "conv2d"
    kind = "cpu"

    def validate(self, workload: Workload[Conv2dParams], target: Target) -> str | None:
        p = workload.params
        if p.dtype != "float32":
            return f"dtype {p.dtype} is not supported on the CPU; allowed: float32"
        if Layout.parse(p.layout).blocks:
            return f"layout is {p.layout}; allowed: NHWC, NCHW"
        if p.output_layout != p.layout:
            return f"output_layout is {p.output_layout}; allowed: {p.layout}, as that of x"
        return epilogue_problem(workload, dtypes=("float32",), slices=True, x_slices=True)

    def space(self, workload: Workload[Conv2dParams], target: Target) -> ConfigSpace:
        shape = Shape.of(workload)
        x_layouts: tuple[str, ...] = ("packed",)
        if shape.fits_unpadded:
            x_layouts = ("packed", "direct")
        elif workload.params.layout == "NHWC" and not shape.depthwise and not workload.params.x_slice:
            pixel_stride = workload.signature[0].strides(shape.axes)[1]
            x_layouts = ("packed", "padded") if pixel_stride == workload.params.c else ("packed",)
        rules = (
            Constraint(
                f"unroll <= the channel block, min(block, {shape.reduced})",
                lambda k: k["unroll"] <= np.minimum(k["block"], shape.reduced),
            ),
            Constraint(
                "a depthwise tile reads x directly only in NHWC and without a tail",
                lambda k: (
                    (k["x_layout"] == "packed")
                    | (not shape.depthwise)
                    | ((shape.outputs % (k["oc_vectors"] * k["block"]) == 0) & (workload.params.layout == "NHWC"))
                ),
            ),
        )
        lanes_doc = "x of NCHW[x]c: channels per packed block and lanes of a vector"
        docs = lanes_doc, "input channels per step of the innermost loop"
        return tile_space(target, shape, x_layouts, *docs, 4, rules, in_place=updates_in_place(workload))

    def default(self, workload: Workload[Conv2dParams], target: Target, space: ConfigSpace) -> Config:
        """The tile with the fewest modelled cycles per useful multiply-add. Everything else follows from it.

        A tile step issues ow_tile * oc_vectors multiply-adds, at most two per cycle and limited by their latency of four
        cycles. It issues ow_tile + oc_vectors loads, two per cycle; loads of weights come from the second-level cache, one
        every two cycles.
        """
        shape = Shape.of(workload)
        allowed = {knob.name: [int(value) for value in knob.values] for knob in space.knobs if knob.ordered}
        layouts = next(knob.values for knob in space.knobs if knob.name == "x_layout")
        block = min(lanes_of(target), max(allowed["block"]))
        loads_per_row = 2 if shape.depthwise else 1

        def cycles(ow_tile: int, oc_vectors: int) -> float:
            fmas = ow_tile * oc_vectors
            loads = ow_tile * (oc_vectors if shape.depthwise else 1) * loads_per_row + oc_vectors
            return (
                (max(fmas / 2, loads / 2, 2.0 * oc_vectors, 4.0) + loads / 16)
                / fmas
                / float(useful_share(shape, ow_tile, oc_vectors * block))
            )

        base: dict[str, int | str] = {
            "block": block,
            "unroll": max(u for u in allowed["unroll"] if u <= min(block, shape.reduced, 4)),
            "order": "channels",
            "threads": busy_threads(workload, target, allowed["threads"]),
        }
        preferred = str(layouts[-1]) if workload.params.layout == "NHWC" else "packed"
        return cheapest_tile(shape, space, base, (preferred, "packed"), cycles)

    def plain(self, workload: Workload[Conv2dParams], target: Target, space: ConfigSpace) -> Config | None:
        return plain_tile(space, target, {})

    def kernel(self, workload: Workload[Conv2dParams], target: Target, config: Config) -> KernelSource:
        return source_of(Plan.of(workload, config), CpuEpilogue(workload), config["threads"])


def source_of(plan: Plan, epilogue: CpuEpilogue, threads: int, *, constant_weights: bool = True) -> KernelSource:
    """The steps of one plan: pack x and the weights, then convolve."""
    x, weight, packed = "x" if plan.direct else "x_packed", Pointer("weight"), Pointer("w_packed")
    pack_weight = KernelStep(
        pack_weight_kernel(plan), (weight, packed), Grid(plan.weight_items), threads, constant=constant_weights
    )
    arguments = (Pointer(x), packed, Pointer("y"), *epilogue.params)
    steps = [pack_weight, KernelStep(convolve_kernel(plan, epilogue), arguments, Grid(plan.items), threads)]
    workspaces = {"w_packed": 4 * plan.weight_size}
    if not plan.direct:
        copy = pad_x_kernel if plan.padded else pack_x_kernel
        pack = KernelStep(copy(plan), (Pointer("x"), Pointer("x_packed")), Grid(plan.x_rows), threads)
        steps.insert(0, pack)
        workspaces["x_packed"] = 4 * plan.x_size
    return KernelSource("cpu", "native", tuple(steps), workspaces, alignments=dict.fromkeys(("x", "weight", "y"), 4))
