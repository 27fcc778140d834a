"""Stores of 32-bit results of a warpgroup's part of a tile through shared memory and TMA, a segment of columns at a time.

Registers hold two neighbours of a row, 8 bytes: a warp that stores them writes 8 pieces of 32 bytes. Staging all columns of
a tile would take shared memory from the ring. Two segments of up to 128 bytes a row are therefore staged in turn: TMA reads
one while the other is written.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" (register fragments of D), "cp.async.bulk.wait_group".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from schedsearch.backend.ops import shared_base
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.casts import u32
from schedsearch.templates.parts.hopper import WARPGROUP, WGMMA_M
from schedsearch.templates.parts.store import Output, Store

WORD_BYTES = 4
SEGMENT_COLUMNS = 32  # of 128 bytes, TMA's widest swizzle
BUFFERS = 2


def staged_columns(columns: Any) -> Any:
    """How many of a part's `columns` (a number, or an array of them) shared memory holds at the same time."""
    return np.minimum(columns, BUFFERS * SEGMENT_COLUMNS)


@dataclass(frozen=True)
class WordStaging:
    """A warpgroup's part of a tile, of which `staged_columns` are in shared memory.

    Attributes:
        octets: columns of the part, divided by 8.
        segment: columns that one TMA store writes: 8, 16 or 32, which lie in one slice of y and divide those of the part. 64
            rows of them are contiguous, and their 16-byte chunks are swizzled: chunk ^= number of the row's 128-byte line.
        offset: offset of the first warpgroup's part in shared memory; the other parts follow.
        accumulator: dtype of the registers, float32 or int32.
    """

    octets: int
    segment: int
    offset: int
    accumulator: str

    @property
    def row_bytes(self) -> int:
        """Bytes of a segment's row."""
        return self.segment * WORD_BYTES

    @property
    def part_bytes(self) -> int:
        """Bytes between the parts of two warpgroups."""
        return WGMMA_M * WORD_BYTES * int(staged_columns(8 * self.octets))


def staged_words(output: Output, staging: WordStaging, warpgroups: int) -> Store:
    """Stages segments in turn, and sends each from there by TMA; `y` is a tensor map. See `store.staged`."""
    segment, row_bytes, chunks = staging.segment, staging.row_bytes, staging.row_bytes // 16
    segments, segment_octets, segment_bytes = 8 * staging.octets // segment, segment // 8, WGMMA_M * row_bytes
    offset, part_bytes, rows_8_bytes = staging.offset, staging.part_bytes, 8 * row_bytes
    barrier, send = ptx.group_barrier(warpgroups, WARPGROUP), output.send(row_bytes)
    store_pair = ptx.store_shared_pair(staging.accumulator)

    def begin(group: Any, lane: Any, warp_row: Any, leader: Any) -> Any:
        part = u32(shared_base() + offset + group * part_bytes)
        row = u32(warp_row + (lane >> 2))
        row_address = u32(part + row * row_bytes + (lane & 1) * 8)
        chunk = u32((lane & 3) >> 1)
        flip = u32((row * row_bytes >> 7) & (chunks - 1))  # that of the row 8 below, too
        return group, leader, part, row_address, chunk, flip

    def store(values: Any, y: Any, place: Any, row: Any, column: Any, inside_columns: Any) -> None:
        group, leader, part, row_address, chunk, flip = place
        for number in range(segments):
            if number * segment < inside_columns:
                buffer = (number & 1) * segment_bytes
                if leader:
                    if number == 0:
                        ptx.bulk_wait_read_all()  # the previous tile's stores have read the part
                    else:
                        ptx.bulk_wait_read_but_one()  # the segment before the last one has been read
                barrier(group)
                for octet in range(segment_octets):
                    at = u32(row_address + buffer + (((chunk + 2 * octet) ^ flip) << 4))
                    first = 4 * (number * segment_octets + octet)
                    store_pair(at, values[first], values[first + 1])
                    store_pair(u32(at + rows_8_bytes), values[first + 2], values[first + 3])
                ptx.fence_async_shared()
                barrier(group)
                if leader:
                    send(y, u32(part + buffer), column + number * segment, row)
                    ptx.bulk_commit()

    return Store(begin, store)
