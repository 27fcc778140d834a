"""Two sides compared: databases, devices or runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from schedsearch.dashboard.views.noise import Doubt
from schedsearch.dashboard.views.overview import Side
from schedsearch.dashboard.views.trial import Difference
from schedsearch.dashboard.views.values import JSON

Verdict = Literal["faster", "slower", "same", "unknown"]
"""What an interval says about B: it is above 1, below 1, contains 1 (no difference is shown), or is not known."""


@dataclass(frozen=True)
class ComparedBest:
    """The best trial of one side, and why its time is not to be trusted (`doubt`, and `words` about it)."""

    task: str
    trial: str
    template: str
    config: Mapping[str, JSON]
    time_ns: float
    raced: bool
    doubt: Doubt
    words: str


@dataclass(frozen=True)
class CompareRow:
    """A task that both sides have.

    Attributes:
        ratio: time of A over time of B: above 1, B is faster. `low`, `high`: its 95 % interval, from the repetitions of
            both (bootstrap of medians) and 2 % wider on both sides; None with fewer than four on a side, or where those of a
            side fall into two groups.
        verdict: follows from the interval alone.
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
    verdict: Verdict
    differences: tuple[Difference, ...]
    a_on_b_ns: float | None
    b_on_a_ns: float | None


@dataclass(frozen=True)
class CompareView:
    """Two sides.

    Attributes:
        geomean: geometric mean of the ratios with its 95 % bootstrap interval over tasks and repetitions; it leaves out rows
            in which the repetitions of a side fall into two groups, so that it is of `trusted_tasks`. `low`, `high` are None
            with fewer than three tasks if one of these has no interval.
        verdict: follows from that interval.
        counts: how many rows have which verdict; all verdicts are in it.
        regressions: rows that are slower.
        doubtful: rows in which the time of a side is not to be trusted.
        only_a, only_b: names of tasks that have no partner, or no valid trial on one side.
    """

    a: Side
    b: Side
    rows: tuple[CompareRow, ...]
    geomean: float | None
    low: float | None
    high: float | None
    verdict: Verdict
    trusted_tasks: int
    counts: Mapping[Verdict, int]
    regressions: int
    doubtful: int
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    notes: tuple[str, ...]
