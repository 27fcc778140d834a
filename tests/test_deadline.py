"""A time that a caller gives is wall time until the answer: what has no time left takes its default, and that is said.

The clocks here are made up: no test waits, and none compares times.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from session_support import OTHER, WORKLOAD, FakeBuilder, World, square_ns

import schedsearch
from schedsearch.deadline import NEVER, Deadline
from schedsearch.errors import DeviceBusyError, OutOfTimeError
from schedsearch.executable import timely
from schedsearch.executable.kernels import find_kernels
from schedsearch.measure.ahead import compile_ahead
from schedsearch.measure.builder import Builder
from schedsearch.measure.code_cache import CodeCache
from schedsearch.measure.lock import DeviceLock
from schedsearch.measurement import Outcome
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
    from schedsearch.measure.ahead import verifying_recipes

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
def test_defaults_are_compiled_before_anything_is_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, said = Clock(), list[str]()

    class Cache:
        def __init__(self, *args: Any, **named: Any) -> None: ...
        def __enter__(self) -> Cache:
            return self

        def __exit__(self, *error: object) -> None: ...
        def build_ahead(self, workloads: list[Any], *, deadline: Deadline) -> int:
            clock.now_s += 40.0
            return 1

    monkeypatch.setattr(timely, "KernelCache", Cache)
    target = schedsearch.detect("cpu")
    deadline = Deadline.within(30.0, clock)
    timely.compile_defaults([CONVOLUTION, WORKLOAD, CONVOLUTION], tmp_path / "none.db", target, "", deadline, said.append)
    assert len(said) == 1 and said[0].startswith("the time is too short to compile a default for every kernel")
    assert "it took 40 s to compile 1 of 2 kernels" in said[0]
    assert timely.time_to_tune(deadline, 2, said.append) is None
    assert said[1] == "not tuned, for want of time: 2 kernels without a record, which run in default configurations"
    assert timely.time_to_tune(Deadline.within(100.0, clock), 2, said.append) == Deadline(120.0, clock)


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
    """Whatever is measured of the second task fails, and takes longer than there is time."""
    world = World(behaviour=lambda c: square_ns(c) if c.workload == WORKLOAD else Outcome.LAUNCH_ERROR)
    a_second_each(world)
    summary = world.tune(WORKLOAD, OTHER, trials=None, time_s=10.0, queue_depth=4)
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
