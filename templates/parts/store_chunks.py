"""Stores of 16-bit rows that begin anywhere, in chunks of 16 bytes: the epilogue and the packing come first.

`store_rows` stages sums of 32 bits and stores units of 1, 2 or 4 channels, so an odd number of channels costs a load, a
conversion and a store for each. Here registers become elements of y before they are staged. A row is staged as far from a
multiple of 16 bytes as it is in memory, so that every whole chunk of a row is one load from shared memory and one store.
The first and the last chunk of a row may belong to its neighbours too: their elements are stored one by one, or by pairs.

A thread holds pairs of neighbours. If a row begins at an odd element, a pair lies in two words of 32 bits, and is staged as
two elements.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" (register fragments of D).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from numba import cuda

from schedsearch.backend.ops import shared_base
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.casts import i32, i64, u32, u64
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.hopper import WGMMA_M
from schedsearch.templates.parts.store_rows import ELEMENT_BYTES, unit_of

CHUNK_BYTES = 16
CHUNK = CHUNK_BYTES // ELEMENT_BYTES  # elements
_ROWS_IN_FLIGHT = 2  # pairs of rows that a thread has loaded from shared memory and not stored yet


def row_bytes(columns: Any) -> Any:
    """Bytes of shared memory for a row of `columns` elements: room for its shift, and an odd number of chunks.

    8 rows of 16 bytes then hit every bank once.
    """
    return (columns // CHUNK + 1 | 1) * CHUNK_BYTES


@dataclass(frozen=True)
class StagedChunks:
    """The elements of a warpgroup's part of a tile in shared memory: 64 rows of `octets` * 8 columns.

    Attributes:
        octets: columns of the part, divided by 8.
        channels, pitch: channels of a row of y, and elements from a row of y to the next.
        offset: offset of the first warpgroup's part in shared memory; the other parts follow.
    """

    octets: int
    channels: int
    pitch: int
    offset: int

    # Of the function that `store` returns.
    shaped_by: ClassVar[frozenset[str]] = frozenset({"fused", "store_whole.held"})

    @property
    def row_bytes(self) -> int:
        return int(row_bytes(8 * self.octets))

    @property
    def unit(self) -> int:
        """Elements at the ends of a row that are stored at once: 2 if all rows begin at even ones, else 1."""
        return min(2, unit_of(self.channels, self.pitch))

    def alignments(self, epilogue: Epilogue) -> dict[str, int]:
        """Buffer -> alignment in bytes of what `store` reads and writes."""
        pairs = 1 if self.unit > 1 else 2
        return {name: nbytes // pairs for name, nbytes in epilogue.alignments.items()} | {"y": self.unit * ELEMENT_BYTES}

    def begin(self) -> Callable[..., Any]:
        """`begin(group, lane, warp_row)`: a thread's place: (lane, warp_row, the rows of its warp, its first pair)."""
        offset, bytes_of_row = self.offset, self.row_bytes

        def begin(group: Any, lane: Any, warp_row: Any) -> Any:
            rows = u32(shared_base() + offset + (group * WGMMA_M + warp_row) * bytes_of_row)
            return lane, warp_row, rows, u32(rows + (lane >> 2) * bytes_of_row + (lane & 3) * (2 * ELEMENT_BYTES))

        return begin

    def store(self, epilogue: Epilogue, out_dtype: str) -> Callable[..., None]:
        """`store(values, y, place, tile, k, inside_columns, operands)`: 64 rows x 8 * octets sums become a part of y.

        `tile` is the number (i64) of the first row's pixel, and how many pixels from there on are inside of y. `k` is the
        channel of the first column, and `inside_columns` columns lie inside of y.
        """
        octets, bytes_of_row, channels, pitch = self.octets, self.row_bytes, self.channels, self.pitch
        columns, rows_8_bytes, fused, even = 8 * octets, 8 * bytes_of_row, not epilogue.identity, self.unit == 2
        fuse = epilogue.fragments(octets, 8 * channels, singly=not even)
        stage, store_whole, store_ends = ptx.store_shared_packed(out_dtype, even), self._store_whole(), self._store_ends()

        def store(values: Any, y: Any, place: Any, tile: Any, k: Any, inside_columns: Any, operands: Any) -> None:
            lane, warp_row, rows, first_pair = place
            first_pixel, pixels = tile
            first_pixel, pixels = i64(first_pixel + warp_row), i32(pixels - warp_row)
            row = i32(lane >> 2)
            if fused:
                column = i32((lane & 3) * 2)
                offset = i64((first_pixel + row) * channels + (k + column))
                inside = i32(inside_columns - column)
                fuse(values, inside, row < pixels, row + 8 < pixels, i32(k + column), offset, *operands)
            first = u64(y + u64((first_pixel * pitch + k) * ELEMENT_BYTES))
            shift = _shift(u64(first + u64(row * (pitch * ELEMENT_BYTES))))  # as of the row 8 below
            odd, at = i32(shift & 1), u32(first_pair + shift * ELEMENT_BYTES)
            ptx.warp_barrier()  # all lanes have read the rows of the tile before
            for octet in range(octets):
                value = 4 * octet
                stage(u32(at + octet * CHUNK_BYTES), odd, values[value], values[value + 1])
                stage(u32(at + octet * CHUNK_BYTES + rows_8_bytes), odd, values[value + 2], values[value + 3])
            ptx.warp_barrier()
            stop = i32(min(inside_columns, columns))
            store_whole(first, lane, rows, pixels, stop)
            store_ends(first, lane, rows, pixels, stop)

        return store

    def _store_whole(self) -> Callable[..., None]:
        """`store(first, lane, rows, pixels, columns)`: the chunks that lie in one of the warp's rows.

        `first` is the address of the first row in y. Two rows are 8 apart, and so begin at the same place of a chunk.
        """
        bytes_of_row, octets, pitch_bytes = self.row_bytes, self.octets, self.pitch * ELEMENT_BYTES
        lanes = min(32, max(4, 1 << (octets - 1).bit_length()))  # of a row
        rows_at_once = 32 // lanes
        together = min(_ROWS_IN_FLIGHT, 8 // rows_at_once)
        parts, rows_8, pitch_8, held = 8 // rows_at_once // together, 8 * bytes_of_row, 8 * pitch_bytes, 8 * together

        def store_whole(first: Any, lane: Any, rows: Any, pixels: Any, columns: Any) -> None:
            words = cuda.local.array(held, i32)
            own_row, own_chunk = i32(u32(lane) // u32(lanes)), i32(u32(lane) % u32(lanes))
            loaded = i32(min(own_chunk, i32(octets - 1)))  # lanes without a chunk load another one
            for part in range(i32(0), _turns(pixels, rows_at_once * together, parts)):
                for step in range(together):
                    row = i32(own_row + (part * together + step) * rows_at_once)
                    chunk = i32(loaded + _skipped(_shift(u64(first + u64(u32(row * pitch_bytes))))))
                    staged = u32(rows + u32(row * bytes_of_row) + u32(chunk * CHUNK_BYTES))
                    a, b, c, d = ptx.load_shared_i32x4(staged)
                    e, f, g, h = ptx.load_shared_i32x4(u32(staged + rows_8))
                    at = 8 * step
                    words[at], words[at + 1], words[at + 2], words[at + 3] = a, b, c, d
                    words[at + 4], words[at + 5], words[at + 6], words[at + 7] = e, f, g, h
                for step in range(together):
                    row = i32(own_row + (part * together + step) * rows_at_once)
                    address = u64(first + u64(u32(row * pitch_bytes)))
                    shift = _shift(address)
                    chunk = i32(own_chunk + _skipped(shift))
                    inside, at = chunk < i32(i32(shift + columns) >> 3), 8 * step
                    to = u64(address + u64(u32(chunk * CHUNK_BYTES - shift * ELEMENT_BYTES)))
                    if inside and row < pixels:
                        a, b, c, d = words[at], words[at + 1], words[at + 2], words[at + 3]
                        ptx.store_global_v4(to, u32(a), u32(b), u32(c), u32(d))
                    if inside and i32(row + 8) < pixels:
                        a, b, c, d = words[at + 4], words[at + 5], words[at + 6], words[at + 7]
                        ptx.store_global_v4(u64(to + u64(pitch_8)), u32(a), u32(b), u32(c), u32(d))

        return store_whole

    def _store_ends(self) -> Callable[..., None]:
        """`store(first, lane, rows, pixels, columns)`: what is left of the warp's rows at both ends."""
        bytes_of_row, pitch_bytes, unit = self.row_bytes, self.pitch * ELEMENT_BYTES, self.unit
        lanes = CHUNK // unit  # of one end of a row
        rows_at_once = 32 // (2 * lanes)
        halves, rows_8, pitch_8 = 4 // rows_at_once, 8 * bytes_of_row, 8 * pitch_bytes
        load, store = _LOADS[unit], _STORES[unit]

        def store_ends(first: Any, lane: Any, rows: Any, pixels: Any, columns: Any) -> None:
            own_row, own_lane = i32(u32(lane) // u32(2 * lanes)), i32(u32(lane) % u32(2 * lanes))
            right = own_lane >= i32(lanes)
            within = i32(i32(u32(own_lane) % u32(lanes)) * unit)
            for part in range(i32(0), _turns(pixels, 2 * rows_at_once, halves)):
                for step in range(2):
                    row = i32(own_row + (2 * part + step) * rows_at_once)
                    address = u64(first + u64(u32(row * pitch_bytes)))
                    shift = _shift(address)
                    last = i32(i32(shift + columns) & i32(-CHUNK))  # the first element after the whole chunks
                    element = i32(within + (last if right else i32(0)))
                    staged = u32(rows + u32(row * bytes_of_row) + u32(element * ELEMENT_BYTES))
                    value, value_8 = load(staged), load(u32(staged + rows_8))
                    column = i32(element - shift)
                    once = last >= shift if right else shift > i32(0)  # one chunk may be the first and the last
                    inside = once and column >= i32(0) and column < columns
                    to = u64(address + u64(i64(column * ELEMENT_BYTES)))
                    if inside and row < pixels:
                        store(to, value)
                    if inside and i32(row + 8) < pixels:
                        store(u64(to + u64(pitch_8)), value_8)

        return store_ends


def _shift(address: Any) -> Any:
    """Elements from the multiple of 16 bytes before an address of y to it."""
    return i32(i32(i32(address) & i32(CHUNK_BYTES - 1)) >> 1)


def _turns(pixels: Any, rows: Any, most: Any) -> Any:
    """How many times `rows` rows have pixels, at most `most`. Loops of a length that the compiler knew would be written out:
    a block often stores a single tile, and fetches instructions from memory as it goes."""
    return i32(max(i32(0), min(i32(most), i32(i32(pixels + i32(rows - 1)) // i32(rows)))))


def _skipped(shift: Any) -> Any:
    """Chunks before the first one that is whole in a row: 1 if the row does not begin with a chunk."""
    return i32(i32(shift + i32(CHUNK - 1)) >> 3)


def _load_one(shared: Any) -> Any:
    return ptx.load_shared_u16(shared)


def _load_two(shared: Any) -> Any:
    return u32(ptx.load_shared_i32(shared))


def _store_one(address: Any, value: Any) -> None:
    ptx.store_global_u16(address, value)


def _store_two(address: Any, value: Any) -> None:
    ptx.store_global_u32(address, value)


_LOADS: dict[int, Callable[..., Any]] = {1: _load_one, 2: _load_two}
_STORES: dict[int, Callable[..., None]] = {1: _store_one, 2: _store_two}
