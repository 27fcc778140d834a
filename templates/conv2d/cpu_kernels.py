"""Kernels of conv2d_cpu: pack x, pack the weights, convolve; and their sizes.

A kernel computes a range of work items. It captures sizes as constants, so loops unroll and index arithmetic folds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numba import types

from schedsearch.backend.cpu_finish import finish_op
from schedsearch.backend.cpu_moves import read_op, write_op
from schedsearch.backend.cpu_ops import as_array, tile_ops
from schedsearch.config import Config
from schedsearch.ops.conv2d import Conv2dParams, first_channel
from schedsearch.templates.parts.casts import f32, i64
from schedsearch.templates.parts.cpu_epilogue import CpuEpilogue
from schedsearch.workload import Workload

_FEW_COLUMNS = 6  # a row with fewer pixels fills no register tile


@dataclass(frozen=True)
class Shape:
    """The workload in the kernel's terms. A depthwise convolution is one group in which every output has its own input.

    A register tile lies along a row. So an image of a few columns is computed as if it lay on its side: then `h`, `r`, `oh`
    and `top` are those of its width, and `w`, `s`, `ow` and `left` those of its height.

    Attributes:
        axes: of the image, along which the rows and the pixels of a row follow: "HW", or "WH" of one on its side.
        groups, reduced, outputs: number of independent problems; summed input channels and output channels of each one.
        padded_h, padded_w: input rows and columns that some output reads, starting at row -top and column -left.
    """

    axes: str
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

    @classmethod
    def of(cls, workload: Workload[Conv2dParams]) -> Shape:
        p = workload.params
        y = workload.output
        p_q = tuple(y.shape[y.axes.index(axis)] for axis in "HW")
        axes = "WH" if p_q[1] < min(p_q[0], _FEW_COLUMNS) else "HW"

        def placed(height_and_width: Sequence[int]) -> tuple[int, int]:
            height, width = height_and_width
            return (height, width) if axes == "HW" else (width, height)

        (oh, ow), (h, w), (r, s) = placed(p_q), placed((p.h, p.w)), placed((p.r, p.s))
        stride, dilation, (top, left) = placed(p.stride), placed(p.dilation), placed(p.padding[:2])
        depthwise = p.groups > 1 and p.groups == p.c == p.k
        groups = 1 if depthwise else p.groups
        return cls(
            axes=axes, n=p.n, h=h, w=w, r=r, s=s, oh=oh, ow=ow,
            groups=groups, reduced=p.c // p.groups, outputs=p.k // groups, depthwise=depthwise,
            stride=stride, dilation=dilation, top=top, left=left,
            padded_h=(oh - 1) * stride[0] + (r - 1) * dilation[0] + 1,
            padded_w=(ow - 1) * stride[1] + (s - 1) * dilation[1] + 1,
        )  # fmt: skip

    @property
    def fits_unpadded(self) -> bool:
        return self.top == self.left == 0 and self.padded_h <= self.h and self.padded_w <= self.w


class TilePlan:
    """How a convolution is cut into work items: tiles of output channels and of output rows. A base of plans.

    Attributes:
        shape: of the convolution.
        oc_vectors, block: vectors of output channels in a register tile, and their lanes.
        oh_tile: output rows of a work item.
        own_weights: each image has weights of its own, one set after the other in memory; otherwise there is one set.
    """

    shape: Shape
    oc_vectors: int
    block: int
    oh_tile: int
    own_weights: bool

    @property
    def tile_channels(self) -> int:
        return self.oc_vectors * self.block

    @property
    def tiles(self) -> int:
        """Tiles of output channels per group."""
        return math.ceil(self.shape.outputs / self.tile_channels)

    @property
    def weight_tiles(self) -> int:
        """Tiles of output channels of all groups and all sets of weights."""
        return (self.shape.n if self.own_weights else 1) * self.shape.groups * self.tiles

    @property
    def image_weight_tiles(self) -> int:
        """Tiles of weights from one image to the next."""
        return self.shape.groups * self.tiles if self.own_weights else 0

    @property
    def row_tiles(self) -> int:
        return math.ceil(self.shape.oh / self.oh_tile)

    @property
    def items(self) -> int:
        return self.shape.n * self.shape.groups * self.tiles * self.row_tiles


@dataclass(frozen=True)
class Plan(TilePlan):
    """Sizes that follow from shape and configuration; sizes and strides in float32 elements.

    x_packed is (n, groups, x_blocks, padded_h, padded_w, x_block), or (n, padded_h, padded_w, channels) if `padded`.
    w_packed is (sets, groups, tiles, channel blocks, r, s, channel of the block, tile_channels); only its last channel
    block may be narrower. Strides are distances along (n, c, h, w), (k, c, r, s) and (n, k, p, q). `x_first` is the first
    element of x in the array that has it.
    """

    shape: Shape
    ow_tile: int
    oc_vectors: int
    block: int
    unroll: int
    oh_tile: int
    direct: bool
    channels_inner: bool
    x_strides: tuple[int, ...]
    w_strides: tuple[int, ...]
    y_strides: tuple[int, ...]
    own_weights: bool = False
    padded: bool = False
    x_first: int = 0

    @classmethod
    def of(cls, workload: Workload[Conv2dParams], config: Config) -> Plan:
        (x, weight), shape = workload.signature[:2], Shape.of(workload)
        return cls(
            shape=shape, ow_tile=config["ow_tile"], oc_vectors=config["oc_vectors"], block=config["block"],
            unroll=config["unroll"], oh_tile=config["oh_tile"], direct=config["x_layout"] == "direct",
            padded=config["x_layout"] == "padded",
            channels_inner=config["order"] == "channels", x_strides=x.strides(f"NC{shape.axes}"),
            w_strides=weight.strides(f"OI{shape.axes}"), y_strides=workload.output.strides(f"NC{shape.axes}"),
            x_first=first_channel(workload.params) * x.strides("NCHW")[1],
        )  # fmt: skip

    @property
    def channel_block(self) -> int:
        """Input channels that the kernel sums before it goes to the next tap."""
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
    def has_rows_of_taps(self) -> bool:
        """Whether the channels of all taps in a row of a filter are neighbours in memory, in the order of packed weights:
        then the kernel sums them in one loop."""
        w, c = self.input_strides[-2:]
        one_block = self.channel_blocks == 1 and not self.shape.depthwise
        return one_block and c == 1 and w == self.shape.reduced and self.shape.dilation[1] == 1

    @property
    def x_rows(self) -> int:
        return self.shape.n * self.shape.padded_h * (1 if self.padded else self.shape.groups * self.x_blocks)

    @property
    def x_size(self) -> int:
        return self.x_rows * self.shape.padded_w * (self.x_channels if self.padded else self.x_block)

    @property
    def x_channels(self) -> int:
        return self.shape.groups * self.shape.reduced

    @property
    def weight_tile(self) -> int:
        return self.shape.reduced * self.shape.r * self.shape.s * self.tile_channels

    @property
    def weight_size(self) -> int:
        return self.weight_tiles * self.weight_tile

    @property
    def weight_items(self) -> int:
        """Number of work items: one per (set, group, tile, channel block, kernel row)."""
        return self.weight_tiles * self.channel_blocks * self.shape.r

    @property
    def input_strides(self) -> tuple[int, int, int, int, int, int]:
        """Strides of the convolution's input along (n, group, channel block, h, w, channel of a block)."""
        if self.direct:
            n, c, h, w = self.x_strides
            return n, c * self.shape.reduced, c * self.x_block, h, w, c
        if self.padded:
            w, h = self.x_channels, self.x_channels * self.shape.padded_w
            return h * self.shape.padded_h, self.shape.reduced, self.x_block, h, w, 1
        w = self.x_block
        h = w * self.shape.padded_w
        block = h * self.shape.padded_h
        group = block * self.x_blocks
        return group * self.shape.groups, group, block, h, w, 1


def pack_x_kernel(plan: Plan) -> Callable[..., None]:
    """A work item is one row of one channel block."""
    shape = plan.shape
    n_stride, c_stride, h_stride, w_stride = plan.x_strides
    channels = shape.outputs if shape.depthwise else shape.reduced  # channels of a group
    groups, blocks, block = shape.groups, plan.x_blocks, plan.x_block
    rows, columns, top, left, height = shape.padded_h, shape.padded_w, shape.top, shape.left, shape.h
    first, last = min(left, columns), min(left + shape.w, columns)  # columns inside of the image
    x_size, packed_size, x_first = shape.n * n_stride, plan.x_size, plan.x_first

    def pack_x(x, packed, start, stop):  # type: ignore[no-untyped-def]
        source = as_array(x, (x_size,), f32)
        target = as_array(packed, (packed_size,), f32)
        for item in range(start, stop):
            row = item % rows - top
            c0 = item // rows % blocks * block
            group = item // (rows * blocks) % groups
            n = item // (rows * blocks * groups)
            width = min(block, channels - c0)
            to = item * columns * block
            if row < 0 or row >= height:
                for i in range(columns * block):
                    target[to + i] = f32(0)
                continue
            for i in range(first * block):
                target[to + i] = f32(0)
            at = x_first + n * n_stride + (group * channels + c0) * c_stride + row * h_stride
            for column in range(first, last):
                pixel = at + (column - left) * w_stride
                for c in range(width):
                    target[to + column * block + c] = source[pixel + c * c_stride]
                for c in range(width, block):
                    target[to + column * block + c] = f32(0)
            for i in range(last * block, columns * block):
                target[to + i] = f32(0)

    return pack_x


def pad_x_kernel(plan: Plan) -> Callable[..., None]:
    """A work item is one row of an image in NHWC with all of its channels."""
    shape = plan.shape
    n_stride, _, h_stride, w_stride = plan.x_strides
    rows, size, top, height = shape.padded_h, shape.padded_w * plan.x_channels, shape.top, shape.h
    first = min(shape.left, shape.padded_w) * plan.x_channels
    inside = min(shape.left + shape.w, shape.padded_w) * plan.x_channels - first
    assert w_stride == plan.x_channels
    read, write = read_op(types.float32), write_op(types.float32)

    def pad_x(x, padded, start, stop):  # type: ignore[no-untyped-def]
        for item in range(start, stop):
            row, to = item % rows - top, item * size
            if row < 0 or row >= height:
                for i in range(size):
                    write(padded, to + i, f32(0))
                continue
            at = item // rows * n_stride + row * h_stride
            for i in range(first):
                write(padded, to + i, f32(0))
            for i in range(inside):
                write(padded, to + first + i, read(x, at + i))
            for i in range(first + inside, size):
                write(padded, to + i, f32(0))

    return pad_x


def pack_weight_kernel(plan: Plan) -> Callable[..., None]:
    """A work item is one (set, group, tile, channel block, kernel row)."""
    shape = plan.shape
    o_stride, i_stride, r_stride, s_stride = plan.w_strides
    kr, ks, outputs, reduced, tiles = shape.r, shape.s, shape.outputs, shape.reduced, plan.tiles
    blocks, block, lanes, tile_size = plan.channel_blocks, plan.channel_block, plan.tile_channels, plan.weight_tile
    group_stride, packed_size = outputs * reduced * kr * ks, plan.weight_size
    weight_size = plan.weight_tiles // tiles * group_stride

    def pack_weight(weight, packed, start, stop):  # type: ignore[no-untyped-def]
        source = as_array(weight, (weight_size,), f32)
        target = as_array(packed, (packed_size,), f32)
        for item in range(start, stop):
            r = item % kr
            c0 = item // kr % blocks * block
            tile = item // (kr * blocks)  # counts sets, groups and tiles
            k0 = tile % tiles * lanes
            used = min(lanes, outputs - k0)
            width = min(block, reduced - c0)
            at = tile // tiles * group_stride + k0 * o_stride + c0 * i_stride + r * r_stride
            to = tile * tile_size + (c0 * kr * ks + r * ks * width) * lanes
            for s in range(ks):
                for c in range(width):
                    for k in range(used):
                        target[to + k] = source[at + k * o_stride + c * i_stride + s * s_stride]
                    for k in range(used, lanes):
                        target[to + k] = f32(0)
                    to += lanes

    return pack_weight


def convolve_kernel(plan: Plan, epilogue: CpuEpilogue) -> Callable[..., None]:
    """A work item is `oh_tile` output rows of one tile of output channels."""
    shape = plan.shape
    n_stride, group_stride, block_stride, h_stride, w_stride, c_stride = (4 * stride for stride in plan.input_strides)
    tile_stride = block_stride if shape.depthwise else 0  # every tile of a depthwise convolution has its own input
    if shape.depthwise and plan.direct:
        tile_stride = 4 * plan.tile_channels
    yn_stride, _, yh_stride, yw_stride = plan.y_strides
    groups, outputs, reduced, tiles, row_tiles = shape.groups, shape.outputs, shape.reduced, plan.tiles, plan.row_tiles
    kr, ks, oh, ow = shape.r, shape.s, shape.oh, shape.ow
    stride_h, dilation_h, stride_w, dilation_w = shape.stride[0], shape.dilation[0], shape.stride[1], shape.dilation[1]
    oh_tile, ow_tile, lanes, unroll = plan.oh_tile, plan.ow_tile, plan.tile_channels, plan.unroll
    ow_tiles = math.ceil(ow / ow_tile)
    block, blocks = plan.channel_block, plan.channel_blocks
    if plan.has_rows_of_taps:
        ks, reduced, block = 1, ks * reduced, ks * reduced
    whole_blocks = reduced % block == 0  # the width of a block is then a constant, and there is no code for a remainder
    weight_tile_bytes = 4 * plan.weight_tile
    channels_inner, image_tiles = plan.channels_inner, plan.image_weight_tiles
    ops = tile_ops(
        ow_tile, plan.oc_vectors, plan.block, unroll,
        x_row_bytes=stride_w * w_stride, x_depth_bytes=c_stride, broadcast=not shape.depthwise,
    )  # fmt: skip
    zero, multiply_add, multiply_add_one = ops.zero, ops.multiply_add, ops.multiply_add_one
    store, x_first_bytes = store_kernel(plan, epilogue, ops.spill), 4 * plan.x_first if plan.direct else 0

    def convolve(x, w, y, *operands, start, stop):  # type: ignore[no-untyped-def]
        x, w = i64(x), i64(w)
        for item in range(start, stop):
            if channels_inner:
                tile, row_tile = item % tiles, item // tiles % row_tiles
            else:
                tile, row_tile = item // row_tiles % tiles, item % row_tiles
            group = item // (tiles * row_tiles) % groups
            n = item // (tiles * row_tiles * groups)
            x_item = x + x_first_bytes + n * n_stride + group * group_stride + tile * tile_stride
            w_item = w + (n * image_tiles + group * tiles + tile) * weight_tile_bytes
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
                    store(total, y, n * yn_stride + p * yh_stride + q * yw_stride, group * outputs, tile, operands)

    return convolve


def store_kernel(plan: Plan, epilogue: CpuEpilogue, spill: Any) -> Callable[..., None]:
    """`store(tile, y, first, first channel of the group, number of the tile, operands)`: the epilogue of a register tile,
    and its elements of y. `first` is the place in y of the first pixel's channel 0.

    Whole vectors are stored where channels are neighbours; otherwise numbers, one pixel after the other.
    """
    _, k_stride, _, pixel_stride = plan.y_strides
    pixels, lanes, tiles, fused = plan.ow_tile, plan.tile_channels, plan.tiles, epilogue.apply
    last_lanes = plan.shape.outputs - (tiles - 1) * lanes
    stages = epilogue.vector_stages
    if k_stride == 1 and stages is not None:
        whole, last = (finish_op(stages, pixels, plan.block, channels, pixel_stride) for channels in (lanes, last_lanes))
        several = tiles > 1

        def store_vectors(total, y, first, channel, tile, operands):  # type: ignore[no-untyped-def]
            k = channel + tile * lanes
            if several and tile < tiles - 1:
                whole(total, y, first + k, k, operands)
            else:
                last(total, y, first + k, k, operands)

        return store_vectors
    read, write = read_op(types.float32), write_op(types.float32)

    def store(total, y, first, channel, tile, operands):  # type: ignore[no-untyped-def]
        sums, k0 = spill(total), channel + tile * lanes
        at = first + k0 * k_stride
        used = lanes if tile < tiles - 1 else last_lanes
        if k_stride == 1:
            for i in range(pixels):
                for k in range(used):
                    to = at + i * pixel_stride + k
                    write(y, to, fused(read(sums, i * lanes + k), k0 + k, to, operands))
        else:
            for k in range(used):
                for i in range(pixels):
                    to = at + k * k_stride + i * pixel_stride
                    write(y, to, fused(read(sums, i * lanes + k), k0 + k, to, operands))

    return store
