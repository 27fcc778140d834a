"""The dashboard's answers: what they say about sample databases, and that they bear any state of a file."""

from __future__ import annotations

import contextlib
import json
import math
import random
import shutil
import sqlite3
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dashboard_support import (
    A100,
    DEFAULT,
    H200,
    HOSTILE,
    SMALL,
    TEMPLATES,
    a_trial,
    add_trials,
    answers_of,
    hostile_database,
    insert,
    sample_database,
    search,
    start_run,
)  # fmt: skip
from records_support import as_of_an_operator_that_is_not_installed

from schedsearch.dashboard.answers import Answers, UnknownPathError
from schedsearch.measurement import Measurement, Outcome, Record
from schedsearch.records.store import Store
from schedsearch.roofline import suspect_time_ns
from schedsearch.workload import Workload


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_database(tmp_path_factory.mktemp("sample") / "a.db")


def all_answers(answers: Answers) -> dict[str, Any]:
    """Every answer that can be asked for, each checked to be JSON."""
    view = answers.get("overview")
    paths = ["overview", "records", "replay", *(f"task/{task['key']}" for task in view["tasks"])]
    paths += [f"compare/{a}/{b}" for a, b in view["compared"]]
    found = {path: json.loads(answers.body(path)) for path in paths}
    for task in view["tasks"]:
        for number in found[f"task/{task['key']}"]["trials"]["id"][:3]:
            path = f"trial/{task['database']}.{number}"
            found[path] = json.loads(answers.body(path))
    return found


def task_of(answers: Answers, name: str, target: str = H200) -> dict[str, Any]:
    row = next(row for row in answers.get("overview")["tasks"] if (row["name"], row["target"]) == (name, target))
    view: dict[str, Any] = answers.get(f"task/{row['key']}")
    return view


def records_of(path: Path, target: str = H200) -> list[Record]:
    with Store.open(path, readonly=True) as store:
        return store.history(workload=SMALL, target=target)


class TestOverview:
    def test_a_task_has_the_times_of_its_final_race(self, sample: Path) -> None:
        raced = [record for record in records_of(sample) if record.final_race]
        best = min(record.measurement.time_ns or math.inf for record in raced)
        (default,) = [record.measurement.time_ns for record in raced if record.config == DEFAULT]
        with answers_of(sample) as answers:
            row = next(row for row in answers.get("overview")["tasks"] if row["target"] == H200 and row["name"] == "small")
        assert (row["best_ns"], row["default_ns"], row["raced"]) == (best, default, True)
        assert row["speedup"] == pytest.approx(default / best if default else 0)
        assert row["rate"] == pytest.approx(SMALL.flops / best)
        assert row["limit_share"] == pytest.approx(suspect_time_ns(SMALL, H200) / best)
        assert row["template"] == TEMPLATES[0]

    def test_counts_are_those_of_the_records(self, sample: Path) -> None:
        found = [record for record in records_of(sample) if not record.final_race]
        outcomes = [record.measurement.outcome for record in found]
        with answers_of(sample) as answers:
            row = answers.get("overview")["tasks"][0]
        assert row["trials"] == sum(outcome.is_trial for outcome in outcomes)
        assert row["valid"] == outcomes.count(Outcome.OK)
        assert row["rejected"] == outcomes.count(Outcome.REJECTED) == row["failures"]["rejected"]
        assert sum(row["failures"].values()) == len(outcomes) - outcomes.count(Outcome.OK)
        assert sum(template["trials"] for template in row["templates"]) == row["trials"]

    def test_the_curve_is_the_best_so_far(self, sample: Path) -> None:
        best, wanted, trials = math.inf, [], 0
        for record in records_of(sample):
            if record.final_race or not record.measurement.outcome.is_trial:
                continue
            trials += 1
            if (record.measurement.time_ns or math.inf) < best:
                best = record.measurement.time_ns or math.inf
                wanted.append([trials, best])
        with answers_of(sample) as answers:
            row = answers.get("overview")["tasks"][0]
        assert row["curve"] == wanted + ([[trials, best]] if wanted[-1][0] != trials else [])
        assert row["since_improvement_trials"] == trials - wanted[-1][0]

    def test_a_finished_run_has_the_shares_of_its_summary(self, sample: Path) -> None:
        with answers_of(sample) as answers:
            runs = answers.get("overview")["runs"]
        assert [run["state"] for run in runs] == ["finished", "finished"]
        assert runs[0]["shares"]["device"] == 0.61
        assert runs[0]["shares"]["other"] == pytest.approx(0.08)
        assert runs[0]["left_s"] is None

    def test_a_live_run_has_a_rate_and_time_left(self, tmp_path: Path) -> None:
        with answers_of(sample_database(tmp_path / "live.db", live=True)) as answers:
            view = answers.get("overview")
        run = view["runs"][0]
        assert (run["state"], run["target"], run["stopped"]) == ("running", A100, "")
        assert run["left_s"] == pytest.approx((run["budget_trials"] - run["trials"]) / run["trials_per_s"])
        assert [task["live"] for task in view["tasks"]] == [False, False, True]
        assert run["shares"]["build"] is None, "this run never told its shares"
        assert run["shares"]["builders_busy"] > 0

    def test_a_live_run_has_the_shares_that_it_told_last(self, tmp_path: Path) -> None:
        path = sample_database(tmp_path / "live.db", live=True, trials=10)
        shares = {"device": 0.5, "build": 0.25, "tuner": 0.125, "preparing": 0.0625}
        add_trials(path, run_so_far={"wall_s": 3.0, "phase": "measuring", "shares": shares})
        with answers_of(path) as answers:
            run = answers.get("overview")["runs"][0]
        told = {name: run["shares"][name] for name in (*shares, "other")}
        assert told == {**shares, "other": 0.0625}
        assert (run["state"], run["phase"]) == ("running", "measuring")
        assert run["wall_s"] > 4, "it began that long ago, whatever it told"

    def test_the_geometric_mean_is_of_raced_tasks(self, sample: Path) -> None:
        with answers_of(sample) as answers:
            view = answers.get("overview")
        assert view["raced_tasks"] == 3
        assert view["geomean_speedup"] == pytest.approx(statistics.geometric_mean(t["speedup"] for t in view["tasks"]))


class TestTask:
    def test_columns_are_the_records(self, sample: Path) -> None:
        found = records_of(sample)
        with answers_of(sample) as answers:
            view = task_of(answers, "small")
        columns, knobs = view["trials"], view["knobs"]
        assert {len(column) for column in columns.values()} == {len(found)}
        for i, record in enumerate(found):
            of = knobs[columns["template"][i]]
            config = {name: of["values"][k][columns["config"][i][k]] for k, name in enumerate(of["names"])}
            assert (of["template"], config) == (record.template, dict(record.config))
            assert view["outcomes"][columns["outcome"][i]] == record.measurement.outcome
            assert (columns["time_ns"][i] or 0.0) == pytest.approx(record.measurement.time_ns or 0.0, rel=1e-5)
            message = columns["message"][i]
            assert ("" if message is None else view["messages"][message]) == record.measurement.message
            assert columns["race"][i] == record.final_race
        assert columns["tuning_s"] == sorted(columns["tuning_s"])

    def test_the_knob_that_matters_is_first_and_failures_name_their_knob(self, sample: Path) -> None:
        with answers_of(sample) as answers:
            view = task_of(answers, "small")
        assert next(effect["knob"] for effect in view["knob_effects"] if effect["template"] == TEMPLATES[0]) == "tile"
        rejected = next(group for group in view["failures"] if group["outcome"] == "rejected")
        assert rejected["shared"][0] == {"knob": "stages", "value": 5, "share_in_group": 1.0, "share_elsewhere": 0.0}

    def test_models_are_judged_state_by_state(self, sample: Path) -> None:
        with answers_of(sample) as answers:
            view = task_of(answers, "small")
        assert view["agreement"] > 0.5  # the sample's predictions are good ones
        assert sum(model["trials"] for model in view["models"]) >= view["agreement_trials"] > 0
        predicted = [
            (view["trials"]["predicted_ns"][i], time_ns) for i, time_ns in enumerate(view["trials"]["time_ns"])
            if view["trials"]["predicted_ns"][i] is not None and time_ns is not None
        ]  # fmt: skip
        errors = [abs(math.log(one / other)) for one, other in predicted]
        assert statistics.median(errors) < 0.2

    def test_the_race_is_ranked_and_marks_the_default(self, sample: Path) -> None:
        with answers_of(sample) as answers:
            view = task_of(answers, "small")
        race = view["race"]
        assert [entry["ratio"] for entry in race] == sorted(entry["ratio"] for entry in race)
        assert race[0]["is_best"] and [entry["is_default"] for entry in race].count(True) == 1
        assert len(race[0]["times_ns"]) == 16

    def test_new_records_appear_without_reading_all_again(self, tmp_path: Path) -> None:
        path = sample_database(tmp_path / "live.db", trials=20, live=True)
        with answers_of(path) as answers:
            before = task_of(answers, "small", A100)
            ids = add_trials(path, 3)
            changed = answers.refresh()
            after = task_of(answers, "small", A100)
            (run,) = (run["key"] for run in answers.get("overview")["runs"] if run["state"] == "running")
            assert changed == ["overview", "records", f"run/{run}", f"task/{after['row']['key']}"]
            assert answers.refresh() == []
        assert after["trials"]["id"] == before["trials"]["id"] + ids


class TestTrial:
    def test_it_has_everything_of_the_record(self, sample: Path) -> None:
        with Store.open(sample, readonly=True) as store:
            record = store.row(7)
        with answers_of(sample) as answers:
            view = answers.get("trial/0.7")
        assert view["config"] == dict(record.config)
        assert view["times_ns"] == list(record.measurement.times_ns)
        assert view["commands"][0]["command"] == f"schedsearch records show 7 --db {sample}"

    def test_differences_are_worth_what_pairs_say(self, tmp_path: Path) -> None:
        path = sample_database(tmp_path / "a.db", trials=20)
        with Store.open(path) as store:
            best = min((row for row in store.rows(workload=SMALL, target=H200) if row.measurement.ok),
                       key=lambda row: row.measurement.time_ns or 0).record()  # fmt: skip
            slow = type(best.config)({**best.config, "order": "column", "unused": 77})
            slower = type(best.config)({**best.config, "unused": 77})
            for config, time_ns in ((slow, 6000.0), (slower, 5000.0)):
                measurement = Measurement(Outcome.OK, times_ns=(time_ns,))
                last = store.append(replace(best, config=config, measurement=measurement, final_race=False, anchor=None))
        with answers_of(path) as answers:
            view = answers.get(f"trial/0.{last - 1}")
        order = next(each for each in view["differences"] if each["knob"] == "order")
        assert (order["here"], order["best"]) == ("column", "row")
        assert order["ratio"] <= 1.0 and order["pairs"] >= 1

    def test_the_command_to_measure_it_again_is_a_workload_file_for_this_configuration_only(self, sample: Path) -> None:
        from schedsearch.workload_file import load

        with answers_of(sample) as answers:
            view = answers.get("trial/0.7")
        text = next(each["command"] for each in view["commands"] if "tune" in each["command"])
        file = sample.parent / "again.yaml"
        file.write_text(text.split("'")[3])
        (task,) = load(file).tasks
        assert task.workload == SMALL
        assert {name: list(values) for name, values in task.restrict.items()} == {
            name: [value] for name, value in view["config"].items()
        }

    def test_that_workload_file_has_the_stages_of_an_epilogue(self, tmp_path: Path) -> None:
        from schedsearch.workload_file import load

        quantised = Workload.conv2d(
            n=1, h=7, w=7, c=16, k=32, r=3, s=3, padding=(1, 1, 1, 1), dtype="int8",
            epilogue=["bias", "relu", {"requantise": {"to": "uint8"}}],
        )  # fmt: skip
        path = tmp_path / "records.db"
        with Store.open(path) as store:
            run = start_run(store, A100, [quantised], 2, 1e9)
            store.append(a_trial(quantised, A100, TEMPLATES[0], DEFAULT, random.Random(1), 1e9, run=run))
        with answers_of(path) as answers:
            commands = answers.get("trial/0.1")["commands"]
        file = tmp_path / "again.yaml"
        file.write_text(next(each["command"] for each in commands if "tune" in each["command"]).split("'")[3])
        assert load(file).tasks[0].workload == quantised


class TestRecords:
    def test_a_page_is_filtered_and_sorted(self, sample: Path) -> None:
        with answers_of(sample) as answers:
            fast = answers.get("records", {"sort": "time_ns", "limit": "5"})["records"]
            failed = answers.get("records", {"outcome": "failed"})
            words = answers.get("records", {"text": "registers ptxas"})["records"]
            page = answers.get("records", {"offset": "2", "limit": "2"})["records"]
            whole = answers.get("records")["records"]
        assert fast["time_ns"] == sorted(whole["time_ns"], key=lambda time_ns: time_ns or math.inf)[:5]
        assert "ok" not in failed["records"]["outcome"] and failed["total"] == len(failed["records"]["id"])
        assert set(words["outcome"]) == {"compile_error"}
        assert page["id"] == whole["id"][2:4]
        assert whole["at_s"] == sorted(whole["at_s"], reverse=True)

    @pytest.mark.parametrize(
        "query", [{"offset": "-1"}, {"limit": "x"}, {"sort": "config; DROP"}, {"task": "0.zz"}, {"text": "%_'\""}]
    )
    def test_a_strange_query_is_no_error(self, sample: Path, query: dict[str, str]) -> None:
        with answers_of(sample) as answers:
            assert answers.get("records", query)["total"] >= 0


class TestAnyStateOfAFile:
    def test_a_missing_file_appears_later(self, tmp_path: Path) -> None:
        path = tmp_path / "later.db"
        with answers_of(path) as answers:
            row = answers.get("overview")["databases"][0]
            assert row["problem"].startswith(f"no database at {path}")
            assert all_answers(answers)["records"]["total"] == 0
            sample_database(path, trials=10)
            assert "overview" in answers.refresh()
            assert len(answers.get("overview")["tasks"]) == 3

    @pytest.mark.parametrize(
        ("content", "problem"),
        [(b"", "is empty"), (b"not a database" * 100, "is not a database"), (b"SQLite format 3\0", "truncated")],
    )
    def test_a_file_that_is_no_database_says_so(self, tmp_path: Path, content: bytes, problem: str) -> None:
        (tmp_path / "x.db").write_bytes(content)
        with answers_of(tmp_path / "x.db", tmp_path) as answers:
            rows = answers.get("overview")["databases"]
            all_answers(answers)
        assert problem in rows[0]["problem"]
        assert "is a folder" in rows[1]["problem"]

    def test_a_newer_schema_is_refused_with_its_remedy(self, tmp_path: Path) -> None:
        path = sample_database(tmp_path / "new.db", trials=4)
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
        with answers_of(path) as answers:
            assert "schema version 99" in answers.get("overview")["databases"][0]["problem"]
            all_answers(answers)

    def test_a_store_without_records_says_that_it_is_empty(self, tmp_path: Path) -> None:
        Store.open(tmp_path / "empty.db").close()
        with answers_of(tmp_path / "empty.db") as answers:
            assert answers.get("overview")["databases"][0]["problem"].startswith("no trials yet")
            all_answers(answers)

    def test_a_file_that_is_replaced_is_read_anew(self, tmp_path: Path) -> None:
        path, other = sample_database(tmp_path / "a.db", trials=30), sample_database(tmp_path / "b.db", trials=12, seed=3)
        with answers_of(path) as answers:
            other.replace(path)
            assert answers.refresh()
            assert answers.get("overview")["databases"][0]["records"] == 12 * 3 + 4 * 3
            path.unlink()
            assert answers.refresh() == ["overview", "records"]
            view = answers.get("overview")
            assert view["databases"][0]["problem"].startswith("no database")
            assert len(view["tasks"]) == 3  # what was read stays
            for task in view["tasks"]:
                assert answers.get(f"task/{task['key']}")["notes"]

    def test_nothing_is_written_not_even_to_an_old_database(self, tmp_path: Path) -> None:
        path = sample_database(tmp_path / "a.db", trials=10)
        before = path.read_bytes()
        with answers_of(path) as answers:
            all_answers(answers)
        assert path.read_bytes() == before
        assert [file.name for file in tmp_path.iterdir() if "a.db" in file.name] == ["a.db"]

    @pytest.mark.parametrize("version", [1, 2, 3])
    def test_older_schemas_are_read_as_they_are(self, tmp_path: Path, version: int) -> None:
        dump = Path(__file__).parent / "data" / f"schema_v{version}.sql"
        with contextlib.closing(sqlite3.connect(tmp_path / "old.db")) as connection:
            connection.executescript(dump.read_text(encoding="utf-8"))
        with answers_of(tmp_path / "old.db") as answers:
            found = all_answers(answers)
        assert found["overview"]["databases"][0]["problem"] == ""
        assert found["overview"]["tasks"]

    def test_operators_that_are_not_installed_are_shown_without_rates(self, tmp_path: Path) -> None:
        path = sample_database(tmp_path / "a.db", trials=30)
        as_of_an_operator_that_is_not_installed(path)
        with answers_of(path) as answers:
            found = all_answers(answers)
        row = found["overview"]["tasks"][0]
        assert "attention" in row["problem"] and row["rate"] is None and row["best_ns"]
        assert row["problem"] in found[f"task/{row['key']}"]["notes"]
        assert found["trial/0.1"]["commands"][0]["command"].startswith("schedsearch records show 1")

    def test_damaged_rows_are_left_out_and_named(self, tmp_path: Path) -> None:
        path = sample_database(tmp_path / "a.db", trials=30)
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("DROP TRIGGER record_is_never_changed")
            connection.execute("UPDATE record SET outcome = 'great', time_ns = NULL, times_ns = NULL WHERE id = 3")
            connection.execute("UPDATE record SET config = '[1' WHERE id = 5")
            connection.execute("UPDATE record SET clocks = 'x' WHERE id = 6")
        with answers_of(path) as answers:
            found = all_answers(answers)
            with pytest.raises(UnknownPathError, match="row 3: outcome is 'great'"):
                answers.get("trial/0.3")
        assert any("row 3: outcome is 'great'" in note for note in found["overview"]["databases"][0]["notes"])
        columns = found[f"task/{found['overview']['tasks'][0]['key']}"]["trials"]
        assert not {3, 5, 6} & set(columns["id"])

    @pytest.mark.parametrize(
        "name", ["", "task", "task/0.nope", "trial/0.x", "trial/7.1", "trial/0.1e3", "compare/0/9", "../a"]
    )
    def test_an_unknown_path_is_said_to_be_one(self, sample: Path, name: str) -> None:
        with answers_of(sample) as answers, pytest.raises(UnknownPathError):
            answers.get(name)


class TestSmallTasks:
    def only(self, tmp_path: Path, outcomes: list[Outcome]) -> dict[str, Any]:
        """The answers for a task with these results, without a run, a model or a race."""
        with Store.open(tmp_path / "x.db") as store:
            import random

            found = []
            for number, record in zip(outcomes, search(SMALL, H200, len(outcomes), random.Random(0), "", 1e9)):
                times = (100.0,) if number is Outcome.OK else ()
                found.append(replace(record, measurement=Measurement(number, times_ns=times), prediction=None, model=None))
            insert(store, found)
        with answers_of(tmp_path / "x.db") as answers:
            return all_answers(answers)

    def test_one_trial_only(self, tmp_path: Path) -> None:
        found = self.only(tmp_path, [Outcome.OK])
        row = found["overview"]["tasks"][0]
        view = found[f"task/{row['key']}"]
        assert (row["best_ns"], row["speedup"], row["raced"], row["curve"]) == (100.0, None, False, [[1, 100.0]])
        assert any("no final race" in note for note in view["notes"])
        assert any("no trial has a prediction" in note for note in view["notes"])
        assert (view["agreement"], view["models"], view["pairs"]) == (None, [], [])
        assert found["trial/0.1"]["differences"] == [] and found["trial/0.1"]["best"]

    def test_all_failures(self, tmp_path: Path) -> None:
        found = self.only(tmp_path, [Outcome.LAUNCH_ERROR, Outcome.REJECTED] * 3)
        row = found["overview"]["tasks"][0]
        assert (row["best_ns"], row["template"], row["curve"], row["trials"], row["valid"]) == (None, None, [], 3, 0)
        view = found[f"task/{row['key']}"]
        assert any("no trial is valid" in note for note in view["notes"])
        assert {group["count"] for group in view["failures"]} == {3}
        assert found["trial/0.1"]["ratio_to_best"] is None

    def test_only_rejects(self, tmp_path: Path) -> None:
        row = self.only(tmp_path, [Outcome.REJECTED])["overview"]["tasks"][0]
        assert (row["trials"], row["rejected"]) == (0, 1)


def test_foreign_text_is_data_and_what_does_not_show_is_escaped(tmp_path: Path) -> None:
    with answers_of(hostile_database(tmp_path / "h.db")) as answers:
        text = json.dumps(all_answers(answers), ensure_ascii=False)
        view = answers.get("overview")["tasks"][0]
    assert "\u202e" not in text
    assert view["name"] == HOSTILE.replace("\u202e", r"\u202e")


def test_a_copy_beside_has_keys_that_stay_the_same(sample: Path, tmp_path: Path) -> None:
    shutil.copy(sample, tmp_path / "copy.db")
    with answers_of(sample) as one, answers_of(tmp_path / "copy.db") as other:
        assert one.task_keys() == other.task_keys()
        assert one.get("overview")["sides"][0]["key"] == "0"


def test_the_tasks_of_a_replaced_database_are_announced_once(tmp_path: Path) -> None:
    answers = Answers([str(sample_database(tmp_path / "a.db", trials=20))])
    answers.refresh()
    gone = {f"task/{key}" for key in answers.task_keys()}
    Store.open(tmp_path / "b.db").close()
    (tmp_path / "b.db").replace(tmp_path / "a.db")
    assert gone and gone <= set(answers.refresh())
    assert answers.refresh() == []
    answers.close()
