"""Stores of 16-bit rows that TMA cannot store, because they do not begin at multiples of 16 bytes.

Registers hold two neighbours of a row: a warp that stores them writes 8 pieces of 8 bytes or less. So each warp writes its
16 rows of sums to shared memory as they are, and reads them back as neighbours of one row, 1, 2 or 4 at a time, whatever
divides the channels. It applies the epilogue to these and stores them: a store of the warp has up to 256 neighbouring bytes.
Warps do not wait for each other. Lanes keep their columns from row to row, so that few instructions find an address; that
many instructions, not bytes, are what this way of storing costs. Several loads are in flight before the first store.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" (register fragments of D).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from numba import cuda

from schedsearch.backend.ops import shared_base
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.hopper import WGMMA_M

ROW_PADDING = 8  # sums between two rows: 4 rows of pairs then hit every bank once
WARP_ROWS = 16
ELEMENT_BYTES = 2  # of y
SUM_BYTES = 4
_UNITS = (4, 2, 1)  # channels that a thread stores at once
_IN_FLIGHT = 8  # sums that a thread has loaded from shared memory and not stored yet


def row_bytes(columns: Any) -> Any:
    """Bytes of shared memory for a row of `columns` sums."""
    return (columns + ROW_PADDING) * SUM_BYTES


def unit_of(*elements: int) -> int:
    """How many channels a store takes, of rows that are so many elements apart or wide."""
    return next(unit for unit in _UNITS if math.gcd(*elements) % unit == 0)


@dataclass(frozen=True)
class StagedRows:
    """The sums of a warpgroup's part of a tile in shared memory: 64 rows of `octets` * 8 columns.

    Attributes:
        octets: columns of the part, divided by 8.
        channels, pitch: channels of a row of y, and elements from a row of y to the next.
        offset: offset of the first warpgroup's part in shared memory; the other parts follow.
    """

    octets: int
    channels: int
    pitch: int
    offset: int

    shaped_by: ClassVar[frozenset[str]] = frozenset({"held"})  # of the function that `store` returns

    @property
    def row_bytes(self) -> int:
        return int(row_bytes(8 * self.octets))

    @property
    def unit(self) -> int:
        """Channels of one store."""
        return unit_of(self.channels, self.pitch)

    def alignments(self, epilogue: Epilogue) -> dict[str, int]:
        """Buffer -> alignment in bytes of what `store` reads and writes."""
        pairs = 1 if self.unit > 1 else 2
        return {name: nbytes // pairs for name, nbytes in epilogue.alignments.items()} | {"y": self.unit * ELEMENT_BYTES}

    def begin(self) -> Callable[..., Any]:
        """`begin(group, lane, warp_row)`: a thread's place: (lane, warp_row, the rows of its warp, its first pair)."""
        offset, bytes_of_row = self.offset, self.row_bytes

        def begin(group: Any, lane: Any, warp_row: Any) -> Any:
            rows = u32(shared_base() + offset + (group * WGMMA_M + warp_row) * bytes_of_row)
            return lane, warp_row, rows, u32(rows + (lane >> 2) * bytes_of_row + (lane & 3) * (2 * SUM_BYTES))

        return begin

    def store(self, epilogue: Epilogue, out_dtype: str, pixel_of: Callable[..., Any]) -> Callable[..., None]:
        """`store(values, y, place, tile, k, inside_columns, operands)`: 64 rows x 8 * octets sums become a part of y.

        `k` is the channel of the first column, and `inside_columns` columns lie inside of y. `pixel_of(tile, row)` returns
        the number (i64) of the pixel of one of the 64 rows, and whether it is inside of y.
        """
        octets, bytes_of_row, unit, channels, pitch = self.octets, self.row_bytes, self.unit, self.channels, self.pitch
        units, columns, rows_8_bytes = 8 * octets // unit, 8 * octets, 8 * bytes_of_row
        lanes = min(32, 1 << (units - 1).bit_length())  # of a row
        turns, rows_at_once = -(-units // lanes), 32 // lanes
        steps = WARP_ROWS // rows_at_once
        together = min(steps, max(1, _IN_FLIGHT // (turns * unit)))  # steps, of which loads are in flight
        held = together * turns * unit
        store_pair = ptx.store_shared_pair("float32")
        load, finish = _load(unit), _finish(epilogue, out_dtype, unit)

        def store(values: Any, y: Any, place: Any, tile: Any, k: Any, inside_columns: Any, operands: Any) -> None:
            lane, warp_row, rows, first_pair = place
            sums = cuda.local.array(held, f32)
            own_row, own_unit = i32(u32(lane) // u32(lanes)), i32(u32(lane) % u32(lanes))
            stop = i32(min(inside_columns, columns))
            ptx.warp_barrier()  # all lanes have read the rows of the tile before
            for octet in range(octets):
                at = u32(first_pair + octet * (8 * SUM_BYTES))
                store_pair(at, values[4 * octet], values[4 * octet + 1])
                store_pair(u32(at + rows_8_bytes), values[4 * octet + 2], values[4 * octet + 3])
            ptx.warp_barrier()
            for first in range(i32(0), i32(steps), i32(together)):
                for number in range(together):
                    row = i32((first + number) * rows_at_once + own_row)
                    for turn in range(turns):
                        of_row = i32(min(own_unit + turn * lanes, units - 1))
                        staged = u32(rows + row * bytes_of_row + of_row * (unit * SUM_BYTES))
                        load(sums, (number * turns + turn) * unit, staged)
                for number in range(together):
                    row = i32((first + number) * rows_at_once + own_row)
                    pixel, inside = pixel_of(tile, i32(warp_row + row))
                    if inside:
                        to = u64(y + u64((pixel * pitch + k) * ELEMENT_BYTES))
                        offset = i64(pixel * channels + k)
                        for turn in range(turns):
                            column = i32((own_unit + turn * lanes) * unit)
                            if column < stop:
                                at = (number * turns + turn) * unit
                                address = u64(to + u32(column * ELEMENT_BYTES))
                                finish(address, sums, at, i32(k + column), i64(offset + column), operands)

        return store


def _load(unit: int) -> Callable[..., None]:
    """`load(sums, at, staged)`: `unit` neighbouring sums from shared memory to the array, from `at` on."""

    def one(sums: Any, at: Any, staged: Any) -> None:
        sums[at] = ptx.load_shared_f32(staged)

    def two(sums: Any, at: Any, staged: Any) -> None:
        a0, a1 = ptx.load_shared_f32x2(staged)
        sums[at], sums[at + 1] = a0, a1

    def four(sums: Any, at: Any, staged: Any) -> None:
        two(sums, at, staged)
        two(sums, at + 2, u32(staged + 2 * SUM_BYTES))

    return {1: one, 2: two, 4: four}[unit]


def _finish(epilogue: Epilogue, out_dtype: str, unit: int) -> Callable[..., None]:
    """`finish(address, sums, at, k, offset, operands)`: `unit` neighbours of a row, from `at` on, become elements of y.

    `k` is the channel of the first, `offset` its element offset in operands like y.
    """
    single, pair, pack = epilogue.single, epilogue.pair, ptx.pack_pair(out_dtype)

    def one(address: Any, sums: Any, at: Any, k: Any, offset: Any, operands: Any) -> None:
        value = single(sums[at], 1, k, offset, *operands)
        ptx.store_global_u16(address, pack(value, value))

    def word(sums: Any, at: Any, k: Any, offset: Any, operands: Any) -> Any:
        v0, v1 = pair(sums[at], sums[at + 1], 1, k, offset, *operands)
        return pack(v0, v1)

    def two(address: Any, sums: Any, at: Any, k: Any, offset: Any, operands: Any) -> None:
        ptx.store_global_u32(address, word(sums, at, k, offset, operands))

    def four(address: Any, sums: Any, at: Any, k: Any, offset: Any, operands: Any) -> None:
        low = word(sums, at, k, offset, operands)
        high = word(sums, at + 2, i32(k + 2), i64(offset + 2), operands)
        ptx.store_global_b32x2(address, i32(low), i32(high))

    return {1: one, 2: two, 4: four}[unit]
