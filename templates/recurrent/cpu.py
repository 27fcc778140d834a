"""recurrent on CPUs: see docs/kernels/recurrent.md."""

from __future__ import annotations

import numpy as np

from schedsearch.config import Config
from schedsearch.launch import Grid, Param, Pointer
from schedsearch.ops.recurrent import OPTIONAL, RESULTS, RecurrentParams
from schedsearch.ops.wrong_index import WRONG_INDEX
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.conv2d.cpu_tiles import lanes_of
from schedsearch.templates.parts.cpu_threads import busy_threads, threads_knob
from schedsearch.templates.recurrent.cpu_kernels import Plan, pack_kernel, steps_kernel
from schedsearch.workload import Workload

_ROWS = (1, 2, 4, 6, 8)
_VECTORS = (1, 2, 3, 4, 6, 8, 12)
_MAX_ITEMS = 2**31 - 1


class RecurrentCpu(Template[RecurrentParams]):
    """A work item runs all steps of some rows in one direction."""

    name = "recurrent_cpu"
    version = 1
    op = "recurrent"
    kind = "cpu"

    def validate(self, workload: Workload[RecurrentParams], target: Target) -> str | None:
        items = workload.params.n * workload.params.directions
        return None if items <= _MAX_ITEMS else f"there are {items} rows; allowed: less than 2**31"

    def space(self, workload: Workload[RecurrentParams], target: Target) -> ConfigSpace:
        registers = 32 if target.simd_bits >= 512 else 16
        lanes = tuple(n for n in (4, 8, 16) if n <= lanes_of(target)) or (lanes_of(target),)
        return ConfigSpace(
            (
                Knob(
                    "rows", tuple(n for n in _ROWS if n == 1 or n <= workload.params.n), "rows of the batch in a work item"
                ),
                Knob("vectors", _VECTORS, "vectors of sums of a row that stay in registers"),
                Knob("lanes", lanes, "numbers of a vector"),
                Knob("unroll", (1, 2, 4), "numbers of a state per step of the innermost loop"),
                threads_knob(target, "rows and directions"),
            ),
            (
                Constraint(
                    f"the sums, a row of r and a number fit in {registers} registers",
                    lambda k: np.asarray(k["rows"]) * k["vectors"] + k["vectors"] + 1 <= registers,
                ),
            ),
        )

    def default(self, workload: Workload[RecurrentParams], target: Target, space: ConfigSpace) -> Config:
        """Whole vectors; about eight sums, so that a product does not wait for the one before; no more rows than give every
        core work. As many threads as have work for some microseconds."""
        p = workload.params
        lanes = space.values["lanes"][-1]
        share = -(-p.n * p.directions // target.sms)
        rows = max(n for n in space.values["rows"] if n == 1 or n <= min(share, 4))
        vectors = {1: 8, 2: 6, 4: 4}[rows] if target.simd_bits >= 512 else {1: 6, 2: 4, 4: 2}[rows]
        items = -(-p.n // rows) * p.directions
        threads = busy_threads(workload, target, [n for n in space.values["threads"] if n == 1 or n <= items])
        return Config(rows=rows, vectors=vectors, lanes=lanes, unroll=4, threads=threads)

    def kernel(self, workload: Workload[RecurrentParams], target: Target, config: Config) -> KernelSource:
        p, plan = workload.params, Plan.of(workload, config)
        threads, tiles, items = config["threads"], p.directions * sum(plan.tiles), p.directions * plan.groups
        pack = KernelStep(
            pack_kernel(workload, plan), (Pointer("r"), Pointer("packed")), Grid(tiles), min(threads, tiles), constant=True
        )
        given = {*p.optional, *p.results}
        params: tuple[Param, ...] = (
            Pointer("gates"),
            Pointer("packed"),
            *(Pointer(name, optional=name not in given) for name in (*OPTIONAL, *RESULTS)),
            Pointer("memory"),
            Pointer(WRONG_INDEX, optional=True),
        )
        run = KernelStep(steps_kernel(workload, plan), params, Grid(items), min(threads, items))
        workspaces = {"packed": 4 * plan.packed, "memory": 4 * plan.places.size * items}
        return KernelSource("cpu", "native", (pack, run), workspaces)
