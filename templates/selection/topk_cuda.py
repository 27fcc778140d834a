"""topk on NVIDIA GPUs: see docs/kernels/selection.md."""

from __future__ import annotations

from collections.abc import Callable

from schedsearch.config import Config
from schedsearch.launch import Grid, NumbaArray
from schedsearch.launch_rules import MAX_GRID_X
from schedsearch.ops.params import MAX_INT
from schedsearch.ops.softmax import along
from schedsearch.ops.topk import TopKParams
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.selection import topk_kernels as kernels
from schedsearch.templates.selection.block import BINS, RADIX_BITS, WARP, next_power
from schedsearch.templates.selection.keys import key_bits, words_of
from schedsearch.workload import Workload

THREADS = (256, 512, 1024)
SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)
LEAST_PART = 256  # numbers of a block that shares a row
MOST_BLOCKS = 1 << 13  # that share rows: of each digit they keep 8 MB of histograms
EACH = (1, 2, 4, 8)
STATIC_SHARED = 4 << 10  # bytes of histograms and the like, at most


class TopKCuda(Template[TopKParams]):
    """Blocks find the k-th number of a row digit by digit and collect the better ones; one sorts them in shared memory."""

    name = "topk_cuda"
    version = 2
    op = "topk"
    kind = "cuda"

    def validate(self, workload: Workload[TopKParams], target: Target) -> str | None:
        outer, length, inner = along(workload.params)
        if length > MAX_INT or outer * inner > MAX_GRID_X:
            return f"x has {outer * inner} rows of {length} numbers; allowed: less than 2**31 of each"
        most = (target.shared_bytes_per_block - STATIC_SHARED) // 8
        if next_power(workload.params.k) > most:
            return f"k is {workload.params.k}; allowed: up to {1 << (most.bit_length() - 1)}, which fit in shared memory"
        return None

    def space(self, workload: Workload[TopKParams], target: Target) -> ConfigSpace:
        outer, length, inner = along(workload.params)
        most = min(length // LEAST_PART, MOST_BLOCKS // (outer * inner))
        return ConfigSpace(
            (
                Knob("splits", tuple(n for n in SPLITS if n == 1 or n <= most), "blocks that share a row"),
                Knob("threads", THREADS, "threads of a block"),
                Knob("each", EACH, "numbers of a thread whose loads are in flight together"),
            )
        )

    def default(self, workload: Workload[TopKParams], target: Target, space: ConfigSpace) -> Config:
        """Long rows keep all multiprocessors busy, if the parts of a row are worth the launches."""
        outer, length, inner = along(workload.params)
        wanted = min(2 * target.sms // (outer * inner), length // 4096) if length > 16384 else 1
        splits = max(n for n in space.values["splits"] if n == 1 or n <= wanted)
        part = -(-length // splits)
        threads = 256 if part <= 2048 else 512 if outer * inner * splits > target.sms else 1024
        return Config(splits=splits, threads=threads, each=min(EACH[-1], next_power(-(-part // threads))))

    def kernel(self, workload: Workload[TopKParams], target: Target, config: Config) -> KernelSource:
        p = workload.params
        outer, _, inner = along(p)
        rows, splits, threads, each = outer * inner, config["splits"], config["threads"], config["each"]
        x, y, indices, x_extents, y_extents = arrays_of(workload)
        sorted_bytes = 8 * next_power(p.k)
        if splits == 1:
            select = kernels.select_kernel(workload, threads, each)
            params = x, x_extents, y, indices, y_extents
            step = KernelStep(select, params, Grid(rows), threads, dynamic_shared_bytes=sorted_bytes)
            return KernelSource("cuda", "native", (step,))
        passes = key_bits(p.dtype) // RADIX_BITS
        lengths = {
            "counts": ("int32", passes * rows * splits * BINS),
            "states": ("int64", passes * rows * 2),
            "taken": ("int32", rows),
            "candidates": ("int64", rows * p.k),
        }
        spaces = {name: NumbaArray(name, kind, (n,), (int(kind[3:]) // 8,)) for name, (kind, n) in lengths.items()}
        counts, states, taken, candidates = spaces.values()

        def shared(function: Callable[..., None], *params: NumbaArray) -> KernelStep:
            return KernelStep(function, params, Grid(rows * splits), threads)

        digits = [kernels.digit_kernel(workload, step, splits, threads, each) for step in range(passes)]
        steps = [shared(count, x, x_extents, y_extents, counts, states, taken) for count in digits]
        collect = kernels.collect_kernel(workload, splits, threads, each)
        steps.append(shared(collect, x, x_extents, counts, states, taken, candidates))
        sorting = min(THREADS[-1], max(WARP, next_power(p.k) // 2))
        sort, params = kernels.sort_kernel(workload, sorting), (x, x_extents, y, indices, candidates)
        steps.append(KernelStep(sort, params, Grid(rows), sorting, dynamic_shared_bytes=sorted_bytes))
        nbytes = {name: space.shape[0] * space.strides_bytes[0] for name, space in spaces.items()}
        return KernelSource("cuda", "native", tuple(steps), nbytes)


def arrays_of(workload: Workload[TopKParams]) -> tuple[NumbaArray, ...]:
    """x, y, indices, x_extents and y_extents of topk; the extents are indices where a workload has none."""
    p = workload.params
    y, indices, *_ = workload.outputs
    words = tuple(words_of(spec.name, p.dtype, spec.size) for spec in (workload.signature[0], y))
    places = NumbaArray("indices", "int64", (indices.size,), (8,))
    names = ("x_extents", "y_extents") if p.dynamic else ("indices", "indices")
    rank = len(p.x) if p.dynamic else indices.size
    return (*words, places, *(NumbaArray(name, "int64", (rank,), (8,)) for name in names))
