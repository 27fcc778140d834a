"""The choice of a range's kernels with builders and a device that do as the test says: budgets, failures, records."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from schedsearch import Workload, load_templates
from schedsearch.config import Config
from schedsearch.deadline import Deadline
from schedsearch.device.detect import detect
from schedsearch.errors import Interrupted, NoValidConfigError
from schedsearch.launch import Artifact, Grid, LaunchPlan, Pointer, Step
from schedsearch.launch_sizes import SizedPlan
from schedsearch.measurement import Measurement, Outcome, Record, Resources
from schedsearch.processes.builder import Builder, BuiltRange, RangeCandidate
from schedsearch.session import plan_tasks
from schedsearch.session.pace import StopSignal
from schedsearch.session.ranges import RangeBudget, RangeChoice, RangeRun, expected_time_ns
from schedsearch.session.summary import RunSummary, Shares
from schedsearch.size_table import SizeTable
from schedsearch.task import range_tasks
from schedsearch.template import Template
from schedsearch.templates.conv2d.cpu import Conv2dCpu

CPU = detect("cpu")
RANGE = Workload.conv2d(n=1, h=5, w=4, c=8, k=8, r=3, s=3, padding=1, dtype="float32").with_dynamic("n", 1, 16)
PLANS = plan_tasks(range_tasks(RANGE), load_templates(["conv2d_cpu"]), CPU)
SUMMARY = RunSummary("run", "db", CPU.key, (), 1.0, Shares(0, 0, 0), "trials")
CONFIGS = PLANS[0].arms[0].space.sample(4, np.random.default_rng(0))
STEPS = (Step("kernel", (Pointer("x"),), Grid(1), 1),)


class World:
    """Store, builder and runner. `serves`: the sizes of a build or its failure; `runs`: the time at a size, or a failure."""

    prepare_s = 0.0

    def __init__(
        self, serves: Callable[[RangeCandidate], Any] = lambda _: RANGE.sizes, runs: Callable[[int], Any] = float
    ) -> None:
        self.serves, self.runs = serves, runs
        self.records: list[Record] = []
        self.done: list[tuple[int, Any]] = []
        self.submitted = 0

    def measured(self, workload: Workload, target: str, template: str, version: int, *_: Any) -> dict[Config, Record]:
        return {
            config: Record(
                workload=workload, target=target, template=template, template_version=version, config=config,
                measurement=Measurement(Outcome.OK, times_ns=(10.0 + number,)),
            )
            for number, config in enumerate(CONFIGS)
        }  # fmt: skip

    def append(self, record: Record, run_so_far: Any = None) -> int:
        self.records.append(record)
        return len(self.records)

    def submit_range(self, candidate: RangeCandidate) -> int:
        found = self.serves(candidate)
        if not isinstance(found, Measurement):
            plan = SizedPlan.of({size: LaunchPlan("cpu", "native", STEPS, {"w": 4 * size}) for size in found})
            config = candidate.config or Config({"rule": candidate.origin})
            found = BuiltRange(
                Artifact(b"", plan.at(candidate.origin)), Resources(), "hash", 0.1, config=config, plan=plan
            )  # fmt: skip
        return self._made(found)

    def submit_reference(self, workload: Workload) -> int:
        return self._made(Measurement(Outcome.REJECTED, message="the reference works on whole arrays"))

    def _made(self, result: Any) -> int:
        self.submitted += 1
        self.done.append((self.submitted, result))
        return self.submitted

    def poll(self, timeout_s: float) -> list[tuple[int, Any]]:
        done, self.done = [*self.done, (-1, None)], []  # and one that the search left
        return done

    def measure(self, workload: Workload, built: BuiltRange, best_ns: float | None) -> Measurement:
        assert built.artifact.plan.workspaces == {"w": 4 * workload.n}
        found = self.runs(workload.n)
        return Measurement(found, message="no") if isinstance(found, Outcome) else Measurement(Outcome.OK, times_ns=(found,))

    def choice(self, budget: RangeBudget, stop: StopSignal | None = None) -> RangeChoice:
        collaborators: Any = (self, self, self)
        stop = stop or StopSignal()
        return RangeChoice(RANGE, PLANS, SUMMARY, RangeRun(*collaborators, CPU, "cold-graph-v1", {}), budget, stop)


def check(table: SizeTable) -> None:
    assert [size for low, high, _ in table.serves for size in range(low, high + 1)] == list(RANGE.sizes)
    for low, high, index in table.serves:
        assert {low, (low + high) // 2, max(low, high - 1), high} <= set(table.kernels[index].verified)


def only(*sizes: int) -> Callable[[RangeCandidate], Any]:
    """Machine code of any configuration serves up to these sizes: each group its own."""
    groups = [range(low + 1, high + 1) for low, high in zip((0, *sizes), sizes)]
    return lambda candidate: next(group for group in groups if candidate.origin in group)


@pytest.mark.parametrize("serves", [only(16), only(4, 16), only(1, 3, 16)])
@pytest.mark.parametrize("trials", [12, 16, 24, 64, 200])
def test_the_choice_keeps_to_its_trials(trials: int, serves: Callable[[RangeCandidate], Any]) -> None:
    world = World(serves)
    choice = world.choice(RangeBudget(trials, 2 * trials // len(PLANS)))
    check(choice.table())
    assert choice.trials == len(world.records) <= 3 * trials - 2 * trials // len(PLANS) * len(PLANS)


def test_four_trials_verify_one_kernel() -> None:
    choice = World().choice(RangeBudget(3, 1))  # 3 * 3 - 5
    check(choice.table())
    assert choice.trials == 4


def test_too_few_trials_leave_no_table_and_lose_no_record() -> None:
    world = World(only(*RANGE.sizes))
    choice = world.choice(RangeBudget(3, 1))
    with pytest.raises(
        NoValidConfigError, match=r"trials did not suffice .*conv2d_cpu serves one n only.* with more trials"
    ):
        choice.table()
    assert choice.trials == len(world.records) == 4


class TwoKinds(World):
    """One configuration is the fastest for few images, another one, of constant time, for many."""

    def measured(self, workload: Workload, *rest: Any) -> dict[Config, Record]:
        found = list(super().measured(workload, *rest).values())
        first = found[:1] if workload.n < 8 else found[1:2]
        return {record.config: record for record in first}

    def measure(self, workload: Workload, built: BuiltRange, best_ns: float | None) -> Measurement:
        return Measurement(Outcome.OK, times_ns=(float(workload.n) if built.config == CONFIGS[0] else 8.0,))


@pytest.mark.parametrize("trials", [12, 24, 64])
def test_few_trials_suffice_to_take_the_fastest_at_both_ends(trials: int) -> None:
    table = TwoKinds().choice(RangeBudget(trials, 2 * trials // len(PLANS))).table()
    assert [table.kernel_for(size).config for size in (1, 16)] == CONFIGS[:2]


@pytest.mark.parametrize(
    ("times_ns", "size", "expected_ns"),
    [
        ({4: 40.0, 8: 60.0}, 4, 40.0),
        ({4: 40.0, 8: 60.0}, 5, 45.0),  # on the line between its neighbours
        ({4: 40.0, 8: 60.0}, 1, 40.0),  # below the smallest: no faster than it
        ({4: 40.0, 8: 60.0}, 16, 120.0),  # beyond the largest: proportional
        ({8: 60.0}, 12, 90.0),
        ({}, 12, math.inf),
    ],
)
def test_times_of_sizes_that_were_not_measured_follow_from_those_that_were(
    times_ns: dict[int, float], size: int, expected_ns: float
) -> None:
    assert expected_time_ns(times_ns, size) == expected_ns


@pytest.mark.parametrize("outcome", [Outcome.WORKER_LOST, Outcome.COMPILE_ERROR, Outcome.COMPILE_TIMEOUT])
def test_a_build_that_fails_costs_one_trial_and_a_record(outcome: Outcome) -> None:
    def serves(candidate: RangeCandidate) -> Any:
        return Measurement(outcome, message="died") if candidate.config == CONFIGS[0] else RANGE.sizes

    world = World(serves)
    choice = world.choice(RangeBudget(64, 25))
    table = choice.table()
    check(table)
    assert all(kernel.config != CONFIGS[0] for kernel in table.kernels)
    failed = [record for record in world.records if record.measurement.outcome is outcome]
    assert len(failed) == len(PLANS) and choice.trials == len(world.records)  # one for each searched size
    assert {record.measurement.mode for record in world.records} == {"cold-graph-v1/n=1..16"}


def test_wrong_values_at_one_size_exclude_a_kernel_everywhere() -> None:
    with pytest.raises(NoValidConfigError, match=r"no configuration runs [^;]*$"):
        World(runs=lambda n: Outcome.WRONG_ANSWER if n == 1 else float(n)).choice(RangeBudget(64, 25)).table()


def test_without_time_the_first_kernel_is_verified_and_nothing_is_compared() -> None:
    choice = World().choice(RangeBudget(deadline=Deadline.within(0.0)))
    check(choice.table())
    assert choice.trials == 4


def test_a_signal_stops_the_choice() -> None:
    stop = StopSignal()
    stop.requested = True
    with pytest.raises(Interrupted, match="the search is saved"):
        World().choice(RangeBudget(64, 25), stop).table()


class Deadly(Conv2dCpu):
    name = "deadly"

    def kernel(self, workload, target, config):  # type: ignore[no-untyped-def]
        if workload.n == 3:
            os._exit(3)
        raise ValueError(f"not for n = {workload.n}")


class Picky(Conv2dCpu):
    name = "picky"

    def kernel(self, workload, target, config):  # type: ignore[no-untyped-def]
        if workload.n == 2:
            raise ValueError("not for 2")
        return super().kernel(workload, target, config)


def test_templates_that_raise_or_die_in_a_builder_are_outcomes() -> None:
    small = RANGE.workload.with_dynamic("n", 1, 3)
    cases: list[tuple[Template, int]] = [(Deadly(), 3), (Picky(), 1), (Picky(), 2)]
    with Builder(CPU, workers=1) as builder:
        tokens = [builder.submit_range(RangeCandidate(small, template, None, origin)) for template, origin in cases]
        made = dict(builder.drain())
    died, served, raised = (made[token] for token in tokens)
    assert isinstance(died, Measurement) and died.outcome is Outcome.WORKER_LOST
    assert isinstance(served, BuiltRange) and served.plan.sizes == (1, 3)
    assert isinstance(raised, Measurement) and raised.outcome is Outcome.COMPILE_ERROR and "not for 2" in raised.message
