"""The CUDA kernel that runs any movement: a block loads a tile's runs of x, and stores its runs of y.

See `staging` for what a tile is and where its elements lie in shared memory, and `tile_places` for their places in x and
y. For each tile

    1. threads copy chunks of x, neighbouring threads neighbouring chunks, straight into shared memory;
    2. each thread takes vectors of y, neighbouring threads neighbouring ones, collects their elements and stores them. Where
       neighbours of x belong to rows of y that lie one below the other, a thread may take vectors of several such rows,
       read several neighbours at once and transpose them in registers (`Staging.across`).

A vector of which the tile does not have all elements, at the ends of a run that is not aligned, is stored element by
element. Vectors of bytes have a way of their own (`_segment_storer`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import cuda

from schedsearch.backend.ops import shared_base
from schedsearch.templates.data_movement.staging import CHUNK_BYTES, Staging
from schedsearch.templates.data_movement.tile_places import (
    Sum,
    digit_sum,
    elements_inside,
    load_limits,
    store_limits,
    tile_offsets,
)
from schedsearch.templates.layout_transform.kernels import word_down
from schedsearch.templates.parts import moves, ptx
from schedsearch.templates.parts.casts import i32, i64, u32, u64

_OCTET = 7


def tile_count(s: Staging) -> int:
    return math.prod(s.tiles)


@dataclass(frozen=True)
class Schedule:
    """How blocks share and run the tiles.

    Attributes:
        threads: of a block.
        along_y: neighbouring tiles follow one another in the order of y, not of x.
        late: cp.async instead of loads to registers.
        buffers: tiles in shared memory: with 2 the next tile is loaded (by cp.async) while one is stored.
        streaming: lines of y leave the caches first.
    """

    threads: int
    along_y: bool
    late: bool
    buffers: int
    streaming: bool


def staged_kernel(s: Staging, schedule: Schedule) -> Callable[..., None]:
    """The kernel (x, y); x and y aligned to `s.load_bytes` and `s.store_bytes`.

    Its blocks have `schedule.threads` threads and `schedule.buffers * s.shared_bytes` bytes of shared memory, and share
    `tile_count(s)` tiles.
    """
    tiles, late, ahead, tile_bytes = tile_count(s), schedule.late, schedule.buffers > 1, s.shared_bytes
    held_words = 1 if late else -(-s.loads // schedule.threads) * moves.words_of(s.load_bytes)
    found_words, one_words = moves.words_of(s.store_bytes), moves.words_of(s.p.element_bytes)
    load_tile = _tile_copier(s, schedule) if late else _tile_loader(s, schedule)
    storer = _segment_storer if s.linear else _tile_storer if s.across == 1 else _square_storer
    store_tile = storer(s, schedule)
    if s.linear:
        one_words += s.segment[0] * (s.segment_ends + 1)
    if s.across > 1:
        one_words = s.store_bytes // s.p.element_bytes * moves.words_of(s.across * s.p.element_bytes)
    wait_for_all, wait_for_one = ptx.cp_async_wait(0), ptx.cp_async_wait(1)

    def move(x, y) -> None:  # type: ignore[no-untyped-def]
        held = cuda.local.array(held_words, u32)
        found = cuda.local.array(found_words, u32)
        one = cuda.local.array(one_words, u32)
        shared, thread = u32(shared_base()), u32(cuda.threadIdx.x)
        first, step = i32(cuda.blockIdx.x), i32(cuda.gridDim.x)
        here = u32(0)
        if ahead:
            if first < tiles:
                load_tile(held, x, u32(first), shared, thread)
            ptx.cp_async_commit()
        for number in range(first, tiles, step):
            if ahead:
                following = i64(number) + i64(step)
                if following < tiles:
                    load_tile(held, x, u32(following), u32(shared + tile_bytes - here), thread)
                ptx.cp_async_commit()
                wait_for_one()
            else:
                load_tile(held, x, u32(number), shared, thread)
                if late:
                    ptx.cp_async_commit()
                    wait_for_all()
            cuda.syncthreads()
            store_tile(found, one, y, u32(number), u32(shared + here), thread)
            cuda.syncthreads()
            if ahead:
                here = u32(tile_bytes - here)

    return move


# ---- loads of a tile


def _chunk_of(s: Staging, along_y: bool) -> Callable[[Any, Any], Any]:
    """`chunk(tile, number)`: of a load its place in shared memory, the byte of x, and how many bytes are read there."""
    load_bytes, x_chunks, pitch, x_bytes = s.load_bytes, s.x_chunks, s.pitch, s.p.x_bytes
    tile_x, _ = tile_offsets(s, along_y)
    row_x, read_row, span = load_limits(s, along_y)
    shift_of, swizzle = _distance(load_bytes, s.x_unit), _swizzle(s.swizzle)
    clips = s.x_unit < load_bytes or bool(s.p.ragged) or s.backwards or x_bytes % load_bytes > 0
    linear, aligned = s.linear, -load_bytes
    row_shared = digit_sum(s.extents(s.x_rows), [s.shared_strides[i] for i in s.x_rows])

    def chunk(tile: Any, number: Any) -> Any:
        row = u32(number // u32(x_chunks))
        at = i32(i32(number - row * u32(x_chunks)) * load_bytes)
        from_row = i64(tile_x(tile) + row_x(row))
        shift = shift_of(from_row)
        first_byte, last_byte = span(tile)
        valid = read_row(tile, row) & (at < shift + last_byte) & (at + load_bytes > shift + first_byte)
        from_byte = i64(from_row - i64(shift) + i64(at))
        count = i32(load_bytes)
        if clips:
            valid = valid & (from_byte >= 0) & (from_byte < x_bytes)
            count = i32(min(i64(load_bytes), i64(x_bytes) - from_byte))
        if not valid:
            count = i32(0)
        if linear:
            place = i32((shift_of(tile_x(tile)) + row_shared(row)) & aligned)
        else:
            place = i32(row * pitch)
        return u32(swizzle(i32(place + at))), from_byte, count

    return chunk


def _tile_copier(s: Staging, schedule: Schedule) -> Callable[..., None]:
    """`load_tile(held, x, tile, shared, thread)` by cp.async; it does not wait."""
    chunk, threads, loads = _chunk_of(s, schedule.along_y), schedule.threads, s.loads
    turns, exact, copy = -(-loads // threads), loads % threads == 0, ptx.cp_async(s.load_bytes)

    def load_tile(held: Any, x: Any, tile: Any, shared: Any, thread: Any) -> None:
        for i in range(turns):
            number = u32(thread + u32(i * threads))
            if exact or number < loads:
                place, from_byte, count = chunk(tile, number)
                copy(u32(shared + place), u64(x + from_byte), count)

    return load_tile


def _tile_loader(s: Staging, schedule: Schedule) -> Callable[..., None]:
    """`load_tile(held, x, tile, shared, thread)`: all loads of a thread to `held`, then its stores to shared memory."""
    chunk, threads, loads = _chunk_of(s, schedule.along_y), schedule.threads, s.loads
    turns, exact, words = -(-loads // threads), loads % threads == 0, moves.words_of(s.load_bytes)
    load, keep = moves.load_global(s.load_bytes), moves.store_shared(s.load_bytes)

    def load_tile(held: Any, x: Any, tile: Any, shared: Any, thread: Any) -> None:
        for i in range(turns):
            number = u32(thread + u32(i * threads))
            if exact or number < loads:
                _, from_byte, count = chunk(tile, number)
                load(held, i * words, u64(x + from_byte), count)
        for i in range(turns):
            number = u32(thread + u32(i * threads))
            if exact or number < loads:
                place, _, _ = chunk(tile, number)
                keep(held, i * words, u32(shared + place))

    return load_tile


# ---- stores of a tile


def _tile_storer(s: Staging, schedule: Schedule) -> Callable[..., None]:
    """`store_tile(found, one, y, tile, shared, thread)`."""
    element, store_bytes, threads = s.p.element_bytes, s.store_bytes, schedule.threads
    stores, y_chunks = s.stores, s.y_chunks
    turns, exact = -(-stores // threads), stores % threads == 0
    tile_x, tile_y = tile_offsets(s, schedule.along_y)
    row_y, written_row, run_end = store_limits(s, schedule.along_y)
    shift_of, vector, in_parts = _distance(store_bytes, s.y_unit), store_bytes // element, s.partial_vectors
    collect, one_of, whole = _collector(s, schedule.along_y), _element_of(element), (1 << vector) - 1
    store, store_one = (moves.store_global(nbytes, schedule.streaming) for nbytes in (store_bytes, element))

    def store_tile(found: Any, one: Any, y: Any, tile: Any, shared: Any, thread: Any) -> None:
        x_at, y_at = tile_x(tile), tile_y(tile)
        for i in range(turns):
            item = u32(thread + u32(i * threads))
            row = u32(item // u32(y_chunks))
            chunk = i32(item - row * u32(y_chunks))
            to_row = i64(y_at + row_y(row))
            shift = shift_of(to_row)
            first = i32(chunk * vector - i32(u32(shift) // u32(element)))
            to_byte = i64(to_row - i64(shift) + i64(chunk * store_bytes))
            end = run_end(tile)
            if (exact or item < stores) and written_row(tile, row) and first < end:
                mask = collect(found, one, tile, row, first, end, x_at, shared)
                if in_parts:
                    if mask == whole:
                        store(found, 0, u64(y + to_byte))
                    else:
                        for j in range(vector):
                            if mask >> j & 1:
                                one_of(one, found, j)
                                store_one(one, 0, u64(y + u64(to_byte + j * element)))
                else:
                    store(found, 0, u64(y + to_byte))

    return store_tile


def _segment_storer(s: Staging, schedule: Schedule) -> Callable[..., None]:
    """`store_tile(found, one, y, tile, shared, thread)` for elements of one byte (`Staging.linear`).

    A vector finds its digits once. Element j has the place of the first one of its stream, and a constant; behind each end
    of a segment it has another first one. A vector that goes beyond an end of the run is collected within the run, as all
    others are, and what belongs to it is stored in parts. Only runs shorter than a vector are stored byte by byte.
    """
    vector, threads, stores, y_chunks = s.store_bytes, schedule.threads, s.stores, s.y_chunks
    turns, exact = -(-stores // threads), stores % threads == 0
    tile_x, tile_y = tile_offsets(s, schedule.along_y)
    row_y, written_row, run_end = store_limits(s, schedule.along_y)
    shift_of, x_shift_of, in_parts = _distance(vector, s.y_unit), _distance(s.load_bytes, s.x_unit), s.partial_vectors
    row_shared = digit_sum(s.extents(s.y_rows), [s.shared_strides[i] for i in s.y_rows], s.shared_start)
    strides, extents = [s.shared_strides[i] for i in s.y_run] or [0], s.extents(s.y_run) or (1,)
    run_shared = digit_sum(extents, strides)
    (streams, length), ends = s.segment, s.segment_ends
    digits = 2 if streams > 1 else 1
    elements, step = streams * length, strides[digits - 1]
    in_segment = digit_sum(extents[:digits], strides[:digits])
    of_segment = digit_sum(extents[digits:], strides[digits:])
    swizzle, swizzled = _swizzle(s.swizzle), s.swizzle > 0
    ends_of_runs = s.run_ends
    fits, short = max(ends_of_runs) >= vector, min(ends_of_runs) < vector
    part = math.gcd(4, s.y_unit, *ends_of_runs)  # what vectors that are not whole are stored in
    load, store = moves.load_shared(1), moves.store_global(vector, schedule.streaming)
    store_part, part_of = moves.store_global(part, schedule.streaming), _element_of(part)
    store_one = moves.store_global(1, schedule.streaming)
    pair, two_pairs = moves.permute_bytes(0x0040), moves.permute_bytes(0x5410)

    def collect(found: Any, one: Any, of_row: Any, first: Any, shared: Any) -> None:
        number = u32(u32(first) // u32(elements))
        within = i32(first - i32(number) * i32(elements))
        before_end = i32(elements - within)
        for i in range(streams):
            start = i32(of_row + in_segment(i32(within + i)))
            for t in range(ends + 1):
                segment = of_segment(u32(number + u32(t)))
                at = i32(start + segment - i32(t * length * step))
                one[1 + i * (ends + 1) + t] = u32(at) if swizzled else u32(shared + u32(at))
        for j in range(vector):
            t = j // elements
            base = one[1 + j % streams * (ends + 1) + min(t, ends)]
            if t < ends and j - t * elements >= before_end:
                base = one[1 + j % streams * (ends + 1) + t + 1]
            at = u32(base + u32(j // streams * step))
            if swizzled:
                at = u32(shared + u32(swizzle(i32(at))))
            load(one, 0, at)
            if j % 4 == 0:
                low = one[0]
            elif j % 4 == 1:
                low = pair(low, one[0])
            elif j % 4 == 2:
                high = one[0]
            else:
                found[j // 4] = two_pairs(low, pair(high, one[0]))

    def store_tile(found: Any, one: Any, y: Any, tile: Any, shared: Any, thread: Any) -> None:
        x_shift, y_at = x_shift_of(tile_x(tile)), tile_y(tile)
        for i in range(turns):
            item = u32(thread + u32(i * threads))
            row = u32(item // u32(y_chunks))
            chunk = i32(item - row * u32(y_chunks))
            to_row = i64(y_at + row_y(row))
            shift = shift_of(to_row)
            first = i32(chunk * vector - shift)
            end = run_end(tile)
            if (exact or item < stores) and written_row(tile, row) and first < end:
                of_row = i32(x_shift + row_shared(row))
                to_run = u64(y + to_row)
                if fits and end >= vector:
                    # Written with min and max, the compiled kernel stored whole vectors beyond the end of a run.
                    from_e, whole = i32(first), True
                    if in_parts:
                        whole = first >= 0 and i32(first + vector) <= end
                        if not whole:
                            from_e = i32(0) if first < 0 else i32(end - vector)
                    collect(found, one, of_row, from_e, shared)
                    if in_parts and not whole:
                        for j in range(0, vector, part):
                            e = i32(from_e + j)
                            if e >= first and e < first + vector:
                                part_of(one, found, j // part)
                                store_part(one, 0, u64(to_run + u64(e)))
                    else:
                        store(found, 0, u64(to_run + u64(i64(first))))
                elif short:
                    for e in range(max(first, i32(0)), min(i32(first + vector), end)):
                        at = i32(of_row + run_shared(i32(e)))
                        load(one, 0, u32(shared + u32(swizzle(at))))
                        store_one(one, 0, u64(to_run + u64(i64(e))))

    return store_tile


def _square_storer(s: Staging, schedule: Schedule) -> Callable[..., None]:
    """`store_tile(vector, square, y, tile, shared, thread)`: threads read `s.across` neighbours of x at once, elements of
    as many vectors, and transpose them in registers.
    """
    element, across, threads = s.p.element_bytes, s.across, schedule.threads
    items, y_chunks, store_bytes = s.items, s.y_chunks, s.store_bytes
    turns, exact, vector_elements = -(-items // threads), items % threads == 0, store_bytes // element
    row_words, store_words = moves.words_of(across * element), moves.words_of(store_bytes)
    _, tile_y = tile_offsets(s, schedule.along_y)
    row_y, written_row, run_end = store_limits(s, schedule.along_y)
    row_shared = digit_sum(s.y_row_counts, [s.shared_strides[i] * s.row_step(i) for i in s.y_rows], s.shared_start)
    run_shared = digit_sum(s.extents(s.y_run), [s.shared_strides[i] for i in s.y_run])
    y_apart, swizzle = s.p.factors[s.x_run[0]].y * element, _swizzle(s.swizzle)
    read, word_of = moves.load_shared(across * element), word_down(element, vector_elements, row_words)
    store = moves.store_global(store_bytes, schedule.streaming)

    def store_tile(vector: Any, square: Any, y: Any, tile: Any, shared: Any, thread: Any) -> None:
        y_at, end = tile_y(tile), run_end(tile)
        for i in range(turns):
            item = u32(thread + u32(i * threads))
            row = u32(item // u32(y_chunks))
            chunk = i32(item - row * u32(y_chunks))
            first = i32(chunk * vector_elements)
            if (exact or item < items) and written_row(tile, row) and first < end:
                of_row = row_shared(row)
                for j in range(vector_elements):
                    at = i32(of_row + run_shared(i32(first + j)))
                    read(square, j * row_words, u32(shared + u32(swizzle(at))))
                to_byte = i64(y_at + row_y(row) + i64(chunk * store_bytes))
                for column in range(across):
                    for word in range(store_words):
                        vector[word] = word_of(square, word, column)
                    store(vector, 0, u64(y + to_byte + i64(column * y_apart)))

    return store_tile


# ---- a vector of y


def _collector(s: Staging, along_y: bool) -> Callable[..., Any]:
    """`collect(found, one, tile, row, first, end, x_at, shared)`: elements of a vector, from shared memory into `found`.

    Bit j of the result tells whether element j belongs to the tile and is to be written. It matters only if vectors are
    stored in parts.
    """
    p, element = s.p, s.p.element_bytes
    vector, in_parts, last = s.store_bytes // element, s.partial_vectors, s.run_elements - 1
    row_shared = digit_sum(s.extents(s.y_rows), [s.shared_strides[i] for i in s.y_rows], s.shared_start)
    run_shared = digit_sum(s.extents(s.y_run), [s.shared_strides[i] for i in s.y_run])
    low = [factor.x * element % s.load_bytes if i in s.x_rows else 0 for i, factor in enumerate(p.factors)]
    row_low = digit_sum(s.extents(s.y_rows), [low[i] for i in s.y_rows])
    run_low = digit_sum(s.extents(s.y_run), [low[i] for i in s.y_run])
    distance, swizzle = _distance(s.load_bytes, s.x_unit), _swizzle(s.swizzle)
    is_read, is_written = elements_inside(s, along_y)
    fills, fill_low, fill_high = bool(p.ragged), p.fill & 0xFFFFFFFF, p.fill >> 32
    two_words = element == 8
    load, put = moves.load_shared(element), _put(element)

    def collect(found: Any, one: Any, tile: Any, row: Any, first: Any, end: Any, x_at: Any, shared: Any) -> Any:
        mask = i32(0)
        of_row, low_of_row = row_shared(row), i32(i32(x_at) + row_low(row))
        for j in range(vector):
            e = i32(first + j)
            if in_parts:
                if (e >= 0) & (e < end):
                    mask |= i32(i32(is_written(tile, row, e)) << j)
                e = i32(max(i32(0), min(e, i32(last))))
            at = i32(of_row + run_shared(e) + distance(i32(low_of_row + run_low(e))))
            load(one, 0, u32(shared + u32(swizzle(at))))
            if fills and not is_read(tile, row, e):
                one[0] = u32(fill_low)
                if two_words:
                    one[1] = u32(fill_high)
            put(found, j, one)
        return mask

    return collect


@functools.cache
def _put(element: int) -> Callable[[Any, Any, Any], None]:
    """`put(vector, j, one)`: sets element j; elements come in order."""
    per_word = max(4 // element, 1)
    bits = 8 * element

    def put_part(vector: Any, j: Any, one: Any) -> None:
        if j % per_word == 0:
            vector[j // per_word] = one[0]
        else:
            vector[j // per_word] |= u32(one[0] << u32(j % per_word * bits))

    def put_word(vector: Any, j: Any, one: Any) -> None:
        vector[j] = one[0]

    def put_two(vector: Any, j: Any, one: Any) -> None:
        vector[2 * j] = one[0]
        vector[2 * j + 1] = one[1]

    return put_part if element < 4 else put_word if element == 4 else put_two


@functools.cache
def _element_of(element: int) -> Callable[[Any, Any, Any], None]:
    """`element_of(one, vector, j)`: the inverse of `_put`."""
    per_word = max(4 // element, 1)
    bits = 8 * element

    def part(one: Any, vector: Any, j: Any) -> None:
        one[0] = u32(vector[j // per_word] >> u32(j % per_word * bits))

    def word(one: Any, vector: Any, j: Any) -> None:
        one[0] = vector[j]

    def two(one: Any, vector: Any, j: Any) -> None:
        one[0] = vector[2 * j]
        one[1] = vector[2 * j + 1]

    return part if element < 4 else word if element == 4 else two


def _distance(width: int, unit: int) -> Sum:
    """`distance(offset)`: bytes from the aligned address before an offset to it, if offsets are multiples of `unit`."""

    def none(offset: Any) -> Any:
        return i32(0)

    def some(offset: Any) -> Any:
        return i32(i32(offset) & i32(width - 1))

    return some if unit < width else none


def _swizzle(shift: int) -> Sum:
    """`swizzle(at)`: where a byte of the tile is in shared memory; see `Staging.swizzle`."""
    turn = shift  # a chunk has 16 bytes: chunk >> shift, times 16, is at >> shift without its lowest bits

    def straight(at: Any) -> Any:
        return at

    def turned(at: Any) -> Any:
        return i32(at ^ ((at >> turn) & (_OCTET * CHUNK_BYTES)))

    return turned if shift else straight
