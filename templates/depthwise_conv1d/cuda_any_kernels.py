"""Any number of taps and either order of memory: a thread computes a run of steps of one channel.

The sums of a run stay in registers, and so does a ring of as many inputs. Each tap reads one more input and one weight, and
adds a product to every sum. With a dilation d a run takes every d-th step. Three kernels are one:

- forward: y of x
- slope: dz of x and dy, in float32, where an activation must be taken back
- gradient: dx of dz or dy, with the taps in reverse
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from numba import cuda

from schedsearch.ops.depthwise_conv1d import DepthwiseConv1dParams
from schedsearch.templates.depthwise_conv1d.parts import divided, gate, reader, writer
from schedsearch.templates.parts.casts import f32, i32, i64, u32

MOST_REREAD = 8  # taps, of which each output reads its inputs anew
TAPS_OF_BLOCK = 4  # of which a block of the last kernel computes the gradient


@dataclass(frozen=True)
class AnyPlan:
    """`lanes` threads side by side along the axis whose elements are neighbours."""

    length: int
    lanes: int
    threads: int

    @property
    def rows(self) -> int:
        return self.threads // self.lanes


def _placer(p: DepthwiseConv1dParams) -> Callable[..., Any]:
    """`place(n, c, t, channels, steps)`: of an element in its array."""
    channels_last = p.layout == "NTC"

    def place(n: Any, c: Any, t: Any, channels: Any, steps: Any) -> Any:
        if channels_last:
            return i64((i64(n) * steps + t) * channels + c)
        return i64((i64(n) * channels + c) * steps + t)

    return place


def _value(p: DepthwiseConv1dParams, dtype: str, has_state: bool) -> Callable[..., Any]:
    """`value(words, one, source, initial, n, c, t, channels, steps)`: the source, what came before it, or zero."""
    read, read_state, place, reach = reader(dtype), reader(p.dtype), _placer(p), p.reach

    def value(words: Any, one: Any, source: Any, initial: Any, n: Any, c: Any, t: Any, channels: Any, steps: Any) -> Any:
        found = read(words, one, source, place(n, c, t, channels, steps), (t >= 0) & (t < steps))
        if has_state and t < 0:
            at = i64((i64(n) * channels + c) * reach + t + reach)
            found = read_state(words, one, initial, at, t >= -reach)
        return found

    return value


def _number(p: DepthwiseConv1dParams) -> Callable[..., Any]:
    """`number(words, one, seq, n, t, steps)`: that of a step's sequence, as the float32 of its bits; -1 outside."""
    read, has = reader("float32"), p.seq_idx

    def number(words: Any, one: Any, seq: Any, n: Any, t: Any, steps: Any) -> Any:
        if has:
            inside = (t >= 0) & (t < steps)
            read(words, one, seq, i64(i64(n) * steps + t), inside)
            return i32(words[0]) if inside else i32(-1)
        return i32(0)

    return number


def interleaved(p: DepthwiseConv1dParams) -> bool:
    """Whether the steps of a thread lie between those of its neighbours: few taps, and steps as neighbours in memory."""
    return p.layout == "NCT" and p.taps <= MOST_REREAD


def _item(p: DepthwiseConv1dParams, plan: AnyPlan) -> Callable[..., Any]:
    """`item(thread, block, across, runs, channels)`: (n, channel, first step) of a thread."""
    lanes, rows, length, dilation, last = plan.lanes, plan.rows, plan.length, p.dilation, p.layout == "NTC"
    between, split = interleaved(p), divided()

    def item(thread: Any, block: Any, across: Any, runs: Any, channels: Any) -> Any:
        down, part = split(block, across)
        row, lane = split(thread, lanes)
        row = i32(down * rows + row)
        if between:
            n, channel = split(row, channels)
            return n, channel, i32(part * (lanes * length) + lane)
        lane = i32(part * lanes + lane)
        run, phase = split(row if last else lane, dilation)
        n, run = split(run, runs)
        first = i32(phase + run * (length * dilation))
        if last:
            return n, lane, first
        n, channel = split(row, channels)
        # a lane behind the last run has no channel
        return n, i32(channel if lane < runs * dilation else channels), first

    return item


def _ring_sums(p: DepthwiseConv1dParams, plan: AnyPlan, source: str, backwards: bool) -> Callable[..., None]:
    """`add(word, one, sums, ring, own, theirs, weight, source, initial, seq, n, channel, first, channels, steps, out_steps,
    offset)`: adds the products of a run. `own` and `theirs` have the sequences of outputs and of the ring."""
    length, taps, dilation, has_seq = plan.length, p.taps, p.dilation, p.seq_idx
    value, number = _value(p, source, p.initial_state and not backwards), _number(p)
    read_weight = reader(p.weight_dtype)

    def add(
        word: Any, one: Any, sums: Any, ring: Any, own: Any, theirs: Any, weight: Any, source: Any, initial: Any, seq: Any,
        n: Any, channel: Any, first: Any, channels: Any, steps: Any, out_steps: Any, offset: Any,
    ) -> None:  # fmt: skip
        for j in range(length):
            own[j] = number(word, one, seq, n, i32(first + j * dilation), out_steps)
        for j in range(length - 1):
            step = i32(first + offset + j * dilation)
            ring[j] = value(word, one, source, initial, n, channel, step, channels, steps)
            theirs[j] = number(word, one, seq, n, step, steps)
        for base in range(i32(0), i32(taps), i32(length)):
            for i in range(length):
                k = i32(base + i)
                if k < taps:
                    step = i32(first + offset + (k + length - 1) * dilation)
                    last = (i + length - 1) % length
                    ring[last] = value(word, one, source, initial, n, channel, step, channels, steps)
                    theirs[last] = number(word, one, seq, n, step, steps)
                    tap = i32(taps - 1 - k) if backwards else k
                    factor = read_weight(word, one, weight, i64(i64(channel) * taps + tap), 1)
                    for j in range(length):
                        term = ring[(i + j) % length]
                        if has_seq:
                            term = term if theirs[(i + j) % length] == own[j] else f32(0)
                        sums[j] = f32(sums[j] + f32(factor * term))

    return add


def _reread_sums(p: DepthwiseConv1dParams, plan: AnyPlan, source: str, backwards: bool) -> Callable[..., None]:
    """The same for steps between those of other threads: each output reads its own inputs, mostly from the caches."""
    length, lanes, taps, dilation, has_seq = plan.length, plan.lanes, p.taps, p.dilation, p.seq_idx
    value, number = _value(p, source, p.initial_state and not backwards), _number(p)
    read_weight = reader(p.weight_dtype)

    def add(
        word: Any, one: Any, sums: Any, ring: Any, own: Any, theirs: Any, weight: Any, source: Any, initial: Any, seq: Any,
        n: Any, channel: Any, first: Any, channels: Any, steps: Any, out_steps: Any, offset: Any,
    ) -> None:  # fmt: skip
        for j in range(length):
            own[j] = number(word, one, seq, n, i32(first + j * lanes), out_steps)
        for k in range(taps):
            tap = i32(taps - 1 - k) if backwards else i32(k)
            factor = read_weight(word, one, weight, i64(i64(channel) * taps + tap), 1)
            for j in range(length):
                step = i32(first + offset + j * lanes + k * dilation)
                term = value(word, one, source, initial, n, channel, step, channels, steps)
                if has_seq:
                    term = term if number(word, one, seq, n, step, steps) == own[j] else f32(0)
                sums[j] = f32(sums[j] + f32(factor * term))

    return add


def correlate_kernel(
    p: DepthwiseConv1dParams, plan: AnyPlan, mode: Literal["forward", "slope", "gradient"]
) -> Callable[..., None]:
    """The kernel (source, weight, bias, initial, seq, dy, d_final, out, state, channels, steps, out_steps, offset, batch,
    across, runs). The first tap of step t of the output is step t + offset of the source, which has `steps` steps.

    `state` is the final state forward, and the gradient of the initial state where it computes dx.
    """
    length, reach, spacing = plan.length, p.reach, plan.lanes if interleaved(p) else p.dilation
    backwards, slope, silu, has_bias = mode == "gradient", mode == "slope", p.silu and mode != "gradient", p.bias
    has_bias = has_bias and not backwards
    source = "float32" if backwards and p.silu else p.dtype
    has_final, begins = p.final_state, p.initial_state and backwards
    add = (_reread_sums if interleaved(p) else _ring_sums)(p, plan, source, backwards)
    value, item_of = _value(p, source, p.initial_state and not backwards), _item(p, plan)
    read_weight, read, place, sigmoid = reader(p.weight_dtype), reader(p.dtype), _placer(p), gate()
    write, write_state = writer("float32" if slope else p.dtype), writer(p.dtype)
    gives_state = has_final and mode == "forward"

    def correlate(  # type: ignore[no-untyped-def]
        source, weight, bias, initial, seq, dy, d_final, out, state, channels, steps, out_steps, offset, batch, across, runs
    ) -> None:
        word = cuda.local.array(1, u32)
        one = cuda.local.array(1, f32)
        sums = cuda.local.array(length, f32)
        ring = cuda.local.array(length, f32)
        own = cuda.local.array(length, i32)
        theirs = cuda.local.array(length, i32)
        n, channel, first = item_of(i32(cuda.threadIdx.x), i32(cuda.blockIdx.x), across, runs, channels)
        if (channel < channels) & (n < batch):
            is_first = first == 0
            if begins:
                first = i32(first - reach)
            before = read_weight(word, one, bias, channel, 1) if has_bias else f32(0)
            for j in range(length):
                sums[j] = before
            add(
                word, one, sums, ring, own, theirs, weight, source, initial, seq, n, channel, first, channels, steps,
                out_steps, offset,
            )  # fmt: skip
            for j in range(length):
                step = i32(first + j * spacing)
                total = sums[j]
                if step < out_steps:
                    at = place(n, channel, step, channels, out_steps)
                    if silu:
                        share = sigmoid(total)
                        if slope:
                            change = f32(share * f32(f32(1) + f32(total * f32(f32(1) - share))))
                            total = f32(change * read(word, one, dy, at, 1))
                        else:
                            total = f32(total * share)
                    if backwards and has_final and step >= out_steps - reach:
                        state_at = i64((i64(n) * channels + channel) * reach + step - (out_steps - reach))
                        total = f32(total + read(word, one, d_final, state_at, 1))
                    if step >= 0:
                        write(word, one, out, at, total)
                    elif begins:
                        write_state(word, one, state, i64((i64(n) * channels + channel) * reach + step + reach), total)
            if gives_state and is_first:
                for i in range(i32(reach)):
                    held = value(word, one, source, initial, n, channel, i32(steps - reach + i), channels, steps)
                    write_state(word, one, state, i64((i64(n) * channels + channel) * reach + i), held)

    return correlate


def weight_kernel(p: DepthwiseConv1dParams, plan: AnyPlan) -> Callable[..., None]:
    """The kernel (x, dz, initial, seq, parts, channels, t_in, t_out, left, batch, across, splits), in blocks of
    [split][group of taps][channels]: a block's sums of dw and db as parts[split][taps + 1][channels]."""
    lanes = plan.lanes if p.layout == "NTC" else 1
    rows, threads, taps, dilation, has_seq = plan.threads // lanes, plan.threads, p.taps, p.dilation, p.seq_idx
    groups, held, divide = -(-taps // TAPS_OF_BLOCK), TAPS_OF_BLOCK + 1, divided()
    value, number, place = _value(p, p.dtype, p.initial_state), _number(p), _placer(p)
    read, write = reader("float32" if p.silu else p.dtype), writer("float32")

    def gradient(x, dz, initial, seq, parts, channels, t_in, t_out, left, batch, across, splits) -> None:  # type: ignore[no-untyped-def]
        partial = cuda.shared.array(threads, f32)
        word = cuda.local.array(1, u32)
        one = cuda.local.array(1, f32)
        sums = cuda.local.array(held, f32)
        thread, block = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x)
        down, part = divide(block, across)
        row, lane = divide(thread, lanes)
        channel = i32(part * lanes + lane)
        split, group = divide(down, groups)
        first_tap = i32(group * TAPS_OF_BLOCK)
        for i in range(held):
            sums[i] = f32(0)
        if channel < channels:
            for n in range(i32(0), batch, i32(1)):
                for t in range(i32(split * rows + row), t_out, i32(splits * rows)):
                    gradient = read(word, one, dz, place(n, channel, t, channels, t_out), 1)
                    own = number(word, one, seq, n, t, t_in)
                    for i in range(TAPS_OF_BLOCK):
                        step = i32(t - left + (first_tap + i) * dilation)
                        factor = value(word, one, x, initial, n, channel, step, channels, t_in)
                        if has_seq:
                            factor = factor if number(word, one, seq, n, step, t_in) == own else f32(0)
                        sums[i] = f32(sums[i] + f32(factor * gradient))
                    sums[TAPS_OF_BLOCK] = f32(sums[TAPS_OF_BLOCK] + gradient)
        for i in range(held):
            partial[thread] = sums[i]
            cuda.syncthreads()
            tap = i32(first_tap + i) if i < TAPS_OF_BLOCK else i32(taps)
            wanted = (tap < taps) if i < TAPS_OF_BLOCK else (first_tap == 0)
            if (thread < lanes) & (channel < channels) & wanted:
                total = partial[thread]
                for other in range(1, rows):
                    total = f32(total + partial[other * lanes + thread])
                write(word, one, parts, i64((i64(split) * (taps + 1) + tap) * channels + channel), total)
            cuda.syncthreads()

    return gradient
