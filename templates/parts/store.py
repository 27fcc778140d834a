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

from numba import cuda

from schedsearch.backend.ops import shared_base
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.pixel_shuffle import PixelShuffle
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.casts import i32, i64, u32, u64
from schedsearch.templates.parts.hopper import WARPGROUP, WGMMA_M


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
    thread = i32(cuda.threadIdx.x)
    group = thread >> 7
    lane = thread & 31
    warp_row = i32(((thread >> 5) & 3) * 16)
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
        first_row = i32(row + warp_row + (lane >> 2))
        first_column = i32(column + (lane & 3) * neighbours)
        return first_row, first_column, i64(first_row) * columns + first_column

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
            image = i32(u32(row) // u32(padded_rows))
            within = i32(row - image * padded_rows)
            return image, within if image < images else i32(rows)

        def only_image(row: Any) -> Any:
            return i32(0), row

        return locate if images > 1 else only_image

    def first_pixel(self) -> Callable[[Any], Any]:
        """`first_pixel(row)`: rows of y before the slice of a row's image: the number of output pixels before the image."""
        locate, rows = self.locate(), self.rows

        def first_pixel(row: Any) -> Any:
            image, _ = locate(row)
            return i32(image * rows)

        return first_pixel

    def fragment(self, neighbours: int = 2) -> Callable[..., Any]:
        """As the function `fragment`; the row that it returns is that in a slice."""
        locate, rows, block, block_elements = self.locate(), self.rows, self.block, self.block_elements
        image_elements = self.image_step * rows * block

        def first_pair(lane: Any, warp_row: Any, row: Any, column: Any) -> Any:
            image, within = locate(row)
            number = i32(u32(column) // u32(block))
            first_row = i32(within + warp_row + (lane >> 2))
            first_column = i32(column + (lane & 3) * neighbours)
            slices = i64(image) * image_elements + i64(number) * block_elements
            return first_row, first_column, slices + i64(first_row) * block + (first_column - number * block)

        return fragment(self.columns, neighbours) if self.plain else first_pair

    def send(self, row_bytes: int) -> Callable[..., None]:
        """`send(y, staged, column, row)`: stores 64 rows of `row_bytes` at `staged`, whose columns lie in one slice."""
        locate, block, image_step, block_step = self.locate(), self.block, self.image_step, self.block_step

        def send(y: Any, staged: Any, column: Any, row: Any) -> None:
            image, within = locate(row)
            number = i32(u32(column) // u32(block))
            of_slice = i32(image * image_step + number * block_step)
            ptx.tma_store_3d(y, staged, i32(column - number * block), within, of_slice)

        def send_plain(y: Any, staged: Any, column: Any, row: Any) -> None:
            ptx.tma_store_2d(y, staged, column, row)

        return send_plain if self.plain else send

    def column_offset(self) -> Callable[[Any], Any]:
        """`offset(column)`: elements of y from a part's first column to another, both multiples of 8."""
        block, block_elements = self.block, self.block_elements

        def offset(column: Any) -> Any:
            return i64(column // block) * block_elements + column % block

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
            of_block = i32(u32(column) // u32(run))
            within = i32(column - of_block * run)
            for box in range(boxes):
                first = i32(row + box * pixels)
                if first < rows:
                    line = i32(u32(first) // u32(out_w))
                    at = u32(staged + box * box_bytes)
                    ptx.tma_store_4d(y, at, within, i32(first - line * out_w), of_block, line)

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
                offset = i64(first_offset + ((pair & 1) * row_8 + offset_of((pair >> 1) * 8)))
                address = u64(y + u64(offset * 4))
                store_two(address, values[2 * pair], values[2 * pair + 1])

    return Store(begin, store)


def stage_octets(out_dtype: str, octets: int, segment_bytes: int, accumulator: str = "float32") -> Callable[..., None]:
    """As `stage_pairs`, for rows of one chunk."""
    pack = ptx.pack_pair(out_dtype, accumulator)

    def stage(values: Any, lane: Any, row_address: Any, flip: Any, inside_columns: Any) -> None:
        for octet in range(octets):
            if 8 * octet < inside_columns:
                ptx.stmatrix_x2(
                    row_address + octet * segment_bytes,
                    pack(values[4 * octet], values[4 * octet + 1]),
                    pack(values[4 * octet + 2], values[4 * octet + 3]),
                )

    return stage


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
                chunk = u32((2 * pair) % chunks + (lane >> 4))
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
                    chunk = u32(pair % chunks + (lane >> 4) % chunks)
                    past = (pair // chunks + u32((lane >> 4) // chunks)) * segment_bytes
                    ptx.stmatrix_x4(
                        u32(row_address + past + ((chunk ^ flip) << 4)),
                        rows_of(values, pair, 0),
                        rows_of(values, pair, 1),
                        rows_of(values, pair + 1, 0),
                        rows_of(values, pair + 1, 1),
                    )
                else:
                    chunk = u32(pair % chunks)
                    ptx.stmatrix_x2(
                        u32(row_address + pair // chunks * segment_bytes + ((chunk ^ flip) << 4)),
                        rows_of(values, pair, 0),
                        rows_of(values, pair, 1),
                    )

    return stage


@dataclass(frozen=True)
class Staging:
    """A warpgroup's part of a tile in shared memory: what the stores have in common that pack elements by stmatrix.

    Attributes:
        out_dtype: float16 or bfloat16; or int8 or uint8 of interleaved columns.
        octets: columns of the part, divided by 8; even for 8-bit elements.
        segment: columns of a segment, of 16, 32, 64 or 128 bytes, which lie in one slice of y. 64 rows of them are
            contiguous, and their 16-byte chunks are swizzled over the row: chunk ^= number of the row's 128-byte line.
        offset: offset of the first warpgroup's part in shared memory; the other parts follow.
        accumulator: dtype of the registers; see `Epilogue.accumulator`.
    """

    out_dtype: str
    octets: int
    segment: int
    offset: int
    accumulator: str = "float32"

    @property
    def row_bytes(self) -> int:
        """Bytes of a segment's row."""
        return self.segment * dtype_of(self.out_dtype).nbytes

    @property
    def chunks(self) -> int:
        """Chunks of 16 bytes of a segment's row."""
        return self.row_bytes // 16

    @property
    def segments(self) -> int:
        return self.octets * 8 // self.segment

    @property
    def segment_bytes(self) -> int:
        return WGMMA_M * self.row_bytes

    def begin(self) -> Callable[..., Any]:
        """`begin(group, lane, warp_row)`: addresses of the warpgroup's part and of the lane's row, and the row's swizzle."""
        offset, part_bytes = self.offset, self.segments * self.segment_bytes
        row_bytes, chunks = self.row_bytes, self.chunks

        def begin(group: Any, lane: Any, warp_row: Any) -> Any:
            part = u32(shared_base() + offset + group * part_bytes)
            row = u32(warp_row + (lane & 15))
            row_address = u32(part + row * row_bytes)
            flip = u32((row * row_bytes >> 7) & (chunks - 1))
            return part, row_address, flip

        return begin

    def stage(self) -> Callable[..., None]:
        """`stage(values, lane, row_address, flip, inside_columns)` packs the part's elements into shared memory."""
        sizes = self.octets, self.chunks, self.segment_bytes
        if interleaved(self.out_dtype):
            return stage_bytes(self.out_dtype, *sizes)
        if self.chunks > 1:
            return stage_pairs(self.out_dtype, *sizes, self.accumulator)
        return stage_octets(self.out_dtype, *sizes[::2], self.accumulator)


def staged(output: Output, staging: Staging, warpgroups: int) -> Store:
    """Packs elements into shared memory, and sends them from there by TMA; `y` is a tensor map.

    The store of one tile is in flight while the next one is multiplied.

    Args:
        output: how y lies in memory.
        staging: a TMA store takes one segment.
        warpgroups: number of warpgroups that store.
    """
    segment, segments, segment_bytes = staging.segment, staging.segments, staging.segment_bytes
    barrier, send = ptx.group_barrier(warpgroups, WARPGROUP), output.send(staging.row_bytes)
    begin_staging, stage = staging.begin(), staging.stage()

    def begin(group: Any, lane: Any, warp_row: Any, leader: Any) -> Any:
        part, row_address, flip = begin_staging(group, lane, warp_row)
        return group, lane, leader, part, row_address, flip

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
