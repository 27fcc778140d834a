"""int8 and uint8 convolution on the CPU: a direct convolution that sums products of four bytes in each 32-bit lane.

The schedule is that of conv2d_cpu, with four channels in the place of one: x is packed into blocks of channels with its
padding written out, the weights are packed in the order in which the kernel reads them, and a register tile of `ow_tile`
pixels x `oc_vectors` vectors of `block` output channels walks (channel block, r, s, four channels). One instruction
multiplies four bytes of x, the same in all lanes, with four bytes of weights in each lane (Georganas et al.,
"High-Performance Deep Learning via a Single Building Block", 2019, has the layout). `cpu_int8_kernels` says how signs and
zero points enter.
"""

from __future__ import annotations

import numpy as np

from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.ops.conv2d_formats import INTEGERS
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.conv2d.cpu_int8_kernels import (
    BytePlan,
    convolve_kernel,
    needs_x_sums,
    pack_weight_kernel,
    pack_x_kernel,
)
from schedsearch.templates.conv2d.cpu_kernels import Shape
from schedsearch.templates.conv2d.cpu_tiles import (
    cheapest_tile,
    lanes_of,
    plain_tile,
    tile_space,
    up_to,
    updates_in_place,
    useful_share,
)
from schedsearch.templates.parts.addressing import channel_runs
from schedsearch.templates.parts.cpu_epilogue import OPERAND_DTYPES, CpuEpilogue
from schedsearch.templates.parts.cpu_threads import busy_threads
from schedsearch.templates.parts.stages import CONVERTING, epilogue_problem
from schedsearch.workload import Workload

_QUAD = 4
_X_BLOCKS = (4, 8, 16, 32, 64)


class Conv2dCpuInt8(Template[Conv2dParams]):
    """conv2d of int8 and uint8 on a CPU, in every layout, with groups and zero points: four channels in a 32-bit lane."""

    name = "conv2d_cpu_int8"
    version = 2
    op = "conv2d"
    kind = "cpu"

    def validate(self, workload: Workload[Conv2dParams], target: Target) -> str | None:
        p = workload.params
        if p.dtype not in INTEGERS:
            return f"dtype is {p.dtype}; allowed: {', '.join(INTEGERS)}"
        if p.output_layout != p.layout:
            return f"output_layout is {p.output_layout}; allowed: {p.layout}, as that of x"
        return epilogue_problem(workload, dtypes=OPERAND_DTYPES, converting=CONVERTING)

    def space(self, workload: Workload[Conv2dParams], target: Target) -> ConfigSpace:
        shape = Shape.of(workload)
        x_layouts = ("packed", "direct") if _fits_in_place(workload, shape) else ("packed",)
        rules = (
            Constraint(
                "unroll <= the steps of a channel block, x_block / 4",
                lambda k: k["unroll"] * _QUAD <= np.maximum(k["x_block"], _QUAD),
            ),
            Constraint(
                "x that is read in place has one x_block, the largest",
                lambda k: (k["x_layout"] == "packed") | (k["x_block"] == _x_blocks(shape)[-1]),
            ),
            Constraint(
                "a depthwise tile reads x directly only without a tail",
                lambda k: (
                    (k["x_layout"] == "packed")
                    | (not shape.depthwise)
                    | (shape.outputs % (k["oc_vectors"] * k["block"]) == 0)
                ),
            ),
        )
        x_block = Knob("x_block", _x_blocks(shape), "x of NCHW[x]c: channels per packed block of x")
        docs = "output channels, and 32-bit lanes, of a vector", "steps of four channels in the innermost loop"
        sums = int(needs_x_sums(workload))
        in_place = updates_in_place(workload)
        return tile_space(target, shape, x_layouts, *docs, 1, rules, further=(x_block,), sums=sums, in_place=in_place)

    def default(self, workload: Workload[Conv2dParams], target: Target, space: ConfigSpace) -> Config:
        """The tile with the fewest modelled cycles per useful multiply-add. Everything else follows from it.

        A tile step issues ow_tile * oc_vectors multiplications, one per cycle and limited by their latency of four cycles;
        one more per pixel sums x if the weights have an offset. It issues ow_tile + oc_vectors loads, two per cycle.
        """
        shape, sums = Shape.of(workload), int(needs_x_sums(workload))
        values = space.values
        block = min(lanes_of(target), max(map(int, values["block"])))

        def cycles(ow_tile: int, oc_vectors: int) -> float:
            products = ow_tile * oc_vectors
            loads = ow_tile * (oc_vectors if shape.depthwise else 1) + oc_vectors
            issued = max(products + sums * ow_tile, loads / 2, 2.0 * oc_vectors, 4.0) + loads / 16
            return issued / products / float(useful_share(shape, ow_tile, oc_vectors * block))

        x_block = max(map(int, values["x_block"]))
        base: dict[str, int | str] = {
            "block": block,
            "x_block": x_block,
            "unroll": max(int(u) for u in values["unroll"] if int(u) <= max(min(x_block // _QUAD, 4), 1)),
            "order": "channels",
            "threads": busy_threads(workload, target, map(int, values["threads"])),
        }
        layouts = [str(value) for value in reversed(values["x_layout"])]
        return cheapest_tile(shape, space, base, layouts, cycles)

    def plain(self, workload: Workload[Conv2dParams], target: Target, space: ConfigSpace) -> Config | None:
        x_block = next(knob for knob in space.knobs if knob.name == "x_block")
        return plain_tile(space, target, {"x_block": x_block.values[-1]})

    def kernel(self, workload: Workload[Conv2dParams], target: Target, config: Config) -> KernelSource:
        return source_of(workload, BytePlan.of(workload, config), config["threads"])


def source_of(
    workload: Workload[Conv2dParams], plan: BytePlan, threads: int, *, constant_weights: bool = True
) -> KernelSource:
    """The steps of one plan: pack x and the weights, then convolve."""
    epilogue, x, packed = CpuEpilogue(workload), "x" if plan.direct else "x_packed", Pointer("w_packed")
    pack_weight = KernelStep(
        pack_weight_kernel(plan), (Pointer("weight"), packed), Grid(plan.weight_items), threads, constant=constant_weights
    )
    arguments = (Pointer(x), packed, Pointer("y"), *epilogue.params)
    steps = [pack_weight, KernelStep(convolve_kernel(plan, epilogue, workload), arguments, Grid(plan.items), threads)]
    workspaces = {"w_packed": plan.weight_size}
    if not plan.direct:
        pack = (Pointer("x"), Pointer("x_packed"), *epilogue.params)
        steps.insert(0, KernelStep(pack_x_kernel(plan, epilogue), pack, Grid(plan.x_rows), threads))
        workspaces["x_packed"] = plan.x_size
    alignments = {"x": 1, "weight": 1, "y": dtype_of(workload.output.dtype).nbytes}
    return KernelSource("cpu", "native", tuple(steps), workspaces, alignments=alignments)


def _x_blocks(shape: Shape) -> tuple[int, ...]:
    """Up to all channels of a group; a depthwise convolution blocks x as it blocks y."""
    if shape.depthwise:
        return (1,)
    most = -(-shape.reduced // _QUAD) * _QUAD
    return tuple(sorted({*up_to(_X_BLOCKS, most), most}))


def _fits_in_place(workload: Workload[Conv2dParams], shape: Shape) -> bool:
    """Whether x can be read where it lies: nothing is padded, and four channels of a group are neighbours in memory."""
    run, stride = channel_runs("C", workload.signature[0])
    if not shape.fits_unpadded or stride != 1:
        return False
    return run == 0 if shape.depthwise else shape.reduced % _QUAD == 0 and run % _QUAD == 0
