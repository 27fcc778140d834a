"""layer_norm on NVIDIA GPUs: see docs/kernels/bandwidth.md."""

from __future__ import annotations

from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.layer_norm import LayerNormParams, rows_of
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep
from schedsearch.templates.layer_norm.cuda_kernels import rows_kernel
from schedsearch.templates.parts.rows import RowsTemplate
from schedsearch.templates.parts.vectors import MOST_BYTES
from schedsearch.workload import Workload


class LayerNormCuda(RowsTemplate[LayerNormParams]):
    """Threads share a row, which stays in their registers; longer rows are read three times."""

    name = "layer_norm_cuda"
    version = 1
    op = "layer_norm"

    def rows(self, workload: Workload[LayerNormParams]) -> tuple[int, int]:
        return rows_of(workload.params)

    def kernel(self, workload: Workload[LayerNormParams], target: Target, config: Config) -> KernelSource:
        p = workload.params
        rows, _ = rows_of(p)
        vector, lanes, threads = config["vector"], config["lanes"], config["threads"]
        step = KernelStep(
            rows_kernel(workload, vector, lanes, threads),
            (Pointer("x"), Pointer("scale"), Pointer("bias", optional=not p.bias), Pointer("y")),
            Grid(-(-rows // (threads // lanes))),
            threads,
        )
        nbytes = {"x": dtype_of(p.dtype).nbytes, "scale": 4, "y": dtype_of(p.dtype).nbytes}
        nbytes |= {"bias": 4} if p.bias else {}
        alignments = {name: min(vector * each, MOST_BYTES) for name, each in nbytes.items()}
        return KernelSource("cuda", "native", (step,), alignments=alignments)
