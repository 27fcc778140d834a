"""recurrent on NVIDIA GPUs: see docs/kernels/recurrent.md."""

from __future__ import annotations

from typing import Any

import numpy as np

from schedsearch.config import Config
from schedsearch.launch import Grid, Param, Pointer
from schedsearch.launch_rules import MAX_GRID_X
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.recurrent import OPTIONAL, RESULTS, RecurrentParams
from schedsearch.ops.wrong_index import WRONG_INDEX
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.parts.vectors import LEAST_CAPABILITY
from schedsearch.templates.recurrent.cuda_kernels import WORD, Plan, pack_kernel, shared_of, steps_kernel
from schedsearch.workload import Workload

_THREADS = (64, 128, 256, 512, 1024)
_ROWS = (1, 2, 4, 8)
_SPLITS = (1, 2, 4, 8)
_UNROLLS = (1, 2, 4)


class RecurrentCuda(Template[RecurrentParams]):
    """A block runs all steps of some rows in one direction; the states stay in its shared memory."""

    name = "recurrent_cuda"
    version = 1
    op = "recurrent"
    kind = "cuda"

    def validate(self, workload: Workload[RecurrentParams], target: Target) -> str | None:
        if problem := target.older_than(LEAST_CAPABILITY):
            return problem
        p = workload.params
        if max(p.n * p.directions, _packed(p)) > MAX_GRID_X:
            return f"there are {p.n * p.directions} rows of {p.hidden} numbers; allowed: less than 2**31 of both"
        if (needed := _shared_bytes(p, 1, 1, 1)) > target.shared_bytes_per_block:
            return (
                f"hidden is {p.hidden}, of which a row needs {needed} bytes of shared memory; allowed: "
                f"{target.shared_bytes_per_block}"
            )
        return None

    def space(self, workload: Workload[RecurrentParams], target: Target) -> ConfigSpace:
        p, most = workload.params, target.shared_bytes_per_block
        knobs = (
            Knob("threads", _THREADS, "threads of a block"),
            Knob("rows", tuple(n for n in _ROWS if n == 1 or n <= p.n), "rows of the batch in a block"),
            Knob("split", _SPLITS, "threads that share the sum of a gate"),
            Knob("unroll", _UNROLLS, "words of 16 bytes of r that a thread loads at once"),
        )
        fits = Constraint(f"the states of a block fit in {most} bytes of shared memory", lambda k: k["shared_bytes"] <= most)
        return ConfigSpace(knobs, (fits,), {"shared_bytes": lambda k: _shared_bytes(p, k["rows"], k["split"], k["unroll"])})

    def default(self, workload: Workload[RecurrentParams], target: Target, space: ConfigSpace) -> Config:
        """A row for each block while there are multiprocessors left; a thread for each sum, or several if there are few."""
        p = workload.params
        sums, rows = p.gates * p.hidden, max(1, p.n * p.directions // target.sms)
        threads = min((n for n in _THREADS if n >= sums), default=_THREADS[-1])
        split = max(n for n in _SPLITS if n == 1 or n * sums <= _THREADS[-1])
        threads = min((n for n in _THREADS if n >= sums * split), default=threads)
        for wanted in (rows, 1):
            for parts, unroll in ((split, 4), (1, 4), (1, 1)):
                row = max(n for n in space.values["rows"] if n == 1 or n <= wanted)
                config = Config(threads=threads, rows=row, split=parts, unroll=unroll)
                if not space.check(config):
                    return config
        raise AssertionError("one row fits, or the workload is refused")

    def kernel(self, workload: Workload[RecurrentParams], target: Target, config: Config) -> KernelSource:
        p, plan = workload.params, Plan.of(workload, config)
        packed = Pointer("packed")
        pack = KernelStep(
            pack_kernel(workload, plan), (Pointer("r"), packed), Grid(-(-plan.packed // plan.threads)), plan.threads,
            constant=True,
        )  # fmt: skip
        given = {*p.optional, *p.results}
        params: tuple[Param, ...] = (
            Pointer("gates"),
            packed,
            *(Pointer(name, optional=name not in given) for name in (*OPTIONAL, *RESULTS)),
            Pointer(WRONG_INDEX, optional=True),
        )
        run = KernelStep(
            steps_kernel(workload, plan), params, Grid(p.directions * plan.groups), plan.threads,
            dynamic_shared_bytes=4 * plan.rows * plan.row,
        )  # fmt: skip
        return KernelSource("cuda", "native", (pack, run), {"packed": plan.packed * dtype_of(p.dtype).nbytes})


def _shared_bytes(p: RecurrentParams, rows: Any, split: Any, unroll: Any) -> Any:
    each = WORD // dtype_of(p.dtype).nbytes
    turn = np.asarray(split) * unroll * each
    width = -(-p.hidden // turn) * turn
    return 4 * rows * shared_of(p, width, split)


def _packed(p: RecurrentParams) -> int:
    return p.directions * p.gates * p.hidden * (p.hidden + WORD * _SPLITS[-1] * _UNROLLS[-1])
