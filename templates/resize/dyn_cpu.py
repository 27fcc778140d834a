"""dyn_resize on CPUs: see docs/kernels/bandwidth.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedsearch.backend.cpu_ops import as_array
from schedsearch.config import Config
from schedsearch.launch import Grid
from schedsearch.ops.dyn_resize import DynResizeParams
from schedsearch.ops.resize import positions
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep
from schedsearch.templates.parts.casts import f32
from schedsearch.templates.parts.cpu_elements import element_type, narrowed, widened
from schedsearch.templates.parts.cpu_threads import SharedByThreads
from schedsearch.templates.resize.cpu import between
from schedsearch.templates.resize.dyn_axes import images_in_use, line_of_run, parameters, pixel_of_run, pixels_of_run
from schedsearch.workload import Workload


class DynResizeCpu(SharedByThreads[DynResizeParams]):
    """Threads have an equal share each of the rows of y in use."""

    name = "dyn_resize_cpu"
    version = 1
    op = "dyn_resize"
    shared = "rows"

    def items(self, workload: Workload[DynResizeParams]) -> int:
        return workload.outputs[0].size

    def kernel(self, workload: Workload[DynResizeParams], target: Target, config: Config) -> KernelSource:
        threads = config["threads"]
        kernel = dyn_resize_kernel(workload, threads)
        return KernelSource("cpu", "native", (KernelStep(kernel, parameters(workload), Grid(threads), threads),))


def dyn_resize_kernel(p: Workload[DynResizeParams], threads: int) -> Callable[..., None]:
    """The kernel over arguments and outputs in order, and the parts `start` to `stop` of the rows."""
    _, most_rows, most_columns, channels = positions(p.params)
    images, down, across = images_in_use(p), line_of_run(p, 0), line_of_run(p, 1)
    x_size, y_size, y, element = p.signature[0].size, p.outputs[0].size, len(p.signature), element_type(p.params.dtype)
    write = (_nearest if p.params.mode == "nearest" else _linear)(p)

    def dyn_resize(*operands: Any, start: Any, stop: Any) -> None:
        source, out = as_array(operands[0], (x_size,), element), as_array(operands[y], (y_size,), element)
        planes, height, width, rows, columns = images(operands, start == 0)
        row_line, column_line = down(height, rows), across(width, columns)
        for number in range(planes * rows * start // threads, planes * rows * stop // threads):
            plane, row = number // rows, number % rows
            to = (plane * most_rows + row) * most_columns * channels
            write(source, out, to, plane, row, columns, (height, width), row_line, column_line)

    return dyn_resize


def _nearest(p: Workload[DynResizeParams]) -> Callable[..., None]:
    """`write(x, y, to, plane, row, columns, sizes, line of rows, line of columns)`: a row of y, from element `to` on."""
    most_height, most_width, channels = p.params.h, p.params.w, positions(p.params)[3]
    down, across = pixel_of_run(p, 0), pixel_of_run(p, 1)

    def write(
        source: Any, out: Any, to: Any, plane: Any, row: Any, columns: Any, sizes: Any, row_line: Any, column_line: Any
    ) -> None:
        first = (plane * most_height + down(row, row_line, sizes[0])) * most_width
        for column in range(columns):
            at = (first + across(column, column_line, sizes[1])) * channels
            for c in range(channels):
                out[to + column * channels + c] = source[at + c]

    return write


def _linear(workload: Workload[DynResizeParams]) -> Callable[..., None]:
    """The same between four pixels."""
    p = workload.params
    most_height, most_width, channels = p.h, p.w, positions(p)[3]
    down, across, widen, narrow = pixels_of_run(workload, 0), pixels_of_run(workload, 1), widened(p.dtype), narrowed(p.dtype)

    def write(
        source: Any, out: Any, to: Any, plane: Any, row: Any, columns: Any, sizes: Any, row_line: Any, column_line: Any
    ) -> None:
        above, below, share = down(row, row_line, sizes[0])
        rest = f32(f32(1) - share)
        first = (plane * most_height + above) * most_width * channels
        second = (plane * most_height + below) * most_width * channels
        for column in range(columns):
            left, right, share_w = across(column, column_line, sizes[1])
            rest_w = f32(f32(1) - share_w)
            for c in range(channels):
                a, b = source[first + left * channels + c], source[first + right * channels + c]
                upper = between(widen(a), widen(b), rest_w, share_w)
                a, b = source[second + left * channels + c], source[second + right * channels + c]
                lower = between(widen(a), widen(b), rest_w, share_w)
                out[to + column * channels + c] = narrow(between(upper, lower, rest, share))

    return write
