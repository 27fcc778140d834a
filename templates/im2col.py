"""NHWC convolution as an implicit GEMM through TMA's im2col mode: sizes, limits, and the two operands' tensor maps.

y[m, k] = sum over taps (r, s) and channels c of x[pixel(m, r, s), c] * weight[k, (r, s), c], with m the output pixel
(n, oh, ow) flattened. TMA walks the bounding box of base pixels, which its corners cut out of the image, with the
convolution's strides; a tap is an offset from the base pixel; what lies outside of the image reads as zero.

Source: CUDA driver API, "Tensor Map Object Management", cuTensorMapEncodeIm2col; PTX ISA, "Tensor im2col mode".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from schedsearch.launch import TensorMap
from schedsearch.ops import DTYPE_BYTES
from schedsearch.workload import Workload

CORNER_RANGE = (-128, 127)  # at rank 4
MAX_TAP_OFFSET = 255  # at rank 4
MAX_ELEMENT_STRIDE = 8
ALIGNMENT_BYTES = 16  # of addresses and strides
MAX_COORDINATE = 2**31 - 1


@dataclass(frozen=True)
class Im2col:
    """The GEMM that a workload is.

    Attributes:
        rows: M, output pixels of all images.
        columns: output channels.
        channels: input channels, the part of the GEMM's depth that one tap has.
        out_h, out_w: output pixels of an image.
        kernel_h, kernel_w: taps.
        stride, dilation: (vertical, horizontal).
        lower, upper: corners of the bounding box of base pixels, each (horizontal, vertical): relative to the image's
            first and last pixel.
    """

    rows: int
    columns: int
    channels: int
    out_h: int
    out_w: int
    kernel_h: int
    kernel_w: int
    stride: tuple[int, int]
    dilation: tuple[int, int]
    lower: tuple[int, int]
    upper: tuple[int, int]

    @classmethod
    def of(cls, workload: Workload) -> Im2col:
        w = workload
        _, out_h, out_w, _ = w.output.shape
        top, left, bottom, right = w.padding
        upper = (right - (w.s - 1) * w.dilation[1], bottom - (w.r - 1) * w.dilation[0])
        return cls(
            w.n * out_h * out_w, w.k, w.c, out_h, out_w, w.r, w.s, w.stride, w.dilation, (-left, -top), upper
        )  # fmt: skip

    @property
    def taps(self) -> int:
        return self.kernel_h * self.kernel_w

    def fits(self, rows_past_end: int) -> bool:
        """Whether tiles that end so far past the last row have 32-bit coordinates."""
        return self.rows + rows_past_end <= MAX_COORDINATE

    def problem(self, max_tile_rows: int) -> str | None:
        """Which limit of TMA the convolution breaks (one sentence: what, got, allowed), or None."""
        for axis, number, kernel in (("horizontal", 1, self.kernel_w), ("vertical", 0, self.kernel_h)):
            stride, reach = self.stride[number], (kernel - 1) * self.dilation[number]
            if stride > MAX_ELEMENT_STRIDE:
                return f"the {axis} stride is {stride}; allowed: 1 to {MAX_ELEMENT_STRIDE}, TMA's element strides"
            if reach > MAX_TAP_OFFSET:
                return f"the {axis} kernel reaches (size - 1) * dilation = {reach}; allowed: up to {MAX_TAP_OFFSET}"
            least, most = CORNER_RANGE
            for corner, meaning in (
                (self.lower[1 - number], "-(padding before)"),
                (self.upper[1 - number], "padding after - (size - 1) * dilation"),
            ):
                if not least <= corner <= most:
                    return f"the {axis} {meaning} is {corner}; allowed: {least} to {most}, TMA's im2col corners"
        if not self.fits(max_tile_rows):
            return f"the output has {self.rows} pixels; allowed: less than 2**31 - {max_tile_rows}, TMA's 32-bit coordinates"
        return None


def image_map(workload: Workload, bm: int, bk: int, l2_promotion_bytes: int) -> TensorMap:
    """x as im2col columns of bm pixels x bk channels; coordinates (c, w, h, n) of a base pixel, offsets (w, h) of a tap.

    A row of bk channels is as wide as the swizzle (32, 64 or 128 bytes).
    """
    w, gemm = workload, Im2col.of(workload)
    size = DTYPE_BYTES[w.dtype]
    return TensorMap(
        "x",
        w.dtype,
        dims=(w.c, w.w, w.h, w.n),
        strides_bytes=(w.c * size, w.w * w.c * size, w.h * w.w * w.c * size),
        element_strides=(1, w.stride[1], w.stride[0], 1),
        lower=gemm.lower,
        upper=gemm.upper,
        channels_per_pixel=bk,
        pixels_per_column=bm,
        swizzle_bytes=bk * size,
        l2_promotion_bytes=l2_promotion_bytes,
    )


def filter_map(workload: Workload, bn: int, bk: int, l2_promotion_bytes: int) -> TensorMap:
    """weight as (channels of a group, taps, output channels), in boxes of bk x 1 x bn.

    Rank 3 and not (channels * taps, output channels), so that the last box of a tap ends in zeros and not in the next
    tap's channels: zeros of x alone would not stop an infinite weight.
    """
    w, channels, taps = workload, workload.c // workload.groups, workload.r * workload.s
    size = DTYPE_BYTES[w.dtype]
    return TensorMap(
        "weight",
        w.dtype,
        dims=(channels, taps, w.k),
        strides_bytes=(channels * size, taps * channels * size),
        element_strides=(1, 1, 1),
        box=(bk, 1, bn),
        swizzle_bytes=bk * size,
        l2_promotion_bytes=l2_promotion_bytes,
    )


def output_map(workload: Workload, segment: int, rows: int) -> TensorMap:
    """y as (output channels, pixels), in boxes of `segment` x `rows`; a segment is as wide as the swizzle, or 8."""
    w = workload
    size = DTYPE_BYTES[w.out_dtype]
    return TensorMap(
        "y",
        w.out_dtype,
        dims=(w.k, math.prod(w.output.shape[:3])),
        strides_bytes=(w.k * size,),
        element_strides=(1, 1),
        box=(segment, rows),
        swizzle_bytes=segment * size if segment > 8 else 0,
    )
