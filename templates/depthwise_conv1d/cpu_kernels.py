"""Kernels of depthwise_conv1d_cpu: plain loops over neighbours in memory, which LLVM makes loops over vectors of.

Sizes are arguments, so that one machine code serves every length, batch and number of channels. As on GPUs, one kernel is
three: y of x (forward), dz of x and dy (slope), and dx of dz (gradient, with the taps in reverse).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from schedsearch.backend.cpu_ops import as_array
from schedsearch.backend.cpu_taps import stack_memory
from schedsearch.ops.depthwise_conv1d import DepthwiseConv1dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.parts.casts import f32, i32, i64
from schedsearch.templates.parts.cpu_elements import element_type, narrowed, widened
from schedsearch.templates.parts.cpu_functions import exp

Mode = Literal["forward", "slope", "gradient"]
_LANES = 64  # partial sums of a product of two lines


class _Formats:
    """How a kernel of a mode reads and writes."""

    def __init__(self, p: DepthwiseConv1dParams, mode: Mode) -> None:
        source = "float32" if mode == "gradient" and p.silu else p.dtype
        out = "float32" if mode == "slope" else p.dtype
        self.source, self.widen = element_type(source), widened(source)
        self.out, self.narrow = element_type(out), narrowed(out)
        self.state, self.widen_state, self.narrow_state = element_type(p.dtype), widened(p.dtype), narrowed(p.dtype)
        self.source_bytes, self.out_bytes, self.state_bytes = (dtype_of(each).nbytes for each in (source, out, p.dtype))
        self.weight, self.widen_weight = element_type(p.weight_dtype), widened(p.weight_dtype)


def correlate_kernel(p: DepthwiseConv1dParams, mode: Mode, block: int, steps_of_item: int) -> Callable[..., None]:
    """The kernel (source, weight, bias, initial, seq, dy, d_final, out, state, batch, channels, steps, out_steps, offset,
    start, stop), whose items are (n, channels, steps).

    Args:
        block: channels of an item; 1 if steps are neighbours.
    """
    last = p.layout == "NTC"
    add_taps = _taps_of_rows(p, mode, block) if last else _taps_of_line(p, mode)
    add_state = _states(p, mode, block)
    finish, formats = _finish(p, mode, block), _Formats(p, mode)
    source_type, state_type, weight_type = formats.source, formats.state, formats.weight
    widen_weight, reach, taps = formats.widen_weight, p.reach, p.taps
    backwards, has_bias = mode == "gradient", p.bias and mode != "gradient"
    begins = reach if p.initial_state and backwards else 0
    size = block * steps_of_item
    sums_memory, weights_memory = stack_memory(4 * size), stack_memory(4 * taps * block)
    gives_final = p.final_state and mode == "forward"
    write_final = _final_state(p)

    def correlate(  # type: ignore[no-untyped-def]
        source, weight, bias, initial, seq, dy, d_final, out, state, batch, channels, steps, out_steps, offset, start, stop
    ) -> None:
        values = as_array(source, (batch * channels * steps,), source_type)
        before = as_array(initial, (batch * channels * reach,), state_type)
        after = as_array(d_final, (batch * channels * reach,), state_type)
        states = as_array(state, (batch * channels * reach,), state_type)
        numbers = as_array(seq, (batch * max(steps, out_steps),), i32)
        factors, biases = as_array(weight, (channels * taps,), weight_type), as_array(bias, (channels,), weight_type)
        sums_at, weights_at = sums_memory(), weights_memory()
        sums, weights = as_array(sums_at, (size,), f32), as_array(weights_at, (taps * block,), f32)
        blocks = (channels + block - 1) // block
        pieces = (out_steps + begins + steps_of_item - 1) // steps_of_item
        for item in range(start, stop):
            first = item % pieces * steps_of_item - begins
            channel = item // pieces % blocks * block
            n = item // (pieces * blocks)
            used = min(block, channels - channel)
            count = min(steps_of_item, out_steps - first)
            for k in range(taps):
                for e in range(used):
                    tap = taps - 1 - k if backwards else k
                    weights[k * block + e] = widen_weight(factors[(channel + e) * taps + tap])
            for j in range(count):
                for e in range(used):
                    sums[j * block + e] = widen_weight(biases[channel + e]) if has_bias else f32(0)
            add_taps(
                source, weights_at, sums_at, numbers, n, channel, used, first, count, channels, steps, out_steps, offset
            )
            add_state(before, after, weights, sums, n, channel, used, first, count, channels, steps, out_steps, offset)
            finish(sums_at, out, dy, states, n, channel, used, first, count, channels, out_steps)
            if gives_final and first == 0:
                write_final(values, before, states, n, channel, used, channels, steps)

    return correlate


def _taps_of_rows(p: DepthwiseConv1dParams, mode: Mode, block: int) -> Callable[..., None]:
    """Channels are neighbours: a row of channels for each tap of each step.

    Rows are arrays of their own, whose indices begin at 0: LLVM makes no vectors of indices that could be below 0.
    """
    taps, dilation, has_seq, formats = p.taps, p.dilation, p.seq_idx, _Formats(p, mode)
    widen, element, nbytes = formats.widen, formats.source, formats.source_bytes

    def add(  # type: ignore[no-untyped-def]
        source, weights, sums, numbers, n, channel, used, first, count, channels, steps, out_steps, offset
    ) -> None:
        for j in range(count):
            total = as_array(sums + 4 * j * block, (used,), f32)
            for k in range(taps):
                step = first + j + offset + k * dilation
                if step >= 0 and step < steps:
                    if has_seq and numbers[n * steps + step] != numbers[n * out_steps + first + j]:
                        continue
                    row = as_array(i64(source) + nbytes * ((n * steps + step) * channels + channel), (used,), element)
                    factors = as_array(weights + 4 * k * block, (used,), f32)
                    for e in range(used):
                        total[e] += factors[e] * widen(row[e])

    return add


def _taps_of_line(p: DepthwiseConv1dParams, mode: Mode) -> Callable[..., None]:
    """Steps are neighbours: a line of steps for each tap."""
    taps, dilation, has_seq, formats = p.taps, p.dilation, p.seq_idx, _Formats(p, mode)
    widen, element, nbytes = formats.widen, formats.source, formats.source_bytes

    def add(  # type: ignore[no-untyped-def]
        source, weights, sums, numbers, n, channel, used, first, count, channels, steps, out_steps, offset
    ) -> None:
        factors = as_array(weights, (taps,), f32)
        for k in range(taps):
            shift = first + offset + k * dilation
            begin, end, weight = max(0, -shift), min(count, steps - shift), factors[k]
            if end <= begin:
                continue
            total = as_array(sums + 4 * begin, (end - begin,), f32)
            at = (n * channels + channel) * steps + shift + begin
            line = as_array(i64(source) + nbytes * at, (end - begin,), element)
            if has_seq:
                for j in range(end - begin):
                    if numbers[n * steps + shift + begin + j] == numbers[n * out_steps + first + begin + j]:
                        total[j] += weight * widen(line[j])
            else:
                for j in range(end - begin):
                    total[j] += weight * widen(line[j])

    return add


def _states(p: DepthwiseConv1dParams, mode: Mode, block: int) -> Callable[..., None]:
    """Adds what came before x, or the gradient of the final state."""
    taps, dilation, reach, widen = p.taps, p.dilation, p.reach, _Formats(p, mode).widen_state
    has_initial, has_final = p.initial_state and mode != "gradient", p.final_state and mode == "gradient"

    def add(before, after, weights, sums, n, channel, used, first, count, channels, steps, out_steps, offset) -> None:  # type: ignore[no-untyped-def]
        if has_initial and first < reach:
            for j in range(min(count, reach - first)):
                for k in range(taps):
                    step = first + j + offset + k * dilation
                    if step < 0:
                        for e in range(used):
                            value = widen(before[(n * channels + channel + e) * reach + step + reach])
                            sums[j * block + e] += weights[k * block + e] * value
        if has_final:
            for j in range(max(0, out_steps - reach - first), count):
                for e in range(used):
                    place = (n * channels + channel + e) * reach + first + j - (out_steps - reach)
                    sums[j * block + e] += widen(after[place])

    return add


def _finish(p: DepthwiseConv1dParams, mode: Mode, block: int) -> Callable[..., None]:
    """The activation or its derivative, and the stores. A sum of step j and channel e is sums[j * block + e]."""
    formats, last, reach = _Formats(p, mode), p.layout == "NTC", p.reach
    narrow_state, put, begins = formats.narrow_state, _finished_run(p, mode), p.initial_state and mode == "gradient"

    def finish(sums, out, dy, states, n, channel, used, first, count, channels, out_steps) -> None:  # type: ignore[no-untyped-def]
        skipped = min(count, max(0, -first))
        if begins:
            values = as_array(sums, (count * block,), f32)
            for j in range(skipped):
                for e in range(used):
                    place = (n * channels + channel + e) * reach + first + j + reach
                    states[place] = narrow_state(values[j * block + e])
        if last:
            for j in range(skipped, count):
                put(sums + 4 * j * block, out, dy, (n * out_steps + first + j) * channels + channel, used)
        else:
            at = (n * channels + channel) * out_steps + first + skipped
            put(sums + 4 * skipped, out, dy, at, count - skipped)

    return finish


def _finished_run(p: DepthwiseConv1dParams, mode: Mode) -> Callable[..., None]:
    """`put(sums, out, dy, place, count)`: the results of neighbours."""
    formats, silu, slope = _Formats(p, mode), p.silu and mode != "gradient", mode == "slope"
    narrow, widen, out_bytes, dy_bytes = formats.narrow, formats.widen_state, formats.out_bytes, formats.state_bytes
    out_type, dy_type = formats.out, formats.state

    def finished(z: Any, gradient: Any) -> Any:
        if silu:
            share = f32(f32(1) / f32(f32(1) + exp(f32(-z))))
            if slope:
                return f32(f32(share * f32(f32(1) + f32(z * f32(f32(1) - share)))) * widen(gradient))
            return f32(z * share)
        return z

    def put(sums, out, dy, place, count) -> None:  # type: ignore[no-untyped-def]
        values = as_array(sums, (count,), f32)
        results = as_array(i64(out) + out_bytes * place, (count,), out_type)
        if slope:
            gradients = as_array(i64(dy) + dy_bytes * place, (count,), dy_type)
            for e in range(count):
                results[e] = narrow(finished(values[e], gradients[e]))
        else:
            for e in range(count):
                results[e] = narrow(finished(values[e], 0))

    return put


def _final_state(p: DepthwiseConv1dParams) -> Callable[..., None]:
    """The last inputs, as they are."""
    reach, last, has_initial = p.reach, p.layout == "NTC", p.initial_state

    def write(values, before, states, n, channel, used, channels, steps) -> None:  # type: ignore[no-untyped-def]
        for e in range(used):
            state = (n * channels + channel + e) * reach
            for i in range(reach):
                step = steps - reach + i
                if step >= 0:
                    at = (n * channels + channel + e) * steps + step
                    if last:
                        at = (n * steps + step) * channels + channel + e
                    states[state + i] = values[at]
                elif has_initial:
                    states[state + i] = before[state + step + reach]
                else:
                    states[state + i] = values[0] - values[0]

    return write


def weight_kernel(p: DepthwiseConv1dParams, block: int) -> Callable[..., None]:
    """The kernel (x, dz, initial, seq, parts, batch, channels, steps, out_steps, left, start, stop), whose items are
    (n, channels): their sums of dw and db as parts[n][taps + 1][channels]."""
    last, taps, dilation, reach, has_seq = p.layout == "NTC", p.taps, p.dilation, p.reach, p.seq_idx
    element, widen, has_initial = element_type(p.dtype), widened(p.dtype), p.initial_state
    kind = "float32" if p.silu else p.dtype
    dz_element, widen_dz, nbytes, dz_bytes = (
        element_type(kind),
        widened(kind),
        dtype_of(p.dtype).nbytes,
        dtype_of(kind).nbytes,
    )
    lanes = block if last else _LANES
    size = (taps + 1) * lanes
    memory = stack_memory(4 * size)
    line = _line_products(p)

    def gradient(x, dz, initial, seq, parts, batch, channels, steps, out_steps, left, start, stop) -> None:  # type: ignore[no-untyped-def]
        values = as_array(x, (batch * channels * steps,), element)
        before = as_array(initial, (batch * channels * reach,), element)
        gradients = as_array(dz, (batch * channels * out_steps,), dz_element)
        numbers = as_array(seq, (batch * steps,), i32)
        found = as_array(parts, (batch * (taps + 1) * channels,), f32)
        sums_at = memory()
        sums = as_array(sums_at, (size,), f32)
        blocks = (channels + block - 1) // block
        for item in range(start, stop):
            channel, n = item % blocks * block, item // blocks
            used = min(block, channels - channel)
            for i in range(size):
                sums[i] = f32(0)
            if last:
                for t in range(out_steps):
                    at = (n * out_steps + t) * channels + channel
                    dz_row = as_array(i64(dz) + dz_bytes * at, (used,), dz_element)
                    total = as_array(sums_at + 4 * taps * lanes, (used,), f32)
                    for e in range(used):
                        total[e] += widen_dz(dz_row[e])
                    for k in range(taps):
                        step = t - left + k * dilation
                        if step >= 0 and step < steps:
                            if has_seq and numbers[n * steps + step] != numbers[n * steps + t]:
                                continue
                            row = as_array(i64(x) + nbytes * ((n * steps + step) * channels + channel), (used,), element)
                            total = as_array(sums_at + 4 * k * lanes, (used,), f32)
                            for e in range(used):
                                total[e] += widen_dz(dz_row[e]) * widen(row[e])
                        elif has_initial and step < 0:
                            for e in range(used):
                                value = widen(before[(n * channels + channel + e) * reach + step + reach])
                                sums[k * lanes + e] += widen_dz(gradients[at + e]) * value
            else:
                line(values, before, gradients, numbers, sums, n, channel, channels, steps, out_steps, left)
            for k in range(taps + 1):
                for e in range(used):
                    total = sums[k * lanes + e]
                    if not last:
                        for lane in range(1, lanes):
                            total = f32(total + sums[k * lanes + lane])
                    found[(n * (taps + 1) + k) * channels + channel + e] = total

    return gradient


def _line_products(p: DepthwiseConv1dParams) -> Callable[..., None]:
    """The products of a line of x and one of dz, each tap's as `_LANES` partial sums."""
    taps, dilation, reach, has_seq, lanes = p.taps, p.dilation, p.reach, p.seq_idx, _LANES
    widen, widen_dz, has_initial = widened(p.dtype), widened("float32" if p.silu else p.dtype), p.initial_state

    def products(values, before, gradients, numbers, sums, n, channel, channels, steps, out_steps, left) -> None:  # type: ignore[no-untyped-def]
        row = n * channels + channel
        at = row * out_steps
        for t in range(out_steps):
            sums[taps * lanes + t % lanes] += widen_dz(gradients[at + t])
        for k in range(taps):
            shift = k * dilation - left
            begin, end, to = max(0, -shift), min(out_steps, steps - shift), k * lanes
            if has_initial:
                for t in range(min(begin, out_steps)):
                    sums[to] += widen_dz(gradients[at + t]) * widen(before[row * reach + t + shift + reach])
            if has_seq:
                for t in range(begin, end):
                    if numbers[n * steps + t + shift] == numbers[n * steps + t]:
                        sums[to + t % lanes] += widen_dz(gradients[at + t]) * widen(values[row * steps + t + shift])
            elif end > begin:
                whole = begin + (end - begin) // lanes * lanes
                for base in range(begin, whole, lanes):
                    for lane in range(lanes):
                        factor = widen(values[row * steps + base + lane + shift])
                        sums[to + lane] += widen_dz(gradients[at + base + lane]) * factor
                for t in range(whole, end):
                    sums[to + t - whole] += widen_dz(gradients[at + t]) * widen(values[row * steps + t + shift])

    return products


def reduce_kernel(p: DepthwiseConv1dParams) -> Callable[..., None]:
    """The kernel (parts, dw, db, batch, channels, start, stop) over channels."""
    taps, has_bias = p.taps, p.bias
    element, narrow = element_type(p.weight_dtype), narrowed(p.weight_dtype)

    def reduce(parts, dw, db, batch, channels, start, stop) -> None:  # type: ignore[no-untyped-def]
        found = as_array(parts, (batch * (taps + 1) * channels,), f32)
        weights, biases = as_array(dw, (channels * taps,), element), as_array(db, (channels,), element)
        for channel in range(start, stop):
            for k in range(taps + 1):
                total = f32(0)
                for n in range(batch):
                    total = f32(total + found[(n * (taps + 1) + k) * channels + channel])
                if k < taps:
                    weights[i64(channel) * taps + k] = narrow(total)
                elif has_bias:
                    biases[channel] = narrow(total)

    return reduce
