"""Kernels of depthwise_conv2d_cpu: sums over taps (y and dx), the gradient of the weight in parts, and the sum of the parts.

A kernel computes a range of work items. It captures sizes as constants, so loops unroll and index arithmetic folds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schedsearch.backend.cpu_finish import Stages, finish_op
from schedsearch.backend.cpu_ops import as_array, narrow_op, widen_op
from schedsearch.backend.cpu_taps import Tap, correlate_op, move_ops, reduce_op, stack_memory
from schedsearch.ops import ArgSpec
from schedsearch.ops.dtypes import dtype
from schedsearch.templates.depthwise_conv2d.cpu_plan import Phase, Plan, Plane
from schedsearch.templates.parts.casts import f32, u16


@dataclass(frozen=True)
class Numbers:
    """How a kernel reads and writes an array's format.

    Attributes:
        element: Numba's type in memory; uint16 for a 16-bit float.
        widen: `widen(element) -> float32`. narrow: the inverse, rounded half to even.
    """

    element: Any
    widen: Callable[[Any], Any]
    narrow: Callable[[Any], Any]

    @classmethod
    def of(cls, name: str) -> Numbers:
        if name == "float32":
            return cls(f32, f32, f32)
        return cls(u16, widen_op(name), narrow_op(name))


def correlate_kernel(
    plan: Plan,
    source: ArgSpec,
    weight: ArgSpec,
    output: ArgSpec,
    finish: Callable[..., Any] | None,
    stages: Stages | None = None,
) -> Callable[..., None]:
    """From x to y, or from dy to dx. A work item is `plan.rows` rows of results of a block of channels.

    Args:
        finish: `finish(value, k, at, operands) -> element` for a sum of output channel k, whose place in the output is `at`.
            None: it is only rounded.
        stages: the same for whole vectors; None if there is no such way.
    """
    image_memory, result_memory = stack_memory(4 * plan.planes_size), stack_memory(4 * plan.run_vectors * plan.lanes)
    filters = plan.source_factor * plan.output_factor
    weight_memory = stack_memory(4 * filters * plan.taps * plan.place)
    planes_size, row_tiles, blocks, place, channels = (
        plan.planes_size,
        plan.row_tiles,
        plan.blocks,
        plan.place,
        plan.channels,
    )
    rows, first_row, output_factor = plan.rows, plan.first_row, plan.output_factor
    filter_bytes = 4 * plan.taps * place
    pack, pack_weights = _all_planes(plan, source), _weights_packer(plan, weight)
    compute = _all_phases(plan, output, finish, stages)

    def correlate(source, weight, output, *operands, start, stop):  # type: ignore[no-untyped-def]
        image, results, weights = image_memory(), result_memory(), weight_memory()
        places = as_array(image, (planes_size,), f32)
        for i in range(planes_size):
            places[i] = f32(0)
        for item in range(start, stop):
            block = item % blocks
            row = first_row + item // blocks % row_tiles * rows
            n = item // (blocks * row_tiles)
            used = min(place, channels - block * place)
            pack(source, image, places, n, block * place, used, row)
            pack_weights(weight, weights, block * place, used)
            for j in range(output_factor):
                compute(image, results, weights + j * filter_bytes, output, n, block * place, used, j, row, operands)

    return correlate


def _all_planes(plan: Plan, source: ArgSpec) -> Callable[..., None]:
    pack: Callable[..., None] = _no_plane
    for number, plane in enumerate(plan.planes):
        pack = _then_plane(pack, _plane_packer(plan, plane, number * plan.plane_size, source))
    return pack


def _no_plane(source, image, places, n, channel, used, row):  # type: ignore[no-untyped-def]
    return


def _then_plane(before: Callable[..., None], plane: Callable[..., None]) -> Callable[..., None]:
    def pack(source, image, places, n, channel, used, row):  # type: ignore[no-untyped-def]
        before(source, image, places, n, channel, used, row)
        plane(source, image, places, n, channel, used, row)

    return pack


def _plane_packer(plan: Plan, plane: Plane, start: int, source: ArgSpec) -> Callable[..., None]:
    """`pack(source, address, places, n, channel, channels, row of results)`. Columns of padding are zeros already."""
    numbers = Numbers.of(source.dtype)
    element, widen, size = numbers.element, numbers.widen, source.size
    n_stride, c_stride, h_stride, w_stride = source.strides("NCHW")
    factor, offset, place, pitch, plane_rows = plan.source_factor, plane.channel, plan.place, plan.pitch, plan.plane_rows
    h, w = plan.h, plan.w
    first, last = w.columns(plane.column, pitch)
    outer, inner, shift, height = h.outer, h.inner, plane.row - h.pad, h.size
    first_column, column_step, lane_step = first * w.inner + plane.column - w.pad, w.inner * w_stride, c_stride * factor
    row_size, begin, end = pitch * place, first * place, last * place
    whole, nbytes = place > 1 and lane_step == 1, dtype(source.dtype).nbytes
    in_row = place == 1 and column_step in (1, 2) and last > first
    fetch = move_ops(
        source.dtype, plan.lanes, place if place > 1 else max(1, last - first), column_step if in_row else 1
    ).fetch  # fmt: skip
    fetch_part = move_ops(source.dtype, plan.lanes, plan.channels % place or place).fetch  # the last channels

    def pack(source, image, places, n, channel, used, row):  # type: ignore[no-untyped-def]
        values = as_array(source, (size,), element)
        corner = n * n_stride + (channel * factor + offset) * c_stride + first_column * w_stride
        for i in range(plane_rows):
            line = row * outer + i * inner + shift
            to = start + i * row_size
            if line < 0 or line >= height:
                for column in range(begin, end):
                    places[to + column] = f32(0)
            elif in_row:
                fetch(source + nbytes * (corner + line * h_stride), image + 4 * (to + first))
            elif place == 1:
                at = corner + line * h_stride
                for column in range(last - first):
                    places[to + first + column] = widen(values[at + column * column_step])
            elif whole and used == place:
                at = source + nbytes * (corner + line * h_stride)
                for column in range(last - first):
                    fetch(at + nbytes * column * column_step, image + 4 * (to + begin + column * place))
            elif whole:
                at = source + nbytes * (corner + line * h_stride)
                for column in range(last - first):
                    fetch_part(at + nbytes * column * column_step, image + 4 * (to + begin + column * place))
            else:
                at = corner + line * h_stride
                for column in range(last - first):
                    for lane in range(used):
                        places[to + begin + column * place + lane] = widen(
                            values[at + column * column_step + lane * lane_step]
                        )

    return pack


def _weights_packer(plan: Plan, weight: ArgSpec) -> Callable[..., None]:
    """`pack(weight, address, first channel, channels)`: the filters of each channel, as [filter][tap][lane]."""
    numbers = Numbers.of(weight.dtype)
    element, widen, size = numbers.element, numbers.widen, weight.size
    o_stride, _, r_stride, s_stride = weight.strides("OIHW")
    filters, place, (kr, ks) = plan.source_factor * plan.output_factor, plan.place, plan.kernel

    def pack(weight, address, channel, used):  # type: ignore[no-untyped-def]
        values = as_array(weight, (size,), element)
        packed = as_array(address, (filters, kr * ks, place), f32)
        for j in range(filters):
            for r in range(kr):
                for s in range(ks):
                    for lane in range(used):
                        at = ((channel + lane) * filters + j) * o_stride + r * r_stride + s * s_stride
                        packed[j, r * ks + s, lane] = widen(values[at])

    return pack


def _all_phases(
    plan: Plan, output: ArgSpec, finish: Callable[..., Any] | None, stages: Stages | None
) -> Callable[..., None]:
    compute: Callable[..., None] = _no_phase
    for phase in plan.phases:
        compute = _then_phase(compute, _phase(plan, phase, output, finish, stages))
    return compute


def _no_phase(image, results, weights, output, n, channel, used, j, row, operands):  # type: ignore[no-untyped-def]
    return


def _then_phase(before: Callable[..., None], phase: Callable[..., None]) -> Callable[..., None]:
    def compute(image, results, weights, output, n, channel, used, j, row, operands):  # type: ignore[no-untyped-def]
        before(image, results, weights, output, n, channel, used, j, row, operands)
        phase(image, results, weights, output, n, channel, used, j, row, operands)

    return compute


def _phase(
    plan: Plan, phase: Phase, output: ArgSpec, finish: Callable[..., Any] | None, stages: Stages | None
) -> Callable[..., None]:
    """Sums the taps of a phase for the rows of a work item, and stores the results that lie inside the output."""
    element, size = Numbers.of(output.dtype).element, output.size
    n_stride, c_stride, h_stride, w_stride = output.strides("NCHW")
    factor, place, lanes, pitch, results_size = (
        plan.output_factor,
        plan.place,
        plan.lanes,
        plan.pitch,
        plan.run_vectors * plan.lanes,
    )
    (row_step, column_step), row_shift, column_shift = plan.output_step, phase.row, phase.column
    first = max(0, math.ceil(-column_shift / column_step))
    last = min(plan.columns, math.ceil((plan.width - column_shift) / column_step))
    rows, group, height, run_bytes = plan.rows, plan.group, plan.height, 4 * plan.h.step * pitch * place
    lane_step, pixel_step = c_stride * factor, column_step * w_stride
    run = _run(plan, phase)
    whole = place > 1 and lane_step == 1 and finish is None
    strided = output.dtype == "float32" and pixel_step == 2  # masked stores of 16 bits need AVX-512
    in_row = place == 1 and (pixel_step == 1 or strided) and finish is None and last > first
    count, step = (place, 1) if place > 1 else (max(1, last - first), pixel_step if in_row else 1)
    nbytes, put = dtype(output.dtype).nbytes, move_ops(output.dtype, lanes, count, step).put
    vectors = stages is not None and place > 1 and lane_step == 1
    part = plan.channels % place or place
    finish_whole, finish_part = (finish_op(stages or (), 1, place, width, 0) for width in (place, part))
    finish = finish or gradient_finish(output, False)

    def compute(image, results, weights, output, n, channel, used, j, row, operands):  # type: ignore[no-untyped-def]
        out = as_array(output, (size,), element)
        sums = as_array(results, (results_size,), f32)
        corner = n * n_stride + (channel * factor + j) * c_stride + column_shift * w_stride
        for begin in range(0, rows, group):
            run(image + begin * run_bytes, results, weights)
            for i in range(group):
                line = (row + begin + i) * row_step + row_shift
                if line < 0 or line >= height:
                    continue
                at = corner + line * h_stride
                if in_row:
                    put(results + 4 * (i * pitch + first), output + nbytes * (at + first * pixel_step))
                elif place == 1:
                    k = channel * factor + j
                    for v in range(first, last):
                        to = at + v * pixel_step
                        out[to] = finish(sums[i * pitch + v], k, to, operands)
                elif whole and used == place:
                    for v in range(first, last):
                        put(results + 4 * v * lanes, output + nbytes * (at + v * pixel_step))
                elif vectors and used == place:
                    for v in range(first, last):
                        finish_whole(results + 4 * v * lanes, output, at + v * pixel_step, channel, operands)
                elif vectors:
                    for v in range(first, last):
                        finish_part(results + 4 * v * lanes, output, at + v * pixel_step, channel, operands)
                else:
                    for v in range(first, last):
                        for lane in range(used):
                            to = at + v * pixel_step + lane * lane_step
                            out[to] = finish(sums[v * lanes + lane], (channel + lane) * factor + j, to, operands)

    return compute


def _run(plan: Plan, phase: Phase) -> Callable[..., None]:
    """`run(image, results, weights)`: one run of places, by addresses."""
    run: Callable[..., None] = _zeros(plan)
    for number, taps in enumerate(phase.passes):
        run = _then_pass(run, plan, taps) if number else _then_pass(None, plan, taps)
    return run


def _zeros(plan: Plan) -> Callable[..., None]:
    size = plan.run_vectors * plan.lanes

    def zeros(image, results, weights):  # type: ignore[no-untyped-def]
        sums = as_array(results, (size,), f32)
        for i in range(size):
            sums[i] = f32(0)

    return zeros


def _then_pass(before: Callable[..., None] | None, plan: Plan, taps: tuple[Tap, ...]) -> Callable[..., None]:
    correlate = correlate_op(
        taps, plan.lanes, plan.tile, plan.run_vectors // plan.tile, x_step=plan.vector_step, broadcast=plan.place == 1,
        more=before is not None,
    )  # fmt: skip

    def first_pass(image, results, weights):  # type: ignore[no-untyped-def]
        correlate(image, results, weights)

    def later_pass(image, results, weights):  # type: ignore[no-untyped-def]
        before(image, results, weights)  # type: ignore[misc]
        correlate(image, results, weights)

    return first_pass if before is None else later_pass


# ---- the gradient of the weight


def reduce_kernel(plan: Plan, x: ArgSpec, dy: ArgSpec, splits: int) -> Callable[..., None]:
    """Parts of dw, as float32 [split][output channel][tap]. A work item sums a share of the images' row tiles for a block of
    channels, in a fixed order."""
    place, lanes, taps, factor = plan.place, plan.lanes, plan.taps, plan.output_factor
    rows, columns, all_rows, row_tiles, blocks = plan.rows, plan.columns, plan.all_rows, plan.row_tiles, plan.blocks
    planes_size, channels, tiles = plan.planes_size, plan.channels, plan.n * plan.row_tiles
    gradient_size, sums_size = rows * columns * place, factor * taps * lanes
    image_memory, gradient_memory = stack_memory(4 * planes_size), stack_memory(4 * (gradient_size + lanes))
    sums_memory = stack_memory(4 * sums_size)
    pack, pack_gradient = _all_planes(plan, x), _gradient_packer(plan, dy)
    passes = plan.phases[0].passes
    reduce_rows: Callable[..., None] = _no_rows
    for each in passes:
        reduce_rows = _then_rows(reduce_rows, plan, each)
    outputs = channels * factor

    def reduce(x, dy, parts, start, stop):  # type: ignore[no-untyped-def]
        image, gradient, sums = image_memory(), gradient_memory(), sums_memory()
        places = as_array(image, (planes_size,), f32)
        for i in range(planes_size):
            places[i] = f32(0)
        totals = as_array(sums, (factor, taps, lanes), f32)
        flat = as_array(sums, (sums_size,), f32)
        found = as_array(parts, (splits, outputs, taps), f32)
        for item in range(start, stop):
            channel, split = item % blocks * place, item // blocks
            used = min(place, channels - channel)
            for i in range(sums_size):
                flat[i] = f32(0)
            for tile in range(split * tiles // splits, (split + 1) * tiles // splits):
                row = tile % row_tiles * rows
                n = tile // row_tiles
                lines = min(rows, all_rows - row)
                pack(x, image, places, n, channel, used, row)
                for j in range(factor):
                    pack_gradient(dy, gradient, n, channel, used, j, row, lines)
                    reduce_rows(image, gradient, sums + 4 * j * taps * lanes, lines)
            for j in range(factor):
                for t in range(taps):
                    if place == 1:
                        total = f32(0)
                        for lane in range(lanes):
                            total += totals[j, t, lane]
                        found[split, channel * factor + j, t] = total
                    else:
                        for lane in range(used):
                            found[split, (channel + lane) * factor + j, t] = totals[j, t, lane]

    return reduce


def _no_rows(image, gradient, sums, lines):  # type: ignore[no-untyped-def]
    return


def _then_rows(before: Callable[..., None], plan: Plan, taps: tuple[Tap, ...]) -> Callable[..., None]:
    """Adds the products of all rows of a work item to the sums of these taps."""
    pixels = plan.lanes if plan.place == 1 else 1  # of a vector
    full, part = divmod(plan.columns, pixels)
    add_rows = reduce_op(
        taps, plan.lanes, full, part, x_steps=(plan.h.step * plan.pitch * plan.place, plan.vector_step),
        dy_row=plan.columns * plan.place,
    )  # fmt: skip

    def reduce_rows(image, gradient, sums, lines):  # type: ignore[no-untyped-def]
        before(image, gradient, sums, lines)
        add_rows(image, gradient, sums, lines)

    return reduce_rows


def _gradient_packer(plan: Plan, dy: ArgSpec) -> Callable[..., None]:
    """`pack(dy, address, n, first channel, channels, j, first row, rows)`: rows of dy as [row][column][lane]."""
    numbers = Numbers.of(dy.dtype)
    element, widen, size = numbers.element, numbers.widen, dy.size
    n_stride, c_stride, h_stride, w_stride = dy.strides("NCHW")
    factor, place, columns, rows = plan.output_factor, plan.place, plan.columns, plan.rows
    lane_step = c_stride * factor
    whole, nbytes = place > 1 and lane_step == 1, dtype(dy.dtype).nbytes
    fetch = move_ops(dy.dtype, plan.lanes, place if place > 1 else columns).fetch

    def pack(dy, address, n, channel, used, j, row, lines):  # type: ignore[no-untyped-def]
        values = as_array(dy, (size,), element)
        packed = as_array(address, (rows * columns * place,), f32)
        corner = n * n_stride + (channel * factor + j) * c_stride + row * h_stride
        for i in range(lines):
            at, to = corner + i * h_stride, i * columns * place
            if place == 1:
                fetch(dy + nbytes * at, address + 4 * to)
            elif whole and used == place:
                for column in range(columns):
                    fetch(dy + nbytes * (at + column * w_stride), address + 4 * (to + column * place))
            else:
                for column in range(columns):
                    for lane in range(used):
                        packed[to + column * place + lane] = widen(values[at + column * w_stride + lane * lane_step])

    return pack


def sum_kernel(plan: Plan, dw: ArgSpec, splits: int, finish: Callable[..., Any]) -> Callable[..., None]:
    """dw from its parts. A work item is one output channel."""
    element, size, outputs, taps = Numbers.of(dw.dtype).element, dw.size, plan.channels * plan.output_factor, plan.taps
    o_stride, _, r_stride, s_stride = dw.strides("OIHW")
    kr, ks = plan.kernel

    def add_parts(parts, dw, *operands, start, stop):  # type: ignore[no-untyped-def]
        found = as_array(parts, (splits, outputs, taps), f32)
        out = as_array(dw, (size,), element)
        for o in range(start, stop):
            for r in range(kr):
                for s in range(ks):
                    total = f32(0)
                    for split in range(splits):
                        total += found[split, o, r * ks + s]
                    at = o * o_stride + r * r_stride + s * s_stride
                    out[at] = finish(total, o, at, operands)

    return add_parts


def gradient_finish(output: ArgSpec, accumulate: bool) -> Callable[..., Any]:
    """`finish(value, k, at, operands) -> element`: adds the gradient before, which is the only operand, and rounds once."""
    numbers = Numbers.of(output.dtype)
    element, widen, narrow, size = numbers.element, numbers.widen, numbers.narrow, output.size

    def alone(value, k, at, operands):  # type: ignore[no-untyped-def]
        return narrow(value)

    def added(value, k, at, operands):  # type: ignore[no-untyped-def]
        before = as_array(operands[0], (size,), element)
        return narrow(value + widen(before[at]))

    return added if accumulate else alone
