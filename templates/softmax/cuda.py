"""softmax on NVIDIA GPUs: see docs/kernels/bandwidth.md."""

from __future__ import annotations

from collections.abc import Callable

from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.softmax import SoftmaxParams, along
from schedsearch.space import ConfigSpace, Constraint
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep
from schedsearch.templates.parts.rows import BUSY_THREADS, RowsTemplate
from schedsearch.templates.parts.vectors import MOST_BYTES
from schedsearch.templates.softmax.cuda_kernels import looped_kernel, row_kernel
from schedsearch.workload import Workload

_SHARED_BYTES = 48 << 10


class SoftmaxCuda(RowsTemplate[SoftmaxParams]):
    """Threads share a row, which stays in their registers; longer rows and other axes are read twice."""

    name = "softmax_cuda"
    version = 1
    op = "softmax"
    lanes_doc = "threads that share a row, or neighbouring rows"

    def rows(self, workload: Workload[SoftmaxParams]) -> tuple[int, int]:
        outer, length, inner = along(workload.params)
        return outer * inner, length

    def stays(self, workload: Workload[SoftmaxParams]) -> bool:
        return along(workload.params)[2] == 1 and super().stays(workload)

    def contiguous(self, workload: Workload[SoftmaxParams]) -> int:
        _, length, inner = along(workload.params)
        return inner if inner > 1 else length if self.stays(workload) else 1

    def wanted_lanes(self, workload: Workload[SoftmaxParams], target: Target, vector: int) -> int:
        """Where rows are read twice, so many threads for each that the device is busy."""
        if self.stays(workload):
            return super().wanted_lanes(workload, target, vector)
        outer, length, inner = along(workload.params)
        return length // 4 if inner == 1 else target.sms * BUSY_THREADS // (outer * inner // vector)

    def space(self, workload: Workload[SoftmaxParams], target: Target) -> ConfigSpace:
        space = super().space(workload, target)
        if self.stays(workload):
            return space
        fits = Constraint("partial results fit in shared memory", lambda k: k["shared_bytes"] <= _SHARED_BYTES)
        return ConfigSpace(
            space.knobs, (*space.constraints, fits), {"shared_bytes": lambda k: 8 * k["threads"] * k["vector"]}
        )

    def kernel(self, workload: Workload[SoftmaxParams], target: Target, config: Config) -> KernelSource:
        rows, _ = self.rows(workload)
        vector, lanes, threads, stays = config["vector"], config["lanes"], config["threads"], self.stays(workload)
        build: Callable[..., Callable[..., None]] = row_kernel if stays else looped_kernel
        groups = rows if stays else rows // vector
        step = KernelStep(
            build(workload, vector, lanes, threads),
            (Pointer("x"), Pointer("y")),
            Grid(-(-groups // (threads // lanes))),
            threads,
        )
        alignment = min(vector * dtype_of(workload.params.dtype).nbytes, MOST_BYTES)
        return KernelSource("cuda", "native", (step,), alignments=dict.fromkeys(("x", "y"), alignment))
