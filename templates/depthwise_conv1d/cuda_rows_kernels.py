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
from schedsearch.templates.depthwise_conv1d.parts import gate, writer
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
    vector, lanes, rows = plan.vector, plan.lanes, plan.rows

    def place(thread: Any, block: Any, lane_blocks: Any) -> Any:
        channel = i32((block % lane_blocks * lanes + thread % lanes) * vector)
        return channel, i32(block // lane_blocks * rows + thread // lanes)

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


def forward_kernel(p: DepthwiseConv1dParams, plan: RowPlan) -> Callable[..., None]:
    """The kernel (x, weight, bias, initial, seq, y, final, channels, t_in, t_out, left, batch, lane_blocks, runs)."""
    vector, ahead, length = plan.vector, plan.ahead, plan.length
    taps, dilation, reach, nbytes = p.taps, p.dilation, p.reach, dtype_of(p.dtype).nbytes
    words, silu, has_final = vectors.words_of(p.dtype, vector), p.silu, p.final_state
    filtered = stream.filtered_sum(p, vector)
    weight_words, chunks, held = vectors.words_of(p.weight_dtype, vector), length // ahead, taps - 1 + ahead
    load, unpack = vectors.load(p.dtype, vector), vectors.unpack(p.dtype, vector)
    pack, store = vectors.pack(p.dtype, vector), vectors.store(p.dtype, vector)
    load_weights, load_bias = stream.weights_loader(p, vector), stream.bias_loader(p, vector)
    fill_before, begin, place = stream.before(p, vector), stream.beginning(p, vector), _placer(plan)
    number_of, sigmoid, write = stream.sequence_numbers(p), gate(), writer(p.dtype)
    loaded, window_size, weights_size = words * ahead, held * vector, taps * vector

    def forward(x, weight, bias, initial, seq, y, final, channels, t_in, t_out, left, batch, lane_blocks, runs) -> None:  # type: ignore[no-untyped-def]
        word = cuda.local.array(loaded, u32)
        other = cuda.local.array(weight_words, u32)
        one_word = cuda.local.array(1, u32)
        one = cuda.local.array(1, f32)
        weights = cuda.local.array(weights_size, f32)
        start = cuda.local.array(vector, f32)
        window = cuda.local.array(window_size, f32)
        sums = cuda.local.array(vector, f32)
        sequence = cuda.local.array(held, i32)
        thread, block = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x)
        channel, item = place(thread, block, lane_blocks)
        run, rest = i32(item % runs), i32(item // runs)
        phase, n = i32(rest % dilation), i32(rest // dilation)
        if (channel < channels) & (n < batch):
            load_weights(other, weights, weight, channel, 1)
            load_bias(other, start, bias, channel, 1)
            first = i32(phase + run * (length * dilation))
            x_at = u64(x + u64((i64(n) * t_in * channels + channel) * nbytes))
            y_at = u64(y + u64((i64(n) * t_out * channels + channel) * nbytes))
            row = i64(i64(channels) * nbytes)
            begin(word, window, sequence, one_word, one, x_at, initial, seq, n, channels, channel, i32(first - left), t_in)
            ahead_of = i32(first + reach - left)
            for j in range(ahead):
                step = i32(ahead_of + j * dilation)
                load(word, j * words, u64(x_at + u64(step * row)), (step >= 0) & (step < t_in))
            for chunk in range(i32(chunks)):
                for j in range(ahead):
                    unpack(word, j * words, window, (taps - 1 + j) * vector)
                    sequence[taps - 1 + j] = number_of(one_word, seq, n, t_in, i32(ahead_of + j * dilation), 1)
                    step = i32(ahead_of + (ahead + j) * dilation)
                    load(word, j * words, u64(x_at + u64(step * row)), (step >= 0) & (step < t_in) & (chunk + 1 < chunks))
                    step = i32(first + (chunk * ahead + j) * dilation)
                    for e in range(vector):
                        total = filtered(weights, window, sequence, j, e, start[e])
                        sums[e] = f32(total * sigmoid(total)) if silu else total
                    if step < t_out:
                        pack(sums, 0, other, 0)
                        store(other, 0, u64(y_at + u64(step * row)))
                ahead_of = i32(ahead_of + ahead * dilation)
                for i in range((taps - 1) * vector):
                    window[i] = window[i + ahead * vector]
                for i in range(taps - 1):
                    sequence[i] = sequence[i + ahead]
            if has_final and item % (runs * dilation) == 0:
                for i in range(i32(reach)):
                    step = i32(t_in - reach + i)
                    load(word, 0, u64(x_at + u64(step * row)), step >= 0)
                    unpack(word, 0, window, 0)
                    fill_before(one_word, one, window, 0, initial, n, channels, channel, step, 1)
                    for e in range(vector):
                        write(one_word, one, final, i64((i64(n) * channels + channel + e) * reach + i), window[e])

    return forward


def backward_kernel(p: DepthwiseConv1dParams, plan: RowPlan) -> Callable[..., None]:
    """The kernel (x, weight, bias, dy, initial, d_final, seq, dx, d_initial, parts, channels, t_in, t_out, left, batch,
    lane_blocks, runs). `parts` gets a block's sums of dw and db as [block of runs][taps + 1][channels].

    At a step it computes z from the window of x, then dz; with the window of dz it computes dx of `left` steps before.
    """
    vector, ahead, length = plan.vector, plan.ahead, plan.length
    taps, dilation, reach, nbytes = p.taps, p.dilation, p.reach, dtype_of(p.dtype).nbytes
    words, lead = vectors.words_of(p.dtype, vector), lead_of(p)
    take_back, spread = stream.activation_taken_back(p, vector), stream.spread_sum(p, vector)
    add_products = stream.product_sums(p, vector)
    put, add_up = stream.dx_store(p, vector), _block_sums(plan, taps)
    weight_words, total_steps = vectors.words_of(p.weight_dtype, vector), length + taps - 1
    chunks, held = -(-total_steps // ahead), taps - 1 + ahead
    load, unpack = vectors.load(p.dtype, vector), vectors.unpack(p.dtype, vector)
    load_weights, load_bias = stream.weights_loader(p, vector), stream.bias_loader(p, vector)
    fill_before, begin, place = stream.before(p, vector), stream.beginning(p, vector), _placer(plan)
    number_of, threads, sums_size = stream.sequence_numbers(p), plan.threads, (taps + 1) * vector
    loaded, window_size, weights_size = words * ahead, held * vector, taps * vector
    out_words = max(words, weight_words)

    def backward(  # type: ignore[no-untyped-def]
        x, weight, bias, dy, initial, d_final, seq, dx, d_initial, parts, channels, t_in, t_out, left, batch, lane_blocks,
        runs,
    ) -> None:  # fmt: skip
        partial = cuda.shared.array(threads, f32)
        word = cuda.local.array(loaded, u32)
        dy_word = cuda.local.array(loaded, u32)
        other = cuda.local.array(out_words, u32)
        one_word = cuda.local.array(1, u32)
        one = cuda.local.array(1, f32)
        weights = cuda.local.array(weights_size, f32)
        start = cuda.local.array(vector, f32)
        window = cuda.local.array(window_size, f32)
        dz = cuda.local.array(window_size, f32)
        given = cuda.local.array(vector, f32)
        sums = cuda.local.array(sums_size, f32)
        sequence = cuda.local.array(held, i32)
        thread, block = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x)
        channel, item = place(thread, block, lane_blocks)
        run, rest = i32(item % runs), i32(item // runs)
        phase, n = i32(rest % dilation), i32(rest // dilation)
        exists = (channel < channels) & (n < batch)
        for i in range(sums_size):
            sums[i] = f32(0)
        if exists:
            load_weights(other, weights, weight, channel, 1)
            load_bias(other, start, bias, channel, 1)
            first = i32(phase + (run * length - lead) * dilation)
            x_at = u64(x + u64((i64(n) * t_in * channels + channel) * nbytes))
            dx_at = u64(dx + u64((i64(n) * t_in * channels + channel) * nbytes))
            dy_at = u64(dy + u64((i64(n) * t_out * channels + channel) * nbytes))
            row = i64(i64(channels) * nbytes)
            begin(word, window, sequence, one_word, one, x_at, initial, seq, n, channels, channel, i32(first - left), t_in)
            for i in range((taps - 1) * vector):
                dz[i] = f32(0)
            for j in range(ahead):
                t = i32(first + j * dilation)
                step = i32(t + reach - left)
                load(word, j * words, u64(x_at + u64(step * row)), (step >= 0) & (step < t_in))
                load(dy_word, j * words, u64(dy_at + u64(t * row)), (t >= 0) & (t < t_out))
            for chunk in range(i32(chunks)):
                for j in range(ahead):
                    m = i32(chunk * ahead + j)
                    t = i32(first + m * dilation)
                    step = i32(t + reach - left)
                    unpack(word, j * words, window, (taps - 1 + j) * vector)
                    fill_before(
                        one_word, one, window, (taps - 1 + j) * vector, initial, n, channels, channel, step, 1
                    )  # fmt: skip
                    sequence[taps - 1 + j] = number_of(one_word, seq, n, t_in, step, 1)
                    unpack(dy_word, j * words, given, 0)
                    after = i32(t + ahead * dilation)
                    step = i32(after + reach - left)
                    more = chunk + 1 < chunks
                    load(word, j * words, u64(x_at + u64(step * row)), (step >= 0) & (step < t_in) & more)
                    load(dy_word, j * words, u64(dy_at + u64(after * row)), (after >= 0) & (after < t_out) & more)
                    inside = (t >= 0) & (t < t_out)
                    take_back(given, dz, weights, window, sequence, j, start, inside)
                    if m < length:
                        add_products(sums, window, dz, sequence, j, inside)
                    step = i32(t - left)
                    if (m >= taps - 1) & (m < total_steps) & (step < t_in):
                        for e in range(vector):
                            given[e] = spread(weights, dz, sequence, j, e)
                        put(other, one_word, one, given, dx_at, d_initial, d_final, n, channels, channel, step, t_in)
                for i in range((taps - 1) * vector):
                    window[i] = window[i + ahead * vector]
                    dz[i] = dz[i + ahead * vector]
                for i in range(taps - 1):
                    sequence[i] = sequence[i + ahead]
        part = i64(i64(block // lane_blocks) * (taps + 1))
        add_up(partial, one_word, one, sums, parts, thread, part, channel, channels)

    return backward
