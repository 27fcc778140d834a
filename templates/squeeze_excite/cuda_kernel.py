"""The kernel of squeeze_excite_cuda: a cluster of blocks for each image.

A thread has some pixels of a vector of channels. It adds them up, and multiplies them by their gates at the end; in between
they stay in shared memory, if they fit. Blocks of a cluster share channels and pixels. What each of them knows after a step,
it writes to the shared memory of all: its parts of the means, then its share of the squeezed channels.

    bring the block's share of the biases and weights to shared memory, wait for the kernel in front
    add up pixels         -> means of all channels in each block
    multiply by `reduce`  -> squeezed channels in each block
    multiply by `expand`  -> gates of the block's channels
    multiply pixels by gates

Source: PTX ISA, "barrier.cluster", "mapa", "st.shared::cluster".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.backend.ops import shared_base
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.squeeze_excite import SqueezeExciteParams
from schedsearch.templates.parts import cluster, moves, ptx, vectors
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64
from schedsearch.templates.parts.groups import WARP, over_group
from schedsearch.templates.parts.vectors import bits_of, float_of
from schedsearch.templates.squeeze_excite.plan import WORD, Plan

_AT_ONCE = 4  # vectors of x that a thread loads before it adds up the first; rows of weights that it multiplies together


def squeeze_kernel(plan: Plan) -> Callable[..., None]:
    """The kernel (x, reduce, reduce_bias, expand, expand_bias, y); addresses are u64."""
    p, own = plan.p, plan.own
    blocks, parts, threads, several, brings = plan.cluster, plan.channel_parts, plan.threads, plan.cluster > 1, plan.brings
    vector, vectors_of_image, own_vectors, own_channels = plan.vector, p.c // plan.vector, own["vectors"], plan.channels
    channels, pixels, own_pixels = p.c, p.h * p.w, own["pixels"]
    image_bytes, share = pixels * channels * dtype_of(p.dtype).nbytes, f32(1 / pixels)
    sums_at, means_at, gates_at = (plan.regions[name] for name in ("sums", "means", "gates"))
    expand_bias_at, commit, bring_biases = plan.regions["expand_bias"], ptx.cp_async_commit, _bring_biases(plan)
    bring, add_up, multiply = _bring(plan), _add_up(plan), _multiply(plan)
    squeeze, excite = _squeeze(plan), _excite(plan)
    pool_lanes, gate_lanes = min(own["lanes"], own_pixels), min(own["lanes"], p.squeezed)
    fold_pool, pool_rows = _fold(plan, pool_lanes)
    fold_gate, gate_rows = _fold(plan, gate_lanes)
    tell, sync, collect, gate, wait_for_copies = _tell(plan), _sync(plan), _collect(plan), _gate(p), ptx.cp_async_wait(0)

    def squeeze_excite(x: Any, reduce: Any, reduce_bias: Any, expand: Any, expand_bias: Any, y: Any) -> None:
        shared = shared_base()
        thread, block = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x)
        rank = i32(u32(block) % u32(blocks))
        part, pixel_part = i32(u32(rank) % u32(parts)), i32(u32(rank) // u32(parts))
        first_vector = i32(part * own_vectors)
        v, lane = i32(u32(thread) % u32(own_vectors)), i32(u32(thread) // u32(own_vectors))
        exists = first_vector + v < vectors_of_image
        if several:
            cluster.cluster_arrive()  # all blocks run before one writes to the memory of another
        bring_biases(shared, reduce_bias, expand_bias, thread, rank, first_vector)
        if brings:
            bring(shared, reduce, expand, thread, lane, v, exists, rank, first_vector)
        commit()
        ptx.wait_for_predecessor()

        # ---- means
        first_pixel = i32(pixel_part * own_pixels)
        count = i32(min(own_pixels, pixels - first_pixel))  # may be negative for the last block
        at = u64(i64(u32(block) // u32(blocks)) * image_bytes)
        own_x = u64(x + at)
        add_up(shared, own_x, lane, v, exists, first_vector, first_pixel, count)
        cuda.syncthreads()
        fold_pool(u32(shared + sums_at), thread)
        if several:
            cluster.cluster_wait()
        item = i32(thread)
        while item < i32(own_channels * blocks):
            to, i = i32(u32(item) // u32(own_channels)), i32(u32(item) % u32(own_channels))
            channel = i32(first_vector * vector + i)
            if channel < channels:
                total = f32(0)
                for row in range(pool_rows):
                    total = f32(total + ptx.load_shared_f32(u32(shared + sums_at + (row * own_channels + i) * 4)))
                tell(u32(shared + means_at + (pixel_part * channels + channel) * 4), f32(total * share), to)
            item = i32(item + threads)
        wait_for_copies()
        sync()

        # ---- both products
        collect(shared, thread)
        squeeze(shared, reduce, thread, rank)
        sync()
        excite(shared, expand, thread, lane, v, exists, first_vector)
        cuda.syncthreads()
        fold_gate(u32(shared + sums_at), thread)
        i = i32(thread)
        while i < i32(own_channels):
            channel = i32(first_vector * vector + i)
            if channel < channels:
                total = ptx.load_shared_f32(u32(shared + expand_bias_at + i * 4))
                for row in range(gate_rows):
                    total = f32(total + ptx.load_shared_f32(u32(shared + sums_at + (row * own_channels + i) * 4)))
                ptx.store_shared_f32(u32(shared + gates_at + i * 4), gate(total))
            i = i32(i + threads)
        cuda.syncthreads()

        # ---- products with the gates
        multiply(shared, own_x, u64(y + at), lane, v, exists, first_vector, first_pixel, count)

    return squeeze_excite


# --- Between blocks -------------------------------------------------------------------------------------------------------
def _tell(plan: Plan) -> Callable[[Any, Any, Any], None]:
    """tell(shared, number, rank): writes a number to the memory of a block of the cluster."""

    def tell(shared: Any, number: Any, rank: Any) -> None:
        cluster.store_at_peer(cluster.map_shared(shared, u32(rank)), number)

    def keep(shared: Any, number: Any, rank: Any) -> None:
        ptx.store_shared_f32(shared, number)

    return tell if plan.cluster > 1 else keep


def _sync(plan: Plan) -> Callable[[], None]:
    """Waits for all threads of the cluster; what they wrote is seen by all."""

    def sync_block() -> None:
        cuda.syncthreads()

    def sync_cluster() -> None:
        cluster.cluster_sync()

    return sync_cluster if plan.cluster > 1 else sync_block


# --- Steps ----------------------------------------------------------------------------------------------------------------
def _bring(plan: Plan) -> Callable[..., None]:
    """bring(shared, reduce, expand, thread, lane, v, exists, rank, first_vector): starts to copy the block's rows of
    `reduce`, and its columns of `expand`, word by word."""
    p, own, threads, nbytes = plan.p, plan.own, plan.threads, plan.vector_bytes
    copy, reduce_at, expand_at = ptx.cp_async(nbytes), plan.regions["reduce"], plan.regions["expand"]
    row_bytes, own_row_bytes = p.c // plan.vector * nbytes, own["vectors"] * nbytes
    rows, all_rows, lanes = own["squeezed"], p.squeezed, own["lanes"]

    def bring(
        shared: Any, reduce: Any, expand: Any, thread: Any, lane: Any, v: Any, exists: Any, rank: Any, first_vector: Any
    ) -> None:  # fmt: skip
        first = i32(rank * rows)
        stop = i32(min(rows, all_rows - first) * row_bytes)  # negative for blocks without a row
        source = u64(reduce + u64(i64(first) * row_bytes))
        i = i32(thread * nbytes)
        while i < stop:
            copy(u32(shared + reduce_at + i), u64(source + u64(u32(i))), nbytes)
            i = i32(i + threads * nbytes)
        if exists & (lane < lanes):
            source = u64(expand + u64(i64(first_vector + v) * nbytes))
            j = i32(lane)
            while j < i32(all_rows):
                at = u64(source + u64(u32(j * row_bytes)))
                copy(u32(shared + expand_at + v * nbytes + j * own_row_bytes), at, nbytes)
                j = i32(j + lanes)

    return bring


def _bring_biases(plan: Plan) -> Callable[..., None]:
    """bring(shared, reduce_bias, expand_bias, thread, rank, first_vector): starts to copy those of the block."""
    p, rows, threads, vector = plan.p, plan.own["squeezed"], plan.threads, plan.vector
    channels, own_channels, all_rows, copy = p.c, plan.channels, p.squeezed, ptx.cp_async(4)
    reduce_at, expand_at = plan.regions["reduce_bias"], plan.regions["expand_bias"]

    def bring(shared: Any, reduce_bias: Any, expand_bias: Any, thread: Any, rank: Any, first_vector: Any) -> None:
        first = i32(rank * rows)
        i = i32(thread)
        while i < i32(min(rows, all_rows - first)):
            copy(u32(shared + reduce_at + i * 4), u64(reduce_bias + u64(i64(first + i) * 4)), 4)
            i = i32(i + threads)
        first = i32(first_vector * vector)
        i = i32(thread)
        while i < i32(min(own_channels, channels - first)):
            copy(u32(shared + expand_at + i * 4), u64(expand_bias + u64(i64(first + i) * 4)), 4)

            i = i32(i + threads)

    return bring


def _pixels(plan: Plan) -> tuple[int, int, int]:
    """(lanes that have pixels, vectors of each, how many of them are loaded at once)."""
    lanes = min(plan.own["lanes"], plan.own["pixels"])
    rounds = -(-plan.own["pixels"] // lanes)
    return lanes, rounds, min(rounds, _AT_ONCE)


def _add_up(plan: Plan) -> Callable[..., None]:
    """add_up(shared, x, lane, v, exists, first_vector, first_pixel, count): the sum of each thread's pixels."""
    lanes, rounds, at_once = _pixels(plan)
    p, holds, vector, nbytes, own_vectors = plan.p, plan.holds, plan.vector, plan.vector_bytes, plan.own["vectors"]
    words, row_bytes = vectors.words_of(p.dtype, vector), p.c // vector * nbytes
    load, unpack, hold = vectors.load(p.dtype, vector), vectors.unpack(p.dtype, vector), moves.store_shared(nbytes)
    held_at, store_sums, buffer = plan.regions["held"], _store_sums(plan), words * at_once

    def add_up(
        shared: Any, x: Any, lane: Any, v: Any, exists: Any, first_vector: Any, first_pixel: Any, count: Any
    ) -> None:  # fmt: skip
        word, number = cuda.local.array(buffer, u32), cuda.local.array(vector, f32)
        total = cuda.local.array(vector, f32)
        for e in range(vector):
            total[e] = f32(0)
        column = u64(x + u64(i64(first_vector + v) * nbytes))
        for first in range(0, rounds, at_once):
            for u in range(at_once):
                pixel = i32((first + u) * lanes + lane)
                inside = exists & (lane < lanes) & (pixel < count)
                load(word, u * words, u64(column + u64(i64(first_pixel + pixel) * row_bytes)), inside)
            for u in range(at_once):
                pixel = i32((first + u) * lanes + lane)
                if exists & (lane < lanes) & (pixel < count):
                    unpack(word, u * words, number, 0)
                    for e in range(vector):
                        total[e] = f32(total[e] + number[e])
                    if holds:
                        hold(word, u * words, u32(shared + held_at + (pixel * own_vectors + v) * nbytes))
        if lane < lanes:
            store_sums(total, shared, lane, v)

    return add_up


def _floats(count: int) -> tuple[Callable[[Any, Any], None], Callable[[Any, Any], None]]:
    """load(numbers, shared) and store(numbers, shared) of `count` neighbours, 1, 2 or a multiple of 4."""
    piece = min(count, WORD // 4)
    load_piece, store_piece = moves.load_shared(4 * piece), moves.store_shared(4 * piece)

    def load(numbers: Any, shared: Any) -> None:
        word = cuda.local.array(piece, u32)
        for first in range(0, count, piece):
            load_piece(word, 0, u32(shared + first * 4))
            for i in range(piece):
                numbers[first + i] = float_of(word[i])

    def store(numbers: Any, shared: Any) -> None:
        word = cuda.local.array(piece, u32)
        for first in range(0, count, piece):
            for i in range(piece):
                word[i] = bits_of(numbers[first + i])
            store_piece(word, 0, u32(shared + first * 4))

    return load, store


def _store_sums(plan: Plan) -> Callable[..., None]:
    """store(numbers, shared, lane, v): a thread's sums, to their place among those of the block."""
    vector, own_channels, sums_at = plan.vector, plan.channels, plan.regions["sums"]
    _, store = _floats(vector)

    def store_sums(numbers: Any, shared: Any, lane: Any, v: Any) -> None:
        store(numbers, u32(shared + sums_at + (lane * own_channels + v * vector) * 4))

    return store_sums


def _fold(plan: Plan, rows: int) -> tuple[Callable[[Any, Any], None], int]:
    """fold(sums, thread) adds up `rows` rows of sums to a few, whose number is returned, too. All threads work on it, not
    only one for each channel."""
    own_channels = plan.channels
    kept = 1
    while 2 * kept * own_channels <= plan.threads and 4 * kept * kept <= rows:
        kept *= 2
    turns = -(-rows // kept)

    def fold(sums: Any, thread: Any) -> None:
        channel, first = i32(u32(thread) % u32(own_channels)), i32(u32(thread) // u32(own_channels))
        if first < kept:
            total = f32(0)
            for turn in range(turns):
                row = i32(first + turn * kept)
                number = ptx.load_shared_f32(u32(sums + (min(row, i32(rows - 1)) * own_channels + channel) * 4))
                if row < rows:
                    total = f32(total + number)
            ptx.store_shared_f32(u32(sums + (first * own_channels + channel) * 4), total)
        cuda.syncthreads()

    def nothing(sums: Any, thread: Any) -> None:
        return

    return (fold, kept) if kept > 1 else (nothing, rows)


def _collect(plan: Plan) -> Callable[[Any, Any], None]:
    """collect(shared, thread): adds up the means of the parts of the pixels."""
    parts, channels, threads, means_at = plan.own["pixel_parts"], plan.p.c, plan.threads, plan.regions["means"]

    def collect(shared: Any, thread: Any) -> None:
        channel = i32(thread)
        while channel < i32(channels):
            total = f32(0)
            for part in range(parts):
                total = f32(total + ptx.load_shared_f32(u32(shared + means_at + (part * channels + channel) * 4)))
            ptx.store_shared_f32(u32(shared + means_at + channel * 4), total)
            channel = i32(channel + threads)
        cuda.syncthreads()

    def nothing(shared: Any, thread: Any) -> None:
        return

    return collect if parts > 1 else nothing


def _weights(plan: Plan) -> Callable[..., None]:
    """load(words, copy, address): a vector of weights from its copy in shared memory, or from memory."""
    load, load_copy = vectors.load(plan.p.dtype, plan.vector), moves.load_shared(plan.vector_bytes)

    def from_memory(words: Any, copy: Any, address: Any) -> None:
        load(words, 0, address, True)

    def from_copy(words: Any, copy: Any, address: Any) -> None:
        load_copy(words, 0, copy)

    return from_copy if plan.brings else from_memory


def _squeeze(plan: Plan) -> Callable[..., None]:
    """squeeze(shared, reduce, thread, rank): the block's squeezed channels, a warp for some of them at once."""
    p, own, warps, vector, nbytes = plan.p, plan.own, plan.threads // WARP, plan.vector, plan.vector_bytes
    words, count, rows, all_rows = vectors.words_of(p.dtype, vector), p.c // vector, own["squeezed"], p.squeezed
    reduce_at, means_at, squeezed_at = (plan.regions[name] for name in ("reduce", "means", "squeezed"))
    bias_at = plan.regions["reduce_bias"]
    at_once, turns = min(-(-rows // warps), _AT_ONCE), min(-(-count // WARP), _AT_ONCE)
    load, unpack, (load_means, _) = _weights(plan), vectors.unpack(p.dtype, vector), _floats(vector)
    tell, activate, blocks, over_warp = _tell(plan), _activation(p), plan.cluster, over_group(WARP, plan.threads, _added, 0)

    def squeeze(shared: Any, reduce: Any, thread: Any, rank: Any) -> None:
        word, weight, mean = cuda.local.array(words, u32), cuda.local.array(vector, f32), cuda.local.array(vector, f32)
        total = cuda.local.array(at_once, f32)
        warp, lane = i32(u32(thread) // u32(WARP)), i32(u32(thread) % u32(WARP))
        first = i32(rank * rows)
        limit = i32(min(rows, all_rows - first))  # may be negative for the last block
        j = i32(warp)
        while j < limit:
            for u in range(at_once):
                total[u] = f32(0)
            begin = i32(0)
            while begin < i32(count):
                for turn in range(turns):
                    i = i32(begin + lane + turn * WARP)
                    near = i32(min(i, count - 1))
                    load_means(mean, u32(shared + means_at + near * (vector * 4)))
                    for u in range(at_once):
                        row = i32(min(j + u * warps, limit - 1))
                        place = i32(row * count + near)
                        load(
                            word, u32(shared + reduce_at + place * nbytes),
                            u64(reduce + u64((i64(first) * count + place) * nbytes)),
                        )  # fmt: skip
                        unpack(word, 0, weight, 0)
                        if i < count:
                            for e in range(vector):
                                total[u] = f32(total[u] + f32(mean[e] * weight[e]))
                begin = i32(begin + turns * WARP)
            for u in range(at_once):
                row = i32(j + u * warps)
                number = over_warp(0, total[u])
                if (row < limit) & (lane < blocks):
                    bias = ptx.load_shared_f32(u32(shared + bias_at + row * 4))
                    tell(u32(shared + squeezed_at + (first + row) * 4), activate(f32(number + bias)), lane)
            j = i32(j + at_once * warps)

    return squeeze


def _added(a: Any, b: Any) -> Any:
    return f32(a + b)


def _excite(plan: Plan) -> Callable[..., None]:
    """excite(shared, expand, thread, lane, v, exists, first_vector): each thread's part of the sums of some channels."""
    p, vector, nbytes, own_vectors = plan.p, plan.vector, plan.vector_bytes, plan.own["vectors"]
    lanes, rows, count = min(plan.own["lanes"], p.squeezed), p.squeezed, p.c // vector
    words = vectors.words_of(p.dtype, vector)
    expand_at, squeezed_at = plan.regions["expand"], plan.regions["squeezed"]
    load, unpack, store_sums = _weights(plan), vectors.unpack(p.dtype, vector), _store_sums(plan)
    at_once = min(-(-rows // lanes), _AT_ONCE)

    def excite(shared: Any, expand: Any, thread: Any, lane: Any, v: Any, exists: Any, first_vector: Any) -> None:
        word, weight = cuda.local.array(words, u32), cuda.local.array(vector, f32)
        total = cuda.local.array(vector, f32)
        for e in range(vector):
            total[e] = f32(0)
        if lane < lanes:
            if exists:
                j = i32(lane)
                while j < i32(rows):
                    for u in range(at_once):
                        row = i32(min(j + u * lanes, rows - 1))
                        squeezed = ptx.load_shared_f32(u32(shared + squeezed_at + row * 4))
                        at = u64(expand + u64((i64(row) * count + first_vector + v) * nbytes))
                        load(word, u32(shared + expand_at + (row * own_vectors + v) * nbytes), at)
                        unpack(word, 0, weight, 0)
                        if j + u * lanes < rows:
                            for e in range(vector):
                                total[e] = f32(total[e] + f32(squeezed * weight[e]))
                    j = i32(j + at_once * lanes)
            store_sums(total, shared, lane, v)

    return excite


def _multiply(plan: Plan) -> Callable[..., None]:
    """multiply(shared, x, y, lane, v, exists, first_vector, first_pixel, count): each thread's pixels, times the gates."""
    lanes, rounds, at_once = _pixels(plan)
    p, holds, vector, nbytes, own_vectors = plan.p, plan.holds, plan.vector, plan.vector_bytes, plan.own["vectors"]
    words, row_bytes = vectors.words_of(p.dtype, vector), p.c // vector * nbytes
    load, unpack, load_held = vectors.load(p.dtype, vector), vectors.unpack(p.dtype, vector), moves.load_shared(nbytes)
    pack, store, buffer = vectors.pack(p.dtype, vector), vectors.store(p.dtype, vector), words * at_once
    held_at, gates_at, (load_gates, _) = plan.regions["held"], plan.regions["gates"], _floats(vector)

    def multiply(
        shared: Any, x: Any, y: Any, lane: Any, v: Any, exists: Any, first_vector: Any, first_pixel: Any, count: Any
    ) -> None:  # fmt: skip
        word, number = cuda.local.array(buffer, u32), cuda.local.array(vector, f32)
        gate = cuda.local.array(vector, f32)
        for e in range(vector):
            gate[e] = f32(0)
        if exists & (lane < lanes):
            load_gates(gate, u32(shared + gates_at + v * (vector * 4)))
        column = u64(i64(first_vector + v) * nbytes)
        for first in range(0, rounds, at_once):
            for u in range(at_once):
                pixel = i32((first + u) * lanes + lane)
                inside = exists & (lane < lanes) & (pixel < count)
                if holds:
                    if inside:
                        load_held(word, u * words, u32(shared + held_at + (pixel * own_vectors + v) * nbytes))
                else:
                    load(word, u * words, u64(x + column + u64(i64(first_pixel + pixel) * row_bytes)), inside)
            for u in range(at_once):
                pixel = i32((first + u) * lanes + lane)
                if exists & (lane < lanes) & (pixel < count):
                    unpack(word, u * words, number, 0)
                    for e in range(vector):
                        number[e] = f32(number[e] * gate[e])
                    pack(number, 0, word, u * words)
                    store(word, u * words, u64(y + column + u64(i64(first_pixel + pixel) * row_bytes)))

    return multiply


# --- Functions ------------------------------------------------------------------------------------------------------------
def _sigmoid(t: Any) -> Any:
    return f32(f32(1) / f32(f32(1) + f32(math.exp(f32(-t)))))


def _limited(t: Any) -> Any:
    return f32(min(max(t, f32(0)), f32(1)))


def _activation(p: SqueezeExciteParams) -> Callable[[Any], Any]:
    sixth = f32(1 / 6)

    def relu(t: Any) -> Any:
        return f32(0) if t < f32(0) else t

    def silu(t: Any) -> Any:
        return f32(t * _sigmoid(t))

    def hard_swish(t: Any) -> Any:
        return f32(t * _limited(f32(f32(t * sixth) + f32(0.5))))

    return {"relu": relu, "silu": silu, "hard_swish": hard_swish}[p.activation]


def _gate(p: SqueezeExciteParams) -> Callable[[Any], Any]:
    alpha, beta = f32(p.alpha), f32(p.beta)

    def hard_sigmoid(t: Any) -> Any:
        return _limited(f32(f32(alpha * t) + beta))

    return _sigmoid if p.gate == "sigmoid" else hard_sigmoid
