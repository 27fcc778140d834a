"""All operators that only move data on CPUs: see docs/kernels/data_movement.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.ops.data_movement import DataMovement
from schedsearch.ops.dtypes import dtype
from schedsearch.ops.movement import Movement
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.data_movement.cpu_kernels import Part, Style, Tiling, move_kernel, parts_of
from schedsearch.templates.parts.cpu_threads import busy_threads, threads_knob
from schedsearch.workload import Workload

TILES = (4, 8, 16, 32, 64, 128, 256, 1024)
RUNS = (1 << 12, 1 << 14, 1 << 16, 1 << 18)  # bytes of a copied run, and of an item
MAX_ITEMS = 2**31 - 1
_BLOCKS = (0, 8, 16)
_VECTOR_BYTES = 64  # longest row of a block
_STREAMED_BYTES = 32 << 20  # of y; shorter results may stay in the caches for the next kernel
_STREAMED_RUN_BYTES = 1 << 20  # shorter runs begin and end within lines too often
_SHARES = 4  # items for each thread, where there are enough elements


class DataMovementCpu(Template):
    """Transpositions, slices, concatenations, paddings and blocks of pixels on a CPU."""

    name = "data_movement_cpu"
    version = 1
    op = "transpose"
    kind = "cpu"

    @property
    def ops(self) -> tuple[str, ...]:
        return ("transpose", "depth_to_space", "space_to_depth", "strided_slice", "concat", "pad")

    def validate(self, workload: Workload, target: Target) -> str | None:
        items = sum(_tiling(part, _largest(part), target.sms).items(part) for part in _parts(workload))
        return None if items <= MAX_ITEMS else f"y has {items} tiles; allowed: less than 2**31"

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        parts = _moved(workload)
        crossing = [part for part in parts if part.x_run.extent > 1]
        columns = max((part.x_run.extent for part in crossing), default=1)
        rows = max((part.y_run.extent for part in crossing), default=1)
        block_bytes = max((part.element_bytes for part in crossing if part.crosses), default=_VECTOR_BYTES)
        knobs = (
            Knob("tile_x", _up_to(TILES, columns), "elements of a tile along x's innermost axis, where runs cross"),
            Knob("tile_y", _up_to(TILES, rows), "elements of a tile along y's innermost axis, where runs cross"),
            Knob("item_bytes", RUNS, "bytes of a work item"),
            Knob(
                "block",
                tuple(n for n in _BLOCKS if n * block_bytes <= _VECTOR_BYTES),
                "rows and columns that are transposed in registers; 0: element by element",
            ),
            Knob("along", ("x", "y"), "neighbouring tiles follow one another along this array's runs"),
            Knob(
                "stores",
                ("default", "streaming") if any(part.copies for part in parts) else ("default",),
                "streaming: copied runs go past the caches",
            ),
            threads_knob(target, "items"),
        )
        return ConfigSpace(knobs)

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        """Tiles of 64 elements along the shorter run by up to 1024, blocks with rows of 16 bytes or 8 elements, and streams
        where runs are long and y is larger than caches are. As many
        threads as have enough to do.
        """
        values = space.values
        long_x = values["tile_x"][-1] > values["tile_y"][-1]
        runs = [part.y_run.extent * part.element_bytes for part in _moved(workload) if part.copies]
        streams = workload.output.nbytes >= _STREAMED_BYTES and min(runs, default=0) >= _STREAMED_RUN_BYTES
        return Config(
            tile_x=_nearest(values["tile_x"], TILES[-1] if long_x else 64),
            tile_y=_nearest(values["tile_y"], 64 if long_x else TILES[-1]),
            item_bytes=1 << 16 if streams else 1 << 14,
            block=_nearest(values["block"], 16 if dtype(workload.output.dtype).nbytes == 1 else 8),
            along="y",
            stores="streaming" if streams else "default",
            threads=busy_threads(workload, target, values["threads"]),
        )

    def plain(self, workload: Workload, target: Target, space: ConfigSpace) -> Config | None:
        """Loops over y in its order, element by element or run by run, on all cores."""
        values = space.values
        return Config(
            tile_x=values["tile_x"][0],
            tile_y=values["tile_y"][-1],
            item_bytes=1 << 14,
            block=0,
            along="y",
            stores="default",
            threads=values["threads"][-1],
        )

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        style = Style(config["block"], config["stores"] == "streaming")
        threads = config["threads"]
        movement, steps = _movement(workload), []
        for box in movement.boxes:
            parts = parts_of(box, movement.element_bytes, movement.fill)
            tiled = [(part, _tiling(part, config, threads)) for part in parts]
            items = sum(tiling.items(part) for part, tiling in tiled)
            function = move_kernel(tiled, style)
            steps.append(KernelStep(function, (Pointer(box.x), Pointer("y")), Grid(items), threads))
        if not steps:  # y is empty
            steps.append(KernelStep(move_kernel([], style), (Pointer("x"), Pointer("y")), Grid(1), 1))
        return KernelSource("cpu", "native", tuple(steps))


def _movement(workload: Workload) -> Movement:
    definition = workload.definition
    assert isinstance(definition, DataMovement)
    return definition.movement(workload.params)


def _parts(workload: Workload) -> list[Part]:
    movement = _movement(workload)
    return [part for box in movement.boxes for part in parts_of(box, movement.element_bytes, movement.fill)]


def _moved(workload: Workload) -> list[Part]:
    return [part for part in _parts(workload) if part.fill is None]


def _tiling(part: Part, config: Any, threads: int) -> Tiling:
    """Runs that do not cross are cut by bytes, and items are small enough that every thread has several."""
    item_bytes = min(config["item_bytes"], max(part.nbytes // (_SHARES * threads), RUNS[0]))
    columns, rows = config["tile_x"], config["tile_y"]
    if part.x_run.extent == 1:
        columns, rows = 1, max(item_bytes // part.element_bytes, 1)
    return Tiling.of(part, columns, rows, item_bytes, config["along"] == "y")


def _largest(part: Part) -> dict[str, Any]:
    return {"tile_x": TILES[-1], "tile_y": TILES[-1], "item_bytes": RUNS[-1], "along": "y"}


def _up_to(values: Sequence[int], extent: int) -> tuple[int, ...]:
    """Those that are no longer than needed."""
    longest = next((n for n in values if n >= extent), values[-1])
    return tuple(n for n in values if n <= longest)


def _nearest(values: Sequence[int], wanted: int) -> int:
    return min(values, key=lambda value: abs(value - wanted))
