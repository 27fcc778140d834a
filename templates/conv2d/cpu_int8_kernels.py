"""Kernels of conv2d_cpu_int8: pack x, pack the weights, convolve; and their sizes.

x becomes unsigned and the weights become signed, because the instruction multiplies such bytes:

    u = x + x_shift (128 if x is int8, else 0)        v = w - w_shift (128 if the weights are uint8, else 0)

With a = x_zero_point + x_shift and b = weight_zero_point - w_shift, (x - x_zero_point) (w - weight_zero_point) is
(u - a) (v - b). Padding is written out as u = a, so that it adds nothing, and the sum over the N products of an output is

    sum (u - a) (v - b) = sum u v - b sum u - a (sum v - b N)

The packed weights contain sum v. The kernel computes sum u in one more column of its register tile, if b may be other than
zero. All of this is arithmetic modulo 2^32, so the result is exact if the sum itself fits in 32 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import types

from schedsearch.backend.cpu_dot import QUAD, byte_tile_ops, dot_instruction, dot_tile_ops
from schedsearch.backend.cpu_ops import as_array
from schedsearch.config import Config
from schedsearch.ops import ArgSpec
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.ops.sum_of_products import accumulator_dtype
from schedsearch.templates.conv2d.cpu_kernels import Shape, TilePlan
from schedsearch.templates.parts.addressing import channel_runs, offset_along, plain_strides
from schedsearch.templates.parts.casts import i8, i32, i64, u8, u64
from schedsearch.templates.parts.cpu_epilogue import CpuEpilogue
from schedsearch.workload import Workload

_U8, _I32 = u8, i32
_SUM_BYTES = 4


@dataclass(frozen=True)
class BytePlan(TilePlan):
    """Sizes that follow from workload and configuration; in bytes, which are elements of x and of the weights.

    x_packed is (n, groups, x_blocks, padded_h, padded_w, x_block). w_packed has for each set, group and tile of output
    channels the int32 sums of their weights, then (channel blocks, r, s, quads of the block, tile_channels, 4). Only the
    last channel block may be narrower. A depthwise convolution has (r, s, tile_channels) instead.

    Attributes:
        x_shift, w_shift: see above.
        x_sums: whether the kernel sums u.
        image_step: elements of x from one image to the next, if not those of its layout.
    """

    shape: Shape
    x: ArgSpec
    weight: ArgSpec
    y: ArgSpec
    x_shift: int
    w_shift: int
    x_sums: bool
    ow_tile: int
    oc_vectors: int
    block: int
    x_block: int
    unroll: int
    oh_tile: int
    direct: bool
    channels_inner: bool
    own_weights: bool = False
    image_step: int | None = None

    @classmethod
    def of(cls, workload: Workload[Conv2dParams], config: Config) -> BytePlan:
        shape = Shape.of(workload)
        tile_channels = config["oc_vectors"] * config["block"]
        x = workload.signature[0]
        x_block = tile_channels if shape.depthwise else config["x_block"]
        if config["x_layout"] == "direct" and not shape.depthwise:
            x_block = channel_runs("C", x)[0] or shape.reduced
        return cls(
            shape=shape, x=x, weight=workload.signature[1], y=workload.output,
            x_shift=128 if workload.params.dtype == "int8" else 0,
            w_shift=128 if workload.params.weight_dtype == "uint8" else 0,
            x_sums=needs_x_sums(workload), ow_tile=config["ow_tile"], oc_vectors=config["oc_vectors"],
            block=config["block"], x_block=x_block, unroll=config["unroll"], oh_tile=config["oh_tile"],
            direct=config["x_layout"] == "direct", channels_inner=config["order"] == "channels",
        )  # fmt: skip

    @property
    def channels(self) -> int:
        """Input channels of a group."""
        return self.shape.outputs if self.shape.depthwise else self.shape.reduced

    @property
    def x_blocks(self) -> int:
        return math.ceil(self.channels / self.x_block)

    @property
    def quads(self) -> int:
        """Groups of four channels that an output sums at each tap."""
        return math.ceil(self.shape.reduced / QUAD)

    @property
    def x_rows(self) -> int:
        return self.shape.n * self.shape.groups * self.x_blocks * self.shape.padded_h

    @property
    def x_size(self) -> int:
        return self.x_rows * self.shape.padded_w * self.x_block

    @property
    def tap_bytes(self) -> int:
        """Packed weights of a tile for one tap and, unless the convolution is depthwise, one quad."""
        return self.tile_channels * (1 if self.shape.depthwise else QUAD)

    @property
    def weight_tile(self) -> int:
        quads = 1 if self.shape.depthwise else self.quads
        return _SUM_BYTES * self.tile_channels + quads * self.shape.r * self.shape.s * self.tap_bytes

    @property
    def weight_items(self) -> int:
        """Number of work items: one per set, group and tile."""
        return self.weight_tiles

    @property
    def weight_size(self) -> int:
        return self.weight_items * self.weight_tile

    @property
    def input_strides(self) -> tuple[int, int, int, int, int]:
        """Strides of the convolution's input along (n, group, channel block, h, w)."""
        if self.direct:
            n, h, w = plain_strides(self.x, f"N{self.shape.axes}")
            offset = offset_along("C", self.x)
            return n, offset(self.channels), offset(self.x_block), h, w
        w = self.x_block
        h = w * self.shape.padded_w
        block = h * self.shape.padded_h
        group = block * self.x_blocks
        return group * self.shape.groups, group, block, h, w


def needs_x_sums(workload: Workload[Conv2dParams]) -> bool:
    """Whether the weights have an offset, so that the sums of x count."""
    depthwise = Shape.of(workload).depthwise  # its weights are shifted before they are multiplied
    return not depthwise and (workload.params.weight_dtype == "uint8" or "weight" in workload.params.zero_points)


def zero_point(epilogue: CpuEpilogue, name: str, shift: int) -> Callable[[Any], Any]:
    """`zero(operands)` for kernels: the zero point of x or weight, plus `shift`, as int64."""
    slot = epilogue.index(f"{name}_zero_point")
    if slot is None:
        return lambda operands: shift

    def zero(operands: Any) -> Any:
        return i64(operands[slot]) + shift

    return zero


def pack_x_kernel(plan: BytePlan, epilogue: CpuEpilogue) -> Callable[..., None]:
    """A work item is one row of one channel block."""
    shape = plan.shape
    n_stride, h_stride, w_stride = plain_strides(plan.x, f"N{shape.axes}")
    n_stride = n_stride if plan.image_step is None else plan.image_step
    channel_offset, (run, c_stride) = offset_along("C", plan.x), channel_runs("C", plan.x)
    channels, groups, blocks, block = plan.channels, shape.groups, plan.x_blocks, plan.x_block
    run = math.gcd(run, block) or block
    rows, columns, top, left, height = shape.padded_h, shape.padded_w, shape.top, shape.left, shape.h
    first, last = min(left, columns), min(left + shape.w, columns)  # columns inside of the image
    x_size, packed_size = plan.x.size, plan.x_size
    flip = plan.x_shift  # x + 128 modulo 256 is x ^ 128
    zero = zero_point(epilogue, "x", plan.x_shift)

    whole_rows = first == 0 and last == columns

    def pack_x(x, packed, *operands, start, stop):  # type: ignore[no-untyped-def]
        source = as_array(x, (x_size,), _U8)
        target = as_array(packed, (packed_size,), _U8)
        padding = _U8(zero(operands))
        for item in range(start, stop):
            row = item % rows - top
            c0 = item // rows % blocks * block
            group = item // (rows * blocks) % groups
            n = item // (rows * blocks * groups)
            width = min(block, channels - c0)
            to = item * columns * block
            inside = row >= 0 and row < height
            if not (inside and whole_rows and width == block):
                # Padding: the zero point, and zeros in channels that do not exist.
                for column in range(columns):
                    for c in range(block):
                        target[to + column * block + c] = padding if c < width else _U8(0)
            if not inside:
                continue
            at = n * n_stride + row * h_stride - left * w_stride
            for c in range(0, width, run):
                from_c = at + channel_offset(group * channels + c0 + c)
                used = min(run, width - c)
                if c_stride == 1:
                    for column in range(first, last):
                        for j in range(used):
                            target[to + column * block + c + j] = source[from_c + column * w_stride + j] ^ _U8(flip)
                else:
                    for j in range(used):
                        for column in range(first, last):
                            value = source[from_c + column * w_stride + j * c_stride]
                            target[to + column * block + c + j] = value ^ _U8(flip)

    return pack_x


def pack_weight_kernel(plan: BytePlan) -> Callable[..., None]:
    """A work item is one tile of output channels: the sums of their weights, then the weights."""
    shape = plan.shape
    r_stride, s_stride = plain_strides(plan.weight, shape.axes)
    filter_offset, channel_offset = offset_along("O", plan.weight), offset_along("I", plan.weight)
    kr, ks, outputs, reduced, tiles = shape.r, shape.s, shape.outputs, shape.reduced, plan.tiles
    block, lanes, tile_size = (1 if shape.depthwise else plan.x_block), plan.tile_channels, plan.weight_tile
    blocks = math.ceil(reduced / block)
    depth = 1 if shape.depthwise else QUAD  # neighbouring channels of one output
    set_size, set_groups, packed_size = plan.weight.size, shape.groups, plan.weight_size
    weight_size = plan.weight_tiles // (tiles * set_groups) * set_size
    whole_words = reduced % depth == 0
    flip = np.int8(-plan.w_shift)  # w - 128 modulo 256 is w ^ 128
    sum_bytes = _SUM_BYTES

    def pack_weight(weight, packed, start, stop):  # type: ignore[no-untyped-def]
        source = as_array(weight, (weight_size,), i8)
        target = as_array(packed, (packed_size,), i8)
        for item in range(start, stop):
            k0 = item % tiles * lanes
            used = min(lanes, outputs - k0)
            sums = as_array(packed + u64(item * tile_size), (lanes,), _I32)
            for k in range(lanes):
                total = _I32(0)
                from_k = filter_offset(item // tiles % set_groups * outputs + k0 + min(k, used - 1))
                from_k += item // (tiles * set_groups) * set_size
                to = item * tile_size + sum_bytes * lanes + k * depth
                for c_block in range(blocks):
                    last = min(c_block * block + block, reduced)
                    for r in range(kr):
                        for s in range(ks):
                            at = from_k + r * r_stride + s * s_stride
                            for c0 in range(c_block * block, last, depth):
                                for c in range(depth):
                                    value = i8(0)
                                    if k < used and (whole_words or c0 + c < last):
                                        value = i8(source[at + channel_offset(c0 + c)] ^ flip)
                                    total = _I32(total + value)
                                    target[to + c] = value
                                to += depth * lanes
                sums[k] = total

    return pack_weight


def convolve_kernel(plan: BytePlan, epilogue: CpuEpilogue, workload: Workload[Conv2dParams]) -> Callable[..., None]:
    """A work item is `oh_tile` output rows of one tile of output channels."""
    shape = plan.shape
    n_stride, group_stride, block_stride, h_stride, w_stride = plan.input_strides
    tile_stride = block_stride if shape.depthwise else 0  # every tile of a depthwise convolution has its own input
    groups, outputs, tiles, row_tiles = shape.groups, shape.outputs, plan.tiles, plan.row_tiles
    kr, ks, oh, ow = shape.r, shape.s, shape.oh, shape.ow
    stride_h, dilation_h, stride_w, dilation_w = shape.stride[0], shape.dilation[0], shape.stride[1], shape.dilation[1]
    oh_tile, ow_tile, lanes, unroll, tap_bytes = plan.oh_tile, plan.ow_tile, plan.tile_channels, plan.unroll, plan.tap_bytes
    ow_tiles = math.ceil(ow / ow_tile)
    quads, block_quads = (1, 1) if shape.depthwise else (plan.quads, math.ceil(plan.x_block / QUAD))
    blocks = math.ceil(quads / block_quads)
    whole_blocks = quads % block_quads == 0  # the width of a block is then a constant, and there is no code for a remainder
    weight_tile, sums_bytes = plan.weight_tile, _SUM_BYTES * lanes
    channels_inner, image_tiles = plan.channels_inner, plan.image_weight_tiles
    width, x_sums = lanes + plan.block * plan.x_sums, plan.x_sums
    products = shape.reduced * kr * ks
    zero, multiply_add, multiply_add_one, spill = _operations(plan)
    x_zero, w_zero = zero_point(epilogue, "x", plan.x_shift), zero_point(epilogue, "weight", -plan.w_shift)
    store = _store_kernel(plan, epilogue, workload)

    def convolve(x, w, y, *operands, start, stop):  # type: ignore[no-untyped-def]
        x, w = i64(x), i64(w)
        a, b = x_zero(operands), w_zero(operands)
        for item in range(start, stop):
            if channels_inner:
                tile, row_tile = item % tiles, item // tiles % row_tiles
            else:
                tile, row_tile = item // row_tiles % tiles, item % row_tiles
            group = item // (tiles * row_tiles) % groups
            n = item // (tiles * row_tiles * groups)
            x_item = x + n * n_stride + group * group_stride + tile * tile_stride
            w_item = w + (n * image_tiles + group * tiles + tile) * weight_tile
            w_sums = as_array(w_item, (lanes,), _I32)
            k0 = tile * lanes
            for p in range(row_tile * oh_tile, min(row_tile * oh_tile + oh_tile, oh)):
                for q_tile in range(ow_tiles):
                    q = min(q_tile * ow_tile, ow - ow_tile)  # the last tile overlaps its neighbour
                    x_pixel = x_item + p * stride_h * h_stride + q * stride_w * w_stride
                    w_at = w_item + sums_bytes
                    total = zero()
                    for c_block in range(blocks):
                        steps = block_quads if whole_blocks else min(block_quads, quads - c_block * block_quads)
                        for r in range(kr):
                            for s in range(ks):
                                x_at = (
                                    x_pixel + c_block * block_stride + r * dilation_h * h_stride + s * dilation_w * w_stride
                                )
                                for _ in range(steps // unroll):
                                    total = multiply_add(total, x_at, w_at, b)
                                    x_at += unroll * 4
                                    w_at += unroll * tap_bytes
                                for _ in range(steps % unroll):
                                    total = multiply_add_one(total, x_at, w_at, b)
                                    x_at += 4
                                    w_at += tap_bytes
                    sums = as_array(spill(total), (ow_tile, width), _I32)
                    for i in range(ow_tile):
                        from_x = b * sums[i, lanes] if x_sums else 0
                        for k in range(lanes):
                            sums[i, k] = _I32(sums[i, k] - from_x - a * (w_sums[k] - b * products))
                    store(sums, y, n, group * outputs, k0, p, q, operands)

    return convolve


def _operations(plan: BytePlan) -> tuple[Any, ...]:
    """zero, multiply_add and multiply_add_one (with the zero point of the weights as a fourth argument), spill."""
    row_bytes, flip = plan.shape.stride[1] * plan.input_strides[-1], plan.direct and plan.x_shift != 0
    if plan.shape.depthwise:
        ops = byte_tile_ops(plan.ow_tile, plan.oc_vectors, plan.block, x_row_bytes=row_bytes, flip_x=flip)
        return ops.zero, ops.multiply_add, ops.multiply_add_one, ops.spill
    ops = dot_tile_ops(
        plan.ow_tile, plan.oc_vectors, plan.block, plan.unroll,
        x_row_bytes=row_bytes, flip_x=flip, x_sums=plan.x_sums, instruction=dot_instruction(),
    )  # fmt: skip
    many, one = ops.multiply_add, ops.multiply_add_one

    def multiply_add(total, x, w, w_zero):  # type: ignore[no-untyped-def]
        return many(total, x, w)

    def multiply_add_one(total, x, w, w_zero):  # type: ignore[no-untyped-def]
        return one(total, x, w)

    return ops.zero, multiply_add, multiply_add_one, ops.spill


def _store_kernel(plan: BytePlan, epilogue: CpuEpilogue, workload: Workload[Conv2dParams]) -> Callable[..., None]:
    """`store(sums, y, n, first channel of the group, of the tile, p, q, operands)`: the epilogue, and the elements of y."""
    yn_stride, yh_stride, yw_stride = plain_strides(plan.y, f"N{plan.shape.axes}")
    channel_offset, (run, yk_stride) = offset_along("C", plan.y), channel_runs("C", plan.y)
    run = math.gcd(run, plan.tile_channels) or plan.tile_channels
    whole = plan.shape.outputs % plan.tile_channels == 0
    outputs, ow_tile, lanes, y_size = plan.shape.outputs, plan.ow_tile, plan.tile_channels, plan.y.size
    w = workload.params
    number = getattr(types, accumulator_dtype(w.dtype, w.weight_dtype, w.zero_points))
    element, fused = _parts(epilogue)

    def store(sums, y, n, first, k0, p, q, operands):  # type: ignore[no-untyped-def]
        out = as_array(y, (y_size,), element)
        used = lanes if whole else min(lanes, outputs - k0)
        for start in range(0, used, run):
            k = first + k0 + start
            at = n * yn_stride + channel_offset(k) + p * yh_stride + q * yw_stride
            count = run if whole else min(run, used - start)
            if yk_stride == 1:
                for i in range(ow_tile):
                    for j in range(count):
                        to = at + i * yw_stride + j
                        out[to] = fused(number(sums[i, start + j]), k + j, to, operands)
            else:
                for j in range(count):
                    for i in range(ow_tile):
                        to = at + j * yk_stride + i * yw_stride
                        out[to] = fused(number(sums[i, start + j]), k + j, to, operands)

    return store


def _parts(epilogue: CpuEpilogue) -> tuple[Any, Callable[..., Any]]:
    return epilogue.element, epilogue.apply
