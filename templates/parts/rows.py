"""A base of CUDA templates whose threads share the rows of an array: the sizes of groups and blocks."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

from schedsearch.config import Config
from schedsearch.launch_rules import MAX_GRID_X
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import Template
from schedsearch.template.contract import P
from schedsearch.templates.parts.vectors import LEAST_CAPABILITY, MOST_BYTES
from schedsearch.workload import Workload

THREADS = (64, 128, 256, 512, 1024)
LANES = tuple(1 << i for i in range(11))
MOST_HELD = 32  # numbers of a row that a thread keeps in registers
LONGEST_HELD = LANES[-1] * MOST_HELD
BUSY_THREADS = 1024  # of a multiprocessor


class RowsTemplate(Template[P]):
    """`lanes` threads share a row, by accesses of `vector` elements. Short rows stay in their registers."""

    kind = "cuda"
    lanes_doc: ClassVar[str] = "threads that share a row"

    @abstractmethod
    def rows(self, workload: Workload[P]) -> tuple[int, int]:
        """(how many rows, numbers of each)."""

    def contiguous(self, workload: Workload[P]) -> int:
        """Neighbouring elements, which accesses divide."""
        return self.rows(workload)[1]

    def stays(self, workload: Workload[P]) -> bool:
        """Whether rows must stay in registers."""
        return self.rows(workload)[1] <= LONGEST_HELD

    def wanted_lanes(self, workload: Workload[P], target: Target, vector: int) -> int:
        """One access for each thread of a row, or two if there are many rows."""
        rows, length = self.rows(workload)
        many = rows * -(-length // vector) >= 4 * target.sms * BUSY_THREADS
        return -(-length // (vector * (2 if many else 1)))

    def validate(self, workload: Workload[P], target: Target) -> str | None:
        if problem := target.older_than(LEAST_CAPABILITY):
            return problem
        rows, length = self.rows(workload)
        if max(rows, length) > MAX_GRID_X:
            return f"x has {rows} rows of {length} numbers; allowed: less than 2**31 of each"
        return None

    def space(self, workload: Workload[P], target: Target) -> ConfigSpace:
        _, length = self.rows(workload)
        widest = math.gcd(self.contiguous(workload), MOST_BYTES // dtype_of(workload.signature[0].dtype).nbytes)
        knobs = (
            Knob("vector", tuple(1 << i for i in range(widest.bit_length())), "neighbouring elements of an access"),
            Knob("lanes", tuple(n for n in LANES if n < 2 * length), self.lanes_doc),
            Knob("threads", THREADS, "threads of a block"),
        )
        rules = [Constraint("a block has whole rows", lambda k: k["lanes"] <= k["threads"])]
        if not self.stays(workload):
            return ConfigSpace(knobs, rules)
        rules.append(Constraint(f"a thread keeps at most {MOST_HELD} numbers of a row", lambda k: k["held"] <= MOST_HELD))
        return ConfigSpace(knobs, rules, {"held": lambda k: -(-length // (k["vector"] * k["lanes"])) * k["vector"]})

    def default(self, workload: Workload[P], target: Target, space: ConfigSpace) -> Config:
        """The widest accesses, and as many threads for a row as `wanted_lanes` says."""
        rows, length = self.rows(workload)
        values = space.values
        vector = values["vector"][-1]
        wanted = max(min(self.wanted_lanes(workload, target, vector), LANES[-1], length), 1)
        most = min((n for n in values["lanes"] if n >= wanted), default=values["lanes"][-1])
        block = max(most, 256 if rows * most >= 2 * 256 * target.sms else 64)
        for threads, lanes in ((n, min(m, n)) for n in (block, *THREADS) for m in (most, *reversed(values["lanes"]))):
            config = Config(vector=vector, lanes=lanes, threads=threads)
            if not space.check(config):
                return config
        raise AssertionError("some block is large enough for a row")
