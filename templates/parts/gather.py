"""The coordinates of a producer's loads: those of a tile in x, and their change from one k step to the next.

A kernel captures the functions here, and they become part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.casts import i32, u32


class Im2colSteps(NamedTuple):
    """How TMA's im2col mode walks the k steps of an implicit GEMM.

    Attributes:
        pixel: `pixel(row)` returns (image, h, w): the base pixel of a row of the GEMM.
        first: `first(step)` returns (tap, channel, tap_h, tap_w) of a k step.
        next: `next(tap, channel, tap_h, tap_w)` returns the same for the following step: the tap's next channels, then the
            next tap.
    """

    pixel: Callable[..., Any]
    first: Callable[..., Any]
    next: Callable[..., Any]


def im2col(
    out_w: int,
    out_pixels: int,
    stride: tuple[int, int],
    corner: tuple[int, int],
    channels: int,
    bk: int,
    kernel_w: int,
    padded_pixels: int = 0,
) -> Im2colSteps:
    """The k steps of `bk` channels of one tap each.

    Args:
        out_w, out_pixels: output pixels of a row, and of an image.
        stride: (vertical, horizontal).
        corner: (vertical, horizontal) padding before the first pixel.
        channels: channels of the input.
        bk: channels of a k step.
        kernel_w: taps of a row of the kernel.
        padded_pixels: rows of the GEMM for each image, if those are more than its output pixels. Rows past the last pixel
            get the coordinates of the first.
    """
    (stride_h, stride_w), (top, left) = stride, corner
    channel_steps = -(-channels // bk)

    def pixel(row: Any) -> Any:
        image = i32(u32(row) // u32(out_pixels))
        number = u32(row - image * out_pixels)
        out_row = u32(number // u32(out_w))
        h = i32(out_row * stride_h) - top
        w = i32((number - out_row * out_w) * stride_w) - left
        return image, h, w

    def padded_pixel(row: Any) -> Any:
        image = i32(u32(row) // u32(padded_pixels))
        number = i32(row - image * padded_pixels)
        _, h, w = pixel(number if number < out_pixels else i32(0))
        return image, h, w

    def first(step: Any) -> Any:
        tap = i32(u32(step) // u32(channel_steps))
        channel = i32((step - tap * channel_steps) * bk)
        tap_h = i32(u32(tap) // u32(kernel_w))
        tap_w = i32(tap - tap_h * kernel_w)
        return tap, channel, tap_h, tap_w

    def following(tap: Any, channel: Any, tap_h: Any, tap_w: Any) -> Any:
        channel = i32(channel + bk)
        if channel >= channels:
            channel = i32(0)
            tap = i32(tap + 1)
            tap_w = i32(tap_w + 1)
            if tap_w == kernel_w:
                tap_w = i32(0)
                tap_h = i32(tap_h + 1)
        return tap, channel, tap_h, tap_w

    return Im2colSteps(padded_pixel if padded_pixels else pixel, first, following)


def pixels(grouped: bool) -> Callable[..., None]:
    """`load(to, tensor, channel, conv_group, column, row, image, barrier)`: a box of pixels, of `conv2d.maps.pixel_map`."""

    def load(to: Any, tensor: Any, channel: Any, conv_group: Any, column: Any, row: Any, image: Any, barrier: Any) -> None:
        ptx.tma_load_4d(to, tensor, channel, column, row, image, barrier)

    def load_of_group(
        to: Any, tensor: Any, channel: Any, conv_group: Any, column: Any, row: Any, image: Any, barrier: Any
    ) -> None:
        ptx.tma_load_5d(to, tensor, channel, conv_group, column, row, image, barrier)

    return load_of_group if grouped else load


def patch(
    stride: tuple[int, int], dilation: tuple[int, int], phases: int, phases_w: int, phase_bytes: int, grouped: bool
) -> Callable[..., None]:
    """`load(x, to, channel, conv_group, column, row, image, barrier)`: a patch, one box for each of its phases.

    With a stride, phase (a, b) has every stride_h-th row from a on, and of these every stride_w-th pixel from b on.

    Args:
        stride, dilation: (vertical, horizontal).
        phases, phases_w: number of phases that the kernel reads, and of phases in a row.
        phase_bytes: distance from a phase to the next in shared memory.
        grouped: whether the convolution has several groups.
    """
    (stride_h, stride_w), (dilation_h, dilation_w) = stride, dilation
    load_pixels = pixels(grouped)

    def load(x: Any, to: Any, channel: Any, conv_group: Any, column: Any, row: Any, image: Any, barrier: Any) -> None:
        for phase in range(phases):
            phase_h = u32(u32(phase) // u32(phases_w))
            phase_w = u32(phase - phase_h * phases_w)
            from_row = i32(row + u32(phase_h * dilation_h) % u32(stride_h))
            from_column = i32(column + u32(phase_w * dilation_w) % u32(stride_w))
            load_pixels(to, x, channel, conv_group, from_column, from_row, image, barrier)
            to = u32(to + phase_bytes)

    return load
