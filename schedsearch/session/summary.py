"""The results of a tuning run (`RunSummary`), as frozen values with a JSON form (`to_json`).

The JSON form also has values derived from the fields (labels, shares, correlations), for readers without Python.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType

from schedsearch.config import Config
from schedsearch.measurement import Outcome
from schedsearch.ops.own_kernel import without_reference
from schedsearch.session.race import RaceResult
from schedsearch.session.ranking import RankAgreement
from schedsearch.session.report import ResultRow, ResultTable, SearchRow, SearchTable, result_html, result_text
from schedsearch.size_table import SizeTable
from schedsearch.target import Target
from schedsearch.text import counted, counts, duration, seconds
from schedsearch.typed import JsonObject
from schedsearch.workload import Workload, WorkloadRange

_MARKS = tuple(unit * 10**power for power in range(1, 5) for unit in (1, 2.5, 5))  # trials after which to look at the best
_FEW_MARKS = (1, 2, 5)  # where no task had as many
_SEARCH_ROWS = 8


def workload_json(workload: Workload) -> JsonObject:
    """The form of a workload in events and summaries: the whole workload, its id and its label."""
    return {"workload": json.loads(workload.json), "workload_id": workload.id, "label": workload.label}


def config_json(config: Config | None) -> JsonObject | None:
    return None if config is None else dict(config)


@dataclass(frozen=True)
class ArmSummary:
    """The result of one template on one task.

    Attributes:
        default_ns, best_ns: as measured in the search, one configuration at a time; `TaskSummary.race` has comparable times.
        outcomes: outcome -> count, including resumed ones of earlier runs.
        duplicates: candidates whose machine code had been measured before.
        illegal: proposals that the tuner was not allowed to make.
        borrowed: how many results of similar tasks its tuner was offered.
    """

    template: str
    default_ns: float | None
    best_ns: float | None
    best_config: Config | None
    trials: int
    outcomes: Mapping[str, int]
    duplicates: int
    illegal: int
    borrowed: int

    def to_json(self) -> JsonObject:
        return asdict(self) | {"best_config": config_json(self.best_config)}


@dataclass(frozen=True)
class Failure:
    """A trial that failed.

    Attributes:
        is_default: whether its configuration is what one gets without tuning.
    """

    template: str
    config: Config
    outcome: Outcome
    message: str
    is_default: bool

    def to_json(self) -> JsonObject:
        return asdict(self) | {"config": dict(self.config), "outcome": str(self.outcome)}


@dataclass(frozen=True)
class TaskSummary:
    """The end of one task.

    Attributes:
        template: the template of the best configuration; None if no configuration is valid.
        default_ns: the fastest of the templates' default configurations, which one gets without tuning.
        best_ns, best_config: the fastest configuration. Both times come from the final race if there was one (see `race`),
            in this run or, if it measured nothing new, in an earlier one. Otherwise they are single measurements, which are
            not comparable.
        race: the final race with the spread of its times; None if the run ended before it.
        trials: distinct configurations with an outcome, including resumed ones of earlier runs.
        new_trials: those of this run.
        outcomes: outcome -> count, including static rejects.
        duplicates: candidates whose machine code had been measured before; they cost no trial.
        illegal: proposals that the tuner was not allowed to make: 0 unless it has a bug.
        unshared: candidates of this run that were compiled without sharing work with others, which takes longer.
        seconds: time of building and running this task's candidates in this run; builders work in parallel, so this can
            exceed the run's wall time.
        arms: one for each template.
        best_after_ns: the fastest time so far after each of the `new_trials`, None until there is one; as measured in the
            search, before the final race.
        ranking: how well the models' predictions agree with the measurements; for valid trials of this run that were
            proposed after the model was first trained.
        problem: why this run gave the task up: its inputs and its reference cannot be made, or the time was over before
            anything was measured; "" if it did not.
        failure: the trial of a default that failed, else the first one that did; None if none failed.
    """

    workload: Workload
    target: str
    template: str | None
    default_ns: float | None
    best_ns: float | None
    best_config: Config | None
    race: RaceResult | None
    trials: int
    new_trials: int
    outcomes: Mapping[str, int]
    duplicates: int
    illegal: int
    unshared: int
    seconds: float
    arms: tuple[ArmSummary, ...]
    best_after_ns: tuple[float | None, ...]
    ranking: RankAgreement
    problem: str = ""
    failure: Failure | None = None

    @property
    def speedup(self) -> float | None:
        """Default time over best time, both of the final race; None without one."""
        return None if self.race is None else self.race.speedup

    @property
    def gflops(self) -> float | None:
        """1e9 operations per second of the best configuration, as the operator counts them; None for one without any."""
        return self.workload.flops / self.best_ns if self.best_ns and self.workload.flops else None

    @property
    def gbytes_per_s(self) -> float | None:
        """1e9 bytes per second of the best configuration; each argument and output counts once."""
        return self.workload.min_bytes / self.best_ns if self.best_ns else None

    @property
    def failures(self) -> dict[str, int]:
        """Outcomes other than ok."""
        return {name: count for name, count in self.outcomes.items() if name != Outcome.OK and count}

    @property
    def untuned(self) -> str:
        """What one gets without tuning, in words."""
        return "your own choice" if self.workload.op == "own_kernel" else "the default"

    @property
    def why_invalid(self) -> str:
        """Why no configuration is valid: how many failed in which way, the first reason, and what to do; "" if one is."""
        if self.best_ns is not None or self.failure is None:
            return ""
        which = self.untuned if self.failure.is_default else f"{self.failure.template}:"
        return f"all trials failed ({counts(self.failures)}). The first, {which} {self._explained(self.failure)}"

    @property
    def why_no_default(self) -> str:
        """What is wrong with what one gets without tuning, and what to do, if other configurations are valid; else ""."""
        if self.best_ns is None or self.default_ns is not None or self.failure is None or not self.failure.is_default:
            return ""
        return f"{self.untuned} {self._explained(self.failure)}"

    def _explained(self, failure: Failure) -> str:
        """The configuration of a failure, its reason, and what to do."""
        config = " ".join(f"{name}={value}" for name, value in failure.config.items())
        # What the process said before it died is long, and in the record.
        message = failure.message.partition("; its last words:")[0].strip()
        reason = f"{failure.outcome}: {message}".rstrip(". ")
        return f"({config}): {reason}. What to do: {self._remedy(failure)}"

    def _remedy(self, failure: Failure) -> str:
        own = self.workload.op == "own_kernel"
        if failure.outcome is Outcome.RUN_TIMEOUT:
            return (
                "if the kernel may loop forever, correct it; if it is slow, give it more time (run_timeout_s, or timeout "
                "under measure of a workload file)"
            )
        if failure.outcome is Outcome.WORKER_LOST and own:
            return "see which elements the kernel reads and writes; one outside of its arrays ends the process"
        if failure.outcome is not Outcome.WRONG_ANSWER:
            return "correct what the message says"
        if own:
            return "correct the kernel, or its reference"
        return f"the template {failure.template} computes this workload wrongly: please report it to its author"

    def result_row(self, name: str, computes: bool) -> ResultRow:
        """A row of `RunSummary.result_table`. `computes` says whether its rate is of operations or of bytes."""
        race = self.race
        return ResultRow(
            name=name,
            template=self.template,
            default_ns=self.default_ns,
            best_ns=self.best_ns,
            default_spread=race.default.spread if race and race.default else None,
            best_spread=race.best.spread if race else None,
            plain_ns=race.plain.time_ns if race and race.plain else None,
            plain_spread=race.plain.spread if race and race.plain else None,
            speedup=self.speedup,
            over_plain=race.over_plain if race else None,
            rate=self.gflops if computes else self.gbytes_per_s,
            trials=self.trials,
            failures=self.failures,
            unreferenced=without_reference(self.workload.params),
            failed_default=self.why_no_default,
        )

    def to_json(self) -> JsonObject:
        return {
            **workload_json(self.workload),
            "target": self.target,
            "template": self.template,
            "default_ns": self.default_ns,
            "best_ns": self.best_ns,
            "best_config": config_json(self.best_config),
            "speedup": self.speedup,
            "race": None if self.race is None else self.race.to_json(),
            "trials": self.trials,
            "new_trials": self.new_trials,
            "outcomes": dict(self.outcomes),
            "duplicates": self.duplicates,
            "illegal_proposals": self.illegal,
            "unshared_builds": self.unshared,
            "seconds": self.seconds,
            "templates": [arm.to_json() for arm in self.arms],
            "best_after_ns": list(self.best_after_ns),
            **_ranking_json(self.ranking),
            **({"problem": self.problem} if self.problem else {}),
            **({"failure": self.failure.to_json()} if self.failure else {}),
        }


def _ranking_json(ranking: RankAgreement) -> JsonObject:
    rho = ranking.correlation
    return {
        "rank_correlation": None if rho is None else round(rho, 4),
        "ranked_trials": ranking.trials,
        "ranking": asdict(ranking),
    }


@dataclass(frozen=True)
class Shares:
    """Fractions of a run's wall time in which the device verified and timed candidates, was idle because it waited for a
    build, was idle because it waited for a proposal, and in which inputs and references were prepared on it.

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
class DeviceSummary:
    """One of several devices of a run.

    Attributes:
        name: as `--target` selects it, with the name of the card.
        trials: measurements of the search that count, on this device.
        baseline_ns: what the kernel took here that every device measured; None if it measured none.
        problem: why it was taken out of the run; "" if it was not.
    """

    name: str
    uuid: str
    shares: Shares
    trials: int
    baseline_ns: float | None
    problem: str = ""

    def to_json(self) -> JsonObject:
        return asdict(self)


@dataclass(frozen=True)
class RangeSummary:
    """The kernels of a range of sizes.

    Attributes:
        table: the kernels; None if there are none.
        trials: measurements that the choice took, besides those of the search.
        problem: why there is no table.
    """

    of_range: WorkloadRange
    table: SizeTable | None
    trials: int
    problem: str = ""

    def to_json(self) -> JsonObject:
        """What the command line prints; the machine code is in the database."""
        table = self.table
        return {
            "label": self.of_range.label,
            "parameter": self.of_range.parameter,
            "low": self.of_range.low,
            "high": self.of_range.high,
            "trials": self.trials,
            "problem": self.problem,
            "serves": [] if table is None else [list(each) for each in table.serves],
            "templates": [] if table is None else [each.template for each in table.kernels],
            "verified": [] if table is None else [list(each.verified) for each in table.kernels],
            "over_specialised": {} if table is None else {str(size): gain for size, gain in table.gains.items()},
        }


@dataclass(frozen=True, repr=False)
class RunSummary:
    """The end of a run. Its text is the table of results, in a notebook as HTML.

    Attributes:
        run: its id in the store `db`.
        target: key of the device.
        stopped: why the search ended: trials, time, exhausted (no more configurations), interrupted, or lost (the last
            device was).
        ranges: the kernels of ranges of sizes, which were chosen after the search.
        devices: what each device did; `shares` is their mean.
    """

    run: str
    db: str
    target: str
    tasks: tuple[TaskSummary, ...]
    wall_s: float
    shares: Shares
    stopped: str
    ranges: tuple[RangeSummary, ...] = ()
    devices: tuple[DeviceSummary, ...] = ()

    @property
    def new_trials(self) -> int:
        return sum(task.new_trials for task in self.tasks)

    @property
    def verified_trials(self) -> int:
        """How many trials were verified, including resumed ones of earlier runs."""
        return sum(task.outcomes.get(name, 0) for task in self.tasks for name in Outcome if Outcome(name).is_verified)

    @property
    def duplicates(self) -> int:
        return sum(task.duplicates for task in self.tasks)

    @property
    def illegal(self) -> int:
        return sum(task.illegal for task in self.tasks)

    @property
    def unshared(self) -> int:
        return sum(task.unshared for task in self.tasks)

    @property
    def ranking(self) -> RankAgreement:
        return sum((task.ranking for task in self.tasks), RankAgreement())

    @property
    def borrowed(self) -> int:
        return sum(arm.borrowed for task in self.tasks for arm in task.arms)

    def budget_shares(self, task: TaskSummary) -> tuple[float, float]:
        """A task's share of the run's trials, and of the seconds of building and running."""
        seconds = sum(each.seconds for each in self.tasks)
        return task.new_trials / max(1, self.new_trials), task.seconds / seconds if seconds else 0.0

    @property
    def complete(self) -> bool:
        """Whether every task has a valid configuration."""
        return all(task.best_ns is not None for task in self.tasks)

    def to_json(self) -> JsonObject:
        return {
            "run": self.run,
            "db": self.db,
            "target": self.target,
            "stopped": self.stopped,
            "wall_s": self.wall_s,
            "shares": asdict(self.shares),
            **_ranking_json(self.ranking),
            "duplicates": self.duplicates,
            "illegal_proposals": self.illegal,
            "unshared_builds": self.unshared,
            "tasks": [task.to_json() | self._budget_json(task) for task in self.tasks],
            "ranges": [each.to_json() for each in self.ranges],
            "devices": [each.to_json() for each in self.devices],
        }

    def result_table(self, names: Mapping[str, str] = MappingProxyType({})) -> ResultTable:
        """One row per task. `names` maps workload ids to names of tasks; the label replaces a missing name."""
        computes = all(task.workload.flops for task in self.tasks)
        rows = tuple(task.result_row(self._name(task, names), computes) for task in self.tasks)
        return ResultTable(rows, "GFLOP/s" if computes else "GB/s")

    def search_table(self, names: Mapping[str, str] = MappingProxyType({})) -> SearchTable | None:
        """How the search went; None if there were no trials. With many tasks, shows those with the most trials."""
        searched = [task for task in self.tasks if task.new_trials]
        shown = sorted(searched, key=lambda task: -task.new_trials)[:_SEARCH_ROWS]
        if not shown:
            return None
        most = shown[0].new_trials
        marks = tuple(int(mark) for mark in (_FEW_MARKS if most < _MARKS[0] else _MARKS) if mark <= most)
        rows = []
        for task in searched:
            if any(task is each for each in shown):
                after = task.best_after_ns
                bests = tuple(after[mark - 1] if mark <= len(after) else None for mark in marks)
                rows.append(SearchRow(self._name(task, names), bests, *self.budget_shares(task)))
        return SearchTable(marks, tuple(rows), len(searched) - len(rows), len(self.tasks) > 1)

    @property
    def headline(self) -> str:
        """The result in one line: the gain over what one gets without tuning, the trials and the time."""
        (task, *others), gains = self.tasks, [each.speedup for each in self.tasks if each.speedup is not None]
        if others:
            found = f"{counted(len(self.tasks), 'task')}"
            if gains:
                mean = math.exp(sum(map(math.log, gains)) / len(gains))
                found += f", {mean:.2f}x as fast as the defaults in the geometric mean"
        else:
            found = f"{task.workload.label}: {duration(task.best_ns)}"
            if gains:
                found += f", {gains[0]:.2f}x as fast as {task.untuned}"
        spent = f"{counted(self.new_trials, 'trial')} in {seconds(self.wall_s)} on {self.target}"
        return f"{found}; {spent}, kept in {self.db}"

    def __repr__(self) -> str:
        rate = self.new_trials / self.wall_s if self.wall_s else 0.0
        spent = f"{counted(self.new_trials, 'new trial')} in {seconds(self.wall_s)} ({rate:.1f}/s) on {self.target}"
        return f"{result_text(self.result_table())}\n{spent}"

    def _repr_html_(self) -> str:
        """The table of results, for notebooks."""
        return result_html(self.result_table())

    def _name(self, task: TaskSummary, names: Mapping[str, str]) -> str:
        """A task's name, with its kind of device if there are several."""
        name = names.get(task.workload.id, task.workload.label)
        several = any(other.target != task.target for other in self.tasks)
        return f"{name} on {task.target.split(':', 3)[-1]}" if several else name

    def _budget_json(self, task: TaskSummary) -> dict[str, float]:
        trials, seconds = self.budget_shares(task)
        return {"share_of_trials": trials, "share_of_seconds": seconds}


def name_of(device: Target) -> str:
    """E.g. "cuda:1 (NVIDIA H200)"; of another machine "node7 cuda:1 (NVIDIA H200)"."""
    name = f"{device.kind}:{device.ordinal} ({device.name})" if device.kind == "cuda" else device.name
    return f"{device.host} {name}" if device.host else name
