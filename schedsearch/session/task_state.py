"""The tasks of a tuning run: the arms of each, its best, its final race, and which arm deserves the next trials.

Ownership: a `TaskState` and everything in it belong to the main thread, which runs the loop; no other thread changes them.
The device's thread reads `TaskState.best_ns`, a single attribute.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from schedsearch.config import Config
from schedsearch.measurement import MESSAGE_CHARACTERS, Measurement, Record, Verdict
from schedsearch.session.arms import Arm
from schedsearch.session.plan import TaskPlan
from schedsearch.session.race import Entrant, Raced, RaceResult, judged, neighbours_ns
from schedsearch.session.ranking import RankAgreement
from schedsearch.session.summary import Failure, TaskSummary
from schedsearch.text import storable_text

if TYPE_CHECKING:
    from schedsearch.processes.builder import Built

LATE = "the time was over before anything was measured"
# This many of a task's fastest configurations stay candidates for the final race.
KEPT_FINALISTS = 32
# A race takes as long for an entrant as so many trials: it is verified once more, and timed three times as often.
TRIALS_AN_ENTRANT = 3


@dataclass
class Proposal:
    """One configuration on its way from the tuner to an outcome.

    Attributes:
        model: the number of `Answer.model`.
        twins: duplicates that wait for the time of this one.
        lost: measurements of it whose worker went away.
    """

    task: TaskState
    arm: Arm
    config: Config
    batch: int
    prediction: float | None
    model: int
    started_at: float
    twins: list[Proposal] = field(default_factory=list)
    lost: int = 0

    @property
    def is_untuned(self) -> bool:
        """Whether this is what the task gets without tuning: the default of its first template."""
        return self.arm is self.task.arms[0] and self.config == self.arm.plan.default


@dataclass
class Finalist:
    """A measured configuration that may enter the final race. `built` is kept for the fastest few only."""

    arm: Arm
    config: Config
    time_ns: float
    built: Built | None

    @functools.cached_property
    def place(self) -> tuple[float, str, str]:
        """Sorts the fastest first, and equal ones so that it does not depend on what was tried first which of them race."""
        return self.time_ns, self.arm.template.name, self.config.json

    def is_of(self, record: Record | None) -> bool:
        """Whether a record has exactly this configuration."""
        template = self.arm.template
        if record is None or (record.template, record.template_version) != (template.name, template.version):
            return False
        return template.current(record.config) == self.config

    @property
    def is_default(self) -> bool:
        return self.config == self.arm.plan.default


class TaskState:
    """A task during a run: its arms, the standing best, and the entrants of its final race. Owned by the main thread.

    Attributes:
        best_ns: the fastest valid time of the search so far. The device's thread reads it, too: it is one attribute,
            which the main thread replaces.
        race: the result of the last final race, of this run or of an earlier one; None if there is a newer outcome.
        stored_best: the store's best record of this task, from any run.
        best_after_ns: the fastest time after each trial of this run.
        by_code: canonical hash -> the proposal that is being measured, or its result.
        reference_asked: a builder compiles its reference, or has done so.
        error: why nothing of this task can be measured; it gets no more trials then. None while all is well.
        failure: the trial of a default that failed, else the first one that did.
        late: the time of the run was over before anything of this task was measured.
        seconds: time of building and running this task's candidates in this run.
        unshared: how many of them were compiled without sharing work with others.
    """

    def __init__(self, index: int, plan: TaskPlan) -> None:
        self.index = index
        self.workload, self.name = plan.task.workload, plan.task.name
        self.weight = plan.task.weight
        self.kind = plan.target.key
        self.arms = [Arm(arm) for arm in plan.arms]
        self.seconds = 0.0
        self.unshared = 0
        self.best_ns: float | None = None
        self.finalists: dict[tuple[str, Config], Finalist] = {}
        self.by_code: dict[str, Proposal | float | None] = {}
        self.best_after_ns: list[float | None] = []
        self.reference_asked = False
        self.error: Exception | None = None
        self.failure: Failure | None = None
        self.late = False
        self.stored_best: Record | None = None
        self.race: RaceResult | None = None
        self._plain: list[Finalist] = []  # configurations that race although the search never tried them
        self._valid, self._valid_s = 0, 0.0  # candidates of this run that passed, and what they took on the device
        self._newest_s = 0.0  # when the last configuration was measured that an earlier run tried, outside of a race

    def beats_stored_best(self, time_ns: float) -> bool:
        """Whether a time of the search makes its configuration the store's best until the race.

        A best that won a race is replaced only by the winner of another race, because the card may now be cooler.
        """
        if self.stored_best is None or self.stored_best_ns is None:
            return True
        return self.stored_best.anchor is None and time_ns < self.stored_best_ns

    @property
    def stored_best_ns(self) -> float | None:
        return self.stored_best.measurement.time_ns if self.stored_best else None

    @property
    def trials(self) -> int:
        return sum(arm.trials for arm in self.arms)

    @property
    def new_trials(self) -> int:
        return sum(arm.new_trials for arm in self.arms)

    @property
    def default_ns(self) -> float | None:
        """The fastest default as measured in the search."""
        return min((arm.default_ns for arm in self.arms if arm.default_ns is not None), default=None)

    # Events

    def remember(self, arm: Arm, record: Record) -> None:
        """Adds the record of a configuration that an earlier run measured.

        A plain configuration that only took part in a race was not tried, and does not count as a trial.
        """
        if record.final_race and (record.measurement.ok or record.config == arm.plan.plain):
            return
        time_ns = record.measurement.time_ns
        if not record.final_race:
            self._newest_s = max(self._newest_s, record.finished_at)
        arm.remember(record.config, record.measurement.outcome, time_ns)
        self._note_failure(arm, record.config, record.measurement)
        if time_ns is not None:
            self.keep_finalist(Finalist(arm, record.config, time_ns, None), 0)

    def remember_race(self, records: Sequence[Record]) -> None:
        """Adds the last final race of this task, after all configurations that were tried. A newer trial makes it void.

        It leaves out entrants that this run would not try, because of their template or its space.
        """
        if any(record.finished_at < self._newest_s for record in records):
            return
        arms = {(arm.template.name, arm.template.version): arm for arm in self.arms}
        raced = []
        for record in records:
            arm = arms.get((record.template, record.template_version))
            if arm is None or not record.measurement.ok:
                continue
            config = arm.template.current(record.config)
            if not arm.plan.space.check(config):
                raced.append(Raced.of(arm.plan, config, record.measurement, record.verdict))
        self.race = RaceResult.of(raced)

    def built(self, built: Built) -> None:
        """A candidate was compiled."""
        self.seconds += built.build_s
        self.unshared += not built.shared

    def done(self, proposal: Proposal, measurement: Measurement, built: Built | None, race_size: int) -> None:
        """A proposal has its outcome; `built` is None when it was not built."""
        time_ns = measurement.time_ns
        self.race = None
        self.seconds += measurement.run_s if built is not None else measurement.build_s
        proposal.arm.done(proposal.config, measurement.outcome, time_ns)
        self._note_failure(proposal.arm, proposal.config, measurement)
        if time_ns is not None:
            self._valid, self._valid_s = self._valid + 1, self._valid_s + measurement.run_s
            self.keep_finalist(Finalist(proposal.arm, proposal.config, time_ns, built), race_size)
            if proposal.prediction is not None:
                proposal.arm.compare(proposal.prediction, proposal.model, time_ns)
        if measurement.outcome.is_trial:
            self.best_after_ns.append(self.best_ns)

    def _note_failure(self, arm: Arm, config: Config, measurement: Measurement) -> None:
        is_default = config == arm.plan.default
        if not measurement.ok and (self.failure is None or (is_default and not self.failure.is_default)):
            self.failure = Failure(arm.template.name, config, measurement.outcome, measurement.message, is_default)

    def duplicate(self, proposal: Proposal, time_ns: float | None, race_size: int) -> None:
        """A proposal has the same code as one that took `time_ns`. It enters the final race only if it is a default."""
        proposal.arm.done(proposal.config, None, time_ns)
        if proposal.config == proposal.arm.plan.default and time_ns is not None:
            self.keep_finalist(Finalist(proposal.arm, proposal.config, time_ns, None), race_size)

    def keep_finalist(self, finalist: Finalist, race_size: int) -> None:
        """Adds a valid configuration. Drops the machine code of those behind the fastest `race_size`, then the
        configurations.

        Defaults are always kept.
        """
        self.finalists[finalist.arm.template.name, finalist.config] = finalist
        ranked = self._ranked()
        for place, slower in enumerate(ranked[race_size:], race_size):
            if slower.is_default:
                continue
            slower.built = None
            if place >= KEPT_FINALISTS:
                del self.finalists[slower.arm.template.name, slower.config]
        self.best_ns = ranked[0].time_ns

    def contenders(self, race_size: int) -> list[Finalist]:
        """The entrants of a final race: the fastest `race_size` configurations, the standing best, and some to compare with.

        The latter are the fastest default, the default of the first template as the `anchor` that makes races of different
        days comparable, and plain configurations (`enter_plain`). There are no entrants if no tried configuration is valid.
        """
        ranked = self._ranked()
        if not ranked:
            return []
        plain = [*(finalist for finalist in ranked if finalist.config == finalist.arm.plan.plain), *self._plain]
        defaults = [finalist for finalist in ranked if finalist.is_default]
        anchor = self.anchor
        standing = [finalist for finalist in ranked if finalist.is_of(self.stored_best)]
        chosen = [*ranked[:race_size], *standing, *plain, *defaults[:1], *([anchor] if anchor else [])]
        return list({(finalist.arm.template.name, finalist.config): finalist for finalist in chosen}.values())

    def expected_race_s(self, race_size: int) -> float:
        """What the final race will take on the device, for the fastest and one default."""
        if self.race is not None or self.error is not None or not self._valid:
            return 0.0
        return min(len(self.finalists), race_size + 1) * TRIALS_AN_ENTRANT * self._valid_s / self._valid

    def enter_plain(self) -> None:
        """Enters the plain configuration of every template, even if the search never tried it."""
        for arm in self.arms:
            plain = arm.plan.plain
            if plain is not None and plain not in arm.results:
                self._plain.append(Finalist(arm, plain, math.inf, None))

    @property
    def anchor(self) -> Finalist | None:
        """The valid default of the first template that has one: the same in every run of this task."""
        kept = (self.finalists.get((arm.template.name, arm.plan.default)) for arm in self.arms)
        return next((finalist for finalist in kept if finalist is not None), None)

    def disqualify(self, finalist: Finalist) -> None:
        """A configuration failed in the final race: it is no longer best or default."""
        self.finalists.pop((finalist.arm.template.name, finalist.config), None)
        self._plain = [each for each in self._plain if each is not finalist]
        ranked = self._ranked()
        self.best_ns = ranked[0].time_ns if ranked else None
        next_best = next(((each.config, each.time_ns) for each in ranked if each.arm is finalist.arm), None)
        finalist.arm.disqualify(finalist.config, next_best)

    def judged(self, raced: Sequence[tuple[Finalist, Measurement]]) -> list[Verdict]:
        """The verdict on each entrant of a race; on those that failed it there is none."""
        anchor = self.anchor
        passed = {
            number: Entrant(
                finalist.arm.template.name,
                finalist.config,
                measurement,
                finalist is anchor,
                finalist.is_default,
                neighbours_ns(finalist.config, finalist.arm.results),
            )
            for number, (finalist, measurement) in enumerate(raced)
            if measurement.ok
        }
        verdicts = dict(zip(passed, judged(list(passed.values()))))
        return [verdicts.get(number, Verdict.NONE) for number in range(len(raced))]

    def settle(self, passed: Sequence[tuple[Finalist, Measurement, Verdict]]) -> None:
        """Sets the result of a final race: the entrants that passed it, their times there, and the verdicts."""
        raced = [Raced.of(each.arm.plan, each.config, measured, verdict) for each, measured, verdict in passed]
        self.race = RaceResult.of(raced)

    def _ranked(self) -> list[Finalist]:
        return sorted(self.finalists.values(), key=operator.attrgetter("place"))

    @property
    def _problem(self) -> str:
        if self.error is not None:
            return storable_text(str(self.error), MESSAGE_CHARACTERS)
        return LATE if self.late and self.best_ns is None else ""

    def summary(self) -> TaskSummary:
        ranked = self._ranked()
        best = ranked[0] if ranked else None
        race = self.race
        outcomes = sum((arm.outcomes for arm in self.arms), Counter())
        return TaskSummary(
            workload=self.workload,
            target=self.kind,
            template=race.best.template if race else best.arm.template.name if best else None,
            default_ns=self.default_ns if race is None else race.default.time_ns if race.default else None,
            best_ns=race.best.time_ns if race else best.time_ns if best else None,
            best_config=race.best.config if race else best.config if best else None,
            race=race,
            trials=self.trials,
            new_trials=self.new_trials,
            outcomes=dict(outcomes),
            duplicates=sum(arm.duplicates for arm in self.arms),
            illegal=sum(arm.illegal for arm in self.arms),
            unshared=self.unshared,
            seconds=self.seconds,
            arms=tuple(arm.summary() for arm in self.arms),
            best_after_ns=tuple(self.best_after_ns),
            ranking=sum((arm.ranking for arm in self.arms), RankAgreement()),
            problem=self._problem,
            failure=self.failure,
        )


def choose_arm(tasks: Sequence[TaskState], warm_trials: int) -> tuple[TaskState, Arm] | None:
    """The arm that gets the next trials; None if none is ready.

    First every arm in turn measures its default. Then one arm after the other gets `warm_trials`, so that later ones can
    profit from results of earlier ones. After that the arm with the greatest expected gain times its task's weight is next.
    """
    arms = [(task, arm) for task in tasks for arm in task.arms if arm.ready and task.error is None]
    if not arms:
        return None
    for pair in arms:
        if not pair[1].begun:
            return pair
    cold = [(task, arm) for task, arm in arms if arm.trials + arm.pending < warm_trials]
    if cold:
        return max(cold, key=lambda pair: pair[1].trials + pair[1].pending)
    return max(arms, key=lambda pair: pair[0].weight * pair[1].gain(pair[0].best_ns))
