"""fp32 convolution on the CPU: a direct convolution over NCHW[x]c data with a register tile of accumulators.

The algorithm, for every output pixel and channel:

    y[n, p, q, k] = epilogue(sum over c, r, s of x[n, p * stride + r * dilation - top, ..., c] * w[k, r, s, c])

The schedule: x is packed into channel blocks with its padding written out (NCHW[x]c), weights into OIHW[x]i[x]o tiles in
the order in which they are read. Then every register tile of `ow_tile` pixels x `oc_vectors` vectors of `block` output
channels walks (channel block, r, s, channel): one weight vector and one broadcast of x meet in a fused multiply-add
(Georganas et al., "Anatomy of High-Performance Deep Learning Convolutions on SIMD Architectures", SC18). A depthwise
convolution keeps `block` channels in a vector and multiplies elementwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import types

from schedsearch.backend.cpu_ops import as_array, tile_ops
from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.parts.cpu_epilogue import CpuEpilogue
from schedsearch.templates.parts.stages import epilogue_problem
from schedsearch.workload import Workload

_F32 = types.float32
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
        shape = _Shape.of(workload)
        registers = _vector_registers(target)
        lanes = max(target.simd_bits // 32, 1)
        blocks = _BLOCKS[: max(_BLOCKS.index(_power_of_two(shape.outputs)), 0) + 1] if shape.outputs < 32 else _BLOCKS
        x_layouts = ("packed", "direct") if shape.fits_unpadded else ("packed",)

        def vectors(k: Any) -> Any:  # machine registers that one vector of `block` lanes takes
            return np.maximum(k["block"] // lanes, 1)

        return ConfigSpace(
            [
                Knob("block", blocks[-4:], "x of NCHW[x]c: channels per packed block and lanes of a vector"),
                Knob("ow_tile", _up_to(_OW_TILES, shape.ow), "output pixels along the width in the register tile"),
                Knob("oc_vectors", _OC_VECTORS, "vectors of output channels in the register tile"),
                Knob("unroll", (1,) if shape.depthwise else _UNROLLS, "input channels per step of the innermost loop"),
                Knob("oh_tile", _up_to(_OH_TILES, shape.oh), "output rows per work item"),
                Knob("x_layout", x_layouts, "packed: copy x to NCHW[x]c with its padding; direct: read x where it lies"),
                Knob("order", ("channels", "rows"), "what neighbouring work items differ in: output channels or rows"),
                Knob("threads", _thread_counts(target.sms), "threads that share the work items of every step"),
            ],
            [
                Constraint(
                    f"accumulators, weights and one operand fit in {registers} vector registers",
                    lambda k: k["accumulators"] + k["oc_vectors"] * vectors(k) + 1 <= registers,
                ),
                Constraint(
                    f"less than a whole vector of the {shape.outputs} output channels is padding",
                    lambda k: (k["oc_vectors"] - 1) * k["block"] < shape.outputs,
                ),
                Constraint(
                    f"unroll <= the channel block, min(block, {shape.reduced})",
                    lambda k: k["unroll"] <= np.minimum(k["block"], shape.reduced),
                ),
                Constraint(
                    "a depthwise tile reads x directly only from NHWC and without a tail",
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
        """The tile with the fewest modelled cycles per useful multiply-add; everything else follows from it.

        A tile step issues ow_tile * oc_vectors multiply-adds (two a cycle, and no faster than their latency of four allows)
        and ow_tile + oc_vectors loads (two a cycle), of which the weights come from the second-level cache (one in two).
        """
        shape = _Shape.of(workload)
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
                # As many rows as leave every thread four work items, at most eight.
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
        """One vector of output channels of one pixel at a time, over packed data, on all cores: no tile in registers."""
        values = {knob.name: knob.values for knob in space.knobs}
        lanes = max(target.simd_bits // 32, 1)
        config = Config(
            {
                **{name: values[name][0] for name in ("ow_tile", "oc_vectors", "unroll", "oh_tile", "order")},
                "block": max((block for block in values["block"] if block <= lanes), default=values["block"][0]),
                "x_layout": "packed",
                "threads": values["threads"][-1],
            }
        )
        return None if space.check(config) else config

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        plan, epilogue = _Schedule.of(workload, config), CpuEpilogue(workload)
        x = "x" if plan.direct else "x_packed"
        steps = [
            KernelStep(
                _pack_weight(plan), (Pointer("weight"), Pointer("w_packed")), Grid(plan.weight_items), config["threads"],
                constant=True,
            ),
            KernelStep(
                _convolve(plan, epilogue),
                (Pointer(x), Pointer("w_packed"), Pointer("y"), *epilogue.params),
                Grid(plan.items),
                config["threads"],
            ),
        ]  # fmt: skip
        workspaces = {"w_packed": 4 * plan.weight_size}
        if not plan.direct:
            steps.insert(
                0, KernelStep(_pack_x(plan), (Pointer("x"), Pointer("x_packed")), Grid(plan.x_rows), config["threads"])
            )
            workspaces["x_packed"] = 4 * plan.x_size
        return KernelSource("cpu", "native", tuple(steps), workspaces, alignments=dict.fromkeys(("x", "weight", "y"), 4))


@dataclass(frozen=True)
class _Shape:
    """The workload in the kernel's terms. A depthwise convolution is one group whose every output has its own input.

    Attributes:
        groups, reduced, outputs: independent problems; input channels summed over and output channels of each.
        padded_h, padded_w: input rows and columns that some output reads, the first being row -top and column -left.
        x_strides, w_strides, y_strides: elements between neighbours along (n, c, h, w), (k, c, r, s), (n, k, p, q).
    """

    n: int
    h: int
    w: int
    r: int
    s: int
    oh: int
    ow: int
    groups: int
    reduced: int
    outputs: int
    depthwise: bool
    stride: tuple[int, int]
    dilation: tuple[int, int]
    top: int
    left: int
    padded_h: int
    padded_w: int
    x_strides: tuple[int, ...]
    w_strides: tuple[int, ...]
    y_strides: tuple[int, ...]

    @classmethod
    def of(cls, p: Workload) -> _Shape:
        x, weight, y = p.signature[0], p.signature[1], p.output
        oh, ow = (y.shape[y.axes.index(axis)] for axis in "HW")
        depthwise = p.groups > 1 and p.groups == p.c == p.k
        groups = 1 if depthwise else p.groups
        return cls(
            n=p.n, h=p.h, w=p.w, r=p.r, s=p.s, oh=oh, ow=ow,
            groups=groups, reduced=p.c // p.groups, outputs=p.k // groups, depthwise=depthwise,
            stride=p.stride, dilation=p.dilation, top=p.padding[0], left=p.padding[1],
            padded_h=(oh - 1) * p.stride[0] + (p.r - 1) * p.dilation[0] + 1,
            padded_w=(ow - 1) * p.stride[1] + (p.s - 1) * p.dilation[1] + 1,
            x_strides=x.strides("NCHW"), w_strides=weight.strides("OIHW"), y_strides=y.strides("NCHW"),
        )  # fmt: skip

    @property
    def fits_unpadded(self) -> bool:
        return self.top == self.left == 0 and self.padded_h <= self.h and self.padded_w <= self.w


def _up_to(values: tuple[int, ...], limit: int) -> tuple[int, ...]:
    return tuple(value for value in values if value <= limit)


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def _thread_counts(cores: int) -> tuple[int, ...]:
    return tuple(range(1, cores + 1)) if cores <= 8 else tuple({*(2**i for i in range(cores.bit_length())), cores})


def _vector_registers(target: Target) -> int:
    return 32 if target.simd_bits >= 512 else 16


def _useful_share(shape: _Shape, ow_tile: Any, channels: Any) -> Any:
    """Part of the multiply-adds that is not spent on overlapping pixels or padded channels."""
    pixels = shape.ow / (np.ceil(shape.ow / ow_tile) * ow_tile)
    return pixels * shape.outputs / (np.ceil(shape.outputs / channels) * channels)


@dataclass(frozen=True)
class _Schedule:
    """Sizes that follow from shape and configuration; sizes and strides in float32 elements.

    x_packed is (n, groups, x_blocks, padded_h, padded_w, x_block), w_packed (groups, tiles, channel blocks, r, s, channel of
    the block, tile_channels), where only the last channel block may be narrower.
    """

    shape: _Shape
    ow_tile: int
    oc_vectors: int
    block: int
    unroll: int
    oh_tile: int
    direct: bool
    channels_inner: bool

    @classmethod
    def of(cls, workload: Workload, config: Config) -> _Schedule:
        return cls(
            shape=_Shape.of(workload), ow_tile=config["ow_tile"], oc_vectors=config["oc_vectors"], block=config["block"],
            unroll=config["unroll"], oh_tile=config["oh_tile"], direct=config["x_layout"] == "direct",
            channels_inner=config["order"] == "channels",
        )  # fmt: skip

    @property
    def tile_channels(self) -> int:
        return self.oc_vectors * self.block

    @property
    def tiles(self) -> int:
        """Tiles of output channels per group."""
        return math.ceil(self.shape.outputs / self.tile_channels)

    @property
    def row_tiles(self) -> int:
        return math.ceil(self.shape.oh / self.oh_tile)

    @property
    def items(self) -> int:
        return self.shape.n * self.shape.groups * self.tiles * self.row_tiles

    @property
    def channel_block(self) -> int:
        """Input channels that are reduced before the next kernel tap."""
        return min(self.block, self.shape.reduced)

    @property
    def channel_blocks(self) -> int:
        return math.ceil(self.shape.reduced / self.channel_block)

    @property
    def x_block(self) -> int:
        return self.tile_channels if self.shape.depthwise else self.channel_block

    @property
    def x_blocks(self) -> int:
        return self.tiles if self.shape.depthwise else self.channel_blocks

    @property
    def x_rows(self) -> int:
        return self.shape.n * self.shape.groups * self.x_blocks * self.shape.padded_h

    @property
    def x_size(self) -> int:
        return self.x_rows * self.shape.padded_w * self.x_block

    @property
    def weight_tile(self) -> int:
        return self.shape.reduced * self.shape.r * self.shape.s * self.tile_channels

    @property
    def weight_size(self) -> int:
        return self.shape.groups * self.tiles * self.weight_tile

    @property
    def weight_items(self) -> int:
        """One per (group, tile, channel block, kernel row)."""
        return self.shape.groups * self.tiles * self.channel_blocks * self.shape.r

    @property
    def input_strides(self) -> tuple[int, int, int, int, int, int]:
        """Of what the convolution reads, along (n, group, channel block, h, w, channel of a block)."""
        if self.direct:
            n, c, h, w = self.shape.x_strides
            return n, c * self.shape.reduced, c * self.x_block, h, w, c
        w = self.x_block
        h = w * self.shape.padded_w
        block = h * self.shape.padded_h
        group = block * self.x_blocks
        return group * self.shape.groups, group, block, h, w, 1


def _pack_x(plan: _Schedule) -> Callable[..., None]:
    """A work item is one row of one channel block."""
    shape = plan.shape
    n_stride, c_stride, h_stride, w_stride = shape.x_strides
    channels = shape.outputs if shape.depthwise else shape.reduced  # of a group
    groups, blocks, block = shape.groups, plan.x_blocks, plan.x_block
    rows, columns, top, left, height = shape.padded_h, shape.padded_w, shape.top, shape.left, shape.h
    first, last = min(left, columns), min(left + shape.w, columns)  # columns that exist
    x_size, packed_size = shape.n * n_stride, plan.x_size

    def pack_x(x, packed, start, stop):  # type: ignore[no-untyped-def]
        source = as_array(x, (x_size,), _F32)
        target = as_array(packed, (packed_size,), _F32)
        for item in range(start, stop):
            row = item % rows - top
            c0 = item // rows % blocks * block
            group = item // (rows * blocks) % groups
            n = item // (rows * blocks * groups)
            width = min(block, channels - c0)
            to = item * columns * block
            if row < 0 or row >= height:
                for i in range(columns * block):
                    target[to + i] = _F32(0)
                continue
            for i in range(first * block):
                target[to + i] = _F32(0)
            at = n * n_stride + (group * channels + c0) * c_stride + row * h_stride
            for column in range(first, last):
                pixel = at + (column - left) * w_stride
                for c in range(width):
                    target[to + column * block + c] = source[pixel + c * c_stride]
                for c in range(width, block):
                    target[to + column * block + c] = _F32(0)
            for i in range(last * block, columns * block):
                target[to + i] = _F32(0)

    return pack_x


def _pack_weight(plan: _Schedule) -> Callable[..., None]:
    """A work item is one (group, tile, channel block, kernel row)."""
    shape = plan.shape
    o_stride, i_stride, r_stride, s_stride = shape.w_strides
    kr, ks, outputs, reduced, tiles = shape.r, shape.s, shape.outputs, shape.reduced, plan.tiles
    blocks, block, lanes, tile_size = plan.channel_blocks, plan.channel_block, plan.tile_channels, plan.weight_tile
    weight_size, packed_size = shape.groups * outputs * o_stride, plan.weight_size

    def pack_weight(weight, packed, start, stop):  # type: ignore[no-untyped-def]
        source = as_array(weight, (weight_size,), _F32)
        target = as_array(packed, (packed_size,), _F32)
        for item in range(start, stop):
            r = item % kr
            c0 = item // kr % blocks * block
            tile = item // (kr * blocks)  # over groups and tiles
            k0 = tile % tiles * lanes
            used = min(lanes, outputs - k0)
            width = min(block, reduced - c0)
            at = (tile // tiles * outputs + k0) * o_stride + c0 * i_stride + r * r_stride
            to = tile * tile_size + (c0 * kr * ks + r * ks * width) * lanes
            for s in range(ks):
                for c in range(width):
                    for k in range(used):
                        target[to + k] = source[at + k * o_stride + c * i_stride + s * s_stride]
                    for k in range(used, lanes):
                        target[to + k] = _F32(0)
                    to += lanes

    return pack_weight


def _convolve(plan: _Schedule, epilogue: CpuEpilogue) -> Callable[..., None]:
    """A work item is `oh_tile` output rows of one tile of output channels."""
    shape = plan.shape
    n_stride, group_stride, block_stride, h_stride, w_stride, c_stride = (4 * stride for stride in plan.input_strides)
    tile_stride = block_stride if shape.depthwise else 0  # every tile of a depthwise convolution has its own input
    if shape.depthwise and plan.direct:
        tile_stride = 4 * plan.tile_channels
    yn_stride, yk_stride, yh_stride, yw_stride = shape.y_strides
    groups, outputs, reduced, tiles, row_tiles = shape.groups, shape.outputs, shape.reduced, plan.tiles, plan.row_tiles
    kr, ks, oh, ow = shape.r, shape.s, shape.oh, shape.ow
    stride_h, dilation_h, stride_w, dilation_w = shape.stride[0], shape.dilation[0], shape.stride[1], shape.dilation[1]
    oh_tile, ow_tile, lanes, unroll = plan.oh_tile, plan.ow_tile, plan.tile_channels, plan.unroll
    ow_tiles = math.ceil(ow / ow_tile)
    block, blocks = plan.channel_block, plan.channel_blocks
    whole_blocks = reduced % block == 0  # then the width of a block is a constant, and no code is made for a remainder
    weight_tile_bytes = 4 * plan.weight_tile
    channels_inner = plan.channels_inner
    y_size = shape.n * yn_stride
    ops = tile_ops(
        ow_tile, plan.oc_vectors, plan.block, unroll,
        x_row_bytes=stride_w * w_stride, x_depth_bytes=c_stride, broadcast=not shape.depthwise,
    )  # fmt: skip
    zero, multiply_add, multiply_add_one, spill = ops.zero, ops.multiply_add, ops.multiply_add_one, ops.spill
    fused = epilogue.apply

    def convolve(x, w, y, *operands, start, stop):  # type: ignore[no-untyped-def]
        x, w = types.int64(x), types.int64(w)
        out = as_array(y, (y_size,), _F32)
        for item in range(start, stop):
            if channels_inner:
                tile, row_tile = item % tiles, item // tiles % row_tiles
            else:
                tile, row_tile = item // row_tiles % tiles, item % row_tiles
            group = item // (tiles * row_tiles) % groups
            n = item // (tiles * row_tiles * groups)
            x_item = x + n * n_stride + group * group_stride + tile * tile_stride
            w_item = w + (group * tiles + tile) * weight_tile_bytes
            k0 = tile * lanes
            used = min(lanes, outputs - k0)
            for p in range(row_tile * oh_tile, min(row_tile * oh_tile + oh_tile, oh)):
                for q_tile in range(ow_tiles):
                    q = min(q_tile * ow_tile, ow - ow_tile)  # the last tile overlaps its neighbour
                    x_pixel = x_item + p * stride_h * h_stride + q * stride_w * w_stride
                    w_at = w_item
                    total = zero()
                    for c_block in range(blocks):
                        width = block if whole_blocks else min(block, reduced - c_block * block)
                        for r in range(kr):
                            for s in range(ks):
                                x_at = (
                                    x_pixel + c_block * block_stride + r * dilation_h * h_stride + s * dilation_w * w_stride
                                )
                                for _ in range(width // unroll):
                                    total = multiply_add(total, x_at, w_at)
                                    x_at += unroll * c_stride
                                    w_at += 4 * unroll * lanes
                                for _ in range(width % unroll):
                                    total = multiply_add_one(total, x_at, w_at)
                                    x_at += c_stride
                                    w_at += 4 * lanes
                    sums = as_array(spill(total), (ow_tile, lanes), _F32)
                    at = n * yn_stride + (group * outputs + k0) * yk_stride + p * yh_stride + q * yw_stride
                    if yk_stride == 1:
                        for i in range(ow_tile):
                            for k in range(used):
                                to = at + i * yw_stride + k
                                out[to] = fused(sums[i, k], group * outputs + k0 + k, to, operands)
                    else:
                        for k in range(used):
                            for i in range(ow_tile):
                                to = at + k * yk_stride + i * yw_stride
                                out[to] = fused(sums[i, k], group * outputs + k0 + k, to, operands)

    return convolve
