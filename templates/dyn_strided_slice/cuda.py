"""dyn_strided_slice on NVIDIA GPUs: see docs/dynamic-shapes.md."""

from __future__ import annotations

import math
from typing import ClassVar

from schedsearch.config import Config
from schedsearch.launch import Grid, Param, Pointer, Scalar
from schedsearch.ops.dtypes import dtype
from schedsearch.ops.dyn_strided_slice import DynStridedSliceParams
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Renamed, Template
from schedsearch.templates.dyn_strided_slice.kernel import VECTOR_BYTES, exact_by_factor, slice_kernel
from schedsearch.templates.parts.grids import earlier_blocks_per_sm, persistent_knobs, persistent_rule, resident
from schedsearch.workload import Workload

LEAST_CAPABILITY = (5, 0)
THREADS = (128, 256, 512)
BLOCKS_PER_SM = (2, 4, 8, 16, 32)
ARRAYS = ("x", "x_extents", "begin", "end", "strides", "y", "y_extents")
OPTIONAL = ("x_extents", "strides")
_DEFAULT_THREADS, _DEFAULT_BLOCKS = 256, 8
_THREADS_PER_SM, _FEWER_PER_SM = 1024, 512  # that registers must suffice for


class DynStridedSliceCuda(Template[DynStridedSliceParams]):
    """Threads share the units of the slice that they find: vectors where positions allow it, elements elsewhere."""

    name = "dyn_strided_slice_cuda"
    op = "dyn_strided_slice"
    kind = "cuda"
    renamed: ClassVar[Renamed] = {"blocks_per_sm": earlier_blocks_per_sm(BLOCKS_PER_SM)}

    def validate(self, workload: Workload[DynStridedSliceParams], target: Target) -> str | None:
        if problem := target.older_than(LEAST_CAPABILITY):
            return problem
        rows = math.prod(workload.params.bound[:-1])
        return None if rows < 2**31 else f"y has up to {rows} rows; allowed: less than 2**31"

    def space(self, workload: Workload[DynStridedSliceParams], target: Target) -> ConfigSpace:
        return ConfigSpace(
            (
                Knob("stores", ("default", "streaming"), "streaming: lines of y are the first to leave the caches"),
                Knob("threads", THREADS, "threads of a block"),
                Knob("unroll", (1, 2, 4, 8), "vectors that a thread loads before it stores any"),
                *persistent_knobs(BLOCKS_PER_SM),
            ),
            (persistent_rule(BLOCKS_PER_SM),),
        )

    def default(self, workload: Workload[DynStridedSliceParams], target: Target, space: ConfigSpace) -> Config:
        """Blocks that run at once, and as many that follow, so that a multiprocessor that is slower than others does less.
        Small slices take smaller tiles, so that every multiprocessor has some.
        """
        vectors = -(-math.prod(workload.params.bound) * dtype(workload.params.dtype).nbytes // VECTOR_BYTES)
        unroll = next((n for n in (4, 2) if vectors >= n * _DEFAULT_THREADS * target.sms), 1)
        return Config(
            threads=_DEFAULT_THREADS, unroll=unroll, persistent=True, blocks_per_sm=_DEFAULT_BLOCKS, stores="default"
        )

    def kernel(self, workload: Workload[DynStridedSliceParams], target: Target, config: Config) -> KernelSource:
        p = workload.params
        threads, unroll = config["threads"], config["unroll"]
        nbytes = math.prod(p.bound) * dtype(p.dtype).nbytes
        tiles = min(max(-(-nbytes // (VECTOR_BYTES * threads * unroll)), 1), 2**31 - 1)
        function = slice_kernel(workload, threads, unroll, config["stores"] == "streaming")
        small = unroll <= 4 and exact_by_factor(workload)
        step = KernelStep(
            function,
            parameters(workload),
            Grid(tiles, resident(config)),
            threads,
            min_blocks_per_sm=max((_THREADS_PER_SM if small else _FEWER_PER_SM) // threads, 1),
        )
        itemsize = dtype(p.dtype).nbytes
        return KernelSource("cuda", "native", (step,), alignments={"x": itemsize, "y": itemsize})


def parameters(workload: Workload[DynStridedSliceParams]) -> tuple[Param, ...]:
    """Those of the kernels for GPUs and CPUs: the arrays, and the strides of x and y."""
    arrays = (Pointer(name, optional=name in OPTIONAL) for name in ARRAYS)
    return (*arrays, *(Scalar(scalar.name, dtype=scalar.dtype) for scalar in workload.scalars))
