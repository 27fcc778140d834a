"""A run's report of its own search: best so far, how well the model ranked, illegal proposals, shares of the budget."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy_package
from scipy.stats import spearmanr
from session_support import OTHER, WORKLOAD, FakeBuilder, RandomTuner, World, square_ns

from schedsearch.cli import run_report
from schedsearch.config import Config
from schedsearch.measurement import Measurement, Outcome
from schedsearch.processes.builder import Built, Candidate
from schedsearch.session.ranking import RankAgreement
from schedsearch.text import duration
from schedsearch.workload import Workload


def true_ns(config: Config) -> float:
    return float((config["x"] - 11) ** 2 + (config["y"] - 5) ** 2 + 100)


class Predicting(RandomTuner):
    """Knows the true times after four results. It reports them in another unit after every eight."""

    sign = 1.0

    def predict(self, configs: Sequence[Config]) -> Any:
        if len(self.told) < 4:
            return None
        offset = 1e4 * (len(self.told) // 8)
        return np.array([offset - self.sign * true_ns(config) for config in configs])


class Contrary(Predicting):
    sign = -1.0


class TestRankAgreement:
    def test_one_group_is_spearmans_correlation(self) -> None:
        rng = np.random.default_rng(0)
        for _ in range(20):
            pairs = rng.integers(0, 6, size=(12, 2)).astype(float)  # with ties
            found = RankAgreement.of([[(a, b) for a, b in pairs]])
            assert found.correlation == pytest.approx(spearmanr(pairs[:, 0], pairs[:, 1]).statistic)
            assert found.trials == 12

    def test_groups_count_by_their_degrees_of_freedom_and_are_never_compared(self) -> None:
        up, down = [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)], [(900.0, 2.0), (901.0, 1.0)]
        found = RankAgreement.of([up, down])
        assert found.correlation == pytest.approx((2 * 1.0 + 1 * -1.0) / 3)
        assert found == RankAgreement.of([up]) + RankAgreement.of([down])

    @pytest.mark.parametrize("groups", [[], [[(1.0, 1.0)]], [[(1.0, 1.0), (1.0, 2.0)]]])
    def test_without_two_different_values_there_is_nothing_to_say(self, groups: list[list[tuple[float, float]]]) -> None:
        assert RankAgreement.of(groups).correlation is None


class TestText:
    def test_a_summary_prints_as_the_table_of_the_command_line(self) -> None:
        summary = World().tune(trials=20)
        *lines, last = str(summary).splitlines()
        assert "\n".join(lines) == run_report.results_text(summary, {}) and repr(summary) == str(summary)
        assert last.startswith("20 new trials in 1 s") and last.endswith(f"on {summary.target}")

    def test_the_last_line_of_a_run_has_its_gain_its_trials_and_its_database(self) -> None:
        summary = World().tune(trials=20)
        (task,) = summary.tasks
        gain = f"{duration(task.best_ns)}, {task.speedup:.2f}x as fast as the default; 20 trials in 1 s"
        assert summary.headline.startswith(f"{WORKLOAD.label}: {gain}")
        assert summary.headline.endswith("kept in records.db")

    def test_a_task_without_a_valid_configuration_has_the_reason_of_its_default(self) -> None:
        def wrong(candidate: Candidate) -> Outcome:
            return Outcome.WRONG_ANSWER if candidate.config["x"] else Outcome.LAUNCH_ERROR

        (task,) = World(behaviour=wrong).tune(trials=20).tasks
        assert task.failure is not None and task.failure.is_default
        assert task.why_invalid.startswith("all trials failed (") and f" {task.failure.outcome}" in task.why_invalid
        config = " ".join(f"{name}={value}" for name, value in task.failure.config.items())
        assert f"The first, the default ({config}): {task.failure.outcome}: {task.failure.message}" in task.why_invalid

    @pytest.mark.parametrize(
        ("outcome", "message", "reason"),
        [
            (Outcome.RUN_TIMEOUT, "killed", "run_timeout: killed. What to do: if the kernel may loop forever, correct it; "),
            (Outcome.COMPILE_ERROR, "no x.", "compile_error: no x. What to do: correct what the message says"),
            (Outcome.WORKER_LOST, "killed by SIGSEGV; its last words:\nThread 1\n  File 2", "SIGSEGV. What to do: "),
        ],
    )
    def test_the_remedy_is_that_of_the_outcome(self, outcome: Outcome, message: str, reason: str) -> None:
        (task,) = World(behaviour=lambda candidate: outcome).tune(trials=5).tasks
        assert task.failure is not None
        assert reason in replace(task, failure=replace(task.failure, message=message)).why_invalid

    def test_a_task_with_one_valid_configuration_has_no_reason(self) -> None:
        behaviour = lambda c: square_ns(c) if c.config["x"] < 8 else Outcome.WRONG_ANSWER  # noqa: E731
        (task,) = World(behaviour=behaviour).tune(trials=20).tasks
        assert task.best_ns is not None and task.failures and task.why_invalid == ""

    def test_a_default_that_fails_is_explained_below_the_table(self) -> None:
        """Beside a valid configuration, so that the run succeeds: its author would not look for the failure."""
        default = World().tune(trials=1).tasks[0].best_config

        def wrong_default(candidate: Candidate) -> float | Outcome:
            return Outcome.WRONG_ANSWER if candidate.config == default else square_ns(candidate)

        summary = World(behaviour=wrong_default).tune(trials=20)
        assert default is not None and summary.complete
        config = " ".join(f"{name}={value}" for name, value in default.items())
        assert f"\n{WORKLOAD.label}: the default ({config}): wrong_answer: " in str(summary)
        assert "What to do: " in str(summary)
        assert "the default (" not in str(World().tune(trials=20))


class TestModel:
    def test_a_model_that_knows_the_truth_has_1_whatever_its_unit_after_each_fit(self) -> None:
        world = World(make_tuner=Predicting)
        summary = world.tune(trials=40)
        assert summary.ranking.correlation == pytest.approx(1.0)
        predicted = [record for record in world.searched if record.prediction is not None]
        assert 20 <= summary.ranking.trials <= len(predicted) < 40, "not the first ones"

    def test_one_that_believes_the_contrary_has_minus_1(self) -> None:
        assert World(make_tuner=Contrary).tune(trials=40).ranking.correlation == pytest.approx(-1.0)

    def test_failures_are_not_ranked(self) -> None:
        behaviour = lambda c: Outcome.WRONG_ANSWER if c.config["x"] < 8 else square_ns(c)  # noqa: E731
        summary = World(make_tuner=Predicting, behaviour=behaviour).tune(trials=60)
        assert summary.ranking.correlation == pytest.approx(1.0)
        assert summary.ranking.trials < 45

    def test_without_predictions_there_is_none(self) -> None:
        class Mute(RandomTuner):
            def predict(self, configs: Sequence[Config]) -> Any:
                return None

        summary = World(make_tuner=Mute).tune(trials=20)
        assert summary.ranking.correlation is None and summary.to_json()["rank_correlation"] is None
        assert "no predictions" in run_report.model_line(summary)


class TestBestSoFar:
    def test_it_is_the_running_minimum_of_the_records(self) -> None:
        def behaviour(candidate: Candidate) -> float | Outcome:
            return Outcome.COMPILE_ERROR if candidate.config["x"] < 10 else square_ns(candidate)

        world = World(behaviour=behaviour)
        (task,) = world.tune(trials=60).tasks
        times = [record.measurement.time_ns or np.inf for record in world.searched]
        expected = [None if np.isinf(best) else best for best in itertools.accumulate(times, min)]
        assert task.best_after_ns == tuple(expected)
        assert task.best_after_ns[0] is None and task.best_after_ns[-1] is not None

    def test_a_resumed_run_starts_from_the_known_results(self) -> None:
        world = World()
        (first,) = world.tune(trials=40).tasks
        (second,) = world.tune(trials=60).tasks
        assert len(second.best_after_ns) == second.new_trials == 20
        assert second.best_after_ns[0] <= first.best_after_ns[-1]  # type: ignore[operator]


class TestRates:
    def test_gbytes_a_second_are_shown_where_an_operator_computes_nothing(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        toy_package.install(monkeypatch, tmp_path / "site")
        copy = Workload("copy", {"rows": 1000, "dtype": "int8"})
        summary = World().tune(trials=60)
        (task,) = summary.tasks
        copied = replace(summary, tasks=(replace(task, workload=copy),))
        assert task.best_ns is not None
        header, _, row, *_ = run_report.results_text(copied, {}).splitlines()
        assert "GB/s" in header and "GFLOP/s" not in header
        moved = sum(array.nbytes for array in (*copy.signature, *copy.outputs))
        assert copied.tasks[0].gbytes_per_s == pytest.approx(moved / task.best_ns) and f"{moved / task.best_ns:.1f}" in row
        assert "GFLOP/s" in run_report.results_text(summary, {})

    def test_a_busy_machine_and_a_missing_race_are_said(self) -> None:
        summary = World().tune(trials=20)
        (task,) = summary.tasks
        assert task.race is not None
        noisy = replace(task, race=replace(task.race, best=replace(task.race.best, spread=0.5)))
        assert "±50.0%" in run_report.results_text(replace(summary, tasks=(noisy,)), {})
        assert "the machine is busy" in run_report.results_text(replace(summary, tasks=(noisy,)), {})
        assert "busy" not in run_report.results_text(summary, {})
        unraced = run_report.results_text(replace(summary, tasks=(replace(task, race=None),)), {})
        assert "~" in unraced and "no final race was held" in unraced and f"{task.speedup:.2f}x" not in unraced


class TestBuilds:
    def test_it_is_said_when_candidates_share_no_work(self) -> None:
        class Alone(FakeBuilder):
            def _build(self, candidate: Candidate) -> Built | Measurement:
                built = super()._build(candidate)
                assert isinstance(built, Built)
                return replace(built, shared=candidate.config["x"] != 0)

        assert run_report.builds_line(World().tune(trials=20)) == ""
        world = World(make_builder=Alone)
        summary = world.tune(trials=100)
        alone = sum(record.config["x"] == 0 for record in world.searched)
        assert summary.unshared == alone > 1
        assert run_report.builds_line(summary).startswith(f"{alone} candidates shared no work")


class TestIllegal:
    def test_a_tuner_that_breaks_the_rules_is_found_out(self) -> None:
        class Lawless(RandomTuner):
            asks = 0

            def ask(self, n: int) -> list[Config]:
                self.asks += 1
                return [*super().ask(n), Config(x=99, y=0)]

        world = World(make_tuner=Lawless)
        summary = world.tune(trials=20)
        assert summary.illegal == world.tuners[0].asks > 0
        assert all(candidate.config["x"] < 16 for candidate in world.builder.submitted)
        assert [task.trials for task in summary.tasks] == [20]
        assert f"{summary.illegal} illegal" in run_report.model_line(summary)

    def test_one_that_does_nothing_else_ends_the_run(self) -> None:
        class Hopeless(RandomTuner):
            def ask(self, n: int) -> list[Config]:
                return [Config(x=99, y=0)] * n

        summary = World(make_tuner=Hopeless).tune(trials=20)
        assert (summary.stopped, summary.new_trials) == ("exhausted", 1), "the default"

    def test_our_tuners_do_not(self) -> None:
        assert World().tune(trials=20).illegal == 0


class TestBudget:
    def test_shares_are_those_of_the_records(self) -> None:
        world = World()
        summary = world.tune(WORKLOAD, OTHER, trials=30)
        shares = [summary.budget_shares(task) for task in summary.tasks]
        for task, (trials, seconds) in zip(summary.tasks, shares):
            own = [record for record in world.searched if record.workload == task.workload]
            assert trials == pytest.approx(len(own) / 60)
            assert seconds == pytest.approx(task.seconds / sum(each.seconds for each in summary.tasks))
        assert [sum(column) for column in zip(*shares)] == pytest.approx([1.0, 1.0])

    def test_a_run_without_trials_has_none(self) -> None:
        world = World()
        world.tune(trials=20)
        summary = world.tune(trials=20)
        assert summary.budget_shares(summary.tasks[0]) == (0.0, 0.0)
        assert run_report.search_text(summary, {}) == ""


class TestNothingNew:
    @pytest.mark.parametrize(("stopped", "told"), [
        ("interrupted", "ended before its first result"), ("time", "ended before its first result"),
        ("trials", "all trials were measured before"), ("exhausted", "all trials were measured before"),
    ])  # fmt: skip
    def test_why_a_run_measured_nothing(self, stopped: str, told: str) -> None:
        assert told in run_report.nothing_new_text(replace(World().tune(trials=1), stopped=stopped))

    @pytest.mark.parametrize(("trials", "told"), [(0, "not tried yet"), (3, "none is valid")])
    def test_a_task_without_a_trial_is_not_called_invalid(self, trials: int, told: str) -> None:
        summary = World().tune(trials=1)
        task = replace(summary.tasks[0], template=None, best_ns=None, default_ns=None, trials=trials, new_trials=0)
        assert told in run_report.results_text(replace(summary, tasks=(task,)), {})


class TestOutput:
    def test_the_keys_of_json(self) -> None:
        data = json.loads(json.dumps(World(make_tuner=Predicting).tune(WORKLOAD, OTHER, trials=30).to_json()))
        assert {"rank_correlation", "ranked_trials", "illegal_proposals", "shares", "stopped", "wall_s"} <= set(data)
        for task in data["tasks"]:
            assert {"best_ns", "default_ns", "trials", "new_trials", "outcomes", "seconds", "templates"} <= set(task)
            assert {"rank_correlation", "ranked_trials", "illegal_proposals"} <= set(task)
            assert len(task["best_after_ns"]) == task["new_trials"]
        assert sum(task["share_of_trials"] for task in data["tasks"]) == pytest.approx(1, abs=1e-3)

    def test_one_task_has_times_only(self) -> None:
        summary = World().tune(trials=60)
        header, _, row = run_report.search_text(summary, {WORKLOAD.id: "mine"}).splitlines()
        assert header.split("  ")[0].strip() == "best so far" and header.split()[3:] == ["at", "10", "at", "25", "at", "50"]
        assert row.split()[0] == "mine"
        after = summary.tasks[0].best_after_ns
        assert row.split()[1::2] == [f"{after[i - 1]:.4g}" for i in (10, 25, 50)]

    def test_several_tasks_show_how_the_budget_was_shared(self) -> None:
        summary = World().tune(WORKLOAD, OTHER, trials=30)
        header, _, *rows = run_report.search_text(summary, {}).splitlines()
        assert header.endswith("of trials  of time") and len(rows) == 2

    def test_only_some_of_many_tasks_are_shown(self) -> None:
        layers = [WORKLOAD.replace(n=n) for n in range(1, 13)]
        lines = run_report.search_text(World().tune(*layers, trials=12), {}).splitlines()
        assert len(lines) == 2 + 8 + 1 and lines[-1] == "and 4 tasks more (--json has all)"

    def test_few_trials_are_looked_at_more_closely(self) -> None:
        """A quick first run also shows how its budget was shared."""
        header, _, *rows = run_report.search_text(World().tune(WORKLOAD, OTHER, trials=4), {}).splitlines()
        assert header.split()[3:7] == ["at", "1", "at", "2"] and header.endswith("of trials  of time") and len(rows) == 2

    @pytest.mark.parametrize(("ratio", "told"), [(1.0, False), (1.02, False), (1.3, True), (0.8, True)])
    def test_a_race_with_other_times_than_the_search_is_explained(self, ratio: float, told: bool) -> None:
        summary = World().tune(trials=20)
        (task,) = summary.tasks
        found_ns = task.best_after_ns[-1]
        assert found_ns is not None
        assert task.race is not None
        race = replace(task.race, best=replace(task.race.best, time_ns=ratio * found_ns))
        raced = replace(summary, tasks=(replace(task, race=race),))
        assert ("final race" in run_report.race_line(raced)) is told

    def test_without_new_trials_there_is_no_race_to_explain(self) -> None:
        world = World()
        world.tune(trials=20)
        assert run_report.race_line(world.tune(trials=20)) == ""
