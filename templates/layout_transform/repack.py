"""Permutations on a GPU as steps that any template can use: their knobs, a default by formulas, and the launch.

`Repack` is one change of layout on one target. layout_transform_cuda is nothing else. A template that packs its arguments
makes one for each argument, puts the knobs into its own space and the step before its own.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.ops import Layout
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelStep, Renamed
from schedsearch.templates.layout_transform.kernels import (
    COPY_SHAPED_BY,
    TRANSPOSE_SHAPED_BY,
    Tile,
    copy_items,
    copy_kernel,
    transpose_kernel,
)
from schedsearch.templates.layout_transform.permutation import Permutation
from schedsearch.templates.parts.grids import earlier_blocks_per_sm, persistent_knobs, persistent_rule, resident

THREADS = (32, 64, 128, 256, 512)
MAX_TILES = 2**31 - 1
MAX_ACCESSES = 32  # loads, or pieces, of a thread in a tile
MAX_STORES = 64  # of a thread in a tile
MAX_WORDS = 64  # registers that hold loads or a piece
MAX_TILE_BYTES = 32 << 10  # so that a multiprocessor has several blocks, whose loads and stores overlap
_STORES = Knob("stores", ("default", "streaming"), "streaming: lines of y are the first to leave the caches")
_BLOCKS_PER_SM = (2, 4, 8, 16)
RENAMED: Renamed = {"blocks_per_sm": earlier_blocks_per_sm(_BLOCKS_PER_SM)}  # see `Template.renamed`


@dataclass(frozen=True)
class Repack:
    """A change of layout and the device that makes it.

    Examples:
        >>> from schedsearch.target import PRESETS
        >>> sizes = {"N": 8, "C": 48, "H": 56, "W": 56}
        >>> repack = Repack.of(Layout.parse("NHWC"), Layout.parse("NCHW"), sizes, 1, PRESETS["h200"])
        >>> repack.step(repack.default(), x="x", y="x_packed").block_threads
        128
    """

    permutation: Permutation
    target: Target

    @classmethod
    def of(
        cls, source: Layout, to: Layout, sizes: Mapping[str, int], element_bytes: int, target: Target, **padded: Any
    ) -> Repack:
        """Args:
        sizes: axis -> logical extent.
        element_bytes: 1, 2 or 4.
        padded: `x_sizes` and `y_sizes`, as in `Permutation.of`.
        """
        return cls(Permutation.of(source, to, sizes, element_bytes, **padded), target)

    def problem(self) -> str | None:
        """Why it cannot run on the target, or None."""
        runs = math.prod(factor.extent for factor in self.permutation.factors[:-1])
        if runs > MAX_TILES:
            return f"y has {runs} runs of neighbours in x; allowed: less than 2**31"
        return None

    # ---- the space

    def space(self) -> ConfigSpace:
        return self._transpose_space() if self.permutation.transposes else self._copy_space()

    def _transpose_space(self) -> ConfigSpace:
        p, element = self.permutation, self.permutation.element_bytes
        x_most, y_most = (_power_of_two(run.extent * element) for run in (p.x_run, p.y_run))
        has_async = self.target.compute_capability >= (8, 0)
        knobs = (
            Knob("tile_x_bytes", _sizes((32, 64, 128, 256, 512), x_most, element), "bytes of a tile's run of x"),
            Knob("tile_y_bytes", _sizes((32, 64, 128, 256, 512), y_most, element), "bytes of a tile's run of y"),
            Knob("load_bytes", _widths(element, p.x_aligned()), "bytes of a load from x"),
            Knob("store_bytes", _widths(element, p.y_aligned()), "bytes of a store to y"),
            Knob("read_bytes", tuple(n for n in (4, 8, 16) if n >= element), "bytes that a thread reads of a run of x"),
            Knob("lanes", (8, 16, 32), "threads side by side along a run of y"),
            Knob("threads", THREADS, "threads of a block"),
            *persistent_knobs(_BLOCKS_PER_SM),
            Knob(
                "loads",
                ("async", "registers") if has_async else ("registers",),
                "async: cp.async from x to shared memory; registers: all loads of a thread, then its stores",
            ),
            _STORES,
            Knob("along", ("x", "y"), "neighbouring tiles follow one another along this array's runs"),
        )
        shared_limit = min(MAX_TILE_BYTES, self.target.shared_bytes_per_block)
        constraints = (
            Constraint(f"a tile has at most {shared_limit} bytes", lambda k: k["tile_bytes"] <= shared_limit),
            Constraint(
                "an access is no longer than its run in a tile",
                lambda k: (
                    (k["load_bytes"] <= k["tile_x_bytes"])
                    & (k["read_bytes"] <= k["tile_x_bytes"])
                    & (k["store_bytes"] <= k["tile_y_bytes"])
                ),
            ),
            Constraint(
                f"a thread has 1 to {MAX_ACCESSES} loads and 1 to {MAX_ACCESSES} pieces of a tile",
                lambda k: (
                    (k["thread_loads"] >= 1)
                    & (k["thread_loads"] <= MAX_ACCESSES)
                    & (k["thread_pieces"] >= 1)
                    & (k["thread_pieces"] <= MAX_ACCESSES)
                ),
            ),
            Constraint(f"a thread has at most {MAX_STORES} stores", lambda k: k["thread_stores"] <= MAX_STORES),
            Constraint(
                f"loads in registers, and a piece, take at most {MAX_WORDS} registers",
                lambda k: (
                    (k["piece_words"] <= MAX_WORDS)
                    & ((k["loads"] == "async") | (k["thread_loads"] * np.maximum(k["load_bytes"] // 4, 1) <= MAX_WORDS))
                ),
            ),
            Constraint("cp.async copies 4, 8 or 16 bytes", lambda k: (k["loads"] == "registers") | (k["load_bytes"] >= 4)),
            Constraint(
                "the blocks of a multiprocessor fit",
                lambda k: (
                    (resident(k) * k["threads"] <= self.target.threads_per_sm)
                    & (resident(k) * k["tile_bytes"] <= self.target.shared_bytes_per_sm)
                ),
            ),
            persistent_rule(_BLOCKS_PER_SM),
        )
        derived = {
            "tile_bytes": lambda k: k["tile_x_bytes"] * (k["tile_y_bytes"] // element),
            "thread_loads": lambda k: k["tile_bytes"] // (k["load_bytes"] * k["threads"]),
            "thread_pieces": lambda k: k["tile_bytes"] // k["read_bytes"] // (k["store_bytes"] // element) // k["threads"],
            "thread_stores": lambda k: k["thread_pieces"] * (k["read_bytes"] // element),
            "piece_words": lambda k: (k["store_bytes"] // element) * (k["read_bytes"] // 4),
            "useful_share": lambda k: (
                _useful(p.x_run.extent * element, k["tile_x_bytes"]) * _useful(p.y_run.extent * element, k["tile_y_bytes"])
            ),
        }
        return ConfigSpace(knobs, constraints, derived)

    def _copy_space(self) -> ConfigSpace:
        p = self.permutation
        together = math.gcd(p.x_aligned(), p.y_aligned())
        vectors = (p.element_bytes, *_widths(p.element_bytes, together))
        knobs = (
            Knob("vector_bytes", tuple(dict.fromkeys(vectors)), "bytes of a load and a store"),
            Knob("unroll", (1, 2, 4, 8), "vectors of a thread that are loaded before the first is stored"),
            Knob("threads", THREADS[1:], "threads of a block"),
            *persistent_knobs(_BLOCKS_PER_SM),
            _STORES,
        )
        limit = self.target.threads_per_sm
        constraints = (
            Constraint("the blocks of a multiprocessor fit", lambda k: resident(k) * k["threads"] <= limit),
            persistent_rule(_BLOCKS_PER_SM),
        )
        total = p.y_bytes
        derived = {"blocks": lambda k: -(-total // (k["vector_bytes"] * k["unroll"] * k["threads"]))}
        return ConfigSpace(knobs, constraints, derived)

    def default(self) -> Config:
        """Long vectors, and tiles of 128 by 128 bytes; where a run is short, a tile that it fills, and more of the other."""
        return _default(self)

    # ---- the launch

    def step(self, config: Mapping[str, Any], *, x: str, y: str, constant: bool = False) -> KernelStep:
        """The launch that writes buffer `y` from buffer `x`. Workspaces may be buffers too.

        Args:
            config: legal in `space()`.
            constant: x never changes, so that the step need not run again (`KernelStep.constant`).
        """
        p, threads = self.permutation, config["threads"]
        shared = 0
        function: Callable[..., None]
        if p.transposes:
            tile = self._tile(config)
            function, shaped_by = transpose_kernel(p, tile), TRANSPOSE_SHAPED_BY
            items, shared = tile.count(p), tile.shared_bytes(p.element_bytes)
        else:
            shape = (config["vector_bytes"], threads, config["unroll"])
            function, shaped_by = copy_kernel(p, *shape, config["stores"] == "streaming"), COPY_SHAPED_BY
            items = copy_items(p, *shape)
        grid = Grid(items, resident(config))
        return KernelStep(
            function,
            (Pointer(x), Pointer(y)),
            grid,
            threads,
            dynamic_shared_bytes=shared,
            constant=constant,
            shaped_by=shaped_by,
        )

    def alignments(self, config: Mapping[str, Any]) -> tuple[int, int]:
        """Bytes of which the addresses of x and y must be multiples."""
        if self.permutation.transposes:
            return config["load_bytes"], config["store_bytes"]
        return config["vector_bytes"], config["vector_bytes"]

    def _tile(self, config: Mapping[str, Any]) -> Tile:
        return Tile(
            config["tile_x_bytes"],
            config["tile_y_bytes"],
            config["load_bytes"],
            config["store_bytes"],
            config["read_bytes"],
            config["lanes"],
            config["threads"],
            copies_late=config["loads"] == "async",
            streaming=config["stores"] == "streaming",
            along_y=config["along"] == "y",
        )


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def _sizes(candidates: tuple[int, ...], most: int, element: int) -> tuple[int, ...]:
    """Lengths of a tile that are no longer than needed; 32 and 128 bytes always give some legal tile."""
    short = (max(most, 4, element),) if most < 32 else ()
    return (*short, *(n for n in candidates if n <= max(most, 32) or n == 128))


def _filled(run_bytes: int) -> tuple[int, ...]:
    """Lengths of a tile along a run, the best first: those that waste less than a quarter, or else little."""
    short = _power_of_two(run_bytes)
    tiles = (128, 256, 64, 512, 32, *((max(short, 4),) if short < 32 else ()))
    return tuple(sorted(dict.fromkeys(tiles), key=lambda n: -min(_useful(run_bytes, n), 0.75)))


def _widths(element: int, elements: int) -> tuple[int, ...]:
    """The two longest vectors of up to 16 bytes whose elements always lie together."""
    fitting = [n for n in (16, 8, 4, 2, 1) if n >= element and elements % (n // element) == 0]
    return tuple(fitting[:2])


def _useful(extent: int, tile: Any) -> Any:
    """Share of the tiles along a run that holds elements."""
    return extent / (np.ceil(extent / tile) * tile)


@functools.lru_cache(maxsize=256)
def _default(repack: Repack) -> Config:
    """Cached, because a template that packs its arguments needs it for each of its candidates, and it takes 30 ms."""
    space, p = repack.space(), repack.permutation
    x_tiles, y_tiles = (_filled(run.extent * p.element_bytes) for run in (p.x_run, p.y_run))
    wishes: dict[str, Iterable[Any]] = {
        "tile_x_bytes": x_tiles,
        "tile_y_bytes": y_tiles,
        "load_bytes": (16, 8, 4, 2, 1),
        "store_bytes": (16, 8, 4, 2, 1),
        "vector_bytes": (16, 8, 4, 2, 1),
        "read_bytes": (4, 8, 16),
        "unroll": (4, 2, 1),
        "lanes": (8,) if min(p.y_aligned() * p.element_bytes, 16) == 16 else (32, 16, 8),
        "threads": (128, 256, 64, 512, 32),
        "persistent": (False,),
        "blocks_per_sm": (1,),
        "loads": ("async", "registers"),
        "stores": ("default",),
        "along": ("y",),
    }
    allowed = {knob.name: [value for value in wishes[knob.name] if value in knob.values] for knob in space.knobs}
    for values in itertools.product(*(allowed[name] for name in space.names)):
        config = Config(dict(zip(space.names, values)))
        if not space.check(config):
            return config
    raise AssertionError("a space of layout_transform is never empty")
