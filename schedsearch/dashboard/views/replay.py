"""Curves of recorded searches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReplaySpace:
    """A recorded space under a tuner; lists go with `ReplayFile.budgets`."""

    name: str
    configurations: int
    valid: int
    best_ns: float
    fractions: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    within_5: tuple[float, ...]


@dataclass(frozen=True)
class ReplayFile:
    """One file of `schedsearch replay --json`. Fractions are of the optimum: 1 is the best known configuration. `low`,
    `high` are 95 % bootstrap intervals."""

    name: str
    tuner: str
    seeds: int
    budgets: tuple[int, ...]
    geomean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    cpu_s_per_64: float
    spaces: tuple[ReplaySpace, ...]


@dataclass(frozen=True)
class ReplayView:
    """All replay files; `problems` are strings about files that could not be read."""

    files: tuple[ReplayFile, ...]
    problems: tuple[str, ...]
