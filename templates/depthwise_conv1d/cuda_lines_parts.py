"""Device code that both kernels of lines use: vectors of a line with their halos, weights, sequence numbers, and sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schedsearch.ops.depthwise_conv1d import DepthwiseConv1dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.depthwise_conv1d.parts import reader, writer
from schedsearch.templates.parts import vectors
from schedsearch.templates.parts.casts import f32, i32, i64, u64
from schedsearch.templates.parts.vectors import MOST_BYTES


def aligned(dtype: str) -> int:
    """Elements of the widest access."""
    return MOST_BYTES // dtype_of(dtype).nbytes


@dataclass(frozen=True)
class Span:
    """The elements that a thread reads of a line for one vector: `before` of them, the vector, and `behind`.

    A halo has a power of two of elements, or whole accesses, so that it lies at a multiple of its bytes as well.
    """

    dtype: str
    before: int
    vector: int
    behind: int

    @classmethod
    def of(cls, dtype: str, before: int, vector: int, behind: int) -> Span:
        """A span with at least so many elements on both sides."""
        return cls(dtype, _halo(dtype, before), vector, _halo(dtype, behind))

    @property
    def size(self) -> int:
        return self.before + self.vector + self.behind

    @property
    def pieces(self) -> tuple[tuple[int, int, int], ...]:
        """Of each part: its first element, its elements and its first word."""
        found, at, word = [], 0, 0
        for count in (self.before, self.vector, self.behind):
            if count:
                found.append((at, count, word))
                word += vectors.words_of(self.dtype, count)
            at += count
        return tuple(found)

    @property
    def words(self) -> int:
        return sum(vectors.words_of(self.dtype, count) for _, count, _ in self.pieces)


def _halo(dtype: str, count: int) -> int:
    widest = aligned(dtype)
    return 1 << max(count - 1, 0).bit_length() if 0 < count <= widest else -(-count // widest) * widest


def _issuer(span: Span, piece: tuple[int, int, int]) -> Callable[..., None]:
    """`issue(words, at, line, step, steps, more)`: starts the load of one part that is wholly inside of the line."""
    place, count, word = piece
    load, nbytes, offset = vectors.load(span.dtype, count), dtype_of(span.dtype).nbytes, place - span.before

    def issue(words: Any, at: Any, line: Any, step: Any, steps: Any, more: Any) -> None:
        first = i32(step + offset)
        whole = (first >= 0) & (i32(first + count) <= steps) & more
        load(words, at + word, u64(line + u64(i64(first) * nbytes)), i32(whole))

    return issue


def loader(span: Span) -> Callable[..., None]:
    """`issue(words, at, line, step, steps, more)`: starts the loads of the vector at `step`, if there are `more`."""
    parts = [_issuer(span, piece) for piece in span.pieces]
    if len(parts) == 1:
        return parts[0]
    if len(parts) == 2:
        first, second = parts

        def issue_two(words: Any, at: Any, line: Any, step: Any, steps: Any, more: Any) -> None:
            first(words, at, line, step, steps, more)
            second(words, at, line, step, steps, more)

        return issue_two
    before, middle, behind = parts

    def issue_three(words: Any, at: Any, line: Any, step: Any, steps: Any, more: Any) -> None:
        before(words, at, line, step, steps, more)
        middle(words, at, line, step, steps, more)
        behind(words, at, line, step, steps, more)

    return issue_three


def value(p: DepthwiseConv1dParams, dtype: str, has_state: bool) -> Callable[..., Any]:
    """`value(word, one, line_at, initial, line, step, steps)`: an element of a line, what came before it, or zero."""
    read, read_state, nbytes, reach = reader(dtype), reader(p.dtype), dtype_of(dtype).nbytes, p.reach

    def element(word: Any, one: Any, line_at: Any, initial: Any, line: Any, step: Any, steps: Any) -> Any:
        found = read(word, one, u64(line_at + u64(i64(step) * nbytes)), 0, i32((step >= 0) & (step < steps)))
        if has_state and step < 0:
            found = read_state(word, one, initial, i64(i64(line) * reach + step + reach), i32(step >= -reach))
        return found

    return element


def _cut(span: Span, has_state: bool) -> Callable[..., Any]:
    """`cut(step, steps)`: whether a part of the span is neither wholly inside of the line nor wholly outside. What came
    before the line counts as inside."""
    before, vector, end = span.before, span.vector, span.vector + span.behind

    def crossed(first: Any, last: Any, steps: Any) -> Any:
        return ((first < 0) & (last > 0)) | ((first < steps) & (last > steps))

    def cut(step: Any, steps: Any) -> Any:
        middle, last = i32(step + vector), i32(step + end)
        if (step >= before) & (last <= steps):
            return False
        if has_state and step < before:
            return True
        ends = crossed(i32(step - before), step, steps) | crossed(middle, last, steps)
        return ends | crossed(step, middle, steps)

    return cut


def unpacker(p: DepthwiseConv1dParams, span: Span, has_state: bool) -> Callable[..., None]:
    """`unpack(words, at, window, word, one, line_at, initial, line, step, steps)`: the span of the vector at `step` as
    float32; what is cut by an end of the line is read by elements."""
    parts = span.pieces
    unpackers = [vectors.unpack(span.dtype, count) for _, count, _ in parts]
    places, words_at = [place for place, _, _ in parts], [word for _, _, word in parts]
    half = len(parts) // 2  # with less than three parts, some are unpacked twice, which compilers see
    first, middle, last = unpackers[0], unpackers[half], unpackers[-1]
    place_0, place_1, place_2 = places[0], places[half], places[-1]
    word_0, word_1, word_2 = words_at[0], words_at[half], words_at[-1]
    is_cut, element, size, before = _cut(span, has_state), value(p, span.dtype, has_state), span.size, span.before

    def unpack(
        words: Any, at: Any, window: Any, word: Any, one: Any, line_at: Any, initial: Any, line: Any, step: Any, steps: Any
    ) -> None:
        first(words, at + word_0, window, place_0)
        middle(words, at + word_1, window, place_1)
        last(words, at + word_2, window, place_2)
        if is_cut(step, steps):
            for e in range(size):
                window[e] = element(word, one, line_at, initial, line, i32(step - before + e), steps)

    return unpack


def storer(dtype: str, vector: int) -> Callable[..., None]:
    """`put(words, word, one, numbers, line_at, step, steps)`: stores the vector at `step`, as far as it is inside."""
    pack, store, write = vectors.pack(dtype, vector), vectors.store(dtype, vector), writer(dtype)
    nbytes = dtype_of(dtype).nbytes

    def put(words: Any, word: Any, one: Any, numbers: Any, line_at: Any, step: Any, steps: Any) -> None:
        if (step >= 0) & (i32(step + vector) <= steps):
            pack(numbers, 0, words, 0)
            store(words, 0, u64(line_at + u64(i64(step) * nbytes)))
        else:
            for e in range(vector):
                at = i32(step + e)
                if (at >= 0) & (at < steps):
                    write(word, one, u64(line_at + u64(i64(at) * nbytes)), 0, numbers[e])

    return put


def weights_loader(p: DepthwiseConv1dParams) -> Callable[..., Any]:
    """`load(word, one, weights, weight, bias, channel)`: the weights of a channel; returns its bias, or zero."""
    read, taps, has_bias = reader(p.weight_dtype), p.taps, p.bias

    def load(word: Any, one: Any, weights: Any, weight: Any, bias: Any, channel: Any) -> Any:
        for k in range(taps):
            weights[k] = read(word, one, weight, i64(i64(channel) * taps + k), 1)
        return read(word, one, bias, channel, 1) if has_bias else f32(0)

    return load


def numbers_loader(p: DepthwiseConv1dParams, before: int, count: int) -> Callable[..., None]:
    """`load(word, sequence, seq, n, step, steps)`: those of `count` steps, of which `before` are before `step`."""
    load_number, has = vectors.load("float32", 1), p.seq_idx

    def load(word: Any, sequence: Any, seq: Any, n: Any, step: Any, steps: Any) -> None:
        if has:
            for j in range(count):
                at = i32(step - before + j)
                load_number(word, 0, u64(seq + u64((i64(n) * steps + at) * 4)), i32((at >= 0) & (at < steps)))
                sequence[j] = i32(word[0])

    return load


def filtered_sum(p: DepthwiseConv1dParams, origin: int, numbers_origin: int) -> Callable[..., Any]:
    """`filtered(weights, window, sequence, e, start)`: the sum of the step that is `e` behind the one at place `origin` of
    the window."""
    taps, dilation, left, has_seq = p.taps, p.dilation, p.padding[0], p.seq_idx

    def filtered(weights: Any, window: Any, sequence: Any, e: Any, start: Any) -> Any:
        total = start
        for k in range(taps):
            step = window[origin + e - left + k * dilation]
            if has_seq:
                same = sequence[numbers_origin + e - left + k * dilation] == sequence[numbers_origin + e]
                step = step if same else f32(0)
            total = f32(total + f32(weights[k] * step))
        return total

    return filtered


def spread_sum(p: DepthwiseConv1dParams, origin: int, numbers_origin: int) -> Callable[..., Any]:
    """`spread(weights, dz, sequence, e)`: dx of the step that is `e` behind the one at place `origin` of dz."""
    taps, dilation, left, has_seq = p.taps, p.dilation, p.padding[0], p.seq_idx

    def spread(weights: Any, dz: Any, sequence: Any, e: Any) -> Any:
        total = f32(0)
        for k in range(taps):
            step = dz[origin + e + left - k * dilation]
            if has_seq:
                same = sequence[numbers_origin + e] == sequence[numbers_origin + e + left - k * dilation]
                step = step if same else f32(0)
            total = f32(total + f32(weights[k] * step))
        return total

    return spread


def product_sums(p: DepthwiseConv1dParams, origin: int, dz_origin: int, numbers_origin: int) -> Callable[..., None]:
    """`add(sums, window, dz, sequence, e)`: a step's products to sums[k] of dw, and dz to that of db behind them."""
    taps, dilation, left, has_seq = p.taps, p.dilation, p.padding[0], p.seq_idx

    def add(sums: Any, window: Any, dz: Any, sequence: Any, e: Any) -> None:
        gradient = dz[dz_origin + e]
        for k in range(taps):
            step = window[origin + e - left + k * dilation]
            if has_seq:
                same = sequence[numbers_origin + e - left + k * dilation] == sequence[numbers_origin + e]
                step = step if same else f32(0)
            sums[k] = f32(sums[k] + f32(gradient * step))
        sums[taps] = f32(sums[taps] + gradient)

    return add


def final_adder(p: DepthwiseConv1dParams, vector: int) -> Callable[..., None]:
    """`add(numbers, word, one, d_final, line, step, steps)`: adds the gradient of the final state to dx of the vector at
    `step`."""
    read, reach, has = reader(p.dtype), p.reach, p.final_state

    def add(numbers: Any, word: Any, one: Any, d_final: Any, line: Any, step: Any, steps: Any) -> None:
        first = i32(step - (steps - reach))  # the place in the state
        if has and i32(first + vector) > 0:
            for e in range(vector):
                place = i32(first + e)
                given = read(word, one, d_final, i64(i64(line) * reach + place), i32((place >= 0) & (place < reach)))
                numbers[e] = f32(numbers[e] + given)

    return add


def initial_storer(p: DepthwiseConv1dParams, origin: int) -> Callable[..., None]:
    """`put(weights, dz, word, one, d_initial, d_final, line, step, steps)`: the gradient of the initial state, if the vector
    at `step` begins its line. It is dx of the steps before the line, which begins somewhere in the vector's first access."""
    read, write, taps, dilation, left = reader(p.dtype), writer(p.dtype), p.taps, p.dilation, p.padding[0]
    reach, has, has_final = p.reach, p.initial_state, p.final_state
    before, behind = -p.reach, aligned(p.dtype) - 1

    def put(
        weights: Any, dz: Any, word: Any, one: Any, d_initial: Any, d_final: Any, line: Any, step: Any, steps: Any
    ) -> None:
        if has and step <= 0:
            for e in range(before, behind):
                total = f32(0)
                for k in range(taps):
                    if origin + e + left - k * dilation >= 0:  # others are in front of the line, where dz is zero
                        total = f32(total + f32(weights[k] * dz[origin + e + left - k * dilation]))
                at = i32(step + e)
                inside = (at < 0) & (at >= -reach)
                if has_final:
                    final = i32(at - (steps - reach))
                    given = read(word, one, d_final, i64(i64(line) * reach + final), i32(inside & (final >= 0)))
                    total = f32(total + given)
                if inside:
                    write(word, one, d_initial, i64(i64(line) * reach + at + reach), total)

    return put
