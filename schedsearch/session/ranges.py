"""The kernels of a range of sizes: chosen from what a search of some of its sizes found.

A search tunes the sizes of `WorkloadRange.samples` as tasks that learn from each other. Then the fastest configurations of
each are compiled again, to machine code that takes the size at run time, and measured at these sizes and between them. The
kernel of a size is the one with the least time there, interpolated between the measured sizes. At last each kernel is
verified and timed at the ends of every stretch of sizes that it serves, just before the end, and in the middle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from schedsearch.backend import CompileError, RejectedError, compile_source
from schedsearch.backend.relaunch import relaunched
from schedsearch.backend.run_time import shared_code
from schedsearch.config import Config
from schedsearch.errors import NoValidConfigError, SchedsearchError
from schedsearch.launch import Artifact
from schedsearch.launch_sizes import SizedPlan
from schedsearch.measure.builder import Built
from schedsearch.measurement import Outcome
from schedsearch.records.store import Store
from schedsearch.records.writes import put_size_table
from schedsearch.session.collaborators import RunnerLike
from schedsearch.session.plan import TaskPlan, ranges_of
from schedsearch.session.summary import RangeSummary, RunSummary
from schedsearch.size_table import SizedKernel, SizeTable, served
from schedsearch.space import ConfigSpace
from schedsearch.target import Target
from schedsearch.template import KernelSource, Template
from schedsearch.workload_range import WorkloadRange, between

_BEST_OF_EACH = 4  # configurations of a sampled size that are tried on others
_VERIFIED_OF_EACH = 4  # measurements of each stretch of sizes
_HOPELESS = 1.5  # times the best: then sizes farther away are not tried
_STICKY = 1.02  # times the best: then the neighbour's kernel serves, so that there are fewer stretches
_ROUNDS = 4  # after which measurements change the choice only if a kernel fails


@dataclass(eq=False)
class _Candidate:
    """Machine code for several sizes, and what is known about it."""

    template: Template
    config: Config
    origin: int
    built: Built
    plan: SizedPlan
    times_ns: dict[int, float] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    wrong: bool = False

    def serves(self, size: int) -> bool:
        return bool(self.times_ns) and not self.wrong and size in self.plan.sizes and size not in self.failed

    def expected_ns(self, size: int) -> float:
        """The time at a size: measured, or on the line between measured neighbours, or proportional beyond the largest."""
        known = sorted(self.times_ns)
        below = [each for each in known if each <= size]
        above = [each for each in known if each >= size]
        if below and above:
            one, other = below[-1], above[0]
            share = (size - one) / (other - one) if other > one else 0.0
            return self.times_ns[one] + share * (self.times_ns[other] - self.times_ns[one])
        return self.times_ns[above[0]] if above else self.times_ns[below[-1]] * size / below[-1]


class RangeChoice:
    """Chooses the kernels of one range.

    Args:
        plans: of the sizes that were searched.
        mode: of timing.
        budget: measurements that candidates may take before the choice is verified.
    """

    def __init__(
        self,
        of_range: WorkloadRange,
        plans: Sequence[TaskPlan],
        store: Store,
        runner: RunnerLike,
        target: Target,
        mode: str,
        budget: int,
    ) -> None:
        self._range, self._plans, self._store, self._runner = of_range, plans, store, runner
        self._target, self._mode, self._budget = target, mode, budget
        self._spaces: dict[tuple[str, int], ConfigSpace | None] = {}
        self._candidates: list[_Candidate] = []
        self._known: set[tuple[str, Config, int]] = set()
        self.trials = 0

    def table(self, specialised_ns: Mapping[int, float]) -> SizeTable:
        """Measures, chooses and verifies.

        Raises:
            NoValidConfigError: no configuration runs some size.
            OperatorError, PreparationError: as `Runner.measure`.
        """
        samples = self._range.samples()
        sizes = sorted({*samples, *between(samples)})
        for origin, template, config in self._ranked():
            if self.trials >= self._budget and self._covered():
                break
            for candidate in self._made(template, config, origin):
                self._try(candidate, sizes)
        self._cover()
        choice = self._verified_choice()
        used = list(dict.fromkeys(choice[size] for size in sorted(choice)))
        kernels = tuple(
            SizedKernel(
                each.template.name, each.template.version, each.config, each.built.artifact.code, each.plan, each.times_ns
            )
            for each in used
        )
        serves = served({size: used.index(each) for size, each in choice.items()})
        return SizeTable(self._range.low, self._range.high, kernels, serves, dict(specialised_ns), self.trials)

    # Candidates

    def _ranked(self) -> Iterator[tuple[int, Template, Config]]:
        """The fastest configuration of each sampled size, then the second of each, and so on."""
        columns = []
        for plan in self._plans:
            found: list[tuple[float, Template, Config]] = []
            for arm in plan.arms:
                template = arm.template
                records = self._store.measured(
                    plan.task.workload, self._target.key, template.name, template.version, self._mode
                )
                times = ((record.measurement.time_ns, config) for config, record in records.items())
                found += [(time_ns, template, config) for time_ns, config in times if time_ns is not None]
            found.sort(key=lambda each: each[0])
            size = plan.task.workload.params[self._range.parameter]
            columns.append([(size, template, config) for _, template, config in found[:_BEST_OF_EACH]])
        for row in itertools.zip_longest(*columns):
            yield from (each for each in row if each is not None)

    def _made(self, template: Template, config: Config, origin: int) -> Iterator[_Candidate]:
        """The machine code of a configuration for the sizes that share it with `origin`; none if that is known or fails."""
        if any(
            each.template is template and each.config == config and origin in each.plan.sizes for each in self._candidates
        ):
            return
        if (template.name, config, origin) in self._known:
            return
        self._known.add((template.name, config, origin))
        group = next((each for each in shared_code(self._sources(template, config)) if origin in each), None)
        if group is None:
            return
        try:
            made = compile_source(group[origin], self._target)
            launched = {size: relaunched(made.artifact, group[origin], source) for size, source in group.items()}
            plans = {size: artifact.plan for size, artifact in launched.items() if artifact is not None}
            sized = SizedPlan.of(plans)
        except (CompileError, RejectedError, ValueError):
            return  # the compiler needs the size, or a launch has another form: the configuration serves no range
        built = Built(made.artifact, made.resources, made.canonical_hash, made.compile_s)
        candidate = _Candidate(template, config, origin, built, sized)
        self._candidates.append(candidate)
        yield candidate

    def _sources(self, template: Template, config: Config) -> dict[int, KernelSource]:
        """The kernels of the sizes for which the configuration is legal."""
        sources = {}
        for size in self._range.sizes:
            space = self._space(template, size)
            if space is not None and not space.check(config):
                sources[size] = template.kernel(self._range.at(size), self._target, config)
        return sources

    def _space(self, template: Template, size: int) -> ConfigSpace | None:
        key = template.name, size
        if key not in self._spaces:
            workload = self._range.at(size)
            refused = template.validate(workload, self._target)
            self._spaces[key] = None if refused else template.space(workload, self._target)
        return self._spaces[key]

    def _covered(self) -> bool:
        return all(any(each.serves(size) for each in self._candidates) for size in self._range.sizes)

    def _cover(self) -> None:
        """Makes kernels of rule-based configurations for sizes that no candidate serves."""
        for size in self._range.sizes:
            for template in dict.fromkeys(arm.template for plan in self._plans for arm in plan.arms):
                if any(each.serves(size) for each in self._candidates):
                    break
                space = self._space(template, size)
                if space is not None:
                    config = template.default(self._range.at(size), self._target, space)
                    for candidate in self._made(template, config, size):
                        self._measure(candidate, size)
            if not any(each.serves(size) for each in self._candidates):
                raise NoValidConfigError(f"no configuration runs {self._range.at(size).label}")

    # Measuring

    def _try(self, candidate: _Candidate, sizes: Sequence[int]) -> None:
        """Measures a candidate at its origin and, as long as it is not hopeless, farther and farther away."""
        up = [size for size in sizes if size >= candidate.origin]
        down = [size for size in reversed(sizes) if size < candidate.origin]
        for way in (up, down):
            for size in way:
                enough = self.trials >= self._budget and size != candidate.origin
                if enough or candidate.wrong or size not in candidate.plan.sizes:
                    break
                self._measure(candidate, size)
                time_ns = candidate.times_ns.get(size)
                if time_ns is None or time_ns > _HOPELESS * self._best_ns(size):
                    break

    def _measure(self, candidate: _Candidate, size: int) -> None:
        if size in candidate.times_ns or size in candidate.failed or candidate.wrong:
            return
        built = replace(candidate.built, artifact=Artifact(candidate.built.artifact.code, candidate.plan.at(size)))
        measured = self._runner.measure(self._range.at(size), built, None)
        self.trials += 1
        if measured.ok and measured.time_ns is not None:
            candidate.times_ns[size] = measured.time_ns
        else:
            candidate.failed.add(size)
            candidate.wrong = candidate.wrong or measured.outcome is Outcome.WRONG_ANSWER

    def _best_ns(self, size: int) -> float:
        return min(each.times_ns[size] for each in self._candidates if size in each.times_ns)

    # Choosing

    def _choice(self) -> dict[int, _Candidate]:
        """The candidate for each size: the fastest, or the neighbour's if it is nearly as fast."""
        chosen: dict[int, _Candidate] = {}
        before: _Candidate | None = None
        for size in self._range.sizes:
            able = [each for each in self._candidates if each.serves(size)]
            if not able:
                raise NoValidConfigError(f"no configuration runs {self._range.at(size).label}")
            best = min(able, key=lambda each: each.expected_ns(size))
            stays = before in able and before.expected_ns(size) <= _STICKY * best.expected_ns(size)
            before = chosen[size] = before if stays and before is not None else best
        return chosen

    def _verified_choice(self) -> dict[int, _Candidate]:
        """A choice whose kernels were verified at both ends of each stretch of sizes, before its end, and in its middle."""
        choice = self._choice()
        for number in itertools.count():
            failures = sum(len(each.failed) + each.wrong for each in self._candidates)
            new = [(choice[size], size) for size in _verified_sizes(choice) if size not in choice[size].times_ns]
            if not new:
                return choice
            for candidate, size in new:
                self._measure(candidate, size)
            failed = sum(len(each.failed) + each.wrong for each in self._candidates) > failures
            if failed:
                self._cover()
            if failed or number < _ROUNDS:
                choice = self._choice()
        raise AssertionError


def _verified_sizes(choice: Mapping[int, _Candidate]) -> list[int]:
    order = list(dict.fromkeys(choice.values()))
    stretches = served({size: order.index(each) for size, each in choice.items()})
    wanted = {size for low, high, _ in stretches for size in (low, (low + high) // 2, max(low, high - 1), high)}
    return sorted(wanted)


def choose_kernels(
    summary: RunSummary,
    plans: Sequence[TaskPlan],
    store: Store,
    runner: RunnerLike,
    target: Target,
    mode: str,
    trials: int | None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[RangeSummary, ...]:
    """Chooses and stores the kernels of each range of a run, after its search.

    Args:
        trials: the budget of one size; None: no limit.
    """
    best_ns = {task.workload: task.best_ns for task in summary.tasks}
    found = []
    for of_range, own in ranges_of(plans).items():
        say(f"choosing kernels for {of_range.label}")
        times = {plan.task.workload.params[of_range.parameter]: best_ns.get(plan.task.workload) for plan in own}
        specialised = {size: time_ns for size, time_ns in times.items() if time_ns is not None}
        budget = max(len(own), (trials or 10**9) - _VERIFIED_OF_EACH * len(own))
        choice = RangeChoice(of_range, own, store, runner, target, mode, budget)
        try:
            table = choice.table(specialised)
        except SchedsearchError as error:
            found.append(RangeSummary(of_range, None, choice.trials, str(error)))
            continue
        put_size_table(store.database, of_range, target.key, mode, table)
        found.append(RangeSummary(of_range, table, choice.trials))
    return tuple(found)
