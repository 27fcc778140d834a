"""The tuning loop with simulated collaborators: the trials that it measures and records, and its decisions."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from session_support import (
    CPU,
    GPU,
    OTHER,
    WORKLOAD,
    CpuSquare,
    FakeBuilder,
    RandomTuner,
    Square,
    World,
    square_ns,
)

from schedsearch.config import Config
from schedsearch.errors import Interrupted
from schedsearch.measurement import Measurement, Outcome, Record
from schedsearch.processes.builder import Built, Candidate
from schedsearch.session import journal
from schedsearch.session.observer import Observer, Trial
from schedsearch.session.summary import RunSummary, TaskSummary
from schedsearch.target import Target
from schedsearch.workload import Workload


class TestPipeline:
    def test_builders_are_kept_ahead_on_a_gpu(self) -> None:
        world = World()
        world.tune(trials=60, queue_depth=12)
        assert world.builder.most_pending > 1
        first_measure, last_submit = world.log.index("measure"), len(world.log) - 1 - world.log[::-1].index("submit")
        assert first_measure < last_submit

    def test_building_and_measuring_alternate_on_a_cpu(self) -> None:
        world = World(templates=(CpuSquare(),), target=CPU)
        summary = world.tune(trials=40)
        under_way = 0
        for event in world.log:
            under_way += {"submit": 1, "built": -1, "measure": 0, "race": 0}[event]
            assert event != "measure" or under_way == 0, "measured while something was being built"
        assert summary.tasks[0].trials == 40

    def test_the_runner_learns_the_best_time_so_far(self) -> None:
        world = World(templates=(CpuSquare(),), target=CPU)
        world.tune(trials=40)
        assert world.runner.measured[0][1] is None
        best = np.inf
        for config, told_ns in world.runner.measured:
            assert told_ns is None or told_ns == best
            best = min(best, square_ns(Candidate(WORKLOAD, CpuSquare(), config)))

    @pytest.mark.parametrize(("template", "target"), [(CpuSquare(), CPU), (Square(), GPU)])
    def test_a_tuner_is_asked_no_more_when_the_time_ends_while_it_thinks(self, template: Square, target: Target) -> None:
        class Slow(RandomTuner):
            def ask(self, n: int) -> list[Config]:
                time.sleep(0.1)
                return super().ask(n)

        world = World(templates=(template,), target=target, make_tuner=Slow)
        world.tune(trials=200, time_s=0.05)
        assert sum(len(tuner.asked) for tuner in world.tuners) <= 8, "what is proposed too late is dropped"

    def test_only_one_thread_writes_to_the_store(self) -> None:
        world = World()
        world.tune(trials=40)
        assert world.store.threads == {threading.get_ident()}

    def test_shares_of_wall_time_are_fractions(self) -> None:
        summary = World(before=lambda config: time.sleep(0.05)).tune(trials=20)
        shares = summary.shares
        assert 20 * 0.05 <= shares.device * summary.wall_s <= summary.wall_s
        assert 0 <= shares.build <= 1 and 0 <= shares.tuner <= 1
        assert shares.device + shares.build + shares.tuner + shares.preparing < 1.01

    def test_a_run_notes_its_shares_in_the_store_while_it_goes_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(journal, "NOTE_EVERY_S", 0.0)
        world, noted = World(before=lambda config: time.sleep(0.02)), []
        append_all = world.store.append_all
        monkeypatch.setattr(world.store, "append_all", lambda new, so_far: noted.append(so_far) or append_all(new, so_far))
        summary = world.tune(trials=12)
        walls_s = [each["wall_s"] for each in noted]
        assert walls_s == sorted(walls_s) and walls_s[0] > 0 and walls_s[-1] <= summary.wall_s
        assert all(0 <= share <= 1 for each in noted for share in each["shares"].values())
        busy_s = [each["shares"]["device"] * each["wall_s"] for each in noted]
        assert busy_s[0] >= 0.02 and busy_s[-1] >= 12 * 0.02, "each measurement takes 0.02 s at least"
        assert noted[0]["phase"] == "preparing" and noted[-1]["phase"] == "racing"

    def test_notes_about_a_run_are_a_second_apart(self) -> None:
        world = World()
        noted = []
        append_all = world.store.append_all
        world.store.append_all = lambda new, so_far: noted.append(so_far) or append_all(new, so_far)
        summary = world.tune(trials=30)
        assert noted[0] is not None, "the first outcome tells at once"
        assert sum(each is not None for each in noted) <= 1 + summary.wall_s

    def test_the_device_gets_its_next_work_before_the_disk_has_the_outcomes(self) -> None:
        begun: list[Config] = []
        world = World(before=lambda config: begun.append(config))
        append_all, ahead = world.store.append_all, []

        def slow(new: Sequence[Record], so_far: Any) -> list[int]:
            collected, until_s = len(world.store.records) + len(new), time.monotonic() + 0.2
            while len(begun) < collected + 2 and time.monotonic() < until_s:
                time.sleep(0.001)
            ahead.append(len(begun) >= collected + 2)  # more than what it had before: the next one, which waited there
            return append_all(new, so_far)

        world.store.append_all = slow
        world.tune(trials=20)
        assert any(ahead), "it went on while outcomes were stored"

    def test_preparing_workloads_does_not_count_as_work_of_the_device(self) -> None:
        summary = World(preparation_s=0.5).tune(WORKLOAD, OTHER, trials=8)
        preparing_s, device_s = (share * summary.wall_s for share in (summary.shares.preparing, summary.shares.device))
        assert preparing_s > 0.9, "half a second for each of the two"
        assert device_s < preparing_s, "eight fake measurements take milliseconds"

    def test_the_device_gets_ready_for_a_workload_while_its_first_candidates_are_built(self) -> None:
        world = World(preparation_s=0.05)
        built_at: list[int] = []

        class SlowBuilder(FakeBuilder):
            def poll(self, timeout_s: float) -> list[tuple[int, Built | Measurement]]:
                time.sleep(0.02)
                if len(world.runner.prepared) < 2:
                    return self.poll_references()
                built_at.append(len(world.runner.measured))
                return super().poll(timeout_s)

        world.make_builder = SlowBuilder
        world.tune(WORKLOAD, OTHER, trials=8, queue_depth=32)
        assert built_at[0] == 0, "nothing was measured when both workloads were ready"

    def test_candidates_wait_for_the_reference_of_their_task_and_those_of_other_tasks_do_not(self) -> None:
        world = World()
        measured_before: list[int] = []

        class OneSlowReference(FakeBuilder):
            def submit_reference(self, workload: Workload) -> int:
                token = super().submit_reference(workload)
                if workload == WORKLOAD:
                    self._references.remove(token)
                    self.held = token
                return token

            def poll(self, timeout_s: float) -> list[tuple[int, Built | Measurement]]:
                done = super().poll(timeout_s)
                if self.held is not None and world.runner.measured:
                    assert world.runner.prepared == [OTHER]
                    measured_before.append(len(world.runner.measured))
                    done.append((self.held, Measurement(Outcome.WORKER_LOST, message="as the test wants")))
                    self.held = None
                return done

        world.make_builder = OneSlowReference
        summary = world.tune(WORKLOAD, OTHER, trials=8, queue_depth=32)
        assert measured_before and [task.trials for task in summary.tasks] == [8, 8]
        assert world.runner.learned == [OTHER], "the runner compiles a reference itself that no builder could"

    def test_tuners_think_in_a_thread_of_their_own_while_candidates_are_built(self) -> None:
        threads: set[int] = set()
        meanwhile: list[int] = []  # events elsewhere during each ask

        class Thinker(RandomTuner):
            def ask(self, n: int) -> list[Config]:
                threads.add(threading.get_ident())
                before = len(world.log)
                time.sleep(0.02)
                meanwhile.append(len(world.log) - before)
                return super().ask(n)

            def tell(self, results: Sequence[tuple[Config, float | None]]) -> None:
                threads.add(threading.get_ident())
                super().tell(results)

        world = World(make_tuner=Thinker)
        summary = world.tune(WORKLOAD, OTHER, trials=40, queue_depth=16, tuner_thread=True)
        assert sum(task.trials for task in summary.tasks) == 80
        assert len(threads) == 1 and threading.get_ident() not in threads
        assert max(meanwhile) > 0
        assert world.store.threads == {threading.get_ident()}
        assert len({record.config for record in world.searched if record.workload == WORKLOAD}) == summary.tasks[0].trials

    def test_a_tuner_that_fails_in_its_thread_ends_the_run(self) -> None:
        class Broken(RandomTuner):
            def tell(self, results: Sequence[tuple[Config, float | None]]) -> None:
                raise ZeroDivisionError("a bug of a tuner")

        for apart in (False, True):
            with pytest.raises(ZeroDivisionError, match="a bug"):
                World(make_tuner=Broken).tune(tuner_thread=apart)

    def test_a_tuner_that_waits_for_results_is_asked_again_when_it_has_them(self) -> None:
        class Waiting(RandomTuner):
            def ask(self, n: int) -> list[Config]:
                return super().ask(n) if set(self.asked) <= dict(self.told).keys() else []

        for apart in (False, True):
            assert World(make_tuner=Waiting).tune(trials=30, tuner_thread=apart).tasks[0].trials == 30

    def test_records_keep_batch_prediction_run_and_stamps(self) -> None:
        world = World()
        before = time.time()
        world.tune(trials=20)
        default, *_ = world.searched
        for record in world.searched:
            assert record.prediction == (record.config["x"] if record is not default else None)
            assert record.run == "run0" and record.batch >= 1
            assert before <= record.started_at <= record.finished_at <= time.time()
            assert record.toolchain == {"compiler": "1"}
        assert len({record.batch for record in world.searched}) > 1

    def test_an_error_of_a_collaborator_is_not_swallowed(self) -> None:
        def fail(config: Config) -> None:
            raise OSError("the device fell off the bus")

        with pytest.raises(OSError, match="fell off"):
            World(before=fail).tune()


class TestInterruption:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_the_first_signal_stops_cleanly_and_saves_everything(self, number: signal.Signals) -> None:
        seen: list[Config] = []

        def send(config: Config) -> None:
            seen.append(config)
            if len(seen) == 5:
                os.kill(os.getpid(), number)
                time.sleep(0.05)

        world = World(before=send)
        handler = signal.getsignal(number)
        ends: list[RunSummary] = []

        class End(Observer):
            def on_end(self, summary: RunSummary) -> None:
                ends.append(summary)

        with pytest.raises(Interrupted, match=r"records\.db") as caught:
            world.tune(trials=100, observers=[End()])
        assert caught.value.exit_code == 130
        assert caught.value.summary == ends[0] and ends[0].stopped == "interrupted"
        assert len(world.searched) == len(seen), "the measurement under way is finished and recorded"
        assert len(seen) <= 6
        assert not world.runner.raced
        assert ends[0].tasks[0].race is None and ends[0].tasks[0].speedup is None, "single measurements do not compare"
        assert signal.getsignal(number) is handler, "the caller's handler is back"
        assert world.store.runs["run0"]["stopped"] == "interrupted"

        world.before = lambda config: None
        assert world.tune(trials=100).new_trials == 100 - len(seen)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_a_signal_while_the_end_of_the_run_is_written_changes_nothing(
        self, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Everything is done then, so the summary is stored and told, and the run ends as it would have."""
        world = World()
        finish = world.store.finish_run

        def struck(run_id: str, summary: dict[str, Any]) -> None:
            os.kill(os.getpid(), number)
            time.sleep(0.01)
            finish(run_id, summary)

        monkeypatch.setattr(world.store, "finish_run", struck)
        summary = world.tune(trials=10)
        assert summary.stopped == "trials" and world.store.runs["run0"]["stopped"] == "trials"

    def test_tuning_works_outside_the_main_thread(self) -> None:
        results: list[RunSummary] = []
        thread = threading.Thread(target=lambda: results.append(World().tune(trials=10)))
        thread.start()
        thread.join(240)
        assert results[0].tasks[0].trials == 10


class TestObservers:
    def test_they_hear_everything_in_order(self) -> None:
        heard: list[str] = []

        class Ear(Observer):
            def on_start(self, event: Any) -> None:
                heard.append("start")
                assert [arm.template for arm in event.tasks[0].arms] == ["square"] and event.trials == 20

            def on_trial(self, event: Trial) -> None:
                heard.append("race" if event.final_race else "trial")

            def on_best(self, event: Any) -> None:
                heard.append("best")
                assert event.previous_ns is None or heard[-2] == "race" or event.time_ns < event.previous_ns

            def on_task_end(self, index: int, summary: TaskSummary) -> None:
                heard.append("task end")

            def on_end(self, summary: RunSummary) -> None:
                heard.append("end")

        World().tune(trials=20, observers=[Ear()])
        assert heard[:3] == ["start", "trial", "best"]
        assert heard[-2:] == ["task end", "end"]
        assert heard.count("trial") == 20 and heard.count("race") in (5, 6)

    def test_every_outcome_is_told_with_its_text(self) -> None:
        world = World(behaviour=lambda c: Outcome.COMPILE_ERROR if c.config["x"] == 4 else square_ns(c))
        world.tune(trials=100)
        failed = [trial for trial in world.trials if trial.outcome is Outcome.COMPILE_ERROR]
        assert failed and all(trial.message == "as the test wants" and trial.time_ns is None for trial in failed)
        counted = [trial.done for trial in world.trials if trial.counted]
        assert counted == list(range(1, 101))
