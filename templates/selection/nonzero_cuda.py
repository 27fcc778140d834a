"""nonzero on NVIDIA GPUs: see docs/kernels/selection.md."""

from __future__ import annotations

import math

from schedsearch.config import Config
from schedsearch.launch import Grid, NumbaArray, Pointer
from schedsearch.ops.nonzero import NonZeroParams
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.selection import nonzero_kernels as kernels
from schedsearch.templates.selection.keys import words_of
from schedsearch.workload import Workload

THREADS = (256, 512)
EACH = (1, 2, 4, 8)
PARTS = (256, 512, 1024, 2048)
STATIC_SHARED = 2048  # at most, beside the lists


class NonZeroCuda(Template[NonZeroParams]):
    """Blocks count what they keep of their parts of x, and then write it behind what the blocks before them keep."""

    name = "nonzero_cuda"
    version = 2
    op = "nonzero"
    kind = "cuda"

    def validate(self, workload: Workload[NonZeroParams], target: Target) -> str | None:
        return None

    def space(self, workload: Workload[NonZeroParams], target: Target) -> ConfigSpace:
        vectors, twice = _vectors(workload), 2 * kernels.per_vector(workload.params.dtype)
        most = target.shared_bytes_per_block - STATIC_SHARED
        return ConfigSpace(
            (
                Knob("parts", tuple(n for n in PARTS if n == PARTS[0] or n * THREADS[0] <= 2 * vectors), "blocks, at most"),
                Knob("each", EACH, "vectors of a thread whose loads are in flight and whose elements are numbered together"),
                Knob("threads", THREADS, "threads of a block"),
            ),
            (Constraint("lists fit in shared memory", lambda k: twice * k["threads"] * k["each"] <= most),),
        )

    def default(self, workload: Workload[NonZeroParams], target: Target, space: ConfigSpace) -> Config:
        """As many vectors a thread as leave four blocks for each multiprocessor."""
        most = max(1, _vectors(workload) // (4 * target.sms * THREADS[0]))
        return Config(parts=space.values["parts"][-1], each=max(n for n in EACH if n <= min(most, 4)), threads=THREADS[0])

    def kernel(self, workload: Workload[NonZeroParams], target: Target, config: Config) -> KernelSource:
        p = workload.params
        size, vectors, threads, each = math.prod(p.x), _vectors(workload), config["threads"], config["each"]
        tile = threads * each
        part = -(-vectors // (config["parts"] * tile)) * tile
        blocks = -(-vectors // part)
        x, counts = words_of("x", p.dtype, size), NumbaArray("counts", "int32", (blocks,), (4,))
        y, y_extents = (NumbaArray(spec.name, "int64", (spec.size,), (8,)) for spec in workload.outputs)
        count = kernels.count_kernel(workload.params, part, each, threads)
        place = kernels.place_kernel(workload.params, part, each, threads)
        listed = 2 * tile * kernels.per_vector(p.dtype)
        steps = (
            KernelStep(count, (x, Pointer("x"), counts), Grid(blocks), threads),
            KernelStep(place, (x, Pointer("x"), counts, y, y_extents), Grid(blocks), threads, dynamic_shared_bytes=listed),
        )
        return KernelSource("cuda", "native", steps, {"counts": 4 * blocks}, {"x": kernels.VECTOR})


def _vectors(workload: Workload[NonZeroParams]) -> int:
    return -(-workload.signature[0].size // kernels.per_vector(workload.params.dtype))
