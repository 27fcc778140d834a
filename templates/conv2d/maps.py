"""The tensor maps of convolutions: operands and output as TMA sees them."""

from __future__ import annotations

import math

from schedsearch.launch import TensorMap
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.layout import Layout
from schedsearch.ops.pixel_shuffle import PixelShuffle
from schedsearch.templates.conv2d.geometry import Im2col
from schedsearch.templates.parts.epilogue_fragments import ChannelOrder
from schedsearch.templates.parts.store import Output, ShuffledOutput, interleaved
from schedsearch.workload import Workload

ROW_BYTES = 128  # of a position in a patch, and of an output channel in a stage of weights
L2_PROMOTION_BYTES = 256  # for maps whose template has no knob for it


def image_map(workload: Workload[Conv2dParams], gemm: Im2col, bm: int, bk: int, l2_promotion_bytes: int) -> TensorMap:
    """x as im2col columns of bm pixels x bk channels; coordinates (c, w, h, slice) of a base pixel, offsets (w, h) of a tap.

    A slice is a block of channels of an image, see `geometry.Blocks`. A row of bk channels is as wide as the swizzle (32, 64
    or 128 bytes).
    """
    w, block = workload.params, gemm.x.size
    size = dtype_of(w.dtype).nbytes
    return TensorMap(
        "x",
        w.dtype,
        dims=(block, w.w, w.h, w.n * gemm.x.count),
        strides_bytes=(block * size, w.w * block * size, w.h * w.w * block * size),
        element_strides=(1, w.stride[1], w.stride[0], 1),
        lower=gemm.lower,
        upper=gemm.upper,
        channels_per_pixel=bk,
        pixels_per_column=bm,
        swizzle_bytes=bk * size,
        l2_promotion_bytes=l2_promotion_bytes,
    )


def filter_map(
    workload: Workload[Conv2dParams],
    bn: int,
    bk: int,
    l2_promotion_bytes: int,
    sets: int = 1,
    *,
    interleave: bool | None = None,
) -> TensorMap:
    """weight as (channels of a group, taps, output channels), in boxes of bk x 1 x bn.

    The rank is 3 and not 2 (channels * taps, output channels), so that the last box of a tap ends in zeros and not in the
    next tap's channels: zeros of x alone would not stop an infinite weight. With interleaved columns (`store.interleaved`)
    the output channels are three axes: every other of 16, the two halves, and the sixteens.

    Args:
        sets: of weights, one after the other, as if they were more output channels.
        interleave: whether columns are interleaved; default: as `store.interleaved` says.
    """
    w, channels, taps = workload.params, workload.params.c // workload.params.groups, workload.params.r * workload.params.s
    filters = sets * w.k
    size = dtype_of(w.weight_dtype).nbytes
    if interleaved(w.out_dtype) if interleave is None else interleave:
        filter_bytes = taps * channels * size
        return TensorMap(
            "weight",
            w.weight_dtype,
            dims=(channels, taps, 8, 2, filters // 16),
            strides_bytes=(channels * size, 2 * filter_bytes, filter_bytes, 16 * filter_bytes),
            element_strides=(1, 1, 1, 1, 1),
            box=(bk, 1, 8, 2, bn // 16),
            swizzle_bytes=bk * size,
            l2_promotion_bytes=l2_promotion_bytes,
        )
    return TensorMap(
        "weight",
        w.weight_dtype,
        dims=(channels, taps, filters),
        strides_bytes=(channels * size, taps * channels * size),
        element_strides=(1, 1, 1),
        box=(bk, 1, bn),
        swizzle_bytes=bk * size,
        l2_promotion_bytes=l2_promotion_bytes,
    )


def blocked_filter_map(workload: Workload[Conv2dParams], bn: int, bk: int, l2_promotion_bytes: int) -> TensorMap:
    """Weights in OIHW[x]o[x]i, in boxes of bk input and up to bn output channels of a tap.

    Without interleaved columns the axes are (input channels of a block, output channels of a block, blocks of input channels
    with their taps, blocks of output channels), and a box has bn output channels, of several blocks if bn is larger.

    With interleaved columns the output channels of a block are three axes, as in `filter_map`, and all blocks with their
    taps are one. A box then has output channels of one block.
    """
    w = workload.params
    block, size = Layout.parse(w.weight_layout).block("I"), dtype_of(w.weight_dtype).nbytes
    row, matrix = block * size, block * block * size
    inputs = w.c // w.groups // block * w.r * w.s  # blocks of input channels, with their taps
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    if interleaved(w.out_dtype):
        dims = (block, 8, 2, block // 16, w.k // block * inputs)
        strides, box = (2 * row, row, 16 * row, matrix), (bk, 8, 2, min(bn, block) // 16, 1)
    else:
        dims = (block, block, inputs, w.k // block)
        strides, box = (row, matrix, inputs * matrix), (bk, min(bn, block), 1, max(1, bn // block))
    return TensorMap(
        "weight",
        w.weight_dtype,
        dims=dims,
        strides_bytes=strides,
        element_strides=(1,) * len(dims),
        box=box,
        swizzle_bytes=bk * size,
        l2_promotion_bytes=l2_promotion_bytes,
    )


def ordered_filter_map(
    workload: Workload[Conv2dParams], order: ChannelOrder, bn: int, bk: int, l2_promotion_bytes: int
) -> TensorMap:
    """weight as (channels, taps, columns of a block, blocks), in boxes of bk x 1 x bn columns: the output channels in an
    order of their own. The columns of a box fill whole blocks, or lie within one."""
    w, taps = workload.params, workload.params.r * workload.params.s
    size = dtype_of(w.weight_dtype).nbytes
    filter_bytes = taps * w.c * size
    return TensorMap(
        "weight",
        w.weight_dtype,
        dims=(w.c, taps, order.block, w.k // order.block),
        strides_bytes=(w.c * size, order.step * filter_bytes, order.block_step * filter_bytes),
        element_strides=(1, 1, 1, 1),
        box=(bk, 1, min(bn, order.block), max(1, bn // order.block)),
        swizzle_bytes=bk * size,
        l2_promotion_bytes=l2_promotion_bytes,
    )


def output_map(workload: Workload[Conv2dParams], output: Output, segment: int, rows: int) -> TensorMap:
    """y as (output channels, pixels), or (channels of a block, pixels, slices), in boxes of `segment` x `rows`.

    A segment is as wide as the swizzle, or 8 elements. For slices, see `store.Output`. Through depth_to_space, boxes are
    those of `store.ShuffledOutput`.
    """
    p = workload.params
    size = dtype_of(p.out_dtype).nbytes
    if isinstance(output, ShuffledOutput):
        return shuffled_map(workload, output.shuffle, output.out_w, segment, output.box_pixels)
    row = (p.slice_of if output.plain else output.block) * size
    slices = math.prod(workload.output.shape) // (output.rows * output.block)
    several = not output.plain
    return TensorMap(
        "y",
        p.out_dtype,
        dims=(output.block, output.rows, *(slices,) * several),
        strides_bytes=(row, *(output.rows * row,) * several),
        element_strides=(1, 1, *(1,) * several),
        box=(segment, rows, *(1,) * several),
        swizzle_bytes=segment * size if segment * size > 16 else 0,
    )


def shuffled_map(
    workload: Workload[Conv2dParams], shuffle: PixelShuffle, out_w: int, segment: int, pixels: int
) -> TensorMap:
    """y as the four axes of `store.ShuffledOutput`, in boxes of `segment` channels of `pixels` pixels of a row.

    Args:
        out_w: pixels of a row before depth_to_space.
    """
    size = dtype_of(workload.params.out_dtype).nbytes
    run = shuffle.channels // shuffle.block
    line = out_w * run * size
    lines = math.prod(workload.output.shape) // (out_w * shuffle.channels)
    return TensorMap(
        "y",
        workload.params.out_dtype,
        dims=(run, out_w, shuffle.block, lines),
        strides_bytes=(run * size, line, shuffle.block * line),
        element_strides=(1, 1, 1, 1),
        box=(segment, pixels, 1, 1),
        swizzle_bytes=segment * size if segment * size > 16 else 0,
    )


def pixel_map(
    buffer: str,
    workload: Workload[Conv2dParams],
    channels: int,
    width: int,
    height: int,
    *,
    groups: int = 1,
    stride: tuple[int, int] = (1, 1),
) -> TensorMap:
    """x, y or the residual as (channels, w, h, n), in boxes of `channels` x `width` x `height` of one image, swizzled
    over their channels.

    With several groups the axes are (channels of a group, groups, w, h, n), so that a box ends in zeros and not in the next
    group's channels. A box has every `stride`-th pixel (vertical, horizontal).
    """
    spec = workload.output if buffer == "y" else next(spec for spec in workload.signature if spec.name == buffer)
    n, h, w, c = spec.shape
    size, group = dtype_of(spec.dtype).nbytes, c // groups
    of_image, of_row, of_pixel = (size * step for step in spec.strides("NHW"))
    several = groups > 1
    return TensorMap(
        buffer,
        spec.dtype,
        dims=(group, *(groups,) * several, w, h, n),
        strides_bytes=(*(group * size,) * several, of_pixel, of_row, of_image),
        element_strides=(1, *(1,) * several, stride[1], stride[0], 1),
        box=(channels, *(1,) * several, width * stride[1], height * stride[0], 1),
        swizzle_bytes=channels * size,
        l2_promotion_bytes=L2_PROMOTION_BYTES,
    )


def patch_map(workload: Workload[Conv2dParams], row_values: int, box_w: int, box_h: int) -> TensorMap:
    """x as (values of a row, h, n), in boxes of one patch or of a part of one of its rows; they are not swizzled.

    Args:
        row_values: from a row to the next one.
    """
    w = workload.params
    row_bytes = row_values * dtype_of(w.dtype).nbytes
    return TensorMap(
        "x",
        w.dtype,
        dims=(w.w * w.c, w.h, w.n),
        strides_bytes=(row_bytes, w.h * row_bytes),
        element_strides=(1, 1, 1),
        box=(box_w, box_h, 1),
        l2_promotion_bytes=256,
    )
