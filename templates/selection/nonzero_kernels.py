"""The kernels of nonzero on a GPU: they read x in vectors and keep a bit for each element that is not zero."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.nonzero import NonZeroParams
from schedsearch.templates.parts import moves
from schedsearch.templates.parts.casts import i32, i64, u16, u32, u64
from schedsearch.templates.selection.block import EVERY_LANE, WARP, block_sum
from schedsearch.templates.selection.keys import is_nonzero

VECTOR = 16  # bytes of a load


def per_vector(dtype: str) -> int:
    return VECTOR // dtype_of(dtype).nbytes


def vector_bits(dtype: str) -> Callable[[Any, Any], Any]:
    """`bits(words, at)` for kernels: bit i is set if element i of the vector in words[at] ... words[at + 3] is not zero."""
    nbytes, count, words_each = dtype_of(dtype).nbytes, per_vector(dtype), max(dtype_of(dtype).nbytes // 4, 1)
    in_word, last, holds = 4 // min(nbytes, 4), words_each - 1, is_nonzero(dtype)
    whole = (1 << 8 * min(nbytes, 4)) - 1

    def bits(words: Any, at: Any) -> Any:
        found = u32(0)
        for i in range(count):
            shift = 8 * nbytes * (i % in_word)
            element = i64(u32(words[at + i // in_word * words_each] >> u32(shift)) & whole)
            if last:  # of 64 bits
                element |= i64(words[at + i * words_each + last]) << i64(32)
            found |= u32(holds(element)) << u32(i)
        return u32(found)

    return bits


def bits_reader(p: NonZeroParams, threads: int, each: int) -> Callable[[Any, Any, Any, Any], None]:
    """`read(x, address, base, found)` for kernels: found[e] are the bits of the vector base + e * threads + thread.

    All loads are in flight together. `address` is that of x.
    """
    size, count, bits, holds = math.prod(p.x), per_vector(p.dtype), vector_bits(p.dtype), is_nonzero(p.dtype)
    load, words_of_all, some = moves.load_global(VECTOR), each * VECTOR // 4, math.prod(p.x) % per_vector(p.dtype)

    def read(x: Any, address: Any, base: Any, found: Any) -> None:
        words = cuda.local.array(words_of_all, u32)
        for e in range(each):
            at = i64(base + e * threads + cuda.threadIdx.x)
            load(words, e * (VECTOR // 4), u64(address + at * VECTOR), i32((at + 1) * count <= size))
        for e in range(each):
            found[e] = bits(words, e * (VECTOR // 4))
            if some:  # the last vector is not whole
                first = i64((base + e * threads + cuda.threadIdx.x) * count)
                if (first < size) & (first + count > size):
                    for i in range(some):
                        found[e] = u32(found[e] | (u32(holds(x[first + i])) << u32(i)))

    return read


def count_kernel(p: NonZeroParams, part: int, each: int, threads: int) -> Callable[..., None]:
    """The kernel (x, address of x, counts): a block counts the elements of its part, `part` vectors, that are not zero."""
    vectors = -(-math.prod(p.x) // per_vector(p.dtype))
    read, total, tile = bits_reader(p, threads, each), block_sum(threads), threads * each

    def count(x, address, counts) -> None:  # type: ignore[no-untyped-def]
        partial = cuda.shared.array(threads, i32)
        bits = cuda.local.array(each, u32)
        block, found = i64(cuda.blockIdx.x), i32(0)
        for base in range(block * part, min((block + 1) * part, vectors), tile):
            read(x, address, base, bits)
            for e in range(each):
                found += i32(cuda.popc(bits[e]))
        found = total(found, partial)
        if cuda.threadIdx.x == 0:
            counts[block] = found

    return count


def warp_places(counts: Any, before: Any, each: Any) -> None:
    """For kernels: before[e] becomes the sum of the lanes' counts[e] up to and with the own one."""
    lane = i32(cuda.threadIdx.x % WARP)
    for e in range(each):
        own, distance = i32(counts[e]), i32(1)
        while distance < WARP:
            other = i32(cuda.shfl_up_sync(EVERY_LANE, own, distance))
            own = i32(own + other) if lane >= distance else own
            distance = i32(2 * distance)
        before[e] = own


def place_kernel(p: NonZeroParams, part: int, each: int, threads: int) -> Callable[..., None]:
    """The kernel (x, address of x, counts, y, y_extents): a block writes the places of the elements of its part that are not
    zero.

    It lists them in shared memory, `each` vectors of a thread at a time, so that neighbours in y are written together.
    """
    shape, size, rank, count = p.x, math.prod(p.x), len(p.x), per_vector(p.dtype)
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(rank))
    vectors = -(-size // count)
    blocks, tile, warps = -(-vectors // part), threads * each, threads // WARP
    groups = each * warps
    read, total = bits_reader(p, threads, each), block_sum(threads)

    def places(x, address, counts, y, y_extents) -> None:  # type: ignore[no-untyped-def]
        listed = cuda.shared.array(0, u16)
        partial = cuda.shared.array(threads, i32)
        of_warps = cuda.shared.array(groups, i32)
        bits = cuda.local.array(each, u32)
        own = cuda.local.array(each, i32)
        upto = cuda.local.array(each, i32)
        thread, block = i32(cuda.threadIdx.x), i64(cuda.blockIdx.x)
        warp, lane = thread // WARP, thread % WARP
        before = i32(0)
        for other in range(thread, block, threads):
            before += i32(counts[other])
        at = i64(total(before, partial))
        if (block == blocks - 1) & (thread == 0):
            y_extents[0] = rank
            y_extents[1] = at + counts[block]
        for base in range(block * part, min((block + 1) * part, vectors), tile):
            read(x, address, base, bits)
            for e in range(each):
                own[e] = i32(cuda.popc(bits[e]))
            warp_places(own, upto, each)
            if lane == WARP - 1:
                for e in range(each):
                    of_warps[e * warps + warp] = upto[e]
            cuda.syncthreads()
            kept = i32(0)
            for e in range(each):
                to = i32(kept + upto[e] - own[e])
                for other in range(warps):
                    in_warp = i32(of_warps[e * warps + other])
                    to = i32(to + in_warp) if other < warp else to
                    kept = i32(kept + in_warp)
                rest, first = u32(bits[e]), i32((e * threads + thread) * count)
                while rest != 0:
                    listed[u32(to)] = u16(first + cuda.ffs(rest) - 1)
                    rest = u32(rest & (rest - 1))
                    to = i32(to + 1)
            cuda.syncthreads()
            for i in range(thread, kept, threads):
                place = u32(base * count + listed[i])
                for axis in range(rank):
                    y[u64(axis * size + at + i)] = place // strides[axis]
                    place = u32(place % strides[axis])
            at = i64(at + kept)

    return places
