"""The arms of a tuning run: what each (task, template) pair has tried, and which of them deserves the next trials.

Ownership: `Arm`, `TaskState` and everything in them belong to the main thread, which runs the loop; no other thread changes
them. An `ArmTuner` belongs to the tuners' thread from its first call on: the main thread passes arguments to it and gets
values back (`Answer`, or whether it is finished). The device's thread reads `TaskState.best_ns`, a single attribute.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from schedsearch.config import Config
from schedsearch.identity import sha256_hex
from schedsearch.measurement import Measurement, Outcome, Record
from schedsearch.session.collaborators import TunerFactory, TunerLike
from schedsearch.session.hints import COLD, Results, WarmStart
from schedsearch.session.plan import ArmPlan, TaskPlan
from schedsearch.session.race import Raced, RaceResult
from schedsearch.session.ranking import RankAgreement
from schedsearch.session.summary import ArmSummary, TaskSummary
from schedsearch.workload import Workload

if TYPE_CHECKING:
    from schedsearch.measure.builder import Built

# An arm's trials before improvement counts: the default and a few more.
WARM_TRIALS = 8
# An arm whose best is e**GAP_SCALE times slower than its task's best has 1/e of the expected gain.
GAP_SCALE = 0.1
# This many proposals in a row that cost no trial (rejected or duplicates) end an arm.
FRUITLESS_PROPOSALS = 256

# This many of a task's fastest configurations stay candidates for the final race.
KEPT_FINALISTS = 32


@dataclass
class Proposal:
    """One configuration on its way from the tuner to an outcome. `model` is the number of `Answer.model`."""

    task: TaskState
    arm: Arm
    config: Config
    batch: int
    prediction: float | None
    model: int
    started_at: float
    twins: list[Proposal] = field(default_factory=list)  # duplicates that wait for the time of this one


@dataclass
class Finalist:
    """A measured configuration that may enter the final race. `built` is kept for the fastest few only."""

    arm: Arm
    config: Config
    time_ns: float
    built: Built | None

    def is_of(self, record: Record | None) -> bool:
        """Whether a record has exactly this configuration."""
        template = self.arm.template
        return record is not None and (record.template, record.template_version, record.config) == (
            template.name,
            template.version,
            self.config,
        )

    @property
    def is_default(self) -> bool:
        return self.config == self.arm.plan.default


@dataclass(frozen=True)
class Lesson:
    """The input for making a tuner: results of its own task so far, and a warm start from other tasks."""

    known: Results = ()
    warm: WarmStart = COLD


@dataclass(frozen=True)
class Answer:
    """A tuner's answer to a request for proposals.

    Attributes:
        configs: legal configurations.
        predictions: the model's prediction for each, None without a trained model; comparable within one state of the model.
        model: the number of that state of the model, counted from 0.
        illegal: number of proposals that the space does not have; they were dropped.
        waits: the tuner proposed nothing, and may propose again after it is told a result.
        finished: it will never propose anything again.
        batch: how many proposals it prefers to be asked for at a time.
        borrowed: how many results of similar tasks it was offered when it was made.
    """

    configs: Sequence[Config]
    predictions: Sequence[float | None]
    model: int = 0
    illegal: int = 0
    waits: bool = False
    finished: bool = False
    batch: int = WARM_TRIALS
    borrowed: int = 0


class ArmTuner:
    """The tuner of one arm and the states of its model. Owned by the tuners' thread; see the head of this module.

    Args:
        plan: the arm's template, space and default.
        make: makes the tuner; called at the first `ask`, so that the lesson includes as many results as possible.
    """

    def __init__(self, plan: ArmPlan, make: Callable[[Lesson], TunerLike]) -> None:
        self._plan, self._make = plan, make
        self._tuner: TunerLike | None = None
        self._borrowed = 0
        self._model = 0
        self._default_score = math.nan

    def ask(self, n: int, lesson: Lesson) -> Answer:
        """Up to n configurations with the model's predictions. Only the first call uses `lesson`."""
        if self._tuner is None:
            self._tuner = self._make(lesson)
            if lesson.warm.sources:
                self._tuner.transfer(lesson.warm.sources)
                self._borrowed = sum(len(results) for results in lesson.warm.sources)
            if lesson.known:
                self._tuner.tell(lesson.known)
        proposed = self._tuner.ask(n)
        configs = [config for config in proposed if not self._plan.space.check(config)]
        return Answer(
            configs,
            self._predictions(self._tuner, configs),
            self._model,
            illegal=len(proposed) - len(configs),
            waits=not proposed,
            finished=self._tuner.finished,
            batch=self._tuner.batch,
            borrowed=self._borrowed,
        )

    def tell(self, results: Results) -> bool:
        """Tells the tuner results; those from before the first `ask` are in its lesson. Returns whether it is finished."""
        if self._tuner is None:
            return False
        self._tuner.tell(results)
        return self._tuner.finished

    def _predictions(self, tuner: TunerLike, configs: Sequence[Config]) -> list[float | None]:
        """Scores are comparable only within one state of the model; the default's score tells one state from the next."""
        scores = tuner.predict([*configs, self._plan.default]) if configs else None
        if scores is None:
            return [None] * len(configs)
        *predictions, default_score = (float(score) for score in scores)
        self._model += default_score != self._default_score
        self._default_score = default_score
        return [score if math.isfinite(score) else None for score in predictions]


class Arm:
    """A template on a task: the configurations that were tried and their results. Owned by the main thread.

    Attributes:
        tuner: proposes; called in the tuners' thread only.
        begun: whether the default, with which every arm begins, was already proposed or measured.
        taught: whether the tuner was already asked, so that it has had its lesson.
        results: every finished configuration, including those of earlier runs; None for a failure.
        borrowed: how many results of similar tasks its tuner was offered.
        trials: distinct configurations with an outcome that counts; new_trials: those of this run.
        pending: proposals under way, including those that the tuner was asked for but has not made yet.
        asked: how many it has not made yet; a tuner gets one request at a time.
        batch: how many proposals its tuner prefers to be asked for at a time.
        batches: number of answers with proposals.
        best_ns, best_config, default_ns: as measured in the search, one configuration at a time; None until measured.
        illegal: number of proposals that the space does not have; they are dropped.
    """

    def __init__(self, plan: ArmPlan) -> None:
        self.plan = plan
        self.template = plan.template
        self.tuner: ArmTuner | None = None
        self.begun = self.taught = False
        self.batch = WARM_TRIALS
        self.trials = self.new_trials = self.pending = self.asked = 0
        self.batches = self.duplicates = self.illegal = self.borrowed = 0
        self.results: dict[Config, float | None] = {}
        self.outcomes: Counter[str] = Counter()
        self.best_ns: float | None = None
        self.best_config: Config | None = None
        self.default_ns: float | None = None
        self._fruitless = 0
        self._waiting = False  # the tuner has no proposal until it is told a result
        self._finished = False  # it will never have one again
        self._ranked: dict[int, list[tuple[float, float]]] = {}  # state of the model -> (predicted, measured) speed

    def start(self, factory: TunerFactory, name: str, seed: int, workload: Workload) -> None:
        """Sets how to make the tuner. Its seed depends on the run's seed and on the arm itself, not on the order of arms."""
        plan = self.plan
        own_seed = int(sha256_hex(f"{seed}:{workload.id}:{self.template.name}")[:8], 16)

        def make(lesson: Lesson) -> TunerLike:
            exclude = [plan.default, *(config for config, _ in lesson.known)]
            return factory(name, plan.space, seed=own_seed, default=plan.default, exclude=exclude, hints=lesson.warm.hints)

        self.tuner = ArmTuner(plan, make)

    # Events

    def remember(self, config: Config, outcome: Outcome, time_ns: float | None) -> None:
        """Adds an outcome of an earlier run."""
        self._note(config, outcome, time_ns)

    def begin(self) -> Answer:
        """The default: how every arm begins, before its tuner is made."""
        self.begun = True
        self.batches += 1
        return Answer([self.plan.default], [None])

    def lesson(self, warm: WarmStart) -> Lesson:
        """The tuner's lesson at the first ask: all results so far. Later results are told one by one."""
        self.taught = True
        return Lesson(self.evidence(), warm)

    def asking(self, n: int) -> None:
        """The tuner is asked for n proposals."""
        self.asked = n
        self.pending += n

    def answered(self, answer: Answer) -> None:
        """The tuner has answered. Its proposals are under way only once they are `proposed`."""
        self.pending -= self.asked
        self.asked = 0
        self.illegal += answer.illegal
        self._fruitless += answer.illegal
        self._waiting, self._finished = answer.waits, answer.finished
        self.batch, self.borrowed = answer.batch, answer.borrowed
        self.batches += bool(answer.configs)

    def proposed(self) -> None:
        """One more configuration is on its way to an outcome."""
        self.pending += 1

    def done(self, config: Config, outcome: Outcome | None, time_ns: float | None) -> None:
        """A proposed configuration is finished; None means a duplicate, which has its twin's time."""
        self.pending -= 1
        self.new_trials += outcome is not None and outcome.is_trial
        self._note(config, outcome, time_ns)

    def told(self, *, finished: bool) -> None:
        """Its tuner was told a result."""
        self._waiting, self._finished = False, finished

    def compare(self, proposal: Proposal, time_ns: float) -> None:
        """Keeps the measurement together with the model's prediction."""
        if proposal.prediction is not None:
            self._ranked.setdefault(proposal.model, []).append((proposal.prediction, -time_ns))

    def disqualify(self, config: Config, next_best: Finalist | None) -> None:
        """A configuration proved wrong in the final race; `next_best` is this arm's fastest other configuration."""
        if config == self.plan.default:
            self.default_ns = None
        if config == self.best_config:
            self.best_ns = next_best.time_ns if next_best else None
            self.best_config = next_best.config if next_best else None

    def _note(self, config: Config, outcome: Outcome | None, time_ns: float | None) -> None:
        self.results[config] = time_ns
        self.begun = self.begun or config == self.plan.default
        if outcome is None:
            self.duplicates += 1
        else:
            self.outcomes[outcome] += 1
        if config == self.plan.default and time_ns is not None:
            self.default_ns = time_ns
        if time_ns is not None and (self.best_ns is None or time_ns < self.best_ns):
            self.best_ns, self.best_config = time_ns, config
        if outcome is not None and outcome.is_trial:
            self._fruitless = 0
            self.trials += 1
        else:
            self._fruitless += 1

    # Questions of the scheduler

    def evidence(self) -> Results:
        """The present `results`, in the form that tuners learn from."""
        return list(self.results.items())

    @property
    def ready(self) -> bool:
        """Whether it can propose more now."""
        open_ = not self._finished and self._fruitless < FRUITLESS_PROPOSALS
        return open_ and not self._waiting and not self.asked

    def portion(self, wanted: int, warm_trials: int) -> int:
        """How many of the wanted proposals to ask for now: a batch, and during warm-up no more than the warm-up needs."""
        cold = warm_trials - self.trials - self.pending
        return min(wanted, self.batch, cold if cold > 0 else wanted)

    def gain(self, task_best_ns: float | None) -> float:
        """Expected improvement of the task's best by one more trial of this arm, relative to that of others.

        The possible gain falls as 1/trials, so that one more trial gains 1/trials**2, for every task. Tasks then share the
        budget by the square roots of their weights. Earlier gains of an arm do not predict later ones; see
        `benchmarks/budget.py`. This is multiplied by exp(-gap / GAP_SCALE), gap = log(arm's best / task's best), because an
        arm that is far behind must first catch up.
        """
        rate = 1 / (1 + self.trials + self.pending) ** 2
        if task_best_ns is None:
            return rate
        gap = math.log(self.best_ns / task_best_ns) if self.best_ns is not None else 1.0
        return rate * math.exp(-max(gap, 0.0) / GAP_SCALE)

    @property
    def ranking(self) -> RankAgreement:
        """How well this run's predictions ranked what was then measured."""
        return RankAgreement.of(self._ranked.values())

    def summary(self) -> ArmSummary:
        return ArmSummary(
            self.template.name,
            self.default_ns,
            self.best_ns,
            self.best_config,
            self.trials,
            dict(self.outcomes),
            self.duplicates,
            self.illegal,
            self.borrowed,
        )


class TaskState:
    """A task during a run: its arms, the standing best, and the entrants of its final race. Owned by the main thread.

    Attributes:
        best_ns: the fastest valid time of the search so far. The device's thread reads it, too: it is one attribute,
            which the main thread replaces.
        race: the result of the last final race, of this run or of an earlier one; None if there is a newer outcome.
        stored_best: the store's best record of this task, from any run.
        best_after_ns: the fastest time after each trial of this run.
        by_code: canonical hash -> the proposal that is being measured, or its result.
        prepared: inputs and reference are on the device, or on their way.
        seconds: time of building and running this task's candidates in this run.
        unshared: how many of them were compiled without sharing work with others.
    """

    def __init__(self, index: int, plan: TaskPlan) -> None:
        self.index = index
        self.workload, self.name = plan.task.workload, plan.task.name
        self.weight = plan.task.weight
        self.arms = [Arm(arm) for arm in plan.arms]
        self.seconds = 0.0
        self.unshared = 0
        self.best_ns: float | None = None
        self.finalists: dict[tuple[str, Config], Finalist] = {}
        self.by_code: dict[str, Proposal | float | None] = {}
        self.best_after_ns: list[float | None] = []
        self.prepared = False
        self.stored_best: Record | None = None
        self.race: RaceResult | None = None
        self._plain: list[Finalist] = []  # configurations that race although the search never tried them
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
            if arm is not None and record.measurement.ok and not arm.plan.space.check(record.config):
                raced.append(Raced.of(arm.plan, record.config, record.measurement))
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
        if time_ns is not None:
            self.keep_finalist(Finalist(proposal.arm, proposal.config, time_ns, built), race_size)
            proposal.arm.compare(proposal, time_ns)
        if measurement.outcome.is_trial:
            self.best_after_ns.append(self.best_ns)

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
        finalist.arm.disqualify(finalist.config, next((f for f in ranked if f.arm is finalist.arm), None))

    def settle(self, passed: Sequence[tuple[Finalist, Measurement]]) -> None:
        """Sets the result of a final race: the entrants that passed it, and their times there."""
        self.race = RaceResult.of([Raced.of(each.arm.plan, each.config, measured) for each, measured in passed])

    def _ranked(self) -> list[Finalist]:
        return sorted(self.finalists.values(), key=lambda finalist: finalist.time_ns)

    def summary(self, target_key: str) -> TaskSummary:
        ranked = self._ranked()
        best = ranked[0] if ranked else None
        race = self.race
        outcomes = sum((arm.outcomes for arm in self.arms), Counter())
        return TaskSummary(
            workload=self.workload,
            target=target_key,
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
        )


def choose_arm(tasks: Sequence[TaskState], warm_trials: int) -> tuple[TaskState, Arm] | None:
    """The arm that gets the next trials; None if none is ready.

    First every arm in turn measures its default. Then one arm after the other gets `warm_trials`, so that later ones can
    profit from results of earlier ones. After that the arm with the greatest expected gain times its task's weight is next.
    """
    arms = [(task, arm) for task in tasks for arm in task.arms if arm.ready]
    if not arms:
        return None
    for pair in arms:
        if not pair[1].begun:
            return pair
    cold = [(task, arm) for task, arm in arms if arm.trials + arm.pending < warm_trials]
    if cold:
        return max(cold, key=lambda pair: pair[1].trials + pair[1].pending)
    return max(arms, key=lambda pair: pair[0].weight * pair[1].gain(pair[0].best_ns))
