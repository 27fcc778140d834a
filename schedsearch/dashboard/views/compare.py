"""Two sides compared: databases, devices or runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from schedsearch.dashboard.views.overview import Side
from schedsearch.dashboard.views.trial import Difference
from schedsearch.dashboard.views.values import JSON


@dataclass(frozen=True)
class ComparedBest:
    """The best trial of one side."""

    task: str
    trial: str
    template: str
    config: Mapping[str, JSON]
    time_ns: float
    raced: bool


@dataclass(frozen=True)
class CompareRow:
    """A task that both sides have.

    Attributes:
        ratio: time of A over time of B: above 1, B is faster. `low`, `high`: its 95 % interval, from the repetitions of
            both (bootstrap of medians); None with fewer than four on a side.
        verdict: faster or slower says that the whole interval is on one side of 1 and the ratio is more than 2 % away;
            otherwise same, or unknown without an interval. It speaks of B.
        differences: knobs in which the best configs differ; `here` is A's, `best` is B's value.
        a_on_b_ns: time on B of A's best config (what transfers), None if B did not measure it; `b_on_a_ns` the reverse.
    """

    name: str
    label: str
    target_a: str
    target_b: str
    mode: str
    a: ComparedBest
    b: ComparedBest
    ratio: float
    low: float | None
    high: float | None
    verdict: Literal["faster", "slower", "same", "unknown"]
    differences: tuple[Difference, ...]
    a_on_b_ns: float | None
    b_on_a_ns: float | None


@dataclass(frozen=True)
class CompareView:
    """Two sides. `geomean` is the geometric mean of the ratios with its 95 % bootstrap interval over tasks (None with
    fewer than three tasks); `only_a`, `only_b` name tasks that have no partner, or no valid trial on one side."""

    a: Side
    b: Side
    rows: tuple[CompareRow, ...]
    geomean: float | None
    low: float | None
    high: float | None
    regressions: int
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    notes: tuple[str, ...]
