"""What is tuned, and with what share of a budget: plans, and tasks that cannot be prepared."""

from __future__ import annotations

import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from session_support import (
    CPU,
    GPU,
    OTHER,
    WORKLOAD,
    Counted,
    CpuSquare,
    FakeBuilder,
    FakeRunner,
    Line,
    Square,
    World,
    square_ns,
)

from schedsearch.config import Config
from schedsearch.errors import ConfigError, PreparationError, SeveralErrors, UnsupportedError, UsageError
from schedsearch.measurement import Measurement, Outcome
from schedsearch.processes.builder import Built
from schedsearch.session import journal, tune
from schedsearch.session.options import Options
from schedsearch.session.plan import plan_tasks
from schedsearch.session.preview import preview
from schedsearch.session.tune import _planned
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.task import Task
from schedsearch.template import TemplateSet
from schedsearch.workload import Workload


class TestBudget:
    def test_spends_exactly_the_trials_each_on_a_distinct_configuration(self) -> None:
        world = World()
        summary = world.tune(trials=20)
        assert summary.stopped == "trials"
        assert [task.trials for task in summary.tasks] == [20]
        assert len({record.config for record in world.searched}) == len(world.searched) == 20

    def test_the_default_is_measured_first(self) -> None:
        world = World()
        world.tune()
        assert world.runner.measured[0][0] == Config(x=0, y=0)

    def test_rejected_candidates_are_recorded_and_cost_no_trial(self) -> None:
        world = World(behaviour=lambda c: Outcome.REJECTED if c.config["x"] % 2 else square_ns(c))
        summary = world.tune(trials=20)
        outcomes = Counter(record.measurement.outcome for record in world.searched)
        assert outcomes[Outcome.OK] == 20
        assert outcomes[Outcome.REJECTED] == summary.tasks[0].outcomes["rejected"] > 0
        assert summary.tasks[0].trials == 20

    def test_equal_machine_code_is_measured_once_and_costs_one_trial(self) -> None:
        world = World(code=lambda config: str(config["x"]))
        summary = world.tune(trials=16)
        assert len(world.runner.measured) == 16  # one for each x
        assert summary.duplicates == summary.tasks[0].duplicates == len(world.builder.submitted) - 16 > 0
        assert len(dict(world.tuners[0].told)) == len(world.builder.submitted), "the tuner hears of duplicates too"

    def test_failures_cost_a_trial_and_reach_the_tuner_as_failures(self) -> None:
        failures = [
            Outcome.COMPILE_ERROR,
            Outcome.WRONG_ANSWER,
            Outcome.RUN_TIMEOUT,
            Outcome.WORKER_LOST,
            Outcome.LAUNCH_ERROR,
        ]
        world = World(behaviour=lambda c: failures[c.config["x"]] if c.config["x"] < 5 and c.config["y"] else square_ns(c))
        summary = world.tune(trials=120)
        assert summary.tasks[0].trials == 120
        assert {Outcome(name) for name in summary.tasks[0].failures} == set(failures)
        assert all(time is None for config, time in world.tuners[0].told if config["x"] < 5 and config["y"])

    def test_a_small_space_ends_the_run(self) -> None:
        world = World(templates=(Line(),))
        summary = world.tune(trials=1000)
        assert (summary.stopped, summary.tasks[0].trials) == ("exhausted", 63)

    def test_a_space_of_rejects_ends_the_run(self) -> None:
        class Huge(Square):
            def space(self, workload: Workload, target: Target) -> ConfigSpace:
                return ConfigSpace([Knob("x", tuple(range(100))), Knob("y", tuple(range(100)))])

        world = World(behaviour=lambda c: Outcome.REJECTED, templates=(Huge(),))
        summary = world.tune(trials=10)
        assert summary.stopped == "exhausted"
        assert not summary.complete
        assert len(world.builder.submitted) < 1000

    def test_time_ends_the_search_and_the_race_is_still_held(self) -> None:
        world = World(before=lambda config: time.sleep(0.02))
        summary = world.tune(trials=None, time_s=0.2)
        assert summary.stopped == "time"
        assert 1 <= summary.tasks[0].trials < 100
        assert world.runner.raced

    @pytest.mark.parametrize(("time_s", "trials"), [(10.0, 82), (1.0, 5)])
    def test_the_search_leaves_time_for_the_race(self, time_s: float, trials: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """A trial takes 0.1 s, and each of the six that race three times as long; but half of the time is for the search."""
        world = World()
        monkeypatch.setattr(journal.Journal, "elapsed_s", property(lambda _: 0.1 * len(world.runner.measured)))
        summary = world.tune(trials=None, time_s=time_s, queue_depth=1)
        assert summary.stopped == "time" and world.runner.raced
        assert trials <= summary.tasks[0].trials <= trials + 2, "two may be under way"

    def test_what_has_not_begun_when_time_is_over_is_dropped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A trial takes 0.1 s of the 3 s. 40 candidates are under way, and they would take 4 s."""
        world = World()
        monkeypatch.setattr(journal.Journal, "elapsed_s", property(lambda _: 0.1 * len(world.runner.measured)))
        summary = world.tune(trials=None, time_s=3.0, queue_depth=40)
        assert summary.stopped == "time" and summary.tasks[0].race is not None
        assert 15 <= summary.tasks[0].trials <= 17, "half of the time is kept for the race, and two trials may be under way"
        assert len(world.builder.submitted) >= 40

    def test_the_default_of_the_first_template_is_measured_although_time_is_over(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is what the task has without tuning, and may be better than all that there was time for."""

        class SlowDefault(FakeBuilder):
            def poll(self, timeout_s: float) -> list[tuple[int, Built | Measurement]]:
                late = [each for each in self._queue if each[1].config == Config(z=0)] if not world.runner.measured else []
                self._queue = [each for each in self._queue if each not in late]
                done = super().poll(timeout_s)
                self._queue += late
                return done

        world = World(templates=(Line(), Square()), make_builder=SlowDefault)
        monkeypatch.setattr(journal.Journal, "elapsed_s", property(lambda _: 1.0 * len(world.runner.measured)))
        world.tune(trials=None, time_s=1.0, queue_depth=40)
        assert Config(z=0) in [config for config, _ in world.runner.measured]

    def test_a_task_without_a_result_waits_for_one_although_time_is_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        world = World(behaviour=lambda c: square_ns(c) if c.config["x"] == 5 else Outcome.LAUNCH_ERROR)
        monkeypatch.setattr(journal.Journal, "elapsed_s", property(lambda _: 1.0 * len(world.runner.measured)))
        summary = world.tune(trials=None, time_s=1.0, queue_depth=40)
        assert summary.tasks[0].best_config is not None and summary.tasks[0].best_config["x"] == 5

    def test_fewer_race_when_the_races_would_take_longer_than_the_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each race of the fastest five and the default takes 1.8 s."""
        for time_s, sizes in ((2.0, {2, 3}), (20.0, {6})):
            world = World()
            elapsed_s = property(lambda _, world=world: 0.1 * len(world.runner.measured))
            monkeypatch.setattr(journal.Journal, "elapsed_s", elapsed_s)
            world.tune(WORKLOAD, OTHER, trials=None, time_s=time_s, queue_depth=1)
            assert len(world.runner.raced) == 2 and {len(configs) for configs in world.runner.raced} <= sizes

    def test_the_last_batch_on_a_cpu_is_cut_to_the_time_that_is_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        world = World(templates=(CpuSquare(),), target=CPU)
        monkeypatch.setattr(journal.Journal, "elapsed_s", property(lambda _: 0.1 * len(world.runner.measured)))
        world.tune(trials=None, time_s=2.4, queue_depth=8)  # half of the time is kept for the race
        assert 8 < len(world.searched) < 16, "the time is too short for all of the second eight"

    def test_impossible_options_are_refused(self) -> None:
        for wrong in ({"trials": 0}, {"time_s": 0.0}, {"mode": "lukewarm"}):
            with pytest.raises(UsageError, match="allowed"):
                Options(**wrong)  # type: ignore[arg-type]


class TestSharing:
    def test_tasks_share_the_sum_of_trials(self) -> None:
        summary = World().tune(WORKLOAD, OTHER, trials=30)
        assert sum(task.trials for task in summary.tasks) == 60
        assert min(task.trials for task in summary.tasks) >= 8

    def test_weight_attracts_trials(self) -> None:
        heavy, light = World().tune(Task(WORKLOAD, weight=10.0), OTHER, trials=40).tasks
        assert heavy.trials > 1.5 * light.trials

    def test_a_template_that_is_far_behind_is_starved(self) -> None:
        world = World(templates=(Line(), Square()))  # the line is at least 3 times slower than the square's default
        (task,) = world.tune(trials=100).tasks
        line, square = task.arms
        assert line.trials < 0.25 * square.trials
        assert line.trials >= 8, "but it got its warm-up"
        assert task.template == "square"

    def test_every_arm_gets_its_default_even_with_a_tiny_budget(self) -> None:
        world = World(templates=(Line(), Square()))
        world.tune(trials=2)
        assert {record.config for record in world.searched} == {Config(x=0, y=0), Config(z=0)}

    def test_the_order_of_tasks_does_not_change_the_draws_of_a_tuner(self) -> None:
        first, second = World(), World()
        first.tune(WORKLOAD, OTHER)
        second.tune(OTHER, WORKLOAD)
        n = min(len(first.tuners[0].asked), len(second.tuners[1].asked))
        assert first.tuners[0].asked[:n] == second.tuners[1].asked[:n]


class TestPlan:
    def test_restrictions_hold_and_a_default_outside_is_replaced(self) -> None:
        world = World()
        world.tune(Task(WORKLOAD, restrict={"x": [4, 5]}), trials=32)
        assert {record.config["x"] for record in world.searched} == {4, 5}
        assert world.runner.measured[0][0]["y"] == 0, "it keeps what it may of the default"

    @pytest.mark.parametrize(
        ("task", "error", "text"),
        [
            (Task(WORKLOAD, restrict={"xx": [1]}), ConfigError, "knob 'xx'.*did you mean 'x'"),
            (Task(WORKLOAD, restrict={"x": [99]}), ConfigError, "99"),
            (Task(WORKLOAD, restrict={"z": [3]}), ConfigError, "z"),
            (Task(WORKLOAD, templates=["sqare"]), UsageError, "did you mean 'square'"),
            (Task(WORKLOAD, weight=0.0), UsageError, "weight"),
            (WORKLOAD.replace(k=16), UnsupportedError, "k must be 8"),
        ],
    )
    def test_impossible_requests_are_refused_before_anything_runs(
        self, task: Task, error: type[Exception], text: str
    ) -> None:
        with pytest.raises(error, match=text):
            plan_tasks([task], TemplateSet([Square(), Line()]), GPU)

    def test_no_task_and_a_task_twice_are_refused(self) -> None:
        for tasks in ([], [WORKLOAD, Task(WORKLOAD)]):
            with pytest.raises(UsageError):
                plan_tasks(tasks, TemplateSet([Square()]), GPU)

    @pytest.mark.parametrize("one", [WORKLOAD, Task(WORKLOAD)])
    def test_one_workload_that_is_not_in_a_list_is_refused_with_the_right_form(self, one: Any, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"must be a list.*give tune\(\[workload\], \.\.\.\)"):
            tune(one, tmp_path / "records.db")
        assert list(tmp_path.iterdir()) == []

    def test_every_space_and_default_is_computed_once(self) -> None:
        """Planning a network computes each space and default once, before anything is compiled."""
        counted = Counted()
        workloads = [WORKLOAD.replace(n=n) for n in range(1, 6)]
        plans = plan_tasks([Task(workload, restrict={"x": [1, 2]}) for workload in workloads], TemplateSet([counted]), CPU)
        assert _planned(list(plans), None, CPU) == plans
        assert counted.calls == {(what, workload.id): 1 for what in ("space", "default") for workload in workloads}

    def test_plans_are_not_mixed_with_workloads_nor_given_templates(self) -> None:
        plans = plan_tasks([WORKLOAD], TemplateSet([Square()]), GPU)
        with pytest.raises(UsageError, match="cannot be mixed"):
            _planned([*plans, OTHER], None, GPU)  # type: ignore[list-item]
        with pytest.raises(UsageError, match="plan_tasks"):
            _planned(plans, ["square"], GPU)

    def test_a_mistake_says_which_task_and_which_part_of_it(self) -> None:
        fine = Task(WORKLOAD)
        for wrong, path in (
            (Task(OTHER, restrict={"xx": [1]}), ("restrict", "xx")),
            (Task(OTHER, restrict={"x": [99]}), ("restrict",)),
            (Task(OTHER, templates=["sqare"]), ("templates", 0)),
            (Task(OTHER, weight=-1.0), ("weight",)),
            (Task(OTHER.replace(k=16)), ()),
            (Task(OTHER.replace(k=16), templates=["square"]), ("templates",)),
            (Task(WORKLOAD), ()),
        ):
            with pytest.raises(UsageError) as caught:
                plan_tasks([fine, wrong], TemplateSet([Square()]), GPU)
            assert caught.value.where is not None and (caught.value.where.index, caught.value.where.path) == (1, path)

    def test_all_mistakes_of_all_tasks_are_told(self) -> None:
        tasks = [
            Task(WORKLOAD, restrict={"xx": [1], "x": [99]}, templates=["sqare"], weight=-1.0),
            Task(OTHER.replace(k=16)),
            Task(WORKLOAD),
        ]
        with pytest.raises(SeveralErrors) as caught:
            plan_tasks(tasks, TemplateSet([Square()]), GPU)
        places = [each.where and (each.where.index, *each.where.path) for each in caught.value.each]
        assert places == [(0, "weight"), (0, "templates", 0), (0, "restrict", "xx"), (0, "restrict"), (1,), (2,)]
        assert all(str(each) in str(caught.value) for each in caught.value.each)

    def test_a_knob_of_one_template_restricts_that_one_only(self) -> None:
        (plan,) = plan_tasks([Task(WORKLOAD, restrict={"x": [1, 2]})], TemplateSet([Square(), Line()]), GPU)
        assert [arm.space.size.count for arm in plan.arms] == [32, 63]


class TestTasksThatCannotBePrepared:
    @pytest.fixture
    def world(self, monkeypatch: pytest.MonkeyPatch) -> World:
        """The inputs and the reference of `OTHER` cannot be made."""
        prepare = FakeRunner.prepare

        def failing(runner: FakeRunner, workload: Workload) -> None:
            prepare(runner, workload)
            if workload == OTHER:
                raise PreparationError("every process is killed")

        monkeypatch.setattr(FakeRunner, "prepare", failing)
        return World()

    def test_they_are_given_up_and_the_others_go_on(self, world: World) -> None:
        given_up, tuned = world.tune(OTHER, WORKLOAD).tasks
        assert given_up.problem == "every process is killed" and given_up.best_ns is None
        assert given_up.new_trials == 0, "no candidate is blamed"
        assert tuned.problem == "" and tuned.race is not None
        assert tuned.new_trials == 40, "the other task gets the trials of both"
        assert world.runner.prepared.count(OTHER) == 1

    def test_the_summary_keeps_the_reason(self, world: World) -> None:
        summary = world.tune(OTHER, WORKLOAD)
        assert [task.get("problem", "") for task in summary.to_json()["tasks"]] == ["every process is killed", ""]

    def test_without_another_task_the_run_ends_with_the_error_and_its_summary_is_stored(self, world: World) -> None:
        with pytest.raises(PreparationError, match="every process is killed"):
            world.tune(OTHER)
        (stored,) = world.store.runs.values()
        assert stored["tasks"][0]["problem"] == "every process is killed"


@pytest.mark.parametrize(("trials", "time_s"), [(8, None), (8, 1.0), (None, 5.0), (10**9, None)])
def test_a_preview_counts_the_trials_and_stays_within_the_time(trials: int | None, time_s: float | None) -> None:
    plans = plan_tasks([WORKLOAD], TemplateSet([Square()]), GPU)
    seen = preview(plans, ["first"], GPU, trials=trials, time_s=time_s, workers=4)
    candidates = min(trials or 256, 256)  # Square has 16 * 16 configurations
    expected_s = 4.0 + 0.5 + candidates * 0.2  # the start, a race, and 0.8 s a build by four processes
    assert seen.estimate_s == pytest.approx(min(expected_s, time_s or math.inf))
    told = seen.to_json()
    assert (told["trials"], told["trials_to_choose"], told["time_s"]) == (trials, 0, time_s)
    (task,) = told["tasks"]
    assert (task["name"], task["templates"][0]["configurations"]) == ("first", 256)
