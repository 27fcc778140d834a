"""`schedsearch tune` on this machine's CPU: output, exit codes, and the state after an interruption or a kill."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_support import ONE_THREAD, TINY, alive, children, events, isolate, schedsearch, start
from session_support import Counted

from schedsearch.cli.tune import _conclude, _print_next
from schedsearch.config import Config
from schedsearch.device.detect import detect
from schedsearch.errors import NoValidConfigError, UsageError
from schedsearch.measure import DeviceLock
from schedsearch.measurement import COLD_GRAPH, COLD_GRAPH_PREPARED
from schedsearch.records.store import Store
from schedsearch.session.plan import TaskPlan
from schedsearch.template import TemplateSet, registry
from schedsearch.workload import Workload

PATIENCE_S = 240.0  # enough for a busy machine; the events usually take seconds
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with tiny.yaml. The test touches nothing outside of it."""
    monkeypatch.chdir(tmp_path)
    isolate(tmp_path, monkeypatch)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path


class TestDryRun:
    def test_the_quickstart_is_planned_and_nothing_is_touched(self, folder: Path) -> None:
        before = sorted(path.name for path in folder.iterdir())
        result = schedsearch("tune", EXAMPLES / "quickstart.yaml", "--target", "cpu", "--dry-run")
        assert result.exit_code == 0, result.output
        assert "conv2d_cpu" in result.stdout
        assert re.search(r"28x28, 128 channels .* \d+,\d+", result.stdout), "the size of the space"
        assert "roughly" in result.stdout
        assert sorted(path.name for path in folder.iterdir()) == before

    @pytest.mark.parametrize("device", ["a100", "h200"])
    def test_a_gpu_that_is_not_here_can_be_planned_for(self, folder: Path, device: str) -> None:
        result = schedsearch("tune", EXAMPLES / "quickstart.yaml", "--target", device, "--dry-run", "--json")
        plan = json.loads(result.stdout)
        assert plan["event"] == "plan" and plan["target"].startswith("cuda:sm_")
        for task in plan["tasks"]:
            assert {entry["template"] for entry in task["templates"]} >= {"conv2d_mma"}
            assert all(entry["configurations"] > 1 for entry in task["templates"])

    def test_a_run_gets_the_plan_of_the_command(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        counted = Counted()
        monkeypatch.setattr("schedsearch.template.load_templates", lambda: TemplateSet([counted]))
        monkeypatch.setattr("schedsearch.session.plan_tasks", None)  # planning a second time would fail

        def stop(plans: list[TaskPlan], *args: object, **options: object) -> None:
            raise UsageError(f"{len(plans)} plan of {plans[0].task.name}")

        monkeypatch.setattr("schedsearch.session.tune", stop)
        assert "1 plan of tiny" in schedsearch("tune", "tiny.yaml").stderr
        assert set(counted.calls.values()) == {1} and {name for name, _ in counted.calls} == {"space", "default"}

    def test_options_override_the_file(self, folder: Path) -> None:
        plan = json.loads(schedsearch("tune", "tiny.yaml", "--dry-run", "--json", "--trials", 7, "--time", "1h30m").stdout)
        assert (plan["trials"], plan["time_s"]) == (7, 5400.0)


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "exit_code", "text"),
        [
            (["tune", "missing.yaml"], 2, "missing.yaml"),
            (["tune"], 2, "WORKLOAD.yaml"),
            (["tune", "tiny.yaml", "--trails", "3"], 2, "--trials"),
            (["tune", "tiny.yaml", "--trials", "0"], 2, "'--trials': 0 is too small; allowed: 1 or more"),
            (["tune", "tiny.yaml", "--trials", "few"], 2, "'few' is not an integer; allowed: 1 or more"),
            (["tune", "tiny.yaml", "--time", "0"], 2, "90s, 10m"),
            (["tune", "."], 2, "directory"),
            (["tune", "tiny.yaml", "--db", "."], 6, "folder"),
            (["tune", "tiny.yaml", "--time", "soon"], 2, "90s, 10m"),
            (["tune", "tiny.yaml", "--tuner", "xbg"], 2, "'xgb', 'ga', 'annealing', 'random', 'grid'"),
            (["tune", "tiny.yaml", "--target", "gpu"], 2, "cuda:N"),
            (["tune", "tiny.yaml", "--target", "h200"], 2, "allowed"),
            (["tune", "tiny.yaml", "--db", "no/such/folder.db"], 6, "no/such"),
            (["tnue", "tiny.yaml"], 2, "No such command 'tnue' (did you mean 'tune'?)"),
        ],
    )
    def test_one_line_says_what_and_the_exit_code_which_kind(
        self, folder: Path, arguments: list[str], exit_code: int, text: str
    ) -> None:
        result = schedsearch(*arguments)
        assert result.exit_code == exit_code, result.output
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("schedsearch: ")
        assert text in result.stderr

    @pytest.mark.parametrize(
        ("command", "file", "told"),
        [
            ("tune", "net.onnx", "schedsearch build net.onnx --tune 10m"),
            ("space", "net.onnx", "schedsearch extract net.onnx -o net.yaml"),
            ("explain", "records.db", "schedsearch records list --db records.db"),
            ("build", "layers.yaml", "schedsearch tune layers.yaml"),
            ("extract", "net.ssx", "schedsearch run net.ssx"),
            ("run", "layers.yml", "schedsearch tune layers.yml"),
            ("dashboard", "layers.yaml", "schedsearch tune layers.yaml"),
            ("report", "net.onnx", "schedsearch build net.onnx"),
        ],
    )
    def test_a_file_of_another_kind_is_told_with_the_command_that_takes_it(
        self, folder: Path, command: str, file: str, told: str
    ) -> None:
        result = schedsearch(command, file)
        assert result.exit_code == 2 and told in result.stderr and result.stderr.count("\n") == 1

    def test_without_a_command_there_is_help(self, folder: Path) -> None:
        for arguments in ([], ["records"]):
            result = schedsearch(*arguments)
            assert result.exit_code == 2
            assert result.stderr.startswith("Usage: ") and "--help" in result.stderr

    def test_mistakes_that_only_a_template_finds_are_shown_with_all_others(self, folder: Path) -> None:
        other = TINY.partition("tasks:\n")[2].replace("tiny", "other").replace("n: 1", "n: 2")
        wrong = TINY.replace("trials: 4", "trials: many") + "    restrict: {thread: [1]}\n    templates: [conv2d_cpus]\n"
        (folder / "wrong.yaml").write_text(wrong + other.replace("float32", "fp32") + "    restrict: {threads: [99]}\n")
        for command in (["tune"], ["tune", "--dry-run"], ["space"]):
            result = schedsearch(command[0], folder / "wrong.yaml", *command[1:])
            assert result.exit_code == 2
            places = re.findall(r"wrong.yaml:(\d+):\d+: (.*)", result.stderr)
            assert next(text for line, text in places if line == "2").startswith("trials must be an integer")
            told = " ".join(text for _, text in places)
            assert "unknown knob 'thread' (did you mean 'threads'?)" in told
            assert "no template 'conv2d_cpus' (did you mean 'conv2d_cpu'?)" in told
            assert "dtype 'fp32' is not possible (did you mean 'float32'?)" in told

    def test_all_mistakes_of_a_file_are_shown_at_their_place(self, folder: Path) -> None:
        (folder / "wrong.yaml").write_text(TINY.replace("budget", "bugdet").replace("k: 8", "k: -8"))
        result = schedsearch("tune", "wrong.yaml")
        assert result.exit_code == 2
        assert "wrong.yaml:2:1" in result.stderr and "budget" in result.stderr
        assert "wrong.yaml:8:" in result.stderr and "^" in result.stderr

    @pytest.mark.parametrize(
        ("line", "text"),
        [
            ("restrict: {blok: [8]}", "did you mean 'block'"),
            ("restrict: {block: [7]}", "7"),
            ("restrict: {threads: [1], block: [12345]}", "12345"),
            ("templates: [conv2d_cup]", "did you mean 'conv2d_cpu'"),
            ("templates: [conv2d_mma]", "conv2d_mma is for cuda"),
        ],
    )
    def test_mistakes_that_only_a_template_sees_point_into_the_file_too(self, folder: Path, line: str, text: str) -> None:
        (folder / "wrong.yaml").write_text(TINY + f"    {line}\n")
        result = schedsearch("tune", "wrong.yaml", "--dry-run")
        assert result.exit_code == 2
        assert re.search(r"wrong\.yaml:10:\d+", result.stderr) and text in result.stderr

    def test_a_gpu_that_is_asked_for_and_missing_exits_with_3(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from schedsearch.device import cuda_driver
        from schedsearch.errors import DeviceError

        def missing(ordinal: int) -> None:
            raise DeviceError("there is no CUDA device")

        monkeypatch.setattr(cuda_driver, "describe_device", missing)
        result = schedsearch("tune", "tiny.yaml", "--target", "cuda")
        assert (result.exit_code, len(result.stderr.splitlines())) == (3, 1)

    def test_databases_that_cannot_be_used_exit_with_6_and_keep_their_content(self, folder: Path) -> None:
        Store.open("good.db").close()
        whole = Path("good.db").read_bytes()
        Path("truncated.db").write_bytes(whole[: len(whole) // 3])
        Path("text.db").write_text("no database at all, but long enough to look at" * 20)
        with Store.open("newer.db") as store, store.database.write() as connection:
            connection.exec_driver_sql("UPDATE meta SET value = '999' WHERE key = 'schema_version'")
        for name in ("truncated.db", "text.db", "newer.db"):
            before = Path(name).read_bytes()
            result = schedsearch("tune", "tiny.yaml", "--db", name)
            assert (result.exit_code, len(result.stderr.splitlines())) == (6, 1), name
            assert name in result.stderr
            assert Path(name).read_bytes() == before

    def test_a_database_that_another_process_keeps_locked_exits_with_6(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(Store.open.__func__.__kwdefaults__, "busy_timeout_s", 0.2)  # type: ignore[attr-defined]
        Store.open("t.db").close()
        holder = sqlite3.connect("t.db", isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        result = schedsearch("tune", "tiny.yaml", "--db", "t.db")
        holder.close()
        assert result.exit_code == 6, result.output
        *before, last = result.stderr.splitlines()  # on a busy machine it says what it does before it opens the database
        assert "lock" in last and "Traceback" not in result.stderr, before

    def test_a_held_device_exits_with_3_when_told_not_to_wait(self, folder: Path) -> None:
        lock = DeviceLock(detect("cpu"))
        try:
            process = start("tune", "tiny.yaml", "--no-wait", cwd=folder)
            _, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            lock.close()
        assert process.returncode == 3
        *before, last = errors.splitlines()  # on a busy machine it says what it does before it asks for the device
        assert str(os.getpid()) in last and "Traceback" not in errors, before


class TestRun:
    def test_json_events_then_a_resumed_run_that_measures_nothing_then_more(self, folder: Path) -> None:
        result = schedsearch("tune", "tiny.yaml", "--db", "t.db", "--json")
        assert result.exit_code == 0, result.output
        told = events(result.stdout)
        assert told[0]["event"] == "start" and told[-1]["event"] == "summary"
        (task,) = told[-1]["tasks"]
        assert {
            "workload",
            "target",
            "template",
            "default_ns",
            "best_ns",
            "best_config",
            "trials",
            "outcomes",
            "seconds",
        } <= set(task)
        assert task["trials"] == sum(task["outcomes"].values()) == 4
        assert task["best_ns"] <= task["default_ns"], "never slower than the default"
        assert told[-1]["shares"]["device"] > 0
        searched = [event for event in told if event["event"] == "trial" and not event["final_race"]]
        assert [event["counted"] for event in searched] == [True] * 4

        again = schedsearch("tune", "tiny.yaml", "--db", "t.db", "--json")
        told_again = events(again.stdout)
        assert not [event for event in told_again if event["event"] == "trial"]
        assert told_again[-1]["tasks"][0]["best_config"] == task["best_config"]
        assert "4 trials measured before" not in again.stdout

        (folder / "auto.yaml").write_text(TINY.replace("target: cpu", "target: auto"))
        more = schedsearch("tune", "auto.yaml", "--target", "cpu", "--db", "t.db", "--trials", 5)
        assert more.exit_code == 0, more.output
        assert "1 new trial" in more.stdout and "device busy" in more.stdout
        assert "schedsearch records best --db t.db" in more.stdout
        assert "schedsearch compile auto.yaml --db t.db --target cpu --output" in more.stdout, (
            "the tuned target, even on a machine with a GPU"
        )
        assert "kernel = schedsearch.compile(workload, db='t.db', target='cpu')" in more.stdout
        assert "going on after 4 trials" in more.stderr
        header, _, row, *_ = more.stdout.splitlines()
        for column in ("task", "template", "plain", "default", "best", "over plain", "over default", "GFLOP/s", "trials"):
            assert column in header
        assert row.startswith("tiny  conv2d_cpu")
        with Store.open("t.db", readonly=True) as store:
            records = store.history()
        assert len({record.config for record in records if not record.final_race}) == 5

    def test_a_task_without_valid_configuration_exits_with_1_and_says_where_to_look(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(registry.BUILT_IN, "raising_template", "faulty_templates:RaisingTemplate")
        monkeypatch.setitem(registry.BUILT_IN, "missing_product", "faulty_templates:MissingProduct")
        text = TINY.replace("r: 3, s: 3", "r: 1, s: 1") + "    templates: [raising_template, missing_product]\n"
        (folder / "faulty.yaml").write_text(text)
        result = schedsearch("tune", "faulty.yaml", "--db", "t.db")
        assert result.exit_code == 1
        assert "records list --db t.db --failed" in result.stderr.splitlines()[-1]
        assert "compile_error" in result.stdout and "wrong_answer" in result.stdout
        listed = schedsearch("records", "list", "--db", "t.db", "--failed", "--json")
        failures = json.loads(listed.stdout)
        assert {entry["outcome"] for entry in failures} == {"compile_error", "wrong_answer"}
        assert all(entry["message"] for entry in failures)
        assert json.loads(schedsearch("records", "best", "--db", "t.db", "--json").stdout) == []

    @pytest.mark.parametrize(("failures", "is_shown"), [({}, False), ({"wrong_answer": 2}, True)])
    def test_records_are_named_only_if_a_trial_failed(self, folder: Path, failures: dict[str, int], is_shown: bool) -> None:
        """No trial begins where the arrays of a task do not fit into memory."""
        workload = Workload("softmax", {"x": [4, 4]})
        file = SimpleNamespace(tasks=[SimpleNamespace(workload=workload, name="large")])
        task = SimpleNamespace(
            best_ns=None, problem="its arrays do not fit", why_invalid="", outcomes=failures, failures=failures
        )
        summary: Any = SimpleNamespace(tasks=[task], ranges=[])
        with pytest.raises(NoValidConfigError, match=r"found for large \(its arrays do not fit\)") as caught:
            _conclude(summary, file, "t.db", "cpu", COLD_GRAPH, True)  # type: ignore[arg-type]
        assert ("records list" in str(caught.value)) == is_shown

    def test_a_range_without_kernels_says_once_where_its_failures_are(self) -> None:
        workload = Workload("softmax", {"x": [4, 4]})
        of_range = SimpleNamespace(label="softmax, 4 to 64 rows")
        found = SimpleNamespace(of_range=of_range, table=None, problem="no configuration runs softmax 4x4", to_json=dict)
        summary: Any = SimpleNamespace(tasks=[], ranges=[found])
        file: Any = SimpleNamespace(tasks=[SimpleNamespace(workload=workload, name="")])
        with pytest.raises(NoValidConfigError) as caught:
            _conclude(summary, file, "t.db", "cpu", COLD_GRAPH, True)
        assert str(caught.value) == (
            "no valid configuration was found for softmax, 4 to 64 rows (no configuration runs softmax 4x4); "
            "see why: schedsearch records list --db t.db --failed"
        )


OTHERS = (signal.SIGTERM, signal.SIGHUP)  # which end a run as Ctrl-C does


class TestInterruption:
    def until_first_trial(self, process: subprocess.Popen[str]) -> list[dict[str, object]]:
        assert process.stdout is not None
        told = []
        for line in process.stdout:
            told.append(json.loads(line))
            if told[-1]["event"] == "trial":
                return told
        pytest.fail(f"ended early: {process.stderr.read() if process.stderr else ''}")

    @pytest.mark.parametrize("number", [signal.SIGINT, *(pytest.param(each, marks=pytest.mark.long) for each in OTHERS)])
    def test_the_first_signal_saves_everything_and_says_how_to_go_on(self, folder: Path, number: signal.Signals) -> None:
        (folder / "tiny.yaml").write_text(ONE_THREAD)
        process = start("tune", "tiny.yaml", "--db", "t.db", "--trials", 3000, "--json", "--fresh", cwd=folder)
        self.until_first_trial(process)
        workers = children(process.pid)
        process.send_signal(number)
        output, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130, errors
        assert "schedsearch tune tiny.yaml --db t.db --trials 3000 --json" in errors and "--fresh" not in errors
        summary = events(output)[-1]
        assert (summary["event"], summary["stopped"]) == ("summary", "interrupted")
        with Store.open(folder / "t.db") as store:
            records = store.history()
            (run,) = store.runs()
        assert len(records) == summary["tasks"][0]["trials"] >= 1
        assert not any(record.final_race for record in records)
        assert run["finished_at"] is not None
        assert workers and not any(alive(worker) for worker in workers)

    @pytest.mark.long
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_before_the_search_begins_is_an_interruption_too(self, folder: Path, number: signal.Signals) -> None:
        lock = DeviceLock(detect("cpu"))  # makes the command wait at its start
        try:
            process = start("tune", "tiny.yaml", "--db", "t.db", "--json", cwd=folder)
            assert process.stderr is not None
            waiting = process.stderr.readline()
            process.send_signal(number)
            output, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            lock.close()
        assert str(os.getpid()) in waiting
        assert (process.returncode, output) == (130, ""), errors
        assert "interrupted" in errors.splitlines()[-1] and "Traceback" not in errors

    def test_a_kill_loses_only_the_trial_under_way_and_leaves_no_process(self, folder: Path) -> None:
        (folder / "tiny.yaml").write_text(ONE_THREAD)
        process = start("tune", "tiny.yaml", "--db", "t.db", "--trials", 3000, "--json", cwd=folder)
        told = self.until_first_trial(process)
        assert process.stdout is not None
        workers = children(process.pid)
        process.kill()
        rest, _ = process.communicate(timeout=PATIENCE_S)
        told += [json.loads(line) for line in rest.splitlines() if line.endswith("}")]
        reported = {Config(event["config"]) for event in told if event["event"] == "trial" and event["outcome"] == "ok"}  # type: ignore[arg-type]
        with Store.open(folder / "t.db") as store:
            stored = {record.config for record in store.history() if record.measurement.ok}
        assert reported <= stored, "every reported trial had been saved"
        assert len(stored) <= len(reported) + 1
        deadline = time.monotonic() + PATIENCE_S
        while any(alive(worker) for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert workers and not any(alive(worker) for worker in workers), "an orphan would hold the device"

        done = len(stored)
        result = schedsearch("tune", "tiny.yaml", "--db", "t.db", "--trials", done + 1, "--json", "--no-wait")
        assert result.exit_code == 0, result.output
        (task,) = events(result.stdout)[-1]["tasks"]
        assert task["trials"] == done + 1


def test_the_suggested_commands_name_the_timing_mode(capsys: pytest.CaptureFixture[str]) -> None:
    """Each mode has its own commands, because records of another mode do not count and prepared times need preparation."""
    workload = Workload("conv2d", {"n": 1, "h": 4, "w": 4, "c": 8, "k": 8, "r": 1, "s": 1, "epilogue": ["bias"]})
    summary: Any = SimpleNamespace(tasks=[SimpleNamespace(best_ns=1.0, workload=workload)], ranges=())
    file: Any = SimpleNamespace(path="my.yaml", target="auto", measure=SimpleNamespace(mode=COLD_GRAPH))
    _print_next(summary, file, "r.db", "auto", COLD_GRAPH_PREPARED)
    text = capsys.readouterr().out
    assert "schedsearch compile my.yaml --db r.db --mode cold-graph-prepared-v1 --output kernels.db" in text
    assert "kernel = schedsearch.compile(workload, db='r.db', mode='cold-graph-prepared-v1')" in text
    assert "prepared = kernel.prepare(weight=weight, bias=bias)\n  y = kernel(x, **prepared)" in text
    _print_next(summary, file, "r.db", "auto", COLD_GRAPH)
    text = capsys.readouterr().out
    assert "mode" not in text and "y = kernel(x, weight, bias)" in text
    _print_next(summary, file, "postgresql://host/db", "auto", COLD_GRAPH)
    text = capsys.readouterr().out
    assert "schedsearch compile my.yaml --db postgresql://host/db --output kernels.db" in text
    assert "kernel = schedsearch.compile(workload, db='kernels.db')" in text, "kernels are loaded from files"
    summary.tasks[0].best_ns = None
    _print_next(summary, file, "r.db", "auto", COLD_GRAPH)
    assert not capsys.readouterr().out, "nothing was found that could be looked at or called"


def test_the_suggested_call_names_the_scalars_with_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"n": 1, "h": 4, "w": 4, "c": 8, "k": 8, "r": 1, "s": 1, "dtype": "uint8", "weight_dtype": "int8"}
    workload = Workload("conv2d", {**sizes, "zero_points": ["x"], "epilogue": ["requantise"]})
    summary: Any = SimpleNamespace(tasks=[SimpleNamespace(best_ns=1.0, workload=workload)], ranges=())
    file: Any = SimpleNamespace(path="my.yaml", target="auto", measure=SimpleNamespace(mode=COLD_GRAPH))
    _print_next(summary, file, "r.db", "auto", COLD_GRAPH)
    text = capsys.readouterr().out
    assert "y = kernel(x, weight, requantise_scale, x_zero_point=0, y_zero_point=0)" in text
