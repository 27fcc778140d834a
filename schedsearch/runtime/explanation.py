"""Which kernel deployment would use, and why not a better one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from schedsearch.runtime.ladder import Ladder
from schedsearch.target import Target
from schedsearch.workload import Workload
from schedsearch.workload_range import WorkloadRange

Verdict = Literal["serves", "fallback", "no"]


@dataclass(frozen=True)
class Rung:
    """What a rung of the ladder offers.

    Attributes:
        rung: exact, same_architecture, nearest or default.
        verdict: serves: `compile` uses it. fallback: `compile` could use it if the one that serves failed to load or build.
            no: it cannot be used.
        reason: what the rung offers, or why it cannot be used.
    """

    rung: str
    verdict: Verdict
    reason: str

    def __str__(self) -> str:
        mark = "->" if self.verdict == "serves" else "  "
        return f"{mark} {self.rung}: {self.reason}" + (" (a fallback)" if self.verdict == "fallback" else "")


@dataclass(frozen=True)
class Explanation:
    """What `compile` would do.

    Attributes:
        rungs: in the order tried. At most one serves; if none does, `compile` raises NoRecordError.
    """

    workload: Workload | WorkloadRange
    target: Target
    rungs: tuple[Rung, ...]

    @property
    def serving(self) -> Rung | None:
        """The rung that `compile` uses, or None."""
        return next((rung for rung in self.rungs if rung.verdict == "serves"), None)

    @property
    def lines(self) -> list[str]:
        return list(map(str, self.rungs))

    def __str__(self) -> str:
        return "\n".join([f"{self.workload.label} on {self.target.name}", *(f"  {line}" for line in self.lines)])

    def to_json(self) -> str:
        rungs = [
            {"rung": each.rung, "serves": each.verdict == "serves", "verdict": each.verdict, "reason": each.reason}
            for each in self.rungs
        ]
        return json.dumps({"workload": json.loads(self.workload.json), "target": self.target.key, "rungs": rungs})


def explain_ladder(workload: Workload, target: Target, ladder: Ladder) -> Explanation:
    """Walks the ladder as `Ladder.climb` does, without loading. Below the rung that serves, it names one fallback a rung."""
    rungs: list[Rung] = []
    served = False
    for way in ladder.ways():
        if served and any(each.rung == way.rung and each.verdict != "no" for each in rungs):
            continue
        obstacle = ladder.obstacle(way)
        verdict: Verdict = "no" if obstacle is not None else "fallback" if served else "serves"
        rungs.append(Rung(way.rung, verdict, way.reason if obstacle is None else obstacle))
        served = served or obstacle is None
    return Explanation(workload, target, tuple(rungs))
