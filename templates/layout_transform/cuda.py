"""layout_transform on NVIDIA GPUs: see docs/kernels/layout_transform.md."""

from __future__ import annotations

from schedsearch.config import Config
from schedsearch.ops import Layout
from schedsearch.ops.dtypes import dtype
from schedsearch.ops.layout_transform import LayoutTransformParams, sizes
from schedsearch.space import ConfigSpace
from schedsearch.target import Target
from schedsearch.template import KernelSource, Template
from schedsearch.templates.layout_transform.repack import RENAMED, Repack
from schedsearch.workload import Workload

LEAST_CAPABILITY = (5, 0)


class LayoutTransformCuda(Template[LayoutTransformParams]):
    """Any change of layout: tiles through shared memory where the innermost axis changes, vectors elsewhere."""

    name = "layout_transform_cuda"
    version = 1
    op = "layout_transform"
    kind = "cuda"
    renamed = RENAMED

    def validate(self, workload: Workload[LayoutTransformParams], target: Target) -> str | None:
        if problem := target.older_than(LEAST_CAPABILITY):
            return problem
        return _repack(workload, target).problem()

    def space(self, workload: Workload[LayoutTransformParams], target: Target) -> ConfigSpace:
        return _repack(workload, target).space()

    def default(self, workload: Workload[LayoutTransformParams], target: Target, space: ConfigSpace) -> Config:
        return _repack(workload, target).default()

    def kernel(self, workload: Workload[LayoutTransformParams], target: Target, config: Config) -> KernelSource:
        repack = _repack(workload, target)
        alignments = dict(zip(("x", "y"), repack.alignments(config)))
        return KernelSource("cuda", "native", (repack.step(config, x="x", y="y"),), alignments=alignments)


def _repack(workload: Workload[LayoutTransformParams], target: Target) -> Repack:
    p = workload.params
    source, to = Layout.parse(p.layout), Layout.parse(p.to)
    return Repack.of(source, to, sizes(p), dtype(p.dtype).nbytes, target)
