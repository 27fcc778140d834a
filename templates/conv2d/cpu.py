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

import math
from typing import Any

import numpy as np

from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.conv2d.cpu_kernels import Plan, Shape, convolve_kernel, pack_weight_kernel, pack_x_kernel
from schedsearch.templates.parts.cpu_epilogue import CpuEpilogue
from schedsearch.templates.parts.stages import epilogue_problem
from schedsearch.workload import Workload

_BLOCKS = (1, 2, 4, 8, 16, 32)
_OW_TILES = (*range(1, 17), 20, 24, 28)
_OC_VECTORS = (1, 2, 3, 4, 6)
_OH_TILES = (1, 2, 4, 7, 8, 14, 16, 28, 32)
_UNROLLS = (1, 2, 4, 8)


class Conv2dCpu(Template):
    """conv2d in fp32 on a CPU, NHWC or NCHW, groups included: direct, over packed channel blocks, in SIMD registers."""

    name = "conv2d_cpu"
    version = 1
    op = "conv2d"
    kind = "cpu"

    def validate(self, workload: Workload, target: Target) -> str | None:
        if workload.dtype != "float32":
            return f"dtype {workload.dtype} is not supported on the CPU; allowed: float32"
        return epilogue_problem(workload, dtypes=("float32",))

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        shape = Shape.of(workload)
        registers = _vector_registers(target)
        lanes = max(target.simd_bits // 32, 1)
        blocks = _BLOCKS[: max(_BLOCKS.index(_power_of_two(shape.outputs)), 0) + 1] if shape.outputs < 32 else _BLOCKS
        x_layouts = ("packed", "direct") if shape.fits_unpadded else ("packed",)

        def vectors(k: Any) -> Any:  # machine registers per vector of `block` lanes
            return np.maximum(k["block"] // lanes, 1)

        return ConfigSpace(
            [
                Knob("block", blocks[-4:], "x of NCHW[x]c: channels per packed block and lanes of a vector"),
                Knob("ow_tile", _up_to(_OW_TILES, shape.ow), "output pixels along the width in the register tile"),
                Knob("oc_vectors", _OC_VECTORS, "vectors of output channels in the register tile"),
                Knob("unroll", (1,) if shape.depthwise else _UNROLLS, "input channels per step of the innermost loop"),
                Knob("oh_tile", _up_to(_OH_TILES, shape.oh), "output rows per work item"),
                Knob("x_layout", x_layouts, "packed: copy x to NCHW[x]c with its padding; direct: read x in place"),
                Knob("order", ("channels", "rows"), "whether neighbouring work items differ in output channels or in rows"),
                Knob("threads", _thread_counts(target.sms), "threads that share the work items of every step"),
            ],
            [
                Constraint(
                    f"accumulators, weights and one operand fit in {registers} vector registers",
                    lambda k: k["accumulators"] + k["oc_vectors"] * vectors(k) + 1 <= registers,
                ),
                Constraint(
                    f"padding of the {shape.outputs} output channels is less than a whole vector",
                    lambda k: (k["oc_vectors"] - 1) * k["block"] < shape.outputs,
                ),
                Constraint(
                    f"unroll <= the channel block, min(block, {shape.reduced})",
                    lambda k: k["unroll"] <= np.minimum(k["block"], shape.reduced),
                ),
                Constraint(
                    "a depthwise tile reads x directly only in NHWC and without a tail",
                    lambda k: (
                        (k["x_layout"] == "packed")
                        | (not shape.depthwise)
                        | ((shape.outputs % (k["oc_vectors"] * k["block"]) == 0) & (workload.layout == "NHWC"))
                    ),
                ),
            ],
            {
                "accumulators": lambda k: k["ow_tile"] * k["oc_vectors"] * vectors(k),
                "work_items": lambda k: (
                    shape.n
                    * shape.groups
                    * -(-shape.oh // k["oh_tile"])
                    * -(-shape.outputs // (k["oc_vectors"] * k["block"]))
                ),
                "items_per_thread": lambda k: k["work_items"] / k["threads"],
                "weight_tile_bytes": lambda k: 4 * shape.reduced * shape.r * shape.s * k["oc_vectors"] * k["block"],
                "useful_share": lambda k: _useful_share(shape, k["ow_tile"], k["oc_vectors"] * k["block"]),
            },
        )

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        """The tile with the fewest modelled cycles per useful multiply-add. Everything else follows from it.

        A tile step issues ow_tile * oc_vectors multiply-adds, at most two per cycle and limited by their latency of four
        cycles. It issues ow_tile + oc_vectors loads, two per cycle; loads of weights come from the second-level cache, one
        every two cycles.
        """
        shape = Shape.of(workload)
        allowed = {knob.name: [int(value) for value in knob.values] for knob in space.knobs if knob.ordered}
        layouts = next(knob.values for knob in space.knobs if knob.name == "x_layout")
        block = min(max(target.simd_bits // 32, 1), max(allowed["block"]))
        loads_per_row = 2 if shape.depthwise else 1

        def cycles(ow_tile: int, oc_vectors: int) -> float:
            fmas = ow_tile * oc_vectors
            loads = ow_tile * (oc_vectors if shape.depthwise else 1) * loads_per_row + oc_vectors
            return (
                (max(fmas / 2, loads / 2, 2.0 * oc_vectors, 4.0) + loads / 16)
                / fmas
                / float(_useful_share(shape, ow_tile, oc_vectors * block))
            )

        threads = max(allowed["threads"])
        base: dict[str, int | str] = {
            "block": block,
            "unroll": max(u for u in allowed["unroll"] if u <= min(block, shape.reduced, 4)),
            "x_layout": "direct" if "direct" in layouts and workload.layout == "NHWC" else "packed",
            "order": "channels",
            "threads": threads,
        }
        candidates: list[tuple[float, int, Config]] = []
        for ow_tile in allowed["ow_tile"]:
            for oc_vectors in allowed["oc_vectors"]:
                # The most rows, up to eight, that leave every thread four work items.
                tiles = shape.n * shape.groups * math.ceil(shape.outputs / (oc_vectors * block))
                rows = max(min(tiles * shape.oh // (4 * threads), 8), 1)
                oh_tile = max(value for value in allowed["oh_tile"] if value <= rows)
                for x_layout in dict.fromkeys((base["x_layout"], "packed")):
                    config = Config(
                        {**base, "ow_tile": ow_tile, "oc_vectors": oc_vectors, "oh_tile": oh_tile, "x_layout": x_layout}
                    )
                    if not space.check(config):
                        candidates.append((cycles(ow_tile, oc_vectors), len(candidates), config))
        return min(candidates)[2]

    def plain(self, workload: Workload, target: Target, space: ConfigSpace) -> Config | None:
        """One vector of output channels of one pixel at a time, over packed data, on all cores, without a register tile."""
        values = {knob.name: knob.values for knob in space.knobs}
        lanes = max(target.simd_bits // 32, 1)
        config = Config(
            {
                **{name: values[name][0] for name in ("ow_tile", "oc_vectors", "unroll", "oh_tile", "order")},
                "block": max((int(block) for block in values["block"] if int(block) <= lanes), default=values["block"][0]),
                "x_layout": "packed",
                "threads": values["threads"][-1],
            }
        )
        return None if space.check(config) else config

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        plan, epilogue = Plan.of(workload, config), CpuEpilogue(workload)
        x = "x" if plan.direct else "x_packed"
        threads, weight, packed = config["threads"], Pointer("weight"), Pointer("w_packed")
        arguments = (Pointer(x), packed, Pointer("y"), *epilogue.params)
        steps = [
            KernelStep(pack_weight_kernel(plan), (weight, packed), Grid(plan.weight_items), threads, constant=True),
            KernelStep(convolve_kernel(plan, epilogue), arguments, Grid(plan.items), threads),
        ]
        workspaces = {"w_packed": 4 * plan.weight_size}
        if not plan.direct:
            pack = KernelStep(pack_x_kernel(plan), (Pointer("x"), Pointer("x_packed")), Grid(plan.x_rows), threads)
            steps.insert(0, pack)
            workspaces["x_packed"] = 4 * plan.x_size
        return KernelSource("cpu", "native", tuple(steps), workspaces, alignments=dict.fromkeys(("x", "weight", "y"), 4))


def _up_to(values: tuple[int, ...], limit: int) -> tuple[int, ...]:
    return tuple(value for value in values if value <= limit)


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def _thread_counts(cores: int) -> tuple[int, ...]:
    return tuple(range(1, cores + 1)) if cores <= 8 else tuple({*(2**i for i in range(cores.bit_length())), cores})


def _vector_registers(target: Target) -> int:
    return 32 if target.simd_bits >= 512 else 16


def _useful_share(shape: Shape, ow_tile: Any, channels: Any) -> Any:
    """Share of the multiply-adds that is not wasted on overlapping pixels or padded channels."""
    pixels = shape.ow / (np.ceil(shape.ow / ow_tile) * ow_tile)
    return pixels * shape.outputs / (np.ceil(shape.outputs / channels) * channels)
