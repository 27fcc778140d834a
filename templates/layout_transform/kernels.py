"""CUDA kernels that permute the factors of an array: `transpose_kernel` through tiles, `copy_kernel` for common runs.

A tile is A elements of the innermost factor of x by B elements of the innermost factor of y:

    1. Each of the B runs of x is loaded in vectors of 16 bytes and written to a row of shared memory as it is.
    2. A thread reads a piece of V rows by P columns, V elements being a vector of y, and transposes it in registers.
    3. It stores P vectors to runs of y that lie one below the other. Neighbouring threads store neighbouring vectors.

Rows of shared memory are chunks of 16 bytes. Chunk c of row b is at place c ^ swizzle(b), so that the threads of a warp,
which read different rows, read from different banks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import cuda

from schedsearch.backend.ops import shared_base
from schedsearch.templates.layout_transform.permutation import Permutation
from schedsearch.templates.layout_transform.places import inside, limits_of, offsets_of, placer, tile_count
from schedsearch.templates.parts import moves, ptx
from schedsearch.templates.parts.casts import i32, i64, u32, u64

BANK_GROUPS = 8  # of 16 bytes, over all 32 banks
CHUNK_BYTES = 16


# What decides the shape of the code: lengths of local arrays, indices into them, and branches that are left out.
TRANSPOSE_SHAPED_BY = frozenset(
    {
        "held_words", "piece_words", "loads", "load_words", "read_words", "store_words", "pieces", "high", "wide", "late",
        "place.along_y",
    }
)  # fmt: skip
COPY_SHAPED_BY = frozenset({"held_words", "unroll", "words"})


@dataclass(frozen=True)
class Tile:
    """How a block transposes.

    Attributes:
        x_bytes, y_bytes: of a tile's run of x and of its run of y.
        load_bytes, store_bytes: of one access to x and y.
        read_bytes: of one access to a row of shared memory.
        lanes: threads side by side along a run of y.
        threads: of a block.
        copies_late: cp.async instead of loads to registers.
        streaming: lines of y leave the caches first.
        along_y: neighbouring tiles follow one another along y's run, not x's.
    """

    x_bytes: int
    y_bytes: int
    load_bytes: int
    store_bytes: int
    read_bytes: int
    lanes: int
    threads: int
    copies_late: bool
    streaming: bool
    along_y: bool

    def shared_bytes(self, element_bytes: int) -> int:
        return self.x_bytes * (self.y_bytes // element_bytes)

    def count(self, p: Permutation) -> int:
        """Number of tiles."""
        return tile_count(p, self.x_bytes // p.element_bytes, self.y_bytes // p.element_bytes)


def transpose_kernel(p: Permutation, tile: Tile) -> Callable[..., None]:
    """The kernel (x, y), for a permutation that transposes; x and y aligned to `load_bytes` and `store_bytes`.

    Its blocks have `tile.threads` threads and `tile.shared_bytes` bytes of shared memory, and share `tile.count` tiles.
    """
    element, threads = p.element_bytes, tile.threads
    load_bytes, read_bytes, store_bytes = tile.load_bytes, tile.read_bytes, tile.store_bytes
    row_bytes, rows = tile.x_bytes, tile.y_bytes // element
    high, wide = store_bytes // element, read_bytes // element  # V rows by P columns of a thread's piece
    load_columns, row_loads = load_bytes // element, row_bytes // load_bytes
    loads = rows * row_loads // threads
    lanes = min(tile.lanes, rows // high)
    columns_pieces = row_bytes // read_bytes
    pieces = rows // high * columns_pieces // threads
    load_words, read_words, store_words = (moves.words_of(n) for n in (load_bytes, read_bytes, store_bytes))
    held_words, piece_words = loads * load_words, high * read_words
    x_row, x_column, y_column = p.y_run.x, p.x_run.x, p.x_run.y
    tiles, late = tile.count(p), tile.copies_late
    place = placer(p, row_bytes // element, rows, tile.along_y)
    swizzle, word_of = _swizzle(row_bytes, high, lanes), word_down(element, high, read_words)
    load, store = moves.load_global(load_bytes), moves.store_global(store_bytes, tile.streaming)
    load_row, store_row = moves.load_shared(read_bytes), moves.store_shared(load_bytes)
    copy_late = ptx.cp_async(load_bytes if late else CHUNK_BYTES)
    wait = ptx.cp_async_wait(0)

    def transpose(x, y) -> None:  # type: ignore[no-untyped-def]
        held = cuda.local.array(held_words, u32)
        piece = cuda.local.array(piece_words, u32)
        vector = cuda.local.array(4, u32)
        shared, thread = shared_base(), i32(cuda.threadIdx.x)
        for number in range(i32(cuda.blockIdx.x), tiles, i32(cuda.gridDim.x)):
            x_at, y_at, read_rows, written_rows, read_columns, written_columns = place(number)
            x_tile, y_tile = u64(x + x_at * element), u64(y + y_at * element)
            for i in range(loads):
                number_of_load = i32(thread + i * threads)
                row = i32(number_of_load // row_loads)
                column = i32(number_of_load % row_loads * load_columns)
                valid = i32((row < read_rows) & (column < read_columns))
                offset = i64(row) * (x_row * element) + i64(column) * (x_column * element)
                if late:
                    to = u32(shared + u32(row * row_bytes + swizzle(row, column * element)))
                    copy_late(to, u64(x_tile + offset), i32(valid * load_bytes))
                else:
                    load(held, i * load_words, u64(x_tile + offset), valid)
            if late:
                ptx.cp_async_commit()
                wait()
            else:
                for i in range(loads):
                    number_of_load = i32(thread + i * threads)
                    row = i32(number_of_load // row_loads)
                    at_byte = i32(number_of_load % row_loads * load_bytes)
                    to = u32(shared + u32(row * row_bytes + swizzle(row, at_byte)))
                    store_row(held, i * load_words, to)
            cuda.syncthreads()
            for i in range(pieces):
                number_of_piece = i32(thread + i * threads)
                lane, rest = i32(number_of_piece % lanes), i32(number_of_piece // lanes)
                row = i32((rest // columns_pieces * lanes + lane) * high)
                column = i32(rest % columns_pieces * wide)
                for r in range(high):
                    at = i32((row + r) * row_bytes + swizzle(i32(row + r), i32(column * element)))
                    load_row(piece, r * read_words, u32(shared + u32(at)))
                to_row = u64(y_tile + i64(column) * (y_column * element) + i64(row * element))
                for c in range(wide):
                    for word in range(store_words):
                        vector[word] = word_of(piece, word, c)
                    if (row < written_rows) & (column + c < written_columns):
                        store(vector, 0, u64(to_row + u64(c * y_column * element)))
            cuda.syncthreads()

    return transpose


def _swizzle(row_bytes: int, high: int, lanes: int) -> Callable[[Any, Any], Any]:
    """`swizzle(row, byte)`: where a byte of a row of shared memory is. Reads of a warp are `high` rows apart."""
    chunks, apart = row_bytes // CHUNK_BYTES, min(lanes, BANK_GROUPS)
    spread = BANK_GROUPS // apart

    def swizzled(row: Any, byte: Any) -> Any:
        turn = i32(i32(row // high) % apart * spread % chunks)
        return i32(byte ^ (turn * CHUNK_BYTES))

    def straight(row: Any, byte: Any) -> Any:
        return i32(byte)

    return swizzled if chunks > 1 else straight


def word_down(element: int, high: int, row_words: int) -> Callable[[Any, Any, Any], Any]:
    """`word_of(piece, word, column)`: a word of the vector that goes down a column of a piece of `high` rows."""
    pair_low, pair_high = moves.permute_bytes(0x5410), moves.permute_bytes(0x7632)
    byte_pairs_low, byte_pairs_high = moves.permute_bytes(0x5140), moves.permute_bytes(0x7362)

    def of_8_bytes(piece: Any, word: Any, column: Any) -> Any:
        return piece[word // 2 * row_words + 2 * column + word % 2]

    def of_4_bytes(piece: Any, word: Any, column: Any) -> Any:
        return piece[word * row_words + column]

    def of_2_bytes(piece: Any, word: Any, column: Any) -> Any:
        first = 2 * word * row_words + column // 2
        if column % 2 == 0:
            found = pair_low(piece[first], piece[first + row_words])
        else:
            found = pair_high(piece[first], piece[first + row_words])
        return found

    def one_of_2_bytes(piece: Any, word: Any, column: Any) -> Any:
        return u32(piece[column // 2] >> u32(16 * (column % 2)))

    def pairs(piece: Any, first: Any, column: Any) -> Any:
        """Bytes of two rows in turn: those of columns 0 and 1, or 2 and 3, of four."""
        if column % 4 < 2:
            found = byte_pairs_low(piece[first], piece[first + row_words])
        else:
            found = byte_pairs_high(piece[first], piece[first + row_words])
        return found

    def of_bytes(piece: Any, word: Any, column: Any) -> Any:
        first = 4 * word * row_words + column // 4
        upper, lower = pairs(piece, first, column), pairs(piece, first + 2 * row_words, column)
        if column % 2 == 0:
            found = pair_low(upper, lower)
        else:
            found = pair_high(upper, lower)
        return found

    def two_bytes(piece: Any, word: Any, column: Any) -> Any:
        return u32(pairs(piece, column // 4, column) >> u32(16 * (column % 2)))

    def one_byte(piece: Any, word: Any, column: Any) -> Any:
        return u32(piece[column // 4] >> u32(8 * (column % 4)))

    if element == 1:
        return {1: one_byte, 2: two_bytes}.get(high, of_bytes)
    if element == 2:
        return of_2_bytes if high > 1 else one_of_2_bytes
    return of_4_bytes if element == 4 else of_8_bytes


def copy_kernel(
    p: Permutation, vector_bytes: int, threads: int, unroll: int, streaming: bool, x_start: int = 0, y_start: int = 0
) -> Callable[..., None]:
    """The kernel (x, y) that copies runs which are contiguous in both, `unroll` vectors of `vector_bytes` per thread.

    There must be less than 2^31 runs. It serves every permutation if a vector is one element. Its blocks share `copy_items`
    groups of threads * unroll vectors. The first run starts at element `x_start` of x and `y_start` of y.
    """
    element = p.element_bytes
    run = p.y_run
    vectors, run_vectors, per_vector = (
        _vectors(p, vector_bytes),
        run.extent * element // vector_bytes,
        vector_bytes // element,
    )
    groups, words = copy_items(p, vector_bytes, threads, unroll), moves.words_of(vector_bytes)
    held_words = words * unroll
    outer_factors = p.factors[:-1]
    offsets, limits = offsets_of(outer_factors, x_start, y_start), limits_of(p, run, outer_factors)
    read_of, written_of = inside(p, outer_factors, {run.axis})
    position = u64 if groups * threads * unroll >= 2**32 else u32
    run_x = run.x
    load, store = moves.load_global(vector_bytes), moves.store_global(vector_bytes, streaming)

    def copy(x, y) -> None:  # type: ignore[no-untyped-def]
        held = cuda.local.array(held_words, u32)
        places = cuda.local.array(unroll, i64)
        thread = u32(cuda.threadIdx.x)
        for group in range(i32(cuda.blockIdx.x), groups, i32(cuda.gridDim.x)):
            for i in range(unroll):
                number = position(position(group) * position(threads * unroll) + position(thread + i * threads))
                quotient = position(number // position(run_vectors))
                first = i32((number - quotient * position(run_vectors)) * position(per_vector))
                outer = u32(quotient)
                x_at, y_at = offsets(outer)
                read, written = limits(outer, first)
                exists = number < position(vectors)
                valid = i32(exists & read_of(outer) & (read > 0))
                load(held, i * words, u64(x + (x_at + i64(first) * run_x) * element), valid)
                places[i] = (y_at + first) * element
                if not (exists & written_of(outer) & (written > 0)):
                    places[i] = -1
            for i in range(unroll):
                if places[i] >= 0:
                    store(held, i * words, u64(y + places[i]))

    return copy


def copy_items(p: Permutation, vector_bytes: int, threads: int, unroll: int) -> int:
    """Groups of vectors that blocks of `copy_kernel` share."""
    return -(-_vectors(p, vector_bytes) // (threads * unroll))


def _vectors(p: Permutation, vector_bytes: int) -> int:
    elements = 1
    for factor in p.factors:
        elements *= factor.extent
    return elements * p.element_bytes // vector_bytes
