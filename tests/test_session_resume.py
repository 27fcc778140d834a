"""The use of earlier runs and other tasks: resuming a run, hints, and results to learn from."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from session_support import GPU, OTHER, WORKLOAD, FakeBuilder, FakeRunner, Square, World, square_ns

from schedsearch.cli import run_report
from schedsearch.config import Config
from schedsearch.processes.builder import Candidate
from schedsearch.records.store import Store
from schedsearch.session import hints
from schedsearch.session.loop import Session
from schedsearch.session.options import Options
from schedsearch.session.plan import plan_tasks
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.task import Task
from schedsearch.template import TemplateSet
from schedsearch.workload import Workload


class TestResume:
    def test_the_same_number_of_trials_again_measures_nothing(self) -> None:
        world = World()
        first = world.tune(trials=20)
        records = len(world.store.records)
        again = world.tune(trials=20)
        assert len(world.store.records) == records
        assert again.new_trials == 0
        assert [(t.best_ns, t.best_config, t.trials, t.default_ns) for t in again.tasks] == [
            (t.best_ns, t.best_config, t.trials, t.default_ns) for t in first.tasks
        ]

    def test_the_same_command_again_shows_the_same_table(self) -> None:
        """The first trial on a busy machine is 16 times too slow. Only the times of the final race are shown."""
        slow_start = lambda c: 16 * square_ns(c) if c.config == Config(x=0, y=0) else 1.1 * square_ns(c)  # noqa: E731
        world = World(behaviour=slow_start, race_behaviour=square_ns)
        first = world.tune(trials=100)
        again = world.tune(trials=100)
        assert again.new_trials == 0 and not world.runner.raced
        assert run_report.results_text(again, {}) == run_report.results_text(first, {})
        (task,) = again.tasks
        assert task.race is not None and task.default_ns == square_ns(Candidate(WORKLOAD, Square(), Config(x=0, y=0)))
        assert task.speedup == pytest.approx(task.default_ns / task.best_ns)  # type: ignore[operator]

    def test_newer_results_make_a_race_void_and_another_one_is_held(self) -> None:
        world = World()
        world.tune(trials=20)
        world.store.records.append(replace(world.searched[-1], config=Config(x=11, y=5), finished_at=time.time()))
        (task,) = world.tune(trials=21).tasks
        assert world.runner.raced and task.race is not None
        assert task.best_config == Config(x=11, y=5)

    def test_a_killed_run_is_raced_when_nothing_is_left_to_try(self) -> None:
        world = World()
        world.tune(trials=20)
        world.store.records = world.searched
        world.store.best_ids.clear()
        summary = world.tune(trials=20)
        assert summary.new_trials == 0 and len(world.runner.raced) == 1
        assert summary.tasks[0].speedup is not None

    def test_more_trials_go_on_where_the_last_run_ended(self) -> None:
        world = World()
        world.tune(trials=20)
        summary = world.tune(trials=50)
        assert (summary.tasks[0].trials, summary.new_trials) == (50, 30)
        assert len({record.config for record in world.searched}) == len(world.searched) == 50
        assert len(world.tuners[0].told) == 50, "the model was taught what was measured before"

    def test_a_best_of_an_earlier_run_is_built_again_for_the_race(self) -> None:
        world = World()
        world.tune(trials=256)
        world.store.records.pop(next(i for i, r in enumerate(world.store.records) if r.config == Config(x=15, y=15)))
        world.store.best_ids.clear()
        (task,) = world.tune(trials=256).tasks
        assert task.best_config == Config(x=11, y=5)
        assert Config(x=11, y=5) in world.runner.raced[0]

    def test_fresh_ignores_earlier_records(self) -> None:
        world = World()
        world.tune(trials=20)
        summary = world.tune(trials=20, resume=False)
        assert summary.new_trials == summary.tasks[0].trials == 20
        assert world.runner.measured[0][0] == Config(x=0, y=0)

    def test_another_toolchain_is_measured_again(self) -> None:
        world = World()
        world.tune(trials=20)
        world.store.records = [replace(record, toolchain={"compiler": "0"}) for record in world.store.records]
        assert world.tune(trials=20).new_trials == 20

    def test_a_new_task_beside_old_ones_gets_its_own_share(self) -> None:
        world = World()
        world.tune(WORKLOAD, trials=100)
        old, new = world.tune(WORKLOAD, OTHER, trials=30).tasks
        assert old.new_trials + new.new_trials == 30
        assert new.new_trials >= 8


class TestHints:
    FAR = WORKLOAD.replace(n=64, h=32, w=32)

    def of_workload(self, candidate: Candidate) -> float:
        """Similar workloads have the same best x: 11, or 3 for big ones."""
        x = 11 if candidate.workload.n < 32 else 3
        return float((candidate.config["x"] - x) ** 2 + (candidate.config["y"] - 5) ** 2 + 100)

    def test_the_best_of_similar_workloads_is_tried_right_after_the_default(self) -> None:
        world = World(behaviour=self.of_workload)
        best, far = (world.tune(workload, trials=200).tasks[0].best_config for workload in (WORKLOAD, self.FAR))
        world.tune(OTHER, trials=10)
        assert world.tuners[0].hints == [best, far], "the most similar first"
        assert [config for config, _ in world.runner.measured[:3]] == [Config(x=0, y=0), best, far]

    def test_a_few_trials_suffice_where_a_similar_workload_was_tuned(self) -> None:
        cold, warm = World(behaviour=self.of_workload), World(behaviour=self.of_workload)
        warm.tune(WORKLOAD, trials=256)
        for world in (cold, warm):
            world.tune(OTHER, trials=8)
        found = [world.store.best(OTHER, GPU.key).measurement.time_ns for world in (cold, warm)]  # type: ignore[union-attr]
        assert found[1] == 100.0 < found[0], "256 configurations, one of which takes 100 ns"

    def test_the_results_of_a_run_help_its_later_arms(self, monkeypatch: pytest.MonkeyPatch) -> None:
        layers = [WORKLOAD.replace(n=n) for n in range(1, 25)]
        helped, alone = World(behaviour=self.of_workload), World(behaviour=self.of_workload)
        with_hints = helped.tune(*layers, trials=9).tasks
        monkeypatch.setattr("schedsearch.session.hints.MAX_HINTS", 0)
        without = alone.tune(*layers, trials=9).tasks
        assert helped.tuners[0].hints == [] and all(tuner.hints for tuner in helped.tuners[4:])
        mean_ns = [float(np.mean([task.best_ns or np.inf for task in tasks])) for tasks in (with_hints, without)]
        assert mean_ns[0] - 100 < 0.6 * (mean_ns[1] - 100), "100 ns is the optimum of every layer"

    def test_only_the_same_version_of_the_template_gives_hints_and_fresh_gives_none(self) -> None:
        class Newer(Square):
            version = Square.version + 1

        world = World()
        world.tune(WORKLOAD, trials=20)
        world.tune(OTHER, trials=8, resume=False)
        assert world.tuners[0].hints == []
        world.templates = (Newer(),)
        world.tune(OTHER, trials=8)
        assert world.tuners[0].hints == []

    def test_records_of_this_target_come_before_those_of_others(self) -> None:
        world = World()
        world.target = replace(GPU, name="another GPU", sms=64)
        elsewhere = world.tune(OTHER, trials=20).tasks[0].best_config
        world.target, world.behaviour = GPU, self.of_workload
        here = world.tune(self.FAR, trials=200).tasks[0].best_config
        world.tune(OTHER, trials=8)
        assert world.tuners[0].hints == [here, elsewhere]

    def test_results_of_similar_tasks_are_offered_to_the_model(self) -> None:
        world = World(behaviour=self.of_workload)
        near, far = (world.tune(workload, trials=40) and list(world.searched) for workload in (WORKLOAD, self.FAR))
        world.target = replace(GPU, name="another GPU", sms=64)
        world.tune(WORKLOAD, trials=40)
        world.target = GPU
        summary = world.tune(OTHER, trials=10)
        sources = world.tuners[0].sources
        assert [dict(results) for results in sources[:2]] == [
            {record.config: record.measurement.time_ns for record in records}
            for records in (near, [record for record in far if record.workload == self.FAR])
        ], "the most similar first, then the other device"
        assert [len(results) for results in sources] == [40, 40, 40] and summary.borrowed == 120
        assert summary.to_json()["tasks"][0]["templates"][0]["borrowed"] == 120
        again = world.tune(OTHER, trials=12)
        assert len(world.tuners[0].told) == 12 and again.borrowed == 120, "its own results are told, not offered"

    def test_the_four_most_similar_are_enough_and_each_gives_400_results_at_most(self) -> None:
        class Wide(Square):
            def space(self, workload: Workload, target: Target) -> ConfigSpace:
                return ConfigSpace([Knob("x", tuple(range(32))), Knob("y", tuple(range(32)))])

        world = World(templates=(Wide(),))
        layers = [WORKLOAD.replace(n=n) for n in (3, 4, 5, 6, 7)]
        for layer in layers:
            world.tune(layer, trials=450 if layer.n == 3 else 40, resume=False)
        world.tune(OTHER, trials=8)
        assert [len(results) for results in world.tuners[0].sources] == [400, 40, 40, 40]

    def test_few_results_are_not_offered_and_fresh_offers_none_of_earlier_runs(self) -> None:
        world = World()
        world.tune(WORKLOAD, trials=hints.FEWEST_RESULTS - 1)
        world.tune(OTHER, trials=8)
        assert world.tuners[0].sources == []
        world.tune(WORKLOAD, trials=hints.FEWEST_RESULTS)
        world.tune(self.FAR, trials=8, resume=False)
        assert world.tuners[0].sources == []
        world.tune(OTHER, trials=9)
        assert [len(results) for results in world.tuners[0].sources] == [hints.FEWEST_RESULTS, 8]

    def test_the_results_of_a_run_are_offered_to_its_later_tasks(self) -> None:
        layers = [WORKLOAD.replace(n=n) for n in range(1, 25)]
        for resume in (True, False):
            world = World()
            world.tune(*layers, trials=9, resume=resume)
            offered = [[len(results) for results in tuner.sources] for tuner in world.tuners]
            assert offered[0] == [] and len(offered[-1]) == 4 and all(8 <= n <= 9 for n in offered[-1])

    def test_every_arm_has_its_default_before_any_tuner_is_asked(self) -> None:
        layers = [WORKLOAD.replace(n=n) for n in range(1, 7)]
        world = World()
        world.tune(*layers, trials=8)
        assert [record.workload for record in world.searched[:6]] == layers
        assert {record.config for record in world.searched[:6]} == {Config(x=0, y=0)}
        assert all(dict(tuner.told).keys() >= {Config(x=0, y=0)} for tuner in world.tuners), "they learn from it"

    def test_a_real_tuner_learns_from_a_real_store(self, tmp_path: Path) -> None:
        """xgb on 256 configurations: with the results of a similar task it needs fewer trials to reach the optimum."""
        found = {}
        for resume in (True, False):
            with Store.open(tmp_path / f"{resume}.db") as store:
                for task in (Task(WORKLOAD), Task(OTHER)):
                    world = World(behaviour=self.slightly_different)
                    plans = plan_tasks([task], TemplateSet(world.templates), GPU)
                    runner = FakeRunner(world.behaviour, world._template_of, [])
                    builder = FakeBuilder(world.behaviour, world.code, [])
                    options = Options(trials=96 if task.workload == WORKLOAD else 12, resume=resume)
                    summary = Session(plans, store, builder, runner, GPU, options, {"compiler": "1"}).run()
                found[resume] = summary
        assert (found[True].borrowed, found[False].borrowed) == (96, 0)
        gap = {resume: summary.tasks[0].best_after_ns[11] - 100 for resume, summary in found.items()}
        assert gap[True] < gap[False] and gap[True] < 5, "100 ns is the optimum"

    def slightly_different(self, candidate: Candidate) -> float:
        """The optima of the two workloads are one step apart, so no hint is the answer."""
        x = 11 if candidate.workload == WORKLOAD else 10
        return float((candidate.config["x"] - x) ** 2 + (candidate.config["y"] - 5) ** 2 + 100)

    def test_hints_outside_the_restrictions_are_dropped(self) -> None:
        world = World()
        world.tune(WORKLOAD, trials=256)
        world.tune(Task(OTHER, restrict={"x": [4, 5]}), trials=8)
        assert world.tuners[0].hints == []


def test_imported_records_of_the_very_task_are_hints_and_its_own_are_not() -> None:
    space = ConfigSpace([Knob("x", tuple(range(16))), Knob("y", tuple(range(16)))])
    fast = Config(x=3, y=4)

    def of(imported: bool) -> hints.WarmStart:
        known = hints.Known(WORKLOAD, GPU.key, lambda: [(fast, 100.0), (Config(x=0, y=0), 200.0)], imported=imported)
        return hints.warm_start(WORKLOAD, GPU.key, space, [known])

    assert of(imported=True).hints == (fast,) and of(imported=False).hints == ()
