"""Stores of a warpgroup's part of a tile: through shared memory and TMA, or straight from registers.

A warpgroup holds 64 rows of wgmma's result. In each 8 columns (an octet) a thread holds two neighbours of one row, and two
of the row 8 below. A kernel captures the functions here, and they become part of it.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" (register fragments of D), "stmatrix".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from numba import cuda, types

from schedsearch.backend.ops import shared_base
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.pixel_shuffle import PixelShuffle
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.hopper import SWIZZLE_ROWS, WARPGROUP, WGMMA_M


class Store(NamedTuple):
    """How a warpgroup stores its part of a tile.

    Attributes:
        begin: `begin(group, lane, warp_row, leader)` returns a thread's place in the store, from what `thread_of_warpgroup`
            returned; called once, before the first tile.
        store: `store(values, y, place, row, column, inside_columns)` stores 64 rows x 8 * octets columns of y from
            (row, column) on. `inside_columns`, the same in the whole warp, lie inside of y.
    """

    begin: Callable[..., Any]
    store: Callable[..., None]


def thread_of_warpgroup() -> Any:
    """(thread, its warpgroup, its lane, the first of its warp's 16 rows, whether it is the warpgroup's first thread)."""
    thread = types.int32(cuda.threadIdx.x)
    group = thread >> 7
    lane = thread & 31
    warp_row = types.int32(((thread >> 5) & 3) * 16)
    return thread, group, lane, warp_row, (thread & 127) == 0


def interleaved(out_dtype: str) -> bool:
    """Whether columns of wgmma's B are interleaved, so that a thread holds neighbours that fill 32 bits of y.

    In every 16 columns, column 8 o + j of the tile (o < 2, j < 8) is then channel 2 j + o: a thread's two columns of both
    octets are four neighbours. 8-bit outputs need it, because stmatrix moves 16 bits.
    """
    return dtype_of(out_dtype).nbytes == 1


def fragment(columns: int, neighbours: int = 2) -> Callable[..., Any]:
    """`first_pair(lane, warp_row, row, column)`: the thread's first columns in a part that starts at (row, column).

    Returns (row, column, element offset in y), which has rows of `columns` elements. A thread has 4 `neighbours` if columns
    are interleaved, else 2.
    """

    def first_pair(lane: Any, warp_row: Any, row: Any, column: Any) -> Any:
        first_row = types.int32(row + warp_row + (lane >> 2))
        first_column = types.int32(column + (lane & 3) * neighbours)
        return first_row, first_column, types.int64(first_row) * columns + first_column

    return first_pair


@dataclass(frozen=True)
class Output:
    """How y lies in memory: slices of `rows` x `block` elements, one for each block of columns, and perhaps for each image.

    The rows of a kernel's tiles are numbered through all images, `padded_rows` for each, so that no tile straddles two.

    Attributes:
        columns: of y.
        images, rows, padded_rows: images that have slices of their own, or 1; rows of a slice, and those of the tiles.
        block: columns of a slice. Those of a part that a warpgroup stores fill whole slices, or lie within one.
        image_step, block_step: slices from one image to the next, and from one block to the next.
    """

    columns: int
    images: int
    rows: int
    padded_rows: int
    block: int
    image_step: int
    block_step: int

    @property
    def plain(self) -> bool:
        """Whether y is one slice."""
        return self.images == 1 and self.block == self.columns

    @property
    def block_elements(self) -> int:
        """Elements of y from a block to the next."""
        return self.block_step * self.rows * self.block

    def with_pitch(self, pitch: int) -> Output:
        """The same rows `pitch` elements apart, of an output that is one slice."""
        return replace(self, columns=pitch, block=pitch)

    def locate(self) -> Callable[[Any], Any]:
        """`locate(row)`: the image of a row, and the row in its slice; no row inside of y for rows past the last image."""
        images, rows, padded_rows = self.images, self.rows, self.padded_rows

        def locate(row: Any) -> Any:
            image = types.int32(types.uint32(row) // types.uint32(padded_rows))
            within = types.int32(row - image * padded_rows)
            return image, within if image < images else types.int32(rows)

        def only_image(row: Any) -> Any:
            return types.int32(0), row

        return locate if images > 1 else only_image

    def fragment(self, neighbours: int = 2) -> Callable[..., Any]:
        """As the function `fragment`; the row that it returns is that in a slice."""
        locate, rows, block, block_elements = self.locate(), self.rows, self.block, self.block_elements
        image_elements = self.image_step * rows * block

        def first_pair(lane: Any, warp_row: Any, row: Any, column: Any) -> Any:
            image, within = locate(row)
            number = types.int32(types.uint32(column) // types.uint32(block))
            first_row = types.int32(within + warp_row + (lane >> 2))
            first_column = types.int32(column + (lane & 3) * neighbours)
            slices = types.int64(image) * image_elements + types.int64(number) * block_elements
            return first_row, first_column, slices + types.int64(first_row) * block + (first_column - number * block)

        return fragment(self.columns, neighbours) if self.plain else first_pair

    def send(self, row_bytes: int) -> Callable[..., None]:
        """`send(y, staged, column, row)`: stores 64 rows of `row_bytes` at `staged`, whose columns lie in one slice."""
        locate, block, image_step, block_step = self.locate(), self.block, self.image_step, self.block_step

        def send(y: Any, staged: Any, column: Any, row: Any) -> None:
            image, within = locate(row)
            number = types.int32(types.uint32(column) // types.uint32(block))
            of_slice = types.int32(image * image_step + number * block_step)
            ptx.tma_store_3d(y, staged, types.int32(column - number * block), within, of_slice)

        def send_plain(y: Any, staged: Any, column: Any, row: Any) -> None:
            ptx.tma_store_2d(y, staged, column, row)

        return send_plain if self.plain else send

    def column_offset(self) -> Callable[[Any], Any]:
        """`offset(column)`: elements of y from a part's first column to another, both multiples of 8."""
        block, block_elements = self.block, self.block_elements

        def offset(column: Any) -> Any:
            return types.int64(column // block) * block_elements + column % block

        def plain(column: Any) -> Any:
            return column

        return plain if self.plain else offset


@dataclass(frozen=True)
class ShuffledOutput(Output):
    """An output that is stored through depth_to_space. Its columns are those of one pixel of a block after the other.

    y is four axes: the channels of those pixels of a block that are in one row of y, the pixels of a row before, the rows of
    a block, and the rows of all images before. A box has as many pixels as divide both a row of an image and the 64 rows of
    a warpgroup, so that no box straddles two rows of an image. Every box lies inside of y.

    Attributes:
        shuffle: the depth_to_space.
        out_w: pixels of a row of an image before it; a multiple of `SWIZZLE_ROWS`, so that boxes start at multiples of 128
            bytes in shared memory.
    """

    shuffle: PixelShuffle
    out_w: int

    @property
    def box_pixels(self) -> int:
        """Pixels of a box."""
        return math.gcd(self.out_w, WGMMA_M)

    def send(self, row_bytes: int) -> Callable[..., None]:
        run, rows, out_w, pixels = self.columns // self.shuffle.block, self.rows, self.out_w, self.box_pixels
        boxes, box_bytes = WGMMA_M // pixels, pixels * row_bytes

        def send(y: Any, staged: Any, column: Any, row: Any) -> None:
            of_block = types.int32(types.uint32(column) // types.uint32(run))
            within = types.int32(column - of_block * run)
            for box in range(boxes):
                first = types.int32(row + box * pixels)
                if first < rows:
                    line = types.int32(types.uint32(first) // types.uint32(out_w))
                    at = types.uint32(staged + box * box_bytes)
                    ptx.tma_store_4d(y, at, within, types.int32(first - line * out_w), of_block, line)

        return send


def direct(output: Output, octets: int, accumulator: str = "float32") -> Store:
    """Stores the 32 bits of registers; `y` is its address."""
    first_pair, offset_of, rows, row_8 = output.fragment(), output.column_offset(), output.rows, 8 * output.block
    store_two = ptx.store_global_f32x2 if accumulator == "float32" else ptx.store_global_b32x2

    def begin(group: Any, lane: Any, warp_row: Any, leader: Any) -> Any:
        return lane, warp_row

    def store(values: Any, y: Any, place: Any, row: Any, column: Any, inside_columns: Any) -> None:
        lane, warp_row = place
        first_row, _, first_offset = first_pair(lane, warp_row, row, column)
        for pair in range(2 * octets):
            if (first_row + (pair & 1) * 8 < rows) & ((pair >> 1) * 8 < inside_columns):
                offset = types.int64(first_offset + ((pair & 1) * row_8 + offset_of((pair >> 1) * 8)))
                address = types.uint64(y + types.uint64(offset * 4))
                store_two(address, values[2 * pair], values[2 * pair + 1])

    return Store(begin, store)


def stage_pairs(
    out_dtype: str, octets: int, chunks: int, segment_bytes: int, accumulator: str = "float32"
) -> Callable[..., None]:
    """`stage(values, lane, row_address, flip, inside_columns)` packs pairs of octets into shared memory.

    Rows have `chunks` chunks of 16 bytes, swizzled by `flip`. Further chunks follow at a distance of `segment_bytes`.
    """
    pack = ptx.pack_pair(out_dtype, accumulator)

    def stage(values: Any, lane: Any, row_address: Any, flip: Any, inside_columns: Any) -> None:
        for pair in range(octets // 2):
            # a branch even if it is always true: ptxas would otherwise pack all pairs into further registers
            if 16 * pair < inside_columns:
                chunk = types.uint32((2 * pair) % chunks + (lane >> 4))
                ptx.stmatrix_x4(
                    row_address + (2 * pair) // chunks * segment_bytes + ((chunk ^ flip) << 4),
                    pack(values[8 * pair], values[8 * pair + 1]),
                    pack(values[8 * pair + 2], values[8 * pair + 3]),
                    pack(values[8 * pair + 4], values[8 * pair + 5]),
                    pack(values[8 * pair + 6], values[8 * pair + 7]),
                )

    return stage


def stage_bytes(out_dtype: str, octets: int, chunks: int, segment_bytes: int) -> Callable[..., None]:
    """The same for int8 and uint8 of interleaved columns: 16 columns of two octets are a chunk of 16 bytes."""
    pack, last = ptx.pack_bytes(out_dtype), octets // 2 - 1

    def rows_of(values: Any, pair: Any, lower: Any) -> Any:
        at = 8 * pair + 2 * lower
        return pack(values[at], values[at + 4], values[at + 1], values[at + 5])

    def stage(values: Any, lane: Any, row_address: Any, flip: Any, inside_columns: Any) -> None:
        for two in range((octets // 2 + 1) // 2):
            pair = 2 * two
            if 16 * pair < inside_columns:  # see `stage_pairs`
                if pair < last:
                    chunk = types.uint32(pair % chunks + (lane >> 4) % chunks)
                    past = (pair // chunks + types.uint32((lane >> 4) // chunks)) * segment_bytes
                    ptx.stmatrix_x4(
                        types.uint32(row_address + past + ((chunk ^ flip) << 4)),
                        rows_of(values, pair, 0),
                        rows_of(values, pair, 1),
                        rows_of(values, pair + 1, 0),
                        rows_of(values, pair + 1, 1),
                    )
                else:
                    chunk = types.uint32(pair % chunks)
                    ptx.stmatrix_x2(
                        types.uint32(row_address + pair // chunks * segment_bytes + ((chunk ^ flip) << 4)),
                        rows_of(values, pair, 0),
                        rows_of(values, pair, 1),
                    )

    return stage


def staged(
    output: Output,
    out_dtype: str,
    octets: int,
    segment: int,
    staging_offset: int,
    warpgroups: int,
    accumulator: str = "float32",
) -> Store:
    """Packs elements into shared memory by stmatrix, and sends them from there by TMA; `y` is a tensor map.

    The store of one tile is in flight while the next one is multiplied.

    Args:
        output: how y lies in memory; a segment's columns lie in one slice.
        out_dtype: float16 or bfloat16; or int8 or uint8 of interleaved columns.
        octets: columns of the part, divided by 8; even for 8-bit elements.
        segment: columns that one TMA store takes, of 16, 32, 64 or 128 bytes. 64 rows of them are contiguous, and their
            16-byte chunks are swizzled over the row: chunk ^= number of the row's 128-byte line.
        staging_offset: offset of the first warpgroup's part in shared memory; the other parts follow.
        warpgroups: number of warpgroups that store.
        accumulator: dtype of the registers; see `Epilogue.accumulator`.
    """
    size = dtype_of(out_dtype).nbytes
    row_bytes, chunks, segments = segment * size, segment * size // 16, octets * 8 // segment
    segment_bytes, part_bytes = WGMMA_M * row_bytes, WGMMA_M * octets * 8 * size
    barrier, send = ptx.group_barrier(warpgroups, WARPGROUP), output.send(row_bytes)

    def begin(group: Any, lane: Any, warp_row: Any, leader: Any) -> Any:
        part = types.uint32(shared_base() + staging_offset + group * part_bytes)
        row = types.uint32(warp_row + (lane & 15))
        row_address = types.uint32(part + row * row_bytes)
        flip = types.uint32((row * row_bytes >> 7) & (chunks - 1))
        return group, lane, leader, part, row_address, flip

    def stage_octets(values: Any, lane: Any, row_address: Any, flip: Any, inside_columns: Any) -> None:
        for octet in range(octets):
            if 8 * octet < inside_columns:
                ptx.stmatrix_x2(
                    row_address + octet * segment_bytes,
                    pack(values[4 * octet], values[4 * octet + 1]),
                    pack(values[4 * octet + 2], values[4 * octet + 3]),
                )

    if interleaved(out_dtype):
        stage = stage_bytes(out_dtype, octets, chunks, segment_bytes)
    elif chunks > 1:
        stage = stage_pairs(out_dtype, octets, chunks, segment_bytes, accumulator)
    else:
        pack, stage = ptx.pack_pair(out_dtype, accumulator), stage_octets

    def store(values: Any, y: Any, place: Any, row: Any, column: Any, inside_columns: Any) -> None:
        group, lane, leader, part, row_address, flip = place
        if leader:
            ptx.bulk_wait_read_all()  # the previous tile's stores have read the part
        barrier(group)
        stage(values, lane, row_address, flip, inside_columns)
        ptx.fence_async_shared()
        barrier(group)
        if leader:
            for number in range(segments):
                if number * segment < inside_columns:
                    send(y, part + number * segment_bytes, column + number * segment, row)
            ptx.bulk_commit()

    return Store(begin, store)


# --- For kernels whose wgmma rows are channels and whose columns are positions of pixels --------------------------------
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
        warp_chunk = types.uint32(warp_channel >> 3)
        matrix_row = types.uint32(lane & 7)
        matrix_chunk = types.uint32(warp_chunk + ((lane >> 3) & 1))
        return types.uint32(
            (lane >> 4) * (SWIZZLE_ROWS * size) + matrix_row * size + ((matrix_chunk ^ matrix_row) << 4)
        )  # fmt: skip

    def offset_8_bits(lane: Any, warp_channel: Any) -> Any:
        return types.uint32(lane * size + (((warp_channel >> 4) ^ ((lane >> 1) & 3)) << 4))

    return offset_8_bits if interleaved(out_dtype) else offset_16_bits


def segment_offset(segment: int, positions: int) -> Callable[[Any, Any], Any]:
    """As `transposed_offset` for 16 bits, if the 64 channels of `positions` positions are staged in parts.

    A part has all positions of `segment` channels (16, 32 or 64), whose chunks are swizzled over its rows.
    """
    size = segment * 2
    chunks = size // 16

    def offset(lane: Any, warp_channel: Any) -> Any:
        part = types.uint32(types.uint32(warp_channel) // types.uint32(segment))
        matrix_row = types.uint32(lane & 7)
        chunk = types.uint32(((warp_channel >> 3) & (chunks - 1)) + ((lane >> 3) & 1))
        flip = types.uint32((matrix_row * size >> 7) & (chunks - 1))
        first = types.uint32(part * (positions * size) + (lane >> 4) * (SWIZZLE_ROWS * size))
        return types.uint32(first + matrix_row * size + ((chunk ^ flip) << 4))

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
            ptx.tma_store_4d(y, types.uint32(staged + tile_row * row_bytes), channel, column, row + tile_row, image)

    def send_of_group(
        y: Any, staged: Any, rows: Any, channel: Any, conv_group: Any, column: Any, row: Any, image: Any
    ) -> None:
        for tile_row in range(rows):
            at = types.uint32(staged + tile_row * row_bytes)
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
            first = types.int32(channel + part * segment)
            if first < channels:
                of_block = types.int32(types.uint32(first) // types.uint32(run))
                within = types.int32(first - of_block * run)
                for tile_row in range(rows):
                    at = types.uint32(staged + part * part_bytes + tile_row * row_bytes)
                    ptx.tma_store_4d(y, at, within, column, of_block, types.int32(image * out_h + row + tile_row))

    return send
