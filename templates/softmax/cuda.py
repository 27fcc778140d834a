"""softmax on NVIDIA GPUs: see docs/kernels/bandwidth.md."""

from __future__ import annotations

import math
from collections.abc import Callable

from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.launch_rules import MAX_GRID_X
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.softmax import along
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.parts.vectors import LEAST_CAPABILITY, MOST_BYTES
from schedsearch.templates.softmax.cuda_kernels import looped_kernel, row_kernel
from schedsearch.workload import Workload

THREADS = (64, 128, 256, 512, 1024)
LANES = tuple(1 << i for i in range(11))
_HELD = 32  # numbers of a row that a thread keeps in registers
_LONGEST_ROW = LANES[-1] * _HELD
_SHARED_BYTES = 48 << 10
_BUSY_THREADS = 1024  # of a multiprocessor


class SoftmaxCuda(Template):
    """Threads share a row, which stays in their registers; longer rows and other axes are read twice."""

    name = "softmax_cuda"
    version = 1
    op = "softmax"
    kind = "cuda"

    def validate(self, workload: Workload, target: Target) -> str | None:
        if problem := target.older_than(LEAST_CAPABILITY):
            return problem
        outer, length, inner = along(workload.params)
        if max(length, outer * inner) > MAX_GRID_X:
            return f"x has {outer * inner} rows of {length} numbers; allowed: less than 2**31 of each"
        return None

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        _, length, _ = along(workload.params)
        knobs = (
            Knob("vector", _vectors(workload), "neighbouring elements of an access"),
            Knob("lanes", tuple(n for n in LANES if n < 2 * length), "threads that share a row, or neighbouring rows"),
            Knob("threads", THREADS, "threads of a block"),
        )
        rules = [Constraint("a block has whole rows", lambda k: k["lanes"] <= k["threads"])]
        if _stays(workload):
            rules.append(
                Constraint(f"a thread keeps at most {_HELD} numbers of a row", lambda k: k["held_numbers"] <= _HELD)
            )
            held = {"held_numbers": lambda k: -(-length // (k["vector"] * k["lanes"])) * k["vector"]}
            return ConfigSpace(knobs, rules, held)
        rules.append(Constraint("partial results fit in shared memory", lambda k: k["shared_bytes"] <= _SHARED_BYTES))
        return ConfigSpace(knobs, rules, {"shared_bytes": lambda k: 8 * k["threads"] * k["vector"]})

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        """The widest accesses, one for each thread of a row, or two if there are many rows. Where rows are read twice, so
        many threads for each that the device is busy.
        """
        outer, length, inner = along(workload.params)
        values = space.values
        vector, busy = values["vector"][-1], target.sms * _BUSY_THREADS
        if _stays(workload):
            many = outer * -(-length // vector) >= 4 * busy
            wanted = -(-length // (vector * (2 if many else 1)))
        else:
            wanted = length // 4 if inner == 1 else busy // (outer * inner // vector)
        most = max(min(wanted, LANES[-1], length), 1)
        lanes = min((n for n in values["lanes"] if n >= most), default=values["lanes"][-1])
        threads = max(lanes, 256 if outer * inner * lanes >= 2 * 256 * target.sms else 64)
        choices = ((n, min(m, n)) for n in (threads, *THREADS) for m in (lanes, *reversed(values["lanes"])))
        for block, sharing in choices:
            config = Config(vector=vector, lanes=sharing, threads=block)
            if not space.check(config):
                return config
        raise AssertionError("some block is large enough for a row")

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        outer, _, inner = along(workload.params)
        vector, lanes, threads = config["vector"], config["lanes"], config["threads"]
        build: Callable[..., Callable[..., None]] = row_kernel if _stays(workload) else looped_kernel
        rows = outer if _stays(workload) else outer * inner // vector
        step = KernelStep(
            build(workload, vector, lanes, threads),
            (Pointer("x"), Pointer("y")),
            Grid(-(-rows // (threads // lanes))),
            threads,
        )
        alignment = min(vector * dtype_of(workload.dtype).nbytes, MOST_BYTES)
        return KernelSource("cuda", "native", (step,), alignments=dict.fromkeys(("x", "y"), alignment))


def _stays(workload: Workload) -> bool:
    """Whether rows are neighbours in memory and so short that they stay in registers."""
    _, length, inner = along(workload.params)
    return inner == 1 and length <= _LONGEST_ROW


def _vectors(workload: Workload) -> tuple[int, ...]:
    """Elements of an access of up to 16 bytes that divide what is contiguous."""
    _, length, inner = along(workload.params)
    if inner == 1 and not _stays(workload):
        return (1,)
    widest = math.gcd(length if inner == 1 else inner, MOST_BYTES // dtype_of(workload.dtype).nbytes)
    return tuple(1 << i for i in range(widest.bit_length()))
