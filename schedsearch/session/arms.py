"""The arms of a tuning run: what each (task, template) pair has tried, and which of them deserves the next trials."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from schedsearch.config import Config
from schedsearch.identity import sha256_hex
from schedsearch.measurement import Outcome, Record
from schedsearch.session.collaborators import TunerFactory, TunerLike
from schedsearch.session.hints import COLD, Results, WarmStart
from schedsearch.session.plan import ArmPlan, TaskPlan
from schedsearch.session.ranking import RankAgreement
from schedsearch.session.summary import ArmSummary, TaskSummary
from schedsearch.workload import Workload

if TYPE_CHECKING:
    from schedsearch.measure.builder import Built

# An arm's trials before improvement counts: the default and a few more.
WARM_TRIALS = 8
# An arm whose best is e**GAP_SCALE times slower than its task's best has 1/e of the expected gain.
GAP_SCALE = 0.1
# So many proposals in a row that cost no trial (rejected or duplicates) end an arm.
FRUITLESS_PROPOSALS = 256

# Of each task so many of the fastest configurations stay candidates for the final race.
KEPT_FINALISTS = 32


@dataclass
class Proposal:
    """One configuration on its way from the tuner to an outcome. `model` is the number of `Asked.model`."""

    task: TaskState
    arm: Arm
    config: Config
    batch: int
    prediction: float | None
    model: int
    started_at: float
    twins: list[Proposal] = field(default_factory=list)  # duplicates that wait for this one's time


@dataclass
class Finalist:
    """A measured configuration that may enter the final race. `built` is kept for the fastest few only."""

    arm: Arm
    config: Config
    time_ns: float
    built: Built | None

    def is_of(self, record: Record | None) -> bool:
        """Whether a record is of this very configuration."""
        template = self.arm.template
        return record is not None and (record.template, record.template_version, record.config) == (
            template.name,
            template.version,
            self.config,
        )


@dataclass(frozen=True)
class Asked:
    """What a tuner came up with: configurations, for each what the model predicts, and which state of the model that was."""

    configs: list[Config]
    predictions: list[float | None]
    model: int


class Arm:
    """A template on a task: its tuner and what it has reached.

    Attributes:
        begun: whether the default, with which every arm begins, was proposed or measured before.
        tuner: None before the first ask, for which the warm start is collected as late as can be.
        results: every configuration that came to an end, earlier runs included; None for a failure.
        borrowed: how many results of similar tasks its tuner was offered.
        trials, new_trials: distinct configurations with an outcome that counts; of this run.
        pending: proposals under way, those included that the tuner was asked for and has not made yet.
        asked: how many it has not made yet; a tuner is asked once at a time.
        default_ns: time of the default configuration, None until measured.
        illegal: proposals that the space does not have; they are dropped.
    """

    def __init__(self, plan: ArmPlan) -> None:
        self.plan = plan
        self.template = plan.template
        self.begun = False
        self.tuner: TunerLike | None = None
        self.trials = self.new_trials = self.pending = self.asked = self.duplicates = self.batches = self.illegal = (
            self.borrowed
        ) = 0
        self.results: dict[Config, float | None] = {}
        self.outcomes: Counter[str] = Counter()
        self.best_ns: float | None = None
        self.best_config: Config | None = None
        self.default_ns: float | None = None
        self._told_at_start: frozenset[Config] = frozenset()
        self._make_tuner: Callable[[WarmStart], TunerLike] | None = None
        self._fruitless = 0
        self._waiting = False  # the tuner had nothing to ask until it is told something
        self._model = 0  # counts the states of its model
        self._default_score = math.nan
        self._ranked: dict[int, list[tuple[float, float]]] = {}  # state of the model -> (predicted, measured) speed

    def start(
        self,
        factory: TunerFactory,
        name: str,
        seed: int,
        workload: Workload,
    ) -> None:
        """Says how the tuner is made. Its seed depends on the run's and on the arm itself, not on the order of arms."""
        own_seed = int(sha256_hex(f"{seed}:{workload.id}:{self.template.name}")[:8], 16)

        def make(warm: WarmStart) -> TunerLike:
            known = self.evidence()
            exclude = [self.plan.default, *(config for config, _ in known)]
            tuner = factory(
                name, self.plan.space, seed=own_seed, default=self.plan.default, exclude=exclude, hints=warm.hints
            )
            if warm.sources:
                tuner.transfer(warm.sources)
                self.borrowed = sum(len(results) for results in warm.sources)
            if known:
                tuner.tell(known)
                self._told_at_start = frozenset(config for config, _ in known)
            return tuner

        self._make_tuner = make

    def note(self, config: Config, outcome: Outcome | None, time_ns: float | None) -> None:
        """Counts an outcome; None is a duplicate."""
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
        if outcome is None or not outcome.is_trial:
            self._fruitless += 1
            return
        self._fruitless = 0
        self.trials += 1

    def evidence(self) -> Results:
        """`results` as of now, in the form that tuners learn from."""
        return list(self.results.items())

    @property
    def open(self) -> bool:
        """Whether the arm may propose more at all."""
        return (self.tuner is None or not self.tuner.finished) and self._fruitless < FRUITLESS_PROPOSALS

    @property
    def batch(self) -> int:
        """How many proposals its tuner likes to be asked for at a time."""
        return WARM_TRIALS if self.tuner is None else self.tuner.batch

    @property
    def ready(self) -> bool:
        """Whether it can propose more now."""
        return self.open and not self._waiting and not self.asked

    def ask(self, n: int, warm: WarmStart = COLD) -> Asked:
        """Up to n configurations with the model's predictions. `warm` counts at the first ask only."""
        if self.tuner is None:
            assert self._make_tuner is not None
            self.tuner = self._make_tuner(warm)
        proposed = self.tuner.ask(n)
        configs = [config for config in proposed if not self.plan.space.check(config)]
        self.illegal += len(proposed) - len(configs)
        self._fruitless += len(proposed) - len(configs)
        self._waiting = not proposed
        if not configs:
            return Asked([], [], self._model)
        self.batches += 1
        # Scores compare within one state of the model only; that of the default tells one state from the next.
        scores = self.tuner.predict([*configs, self.plan.default])
        if scores is None:
            return Asked(configs, [None] * len(configs), self._model)
        *predictions, default_score = (float(score) for score in scores)
        self._model += default_score != self._default_score
        self._default_score = default_score
        return Asked(configs, [p if math.isfinite(p) else None for p in predictions], self._model)

    def portion(self, wanted: int, warm_trials: int) -> int:
        """How many of the wanted proposals to ask for now: a batch, and while it warms up not more than that takes."""
        cold = warm_trials - self.trials - self.pending
        return min(wanted, self.batch, cold if cold > 0 else wanted)

    def begin(self) -> Asked:
        """The default: how every arm begins, before its tuner is made."""
        self.begun = True
        self.batches += 1
        return Asked([self.plan.default], [None], self._model)

    def compare(self, proposal: Proposal, time_ns: float) -> None:
        """Keeps what was measured beside what the model had predicted."""
        if proposal.prediction is not None:
            self._ranked.setdefault(proposal.model, []).append((proposal.prediction, -time_ns))

    @property
    def ranking(self) -> RankAgreement:
        """Of this run's predictions with what was measured."""
        return RankAgreement.of(self._ranked.values())

    def tell(self, results: Sequence[tuple[Config, float | None]]) -> None:
        """Passes results on; before there is a tuner they wait in `results`. Called where `ask` is."""
        if self.tuner is not None:
            self.tuner.tell([result for result in results if result[0] not in self._told_at_start])
        self._waiting = False

    def gain(self, task_best_ns: float | None) -> float:
        """Expected improvement of the task's best by one more trial of this arm, relative to that of others.

        What is left to gain falls as 1/trials, so one more trial gains 1/trials**2, whatever the task: tasks then share by
        the roots of their weights. What an arm gained before is no sign that it will go on; see `benchmarks/budget.py`. All
        times exp(-gap / GAP_SCALE) where gap = log(arm's best / task's best): an arm that is far behind must first catch up.
        """
        rate = 1 / (1 + self.trials + self.pending) ** 2
        if task_best_ns is None:
            return rate
        gap = math.log(self.best_ns / task_best_ns) if self.best_ns is not None else 1.0
        return rate * math.exp(-max(gap, 0.0) / GAP_SCALE)

    def summary(self) -> ArmSummary:
        return ArmSummary(
            self.template.name,
            self.default_ns,
            self.best_ns,
            self.best_config,
            self.trials,
            dict(self.outcomes),
            self.duplicates,
            self.borrowed,
        )


class TaskState:
    """A task during a run: its arms, the standing best, and who may enter the final race."""

    def __init__(self, index: int, plan: TaskPlan) -> None:
        self.index = index
        self.workload = plan.task.workload
        self.weight = plan.task.weight
        self.arms = [Arm(arm) for arm in plan.arms]
        self.seconds = 0.0
        self.new_outcomes = 0
        self.finalists: dict[tuple[str, Config], Finalist] = {}
        self.by_code: dict[str, Proposal | float | None] = {}  # canonical hash -> who is being measured, or what came of it
        self.best_after_ns: list[float | None] = []  # after each trial of this run
        self.prepared = False  # inputs and reference are on the device, or on their way
        self.stored_best: Record | None = None  # the store's, whoever made it
        self.winner: Finalist | None = None  # of the final race
        self._raced_default_ns: float | None = None

    @property
    def best(self) -> Finalist | None:
        """The fastest valid configuration of this task's arms."""
        return min(self.finalists.values(), key=lambda finalist: finalist.time_ns, default=None)

    @property
    def best_ns(self) -> float | None:
        best = self.best
        return None if best is None else best.time_ns

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
        """The fastest default: of the final race where one was held, so that it compares with the winner's time."""
        if self._raced_default_ns is not None:
            return self._raced_default_ns
        return min((arm.default_ns for arm in self.arms if arm.default_ns is not None), default=None)

    def keep_finalist(self, finalist: Finalist, race_size: int) -> None:
        """Adds a valid configuration; forgets the machine code of those behind the fastest `race_size`, then themselves.

        Defaults are always kept.
        """
        self.finalists[finalist.arm.template.name, finalist.config] = finalist
        ranked = sorted(self.finalists.values(), key=lambda f: f.time_ns)
        for place, slower in enumerate(ranked[race_size:], race_size):
            if slower.config == slower.arm.plan.default:
                continue
            slower.built = None
            if place >= KEPT_FINALISTS:
                del self.finalists[slower.arm.template.name, slower.config]

    def contenders(self, race_size: int) -> list[Finalist]:
        """The fastest `race_size` configurations and, always, the fastest default."""
        ranked = sorted(self.finalists.values(), key=lambda f: f.time_ns)
        chosen = ranked[:race_size]
        defaults = [f for f in ranked if f.config == f.arm.plan.default]
        if defaults and defaults[0] not in chosen:
            chosen.append(defaults[0])
        return chosen

    def disqualify(self, finalist: Finalist) -> None:
        """A configuration that failed in the final race: it is neither best nor default any more."""
        del self.finalists[finalist.arm.template.name, finalist.config]
        arm = finalist.arm
        if finalist.config == arm.plan.default:
            arm.default_ns = None
        if finalist.config == arm.best_config:
            rest = [f for f in self.finalists.values() if f.arm is arm]
            best = min(rest, key=lambda f: f.time_ns, default=None)
            arm.best_ns, arm.best_config = (best.time_ns, best.config) if best else (None, None)

    def settle(self, raced: Sequence[Finalist]) -> None:
        """Takes the times of a final race over: they replace those of the search for every arm that took part."""
        self.winner = min(raced, key=lambda f: f.time_ns)
        for arm in {id(f.arm): f.arm for f in raced}.values():
            own = [f for f in raced if f.arm is arm]
            best = min(own, key=lambda f: f.time_ns)
            arm.best_ns, arm.best_config = best.time_ns, best.config
            for finalist in own:
                if finalist.config == arm.plan.default:
                    arm.default_ns = finalist.time_ns
        defaults = [f.time_ns for f in raced if f.config == f.arm.plan.default]
        self._raced_default_ns = min(defaults, default=None)

    def summary(self, target_key: str) -> TaskSummary:
        best = self.winner or self.best
        outcomes = sum((arm.outcomes for arm in self.arms), Counter())
        if duplicates := sum(arm.duplicates for arm in self.arms):
            outcomes["duplicate"] = duplicates
        return TaskSummary(
            workload=self.workload,
            target=target_key,
            template=best.arm.template.name if best else None,
            default_ns=self.default_ns,
            best_ns=best.time_ns if best else None,
            best_config=best.config if best else None,
            trials=self.trials,
            new_trials=self.new_trials,
            outcomes=dict(outcomes),
            seconds=self.seconds,
            arms=tuple(arm.summary() for arm in self.arms),
            best_after_ns=tuple(self.best_after_ns),
            ranking=sum((arm.ranking for arm in self.arms), RankAgreement()),
            illegal=sum(arm.illegal for arm in self.arms),
        )


def choose_arm(tasks: Sequence[TaskState], warm_trials: int) -> tuple[TaskState, Arm] | None:
    """The arm that gets the next trials, None where none is ready.

    First every arm in turn measures its default; then one after the other gets `warm_trials`, so that the later ones can
    profit from what the earlier ones found; then comes the arm with the greatest expected gain times its task's weight.
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
    best_ns = {task.index: task.best_ns for task in tasks}
    return max(arms, key=lambda pair: pair[0].weight * pair[1].gain(best_ns[pair[0].index]))
