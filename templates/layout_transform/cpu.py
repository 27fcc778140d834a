"""layout_transform on CPUs: tiles that stay in the first-level cache, or copies of common runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedsearch.backend.cpu_ops import as_array
from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.ops import Layout
from schedsearch.ops.dtypes import dtype
from schedsearch.ops.layout_transform import LayoutTransformParams, sizes
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.layout_transform.permutation import Permutation
from schedsearch.templates.layout_transform.places import placer, tile_count
from schedsearch.templates.parts.casts import u8, u16, u32, u64
from schedsearch.templates.parts.cpu_threads import busy_threads, threads_knob
from schedsearch.workload import Workload

_TILES = (1, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
_TYPES = {1: u8, 2: u16, 4: u32, 8: u64}
_MAX_TILES = 2**31 - 1
_WORTHWHILE_BYTES = 4096  # of a tile of the default; shorter runs get longer tiles


class LayoutTransformCpu(Template[LayoutTransformParams]):
    """Any change of layout on a CPU."""

    name = "layout_transform_cpu"
    version = 1
    op = "layout_transform"
    kind = "cpu"

    def validate(self, workload: Workload[LayoutTransformParams], target: Target) -> str | None:
        p = _permutation(workload)
        tiles = tile_count(p, _TILES[-1], _TILES[-1])
        return None if tiles <= _MAX_TILES else f"y has {tiles} tiles; allowed: less than 2**31"

    def space(self, workload: Workload[LayoutTransformParams], target: Target) -> ConfigSpace:
        p = _permutation(workload)
        columns = _up_to(p.x_column.extent, p)
        rows = _up_to(p.y_run.extent, p)
        return ConfigSpace(
            (
                Knob("tile_x", columns, "elements of a tile along x's innermost axis"),
                Knob("tile_y", rows, "elements of a tile along y's innermost axis"),
                Knob("inner", ("x", "y"), "whether the innermost loop reads or writes neighbours"),
                Knob("along", ("x", "y"), "neighbouring tiles follow one another along this array's runs"),
                threads_knob(target, "tiles"),
            )
        )

    def default(self, workload: Workload[LayoutTransformParams], target: Target, space: ConfigSpace) -> Config:
        """Tiles of 64 x 64 elements; longer ones where a run is short. As many threads as have enough to do."""
        values = space.values
        p = _permutation(workload)
        if p.transposes:
            columns, rows = _nearest(values["tile_x"], 64), _nearest(values["tile_y"], 64)
        else:
            columns, rows = values["tile_x"][0], _nearest(values["tile_y"], _WORTHWHILE_BYTES // p.element_bytes)
        threads = busy_threads(workload, target, values["threads"])
        return Config(tile_x=columns, tile_y=rows, inner="y", along="y", threads=threads)

    def plain(self, workload: Workload[LayoutTransformParams], target: Target, space: ConfigSpace) -> Config | None:
        """The loops over y in its order, on all cores, without tiles along x."""
        values = space.values
        return Config(
            tile_x=values["tile_x"][0], tile_y=values["tile_y"][-1], inner="y", along="y", threads=values["threads"][-1]
        )

    def kernel(self, workload: Workload[LayoutTransformParams], target: Target, config: Config) -> KernelSource:
        p = _permutation(workload)
        function = transform_kernel(p, config["tile_x"], config["tile_y"], config["inner"] == "y", config["along"] == "y")
        items = tile_count(p, config["tile_x"], config["tile_y"])
        step = KernelStep(function, (Pointer("x"), Pointer("y")), Grid(items), config["threads"])
        return KernelSource("cpu", "native", (step,), alignments=dict.fromkeys(("x", "y"), p.element_bytes))


def transform_kernel(p: Permutation, columns: int, rows: int, writes_neighbours: bool, along_y: bool) -> Callable[..., None]:
    """The kernel (x, y, start, stop) over tiles of `columns` elements of x's runs by `rows` elements of y's."""
    place = placer(p, columns, rows, along_y)
    kind, x_size, y_size = _TYPES[p.element_bytes], p.x_bytes // p.element_bytes, p.y_bytes // p.element_bytes
    x_row, x_column, y_column, y_row = p.y_run.x, p.x_column.x, p.x_column.y, p.y_run.y

    def transform(x: Any, y: Any, start: Any, stop: Any) -> None:
        source, out = as_array(x, (x_size,), kind), as_array(y, (y_size,), kind)
        for tile in range(start, stop):
            x_at, y_at, read_rows, written_rows, read_columns, written_columns = place(tile)
            written_columns, written_rows = min(written_columns, columns), min(written_rows, rows)
            read_columns = max(min(read_columns, written_columns), 0) if read_rows > 0 else 0
            read_rows = max(min(read_rows, written_rows), 0)
            if writes_neighbours:
                for column in range(read_columns):
                    to, at = y_at + column * y_column, x_at + column * x_column
                    for row in range(read_rows):
                        out[to + row * y_row] = source[at + row * x_row]
            else:
                for row in range(read_rows):
                    to, at = y_at + row * y_row, x_at + row * x_row
                    for column in range(read_columns):
                        out[to + column * y_column] = source[at + column * x_column]
            for column in range(written_columns):
                first = read_rows if column < read_columns else 0
                for row in range(first, written_rows):
                    out[y_at + column * y_column + row * y_row] = kind(0)

    return transform


def _permutation(workload: Workload[LayoutTransformParams]) -> Permutation:
    p = workload.params
    source, to = Layout.parse(p.layout), Layout.parse(p.to)
    return Permutation.of(source, to, sizes(p), dtype(p.dtype).nbytes)


def _up_to(extent: int, p: Permutation) -> tuple[int, ...]:
    """Lengths of a tile: none is much longer than the run, and there are less than 2^31 tiles."""
    longest = next((n for n in _TILES if n >= extent), _TILES[-1])
    return tuple(n for n in _TILES if n <= longest and tile_count(p, n, n) <= _MAX_TILES) or (longest,)


def _nearest(values: Any, wanted: int) -> Any:
    return min(values, key=lambda value: abs(value - wanted))
