"""How the CPU kernels of depthwise_conv2d cut the work: planes of an image in fast memory, and the taps that read them.

A work item takes a few rows of a block of channels. It copies the rows that its results need to planes on the stack, with
the padding written out and as float32. A result is then a sum over taps at constant distances, without branches.

- NHWC: a place of a plane has the `lanes` channels of a block, one vector. Results are computed row by row.
- NCHW: a place has one channel, and a vector has `lanes` places. A stride would put gaps between the places that
  neighbouring results read, so a plane holds one phase of rows and columns (those with the same remainder by the stride).
  All rows of a plane are one long run of places: results beyond the last column of a row are computed and not stored. An
  image of 7 x 7 therefore takes 4 vectors of 16 places, and not 7.

The gradient of the input is such a sum, too. Rows of dx with the same remainder by the stride read dy with the same taps,
so each remainder is a phase of the output that has its own taps, and planes hold dy as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from schedsearch.backend.cpu_taps import Tap
from schedsearch.config import Config
from schedsearch.ops.depthwise_conv2d import DepthwiseConv2dParams
from schedsearch.ops.window import output_hw
from schedsearch.workload import Workload

MOST_TAPS = 32  # whose weights a kernel keeps in registers; the taps of a larger kernel are summed in several passes


@dataclass(frozen=True)
class Axis:
    """One axis, h or w, of what a work item copies.

    Attributes:
        size: of the image that is copied.
        inner: step in the image between neighbouring places of a plane.
        outer: step in the image for one result.
        step: step in a plane for one result.
        pad: places before the first one of the image.
        phases: of the planes.
    """

    size: int
    inner: int
    outer: int
    step: int
    pad: int
    phases: tuple[int, ...]

    def columns(self, phase: int, pitch: int) -> tuple[int, int]:
        """The places [first, last) of a row of the plane of this phase that lie inside the image."""
        first = max(0, math.ceil((self.pad - phase) / self.inner))
        last = min(pitch, math.ceil((self.size + self.pad - phase) / self.inner))
        return first, max(first, last)


@dataclass(frozen=True)
class Plane:
    """A part of the image in fast memory: one phase of rows and columns, and one of the channels that a result reads."""

    row: int
    column: int
    channel: int


@dataclass(frozen=True)
class Phase:
    """Results with the same taps.

    Attributes:
        row, column: result (u, v) is the output's element (u * step + row, v * step + column).
        taps: in passes of at most `MOST_TAPS` (or one kernel row); empty: the results are zeros.
    """

    row: int
    column: int
    passes: tuple[tuple[Tap, ...], ...]


@dataclass(frozen=True)
class Plan:
    """Sizes and strides in elements.

    Attributes:
        n, blocks: images and blocks of channels.
        channels: of x; `source_channels` and `output_channels` have a factor of `multiplier` where they are those of y.
        lanes: of a vector. place: channels at one place of a plane, 1 or `lanes`.
        tile: vectors of results that are computed together.
        rows: rows of results of a work item. group: how many of them one run of places has: all, or 1.
        first_row, all_rows: the first row of results and their number. columns: results of a row.
        planes, plane_rows, pitch: the planes, and the rows and places of a row of each.
        output_step: step of the output between results, vertically and horizontally. height, width: of the output.
        threads: that share the work items.
    """

    n: int
    channels: int
    lanes: int
    place: int
    tile: int
    rows: int
    first_row: int
    all_rows: int
    columns: int
    h: Axis
    w: Axis
    source_factor: int
    output_factor: int
    planes: tuple[Plane, ...]
    plane_rows: int
    pitch: int
    phases: tuple[Phase, ...]
    output_step: tuple[int, int]
    height: int
    width: int
    kernel: tuple[int, int]

    @property
    def blocks(self) -> int:
        return math.ceil(self.channels / self.place)

    @property
    def row_tiles(self) -> int:
        return math.ceil(self.all_rows / self.rows)

    @property
    def items(self) -> int:
        return self.n * self.row_tiles * self.blocks

    @property
    def group(self) -> int:
        return self.rows if self.place == 1 else 1

    @property
    def plane_size(self) -> int:
        return self.plane_rows * self.pitch * self.place

    @property
    def taps(self) -> int:
        """Of one filter."""
        return self.kernel[0] * self.kernel[1]

    @property
    def run_vectors(self) -> int:
        """Vectors of results in a run of `group` rows, a multiple of `tile`."""
        places = (self.group - 1) * self.pitch + self.columns
        vectors = places if self.place > 1 else math.ceil(places / self.lanes)
        return math.ceil(vectors / self.tile) * self.tile

    @property
    def vector_step(self) -> int:
        """Elements of a plane between what neighbouring vectors of results read."""
        return self.lanes if self.place == 1 else self.w.step * self.place

    @property
    def planes_size(self) -> int:
        """With what the last vectors of a run read beyond the last plane."""
        return len(self.planes) * self.plane_size + self.tile * self.vector_step + self.lanes

    @property
    def stack_bytes(self) -> int:
        """Of all that a work item keeps in fast memory."""
        weights = self.source_factor * self.output_factor * self.taps * self.place
        return 4 * (self.planes_size + self.run_vectors * self.lanes + weights)


def forward_plan(workload: Workload[DepthwiseConv2dParams], config: Config) -> Plan:
    """From x to y, also for the gradient of the weight, which has the same planes of x."""
    p, (rows_out, columns_out) = workload.params, output_hw(workload.params)
    phased = p.layout == "NCHW"
    lanes, rows = config["block"], min(config["rows"], rows_out)
    h = _forward_axis(p.h, p.r, p.stride[0], p.dilation[0], p.padding[0], phased)
    w = _forward_axis(p.w, p.s, p.stride[1], p.dilation[1], p.padding[1], phased)
    planes = tuple(Plane(row, column, 0) for row in h.phases for column in w.phases)
    reach_h, reach_w = (
        (taps - 1) * dilation // axis.inner for taps, dilation, axis in ((p.r, p.dilation[0], h), (p.s, p.dilation[1], w))
    )
    plane_rows, pitch = (rows - 1) * h.step + 1 + reach_h, (columns_out - 1) * w.step + 1 + reach_w
    place = 1 if phased else lanes

    def tap(i: int, j: int) -> Tap:
        down, right = i * p.dilation[0], j * p.dilation[1]
        plane = planes.index(Plane(down % h.inner, right % w.inner, 0))
        return Tap(i * p.s + j, place * ((plane * plane_rows + down // h.inner) * pitch + right // w.inner))

    return Plan(
        n=p.n, channels=p.c, lanes=lanes, place=place, tile=config["tile"], rows=rows, first_row=0, all_rows=rows_out,
        columns=columns_out, h=h, w=w, source_factor=1, output_factor=p.multiplier, planes=planes, plane_rows=plane_rows,
        pitch=pitch, phases=(Phase(0, 0, _passes([[tap(i, j) for j in range(p.s)] for i in range(p.r)])),),
        output_step=(1, 1), height=rows_out, width=columns_out, kernel=(p.r, p.s),
    )  # fmt: skip


def grad_input_plan(workload: Workload[DepthwiseConv2dParams], config: Config) -> Plan:
    """From dy to dx. Rows of results count from the top of the padding, in strides."""
    p, (oh, ow) = workload.params, output_hw(workload.params)
    lanes, place, (top, left) = config["block"], 1 if p.layout == "NCHW" else config["block"], p.padding[:2]
    first_row, first_column = top // p.stride[0], left // p.stride[1]
    all_rows = (p.h - 1 + top) // p.stride[0] - first_row + 1
    columns = (p.w - 1 + left) // p.stride[1] - first_column + 1
    rows = min(config["rows"], all_rows)
    reach_h, reach_w = (p.r - 1) * p.dilation[0] // p.stride[0], (p.s - 1) * p.dilation[1] // p.stride[1]
    plane_rows, pitch = rows + reach_h, columns + reach_w

    def passes(row: int, column: int) -> tuple[tuple[Tap, ...], ...]:
        lines = []
        for channel in range(p.multiplier):
            for i in (i for i in range(p.r) if i * p.dilation[0] % p.stride[0] == row):
                line = []
                for j in (j for j in range(p.s) if j * p.dilation[1] % p.stride[1] == column):
                    up, back = reach_h - i * p.dilation[0] // p.stride[0], reach_w - j * p.dilation[1] // p.stride[1]
                    at = place * ((channel * plane_rows + up) * pitch + back)
                    line.append(Tap((channel * p.r + i) * p.s + j, at))
                lines.append(line)
        return _passes(lines)

    return Plan(
        n=p.n, channels=p.c, lanes=lanes, place=place, tile=config["tile"], rows=rows, first_row=first_row,
        all_rows=all_rows, columns=columns, h=Axis(oh, 1, 1, 1, reach_h, (0,)),
        w=Axis(ow, 1, 1, 1, reach_w - first_column, (0,)), source_factor=p.multiplier, output_factor=1,
        planes=tuple(Plane(0, 0, channel) for channel in range(p.multiplier)), plane_rows=plane_rows, pitch=pitch,
        phases=tuple(
            Phase(row - top, column - left + first_column * p.stride[1], passes(row, column))
            for row in range(p.stride[0]) for column in range(p.stride[1])
        ),
        output_step=p.stride, height=p.h, width=p.w, kernel=(p.r, p.s),
    )  # fmt: skip


def _forward_axis(size: int, taps: int, stride: int, dilation: int, pad: int, phased: bool) -> Axis:
    if not phased:
        return Axis(size, 1, stride, stride, pad, (0,))
    return Axis(size, stride, stride, 1, pad, tuple(dict.fromkeys(tap * dilation % stride for tap in range(taps))))


def _passes(lines: list[list[Tap]]) -> tuple[tuple[Tap, ...], ...]:
    """Taps line by line; a pass has as many lines as have `MOST_TAPS` taps, but at least one."""
    passes: list[list[Tap]] = []
    for line in (line for line in lines if line):
        if not passes or len(passes[-1]) + len(line) > MOST_TAPS:
            passes.append([])
        passes[-1] += line
    return tuple(map(tuple, passes))
