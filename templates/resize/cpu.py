"""resize on CPUs: see docs/kernels/bandwidth.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedsearch.backend.cpu_ops import as_array
from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.ops.resize import ResizeParams, positions
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.parts.casts import f32
from schedsearch.templates.parts.cpu_elements import element_type, narrowed, widened
from schedsearch.templates.parts.cpu_threads import busy_threads, threads_knob
from schedsearch.templates.parts.slices import place_of
from schedsearch.templates.resize.axes import nearest_pixel, pixels_around
from schedsearch.workload import Workload

_MAX_ITEMS = 2**31 - 1


class ResizeCpu(Template[ResizeParams]):
    """A work item is some rows of y."""

    name = "resize_cpu"
    version = 1
    op = "resize"
    kind = "cpu"

    def validate(self, workload: Workload[ResizeParams], target: Target) -> str | None:
        planes, rows, _, _ = positions(workload.params)
        return None if planes * rows <= _MAX_ITEMS else f"y has {planes * rows} rows; allowed: less than 2**31"

    def space(self, workload: Workload[ResizeParams], target: Target) -> ConfigSpace:
        return ConfigSpace(
            (
                Knob("rows", (1, 4, 16), "rows of y of a work item"),
                threads_knob(target),
            )
        )

    def default(self, workload: Workload[ResizeParams], target: Target, space: ConfigSpace) -> Config:
        """One row at a time, on as many threads as have enough to do."""
        return Config(rows=1, threads=busy_threads(workload, target, space.values["threads"]))

    def kernel(self, workload: Workload[ResizeParams], target: Target, config: Config) -> KernelSource:
        planes, rows, _, _ = positions(workload.params)
        items = -(-planes * rows // config["rows"])
        build = nearest_kernel if workload.params.mode == "nearest" else linear_kernel
        step = KernelStep(
            build(workload, config["rows"]), (Pointer("x"), Pointer("y")), Grid(items), min(config["threads"], items)
        )
        return KernelSource("cpu", "native", (step,))


def nearest_kernel(workload: Workload[ResizeParams], together: int) -> Callable[..., None]:
    """The kernel (x, y, start, stop) over groups of `together` rows of all planes of y."""
    p = workload.params
    planes, rows, out_w, channels = positions(p)
    height, width, all_rows, element = p.h, p.w, planes * rows, element_type(p.dtype)
    place = place_of(workload.output)
    x_size, y_size, down, across = (
        workload.signature[0].size,
        workload.output.whole,
        nearest_pixel(workload, 0),
        nearest_pixel(workload, 1),
    )

    def copy(x: Any, y: Any, start: Any, stop: Any) -> None:
        source, out = as_array(x, (x_size,), element), as_array(y, (y_size,), element)
        for number in range(start * together, min(stop * together, all_rows)):
            first = (number // rows * height + down(number % rows)) * width
            for column in range(out_w):
                at, to = (first + across(column)) * channels, place((number * out_w + column) * channels)
                for c in range(channels):
                    out[to + c] = source[at + c]

    return copy


def linear_kernel(workload: Workload[ResizeParams], together: int) -> Callable[..., None]:
    """The same, between four pixels."""
    p = workload.params
    planes, rows, out_w, channels = positions(p)
    height, width, all_rows, element = p.h, p.w, planes * rows, element_type(p.dtype)
    place = place_of(workload.output)
    x_size, y_size, down, across = (
        workload.signature[0].size,
        workload.output.whole,
        pixels_around(workload, 0),
        pixels_around(workload, 1),
    )
    widen, narrow = widened(p.dtype), narrowed(p.dtype)

    def interpolate(x: Any, y: Any, start: Any, stop: Any) -> None:
        source, out = as_array(x, (x_size,), element), as_array(y, (y_size,), element)
        for number in range(start * together, min(stop * together, all_rows)):
            above, below, share = down(number % rows)
            plane = number // rows * height
            first, second = (plane + above) * width * channels, (plane + below) * width * channels
            rest = f32(f32(1) - share)
            for column in range(out_w):
                left, right, share_w = across(column)
                rest_w, to = f32(f32(1) - share_w), place((number * out_w + column) * channels)
                for c in range(channels):
                    a, b = source[first + left * channels + c], source[first + right * channels + c]
                    upper = between(widen(a), widen(b), rest_w, share_w)
                    a, b = source[second + left * channels + c], source[second + right * channels + c]
                    lower = between(widen(a), widen(b), rest_w, share_w)
                    out[to + c] = narrow(between(upper, lower, rest, share))

    return interpolate


def between(a: Any, b: Any, rest: Any, share: Any) -> Any:
    return f32(f32(a * rest) + f32(b * share))
