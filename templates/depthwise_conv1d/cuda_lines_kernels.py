"""Few taps with steps as neighbours (NCT): a thread computes vectors of neighbouring steps of one channel.

The line of a channel may begin anywhere, but its vectors lie at multiples of their bytes: they are counted from the last
such place at or before the first step, so that the ends of a line may cut its first and its last vector. x, y and their
gradients have lines of the same length, and so the same places. What taps reach on both sides of a vector is its halo, which
is read with it, mostly from the first-level cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import cuda

from schedsearch.ops.depthwise_conv1d import DepthwiseConv1dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.depthwise_conv1d import cuda_lines_parts as lines
from schedsearch.templates.depthwise_conv1d.cuda_lines_parts import Span
from schedsearch.templates.depthwise_conv1d.parts import divided, gate, writer
from schedsearch.templates.parts import vectors
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64


@dataclass(frozen=True)
class LinePlan:
    """The knobs; see `cuda_lines.DepthwiseConv1dLines`."""

    vector: int
    ahead: int
    lanes: int
    threads: int

    @property
    def rows(self) -> int:
        return self.threads // self.lanes


def forward_kernel(p: DepthwiseConv1dParams, plan: LinePlan) -> Callable[..., None]:
    """The kernel (x, weight, bias, initial, seq, y, final, channels, steps, count, across, chunks).

    `count` lines in blocks of `rows`, of each of which a thread computes `chunks` times `ahead` vectors; `across` blocks
    share lines.
    """
    vector, ahead, lanes, rows, taps = plan.vector, plan.ahead, plan.lanes, plan.rows, p.taps
    reach, nbytes, left, silu = p.reach, dtype_of(p.dtype).nbytes, p.padding[0], p.silu
    span = Span.of(p.dtype, left, vector, reach - left)
    span_words, all_words, size, out_words = span.words, span.words * ahead, span.size, vectors.words_of(p.dtype, vector)
    issue, unpack = lines.loader(span), lines.unpacker(p, span, p.initial_state)
    load_weights, sigmoid, put = lines.weights_loader(p), gate(), lines.storer(p.dtype, vector)
    held = vector + reach
    numbers, filtered = lines.numbers_loader(p, left, held), lines.filtered_sum(p, span.before, left)
    element, write, has_final = lines.value(p, p.dtype, p.initial_state), writer(p.dtype), p.final_state
    aligned, stride, split = lines.aligned(p.dtype), lanes * vector, divided()

    def forward(x, weight, bias, initial, seq, y, final, channels, steps, count, across, chunks) -> None:  # type: ignore[no-untyped-def]
        words = cuda.local.array(all_words, u32)
        results = cuda.local.array(out_words, u32)
        word = cuda.local.array(1, u32)
        one = cuda.local.array(1, f32)
        weights = cuda.local.array(taps, f32)
        window = cuda.local.array(size, f32)
        sums = cuda.local.array(vector, f32)
        sequence = cuda.local.array(held, i32)
        thread, block = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x)
        down, part = split(block, across)
        row, lane = split(thread, lanes)
        line = i32(down * rows + row)
        if line < count:
            n, channel = split(line, channels)
            begin = i64(i64(line) * steps)
            x_at, y_at = u64(x + u64(begin * nbytes)), u64(y + u64(begin * nbytes))
            place = i32(part * (chunks * ahead * lanes) + lane)
            first = i32(place * vector - i32(begin % aligned))
            for i in range(ahead):
                issue(words, i * span_words, x_at, i32(first + i * stride), steps, 1)
            start = load_weights(word, one, weights, weight, bias, channel)
            for chunk in range(chunks):
                for i in range(ahead):
                    step = i32(first + (chunk * ahead + i) * stride)
                    unpack(words, i * span_words, window, word, one, x_at, initial, line, step, steps)
                    issue(words, i * span_words, x_at, i32(step + ahead * stride), steps, i32(chunk + 1) < chunks)
                    numbers(word, sequence, seq, n, step, steps)
                    for e in range(vector):
                        total = filtered(weights, window, sequence, e, start)
                        sums[e] = f32(total * sigmoid(total)) if silu else total
                    put(results, word, one, sums, y_at, step, steps)
            if has_final and (part == 0) & (lane == 0):
                for i in range(i32(reach)):
                    last = element(word, one, x_at, initial, line, i32(steps - reach + i), steps)
                    write(word, one, final, i64(i64(line) * reach + i), last)

    return forward


def _block_sums(plan: LinePlan, taps: int) -> Callable[..., None]:
    """`add_up(partial, word, one, sums, parts, thread, part, channel, channels)`: sums of a block's lines, to its part."""
    lanes, threads, count, write = plan.lanes, plan.threads, taps + 1, writer("float32")
    levels, split = lanes.bit_length() - 1, divided()

    def add_up(
        partial: Any, word: Any, one: Any, sums: Any, parts: Any, thread: Any, part: Any, channel: Any, channels: Any
    ) -> None:
        for i in range(count):
            partial[i * threads + thread] = sums[i]
        cuda.syncthreads()
        _, lane = split(thread, lanes)
        for level in range(levels):
            width = i32(lanes >> (level + 1))
            if lane < width:
                for i in range(count):
                    partial[i * threads + thread] = f32(
                        partial[i * threads + thread] + partial[i * threads + thread + width]
                    )
            cuda.syncthreads()
        if (lane == 0) & (channel < channels):
            for i in range(count):
                write(word, one, parts, i64((part + i) * channels + channel), partial[i * threads + thread])

    return add_up


def _activation_taken_back(p: DepthwiseConv1dParams, given: Span, filtered: Callable[..., Any]) -> Callable[..., None]:
    """`take_back(dz, weights, window, sequence, start)`: dz in place of dy."""
    sigmoid, size, before, silu = gate(), given.size, given.before, p.silu
    reads = [e for e in range(given.size) if -(p.reach - p.padding[0]) <= e - before < given.vector + p.padding[0]]
    low, high = reads[0], reads[-1] + 1  # a halo may be wider than what is read of it

    def take_back(dz: Any, weights: Any, window: Any, sequence: Any, start: Any) -> None:
        if silu:
            for e in range(size):
                if low <= e < high:
                    z = filtered(weights, window, sequence, e - before, start)
                    share = sigmoid(z)
                    dz[e] = f32(dz[e] * f32(share * f32(f32(1) + f32(z * f32(f32(1) - share)))))

    return take_back


def _locator(p: DepthwiseConv1dParams, vector: int) -> Callable[..., Any]:
    """`locate(n, place, channel, channels, steps)`: where a line begins, in bytes, and the step of one of its vectors."""
    nbytes, aligned = dtype_of(p.dtype).nbytes, lines.aligned(p.dtype)

    def locate(n: Any, place: Any, channel: Any, channels: Any, steps: Any) -> Any:
        begin = i64((i64(n) * channels + channel) * steps)
        return u64(begin * nbytes), i32(place * vector - i32(begin % aligned))

    return locate


def backward_kernel(p: DepthwiseConv1dParams, plan: LinePlan) -> Callable[..., None]:
    """The kernel (x, weight, bias, dy, initial, d_final, seq, dx, d_initial, parts, channels, steps, batch, across,
    of_batch, of_lines, of_line). `parts` gets a block's sums of dw and db as [split][taps + 1][channels].

    A block has `rows` channels of all batch rows, each of which has `of_line` vectors in a line; `of_batch` times `of_lines`
    blocks share the rows and the vectors. A thread loads its next vector while it computes one.
    The halos of x and dy are wide enough to compute dz wherever a vector of dx reads it.
    """
    vector, lanes, rows, taps = plan.vector, plan.lanes, plan.rows, p.taps
    reach, left, threads, divide = p.reach, p.padding[0], plan.threads, divided()
    right = reach - left
    span = Span.of(p.dtype, reach, vector, reach) if p.silu else Span.of(p.dtype, left, vector, right)
    given = Span.of(p.dtype, right, vector, left)
    span_words, given_words, out_words = span.words, given.words, vectors.words_of(p.dtype, vector)
    size, given_size = span.size, given.size
    issue, unpack = lines.loader(span), lines.unpacker(p, span, p.initial_state)
    issue_given, unpack_given = lines.loader(given), lines.unpacker(p, given, False)
    held, load_weights, put = vector + 2 * reach, lines.weights_loader(p), lines.storer(p.dtype, vector)
    numbers, filtered = lines.numbers_loader(p, reach, held), lines.filtered_sum(p, span.before, reach)
    take_back, spread = _activation_taken_back(p, given, filtered), lines.spread_sum(p, given.before, reach)
    add_products = lines.product_sums(p, span.before, given.before, reach)
    add_up, locate, sums_size, shared = _block_sums(plan, taps), _locator(p, vector), taps + 1, (taps + 1) * threads
    add_final, put_initial = lines.final_adder(p, vector), lines.initial_storer(p, given.before)

    def backward(  # type: ignore[no-untyped-def]
        x, weight, bias, dy, initial, d_final, seq, dx, d_initial, parts, channels, steps, batch, across, of_batch, of_lines,
        of_line,
    ) -> None:  # fmt: skip
        partial = cuda.shared.array(shared, f32)
        words = cuda.local.array(span_words, u32)
        dy_words = cuda.local.array(given_words, u32)
        results = cuda.local.array(out_words, u32)
        word = cuda.local.array(1, u32)
        one = cuda.local.array(1, f32)
        weights = cuda.local.array(taps, f32)
        window = cuda.local.array(size, f32)
        dz = cuda.local.array(given_size, f32)
        slopes = cuda.local.array(vector, f32)
        sums = cuda.local.array(sums_size, f32)
        sequence = cuda.local.array(held, i32)
        thread, block = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x)
        split, part = divide(block, across)
        row, lane = divide(thread, lanes)
        channel = i32(part * rows + row)
        for i in range(sums_size):
            sums[i] = f32(0)
        if channel < channels:
            start = load_weights(word, one, weights, weight, bias, channel)
            of_places, of_rows = divide(split, of_batch)
            first, stride = i32(of_places * lanes + lane), i32(of_lines * lanes)
            n, place = i32(of_rows if first < of_line else batch), first
            offset, step = locate(n, place, channel, channels, steps)
            issue(words, 0, u64(x + offset), step, steps, n < batch)
            issue_given(dy_words, 0, u64(dy + offset), step, steps, n < batch)
            while n < batch:
                numbers(word, sequence, seq, n, step, steps)
                dx_at, own, line = u64(dx + offset), step, i32(n * channels + channel)
                unpack(words, 0, window, word, one, u64(x + offset), initial, line, step, steps)
                unpack_given(dy_words, 0, dz, word, one, u64(dy + offset), initial, line, step, steps)
                place = i32(place + stride)
                if place >= of_line:
                    n, place = i32(n + of_batch), first
                offset, step = locate(n, place, channel, channels, steps)
                issue(words, 0, u64(x + offset), step, steps, n < batch)
                issue_given(dy_words, 0, u64(dy + offset), step, steps, n < batch)
                take_back(dz, weights, window, sequence, start)
                for e in range(vector):
                    add_products(sums, window, dz, sequence, e)
                    slopes[e] = spread(weights, dz, sequence, e)
                add_final(slopes, word, one, d_final, line, own, steps)
                put(results, word, one, slopes, dx_at, own, steps)
                put_initial(weights, dz, word, one, d_initial, d_final, line, own, steps)
        add_up(partial, word, one, sums, parts, thread, i64(i64(split) * (taps + 1)), channel, channels)

    return backward
