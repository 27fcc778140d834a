"""Few taps with channels as neighbours (NTC): a thread streams vectors of channels through registers, step by step.

A block has `lanes` vectors of channels side by side, and `threads // lanes` runs of `length` steps, one after the other.
With a dilation d a run takes every d-th step, so that it is one without dilation. A window of the last taps - 1 rows moves
along; `ahead` rows are loaded while those before them are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import cuda

from schedsearch.ops.depthwise_conv1d import DepthwiseConv1dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.depthwise_conv1d import cuda_rows_parts as stream
from schedsearch.templates.depthwise_conv1d.parts import divided, gate, writer
from schedsearch.templates.parts import vectors
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64

MOST_TAPS = 8


@dataclass(frozen=True)
class RowPlan:
    """The knobs; see `cuda.DepthwiseConv1dCuda`."""

    vector: int
    ahead: int
    length: int
    lanes: int
    threads: int

    @property
    def rows(self) -> int:
        return self.threads // self.lanes


def lead_of(p: DepthwiseConv1dParams) -> int:
    """Steps before the first one of y at which the gradients begin, so that dx reaches the start of x or of its state."""
    return 0 if p.causal and not p.initial_state else p.taps - 1


def runs_of(p: DepthwiseConv1dParams, length: int) -> int:
    """Runs of a batch row and a phase of the dilation."""
    if p.forward:
        return -(-p.steps // (p.dilation * length))
    lead = lead_of(p)
    last = max((p.t - 1 + p.padding[0]) // p.dilation - (p.taps - 1), (p.steps - 1) // p.dilation)
    return -(-(last + 1 + lead) // length)


def _placer(plan: RowPlan) -> Callable[..., Any]:
    """`place(thread, block, lane_blocks)`: a thread's first channel, and the number of its run."""
    vector, lanes, rows, split = plan.vector, plan.lanes, plan.rows, divided()

    def place(thread: Any, block: Any, lane_blocks: Any) -> Any:
        down, across = split(block, lane_blocks)
        row, lane = split(thread, lanes)
        return i32(i32(across * lanes + lane) * vector), i32(down * rows + row)

    return place


def _block_sums(plan: RowPlan, taps: int) -> Callable[..., None]:
    """`add_up(partial, word, one, sums, parts, thread, part, channel, channels)`: a block's sums, to its part."""
    vector, lanes, rows, write = plan.vector, plan.lanes, plan.rows, writer("float32")
    count = (taps + 1) * vector

    def add_up(
        partial: Any, word: Any, one: Any, sums: Any, parts: Any, thread: Any, part: Any, channel: Any, channels: Any
    ) -> None:
        for i in range(count):
            partial[thread] = sums[i]
            cuda.syncthreads()
            if (thread < lanes) & (channel < channels):
                total = partial[thread]
                for row in range(1, rows):
                    total = f32(total + partial[row * lanes + thread])
                write(word, one, parts, i64((part + i // vector) * channels + channel + i % vector), total)
            cuda.syncthreads()

    return add_up


def _head(p: DepthwiseConv1dParams, plan: RowPlan, lead: int) -> Callable[..., Any]:
    """`head(word, other, one_word, one, weights, start, window, sequence, x, weight, bias, initial, seq, channels, t_in,
    left, batch, lane_blocks, runs)`: finds a thread's run, and loads its weights and the window in front of it. Returns its
    first channel, its batch row, the step of its first row, `lead` rows before its part of y, its number, and whether it
    exists."""
    vector, length, dilation, nbytes = plan.vector, plan.length, p.dilation, dtype_of(p.dtype).nbytes
    load_weights, load_bias = stream.weights_loader(p, vector), stream.bias_loader(p, vector)
    begin, place, split = stream.beginning(p, vector), _placer(plan), divided()

    def head(
        word: Any, other: Any, one_word: Any, one: Any, weights: Any, start: Any, window: Any, sequence: Any, x: Any,
        weight: Any, bias: Any, initial: Any, seq: Any, channels: Any, t_in: Any, left: Any, batch: Any, lane_blocks: Any,
        runs: Any,
    ) -> Any:  # fmt: skip
        channel, item = place(i32(cuda.threadIdx.x), i32(cuda.blockIdx.x), lane_blocks)
        rest, run = split(item, runs)
        n, phase = split(rest, dilation)
        first = i32(phase + (run * length - lead) * dilation)
        exists = (channel < channels) & (n < batch)
        if exists:
            load_weights(other, weights, weight, channel, 1)
            load_bias(other, start, bias, channel, 1)
            x_at = u64(x + u64((i64(n) * t_in * channels + channel) * nbytes))
            begin(word, window, sequence, one_word, one, x_at, initial, seq, n, channels, channel, i32(first - left), t_in)
        return channel, n, first, item, exists

    return head


def forward_kernel(p: DepthwiseConv1dParams, plan: RowPlan) -> Callable[..., None]:
    """The kernel (x, weight, bias, initial, seq, y, final, channels, t_in, t_out, left, batch, lane_blocks, runs)."""
    vector, ahead, length = plan.vector, plan.ahead, plan.length
    taps, dilation, reach, nbytes = p.taps, p.dilation, p.reach, dtype_of(p.dtype).nbytes
    words, silu, has_final = vectors.words_of(p.dtype, vector), p.silu, p.final_state
    mask, held = stream.window_mask(taps, ahead), int(stream.window_rows(taps, ahead))
    filtered, move = stream.filtered_sum(p, vector, mask), stream.moving(taps, ahead, vector)
    other_words, chunks = max(words, vectors.words_of(p.weight_dtype, vector)), length // ahead
    load, unpack = vectors.load(p.dtype, vector), vectors.unpack(p.dtype, vector)
    pack, store, head = vectors.pack(p.dtype, vector), vectors.store(p.dtype, vector), _head(p, plan, 0)
    number_of, sigmoid, write, fill_before = stream.sequence_numbers(p), gate(), writer(p.dtype), stream.before(p, vector)
    loaded, window_size, weights_size = words * ahead, held * vector, taps * vector
    move_numbers = stream.moving(taps, ahead, 1)

    def forward(x, weight, bias, initial, seq, y, final, channels, t_in, t_out, left, batch, lane_blocks, runs) -> None:  # type: ignore[no-untyped-def]
        word = cuda.local.array(loaded, u32)
        other = cuda.local.array(other_words, u32)
        one_word = cuda.local.array(1, u32)
        one = cuda.local.array(1, f32)
        weights = cuda.local.array(weights_size, f32)
        start = cuda.local.array(vector, f32)
        window = cuda.local.array(window_size, f32)
        sums = cuda.local.array(vector, f32)
        sequence = cuda.local.array(held, i32)
        channel, n, first, item, exists = head(
            word, other, one_word, one, weights, start, window, sequence, x, weight, bias, initial, seq, channels, t_in,
            left, batch, lane_blocks, runs,
        )  # fmt: skip
        if exists:
            x_at = u64(x + u64((i64(n) * t_in * channels + channel) * nbytes))
            y_at = u64(y + u64((i64(n) * t_out * channels + channel) * nbytes))
            row = i64(i64(channels) * nbytes)
            ahead_of, stride = i32(first + reach - left), u64(row * dilation)
            from_at, to_at = u64(x_at + u64(ahead_of * row)), u64(y_at + u64(first * row))
            for j in range(ahead):
                step = i32(ahead_of + j * dilation)
                load(word, j * words, from_at, (step >= 0) & (step < t_in))
                from_at = u64(from_at + stride)
            for chunk in range(i32(chunks)):
                for j in range(ahead):
                    unpack(word, j * words, window, ((taps - 1 + j) & mask) * vector)
                    sequence[(taps - 1 + j) & mask] = number_of(one_word, seq, n, t_in, i32(ahead_of + j * dilation), 1)
                    step = i32(ahead_of + (ahead + j) * dilation)
                    load(word, j * words, from_at, (step >= 0) & (step < t_in) & (chunk + 1 < chunks))
                    from_at = u64(from_at + stride)
                    step = i32(first + (chunk * ahead + j) * dilation)
                    for e in range(vector):
                        total = filtered(weights, window, sequence, j, e, start[e])
                        sums[e] = f32(total * sigmoid(total)) if silu else total
                    if step < t_out:
                        pack(sums, 0, other, 0)
                        store(other, 0, to_at)
                    to_at = u64(to_at + stride)
                ahead_of = i32(ahead_of + ahead * dilation)
                move(window)
                move_numbers(sequence)
            if has_final and item % (runs * dilation) == 0:
                for i in range(i32(reach)):
                    step = i32(t_in - reach + i)
                    load(word, 0, u64(x_at + u64(step * row)), step >= 0)
                    unpack(word, 0, window, 0)
                    fill_before(one_word, one, window, 0, initial, n, channels, channel, step, 1)
                    for e in range(vector):
                        write(one_word, one, final, i64((i64(n) * channels + channel + e) * reach + i), window[e])

    return forward


def _issuer(p: DepthwiseConv1dParams, plan: RowPlan) -> Callable[..., None]:
    """`issue(word, dy_word, j, from_at, dy_at, t, t_in, t_out, left, more)`: starts the loads of a row of dy, at step t,
    and of the row of x that is the last one of its window, if there are `more`."""
    load, words, reach = vectors.load(p.dtype, plan.vector), vectors.words_of(p.dtype, plan.vector), p.reach

    def issue(
        word: Any, dy_word: Any, j: Any, from_at: Any, dy_at: Any, t: Any, t_in: Any, t_out: Any, left: Any, more: Any
    ) -> None:
        step = i32(t + reach - left)
        load(word, j * words, from_at, (step >= 0) & (step < t_in) & more)
        load(dy_word, j * words, dy_at, (t >= 0) & (t < t_out) & more)

    return issue


def _whole(p: DepthwiseConv1dParams, plan: RowPlan) -> Callable[..., Any]:
    """`is_whole(m, begin, t_in, t_out, left, more)`: whether rows m and following of a run, of which y's first is `begin`,
    have every product and a dx in x, and those that are loaded meanwhile are inside. They need no test."""
    ahead, length, taps, dilation, reach, lost = plan.ahead, plan.length, p.taps, p.dilation, p.reach, p.final_state
    chunk, kept = ahead * dilation, p.reach if lost else 0

    def is_whole(m: Any, begin: Any, t_in: Any, t_out: Any, left: Any, more: Any) -> Any:
        end = i32(begin + chunk)  # behind the last row, by a dilation
        loaded = i32(end + chunk if more else end)
        inside = (begin >= left) & (end - dilation < t_out) & (end - dilation - left < t_in - kept)
        following = (loaded - dilation < t_out) & (loaded - dilation + reach - left < t_in)
        return (m >= taps - 1) & (m + ahead <= length) & inside & following

    return is_whole


def backward_kernel(p: DepthwiseConv1dParams, plan: RowPlan) -> Callable[..., None]:
    """The kernel (x, weight, bias, dy, initial, d_final, seq, dx, d_initial, parts, channels, t_in, t_out, left, batch,
    lane_blocks, runs). `parts` gets a block's sums of dw and db as [block of runs][taps + 1][channels].

    At a step it computes z from the window of x, then dz; with the window of dz it computes dx of `left` steps before.
    """
    vector, ahead, length = plan.vector, plan.ahead, plan.length
    taps, dilation, reach, nbytes = p.taps, p.dilation, p.reach, dtype_of(p.dtype).nbytes
    words = vectors.words_of(p.dtype, vector)
    mask, held = stream.window_mask(taps, ahead), int(stream.window_rows(taps, ahead))
    take_back, spread = stream.activation_taken_back(p, vector, mask), stream.spread_sums(p, vector, mask)
    add_products, move = stream.product_sums(p, vector, mask), stream.moving(taps, ahead, vector)
    put, add_up, head = stream.dx_store(p, vector), _block_sums(plan, taps), _head(p, plan, lead_of(p))
    other_words, total_steps = max(words, vectors.words_of(p.weight_dtype, vector)), length + taps - 1
    chunks, load, unpack = -(-total_steps // ahead), vectors.load(p.dtype, vector), vectors.unpack(p.dtype, vector)
    fill_before, number_of, issue = stream.before(p, vector), stream.sequence_numbers(p), _issuer(p, plan)
    threads, sums_size, move_numbers = plan.threads, (taps + 1) * vector, stream.moving(taps, ahead, 1)
    pack, store, is_whole, split = vectors.pack(p.dtype, vector), vectors.store(p.dtype, vector), _whole(p, plan), divided()
    loaded, window_size, weights_size = words * ahead, held * vector, taps * vector

    def backward(  # type: ignore[no-untyped-def]
        x, weight, bias, dy, initial, d_final, seq, dx, d_initial, parts, channels, t_in, t_out, left, batch, lane_blocks,
        runs,
    ) -> None:  # fmt: skip
        partial = cuda.shared.array(threads, f32)
        word = cuda.local.array(loaded, u32)
        dy_word = cuda.local.array(loaded, u32)
        other = cuda.local.array(other_words, u32)
        one_word = cuda.local.array(1, u32)
        one = cuda.local.array(1, f32)
        weights = cuda.local.array(weights_size, f32)
        start = cuda.local.array(vector, f32)
        window = cuda.local.array(window_size, f32)
        dz = cuda.local.array(window_size, f32)
        given = cuda.local.array(vector, f32)
        sums = cuda.local.array(sums_size, f32)
        sequence = cuda.local.array(held, i32)
        for i in range(sums_size):
            sums[i] = f32(0)
        channel, n, first, _, exists = head(
            word, other, one_word, one, weights, start, window, sequence, x, weight, bias, initial, seq, channels, t_in,
            left, batch, lane_blocks, runs,
        )  # fmt: skip
        if exists:
            x_at = u64(x + u64((i64(n) * t_in * channels + channel) * nbytes))
            dx_at = u64(dx + u64((i64(n) * t_in * channels + channel) * nbytes))
            dy_at = u64(dy + u64((i64(n) * t_out * channels + channel) * nbytes))
            row = i64(i64(channels) * nbytes)
            stride, from_at = u64(row * dilation), u64(x_at + u64(i32(first + reach - left) * row))
            dy_at = u64(dy_at + u64(first * row))
            for i in range((taps - 1) * vector):
                dz[i] = f32(0)
            for j in range(ahead):
                issue(word, dy_word, j, from_at, dy_at, i32(first + j * dilation), t_in, t_out, left, 1)
                from_at, dy_at = u64(from_at + stride), u64(dy_at + stride)
            for chunk in range(i32(chunks)):
                m, more = i32(chunk * ahead), i32(chunk + 1 < chunks)
                begin = i32(first + m * dilation)
                if is_whole(m, begin, t_in, t_out, left, more):
                    to_at = u64(dx_at + u64(i32(begin - left) * row))
                    for j in range(ahead):
                        last = (taps - 1 + j) & mask
                        unpack(word, j * words, window, last * vector)
                        sequence[last] = number_of(one_word, seq, n, t_in, i32(begin + j * dilation + reach - left), 1)
                        unpack(dy_word, j * words, given, 0)
                        load(word, j * words, from_at, more)
                        load(dy_word, j * words, dy_at, more)
                        from_at, dy_at = u64(from_at + stride), u64(dy_at + stride)
                        take_back(given, dz, weights, window, sequence, j, start, True)
                        add_products(sums, window, dz, sequence, j)
                        spread(given, weights, dz, sequence, j)
                        pack(given, 0, other, 0)
                        store(other, 0, to_at)
                        to_at = u64(to_at + stride)
                else:
                    for j in range(ahead):
                        t = i32(begin + j * dilation)
                        step = i32(t + reach - left)
                        last = (taps - 1 + j) & mask
                        unpack(word, j * words, window, last * vector)
                        fill_before(one_word, one, window, last * vector, initial, n, channels, channel, step, 1)
                        sequence[last] = number_of(one_word, seq, n, t_in, step, 1)
                        unpack(dy_word, j * words, given, 0)
                        issue(word, dy_word, j, from_at, dy_at, i32(t + ahead * dilation), t_in, t_out, left, more)
                        from_at, dy_at = u64(from_at + stride), u64(dy_at + stride)
                        inside = (t >= 0) & (t < t_out)
                        take_back(given, dz, weights, window, sequence, j, start, inside)
                        if (m + j < length) & inside:
                            add_products(sums, window, dz, sequence, j)
                        step = i32(t - left)
                        if (m + j >= taps - 1) & (m + j < total_steps) & (step < t_in):
                            spread(given, weights, dz, sequence, j)
                            put(other, one_word, one, given, dx_at, d_initial, d_final, n, channels, channel, step, t_in)
                move(window)
                move(dz)
                move_numbers(sequence)
        part, _ = split(i32(cuda.blockIdx.x), lane_blocks)
        add_up(partial, one_word, one, sums, parts, i32(cuda.threadIdx.x), i64(i64(part) * (taps + 1)), channel, channels)

    return backward
