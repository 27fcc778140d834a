"""pool2d on NVIDIA GPUs: see docs/kernels/bandwidth.md."""

from __future__ import annotations

import math

from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.launch_rules import MAX_GRID_X
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.images import planes_of
from schedsearch.ops.pool2d import Pool2dParams
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.parts.slices import vector_limits
from schedsearch.templates.parts.vectors import LEAST_CAPABILITY, MOST_BYTES
from schedsearch.templates.pool2d.cuda_kernel import Pool, shared_kernel, window_kernel
from schedsearch.workload import Workload

TILES = (1, 2, 4)
ROWS = (1, 2, 4)
SPLITS = (1, 2, 4, 8, 16, 32)
THREADS = (64, 128, 256, 512)
_MANY_TAPS = 16  # windows that threads may share
_BUSY_THREADS = 1024  # of a multiprocessor, to hide the latency of memory
_FEW = 8  # elements of a thread if the device is not busy: with 16, 1x112x112x64 gives a multiprocessor three warps
_WINDOW_THREADS = 1024  # of a multiprocessor, if each has few pixels: up to 64 registers
_SHARED_BYTES = 48 << 10
_MOST_SPAN = 32  # columns of x of a thread, which the compiler unrolls
_MOST_PIXELS = 64  # of x of a thread with several rows, for the same reason


class Pool2dCuda(Template[Pool2dParams]):
    """Threads with a vector of channels each, or several threads for each window."""

    name = "pool2d_cuda"
    version = 2
    op = "pool2d"
    kind = "cuda"

    def validate(self, workload: Workload[Pool2dParams], target: Target) -> str | None:
        if problem := target.older_than(LEAST_CAPABILITY):
            return problem
        items = Pool.of(workload, 1).items(1)
        return None if items <= MAX_GRID_X else f"y has {items} elements; allowed: less than 2**31"

    def space(self, workload: Workload[Pool2dParams], target: Target) -> ConfigSpace:
        p = workload.params
        taps, pool = p.r * p.s, Pool.of(workload, 1)
        extent = (p.s - 1) * p.dilation[1] + 1
        spans = {tile: (tile - 1) * p.stride[1] + extent for tile in TILES}
        tiles = tuple(n for n in TILES if n == 1 or (n <= pool.columns.outputs and spans[n] <= _MOST_SPAN))
        knobs = (
            Knob("vector", _vectors(workload), "channels of a thread, neighbours in memory"),
            Knob("rows", _rows(workload, pool), "neighbouring rows of y of a thread"),
            Knob("tile", tiles, "neighbouring pixels of a row of y of a thread"),
            Knob("splits", SPLITS if taps >= _MANY_TAPS else (1,), "threads of a block that share a window"),
            Knob("threads", THREADS, "threads of a block"),
        )
        rules = (
            Constraint(
                "threads that share a window have one pixel", lambda k: (k["rows"] * k["tile"] == 1) | (k["splits"] == 1)
            ),
            Constraint(
                f"threads with several rows load at most {_MOST_PIXELS} pixels",
                lambda k: (k["rows"] == 1) | (k["loaded"] <= _MOST_PIXELS),
            ),
            Constraint("sums fit in shared memory", lambda k: k["shared_bytes"] <= _SHARED_BYTES),
        )
        derived = {
            "shared_bytes": lambda k: (k["splits"] > 1) * (k["threads"] + k["threads"] // k["splits"]) * k["vector"] * 4,
            "loaded": lambda k: ((k["rows"] - 1) * p.stride[0] + p.r) * ((k["tile"] - 1) * p.stride[1] + extent),
        }
        return ConfigSpace(knobs, rules, derived)

    def default(self, workload: Workload[Pool2dParams], target: Target, space: ConfigSpace) -> Config:
        """The widest loads, of at most eight elements if threads are few. Threads share large windows until the device is
        busy; else they have two pixels where windows overlap, and as many rows where each row is part of three windows.
        """
        p = workload.params
        values = space.values
        vector = values["vector"][-1]
        busy, taps = target.sms * _BUSY_THREADS, p.r * p.s
        if vector > _FEW and Pool.of(workload, vector).items(1) < busy:
            vector = _FEW
        pool = Pool.of(workload, vector)
        wanted = SPLITS[-1] if pool.vectors == 1 else -(-busy // pool.items(1))  # neighbours in memory, side by side
        splits = max(n for n in values["splits"] if n == 1 or (n < 2 * wanted and 2 * n <= taps))
        overlap = p.s * p.dilation[1] > p.stride[1]
        tile = 2 if splits == 1 and 2 in values["tile"] and overlap and pool.items(2) >= 2 * busy else 1
        thrice = p.r >= 3 * p.stride[0]
        rows = 2 if tile == 2 and 2 in values["rows"] and thrice and pool.items(2, 2) >= busy else 1
        most = 128 if rows > 1 else 256  # 96 registers of a thread: five blocks of 128 fit, or two of 256
        threads = most if pool.items(tile, rows) * splits >= 256 * 2 * target.sms else 64
        return Config(vector=vector, rows=rows, tile=tile, splits=splits, threads=max(threads, 2 * splits))

    def plain(self, workload: Workload[Pool2dParams], target: Target, space: ConfigSpace) -> Config | None:
        """One element of y a thread."""
        return Config(vector=1, rows=1, tile=1, splits=1, threads=128)

    def kernel(self, workload: Workload[Pool2dParams], target: Target, config: Config) -> KernelSource:
        pool, splits, threads = Pool.of(workload, config["vector"]), config["splits"], config["threads"]
        if splits > 1:
            function, blocks = shared_kernel(pool, splits, threads), -(-pool.items(1) // (threads // splits))
        else:
            rows, tile = config["rows"], config["tile"]
            function, blocks = window_kernel(pool, rows, tile, threads), -(-pool.items(tile, rows) // threads)
        few = splits == 1 and config["rows"] == 1 and config["tile"] <= 2  # pixels of a thread
        at_once = _WINDOW_THREADS // threads if few else 1  # blocks of a multiprocessor
        step = KernelStep(function, (Pointer("x"), Pointer("y")), Grid(blocks), threads, min_blocks_per_sm=at_once)
        alignment = min(config["vector"] * pool.element_bytes, MOST_BYTES)
        return KernelSource("cuda", "native", (step,), alignments=dict.fromkeys(("x", "y"), alignment))


def _rows(workload: Workload[Pool2dParams], pool: Pool) -> tuple[int, ...]:
    """Rows of y of a thread: one where taps are apart, because the rows between them would be loaded, too."""
    return tuple(n for n in ROWS if n == 1 or (n <= pool.rows.outputs and workload.params.dilation[0] == 1))


def _vectors(workload: Workload[Pool2dParams]) -> tuple[int, ...]:
    """Elements of an access of up to 16 bytes that divide a pixel, and the distance of pixels if y is a slice."""
    _, channels = planes_of(workload.params)
    widest = math.gcd(channels, MOST_BYTES // dtype_of(workload.params.dtype).nbytes, *vector_limits(workload.output))
    return tuple(1 << i for i in range(widest.bit_length()))
