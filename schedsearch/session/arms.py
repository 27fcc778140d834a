"""The arms of a tuning run: what each (task, template) pair has tried.

Ownership: an `Arm` and everything in it belong to the main thread, which runs the loop; no other thread changes them. An
`ArmTuner` belongs to the tuners' thread from its first call on: the main thread passes arguments to it and gets values back
(`Answer`, or whether it is finished).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from schedsearch.config import Config
from schedsearch.identity import sha256_hex
from schedsearch.measurement import Outcome
from schedsearch.session.collaborators import TunerFactory, TunerLike
from schedsearch.session.hints import COLD, Results, WarmStart
from schedsearch.session.plan import ArmPlan
from schedsearch.session.ranking import RankAgreement
from schedsearch.session.summary import ArmSummary
from schedsearch.workload import Workload

# An arm's trials before improvement counts: the default and a few more.
WARM_TRIALS = 8
# An arm whose best is e**GAP_SCALE times slower than its task's best has 1/e of the expected gain.
GAP_SCALE = 0.1
# This many proposals in a row that cost no trial (rejected or duplicates) end an arm.
FRUITLESS_PROPOSALS = 256


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
        configs = [proposed[at] for at in self._plan.space.legal_among(proposed)[1].tolist()]
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

    def compare(self, prediction: float, model: int, time_ns: float) -> None:
        """Keeps a measurement together with the prediction of this state of the model."""
        self._ranked.setdefault(model, []).append((prediction, -time_ns))

    def disqualify(self, config: Config, next_best: tuple[Config, float] | None) -> None:
        """A configuration proved wrong in the final race; `next_best` is this arm's fastest other one, and its time."""
        if config == self.plan.default:
            self.default_ns = None
        if config == self.best_config:
            self.best_config, self.best_ns = next_best or (None, None)

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
