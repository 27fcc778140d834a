"""Which kernel deployment would use, and why not a better one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from schedsearch.runtime.fallback import Fallback
from schedsearch.target import Target
from schedsearch.workload import Workload, WorkloadRange

Verdict = Literal["serves", "fallback", "no"]


@dataclass(frozen=True)
class Level:
    """What a fallback level offers.

    Attributes:
        level: exact, other_mode, same_architecture, shipped, nearest or default.
        verdict: serves: `compile` uses it. fallback: `compile` could use it if the one that serves failed to load or build.
            no: it cannot be used.
        reason: what the level offers, or why it cannot be used.
    """

    level: str
    verdict: Verdict
    reason: str

    def __str__(self) -> str:
        mark = "->" if self.verdict == "serves" else "  "
        return f"{mark} {self.level}: {self.reason}" + (" (a fallback)" if self.verdict == "fallback" else "")


@dataclass(frozen=True)
class Explanation:
    """What `compile` would do.

    Attributes:
        levels: in the order tried. At most one serves; if none does, `compile` raises NoRecordError.
    """

    workload: Workload | WorkloadRange
    target: Target
    levels: tuple[Level, ...]

    @property
    def serving(self) -> Level | None:
        """The level that `compile` uses, or None."""
        return next((level for level in self.levels if level.verdict == "serves"), None)

    @property
    def lines(self) -> list[str]:
        return list(map(str, self.levels))

    def __str__(self) -> str:
        return "\n".join([f"{self.workload.label} on {self.target.name}", *(f"  {line}" for line in self.lines)])

    def to_json(self) -> str:
        levels = [
            {"level": each.level, "serves": each.verdict == "serves", "verdict": each.verdict, "reason": each.reason}
            for each in self.levels
        ]
        return json.dumps({"workload": json.loads(self.workload.json), "target": self.target.key, "levels": levels})


def explain_fallback(workload: Workload, target: Target, fallback: Fallback) -> Explanation:
    """As `Fallback.serve`, without loading. Below the level that serves, it names one alternative of each."""
    levels: list[Level] = []
    served = False
    for alternative in fallback.alternatives():
        if served and any(each.level == alternative.level and each.verdict != "no" for each in levels):
            continue
        obstacle = fallback.obstacle(alternative)
        verdict: Verdict = "no" if obstacle is not None else "fallback" if served else "serves"
        levels.append(Level(alternative.level, verdict, alternative.reason if obstacle is None else obstacle))
        served = served or obstacle is None
    return Explanation(workload, target, tuple(levels))
