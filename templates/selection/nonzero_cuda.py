"""nonzero on NVIDIA GPUs: see docs/kernels/selection.md."""

from __future__ import annotations

import math

from schedsearch.config import Config
from schedsearch.launch import Grid, NumbaArray
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.selection import nonzero_kernels
from schedsearch.templates.selection.keys import words_of
from schedsearch.workload import Workload

THREADS = (256, 512, 1024)
EACH = (1, 2, 4, 8)
PARTS = (256, 512, 1024, 2048)


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
        count, place = (
            nonzero_kernels.count_kernel(workload, part, threads),
            nonzero_kernels.place_kernel(workload, part, each, threads),
        )
        steps = (
            KernelStep(count, (x, counts), Grid(blocks), threads),
            KernelStep(place, (x, counts, y, y_extents), Grid(blocks), threads),
        )
        return KernelSource("cuda", "native", steps, {"counts": 4 * blocks})
