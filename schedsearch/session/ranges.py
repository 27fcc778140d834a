"""The kernels of a range of sizes: chosen from what a search of some of its sizes found.

A search tunes the sizes of `WorkloadRange.samples` as tasks that learn from each other. Then builders compile the fastest
configurations of each again, to machine code that takes the size at run time. These are measured at their own sizes first,
then at the searched sizes around and between them, as long as they are near the best time there. The kernel of a size is the
one with the least time there, interpolated between the measured sizes. At last each kernel is verified and timed at both
ends of every stretch of sizes that it serves, just before its end, and in its middle.

See docs/decisions/149-choices-of-ranges.md.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from schedsearch.config import Config
from schedsearch.deadline import NEVER, Deadline
from schedsearch.errors import Interrupted, NoValidConfigError, OperatorError, PreparationError
from schedsearch.launch import Artifact
from schedsearch.measurement import Measurement, Outcome, Record
from schedsearch.processes.builder import Built, BuiltRange, RangeCandidate
from schedsearch.records.store import Store
from schedsearch.records.writes import put_size_table
from schedsearch.session.collaborators import RangeBuilderLike, RunnerLike
from schedsearch.session.pace import StopSignal
from schedsearch.session.plan import FEWEST_TO_VERIFY, TaskPlan, ranges_of, trials_to_choose
from schedsearch.session.summary import RangeSummary, RunSummary
from schedsearch.size_table import SizedKernel, SizeTable, served
from schedsearch.target import Target
from schedsearch.template import Template
from schedsearch.workload import WorkloadRange, between

_BEST_OF_EACH = 4  # configurations of a sampled size that are tried on others
_HOPELESS = 1.3  # times the best: then sizes farther away are not tried
_STICKY = 1.02  # times the best: then the neighbour's kernel serves, so that there are fewer stretches
_OVERTIME_S = 2.0  # to verify what was chosen
_ROUNDS = 4  # after which measurements change the choice only if a kernel fails


@dataclass(frozen=True)
class RangeBudget:
    """What the ranges of a run may take.

    Attributes:
        trials: the budget of one size; None: no limit.
        searched: the budget of each searched size in the search.
        deadline: after it candidates are no longer compared.
        patient: whether the kernels of the first range are chosen however long it takes; other ranges are given up when the
            deadline has passed.
    """

    trials: int | None = None
    searched: int | None = None
    deadline: Deadline = NEVER
    patient: bool = True

    def to_choose(self, sizes: int) -> float:
        """Trials for the choice of the kernels of one range, of which the search tried so many sizes."""
        if self.trials is None or self.searched is None:
            return math.inf
        return trials_to_choose(self.trials, self.searched, sizes)

    def share(self, ranges: int) -> RangeBudget:
        """That of the next of so many ranges, among which the time that is left is divided."""
        return replace(self, deadline=self.deadline.share(1 / ranges))

    @property
    def out_of_time(self) -> bool:
        return self.deadline.passed

    @property
    def is_over(self) -> bool:
        return not self.patient and self.deadline.before(-_OVERTIME_S).passed


@dataclass(frozen=True)
class _Wanted:
    """What to build for the sizes that share code with `origin`. Without a configuration, the rule-based one."""

    origin: int
    template: Template
    config: Config | None


@dataclass(eq=False)
class _Candidate:
    """Machine code for several sizes, and what is known about it."""

    template: Template
    origin: int
    built: BuiltRange
    times_ns: dict[int, float] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    wrong: bool = False

    def serves(self, size: int) -> bool:
        return bool(self.times_ns) and not self.wrong and size in self.built.plan.sizes and size not in self.failed

    def expected_ns(self, size: int) -> float:
        return expected_time_ns(self.times_ns, size)


def expected_time_ns(times_ns: Mapping[int, float], size: int) -> float:
    """The time at a size: measured, or on the line between measured neighbours, or proportional beyond the largest. Infinite
    if nothing was measured."""
    known = sorted(times_ns)
    below = [each for each in known if each <= size]
    above = [each for each in known if each >= size]
    if below and above:
        one, other = below[-1], above[0]
        share = (size - one) / (other - one) if other > one else 0.0
        return times_ns[one] + share * (times_ns[other] - times_ns[one])
    if above:
        return times_ns[above[0]]
    return times_ns[below[-1]] * size / below[-1] if below else math.inf


@dataclass(frozen=True)
class RangeRun:
    """The run that ranges belong to: its collaborators, its device, the mode of timing, and versions for records."""

    store: Store
    builder: RangeBuilderLike
    runner: RunnerLike
    target: Target
    mode: str
    toolchain: dict[str, str]


class RangeChoice:
    """Chooses the kernels of one range.

    Every candidate that is built or measured is a trial, unless it is rejected before the device sees it, and becomes a
    record in the mode `range_mode`.

    Args:
        plans: of the sizes that were searched.
        summary: of the search.
        run: where candidates are built, measured and kept.
        stop: tells whether the user wants the run to end.
    """

    def __init__(
        self,
        of_range: WorkloadRange,
        plans: Sequence[TaskPlan],
        summary: RunSummary,
        run: RangeRun,
        budget: RangeBudget,
        stop: StopSignal,
    ) -> None:
        self._range, self._plans, self._summary, self._run = of_range, plans, summary, run
        self._builder, self._runner = run.builder, run.runner
        self._budget, self._stop = budget, stop
        self._most_trials = budget.to_choose(len(plans))
        verifying = max(FEWEST_TO_VERIFY, min(FEWEST_TO_VERIFY * len(plans), self._most_trials // 2))
        self._most_compared = self._most_trials - verifying
        self._candidates: list[_Candidate] = []
        self._tried: set[tuple[str, Config | None, int]] = set()
        self._prepared: set[int] = set()
        self.trials = 0

    def table(self) -> SizeTable:
        """Builds, measures, chooses and verifies.

        Raises:
            NoValidConfigError: no configuration runs some size, or the trials did not suffice to verify the kernels.
            Interrupted: the user stopped the run.
            OperatorError, PreparationError: as `Runner.measure`.
        """
        samples = self._range.samples()
        sizes = sorted({*samples, *between(samples)})
        for row in self._ranked():
            made = []
            for candidate in self._built(row):
                if not (self._compared and self._covered()):
                    self._measure(candidate, candidate.origin)
                    made.append(candidate)
            self._try_elsewhere(made, sizes)
            if self._compared and self._covered():
                break
        self._cover()
        choice = self._verified_choice()
        used = list(dict.fromkeys(choice[size] for size in sorted(choice)))
        kernels = tuple(
            SizedKernel(
                each.template.name, each.template.version, each.built.config, each.built.artifact.code, each.built.plan,
                each.times_ns,
            )
            for each in used
        )  # fmt: skip
        serves = served({size: used.index(each) for size, each in choice.items()})
        return SizeTable(self._range.low, self._range.high, kernels, serves, self._specialised_ns(), self.trials)

    def _specialised_ns(self) -> dict[int, float]:
        best_ns = {task.workload: task.best_ns for task in self._summary.tasks}
        times = {size: best_ns.get(self._range.at(size)) for size in self._range.samples()}
        return {size: time_ns for size, time_ns in times.items() if time_ns is not None}

    @property
    def _compared(self) -> bool:
        """Whether trials or time are used up but for those that cover all sizes and verify the choice."""
        return self.trials >= self._most_compared or self._budget.out_of_time

    # Candidates

    def _ranked(self) -> Iterator[list[_Wanted]]:
        """The fastest configuration of each sampled size, then the second of each, and so on."""
        columns = []
        for plan in self._plans:
            found: list[tuple[float, Template, Config]] = []
            for arm in plan.arms:
                template = arm.template
                records = self._run.store.measured(
                    plan.task.workload,
                    self._run.target.key,
                    template.name,
                    template.version,
                    self._run.mode,
                    self._run.toolchain,
                )
                times = ((record.measurement.time_ns, config) for config, record in arm.known(records).items())
                found += [(time_ns, template, config) for time_ns, config in times if time_ns is not None]
            found.sort(key=lambda each: each[0])
            size = plan.task.workload.params[self._range.parameter]
            columns.append([_Wanted(size, template, config) for _, template, config in found[:_BEST_OF_EACH]])
        for row in itertools.zip_longest(*columns):
            yield [each for each in row if each is not None]

    def _built(self, wanted: Sequence[_Wanted]) -> Iterator[_Candidate]:
        """Candidates from the builders. What failed, or is known, is left out."""
        while wanted := [each for each in wanted if not self._known(each)]:
            # Of one configuration only one size at a time: its machine code may serve the others, too.
            first = {(each.template.name, each.config): each for each in reversed(wanted)}
            now = list(first.values())[::-1][: max(1, int(min(len(first), self._most_trials - self.trials)))]
            self._spend(0)
            tokens = {}
            for each in now:
                self._tried.add((each.template.name, each.config, each.origin))
                restrict = self._plans[0].task.restrict
                candidate = RangeCandidate(self._range, each.template, each.config, each.origin, restrict)
                tokens[self._builder.submit_range(candidate)] = each
            made = {tokens[token]: result for token, result in self._results(tokens)}
            for each in now:
                result = made[each]
                if isinstance(result, BuiltRange):
                    candidate_made = _Candidate(each.template, each.origin, result)
                    self._candidates.append(candidate_made)
                    yield candidate_made
                elif isinstance(result, Measurement):
                    self.trials += result.outcome.is_trial
                    if each.config is not None:
                        self._keep(each.template, each.config, each.origin, result)

    def _known(self, wanted: _Wanted) -> bool:
        if (wanted.template.name, wanted.config, wanted.origin) in self._tried:
            return True
        return any(
            each.template.name == wanted.template.name
            and each.built.config == wanted.config
            and wanted.origin in each.built.plan.sizes
            for each in self._candidates
        )

    def _results(self, tokens: Mapping[int, object]) -> list[tuple[int, Built | Measurement]]:
        """Waits for what builders make. They are idle then, so that they do not disturb measurements on a CPU."""
        found: list[tuple[int, Built | Measurement]] = []
        while len(found) < len(tokens):
            self._check_stop()
            found += [each for each in self._builder.poll(0.5) if each[0] in tokens]  # the search may have left others
        return found

    def _prepare(self, sizes: Sequence[int]) -> None:
        """Builders compile the references of these sizes; otherwise the runner would, one after another."""
        new = [size for size in sizes if size not in self._prepared]
        self._prepared.update(new)
        tokens = {self._builder.submit_reference(self._range.at(size)): size for size in new}
        for token, result in self._results(tokens):
            if not isinstance(result, Measurement):
                self._runner.learn_reference(self._range.at(tokens[token]), result.artifact)

    def _covered(self) -> bool:
        return all(any(each.serves(size) for each in self._candidates) for size in self._range.sizes)

    def _cover(self) -> None:
        """Makes kernels of rule-based configurations for sizes that no candidate serves."""
        for size in self._range.sizes:
            for template in dict.fromkeys(arm.template for plan in self._plans for arm in plan.arms):
                if any(each.serves(size) for each in self._candidates):
                    break
                for candidate in self._built([_Wanted(size, template, None)]):
                    self._measure(candidate, size)
            self._able(size)

    def _able(self, size: int) -> list[_Candidate]:
        """The candidates that run a size. Raises NoValidConfigError if there is none."""
        able = [each for each in self._candidates if each.serves(size)]
        if not able:
            raise NoValidConfigError(f"no configuration runs {self._range.at(size).label}")
        return able

    # Measuring

    def _try_elsewhere(self, candidates: Sequence[_Candidate], sizes: Sequence[int]) -> None:
        """Measures candidates farther and farther away from their origins, each in one direction until it is hopeless. They
        take turns, so that a small budget is not spent on one of them."""
        ways = [
            (candidate, iter(way))
            for candidate in candidates
            for way in (
                [size for size in sizes if size > candidate.origin],
                [size for size in reversed(sizes) if size < candidate.origin],
            )
        ]
        while ways and not self._compared:
            ways = [(candidate, way) for candidate, way in ways if self._goes_on(candidate, next(way, None))]

    def _goes_on(self, candidate: _Candidate, size: int | None) -> bool:
        """Measures a candidate at a size, and whether it may be the fastest farther away."""
        if size is None or self._compared or candidate.wrong or size not in candidate.built.plan.sizes:
            return False
        self._measure(candidate, size)
        time_ns = candidate.times_ns.get(size)
        return time_ns is not None and time_ns <= _HOPELESS * self._best_ns(size)

    def _measure(self, candidate: _Candidate, size: int) -> None:
        if size in candidate.times_ns or size in candidate.failed or candidate.wrong:
            return
        self._spend(1)
        self._prepare([size])
        built = replace(candidate.built, artifact=Artifact(candidate.built.artifact.code, candidate.built.plan.at(size)))
        measured = self._runner.measure(self._range.at(size), built, None)
        self._keep(candidate.template, candidate.built.config, size, measured)
        if measured.ok and measured.time_ns is not None:
            candidate.times_ns[size] = measured.time_ns
        else:
            candidate.failed.add(size)
            candidate.wrong = candidate.wrong or measured.outcome is Outcome.WRONG_ANSWER

    def _spend(self, trials: int) -> None:
        """Raises if so many trials or no time are left, or the user stops the run."""
        self._check_stop()
        if self._budget.is_over:
            raise NoValidConfigError(f"the time was over before kernels were chosen for {self._range.label}")
        if self.trials + max(trials, 1) > self._most_trials:
            raise NoValidConfigError(
                f"{self.trials} trials did not suffice to choose and verify kernels for {self._range.label}; {self._remedy}"
            )
        self.trials += trials

    @property
    def _remedy(self) -> str:
        found, name = self._candidates, self._range.parameter
        if found and all(len(each.built.plan.sizes) == 1 for each in found):
            templates = ", ".join(sorted({each.template.name for each in found}))
            return (
                f"machine code of {templates} serves one {name} only, so that every {name} needs a kernel: tune those "
                "that you need as tasks of their own, or tune again with more trials"
            )
        return "tune again with more trials"

    def _check_stop(self) -> None:
        if self._stop.requested:
            raise Interrupted(
                "interrupted while kernels for ranges of sizes were chosen; the search is saved: tune again", self._summary
            )

    def _keep(self, template: Template, config: Config, size: int, measured: Measurement) -> None:
        now = time.time()
        record = Record(
            workload=self._range.at(size),
            target=self._run.target.key,
            template=template.name,
            template_version=template.version,
            config=config,
            measurement=replace(measured, mode=range_mode(self._run.mode, self._range)),
            toolchain=self._run.toolchain,
            run=self._summary.run,
            started_at=now - measured.run_s,
            finished_at=now,
        )
        self._run.store.append(record)

    def _best_ns(self, size: int) -> float:
        """The least time at a measured size: of any candidate, or of machine code for this size alone in the search."""
        measured = [each.times_ns[size] for each in self._candidates if size in each.times_ns]
        return min([*measured, expected_time_ns(self._specialised_ns(), size)])

    # Choosing

    def _choice(self) -> dict[int, _Candidate]:
        """The candidate for each size: the fastest, or the neighbour's if it is nearly as fast."""
        chosen: dict[int, _Candidate] = {}
        before: _Candidate | None = None
        for size in self._range.sizes:
            able = self._able(size)
            best = min(able, key=lambda each: each.expected_ns(size))
            stays = before in able and before.expected_ns(size) <= _STICKY * best.expected_ns(size)
            before = chosen[size] = before if stays and before is not None else best
        return chosen

    def _simplest_choice(self) -> dict[int, _Candidate]:
        """As few stretches of sizes as possible: there is little to verify."""
        chosen: dict[int, _Candidate] = {}
        before: _Candidate | None = None
        for size in self._range.sizes:
            able = self._able(size)
            if before not in able:
                before = max(able, key=lambda each: (self._reach(each, size), -each.expected_ns(size)))
            assert before is not None
            chosen[size] = before
        return chosen

    def _reach(self, candidate: _Candidate, size: int) -> int:
        """The largest size up to which a candidate serves all sizes from this one."""
        return next((each - 1 for each in range(size, self._range.high + 1) if not candidate.serves(each)), self._range.high)

    def _verified_choice(self) -> dict[int, _Candidate]:
        """A choice whose kernels were verified at both ends of each stretch of sizes, before its end, and in its middle."""
        choice = self._choice()
        for number in itertools.count():
            if not self._affordable(choice):
                choice = self._simplest_choice()
            failures = self._failures
            new = _unverified(choice)
            if not new:
                return choice
            self._prepare([size for _, size in new])
            for candidate, size in new:
                self._measure(candidate, size)
            if self._failures > failures:
                self._cover()
                choice = self._choice()
            elif number < _ROUNDS and not self._budget.out_of_time and self._affordable(better := self._choice()):
                choice = better
        raise AssertionError

    def _affordable(self, choice: Mapping[int, _Candidate]) -> bool:
        """Whether enough trials are left to verify a choice."""
        return len(_unverified(choice)) <= self._most_trials - self.trials

    @property
    def _failures(self) -> int:
        return sum(len(each.failed) + each.wrong for each in self._candidates)


def _unverified(choice: Mapping[int, _Candidate]) -> list[tuple[_Candidate, int]]:
    order = list(dict.fromkeys(choice.values()))
    stretches = served({size: order.index(each) for size, each in choice.items()})
    wanted = {size for low, high, _ in stretches for size in (low, (low + high) // 2, max(low, high - 1), high)}
    return [(choice[size], size) for size in sorted(wanted) if size not in choice[size].times_ns]


def range_mode(mode: str, of_range: WorkloadRange) -> str:
    """The mode of records of machine code that takes a size at run time. They are never compared with those of `mode`."""
    return f"{mode}/{of_range.parameter}={of_range.low}..{of_range.high}"


def choose_kernels(
    summary: RunSummary,
    plans: Sequence[TaskPlan],
    run: RangeRun,
    budget: RangeBudget,
) -> RunSummary:
    """Chooses and stores the kernels of each range of a run, after its search; returns the summary with them.

    Raises:
        Interrupted: the user stopped the run; ranges that were done are stored.
    """
    found: list[RangeSummary] = []
    with StopSignal() as stop:
        ranges = ranges_of(plans)
        for of_range, own in ranges.items():
            own_budget = replace(budget.share(len(ranges) - len(found)), patient=budget.patient and not found)
            choice = RangeChoice(of_range, own, summary, run, own_budget, stop)
            try:
                table = choice.table()
            except (NoValidConfigError, OperatorError, PreparationError) as error:
                found.append(RangeSummary(of_range, None, choice.trials, str(error)))
                continue
            put_size_table(run.store.database, of_range, run.target.key, run.mode, table)
            found.append(RangeSummary(of_range, table, choice.trials))
    return replace(summary, ranges=tuple(found))
