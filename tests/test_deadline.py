"""A time that a caller gives is wall time until the answer: what has no time left takes its default, and that is said.

The clocks here are made up: no test waits, and none compares times.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import network_support
import pytest
from session_support import OTHER, WORKLOAD, FakeBuilder, World, square_ns

import schedsearch
from schedsearch.backend.code_cache import CodeCache
from schedsearch.deadline import NEVER, Deadline
from schedsearch.errors import DeviceBusyError, OutOfTimeError
from schedsearch.executable import planned, timely
from schedsearch.executable.build_options import BuildOptions
from schedsearch.executable.kernels import find_kernels
from schedsearch.executable.timely import TUNED
from schedsearch.measure.lock import DeviceLock
from schedsearch.measurement import COLD_GRAPH, Outcome
from schedsearch.processes.builder import Builder
from schedsearch.runtime.ahead import compile_ahead
from schedsearch.runtime.cache import KernelCache
from schedsearch.session import journal
from schedsearch.session.task_state import LATE

CONVOLUTION = schedsearch.conv2d(n=1, h=6, w=6, c=8, k=8, r=1, s=1, dtype="float32")


class Clock:
    """A clock that each look at it moves on."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


# --- The deadline itself ----------------------------------------------------------------------------------------------
def test_a_deadline_is_a_moment_that_shares_are_taken_of() -> None:
    clock = Clock()
    deadline = Deadline.within(10.0, clock)
    assert deadline.left_s == 10.0 and not deadline.passed
    clock.now_s = 4.0
    assert deadline.left_s == 6.0 and deadline.share(0.5).ends_s == 7.0 and deadline.before(1.0).ends_s == 9.0
    clock.now_s = 10.0
    assert deadline.left_s == 0.0 and deadline.passed and deadline.share(0.5).passed


def test_without_a_time_there_is_no_deadline() -> None:
    for never in (NEVER, Deadline.within(None), NEVER.share(0.5), NEVER.before(5.0)):
        assert never.left_s == math.inf and not never.passed


# --- Compiling --------------------------------------------------------------------------------------------------------
def test_what_is_not_compiled_in_time_is_left_out() -> None:
    code, target = CodeCache(), schedsearch.detect("cpu")
    from schedsearch.runtime.ahead import verifying_recipes

    recipes = verifying_recipes(schedsearch.conv2d(n=1, h=5, w=7, c=3, k=5, r=3, s=3, dtype="float32"), target)
    assert recipes and compile_ahead(recipes, code, target, Deadline(0.0, Clock())) == {}
    assert all(each.name not in code and code.refusal(each.name) is None for each in recipes)


def test_a_builder_is_drained_until_the_deadline() -> None:
    with Builder(schedsearch.detect("cpu"), 1) as builder:
        builder.submit_reference(CONVOLUTION)
        assert builder.drain(Deadline(0.0, Clock())) == [] and builder.pending == 1


def test_kernels_that_cannot_be_built_in_time_are_counted(tmp_path: Path) -> None:
    with pytest.raises(OutOfTimeError, match="no time left to build 1 of 1 kernel; what was compiled is kept"):
        find_kernels([CONVOLUTION], tmp_path / "none.db", schedsearch.detect("cpu"), deadline=Deadline(0.0, Clock()))


# --- Building ---------------------------------------------------------------------------------------------------------
class FakeBuild:
    """Costs that are made up: what is done moves the clock on.

    Attributes:
        kernel_s: of compiling and verifying one kernel.
        records: workloads that tuning gave a record.
        found: for each call that looked for kernels: how many were compiled and verified, and how many come from records.
        tuned_s: how long each run of tuning had.
        tasks: what it tuned.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kernel_s: float) -> None:
        self.clock, self.kernel_s = Clock(), kernel_s
        self.records: set[Any] = set()
        self.found: list[tuple[int, int]] = []
        self.tuned_s: list[float] = []
        self.tasks: list[Any] = []
        self.said: list[str] = []
        monkeypatch.setattr(planned, "find_kernels", self._find)
        monkeypatch.setattr(planned, "tuned", self._tune)

    def _find(self, workloads: list[Any], *, known: Any = None, deadline: Deadline = NEVER, **options: Any) -> Any:
        made = [each for each in workloads if each not in self.records and each not in (known or {})]
        for _ in made:
            if deadline.passed:
                raise OutOfTimeError("there was no time left")
            self.clock.now_s += self.kernel_s
        self.found.append((len(made), len(self.records & set(workloads))))
        return {each: "tuned" if each in self.records else "default" for each in workloads}

    def _tune(self, tasks: list[Any], db: Path, target: Any, mode: str, until: Deadline, say: Any) -> Any:
        self.tuned_s.append(until.left_s)
        self.tasks += tasks
        self.clock.now_s = until.ends_s
        self.records |= {task.workload for task in tasks}
        return "done"

    def build(self, seconds: float, follows_s: float, patient: bool = True) -> dict[Any, str]:
        """Kernels of a network of two convolutions, within so many seconds of which the last are for what follows."""
        network, target = network_support.two_convolutions(), schedsearch.detect("cpu")
        deadline = Deadline.within(seconds, self.clock)
        options = BuildOptions.of(
            deadline, target=target, db="none.db", tunes=True, patient=patient, say=self.said.append
        )  # fmt: skip
        _, kernels = planned.with_kernels(network, options, deadline.before(follows_s))
        return dict(kernels)


def test_slow_kernels_leave_no_time_to_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need as long as there is, up to what must follow."""
    build = FakeBuild(monkeypatch, kernel_s=10.0)
    kernels = build.build(seconds=30.0, follows_s=10.0)
    assert len(kernels) > 1 and set(kernels.values()) == {"default"} and build.tuned_s == []
    assert build.found == [(len(kernels), 0)], "each is compiled and verified once"
    assert build.said[0] == f"{len(kernels)} kernels without tuning, compiled and verified in {10 * len(kernels)}.0 s"
    assert build.said[1].startswith("not tuned, for want of time: ")


def test_tuning_gets_what_fast_kernels_and_what_must_follow_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    build = FakeBuild(monkeypatch, kernel_s=0.5)
    kernels = build.build(seconds=30.0, follows_s=10.0)
    assert build.tuned_s == [pytest.approx(TUNED * (30.0 - 10.0 - 0.5 * len(kernels)))]
    assert set(kernels.values()) == {"tuned"}, "the time is enough for all"
    assert build.found == [(len(kernels), 0), (0, len(kernels))], "what was tuned is only loaded"
    assert build.clock.now_s < 20.0


def test_tuning_takes_the_most_telling_kernels_and_as_many_as_the_time_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    build = FakeBuild(monkeypatch, kernel_s=0.0)
    network, target = network_support.two_convolutions(), schedsearch.detect("cpu")
    every = list(planned.Planned.of(network, Path("none.db"), target, COLD_GRAPH, "auto").missing)
    build.build(seconds=2.0 / TUNED + 0.1, follows_s=0.0)
    assert build.tasks == every[:2] and len(every) > 2
    assert f"tuning 2 of {len(every)} kernels without a record for 2 s" in build.said


def test_a_plan_that_has_no_time_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """After tuning another plan is best, but its kernels would have to be compiled."""
    build = FakeBuild(monkeypatch, kernel_s=0.5)
    of = planned.Planned.of

    def others(*args: Any) -> Any:
        found = of(*args)
        if not build.tuned_s:
            return found
        build.clock.now_s += 10.0
        return replace(found, plan=replace(found.plan, implementations=dict.fromkeys(found.plan.implementations, OTHER)))

    monkeypatch.setattr(planned.Planned, "of", staticmethod(others))
    kernels = build.build(seconds=30.0, follows_s=10.0)
    assert OTHER not in kernels and set(kernels.values()) == {"tuned"}
    assert build.said[-1].startswith("the best plan by the new records needs kernels that there was no time to compile")


def test_who_cannot_wait_is_told_before_what_must_follow_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    build = FakeBuild(monkeypatch, kernel_s=10.0)
    with pytest.raises(OutOfTimeError):
        build.build(seconds=15.0, follows_s=10.0, patient=False)
    assert build.clock.now_s == 10.0


def test_the_comparison_is_taken_to_need_what_the_one_before_took() -> None:
    deadline = Deadline.within(30.0, Clock())
    options = BuildOptions.of(deadline, target=schedsearch.detect("cpu"))
    options = replace(options, started=time.monotonic() - 10.0)
    left_s = [options.needed_by(compared_s).left_s for compared_s in (None, 0.0, 3.0)]
    assert left_s == [30.0, pytest.approx(28.0, abs=0.5), 27.0]


def test_a_plan_its_reasons_and_what_lacks_records_take_one_elimination(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("schedsearch.network.choices")
    made, elimination = list[Any](), module.Elimination
    monkeypatch.setattr(module, "Elimination", lambda *args: made.append(elimination(*args)) or made[-1])
    network = network_support.two_convolutions()
    found = planned.Planned.of(network, Path("none.db"), schedsearch.detect("cpu"), COLD_GRAPH, "auto")
    assert found.missing and found.reasons and len(made) == 1


def test_kernels_that_are_known_are_neither_compiled_nor_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, never = schedsearch.detect("cpu"), Deadline(0.0, Clock())
    found = find_kernels([CONVOLUTION], tmp_path / "none.db", target)
    monkeypatch.setattr(KernelCache, "kernel", None)
    again = find_kernels([CONVOLUTION], tmp_path / "none.db", target, known=found, deadline=never)
    assert again[CONVOLUTION] is found[CONVOLUTION]


@pytest.mark.long
def test_machine_code_in_the_database_takes_the_place_of_a_known_kernel_at_any_time(tmp_path: Path) -> None:
    target, db = schedsearch.detect("cpu"), tmp_path / "records.db"
    known = find_kernels([CONVOLUTION], db, target)
    schedsearch.tune([CONVOLUTION], db, target=target, trials=2, workers=1)
    found = find_kernels([CONVOLUTION], db, target, known=known, deadline=Deadline(0.0, Clock()))
    assert known[CONVOLUTION].origin.level == "default" and found[CONVOLUTION].origin.level == "exact"


def test_a_device_that_another_run_holds_until_the_deadline_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*args: Any, **named: Any) -> Any:
        raise DeviceBusyError("the CPU is in use by process 7, and there is no time left to wait")

    monkeypatch.setattr(importlib.import_module("schedsearch.session.tune"), "tune_until", busy)
    said: list[str] = []
    assert timely.tuned([], Path("none.db"), schedsearch.detect("cpu"), "", Deadline(0.0, Clock()), said.append) is None
    assert said == ["not tuned: the CPU is in use by process 7, and there is no time left to wait"]


def test_waiting_for_a_device_ends_with_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = schedsearch.detect("cpu")
    monkeypatch.setattr(DeviceLock, "_try", lambda self: False)
    monkeypatch.setattr("schedsearch.measure.lock._identity", lambda fd: (0, 0))
    monkeypatch.setattr("schedsearch.measure.lock._holder", lambda fd: "process 7")
    monkeypatch.setattr("schedsearch.measure.lock.time.sleep", lambda seconds: None)

    class Opened(DeviceLock):
        def _acquire(self, *args: Any) -> None:
            self._fd = 10_000
            try:
                super()._acquire(*args)
            finally:
                self._fd = -1

    with pytest.raises(DeviceBusyError, match="in use by process 7, and there is no time left to wait"):
        Opened(target, folder=tmp_path, deadline=Deadline.within(5.0, Clock(1.0)))


# --- Tuning -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def a_second_each(monkeypatch: pytest.MonkeyPatch) -> Callable[[World], None]:
    """Lets every measurement, and every race, take a second of a run."""

    def take(world: World) -> None:
        elapsed_s = property(lambda _: 1.0 * (len(world.runner.measured) + len(world.runner.raced)))
        monkeypatch.setattr(journal.Journal, "elapsed_s", elapsed_s)

    return take


def test_tasks_without_a_result_are_left_when_the_time_is_over(a_second_each: Callable[[World], None]) -> None:
    """Whatever is measured of the second task fails, and what is under way takes longer than there is time."""
    world = World(behaviour=lambda c: square_ns(c) if c.workload == WORKLOAD else Outcome.LAUNCH_ERROR)
    a_second_each(world)
    summary = world.tune(WORKLOAD, OTHER, trials=None, time_s=10.0, queue_depth=8)
    first, second = summary.tasks
    assert summary.stopped == "time" and first.best_ns is not None and not first.problem
    assert second.best_ns is None and second.problem == LATE
    assert len(world.runner.measured) <= 10 * 1.1 + 2, "two may be under way"


def test_a_run_that_nobody_waits_for_ends_without_any_result(a_second_each: Callable[[World], None]) -> None:
    world = World(behaviour=lambda c: Outcome.LAUNCH_ERROR)
    a_second_each(world)
    summary = world.tune(trials=None, time_s=5.0, queue_depth=4, patient=False)
    assert summary.stopped == "time" and summary.tasks[0].problem == LATE and len(world.runner.measured) <= 5 * 1.1 + 2


def test_no_race_begins_when_the_time_is_over(a_second_each: Callable[[World], None]) -> None:
    """Four tasks have their first result after four of three seconds: there is time for no race."""
    world = World()
    a_second_each(world)
    tasks = [schedsearch.Workload.conv2d(n=n, h=8, w=8, c=8, k=8, r=3, s=3) for n in (1, 2, 3, 4)]
    summary = world.tune(*tasks, trials=None, time_s=3.0, queue_depth=4, patient=False)
    assert not world.runner.raced and all(task.race is None for task in summary.tasks)
    assert any(task.best_ns is not None for task in summary.tasks)


def test_builds_that_are_under_way_when_the_time_is_over_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(FakeBuilder):
        """Never builds what belongs to the second task; each look at it takes a tenth of a second."""

        looks = 0

        def poll(self, timeout_s: float) -> list[Any]:
            type(self).looks += 1
            stuck = [each for each in self._queue if each[1].workload == OTHER]
            self._queue = [each for each in self._queue if each not in stuck]
            done = super().poll(0.0)
            self._queue += stuck
            return done

    world = World(make_builder=Stuck)
    monkeypatch.setattr(journal.Journal, "elapsed_s", property(lambda _: 0.1 * Stuck.looks))
    summary = world.tune(WORKLOAD, OTHER, trials=None, time_s=6.0, queue_depth=6)
    assert [task.problem for task in summary.tasks] == ["", LATE]
