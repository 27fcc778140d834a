"""pool2d on CPUs: see docs/kernels/bandwidth.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from schedsearch.backend.cpu_ops import as_array
from schedsearch.backend.cpu_taps import combine_op, move_ops, stack_memory
from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.images import planes_of
from schedsearch.ops.pool2d import Pool2dParams
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.conv2d.cpu_tiles import lanes_of
from schedsearch.templates.parts.casts import f32, i64
from schedsearch.templates.parts.cpu_elements import element_type, narrowed
from schedsearch.templates.parts.cpu_threads import busy_threads, threads_knob
from schedsearch.templates.parts.slices import place_of
from schedsearch.templates.pool2d.windows import Axis
from schedsearch.workload import Workload

_CHANNELS = (16, 64, 256, 1024)
_COLUMNS = (1, 4, 16, 64, 256)
_MOST_NUMBERS = 4096  # of a work item, on the stack
_MAX_ITEMS = 2**31 - 1


class Pool2dCpu(Template[Pool2dParams]):
    """A work item has some pixels of a row of y, and adds one pixel of their windows after the other; or a whole plane, if
    that is the window and its pixels are neighbours in memory."""

    name = "pool2d_cpu"
    version = 2
    op = "pool2d"
    kind = "cpu"

    def validate(self, workload: Workload[Pool2dParams], target: Target) -> str | None:
        items = _items(workload, _CHANNELS[0], 1)
        return None if items <= _MAX_ITEMS else f"y has {items} parts; allowed: less than 2**31"

    def space(self, workload: Workload[Pool2dParams], target: Target) -> ConfigSpace:
        _, channels = planes_of(workload.params)
        columns = Axis.of(workload, 1).outputs
        blocks = _up_to(_CHANNELS, channels)
        widths = tuple(n for n in _up_to(_COLUMNS, columns) if n * blocks[-1] <= _MOST_NUMBERS or n == 1)
        knobs = (
            Knob("channels", blocks, "channels of a work item"),
            Knob("columns", widths, "pixels of a row of y of a work item"),
            threads_knob(target),
        )
        return ConfigSpace(knobs)

    def default(self, workload: Workload[Pool2dParams], target: Target, space: ConfigSpace) -> Config:
        """Many channels; or many pixels where a pixel has few channels. As many threads as have
        enough to do."""
        values = space.values
        channels = values["channels"][-1] if values["channels"][-1] <= 256 else 256
        wanted = max(256 // channels, 1)
        columns = min(values["columns"], key=lambda n: abs(n - wanted))
        return Config(channels=channels, columns=columns, threads=busy_threads(workload, target, values["threads"]))

    def kernel(self, workload: Workload[Pool2dParams], target: Target, config: Config) -> KernelSource:
        block, width = config["channels"], config["columns"]
        items = _items(workload, block, width)
        lanes = lanes_of(target)
        whole = _takes_whole_planes(workload)
        function = plane_kernel(workload, lanes) if whole else pool_kernel(workload, block, width, lanes)
        step = KernelStep(function, (Pointer("x"), Pointer("y")), Grid(items), min(config["threads"], items))
        return KernelSource("cpu", "native", (step,))


def pool_kernel(workload: Workload[Pool2dParams], block: int, width: int, lanes: int) -> Callable[..., None]:
    """The kernel (x, y, start, stop) over work items of `width` columns of a row and `block` channels."""
    p = workload.params
    _, channels = planes_of(p)
    rows, columns = Axis.of(workload, 0), Axis.of(workload, 1)
    height, image_width, rows_out, across = rows.size, columns.size, rows.outputs, columns.outputs
    taps_h, taps_w, stride_h, stride_w = rows.taps, columns.taps, rows.stride, columns.stride
    step_h, step_w, top, left = rows.dilation, columns.dilation, rows.before, columns.before
    blocks, parts = math.ceil(channels / block), math.ceil(across / width)
    block = min(block, channels)
    last_block, numbers, memory = channels % block or block, block * width, stack_memory(4 * block * width)
    y_size, stored = workload.output.whole, place_of(workload.output)
    element, narrow = element_type(p.dtype), narrowed(p.dtype)
    mean, nbytes = p.mode == "average", dtype_of(p.dtype).nbytes
    is_float = dtype_of(p.dtype).is_float
    combine, combine_last = (combine_op(p.dtype, lanes, n, largest=not mean) for n in (block, last_block))
    put, put_last = (move_ops(p.dtype if is_float else "float32", lanes, n).put for n in (block, last_block))
    first = f32(-math.inf if p.mode == "max" else 0.0)
    count_rows, count_columns = rows.counted(), columns.counted()

    def pool(x: Any, y: Any, start: Any, stop: Any) -> None:
        x, y, held = i64(x), i64(y), memory()
        out, found = as_array(y, (y_size,), element), as_array(held, (numbers,), f32)
        for item in range(start, stop):
            channel, rest = item % blocks * block, item // blocks
            column, rest = rest % parts * width, rest // parts
            row, plane = rest % rows_out, rest // rows_out
            is_last = channel + block >= channels
            end = min(column + width, across)
            for i in range(numbers):
                found[i] = first
            for i in range(taps_h):
                h = row * stride_h - top + i * step_h
                if h < 0 or h >= height:
                    continue
                for j in range(taps_w):
                    offset = j * step_w - left  # q * stride + offset is a column of x
                    begin = max(column, (stride_w - 1 - offset) // stride_w)
                    last = min(end, (image_width - 1 - offset) // stride_w + 1)
                    for q in range(begin, last):
                        at = ((plane * height + h) * image_width + q * stride_w + offset) * channels + channel
                        to = held + (q - column) * block * 4
                        if is_last:
                            combine_last(x + at * nbytes, to)
                        else:
                            combine(x + at * nbytes, to)
            for q in range(column, end):
                to = stored(((plane * rows_out + row) * across + q) * channels + channel)
                if mean:
                    divisor = f32(count_rows(row * stride_h - top) * count_columns(q * stride_w - left))
                    for c in range(block):
                        found[(q - column) * block + c] /= divisor
                if not is_float:
                    for c in range(last_block if is_last else block):
                        out[to + c] = narrow(found[(q - column) * block + c])
                elif is_last:
                    put_last(held + (q - column) * block * 4, y + to * nbytes)
                else:
                    put(held + (q - column) * block * 4, y + to * nbytes)

    return pool


def _takes_whole_planes(workload: Workload[Pool2dParams]) -> bool:
    axes = [Axis.of(workload, axis) for axis in (0, 1)]
    _, channels = planes_of(workload.params)
    return channels == 1 and all(axis.taps == axis.size and axis.outputs == 1 and not axis.padded for axis in axes)


def plane_kernel(workload: Workload[Pool2dParams], lanes: int) -> Callable[..., None]:
    """The kernel (x, y, start, stop) over planes of one channel, each a single window: vectors of pixels are combined, and
    their numbers in the end."""
    p, pixels = workload.params, workload.params.h * workload.params.w
    width = next(n for n in (4 * lanes, lanes, 1) if pixels >= n)  # four vectors do not wait for one another
    mean, nbytes, element, narrow = (
        p.mode == "average",
        dtype_of(p.dtype).nbytes,
        element_type(p.dtype),
        narrowed(p.dtype),
    )
    memory, y_size, stored = stack_memory(4 * width), workload.output.whole, place_of(workload.output)
    combine, combine_rest = (combine_op(p.dtype, lanes, n, largest=not mean) for n in (width, pixels % width or width))
    fold, fold_one = (combine_op("float32", lanes, n, largest=not mean) for n in (min(lanes, width), 1))
    narrower = min(lanes, width)
    steps, has_rest, rest_at = pixels // width, pixels % width > 0, pixels // width * width * nbytes
    first, divisor = f32(-math.inf if p.mode == "max" else 0.0), f32(pixels)

    def pool(x: Any, y: Any, start: Any, stop: Any) -> None:
        x, held = i64(x), memory()
        out, found = as_array(y, (y_size,), element), as_array(held, (width,), f32)
        for plane in range(start, stop):
            for i in range(width):
                found[i] = first
            at = x + plane * (pixels * nbytes)
            for _ in range(steps):
                combine(at, held)
                at += width * nbytes
            if has_rest:
                combine_rest(x + plane * (pixels * nbytes) + rest_at, held)
            for i in range(narrower, width, narrower):
                fold(held + 4 * i, held)
            for i in range(1, narrower):
                fold_one(held + 4 * i, held)
            out[stored(plane)] = narrow(found[0] / divisor if mean else found[0])

    return pool


def _items(p: Workload[Pool2dParams], block: int, width: int) -> int:
    planes, channels = planes_of(p.params)
    columns = Axis.of(p, 1).outputs
    return planes * Axis.of(p, 0).outputs * math.ceil(columns / width) * math.ceil(channels / block)


def _up_to(values: tuple[int, ...], extent: int) -> tuple[int, ...]:
    """Those that are no longer than needed."""
    longest = next((n for n in values if n >= extent), values[-1])
    return tuple(n for n in values if n <= longest)
