"""What a fault of a candidate is, and the candidates that are right."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from faulty_templates import pointwise_function

from schedsearch.measurement import Outcome
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.workload import Workload

from . import runs

LOST, COMPILE_ERROR, COMPILE_TIMEOUT = Outcome.WORKER_LOST, Outcome.COMPILE_ERROR, Outcome.COMPILE_TIMEOUT
WRONG, RUN_TIMEOUT, LAUNCH_ERROR = Outcome.WRONG_ANSWER, Outcome.RUN_TIMEOUT, Outcome.LAUNCH_ERROR
OK = Outcome.OK


@dataclass(frozen=True)
class Fault:
    """One way to misbehave.

    Attributes:
        what: in words, for the table.
        outcomes: those that the store may record for it.
        make: called in the builder with (workload, generator); returns a kernel function, or a kernel function with
            the bytes of its workspaces.
        slow: whether it is noticed by a time-out only.
        right: whether it computes the right thing, so that it may be best.
    """

    what: str
    outcomes: frozenset[Outcome]
    make: Callable[[Workload, random.Random], Any]
    slow: bool
    right: bool


def faulty_space(faults: Mapping[str, Fault]) -> ConfigSpace:
    """Numbers below `HEALTHY_NUMBERS` are for the right candidate, the others for faults."""
    apart = Constraint(
        f"numbers below {runs.HEALTHY_NUMBERS} are for `{runs.HEALTHY}`, the others for faults",
        lambda at: (at["fault"] == runs.HEALTHY) == (at["number"] < runs.HEALTHY_NUMBERS),
    )
    return ConfigSpace([Knob("fault", (runs.HEALTHY, *faults)), Knob("number", tuple(range(runs.NUMBERS)))], [apart])


def healthy(workload: Workload, number: int) -> Any:
    """A right kernel; each number has machine code of its own."""
    from numba import types

    from schedsearch.backend.cpu_ops import as_array

    right = pointwise_function(workload, 1)
    if number == 0:
        return right

    def marked(x_at: Any, w_at: Any, y_at: Any, start: Any, stop: Any) -> None:
        right(x_at, w_at, y_at, start, stop)
        if start == -1 - number:  # never, but only a reader knows
            as_array(y_at, (1,), types.float32)[0] = types.float32(0.0)

    return marked


def fault(
    faults: dict[str, Fault], name: str, what: str, *outcomes: Outcome, slow: bool = False, right: bool | None = None
) -> Callable[[Any], Any]:
    """Decorates the function that makes a fault; see `Fault`. A kernel that may be recorded as ok is right by default."""

    def add(make: Any) -> Any:
        faults[name] = Fault(what, frozenset(outcomes), make, slow, Outcome.OK in outcomes if right is None else right)
        return make

    return add
