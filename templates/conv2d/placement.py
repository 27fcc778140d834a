"""Where the kernels that store element by element put an output channel of an output pixel: layouts and depth_to_space."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from schedsearch.ops.conv2d import CONV2D, Conv2dParams
from schedsearch.ops.epilogues import pixel_shuffle
from schedsearch.templates.parts.addressing import strides_of
from schedsearch.templates.parts.casts import i64, u32
from schedsearch.workload import Workload


def neighbours(workload: Workload[Conv2dParams], channels: int) -> int:
    """How many of `channels` output channels of a pixel, from the first one on, are neighbours in y. Runs of this length
    follow each other up to the last channel, if it divides `channels`. If y is a slice, the runs of all pixels begin at
    multiples of the number from y's first element."""
    p = workload.params
    along = strides_of(workload, "y")["C"]
    shuffle = pixel_shuffle(p.epilogue, p.k)
    if shuffle is None:
        run = along.run(channels)
        return math.gcd(run, p.slice_of) if workload.output.slice_of and along.block == 1 else run
    return min(along.run(shuffle.out_channels), channels) if shuffle.mode == "DCR" else 1


def shuffled_offset(workload: Workload[Conv2dParams]) -> Callable[[Any, Any, Any], Any] | None:
    """`offset(n, pixel, k)`: elements of y up to channel k of a pixel of image n before depth_to_space; None without it."""
    shuffle = pixel_shuffle(workload.params.epilogue, workload.params.k)
    if shuffle is None:
        return None
    crd, block = shuffle.mode == "CRD", u32(shuffle.block)
    out_w, pixels = u32(CONV2D.output_hw(workload.params)[1]), u32(shuffle.pixels)
    channels, strides = u32(shuffle.out_channels), strides_of(workload, "y")
    of_image, of_channel, of_row, of_column = (strides[axis].outer for axis in "NCHW")

    def offset(n: Any, pixel: Any, k: Any) -> Any:
        row = u32(u32(pixel) // out_w)
        column = u32(u32(pixel) - row * out_w)
        divisor = pixels if crd else channels
        number = u32(u32(k) // divisor)
        rest = u32(u32(k) - number * divisor)
        channel, of_block = (number, rest) if crd else (rest, number)
        down = u32(of_block // block)
        right = u32(of_block - down * block)
        in_image = i64(row * block + down) * of_row + i64(column * block + right) * of_column
        return i64(n) * of_image + i64(channel) * of_channel + in_image

    return offset
