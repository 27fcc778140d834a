"""What a tuning run reached (`RunSummary`), as frozen values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schedsearch.config import Config
from schedsearch.identity import canonical_json
from schedsearch.measurement import Outcome
from schedsearch.session.ranking import RankAgreement
from schedsearch.workload import Workload


@dataclass(frozen=True)
class ArmSummary:
    """What one template reached on one task. `outcomes` counts earlier, resumed outcomes too; `borrowed` is how many results
    of similar tasks its tuner was offered."""

    template: str
    default_ns: float | None
    best_ns: float | None
    best_config: Config | None
    trials: int
    outcomes: Mapping[str, int]
    duplicates: int
    borrowed: int


@dataclass(frozen=True)
class TaskSummary:
    """The end of one task.

    Attributes:
        template: whose configuration is best; None when no configuration is valid.
        default_ns: the fastest of the templates' default configurations: what there is without tuning.
        best_ns, default_ns: from the same final race wherever this run held one.
        trials: distinct configurations with an outcome, earlier runs included when the run resumed them.
        new_trials: those of this run.
        outcomes: outcome -> count, static rejects included, and "duplicate" for artifacts built twice.
        seconds: building and running this task's candidates in this run; builders work side by side, so this can exceed
            the run's wall time.
        best_after_ns: the fastest time so far after each of the `new_trials`, None until there is one; as measured in the
            search, before the final race.
        ranking: how well the models' predictions agree with what was then measured; of valid trials of this run that were
            proposed after the model was first trained.
        illegal: proposals that the tuner was not allowed to make: 0 unless it has a bug.
    """

    workload: Workload
    target: str
    template: str | None
    default_ns: float | None
    best_ns: float | None
    best_config: Config | None
    trials: int
    new_trials: int
    outcomes: Mapping[str, int]
    seconds: float
    arms: tuple[ArmSummary, ...]
    best_after_ns: tuple[float | None, ...]
    ranking: RankAgreement
    illegal: int

    @property
    def speedup(self) -> float | None:
        """Default time over best time."""
        return self.default_ns / self.best_ns if self.default_ns and self.best_ns else None

    @property
    def gflops(self) -> float | None:
        """1e9 operations a second of the best configuration, by the definition of the operator."""
        return self.workload.flops / self.best_ns if self.best_ns else None

    @property
    def failures(self) -> dict[str, int]:
        """Outcomes other than ok and duplicate."""
        return {name: count for name, count in self.outcomes.items() if name not in (Outcome.OK, "duplicate") and count}

    def to_json(self) -> dict[str, Any]:
        return {
            "workload": {"op": self.workload.op, "params": _plain(self.workload.params)},
            "workload_id": self.workload.id,
            "label": self.workload.label,
            "target": self.target,
            "template": self.template,
            "default_ns": self.default_ns,
            "best_ns": self.best_ns,
            "best_config": None if self.best_config is None else dict(self.best_config),
            "trials": self.trials,
            "new_trials": self.new_trials,
            "outcomes": dict(self.outcomes),
            "seconds": round(self.seconds, 3),
            "templates": [
                {
                    "template": arm.template,
                    "default_ns": arm.default_ns,
                    "best_ns": arm.best_ns,
                    "best_config": None if arm.best_config is None else dict(arm.best_config),
                    "trials": arm.trials,
                    "outcomes": dict(arm.outcomes),
                    "borrowed": arm.borrowed,
                }
                for arm in self.arms
            ],
            "best_after_ns": list(self.best_after_ns),
            **_ranking_json(self.ranking),
            "illegal_proposals": self.illegal,
        }


def _ranking_json(ranking: RankAgreement) -> dict[str, Any]:
    rho = ranking.correlation
    return {"rank_correlation": None if rho is None else round(rho, 4), "ranked_trials": ranking.trials}


def _plain(params: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(canonical_json(dict(params)))
    return plain


@dataclass(frozen=True)
class Shares:
    """Fractions of a run's wall time in which the device verified and timed candidates, was idle for want of a build, was
    idle for want of a proposal, and in which inputs and references of the workloads were prepared on it.

    What remains of 1 is the database and the callbacks.
    """

    device: float
    build: float
    tuner: float
    preparing: float = 0.0

    def __str__(self) -> str:
        rest = max(0.0, 1 - self.device - self.build - self.tuner - self.preparing)
        return (
            f"device busy {self.device:.0%}, preparing {self.preparing:.0%}, waiting for a build {self.build:.0%}, "
            f"for the tuner {self.tuner:.0%}, other {rest:.0%}"
        )


@dataclass(frozen=True)
class RunSummary:
    """`stopped` says why the search ended: trials, time, exhausted (no more configurations) or interrupted."""

    run: str
    db: str
    target: str
    tasks: tuple[TaskSummary, ...]
    wall_s: float
    shares: Shares
    stopped: str

    @property
    def new_trials(self) -> int:
        return sum(task.new_trials for task in self.tasks)

    @property
    def verified_trials(self) -> int:
        """Resumed ones included, as in `TaskSummary.outcomes`."""
        return sum(task.outcomes.get(name, 0) for task in self.tasks for name in Outcome if Outcome(name).is_verified)

    @property
    def ranking(self) -> RankAgreement:
        return sum((task.ranking for task in self.tasks), RankAgreement())

    @property
    def borrowed(self) -> int:
        return sum(arm.borrowed for task in self.tasks for arm in task.arms)

    @property
    def illegal(self) -> int:
        return sum(task.illegal for task in self.tasks)

    def budget_shares(self, task: TaskSummary) -> tuple[float, float]:
        """What part of the run's trials, and of the seconds that building and running took, went to a task."""
        seconds = sum(each.seconds for each in self.tasks)
        return task.new_trials / max(1, self.new_trials), task.seconds / seconds if seconds else 0.0

    @property
    def complete(self) -> bool:
        """Whether every task has a valid configuration."""
        return all(task.best_ns is not None for task in self.tasks)

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "db": self.db,
            "target": self.target,
            "stopped": self.stopped,
            "wall_s": round(self.wall_s, 3),
            "shares": {
                "device": round(self.shares.device, 4),
                "build": round(self.shares.build, 4),
                "tuner": round(self.shares.tuner, 4),
                "preparing": round(self.shares.preparing, 4),
            },
            **_ranking_json(self.ranking),
            "illegal_proposals": self.illegal,
            "tasks": [task.to_json() | self._budget_json(task) for task in self.tasks],
        }

    def _budget_json(self, task: TaskSummary) -> dict[str, float]:
        trials, seconds = self.budget_shares(task)
        return {"share_of_trials": round(trials, 4), "share_of_seconds": round(seconds, 4)}
