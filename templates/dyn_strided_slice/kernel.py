"""The kernel of dyn_strided_slice for NVIDIA GPUs.

Every thread computes the same description of the slice in a few hundred instructions: positions, steps and extents of all
dimensions, merged where dimensions follow one another in x and in y. What remains are *runs* of neighbours (the innermost
merged dimension) and *rows*, which number the runs. Blocks then loop over tiles of the runs:

    long runs    a tile is a piece of one run; a thread has several vectors of it
    short runs   a tile has several runs; as few neighbouring threads as suffice share one, and take it from several

Runs of neighbours in both x and y that all begin at a multiple of 16 bytes move as vectors of 16 bytes and a rest of single
elements. The kernel decides this by the numbers that it finds, so that one kernel serves every slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda, types

from schedsearch.ops.dtypes import dtype
from schedsearch.ops.dyn_strided_slice import count_of_size, count_to, first_position, sliced_by
from schedsearch.templates.parts import moves
from schedsearch.workload import Workload

VECTOR_BYTES = 16
# A description: 3 numbers for each merged dimension from the innermost on, and 2 for all.
_EXTENT, _X, _Y, _PER_DIMENSION = 0, 1, 2, 3


def slice_kernel(p: Workload, threads: int, unroll: int, streaming: bool) -> Callable[..., None]:
    """The kernel (x, x_extents, begin, end, strides, y, y_extents, *strides of x and y in elements).

    Args:
        threads: of a block, a power of two.
        unroll: vectors that a thread loads before it stores any.
        streaming: lines of y are the first to leave the caches.
    """
    rank, nbytes = len(p.x), dtype(p.dtype).nbytes
    describe = _describe(p)
    copy_vectors = _copy(VECTOR_BYTES, threads, unroll, streaming)
    copy_elements = _copy(nbytes, threads, unroll, streaming)
    write_extents = _write_extents(rank)
    words = _PER_DIMENSION * rank

    def dyn_strided_slice(
        x: Any, x_extents: Any, begin: Any, end: Any, strides: Any, y: Any, y_extents: Any, *steps: Any
    ) -> None:
        slice_ = cuda.local.array(words, types.int64)
        extents = cuda.local.array(rank, types.int64)
        dims, start = describe(slice_, extents, x_extents, begin, end, strides, steps)
        if cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
            write_extents(y_extents, extents)
        rows = types.int64(1)
        aligned = types.int64(x) + start * nbytes | types.int64(y)
        for d in range(1, dims):
            rows *= slice_[3 * d + _EXTENT]
            aligned |= slice_[3 * d + _X] * nbytes | slice_[3 * d + _Y] * nbytes
        run, x_step, y_step = slice_[_EXTENT], slice_[_X], slice_[_Y]
        x_at, y_at = types.int64(x) + start * nbytes, types.int64(y)
        done = types.int64(0)
        if x_step == 1 and y_step == 1 and aligned % VECTOR_BYTES == 0:
            vectors = run * nbytes // VECTOR_BYTES
            done = vectors * VECTOR_BYTES // nbytes
            copy_vectors(slice_, dims, rows, vectors, x_at, y_at, VECTOR_BYTES, VECTOR_BYTES, nbytes)
        if done < run:
            x_at, y_at = x_at + done * x_step * nbytes, y_at + done * y_step * nbytes
            copy_elements(slice_, dims, rows, run - done, x_at, y_at, x_step * nbytes, y_step * nbytes, nbytes)

    return dyn_strided_slice


def _describe(p: Workload) -> Callable[..., Any]:
    """`describe(slice_, extents, x_extents, begin, end, strides, steps) -> (merged dimensions, first element of x)`."""
    shape, bound, entry_of, rank = p.x, p.bound, sliced_by(p.params), len(p.x)
    dynamic, strided, by_size = p.dynamic, p.strided, p.mode == "size"
    read_extent, read_position = _read_integer("int64"), _read_integer(p.index_dtype)

    def describe(slice_: Any, extents: Any, x_extents: Any, begin: Any, end: Any, strides: Any, steps: Any) -> Any:
        start, possible, empty = types.int64(0), True, False
        dims = 0
        for back in range(rank):
            axis = rank - 1 - back
            extent = types.int64(shape[axis])
            if dynamic:
                extent = min(extent, max(read_extent(x_extents, axis), types.int64(0)))
            entry = entry_of[axis]
            first, step, count = types.int64(0), types.int64(1), extent
            if entry >= 0:
                if strided:
                    step = read_position(strides, entry)
                first, last = read_position(begin, entry), read_position(end, entry)
                if by_size:
                    possible = possible and last >= -1
                    count = count_of_size(extent, first, last)
                elif step == 0:
                    possible = False
                else:
                    count = count_to(extent, first, last, step)
                first = first_position(extent, first, step)
            possible = possible and count <= bound[axis]
            empty = empty or count == 0
            extents[axis] = count
            start += first * steps[axis]
            x_step, y_step = step * steps[axis], steps[rank + axis]
            at = 3 * (dims - 1)
            if (
                dims > 0
                and count > 1
                and (x_step == slice_[at + _EXTENT] * slice_[at + _X] and y_step == slice_[at + _EXTENT] * slice_[at + _Y])
            ):
                slice_[at + _EXTENT] *= count
            elif count > 1:
                slice_[at + 3 + _EXTENT], slice_[at + 3 + _X], slice_[at + 3 + _Y] = count, x_step, y_step
                dims += 1
        if dims == 0:
            slice_[_EXTENT], slice_[_X], slice_[_Y] = 1, 1, 1
            dims = 1
        if empty or not possible:
            dims, start, slice_[_EXTENT] = 1, types.int64(0), 0
        if not possible:
            for axis in range(rank):
                extents[axis] = 0
        return dims, start

    return describe


def _copy(width: int, threads: int, unroll: int, streaming: bool) -> Callable[..., None]:
    """`copy(slice_, dims, rows, units, x, y, x_step, y_step, nbytes)` for a block: `units` of `width` bytes of every row.

    x and y are addresses of the first unit of the first row; steps from a unit to the next are in bytes.
    """
    load, store, words = moves.load_global(width), moves.store_global(width, streaming), moves.words_of(width)
    held = unroll * words

    def copy(slice_: Any, dims: Any, rows: Any, units: Any, x: Any, y: Any, x_step: Any, y_step: Any, nbytes: Any) -> None:
        values = cuda.local.array(held, types.uint32)
        across = threads  # that share a run
        while across > 1 and across >> 1 >= units:
            across >>= 1
        abreast = threads // across
        place, column = cuda.threadIdx.x // across, cuda.threadIdx.x % across
        if across == threads:  # pieces of long runs
            span = threads * unroll
            pieces = max((units + span - 1) // span, types.int64(1))
            # The row and the piece of a tile advance by those of the grid: a division for each tile would cost more than it.
            row, piece = types.int64(cuda.blockIdx.x) // pieces, types.int64(cuda.blockIdx.x) % pieces
            rows_on, pieces_on = types.int64(cuda.gridDim.x) // pieces, types.int64(cuda.gridDim.x) % pieces
            while row < rows:
                at = piece * span + column
                x_row, y_row = _row_offsets(slice_, dims, row, nbytes)
                x_row, y_row = x + x_row, y + y_row
                for i in range(unroll):
                    unit = at + i * threads
                    load(values, i * words, types.uint64(x_row + unit * x_step), types.int32(unit < units))
                for i in range(unroll):
                    unit = at + i * threads
                    if unit < units:
                        store(values, i * words, types.uint64(y_row + unit * y_step))
                row, piece = row + rows_on, piece + pieces_on
                if piece >= pieces:
                    row, piece = row + 1, piece - pieces
        else:  # several runs
            places = cuda.local.array(unroll, types.int64)
            span = abreast * unroll
            tiles = (rows + span - 1) // span if column < units else types.int64(0)
            for tile in range(cuda.blockIdx.x, tiles, cuda.gridDim.x):
                first = tile * span + place
                for i in range(unroll):
                    row = first + i * abreast
                    x_row, y_row = _row_offsets(slice_, dims, row, nbytes)
                    places[i] = y + y_row + column * y_step if row < rows else types.int64(0)
                    load(values, i * words, types.uint64(x + x_row + column * x_step), types.int32(row < rows))
                for i in range(unroll):
                    if places[i]:
                        store(values, i * words, types.uint64(places[i]))

    return copy


def _row_offsets(slice_: Any, dims: Any, row: Any, nbytes: Any) -> Any:
    """Bytes from the first run to that of a row, in x and in y."""
    x_at, y_at, rest = types.int64(0), types.int64(0), types.uint32(row)
    for d in range(1, dims):
        extent = types.uint32(slice_[3 * d + _EXTENT])
        quotient = types.uint32(rest // extent)
        digit = types.int64(types.uint32(rest - types.uint32(quotient * extent)))
        x_at, y_at, rest = x_at + digit * slice_[3 * d + _X], y_at + digit * slice_[3 * d + _Y], quotient
    return x_at * nbytes, y_at * nbytes


def _read_integer(name: str) -> Callable[[Any, Any], Any]:
    """`read(address, index)`: an element of an int32 or int64 array as int64."""
    nbytes = dtype(name).nbytes
    load = moves.load_global(nbytes)

    def read_wide(address: Any, index: Any) -> Any:
        words = cuda.local.array(2, types.uint32)
        load(words, 0, types.uint64(types.int64(address) + nbytes * index), types.int32(1))
        return types.int64(types.uint64(words[0]) | types.uint64(words[1]) << types.uint64(32))

    def read_narrow(address: Any, index: Any) -> Any:
        words = cuda.local.array(1, types.uint32)
        load(words, 0, types.uint64(types.int64(address) + nbytes * index), types.int32(1))
        return types.int64(types.int32(words[0]))

    return read_wide if nbytes == 8 else read_narrow


def _write_extents(rank: int) -> Callable[[Any, Any], None]:
    store = moves.store_global(8)

    def write(address: Any, extents: Any) -> None:
        words = cuda.local.array(2, types.uint32)
        for axis in range(rank):
            words[0] = types.uint32(types.uint64(extents[axis]))
            words[1] = types.uint32(types.uint64(extents[axis]) >> types.uint64(32))
            store(words, 0, types.uint64(types.int64(address) + 8 * axis))

    return write
