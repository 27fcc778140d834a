"""Stores of kernels whose wgmma rows are channels and whose columns are positions of pixels.

stmatrix transposes the fragments in shared memory, and TMA stores them from there. A kernel captures the functions here, and
they become part of it.

Source: PTX ISA, "stmatrix", "Asynchronous Warpgroup Level Matrix Instructions" (register fragments of D).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.casts import i32, u32
from schedsearch.templates.parts.hopper import SWIZZLE_ROWS, WGMMA_M
from schedsearch.templates.parts.store import interleaved


def position_bytes(out_dtype: str) -> int:
    """Bytes of staged y for each position: 64 channels. Chunks of 16 bytes are swizzled over them, by address."""
    return WGMMA_M * dtype_of(out_dtype).nbytes


def transposed_channels(out_dtype: str) -> tuple[int, int]:
    """How channels lie in wgmma's rows: from a lane's first channel to that of lane + 4, and to its second channel.

    Row r + 8 is channel r + 8. 8-bit outputs have `interleaved` rows: of every 16, rows r and r + 8 are channels 2 r and
    2 r + 1, so that a thread holds two neighbours, 16 bits, which `stmatrix` moves.
    """
    return (2, 1) if interleaved(out_dtype) else (1, 8)


def transposed_offset(out_dtype: str) -> Callable[[Any, Any], Any]:
    """`offset(lane, warp_channel)`: the lane's address for stmatrix, from the start of staged y: a row of a matrix.

    A matrix has 8 positions and 16 bytes of channels. Of 16-bit outputs, four matrices are 16 channels of 16 positions; of
    8-bit ones, 16 channels of 32 positions.
    """
    size = position_bytes(out_dtype)

    def offset_16_bits(lane: Any, warp_channel: Any) -> Any:
        warp_chunk = u32(warp_channel >> 3)
        matrix_row = u32(lane & 7)
        matrix_chunk = u32(warp_chunk + ((lane >> 3) & 1))
        return u32(
            (lane >> 4) * (SWIZZLE_ROWS * size) + matrix_row * size + ((matrix_chunk ^ matrix_row) << 4)
        )  # fmt: skip

    def offset_8_bits(lane: Any, warp_channel: Any) -> Any:
        return u32(lane * size + (((warp_channel >> 4) ^ ((lane >> 1) & 3)) << 4))

    return offset_8_bits if interleaved(out_dtype) else offset_16_bits


def segment_offset(segment: int, positions: int) -> Callable[[Any, Any], Any]:
    """As `transposed_offset` for 16 bits, if the 64 channels of `positions` positions are staged in parts.

    A part has all positions of `segment` channels (16, 32 or 64), whose chunks are swizzled over its rows.
    """
    size = segment * 2
    chunks = size // 16

    def offset(lane: Any, warp_channel: Any) -> Any:
        part = u32(u32(warp_channel) // u32(segment))
        matrix_row = u32(lane & 7)
        chunk = u32(((warp_channel >> 3) & (chunks - 1)) + ((lane >> 3) & 1))
        flip = u32((matrix_row * size >> 7) & (chunks - 1))
        first = u32(part * (positions * size) + (lane >> 4) * (SWIZZLE_ROWS * size))
        return u32(first + matrix_row * size + ((chunk ^ flip) << 4))

    return offset


def stage_transposed(
    out_dtype: str, octets: int, accumulator: str = "float32", segment: int = WGMMA_M
) -> Callable[..., None]:
    """`stage(values, address)`: packs `octets` times 8 positions to the place that `transposed_offset` gives, or
    `segment_offset` with `segment` channels of 16 bits."""
    if interleaved(out_dtype):
        return _stage_transposed_bytes(out_dtype, octets)
    pack, last = ptx.pack_pair(out_dtype, accumulator), 4 * octets - 4
    odd, octet_bytes = octets % 2 == 1, SWIZZLE_ROWS * segment * dtype_of(out_dtype).nbytes

    def stage(values: Any, address: Any) -> None:
        for pair in range(octets // 2):
            ptx.stmatrix_x4_trans(
                address + pair * (2 * octet_bytes),
                pack(values[8 * pair], values[8 * pair + 1]),
                pack(values[8 * pair + 2], values[8 * pair + 3]),
                pack(values[8 * pair + 4], values[8 * pair + 5]),
                pack(values[8 * pair + 6], values[8 * pair + 7]),
            )
        if odd:
            ptx.stmatrix_x2_trans(
                address + (octets - 1) * octet_bytes,
                pack(values[last], values[last + 1]),
                pack(values[last + 2], values[last + 3]),
            )

    return stage


def _stage_transposed_bytes(out_dtype: str, octets: int) -> Callable[..., None]:
    """The same for 8-bit outputs: an octet is one matrix of 8 positions and 8 pairs of channels."""
    pack, octet_bytes = ptx.pack_bytes(out_dtype), SWIZZLE_ROWS * position_bytes(out_dtype)
    fours, two, one = octets // 4, octets % 4 >= 2, octets % 2 == 1

    def matrix(values: Any, octet: Any) -> Any:
        at = 4 * octet
        return pack(values[at], values[at + 2], values[at + 1], values[at + 3])

    def stage(values: Any, address: Any) -> None:
        for four in range(fours):
            octet = 4 * four
            ptx.stmatrix_x4_trans(
                address + octet * octet_bytes,
                matrix(values, octet),
                matrix(values, octet + 1),
                matrix(values, octet + 2),
                matrix(values, octet + 3),
            )
        if two:
            ptx.stmatrix_x2_trans(
                address + 4 * fours * octet_bytes, matrix(values, 4 * fours), matrix(values, 4 * fours + 1)
            )
        if one:
            ptx.stmatrix_x1_trans(address + (octets - 1) * octet_bytes, matrix(values, octets - 1))

    return stage


def send_rows(grouped: bool, row_bytes: int) -> Callable[..., None]:
    """`send(y, staged, rows, channel, conv_group, column, row, image)`: stores rows of pixels that are `row_bytes` apart."""

    def send(y: Any, staged: Any, rows: Any, channel: Any, conv_group: Any, column: Any, row: Any, image: Any) -> None:
        for tile_row in range(rows):
            ptx.tma_store_4d(y, u32(staged + tile_row * row_bytes), channel, column, row + tile_row, image)

    def send_of_group(
        y: Any, staged: Any, rows: Any, channel: Any, conv_group: Any, column: Any, row: Any, image: Any
    ) -> None:
        for tile_row in range(rows):
            at = u32(staged + tile_row * row_bytes)
            ptx.tma_store_5d(y, at, channel, conv_group, column, row + tile_row, image)

    return send_of_group if grouped else send


def send_segments(
    segment: int, positions: int, row_positions: int, out_h: int, channels: int, run: int
) -> Callable[..., None]:
    """The same as `send_rows` through depth_to_space: `y` has the four axes of `ShuffledOutput`.

    Args:
        segment, positions: as in `segment_offset`.
        row_positions: positions of a row of pixels.
        out_h: rows of an image before depth_to_space.
        channels: before depth_to_space.
        run: those that are neighbours in y; a multiple of `segment`.
    """
    part_bytes, row_bytes, parts = positions * segment * 2, row_positions * segment * 2, WGMMA_M // segment

    def send(y: Any, staged: Any, rows: Any, channel: Any, conv_group: Any, column: Any, row: Any, image: Any) -> None:
        for part in range(parts):
            first = i32(channel + part * segment)
            if first < channels:
                of_block = i32(u32(first) // u32(run))
                within = i32(first - of_block * run)
                for tile_row in range(rows):
                    at = u32(staged + part * part_bytes + tile_row * row_bytes)
                    ptx.tma_store_4d(y, at, within, column, of_block, i32(image * out_h + row + tile_row))

    return send
