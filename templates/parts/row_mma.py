"""Device operations of a convolution whose warps walk down the rows of an image, with all weights in registers.

One mma.sync has 16 pixels of a row, 16 input channels of a tap and 8 output channels. Fragments come directly from global
memory: a thread has pixels lane / 4 and lane / 4 + 8, and four neighbouring channels from 4 * (lane % 4) on, which are 8
bytes. mma numbers the channels that a thread has 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 (t = lane % 4). The order of a sum does
not matter, so x and weights may both be read in this order.

A row of x takes part in the sums of `taps_h` rows of y, whose sums are a window: slot j is the row of y that is complete
after j more rows of x.

Source: PTX ISA, "Warp Level Matrix Instructions" (fragments of m16n8k16).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schedsearch.backend.ops import device_op
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.parts.warp_tiles import mma_text

MMA_PIXELS, MMA_COLUMNS, MMA_CHANNELS = 16, 8, 16
ELEMENT_BYTES = 2
SLICE_BYTES = MMA_CHANNELS * ELEMENT_BYTES  # of a pixel's channels


@dataclass(frozen=True)
class RowTile:
    """The part of a convolution that a warp computes from one row of x.

    Attributes:
        dtype: float16 or bfloat16.
        taps_h, taps_w: of the kernel.
        slices: input channels, divided by 16.
        pixel_tiles: pixels of a row, divided by 16.
        column_tiles: output channels, divided by 8 and rounded up.
    """

    dtype: str
    taps_h: int
    taps_w: int
    slices: int
    pixel_tiles: int
    column_tiles: int

    @property
    def row_words(self) -> int:
        """Registers of a row of x: four for each fragment. Fragments are numbered (tap, slice, tile of pixels)."""
        return 4 * self.taps_w * self.slices * self.pixel_tiles

    @property
    def weight_words(self) -> int:
        """Registers of the weights: two for each fragment. Fragments are numbered (row, column, slice, tile of columns)."""
        return 2 * self.taps_h * self.taps_w * self.slices * self.column_tiles

    @property
    def slot_sums(self) -> int:
        """Sums of a row of y: four for each 16 pixels x 8 channels, numbered (tile of pixels, tile of columns)."""
        return 4 * self.pixel_tiles * self.column_tiles

    @property
    def sums(self) -> int:
        """Sums of the window."""
        return self.taps_h * self.slot_sums

    @property
    def halves(self) -> int:
        """Bits of the mask of a row: one for each (tap, tile of pixels, half of it)."""
        return 2 * self.taps_w * self.pixel_tiles


@functools.cache
def load_row(tile: RowTile) -> Callable[..., Any]:
    """`load(row[row_words], address, mask)`: the thread's fragments of a row of x, in flight until they are used.

    `address` (u64) is that of the thread's first channel of its first pixel at the first tap. A pixel whose bit of `mask`
    (u32, see `RowTile.halves`) is 0 is zero and is not read.
    """
    lines = [
        f"{{ .reg .pred p<{tile.halves}>; .reg .b64 at; .reg .b32 bits, bit; mov.b64 at, $address; mov.b32 bits, $mask;"
    ]
    lines += [f"mov.b32 $row[{i}], 0;" for i in range(tile.row_words)]
    for number in range(tile.halves):
        lines.append(f"and.b32 bit, bits, {1 << number}; setp.ne.u32 p{number}, bit, 0;")
    for number in range(tile.halves):
        tap, pixel_tile, half = number // (2 * tile.pixel_tiles), number // 2 % tile.pixel_tiles, number % 2
        pixel = tap + MMA_PIXELS * pixel_tile + 8 * half
        for part in range(tile.slices):
            first = 4 * ((tap * tile.slices + part) * tile.pixel_tiles + pixel_tile)
            offset = pixel * tile.slices * SLICE_BYTES + part * SLICE_BYTES
            to = f"{{$row[{first + half}], $row[{first + 2 + half}]}}"
            lines.append(f"@p{number} ld.global.nc.v2.b32 {to}, [at+{offset}];")
    return device_op(
        "load_row", "\n".join([*lines, "}"]), inout={"row": ("u32", tile.row_words)}, ins={"address": "u64", "mask": "u32"}
    )


@functools.cache
def load_weights(tile: RowTile) -> Callable[..., Any]:
    """`load(weights[weight_words], address, columns)`: the thread's fragments of all weights.

    `address` (u64) is that of the thread's first channel of the first tap of output channel lane / 4. The output channels
    lane / 4, lane / 4 + 8 ... are loaded as far as `columns` (i32) goes, which counts them from lane / 4 on; others are 0.
    """
    taps = tile.taps_h * tile.taps_w
    lines = [".reg .pred p; .reg .b64 at; .reg .b32 left; mov.b64 at, $address; mov.b32 left, $columns;"]
    lines += [f"mov.b32 $weights[{i}], 0;" for i in range(tile.weight_words)]
    for column_tile in range(tile.column_tiles):
        lines.append(f"setp.gt.s32 p, left, {MMA_COLUMNS * column_tile};")
        for number in range(taps * tile.slices):
            first = 2 * (number * tile.column_tiles + column_tile)
            offset = (MMA_COLUMNS * column_tile * taps * tile.slices + number) * SLICE_BYTES
            lines.append(f"@p ld.global.v2.b32 {{$weights[{first}], $weights[{first + 1}]}}, [at+{offset}];")
    return device_op(
        "load_weights",
        "{" + "\n".join([*lines, "}"]),
        inout={"weights": ("u32", tile.weight_words)},
        ins={"address": "u64", "columns": "i32"},
    )


@functools.cache
def multiply_row(tile: RowTile) -> Callable[..., Any]:
    """`multiply(sums[sums], row[row_words], weights[weight_words])`: moves the window down by one row, and adds a row of x.

    Slot j gets the sums of slot j + 1, the last one starts at zero. Moving costs nothing: the first multiplication of each
    slot reads one register and writes another.
    """
    lines = ["{ .reg .f32 zero; mov.f32 zero, 0f00000000;"]
    for slot in range(tile.taps_h):
        tap_h = tile.taps_h - 1 - slot
        for number in range(tile.taps_w * tile.slices):
            for i in range(tile.pixel_tiles):
                a = [f"$row[{4 * (number * tile.pixel_tiles + i) + q}]" for q in range(4)]
                for j in range(tile.column_tiles):
                    first = 4 * (i * tile.column_tiles + j)
                    b = 2 * ((tap_h * tile.taps_w * tile.slices + number) * tile.column_tiles + j)
                    to = [f"$sums[{slot * tile.slot_sums + first + q}]" for q in range(4)]
                    before = to
                    if number == 0:
                        after = [f"$sums[{(slot + 1) * tile.slot_sums + first + q}]" for q in range(4)]
                        before = ["zero"] * 4 if slot == tile.taps_h - 1 else after
                    lines.append(mma_text(tile.dtype, to, a, [f"$weights[{b}]", f"$weights[{b + 1}]"], before))
    return device_op(
        "multiply_row",
        "\n".join([*lines, "}"]),
        inout={"sums": ("f32", tile.sums), "row": ("u32", tile.row_words), "weights": ("u32", tile.weight_words)},
        convergent=True,
    )


prefetch = device_op(  # brings a line of 128 bytes to L2
    "prefetch",
    "{ .reg .pred p; setp.ne.s32 p, $valid, 0; @p prefetch.global.L2 [$address]; }",
    ins={"address": "u64", "valid": "i32"},
)


@functools.cache
def store_element(dtype: str) -> Callable[..., Any]:
    """`store(address, value)`: rounds a float32 to an output's format and writes it."""
    if dtype_of(dtype).nbytes == 4:
        text = "st.global.f32 [$address], $value;"
    else:
        kind = {"float16": "f16", "bfloat16": "bf16"}[dtype]
        text = f"{{ .reg .b16 h; cvt.rn.{kind}.f32 h, $value; st.global.b16 [$address], h; }}"
    return device_op("store_element", text, ins={"address": "u64", "value": "f32"})
