"""The kernel of dyn_strided_slice for NVIDIA GPUs.

A block first describes the slice in shared memory. A thread for each dimension finds positions, step and extent. Then
dimensions are merged that follow one another in x and in y. What remains are *runs* of neighbours (the innermost merged
dimension), and dimensions that number the runs. Runs consist of *units*: vectors as wide as positions allow, and a rest of
single elements. The threads of all blocks share the units of all runs, numbered through, so that no thread is idle because
runs are short.

The digits of a unit's number are its place along each dimension. Their extents are known at run time only, and a division by
such a number takes many instructions. So a block divides once for each dimension, 2**63 by its extent, and multiplies from
then on: number // extent = number * ceil(2**63 / extent) >> 63, which is exact below 2**31.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.ops.dtypes import dtype
from schedsearch.ops.dyn_strided_slice import DynStridedSliceParams, count_of_size, count_to, first_position, sliced_by
from schedsearch.templates.parts import moves
from schedsearch.templates.parts.casts import i32, i64, u32, u64
from schedsearch.workload import Workload

VECTOR_BYTES = 16
EXACT_BELOW = 2**31  # units; more are divided by 64-bit divisions
# Instead of a width, vectors of 16 bytes of y that x has otherwise:
_WINDOWS = 32  # anywhere; runs of y may begin anywhere, too
_GATHERED = 64  # element by element
_WINDOWS_AT_ONCE = 2  # such vectors that a thread loads before it stores any
_LONG_RUN = 16  # vectors; shorter runs that are no multiple of a vector take a narrower one

# The description, in words of int64.
_DIMS, _KIND_COUNT = 0, 1  # merged dimensions, none if the slice is impossible; kinds of units
_KINDS = 2  # vectors and single elements, four words each:
_UNITS, _WIDTH, _X, _Y = 0, 1, 2, 3  # of all runs, in bytes, and the addresses of the first one
_RUN_BYTES, _X_FIRST, _X_END = 10, 11, 12  # of a run; the addresses between which all runs of x lie
_ENTRIES = 13  # the run in vectors, outer merged dimensions, the run's rest, and then the dimensions of x, four words each:
_EXTENT, _FACTOR, _X_STEP, _Y_STEP = 0, 1, 2, 3  # the factor is for division, or a dimension's first element


def exact_by_factor(p: Workload[DynStridedSliceParams]) -> bool:
    """Whether all numbers of units are small enough for division by multiplication."""
    return bool(math.prod(p.params.bound) < EXACT_BELOW)


def slice_kernel(p: Workload[DynStridedSliceParams], threads: int, unroll: int, streaming: bool) -> Callable[..., None]:
    """The kernel (x, x_extents, begin, end, strides, y, y_extents, *strides of x and y in elements).

    Args:
        threads: of a block, more than x has dimensions.
        unroll: units that a thread loads before it stores any.
        streaming: lines of y are the first to leave the caches.
    """
    rank = len(p.params.x)
    words = _ENTRIES + 4 * (2 * rank + 1)
    describe_axis, merge, finish = _describe_axis(p), _merge(p), _finish(rank)
    copy = _copy(p, threads, unroll, streaming)

    def dyn_strided_slice(
        x: Any, x_extents: Any, begin: Any, end: Any, strides: Any, y: Any, y_extents: Any, *steps: Any
    ) -> None:
        shared, thread = cuda.shared.array(words, i64), i64(cuda.threadIdx.x)
        if thread < rank:
            describe_axis(shared, thread, x_extents, begin, end, strides, steps)
        cuda.syncthreads()
        if thread == 0:
            merge(shared, x, y)
        cuda.syncthreads()
        if thread <= rank:
            finish(shared, thread, y_extents)
        cuda.syncthreads()
        for kind in range(shared[_KIND_COUNT]):
            copy(shared, kind)

    return dyn_strided_slice


# ---- the description


def _describe_axis(workload: Workload[DynStridedSliceParams]) -> Callable[..., None]:
    """`describe_axis(shared, axis, x_extents, begin, end, strides, steps)`: the extent is -1 if it is impossible."""
    p = workload.params
    shape, bound, entry_of, rank = p.x, p.bound, sliced_by(p), len(p.x)
    dynamic, strided, by_size = p.dynamic, p.strided, p.mode == "size"
    read_extent, read_position = _read_integer("int64"), _read_integer(p.index_dtype)
    axes = _ENTRIES + 4 * (rank + 1)

    def describe_axis(shared: Any, axis: Any, x_extents: Any, begin: Any, end: Any, strides: Any, steps: Any) -> None:
        extent, most, entry = i64(0), i64(0), i64(0)
        x_step, y_step = i64(0), i64(0)
        for d in range(rank):
            if d == axis:
                extent, most, entry = i64(shape[d]), i64(bound[d]), i64(entry_of[d])
                x_step, y_step = i64(steps[d]), i64(steps[rank + d])
        if dynamic:
            extent = min(extent, max(read_extent(x_extents, axis), i64(0)))
        first, step, count, possible = i64(0), i64(1), extent, True
        if entry >= 0:
            first, last = read_position(begin, entry), read_position(end, entry)
            if strided:
                step = read_position(strides, entry)
            if by_size:
                possible = last >= -1
                count = count_of_size(extent, first, last)
            elif step == 0:
                possible = False
            else:
                count = count_to(extent, first, last, step)
            first = first_position(extent, first, step)
        possible = possible and count <= most
        at = axes + 4 * axis
        shared[at + _EXTENT], shared[at + _FACTOR] = count if possible else i64(-1), first * x_step
        shared[at + _X_STEP], shared[at + _Y_STEP] = step * x_step, y_step

    return describe_axis


def _merge(p: Workload[DynStridedSliceParams]) -> Callable[[Any, Any, Any], None]:
    """`merge(shared, x, y)`: the merged dimensions, and the units of runs."""
    rank, nbytes = len(p.params.x), dtype(p.params.dtype).nbytes
    axes, last = _ENTRIES + 4 * (rank + 1), _ENTRIES + 4 * rank

    def merge(shared: Any, x: Any, y: Any) -> None:
        start, possible, empty, dims = i64(0), True, False, i64(0)
        rows = i64(1)  # runs; and all bits of where they begin, but for the first one in x
        x_places, y_places = i64(0), i64(y)
        below, above = i64(0), i64(0)  # bytes of x between the first run and the outermost ones
        extent, x_step, y_step = i64(1), i64(1), i64(1)  # the dimension that may still grow
        run, x_run, y_run = i64(1), i64(1), i64(1)
        for back in range(rank + 1):
            count, first, x_next, y_next = i64(0), i64(0), i64(0), i64(0)
            if back < rank:
                at = axes + 4 * (rank - 1 - back)
                count, first, x_next, y_next = shared[at], shared[at + _FACTOR], shared[at + _X_STEP], shared[at + _Y_STEP]
                possible, empty, start = possible and count >= 0, empty or count == 0, start + first
            if back < rank and (count == 1 or extent == 1):
                if count != 1:
                    extent, x_step, y_step = count, x_next, y_next
            elif back < rank and x_next == extent * x_step and y_next == extent * y_step:
                extent *= count
            else:
                if dims == 0:
                    run, x_run, y_run = extent, x_step, y_step
                else:
                    at = _ENTRIES + 4 * dims
                    shared[at], shared[at + _X_STEP], shared[at + _Y_STEP] = extent, x_step * nbytes, y_step * nbytes
                    span = (extent - 1) * x_step * nbytes
                    below, above = below + min(span, i64(0)), above + max(span, i64(0))
                    rows, x_places, y_places = rows * extent, x_places | x_step * nbytes, y_places | y_step * nbytes
                dims += 1
                extent, x_step, y_step = count, x_next, y_next
        if empty or not possible:
            start, run = i64(0), i64(0)
        x_at, y_at, run_bytes = i64(x) + start * nbytes, i64(y), run * nbytes
        width, vectors = i64(nbytes), i64(0)
        places = x_places | y_places
        is_long = run_bytes >= _LONG_RUN * VECTOR_BYTES
        if x_run == 1 and y_run == 1:
            if is_long and (places | x_at) % VECTOR_BYTES != 0:
                most = i64(0) if y_places % VECTOR_BYTES == 0 else i64(VECTOR_BYTES - nbytes)
                width, vectors = i64(_WINDOWS), (run_bytes + most + VECTOR_BYTES - 1) // VECTOR_BYTES
            else:
                for wider in (2, 4, 8, 16):
                    fits = run_bytes % wider == 0 or run_bytes >= _LONG_RUN * wider
                    if wider > nbytes and fits and (places | x_at) % wider == 0:
                        width, vectors = i64(wider), run_bytes // wider
        fits = run_bytes % VECTOR_BYTES == 0 or is_long
        if y_run == 1 and (x_run != 1 or width < 8) and fits and y_places % VECTOR_BYTES == 0:
            width, vectors = i64(_GATHERED), run_bytes // VECTOR_BYTES
        step = min(width, i64(VECTOR_BYTES))
        done = vectors * step
        rest = max(run - done // nbytes, i64(0))
        shared[_DIMS] = dims if possible else i64(0)
        shared[_KIND_COUNT] = i64(1) if rest == 0 else i64(2)
        shared[_RUN_BYTES], shared[_X_FIRST], shared[_X_END] = run_bytes, x_at + below, x_at + above + run_bytes
        shared[_KINDS + _UNITS], shared[_KINDS + _WIDTH] = vectors * rows, width
        shared[_KINDS + _X], shared[_KINDS + _Y] = x_at, y_at
        shared[_KINDS + 4 + _UNITS], shared[_KINDS + 4 + _WIDTH] = rest * rows, i64(nbytes)
        shared[_KINDS + 4 + _X], shared[_KINDS + 4 + _Y] = x_at + done * x_run, y_at + done
        shared[_ENTRIES], shared[_ENTRIES + _X_STEP], shared[_ENTRIES + _Y_STEP] = vectors, step * x_run, step
        shared[last], shared[last + _X_STEP], shared[last + _Y_STEP] = rest, x_run * nbytes, y_run * nbytes

    return merge


def _finish(rank: int) -> Callable[[Any, Any, Any], None]:
    """`finish(shared, number, y_extents)`: the factor of an entry, and an extent of y."""
    write_integer, axes = _write_integer(), _ENTRIES + 4 * (rank + 1)

    def finish(shared: Any, number: Any, y_extents: Any) -> None:
        dims = shared[_DIMS]
        if dims > 1 and (number < dims - 1 or number == rank):  # the last digit is what is left
            divisor = u64(max(shared[_ENTRIES + 4 * number], i64(1)))
            shared[_ENTRIES + 4 * number + _FACTOR] = i64(u64(2**63 - 1) // divisor) + 1
        if number < rank and cuda.blockIdx.x == 0:
            write_integer(y_extents, number, shared[axes + 4 * number] if dims > 0 else i64(0))

    return finish


# ---- copying


def _copy(
    workload: Workload[DynStridedSliceParams], threads: int, unroll: int, streaming: bool
) -> Callable[[Any, Any], None]:
    """`copy(shared, kind)`: this block's share of the units of a kind."""
    p = workload.params
    rank, nbytes, span = len(p.x), dtype(p.dtype).nbytes, threads * unroll
    short = max(math.prod(p.x), math.prod(p.bound)) * nbytes + 2 * VECTOR_BYTES < 2**31
    offset = i32 if short else i64  # within x and within y, in bytes
    number, divide = (u32, _quotient) if exact_by_factor(workload) else (u64, _slow_quotient)
    move = _move(nbytes, offset, number, threads, unroll, streaming)
    for width in (2, 4, 8, 16):
        if width > nbytes:
            move = _choose(width, _move(width, offset, number, threads, unroll, streaming), move)
    move = _choose(_WINDOWS, _move_windows(nbytes, number, threads, unroll, streaming), move)
    move = _choose(_GATHERED, _move_gathered(nbytes, rank, number, threads, unroll, streaming), move)

    def copy(shared: Any, kind: Any) -> None:
        rest = cuda.local.array(unroll, number)
        x_at = cuda.local.array(unroll, offset)
        y_at = cuda.local.array(unroll, offset)
        within = cuda.local.array(unroll, offset)  # a run of y, in bytes
        kind_at, entry = _KINDS + 4 * kind, _ENTRIES + 4 * rank * kind
        units, width = number(shared[kind_at + _UNITS]), shared[kind_at + _WIDTH]
        x, y, dims = shared[kind_at + _X], shared[kind_at + _Y], shared[_DIMS]
        first = number(number(cuda.blockIdx.x) * number(span) + number(cuda.threadIdx.x))
        while first < units:
            for i in range(unroll):
                rest[i], x_at[i], y_at[i] = number(first + number(i * threads)), offset(0), offset(0)
            at = i64(entry)
            for d in range(1, dims):
                extent, factor = shared[at], shared[at + _FACTOR]
                x_step, y_step = shared[at + _X_STEP], shared[at + _Y_STEP]
                for i in range(unroll):
                    quotient = number(divide(rest[i], extent, factor))
                    digit = offset(number(rest[i] - number(quotient * number(extent))))
                    x_at[i] = offset(x_at[i] + offset(digit * offset(x_step)))
                    y_at[i] = offset(y_at[i] + offset(digit * offset(y_step)))
                    rest[i] = quotient
                    if d == 1:
                        within[i] = y_at[i]
                at = i64(_ENTRIES + 4 * d)
            x_step, y_step = shared[at + _X_STEP], shared[at + _Y_STEP]
            for i in range(unroll):
                x_at[i] = offset(x_at[i] + offset(offset(rest[i]) * offset(x_step)))
                y_at[i] = offset(y_at[i] + offset(offset(rest[i]) * offset(y_step)))
                if dims == 1:
                    within[i] = y_at[i]
            move(width, x, y, x_at, y_at, within, first, units, shared)
            first = number(first + number(number(cuda.gridDim.x) * number(span)))

    return copy


def _move(width: int, offset: Any, number: Any, threads: int, unroll: int, streaming: bool) -> Callable[..., None]:
    """`move(_, x, y, x_at, y_at, within, first, units, shared)`: a thread's units, of `width` bytes, if they exist."""
    load, store, words = moves.load_global(width), moves.store_global(width, streaming), moves.words_of(width)
    held = unroll * words

    def move(_: Any, x: Any, y: Any, x_at: Any, y_at: Any, __: Any, first: Any, units: Any, ___: Any) -> None:
        values = cuda.local.array(held, u32)
        for i in range(unroll):
            exists = i32(number(first + number(i * threads)) < units)
            load(values, i * words, u64(x + i64(x_at[i])), exists)
        for i in range(unroll):
            if number(first + number(i * threads)) < units:
                store(values, i * words, u64(y + i64(y_at[i])))

    return move


def _move_windows(nbytes: int, number: Any, threads: int, unroll: int, streaming: bool) -> Callable[..., None]:
    """As `_move` for windows: 16 bytes of y at a multiple of 16. A window that lies in its run is put together from two
    vectors at multiples of 16 bytes of x. Of one that is partly in its run, the elements in it move one by one.
    """
    load, store, words = moves.load_global(VECTOR_BYTES), moves.store_global(VECTOR_BYTES, streaming), VECTOR_BYTES // 4
    load_element, store_element = moves.load_global(nbytes), moves.store_global(nbytes)
    element_words, at_once = moves.words_of(nbytes), min(unroll, _WINDOWS_AT_ONCE)
    held = at_once * 2 * words

    def move_part(source: Any, to: Any, begin: Any, end: Any) -> None:
        parts = cuda.local.array(element_words, u32)
        for at in range(begin, end, nbytes):
            load_element(parts, 0, u64(source + i64(at)), i32(1))
            store_element(parts, 0, u64(to + i64(at)))

    def move(_: Any, x: Any, y: Any, x_at: Any, y_at: Any, within: Any, first: Any, units: Any, shared: Any) -> None:
        pairs = cuda.local.array(held, u32)
        vector = cuda.local.array(words, u32)
        whole = cuda.local.array(at_once, i32)
        run_bytes, x_first, x_end = shared[_RUN_BYTES], shared[_X_FIRST], shared[_X_END]
        for begin in range(0, unroll, at_once):
            for i in range(at_once):
                head = i64(i64(y + i64(y_at[begin + i])) & i64(VECTOR_BYTES - 1))
                source = i64(x + i64(x_at[begin + i]) - head)
                shift = i64(source & i64(VECTOR_BYTES - 1))
                near = i64(source - shift)
                start = i64(i64(within[begin + i]) - head)
                is_whole = (start >= 0) & (start + VECTOR_BYTES <= run_bytes)
                is_whole = is_whole & ((shift == 0) | ((near >= x_first) & (near + 2 * VECTOR_BYTES <= x_end)))
                whole[i] = i32(is_whole & (number(first + number((begin + i) * threads)) < units))
                load(pairs, 2 * i * words, u64(near), whole[i])
                far = i32(whole[i] & i32(shift != 0))
                load(pairs, (2 * i + 1) * words, u64(near + VECTOR_BYTES), far)
            for i in range(at_once):
                head = i64(i64(y + i64(y_at[begin + i])) & i64(VECTOR_BYTES - 1))
                source = i64(x + i64(x_at[begin + i]) - head)
                to = i64(y + i64(y_at[begin + i]) - head)
                if whole[i] != 0:
                    shift = u32(u32(u64(source)) & u32(VECTOR_BYTES - 1))
                    bits = u64(u32(u32(shift % u32(4)) * u32(8)))
                    by_one, by_two = u32(shift & u32(4)) != 0, u32(shift & u32(8)) != 0
                    for word in range(words):
                        low = _word(pairs, 2 * i * words + word, by_one, by_two)
                        high = _word(pairs, 2 * i * words + word + 1, by_one, by_two)
                        both = u64(u64(low) | u64(u64(high) << u64(32)))
                        vector[word] = u32(u64(both >> bits))
                    store(vector, 0, u64(to))
                elif number(first + number((begin + i) * threads)) < units:
                    start = i64(i64(within[begin + i]) - head)
                    move_part(source, to, max(-start, i64(0)), min(run_bytes - start, i64(VECTOR_BYTES)))

    return move


def _word(words: Any, at: Any, by_one: Any, by_two: Any) -> Any:
    """words[at + by_one + 2 * by_two] by selections: registers have no run-time index."""
    near = words[at + 1] if by_one else words[at]
    far = words[at + 3] if by_one else words[at + 2]
    return far if by_two else near


def _move_gathered(nbytes: int, rank: int, number: Any, threads: int, unroll: int, streaming: bool) -> Callable[..., None]:
    """As `_move` for vectors of 16 bytes, from elements that are apart in x."""
    load, store = moves.load_global(nbytes), moves.store_global(VECTOR_BYTES, streaming)
    count, words = VECTOR_BYTES // nbytes, moves.words_of(nbytes)
    held, in_word, bits = count * words, max(4 // nbytes, 1), 8 * nbytes

    def move(_: Any, x: Any, y: Any, x_at: Any, y_at: Any, __: Any, first: Any, units: Any, shared: Any) -> None:
        x_step = shared[_ENTRIES + 4 * rank + _X_STEP]
        parts = cuda.local.array(held, u32)
        vector = cuda.local.array(4, u32)
        for i in range(unroll):
            if number(first + number(i * threads)) < units:
                source = i64(x + i64(x_at[i]))
                for element in range(count):
                    load(parts, element * words, u64(source + element * x_step), i32(1))
                for word in range(4):
                    packed = u32(0)
                    for place in range(in_word):
                        packed = u32(packed | u32(parts[word * in_word + place] << u32(bits * place)))
                    vector[word] = packed
                store(vector, 0, u64(y + i64(y_at[i])))

    return move


def _choose(width: int, move: Callable[..., None], otherwise: Callable[..., None]) -> Callable[..., None]:
    def chosen(found: Any, x: Any, y: Any, x_at: Any, y_at: Any, within: Any, first: Any, units: Any, shared: Any) -> None:
        if found == width:
            move(found, x, y, x_at, y_at, within, first, units, shared)
        else:
            otherwise(found, x, y, x_at, y_at, within, first, units, shared)

    return chosen


def _quotient(value: Any, extent: Any, factor: Any) -> Any:
    """value // extent; factor = ceil(2**63 / extent)."""
    low, high = u64(u32(factor)), u64(u64(factor) >> u64(32))
    wide = u64(value)
    below = u64(u64(wide * low) >> u64(32))
    return u32(u64(u64(wide * high) + below) >> u64(31))


def _slow_quotient(value: Any, extent: Any, factor: Any) -> Any:
    return u64(value // u64(max(extent, i64(1))))


# ---- integers in global memory


def _read_integer(name: str) -> Callable[[Any, Any], Any]:
    """`read(address, index)`: an element of an int32 or int64 array as int64."""
    nbytes = dtype(name).nbytes
    load = moves.load_global(nbytes)

    def read_wide(address: Any, index: Any) -> Any:
        words = cuda.local.array(2, u32)
        load(words, 0, u64(i64(address) + nbytes * index), i32(1))
        return i64(u64(words[0]) | u64(words[1]) << u64(32))

    def read_narrow(address: Any, index: Any) -> Any:
        words = cuda.local.array(1, u32)
        load(words, 0, u64(i64(address) + nbytes * index), i32(1))
        return i64(i32(words[0]))

    return read_wide if nbytes == 8 else read_narrow


def _write_integer() -> Callable[[Any, Any, Any], None]:
    """`write(address, index, value)`: an element of an int64 array."""
    store = moves.store_global(8)

    def write(address: Any, index: Any, value: Any) -> None:
        words = cuda.local.array(2, u32)
        words[0] = u32(u64(value))
        words[1] = u32(u64(value) >> u64(32))
        store(words, 0, u64(i64(address) + 8 * index))

    return write
