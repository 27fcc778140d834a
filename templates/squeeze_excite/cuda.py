"""squeeze_excite on NVIDIA GPUs: see docs/kernels/squeeze_excite.md."""

from __future__ import annotations

from typing import Any

import numpy as np

from schedsearch.config import Config
from schedsearch.launch import MAX_GRID_X, Grid, Pointer
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.squeeze_excite import SqueezeExciteParams
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.squeeze_excite.cuda_kernel import squeeze_kernel
from schedsearch.templates.squeeze_excite.plan import WORD, Plan, layout_of, vector_of
from schedsearch.workload import Workload

CLUSTERS = (1, 2, 4, 8)
THREADS = (128, 256, 512, 1024)
LEAST_CAPABILITY = (9, 0)  # of clusters
# Of a block, and of one matrix: what takes more threads. 512 threads are 4 % faster than 256 for 240 x 960 weights, and 10 %
# slower for 32 x 120.
MANY_VECTORS, MANY_WEIGHTS = 4096, 32768


class SqueezeExciteCuda(Template[SqueezeExciteParams]):
    """A cluster of blocks computes an image: means, both products, and the products with the gates."""

    name = "squeeze_excite_cuda"
    version = 1
    op = "squeeze_excite"
    kind = "cuda"

    def validate(self, workload: Workload[SqueezeExciteParams], target: Target) -> str | None:
        p = workload.params
        if problem := target.older_than(LEAST_CAPABILITY):
            return problem
        if p.layout != "NHWC":
            return f"layout is {p.layout}; allowed: NHWC"
        if p.n * CLUSTERS[-1] > MAX_GRID_X or p.h * p.w * p.c * dtype_of(p.dtype).nbytes >= 2**31:
            return f"x has {p.n} images of {p.h}x{p.w}x{p.c}; allowed: less than 2**31 bytes each, and 2**28 of them"
        if next(self.space(workload, target).walk(1), None) is None:
            return f"c is {p.c} and squeezed {p.squeezed}; allowed: as many as fit in a block's shared memory as float32"
        return None

    def space(self, workload: Workload[SqueezeExciteParams], target: Target) -> ConfigSpace:
        p, most = workload.params, target.shared_bytes_per_block
        vectors = p.c // vector_of(p)
        knobs = (
            Knob("cluster", CLUSTERS, "blocks that share an image"),
            Knob("channel_parts", CLUSTERS, "parts of the channels that blocks share; the others share pixels"),
            Knob("threads", THREADS, "threads of a block"),
            Knob("holds", (False, True), "x stays in shared memory between its mean and its product"),
            Knob("brings", (False, True), "weights are copied to shared memory before the kernel in front is complete"),
        )
        rules = (
            Constraint("blocks of a cluster share pixels evenly", lambda k: k["cluster"] % k["channel_parts"] == 0),
            Constraint("each part has channels", lambda k: k["channel_parts"] <= vectors),
            Constraint("each part has pixels", lambda k: k["cluster"] // k["channel_parts"] <= p.h * p.w),
            Constraint(
                "a block has a thread for each vector of its channels",
                lambda k: -(-vectors // k["channel_parts"]) <= k["threads"],
            ),
            Constraint(
                "copies of weights have 16 bytes",
                lambda k: np.logical_not(k["brings"]) | (vector_of(p) * _nbytes(p) == WORD),
            ),
            Constraint(f"a block fits in {most} bytes of shared memory", lambda k: k["shared_bytes"] <= most),
        )
        return ConfigSpace(knobs, rules, {"shared_bytes": lambda k: layout_of(p, k).nbytes})

    def default(self, workload: Workload[SqueezeExciteParams], target: Target, space: ConfigSpace) -> Config:
        """As many blocks as a cluster may have while multiprocessors are left. They share channels, unless these are few;
        threads by the sizes of x and of the weights; everything in shared memory that fits."""
        p = workload.params
        vector = vector_of(p)
        cluster = max(n for n in CLUSTERS if n == 1 or n * p.n <= 2 * target.sms)
        vectors = p.h * p.w * p.c // vector // cluster
        wanted = 1024 if vectors > MANY_VECTORS else 512 if p.c * p.squeezed >= MANY_WEIGHTS else 256
        parts = max(n for n in CLUSTERS if n == 1 or (n <= cluster and n * 4 * WORD <= p.c * _nbytes(p)))

        def rank(config: Config) -> tuple[Any, ...]:
            distances = abs(config["channel_parts"] - parts), abs(config["threads"] - wanted)
            return config["cluster"] != cluster, not config["holds"], not config["brings"], *distances

        return min((config for rows in space.walk() for config in space.configs(rows)), key=rank)

    def plain(self, workload: Workload[SqueezeExciteParams], target: Target, space: ConfigSpace) -> Config | None:
        config = Config(cluster=1, channel_parts=1, threads=THREADS[-1], holds=False, brings=False)
        return None if space.check(config) else config

    def kernel(self, workload: Workload[SqueezeExciteParams], target: Target, config: Config) -> KernelSource:
        p, plan = workload.params, Plan.of(workload.params, config)
        names = ("x", "reduce", "reduce_bias", "expand", "expand_bias", "y")
        step = KernelStep(
            squeeze_kernel(plan),
            tuple(map(Pointer, names)),
            Grid(p.n * plan.cluster),
            plan.threads,
            int(layout_of(p, config).nbytes),
            cluster=plan.cluster,
            ahead=("reduce_bias", "expand_bias", *(("reduce", "expand") if plan.brings else ())),
        )
        width = plan.vector * _nbytes(p)
        alignments = {**dict.fromkeys(("x", "reduce", "expand", "y"), width), "reduce_bias": 4, "expand_bias": 4}
        return KernelSource("cuda", "native", (step,), alignments=alignments)


def _nbytes(p: SqueezeExciteParams) -> int:
    return dtype_of(p.dtype).nbytes
