"""topk and nonzero on NVIDIA GPUs: see docs/kernels/selection.md."""

from __future__ import annotations

import math

from schedsearch.config import Config
from schedsearch.launch import Grid, NumbaArray
from schedsearch.launch_rules import MAX_GRID_X
from schedsearch.ops.base import MAX_INT
from schedsearch.ops.softmax import along
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.selection import cuda_kernels as kernels
from schedsearch.templates.selection.block import next_power
from schedsearch.templates.selection.keys import words_of
from schedsearch.workload import Workload

THREADS = (256, 512, 1024)
SPLITS = (1, 2, 4, 8, 16, 32)
EACH = (1, 2, 4, 8)
PARTS = (256, 512, 1024, 2048)
STATIC_SHARED = 4 << 10  # bytes of histograms and the like, at most


class TopKCuda(Template):
    """A block finds the k-th number of a row by its digits, collects the better ones and sorts them in shared memory."""

    name = "topk_cuda"
    version = 1
    op = "topk"
    kind = "cuda"

    def validate(self, workload: Workload, target: Target) -> str | None:
        outer, length, inner = along(workload.params)
        if length > MAX_INT or outer * inner > MAX_GRID_X:
            return f"x has {outer * inner} rows of {length} numbers; allowed: less than 2**31 of each"
        most = (target.shared_bytes_per_block - STATIC_SHARED) // 8
        if next_power(workload.k) > most:
            return f"k is {workload.k}; allowed: up to {1 << (most.bit_length() - 1)}, which fit in shared memory"
        return None

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        outer, length, inner = along(workload.params)
        room = (target.shared_bytes_per_block - STATIC_SHARED) // 8
        splits = tuple(n for n in SPLITS if n == 1 or (4 * n * workload.k <= length and n * outer * inner <= MAX_GRID_X))
        knobs = (
            Knob("splits", splits, "blocks that share a row"),
            Knob("threads", THREADS, "threads of a block"),
        )
        fits = Constraint("candidates fit in shared memory", lambda k: k["candidates"] <= room)
        return ConfigSpace(knobs, (fits,), {"candidates": lambda k: _power(k["splits"] * workload.k)})

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        """Blocks for every multiprocessor, if parts of a row stay long."""
        outer, length, inner = along(workload.params)
        wanted = max(1, min(target.sms // (outer * inner), length // 4096))
        legal = [n for n in space.values["splits"] if not space.check(Config(splits=n, threads=1024))]
        splits = max(n for n in legal if n == 1 or n <= wanted)
        short = -(-length // splits) <= 2048
        return Config(splits=splits, threads=256 if short else 1024)

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        outer, _, inner = along(workload.params)
        rows, splits, threads = outer * inner, config["splits"], config["threads"]
        x, y, indices, x_extents, y_extents = arrays_of(workload)
        candidates = NumbaArray("candidates", "int64", (rows * splits * workload.k,), (8,)) if splits > 1 else indices
        select = KernelStep(
            kernels.select_kernel(workload, splits, threads),
            (x, x_extents, y, indices, y_extents, candidates),
            Grid(rows * splits),
            threads,
            dynamic_shared_bytes=8 * next_power(workload.k),
        )
        if splits == 1:
            return KernelSource("cuda", "native", (select,))
        merge = KernelStep(
            kernels.merge_kernel(workload, splits, threads),
            (x, y, indices, candidates),
            Grid(rows),
            threads,
            dynamic_shared_bytes=8 * next_power(splits * workload.k),
        )
        return KernelSource("cuda", "native", (select, merge), {"candidates": 8 * rows * splits * workload.k})


class NonZeroCuda(Template):
    """Blocks count what they keep of their parts of x, and then write it behind what the blocks before them keep."""

    name = "nonzero_cuda"
    version = 1
    op = "nonzero"
    kind = "cuda"

    def validate(self, workload: Workload, target: Target) -> str | None:
        return None

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        size = math.prod(workload.x)
        return ConfigSpace(
            (
                Knob("parts", tuple(n for n in PARTS if n == PARTS[0] or n * 256 <= size), "blocks, at most"),
                Knob("each", EACH, "elements of a thread that are numbered together"),
                Knob("threads", THREADS[:2], "threads of a block"),
            )
        )

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        return Config(parts=space.values["parts"][-1] if math.prod(workload.x) >= 1 << 22 else 256, each=4, threads=256)

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        size, threads, each = math.prod(workload.x), config["threads"], config["each"]
        tile = threads * each
        part = -(-size // (config["parts"] * tile)) * tile
        blocks = -(-size // part)
        x, counts = words_of("x", workload.dtype, size), NumbaArray("counts", "int32", (blocks,), (4,))
        y, y_extents = (NumbaArray(spec.name, "int64", (spec.size,), (8,)) for spec in workload.outputs)
        count, place = kernels.count_kernel(workload, part, threads), kernels.place_kernel(workload, part, each, threads)
        steps = (
            KernelStep(count, (x, counts), Grid(blocks), threads),
            KernelStep(place, (x, counts, y, y_extents), Grid(blocks), threads),
        )
        return KernelSource("cuda", "native", steps, {"counts": 4 * blocks})


def arrays_of(workload: Workload) -> tuple[NumbaArray, ...]:
    """x, y, indices, x_extents and y_extents of topk; the extents are indices where a workload has none."""
    y, indices, *_ = workload.outputs
    words = tuple(words_of(spec.name, workload.dtype, spec.size) for spec in (workload.signature[0], y))
    places = NumbaArray("indices", "int64", (indices.size,), (8,))
    names = ("x_extents", "y_extents") if workload.dynamic else ("indices", "indices")
    rank = len(workload.x) if workload.dynamic else indices.size
    return (*words, places, *(NumbaArray(name, "int64", (rank,), (8,)) for name in names))


def _power(count: object) -> object:
    """`next_power` of a number, or of a column of them."""
    import numpy as np

    return 2 ** np.maximum(1, np.ceil(np.log2(np.asarray(count, np.float64)))).astype(np.int64)
