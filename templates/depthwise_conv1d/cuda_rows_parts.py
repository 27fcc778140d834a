"""Device code that both kernels of streamed rows use: weights, rows of x, sequence numbers, and the sums of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from schedsearch.ops.depthwise_conv1d import DepthwiseConv1dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.depthwise_conv1d.parts import gate, reader, writer
from schedsearch.templates.parts import vectors
from schedsearch.templates.parts.casts import f32, i32, i64, u64


def weights_loader(p: DepthwiseConv1dParams, vector: int) -> Callable[..., None]:
    """`load(words, weights, weight, channel, valid)`: weights[e * taps + k] of `vector` channels."""
    load, unpack = vectors.load(p.weight_dtype, vector), vectors.unpack(p.weight_dtype, vector)
    taps, nbytes = p.taps, dtype_of(p.weight_dtype).nbytes

    def load_weights(words: Any, weights: Any, weight: Any, channel: Any, valid: Any) -> None:
        at = u64(weight + u64(i64(channel) * (taps * nbytes)))
        for i in range(taps):
            load(words, 0, u64(at + u64(i * vector * nbytes)), valid)
            unpack(words, 0, weights, i * vector)

    return load_weights


def bias_loader(p: DepthwiseConv1dParams, vector: int) -> Callable[..., None]:
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


def before(p: DepthwiseConv1dParams, vector: int) -> Callable[..., None]:
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


def sequence_numbers(p: DepthwiseConv1dParams) -> Callable[..., Any]:
    """`number(words, seq, n, steps, step, valid)`: 0 without sequences."""
    load, has = vectors.load("float32", 1), p.seq_idx

    def number(words: Any, seq: Any, n: Any, steps: Any, step: Any, valid: Any) -> Any:
        if has:
            load(words, 0, u64(seq + u64((i64(n) * steps + step) * 4)), i32(valid & (step >= 0) & (step < steps)))
            return i32(words[0])
        return i32(0)

    return number


def beginning(p: DepthwiseConv1dParams, vector: int) -> Callable[..., None]:
    """`begin(word, window, sequence, one_word, one, x_at, initial, seq, n, channels, channel, first, t_in)`: the rows and
    sequence numbers of the window in front of a run's first row; `first` is the step of the first of them."""
    load, unpack = vectors.load(p.dtype, vector), vectors.unpack(p.dtype, vector)
    fill_before, number_of = before(p, vector), sequence_numbers(p)
    taps, dilation, nbytes = p.taps, p.dilation, dtype_of(p.dtype).nbytes

    def begin(
        word: Any, window: Any, sequence: Any, one_word: Any, one: Any, x_at: Any, initial: Any, seq: Any, n: Any,
        channels: Any, channel: Any, first: Any, t_in: Any,
    ) -> None:  # fmt: skip
        row = i64(i64(channels) * nbytes)
        for k in range(taps - 1):
            step = i32(first + k * dilation)
            load(word, 0, u64(x_at + u64(step * row)), (step >= 0) & (step < t_in))
            unpack(word, 0, window, k * vector)
            fill_before(one_word, one, window, k * vector, initial, n, channels, channel, step, 1)
            sequence[k] = number_of(one_word, seq, n, t_in, step, 1)

    return begin


def window_rows(taps: int, ahead: Any) -> Any:
    """Rows of a window while `ahead` rows pass through it: a ring of few if it is round after as many, else all of them,
    which then move. `ahead` may be an array."""
    found = taps - 1 + np.asarray(ahead)
    for rows in (8, 4, 2, 1):
        if rows >= taps:
            found = np.where(np.asarray(ahead) % rows == 0, rows, found)
    return found


def window_mask(taps: int, ahead: int) -> int:
    """The place of row i in a window is i & mask."""
    rows = int(window_rows(taps, ahead))
    return rows - 1 if ahead % rows == 0 else (1 << 31) - 1


def moving(taps: int, ahead: int, vector: int) -> Callable[..., None]:
    """`move(window)`: makes the last rows of `vector` numbers the first ones, unless they are a ring."""
    is_ring = ahead % int(window_rows(taps, ahead)) == 0

    def move(window: Any) -> None:
        if not is_ring:
            for i in range((taps - 1) * vector):
                window[i] = window[i + ahead * vector]

    return move


def filtered_sum(p: DepthwiseConv1dParams, vector: int, mask: int) -> Callable[..., Any]:
    """`filtered(weights, window, sequence, row, e, start)`: a channel's sum whose first tap is in a row of the window."""
    taps, has_seq = p.taps, p.seq_idx

    def filtered(weights: Any, window: Any, sequence: Any, row: Any, e: Any, start: Any) -> Any:
        total = start
        for k in range(taps):
            value = window[((row + k) & mask) * vector + e]
            if has_seq:
                value = value if sequence[(row + k) & mask] == sequence[(row + taps - 1) & mask] else f32(0)
            total = f32(total + f32(weights[e * taps + k] * value))
        return total

    return filtered


def activation_taken_back(p: DepthwiseConv1dParams, vector: int, mask: int) -> Callable[..., None]:
    """`take_back(given, dz, weights, window, sequence, row, start, inside)`: a row of dz from one of dy."""
    filtered, sigmoid, taps, silu = filtered_sum(p, vector, mask), gate(), p.taps, p.silu

    def take_back(given: Any, dz: Any, weights: Any, window: Any, sequence: Any, row: Any, start: Any, inside: Any) -> None:
        for e in range(vector):
            gradient = given[e]
            if silu:
                z = filtered(weights, window, sequence, row, e, start[e])
                share = sigmoid(z)
                slope = f32(share * f32(f32(1) + f32(z * f32(f32(1) - share))))
                gradient = f32(gradient * slope) if inside else f32(0)
            dz[((taps - 1 + row) & mask) * vector + e] = gradient

    return take_back


def spread_sums(p: DepthwiseConv1dParams, vector: int, mask: int) -> Callable[..., None]:
    """`spread(numbers, weights, dz, sequence, row)`: dx of the step whose input is in a row of the window."""
    taps, has_seq = p.taps, p.seq_idx

    def spread(numbers: Any, weights: Any, dz: Any, sequence: Any, row: Any) -> None:
        for e in range(vector):
            total = f32(0)
            for k in range(taps):
                value = dz[((taps - 1 + row - k) & mask) * vector + e]
                if has_seq:
                    value = value if sequence[row & mask] == sequence[(taps - 1 + row - k) & mask] else f32(0)
                total = f32(total + f32(weights[e * taps + k] * value))
            numbers[e] = total

    return spread


def product_sums(p: DepthwiseConv1dParams, vector: int, mask: int) -> Callable[..., None]:
    """`add(sums, window, dz, sequence, row)`: adds the products of a step of y to sums[k * vector + e] of dw, and dz to
    those of db behind them."""
    taps, has_seq = p.taps, p.seq_idx

    def add(sums: Any, window: Any, dz: Any, sequence: Any, row: Any) -> None:
        for e in range(vector):
            gradient = dz[((taps - 1 + row) & mask) * vector + e]
            for k in range(taps):
                value = window[((row + k) & mask) * vector + e]
                if has_seq:
                    value = value if sequence[(row + k) & mask] == sequence[(row + taps - 1) & mask] else f32(0)
                sums[k * vector + e] = f32(sums[k * vector + e] + f32(gradient * value))
            sums[taps * vector + e] = f32(sums[taps * vector + e] + gradient)

    return add


def dx_store(p: DepthwiseConv1dParams, vector: int) -> Callable[..., None]:
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
