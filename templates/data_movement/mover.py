"""A movement on a GPU as a step that any template can use: its knobs, a default by formulas, and the launch.

`Mover` is one box of a movement on one target. Boxes whose runs are neighbours in both arrays, at multiples of 16 bytes, are
copied as vectors (`copy_kernel`). All others go through shared memory (`staged_kernel`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelStep, Renamed
from schedsearch.templates.data_movement.move import Move
from schedsearch.templates.data_movement.staged_kernel import Schedule, staged_kernel, tile_count
from schedsearch.templates.data_movement.staging import CHUNK_BYTES, SECTOR_BYTES, Staging
from schedsearch.templates.layout_transform.kernels import copy_items, copy_kernel
from schedsearch.templates.layout_transform.permutation import Permutation
from schedsearch.templates.parts.grids import earlier_blocks_per_sm, persistent_knobs, persistent_rule, resident

THREADS = (64, 128, 256, 512)
MAX_WORK_ITEMS = 2**31 - 1
MAX_TURNS = 32  # loads, or vectors, of a thread in a tile
MAX_COLLECTED = 256  # elements of a thread in a tile; the compiler unrolls their loops
LEAST_COPY_BYTES = 4  # of cp.async
MAX_HELD_WORDS = 64  # registers that hold loads
MAX_SQUARE_WORDS = 32  # registers that hold the elements of several vectors
_RUN_BYTES = (64, 128, 256, 512, 1024)
_TILE_BYTES = (4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10)
_DEFAULT_TILE_BYTES = 16 << 10  # of the default, if there are enough tiles
_DEFAULT_SHARED_BYTES = 48 << 10
_SQUARE_RUN_BYTES, _LONG_RUN_BYTES = 128, 512  # runs of y that squares fill in the default; runs that need no hints
_THREADS_PER_SM = 1024  # that registers must suffice for
_FEWER_PER_SM = 512  # if a thread holds the most elements
_TILES_PER_SM = 4  # the default takes smaller tiles rather than fewer
_SHORT_RUN_BYTES = 48  # a run costs as if it were so much longer
_PER_OCTAVE = 0.15  # what half or twice the wanted bytes of a tile cost
_MOST_SHARED_BYTES = 96 << 10
_BLOCKS_PER_SM = (2, 4, 8, 16)
_STORES = Knob("stores", ("default", "streaming"), "streaming: lines of y are the first to leave the caches")


RENAMED: Renamed = {"blocks_per_sm": earlier_blocks_per_sm(_BLOCKS_PER_SM)}  # see `Template.renamed`


@dataclass(frozen=True)
class Mover:
    """A box of a movement and the device that runs it."""

    move: Move
    target: Target

    @property
    def copies(self) -> bool:
        """Whether vectors of 16 bytes are copied as they are."""
        move = self.move
        return move.together() * move.element_bytes == CHUNK_BYTES and not any(limits.first for limits in move.ragged)

    def problem(self) -> str | None:
        """Why it cannot run on the target, or None."""
        if self.copies:
            runs = math.prod(factor.extent for factor in self.move.factors[:-1])
            return None if runs <= MAX_WORK_ITEMS else f"y has {runs} runs of neighbours in x; allowed: less than 2**31"
        if math.prod(factor.extent for factor in self.move.factors) <= MAX_WORK_ITEMS:  # tiles are not smaller than elements
            return None
        tiles = min(math.prod(self._staging(tile, 16).tiles) for tile in self.tiles.values())
        return None if tiles <= MAX_WORK_ITEMS else f"y has {tiles} tiles; allowed: less than 2**31"

    # ---- the space

    @property
    def tiles(self) -> Mapping[str, tuple[int, ...]]:
        """The tiles to choose from, by name: the extents along the factors of y, outermost first."""
        return _tiles(self.move, min(_MOST_SHARED_BYTES, self.target.shared_bytes_per_block))

    @property
    def load_bytes(self) -> int:
        """The widest loads: cp.async clips the last one of x, other loads must divide x. Elements of different sectors of
        memory are loaded one by one, and nothing beside them.
        """
        move, has_async = self.move, self.target.compute_capability >= (8, 0)
        nearest = abs(move.factors[move.along_x()[0]].x) * move.element_bytes
        widest = CHUNK_BYTES if nearest <= SECTOR_BYTES else max(move.element_bytes, LEAST_COPY_BYTES)
        return widest if has_async else math.gcd(widest, move.x_bytes)

    def space(self) -> ConfigSpace:
        return self._copy_space() if self.copies else self._staged_space()

    def _copy_space(self) -> ConfigSpace:
        limit = self.target.threads_per_sm
        return ConfigSpace(
            (
                Knob("unroll", (1, 2, 4, 8), "vectors of a thread that are loaded before the first is stored"),
                Knob("threads", THREADS, "threads of a block"),
                *persistent_knobs(_BLOCKS_PER_SM),
                _STORES,
            ),
            (
                Constraint("the blocks of a multiprocessor fit", lambda k: resident(k) * k["threads"] <= limit),
                persistent_rule(_BLOCKS_PER_SM),
            ),
            {"group_bytes": lambda k: k["threads"] * k["unroll"] * CHUNK_BYTES},
        )

    def _staged_space(self) -> ConfigSpace:
        target, element = self.target, self.move.element_bytes
        has_async, divides = target.compute_capability >= (8, 0), self.move.x_bytes % self.load_bytes == 0
        ways = (*(("async",) if has_async else ()), *(("registers",) if divides else ()))
        facts = {name: self._staging(tile, CHUNK_BYTES) for name, tile in self.tiles.items()}
        widths = tuple(n for n in (4, 8, 16) if n >= element)
        across = {(name, n): self._staging(tile, n).across_bytes for name, tile in self.tiles.items() for n in widths}

        def of_tile(value: Callable[[Staging], int]) -> Callable[[Mapping[str, Any]], Any]:
            values = {name: value(staging) for name, staging in facts.items()}
            return lambda k: np.array([values[str(name)] for name in np.asarray(k["tile"]).ravel()])

        def across_bytes(k: Mapping[str, Any]) -> Any:
            pairs = zip(*(np.asarray(k[name]).ravel() for name in ("tile", "store_bytes")))
            return np.array([across[str(name), int(n)] for name, n in pairs])

        knobs = (
            Knob("tile", tuple(self.tiles), "extents of a tile along the factors of y, outermost first"),
            Knob("store_bytes", widths, "bytes of a store to y"),
            Knob(
                "across",
                (1, *(n for n in (2, 4, 8, 16) if 4 <= n * element <= max(across.values()))),
                "neighbours of x that a thread reads at once, for as many vectors of y",
            ),
            Knob("threads", THREADS, "threads of a block"),
            *persistent_knobs(_BLOCKS_PER_SM),
            Knob(
                "loads", ways, "async: cp.async from x to shared memory; registers: all loads of a thread, then its stores"
            ),
            Knob("buffers", (1, 2), "tiles in shared memory: with 2 the next is loaded while one is stored"),
            _STORES,
            Knob("along", ("x", "y"), "neighbouring tiles follow one another along this array"),
        )
        constraints = (
            Constraint(
                f"a thread has at most {MAX_TURNS} loads, {MAX_TURNS} stores and {MAX_COLLECTED} elements of a tile",
                lambda k: (
                    (k["thread_loads"] <= MAX_TURNS)
                    & (k["thread_stores"] <= MAX_TURNS)
                    & (k["thread_stores"] * k["store_bytes"] <= MAX_COLLECTED * element)
                ),
            ),
            Constraint(
                f"neighbours read at once: whole vectors, at most {MAX_SQUARE_WORDS} registers, and no thread is idle",
                lambda k: (
                    (k["across"] == 1)
                    | (
                        (k["across"] * element <= k["across_bytes"])
                        & (k["across"] * k["store_bytes"] <= 4 * MAX_SQUARE_WORDS)
                        & (k["across"] * k["store_bytes"] * k["threads"] <= k["tile_bytes"])
                    )
                ),
            ),
            Constraint(
                "a block has work for every second thread",
                lambda k: (k["tile_loads"] * 2 > k["threads"]) | (k["threads"] == THREADS[0]),
            ),
            Constraint(
                f"loads in registers take at most {MAX_HELD_WORDS} of them",
                lambda k: (k["loads"] == "async") | (k["thread_loads"] * max(self.load_bytes // 4, 1) <= MAX_HELD_WORDS),
            ),
            Constraint(
                "two buffers need a block that loops over tiles, and cp.async",
                lambda k: (k["buffers"] == 1) | (k["persistent"] & (k["loads"] == "async")),
            ),
            Constraint(
                "the blocks of a multiprocessor fit",
                lambda k: (
                    (k["shared_bytes"] <= target.shared_bytes_per_block)
                    & (resident(k) * k["threads"] <= target.threads_per_sm)
                    & (resident(k) * k["shared_bytes"] <= target.shared_bytes_per_sm)
                ),
            ),
            persistent_rule(_BLOCKS_PER_SM),
        )
        derived: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "buffer_bytes": of_tile(lambda s: s.shared_bytes),
            "shared_bytes": lambda k: k["buffer_bytes"] * k["buffers"],
            "tile_loads": of_tile(lambda s: s.loads),
            "tile_bytes": of_tile(lambda s: math.prod(s.tile) * element),
            "x_run_bytes": of_tile(lambda s: s.x_span_bytes),
            "across_bytes": across_bytes,
            "y_run_bytes": of_tile(lambda s: s.run_elements * element),
            "tiles": of_tile(tile_count),
            "thread_loads": lambda k: -(-k["tile_loads"] // k["threads"]),
            "thread_stores": lambda k: -(-k["tile_bytes"] // (k["store_bytes"] * k["threads"])),
        }
        return ConfigSpace(knobs, constraints, derived)

    def _staging(self, tile: Sequence[int], store_bytes: int, across: int = 1) -> Staging:
        return Staging(self.move, tuple(tile), self.load_bytes, store_bytes, across)

    def default(self) -> Config:
        """Tiles of 16 KiB, or more where that makes short runs longer, and the stores with the fewest conflicts of banks.

        Squares whose runs in y are short leave the caches early, while their neighbours in memory are written.
        """
        space = self.space()
        if self.copies:
            return Config(unroll=4, threads=256, persistent=False, blocks_per_sm=1, stores="default")
        small = [
            name
            for name, tile in self.tiles.items()
            if self._staging(tile, CHUNK_BYTES).shared_bytes <= _DEFAULT_SHARED_BYTES
        ]
        tile = min(small or self.tiles, key=self._cost)
        ways = sorted(self._ways(space, tile), key=lambda way: self._staging(self.tiles[tile], *way).cycles())
        squares = ways[0][1] > 1
        staging = self._staging(self.tiles[tile], CHUNK_BYTES)
        y_run_bytes = staging.run_elements * self.move.element_bytes
        short = squares and y_run_bytes < min(staging.x_span_bytes, _LONG_RUN_BYTES)
        if short:  # narrow squares were the fastest then
            ways.sort(key=lambda way: way[1] != 2)
        for threads, (store_bytes, across) in itertools.product(
            (128, 64, 256, 512) if squares else (256, 128, 64, 512), ways
        ):
            config = Config(
                tile=tile,
                store_bytes=store_bytes,
                across=across,
                threads=threads,
                persistent=False,
                blocks_per_sm=1,
                loads=_values(space, "loads")[0],
                buffers=1,
                stores="streaming" if short else "default",
                along="y",
            )
            if not space.check(config):
                return config
        raise AssertionError("some threads fit the default tile")

    def _ways(self, space: ConfigSpace, tile: str) -> list[tuple[int, int]]:
        """Bytes of a store and how many neighbours of x are read at once; if several are, only the widest stores."""
        widths = _values(space, "store_bytes")[::-1]
        for n in widths:
            most = min(self._staging(self.tiles[tile], n).across_bytes // self.move.element_bytes, 4 * MAX_SQUARE_WORDS // n)
            run_bytes = self._staging(self.tiles[tile], n, 2).run_elements * self.move.element_bytes
            if most > 1 and n >= 8 and run_bytes >= _SQUARE_RUN_BYTES:
                return [*((n, m) for m in _values(space, "across")[:0:-1] if m <= most), *((n, 1) for n in widths)]
        return [(n, 1) for n in widths]

    def _cost(self, name: str) -> float:
        """Bytes that memory moves for a byte of the tile, estimated, and what short runs, odd sizes and empty parts cost."""
        staging, element = self._staging(self.tiles[name], CHUNK_BYTES), self.move.element_bytes
        full = math.prod(extent * tiles for extent, tiles in zip(staging.tile, staging.tiles))
        useful = math.prod(factor.extent for factor in self.move.factors) / full
        cost = 0.0
        for run_bytes, unit in ((staging.x_span_bytes, staging.x_unit), (staging.run_elements * element, staging.y_unit)):
            cost += (run_bytes + CHUNK_BYTES - min(unit, CHUNK_BYTES) + _SHORT_RUN_BYTES) / run_bytes
        share = full * element / (self.target.sms * _TILES_PER_SM)
        wanted = min(max(share, _TILE_BYTES[0]), _DEFAULT_TILE_BYTES)
        cost += _PER_OCTAVE * abs(math.log2(math.prod(staging.tile) * element / wanted))
        return cost / useful

    # ---- the launch

    def step(self, config: Mapping[str, Any], *, x: str, y: str) -> KernelStep:
        """The launch that writes the box's part of buffer `y` from buffer `x`; `config` is legal in `space()`."""
        threads, streaming = config["threads"], config["stores"] == "streaming"
        if self.copies:
            move, shape = self.move, (CHUNK_BYTES, threads, config["unroll"])
            permutation = Permutation(move.element_bytes, move.factors, move.ragged, move.x_bytes, move.y_bytes)
            function = copy_kernel(permutation, *shape, streaming, move.x_start, move.y_start)
            grid = Grid(copy_items(permutation, *shape), resident(config))
            return KernelStep(function, (Pointer(x), Pointer(y)), grid, threads)
        staging = self._staging(self.tiles[config["tile"]], config["store_bytes"], config["across"])
        buffers = config["buffers"]
        schedule = Schedule(threads, config["along"] == "y", config["loads"] == "async", buffers, streaming)
        function = staged_kernel(staging, schedule)
        grid = Grid(tile_count(staging), resident(config))
        return KernelStep(
            function,
            (Pointer(x), Pointer(y)),
            grid,
            threads,
            dynamic_shared_bytes=buffers * staging.shared_bytes,
            min_blocks_per_sm=max((_FEWER_PER_SM if self._needs_registers(config) else _THREADS_PER_SM) // threads, 1),
        )

    def _needs_registers(self, config: Mapping[str, Any]) -> bool:
        """Whether a thread may need more than 64 registers: for a large square, or for the places of elements with gaps."""
        if config["across"] > 1:
            return bool(config["across"] * config["store_bytes"] >= 4 * MAX_SQUARE_WORDS)
        return abs(self.move.factors[self.move.along_x()[0]].x) > 1

    def alignments(self, config: Mapping[str, Any]) -> tuple[int, int]:
        """Bytes of which the addresses of x and y must be multiples."""
        return (CHUNK_BYTES, CHUNK_BYTES) if self.copies else (self.load_bytes, config["store_bytes"])


@functools.lru_cache(maxsize=256)
def _tiles(move: Move, most_shared_bytes: int) -> Mapping[str, tuple[int, ...]]:
    """Tiles with runs of different lengths in x and y that fit into shared memory, by name."""
    found: dict[str, tuple[int, ...]] = {}
    for x_bytes, y_bytes, tile_bytes, along in itertools.product(_RUN_BYTES, _RUN_BYTES, _TILE_BYTES, "xy"):
        tile = _tile(move, x_bytes, y_bytes, tile_bytes, along)
        staging = Staging(move, tile, CHUNK_BYTES, max(move.element_bytes, CHUNK_BYTES))
        if staging.shared_bytes <= most_shared_bytes:
            found["x".join(map(str, tile))] = tile
    return found or {"x".join("1" for _ in move.factors): (1,) * len(move.factors)}


def _tile(move: Move, x_bytes: int, y_bytes: int, tile_bytes: int, along: str) -> tuple[int, ...]:
    """A tile whose runs have about these bytes, and which grows along x or y until it has `tile_bytes`."""
    element, extents = move.element_bytes, [factor.extent for factor in move.factors]
    tile = [1] * len(extents)
    for order, wanted in ((move.along_x(), x_bytes // element), (move.along_y(), y_bytes // element)):
        run = 1
        for i in order:
            tile[i] = max(tile[i], _part(extents[i], -(-wanted // run), element))
            run *= tile[i]
            if tile[i] < extents[i] or run >= wanted:
                break
    for i in move.along_y() if along == "y" else move.along_x():
        missing = -(-(tile_bytes // element) // math.prod(tile))
        if missing > 1:
            tile[i] = _part(extents[i], tile[i] * missing, element)
    return tuple(tile)


def _part(extent: int, wanted: int, element: int) -> int:
    """About `wanted` of an extent: parts of almost one length, in multiples of 16 bytes if they are long."""
    if wanted >= extent:
        return extent
    part = -(-extent // -(-extent // wanted))
    unit = CHUNK_BYTES // element
    return min(-(-part // unit) * unit if part > unit else part, extent)


def _values(space: ConfigSpace, name: str) -> tuple[Any, ...]:
    return next(knob.values for knob in space.knobs if knob.name == name)
