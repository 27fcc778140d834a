"""layout_transform on NVIDIA GPUs: see docs/kernels/layout_transform.md."""

from __future__ import annotations

import math

from schedsearch.config import Config
from schedsearch.ops import Layout
from schedsearch.ops.dtypes import dtype
from schedsearch.ops.layout_transform import sizes
from schedsearch.space import ConfigSpace
from schedsearch.target import Target
from schedsearch.template import KernelSource, Template
from schedsearch.templates.data_movement.move import Move
from schedsearch.templates.data_movement.mover import Mover
from schedsearch.templates.layout_transform.repack import Repack
from schedsearch.workload import Workload

LEAST_CAPABILITY = (5, 0)
_WIDE_BYTES = 16


class LayoutTransformCuda(Template):
    """Any change of layout.

    Where runs begin at multiples of 16 bytes: tiles through shared memory where the innermost axis changes, vectors
    elsewhere (`Repack`). Otherwise as every movement of data (`Mover`), whose accesses are wide wherever runs begin.
    """

    name = "layout_transform_cuda"
    version = 1
    op = "layout_transform"
    kind = "cuda"

    def validate(self, workload: Workload, target: Target) -> str | None:
        if target.compute_capability < LEAST_CAPABILITY:
            got, least = (".".join(map(str, each)) for each in (target.compute_capability, LEAST_CAPABILITY))
            return f"compute capability is {got}; allowed: {least} and later"
        return _steps_of(workload, target).problem()

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        return _steps_of(workload, target).space()

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        return _steps_of(workload, target).default()

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        steps = _steps_of(workload, target)
        alignments = dict(zip(("x", "y"), steps.alignments(config)))
        return KernelSource("cuda", "native", (steps.step(config, x="x", y="y"),), alignments=alignments)


def _steps_of(workload: Workload, target: Target) -> Repack | Mover:
    source, to = Layout.parse(workload.layout), Layout.parse(workload.to)
    repack = Repack.of(source, to, sizes(workload.params), dtype(workload.dtype).nbytes, target)
    p = repack.permutation
    aligned = math.gcd(p.x_aligned(), p.y_aligned()) * p.element_bytes
    return repack if aligned % _WIDE_BYTES == 0 else Mover(Move.of_permutation(p), target)
