"""layer_norm on NVIDIA GPUs: see docs/kernels/bandwidth.md."""

from __future__ import annotations

import math

from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.launch_rules import MAX_GRID_X
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.layer_norm import rows_of
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.layer_norm.cuda_kernels import MOST_HELD, rows_kernel
from schedsearch.templates.parts.vectors import LEAST_CAPABILITY, MOST_BYTES
from schedsearch.workload import Workload

THREADS = (64, 128, 256, 512, 1024)
LANES = tuple(1 << i for i in range(11))
_LONGEST_KEPT = LANES[-1] * MOST_HELD
_BUSY_THREADS = 1024  # of a multiprocessor


class LayerNormCuda(Template):
    """Threads share a row, which stays in their registers; longer rows are read three times."""

    name = "layer_norm_cuda"
    version = 1
    op = "layer_norm"
    kind = "cuda"

    def validate(self, workload: Workload, target: Target) -> str | None:
        if problem := target.older_than(LEAST_CAPABILITY):
            return problem
        rows, length = rows_of(workload.params)
        if max(rows, length) > MAX_GRID_X:
            return f"x has {rows} rows of {length} numbers; allowed: less than 2**31 of each"
        return None

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        _, length = rows_of(workload.params)
        widest = math.gcd(length, MOST_BYTES // dtype_of(workload.dtype).nbytes)
        knobs = (
            Knob("vector", tuple(1 << i for i in range(widest.bit_length())), "neighbouring elements of an access"),
            Knob("lanes", tuple(n for n in LANES if n < 2 * length), "threads that share a row"),
            Knob("threads", THREADS, "threads of a block"),
        )
        rules = [Constraint("a block has whole rows", lambda k: k["lanes"] <= k["threads"])]
        if length > _LONGEST_KEPT:
            return ConfigSpace(knobs, rules)
        rules.append(Constraint(f"a thread keeps at most {MOST_HELD} numbers of a row", lambda k: k["held"] <= MOST_HELD))
        return ConfigSpace(knobs, rules, {"held": lambda k: -(-length // (k["vector"] * k["lanes"])) * k["vector"]})

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        """The widest accesses, one for each thread of a row, or two if there are many rows."""
        rows, length = rows_of(workload.params)
        values = space.values
        vector = values["vector"][-1]
        many = rows * -(-length // vector) >= 4 * target.sms * _BUSY_THREADS
        wanted = max(-(-length // (vector * (2 if many else 1))), 1)
        most = min((n for n in values["lanes"] if n >= wanted), default=values["lanes"][-1])
        block = max(most, 256 if rows * most >= 2 * 256 * target.sms else 64)
        choices = ((n, min(m, n)) for n in (block, *THREADS) for m in (most, *reversed(values["lanes"])))
        for threads, lanes in choices:
            config = Config(vector=vector, lanes=lanes, threads=threads)
            if not space.check(config):
                return config
        raise AssertionError("some block is large enough for a row")

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        rows, _ = rows_of(workload.params)
        vector, lanes, threads = config["vector"], config["lanes"], config["threads"]
        step = KernelStep(
            rows_kernel(workload, vector, lanes, threads),
            (Pointer("x"), Pointer("scale"), Pointer("bias", optional=not workload.bias), Pointer("y")),
            Grid(-(-rows // (threads // lanes))),
            threads,
        )
        nbytes = {"x": dtype_of(workload.dtype).nbytes, "scale": 4, "y": dtype_of(workload.dtype).nbytes}
        nbytes |= {"bias": 4} if workload.bias else {}
        alignments = {name: min(vector * each, MOST_BYTES) for name, each in nbytes.items()}
        return KernelSource("cuda", "native", (step,), alignments=alignments)
