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
from schedsearch.templates.depthwise_conv1d.parts import gate, reader, writer
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


def _weights_loader(p: DepthwiseConv1dParams, vector: int) -> Callable[..., None]:
    """`load(words, weights, weight, channel, valid)`: weights[e * taps + k] of `vector` channels."""
    load, unpack = vectors.load(p.weight_dtype, vector), vectors.unpack(p.weight_dtype, vector)
    taps, nbytes = p.taps, dtype_of(p.weight_dtype).nbytes

    def load_weights(words: Any, weights: Any, weight: Any, channel: Any, valid: Any) -> None:
        at = u64(weight + u64(i64(channel) * (taps * nbytes)))
        for i in range(taps):
            load(words, 0, u64(at + u64(i * vector * nbytes)), valid)
            unpack(words, 0, weights, i * vector)

    return load_weights


def _bias_loader(p: DepthwiseConv1dParams, vector: int) -> Callable[..., None]:
    """`load(words, numbers, bias, channel, valid)`: zeros without a bias."""
    load, unpack = vectors.load(p.weight_dtype, vector), vectors.unpack(p.weight_dtype, vector)
    nbytes, has_bias = dtype_of(p.weight_dtype).nbytes, p.bias

    def load_bias(words: Any, numbers: Any, bias: Any, channel: Any, valid: Any) -> None:
        for e in range(vector):
            numbers[e] = f32(0)
        if has_bias:
            load(words, 0, u64(bias + u64(i64(channel) * nbytes)), valid)
            unpack(words, 0, numbers, 0)

    return load_bias


def _before(p: DepthwiseConv1dParams, vector: int) -> Callable[..., None]:
    """`fill(words, one, window, at, initial, n, channels, channel, step, valid)`: a row of the initial state, if `step` is
    before x and there is one."""
    read, reach, has = reader(p.dtype), p.reach, p.initial_state

    def fill(
        words: Any, one: Any, window: Any, at: Any, initial: Any, n: Any, channels: Any, channel: Any, step: Any, valid: Any
    ) -> None:
        if has and step < 0:
            for e in range(vector):
                place = i64((i64(n) * channels + channel + e) * reach + step + reach)
                window[at + e] = read(words, one, initial, place, i32(valid & (step >= -reach)))

    return fill


def _sequence_numbers(p: DepthwiseConv1dParams) -> Callable[..., Any]:
    """`number(words, seq, n, steps, step, valid)`: 0 without sequences."""
    load, has = vectors.load("float32", 1), p.seq_idx

    def number(words: Any, seq: Any, n: Any, steps: Any, step: Any, valid: Any) -> Any:
        if has:
            load(words, 0, u64(seq + u64((i64(n) * steps + step) * 4)), i32(valid & (step >= 0) & (step < steps)))
            return i32(words[0])
        return i32(0)

    return number


def _filtered(p: DepthwiseConv1dParams, vector: int) -> Callable[..., Any]:
    """`filtered(weights, window, sequence, row, e, start)`: a channel's sum whose first tap is in a row of the window."""
    taps, has_seq = p.taps, p.seq_idx

    def filtered(weights: Any, window: Any, sequence: Any, row: Any, e: Any, start: Any) -> Any:
        total = start
        for k in range(taps):
            value = window[(row + k) * vector + e]
            if has_seq:
                value = value if sequence[row + k] == sequence[row + taps - 1] else f32(0)
            total = f32(total + f32(weights[e * taps + k] * value))
        return total

    return filtered


def _spread(p: DepthwiseConv1dParams, vector: int) -> Callable[..., Any]:
    """`spread(weights, dz, sequence, row, e)`: dx of the step whose input is in a row of the window."""
    taps, has_seq = p.taps, p.seq_idx

    def spread(weights: Any, dz: Any, sequence: Any, row: Any, e: Any) -> Any:
        total = f32(0)
        for k in range(taps):
            value = dz[(taps - 1 + row - k) * vector + e]
            if has_seq:
                value = value if sequence[row] == sequence[taps - 1 + row - k] else f32(0)
            total = f32(total + f32(weights[e * taps + k] * value))
        return total

    return spread


def _products(p: DepthwiseConv1dParams, vector: int) -> Callable[..., None]:
    """`add(sums, window, dz, sequence, row, inside)`: adds a step's products to sums[k * vector + e] of dw, and dz to those
    of db behind them."""
    taps, has_seq = p.taps, p.seq_idx

    def add(sums: Any, window: Any, dz: Any, sequence: Any, row: Any, inside: Any) -> None:
        for e in range(vector):
            gradient = dz[(taps - 1 + row) * vector + e]
            for k in range(taps):
                value = window[(row + k) * vector + e]
                if has_seq:
                    value = value if sequence[row + k] == sequence[row + taps - 1] else f32(0)
                value = value if inside else f32(0)
                sums[k * vector + e] = f32(sums[k * vector + e] + f32(gradient * value))
            sums[taps * vector + e] = f32(sums[taps * vector + e] + gradient)

    return add


def _dx_store(p: DepthwiseConv1dParams, vector: int) -> Callable[..., None]:
    """`put(words, one_word, one, numbers, dx_at, d_initial, d_final, n, channels, channel, step, t_in)`: adds the gradient
    of the final state, and stores a row of dx or of the gradient of the initial state."""
    reach, nbytes, has_initial, has_final = p.reach, dtype_of(p.dtype).nbytes, p.initial_state, p.final_state
    pack, store, write, read = (
        vectors.pack(p.dtype, vector),
        vectors.store(p.dtype, vector),
        writer(p.dtype),
        reader(p.dtype),
    )

    def put(
        words: Any, one_word: Any, one: Any, numbers: Any, dx_at: Any, d_initial: Any, d_final: Any, n: Any, channels: Any,
        channel: Any, step: Any, t_in: Any,
    ) -> None:  # fmt: skip
        state = i64((i64(n) * channels + channel) * reach)
        if has_final and step >= t_in - reach:
            for e in range(vector):
                place = i64(state + e * reach + step - (t_in - reach))
                numbers[e] = f32(numbers[e] + read(one_word, one, d_final, place, step >= -reach))
        if step >= 0:
            pack(numbers, 0, words, 0)
            store(words, 0, u64(dx_at + u64(step * i64(i64(channels) * nbytes))))
        elif has_initial and step >= -reach:
            for e in range(vector):
                write(one_word, one, d_initial, i64(state + e * reach + step + reach), numbers[e])

    return put


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
    vector, ahead, length, lanes, rows = plan.vector, plan.ahead, plan.length, plan.lanes, plan.rows
    taps, dilation, reach, nbytes = p.taps, p.dilation, p.reach, dtype_of(p.dtype).nbytes
    words, silu, has_final, filtered = vectors.words_of(p.dtype, vector), p.silu, p.final_state, _filtered(p, vector)
    weight_words, chunks, held = vectors.words_of(p.weight_dtype, vector), length // ahead, taps - 1 + ahead
    load, unpack = vectors.load(p.dtype, vector), vectors.unpack(p.dtype, vector)
    pack, store = vectors.pack(p.dtype, vector), vectors.store(p.dtype, vector)
    load_weights, load_bias, fill_before = _weights_loader(p, vector), _bias_loader(p, vector), _before(p, vector)
    number_of, sigmoid, write = _sequence_numbers(p), gate(), writer(p.dtype)
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
        channel = i32((block % lane_blocks * lanes + thread % lanes) * vector)
        item = i32(block // lane_blocks * rows + thread // lanes)
        run, rest = i32(item % runs), i32(item // runs)
        phase, n = i32(rest % dilation), i32(rest // dilation)
        if (channel < channels) & (n < batch):
            load_weights(other, weights, weight, channel, 1)
            load_bias(other, start, bias, channel, 1)
            first = i32(phase + run * (length * dilation))
            x_at = u64(x + u64((i64(n) * t_in * channels + channel) * nbytes))
            y_at = u64(y + u64((i64(n) * t_out * channels + channel) * nbytes))
            row = i64(i64(channels) * nbytes)
            for k in range(taps - 1):
                step = i32(first + k * dilation - left)
                load(word, 0, u64(x_at + u64(step * row)), (step >= 0) & (step < t_in))
                unpack(word, 0, window, k * vector)
                fill_before(one_word, one, window, k * vector, initial, n, channels, channel, step, 1)
                sequence[k] = number_of(one_word, seq, n, t_in, step, 1)
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
    vector, ahead, length, lanes, rows = plan.vector, plan.ahead, plan.length, plan.lanes, plan.rows
    taps, dilation, reach, nbytes = p.taps, p.dilation, p.reach, dtype_of(p.dtype).nbytes
    words, silu, lead = vectors.words_of(p.dtype, vector), p.silu, lead_of(p)
    filtered, spread, add_products = _filtered(p, vector), _spread(p, vector), _products(p, vector)
    put, add_up = _dx_store(p, vector), _block_sums(plan, taps)
    weight_words, total_steps = vectors.words_of(p.weight_dtype, vector), length + taps - 1
    chunks, held = -(-total_steps // ahead), taps - 1 + ahead
    load, unpack = vectors.load(p.dtype, vector), vectors.unpack(p.dtype, vector)
    load_weights, load_bias, fill_before = _weights_loader(p, vector), _bias_loader(p, vector), _before(p, vector)
    number_of, sigmoid, threads, sums_size = _sequence_numbers(p), gate(), plan.threads, (taps + 1) * vector
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
        channel = i32((block % lane_blocks * lanes + thread % lanes) * vector)
        item = i32(block // lane_blocks * rows + thread // lanes)
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
            for k in range(taps - 1):
                step = i32(first + k * dilation - left)
                load(word, 0, u64(x_at + u64(step * row)), (step >= 0) & (step < t_in))
                unpack(word, 0, window, k * vector)
                fill_before(one_word, one, window, k * vector, initial, n, channels, channel, step, 1)
                sequence[k] = number_of(one_word, seq, n, t_in, step, 1)
                for e in range(vector):
                    dz[k * vector + e] = f32(0)
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
                    for e in range(vector):
                        gradient = given[e]
                        if silu:
                            z = filtered(weights, window, sequence, j, e, start[e])
                            share = sigmoid(z)
                            slope = f32(share * f32(f32(1) + f32(z * f32(f32(1) - share))))
                            gradient = f32(gradient * slope) if inside else f32(0)
                        dz[(taps - 1 + j) * vector + e] = gradient
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
