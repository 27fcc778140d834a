"""`schedsearch records ...`, `compile` and `explain` on a database that a real run on this machine's CPU made."""

from __future__ import annotations

import json
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_support import ONE_THREAD, events, isolate, schedsearch
from records_support import as_of_an_operator_that_is_not_installed

from schedsearch.backend import compile_source
from schedsearch.device.detect import detect
from schedsearch.measurement import HOT_GRAPH, Measurement, Outcome
from schedsearch.records.store import Store
from schedsearch.template import load_template
from schedsearch.workload import Workload

TINY_CONV = {"n": 1, "h": 8, "w": 8, "c": 8, "k": 8, "r": 3, "s": 3, "dtype": "float32"}
OTHER = ONE_THREAD.replace("n: 1, h: 8", "n: 2, h: 8")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny.yaml, other.yaml, the database tuned.db of a run over the first, and this machine's key."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "tiny.yaml").write_text(ONE_THREAD)
    (folder / "other.yaml").write_text(OTHER)
    with pytest.MonkeyPatch.context() as patch:
        isolate(folder, patch)
        result = schedsearch("tune", folder / "tiny.yaml", "--db", folder / "tuned.db")
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def folder(tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it that a test may change, as the working folder."""
    shutil.copytree(tuned, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    isolate(tmp_path, monkeypatch)
    return tmp_path


def ok(*arguments: Any) -> str:
    result = schedsearch(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_list_show_and_best_agree_with_the_store(folder: Path) -> None:
    listed = json.loads(ok("records", "list", "--db", "tuned.db", "--json"))
    with Store.open("tuned.db", readonly=True) as store:
        history = store.history()
        (best,) = store.bests()
    assert [entry["id"] for entry in listed] == sorted((entry["id"] for entry in listed), reverse=True)
    assert len(listed) == len(history) > 4
    shown = json.loads(ok("records", "show", best.record_id, "--db", "tuned.db", "--json"))
    assert shown["config"] == dict(best.record.config)
    assert shown["measurement"]["times_ns"] == list(best.record.measurement.times_ns)
    (told,) = json.loads(ok("records", "best", "--db", "tuned.db", "--json"))
    assert (told["id"], told["time_ns"]) == (best.record_id, best.record.measurement.time_ns)


def test_tables_are_for_people(folder: Path) -> None:
    label = "conv2d 1x8x8x8 k8 3x3 f32 NHWC"
    assert label in ok("records", "list", "--db", "tuned.db", "--limit", "2")
    assert label in ok("records", "best", "--db", "tuned.db")
    assert "toolchain" in ok("records", "show", "1", "--db", "tuned.db")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--op", "conv2d"], True),
        (["--op", "matmul"], False),
        (["--template", "conv2d_cpu"], True),
        (["--template", "conv2d_mma"], False),
        (["--outcome", "ok"], True),
        (["--outcome", "wrong_answer"], False),
        (["--target", "cpu"], True),
        (["--target", "h200"], False),
        (["--failed"], False),
        (["--run", "nobody"], False),
    ],
)
def test_list_filters(folder: Path, options: list[str], expected: bool) -> None:
    assert bool(json.loads(ok("records", "list", "--db", "tuned.db", "--json", *options))) is expected


def test_a_list_without_records_says_that_none_fits(folder: Path) -> None:
    assert "no record fits" in schedsearch("records", "list", "--db", "tuned.db", "--workload", "nothing").stderr
    assert "no record fits" not in schedsearch("records", "list", "--db", "tuned.db").stderr


def test_the_latest_failures_of_any_kind_are_listed(folder: Path) -> None:
    with Store.open("tuned.db") as store:
        ok_record = store.rows(outcomes={Outcome.OK}, limit=1)[0].record()
        failures = [
            store.append(replace(ok_record, batch=batch, measurement=Measurement(outcome, message=f"{outcome}!")))
            for batch, outcome in enumerate((Outcome.REJECTED, Outcome.WRONG_ANSWER, Outcome.REJECTED))
        ]
    listed = json.loads(ok("records", "list", "--db", "tuned.db", "--failed", "--limit", "2", "--json"))
    assert [entry["id"] for entry in listed] == [failures[2], failures[1]]
    assert [(entry["outcome"], entry["message"], entry["time_ns"]) for entry in listed] == [
        ("rejected", "rejected!", None),
        ("wrong_answer", "wrong_answer!", None),
    ]
    table = ok("records", "list", "--db", "tuned.db", "--failed")
    assert table.count("rejected!") == 2 and table.count("wrong_answer!") == 1 and "best" not in table


def test_records_of_an_operator_that_is_not_installed_are_listed_with_a_note(folder: Path) -> None:
    known = json.loads(ok("records", "best", "--db", "tuned.db", "--json"))
    with Store.open("tuned.db") as store:
        for size in (1, 2):
            other = store.append(
                replace(store.row(known[0]["id"]).record(), workload=Workload.conv2d(**TINY_CONV | {"n": size + 2}))
            )
            store.promote(other)
    as_of_an_operator_that_is_not_installed(Path("tuned.db"), except_for=known[0]["workload_id"])
    for command in (["list", "--limit", 100], ["best"]):
        table = ok("records", *command, "--db", "tuned.db")
        assert "conv2d 1x8x8x8 k8 3x3 f32 NHWC" in table, "the others are not affected"
        assert table.count("  attention ") == 2 and table.count("note: ") == 1 and "'attention'" in table
    bests = json.loads(ok("records", "best", "--db", "tuned.db", "--json"))
    assert [entry["workload"]["op"] for entry in bests] == ["attention", "attention", "conv2d"]
    assert bests[2] == known[0] and "attention" in bests[0]["problem"]
    assert "note: " in ok("records", "show", other, "--db", "tuned.db")
    assert ok("records", "export", "all.jsonl", "--db", "tuned.db")


def test_a_target_may_be_given_by_its_key(folder: Path) -> None:
    key = detect("cpu").key
    assert json.loads(ok("records", "best", "--db", "tuned.db", "--target", key, "--json"))[0]["target"] == key


def test_export_and_import_bring_everything_back(folder: Path) -> None:
    ok("records", "export", "all.jsonl", "--db", "tuned.db", "--artifacts")
    ok("records", "import", "all.jsonl", "--db", "copy.db")
    for command in (["list", "--limit", 100], ["best"]):
        one, two = (json.loads(ok("records", *command, "--db", db, "--json")) for db in ("tuned.db", "copy.db"))
        for entry in one + two:
            entry.pop("source", None)
        assert one == two
    report = json.loads(ok("records", "import", "all.jsonl", "--db", "copy.db", "--json"))
    assert report["records_added"] == 0


def test_a_wrong_line_imports_nothing_and_is_named(folder: Path) -> None:
    ok("records", "export", "all.jsonl", "--db", "tuned.db")
    lines = Path("all.jsonl").read_text().splitlines()
    Path("wrong.jsonl").write_text("\n".join([*lines[:4], "{not json", *lines[4:]]))
    result = schedsearch("records", "import", "wrong.jsonl", "--db", "copy.db")
    assert result.exit_code == 2 and "wrong.jsonl:5" in result.stderr and len(result.stderr.splitlines()) == 1

    before = ok("records", "list", "--db", "tuned.db", "--json")
    assert schedsearch("records", "import", "wrong.jsonl", "--db", "tuned.db").exit_code == 2
    assert ok("records", "list", "--db", "tuned.db", "--json") == before


@pytest.mark.parametrize(
    ("command", "file", "code"),
    [("import", "tiny.yaml", 2), ("import", "nowhere", 2), ("merge", "tiny.yaml", 6), ("merge", "nowhere", 6)],
)
def test_a_failed_command_leaves_no_new_database(folder: Path, command: str, file: str, code: int) -> None:
    before = sorted(folder.iterdir())
    result = schedsearch("records", command, file, "--db", "new.db")
    assert result.exit_code == code and file in result.stderr
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    "options", [[], ["--format", "kernel-tuner"], ["--format", "t4"], ["--format", "autotvm"], ["--deploy"]]
)
def test_an_export_never_replaces_a_database(folder: Path, options: list[str]) -> None:
    before = ok("records", "list", "--db", "tuned.db", "--json")
    result = schedsearch("records", "export", "tuned.db", "--db", "tuned.db", *options)
    assert result.exit_code == 2 and "left alone" in result.stderr
    assert ok("records", "list", "--db", "tuned.db", "--json") == before


def test_merge_adds_new_records_once(folder: Path) -> None:
    first = json.loads(ok("records", "merge", "tuned.db", "--db", "merged.db", "--json"))
    again = json.loads(ok("records", "merge", "tuned.db", "--db", "merged.db", "--json"))
    assert first["records_added"] > 4 and again["records_added"] == 0


def test_prune_keeps_the_measurements_and_the_best_code(folder: Path) -> None:
    before = ok("records", "list", "--db", "tuned.db", "--json", "--limit", 100)
    fastest = min((entry for entry in json.loads(before) if entry["outcome"] == "ok"), key=lambda entry: entry["time_ns"])
    with Store.open("tuned.db", readonly=True) as store:
        (best,) = store.bests()
        # The best won the last race. Another configuration may have the fastest single reading.
        wanted = {best.artifact_sha256, store.row(fastest["id"]).artifact} - {None}
    counts = json.loads(ok("records", "prune", "--db", "tuned.db", "--keep", "1", "--json"))
    assert counts["artifacts_kept"] == len(wanted)
    with Store.open("tuned.db", readonly=True) as store:
        assert all(store.artifact(sha256) for sha256 in wanted)
    assert ok("records", "list", "--db", "tuned.db", "--json", "--limit", 100) == before
    assert schedsearch("records", "prune", "--db", "tuned.db", "--keep", "0").exit_code == 2


def test_commands_that_read_do_not_create_a_database(folder: Path) -> None:
    for command in (["list"], ["best"], ["show", "1"], ["prune"], ["verify", "--target", "cpu"], ["export", "x.jsonl"]):
        result = schedsearch("records", *command, "--db", "nope.db")
        assert (result.exit_code, len(result.stderr.splitlines())) == (6, 1), command
    assert not Path("nope.db").exists()


def test_a_record_that_is_not_there_is_a_usage_error(folder: Path) -> None:
    assert schedsearch("records", "show", "999", "--db", "tuned.db").exit_code == 2


class TestVerify:
    def claim_a_time(self, factor: float) -> None:
        """Adds a record that claims `factor` times the best's time, and makes it the best."""
        with Store.open("tuned.db") as store:
            (best,) = store.bests()
            times = tuple(time * factor for time in best.record.measurement.times_ns)
            record = replace(best.record, measurement=replace(best.record.measurement, times_ns=times), artifact=None)
            assert best.artifact_sha256
            store.promote(store.append(record), store.artifact(best.artifact_sha256))

    def test_a_kernel_as_fast_as_recorded_passes_and_is_recorded(self, folder: Path) -> None:
        self.claim_a_time(1000.0)  # independent of the load on this machine
        records = len(json.loads(ok("records", "list", "--db", "tuned.db", "--json", "--limit", 100)))
        assert ok("records", "verify", "--db", "tuned.db", "--target", "cpu").lstrip().startswith("ok")
        listed = json.loads(ok("records", "list", "--db", "tuned.db", "--json", "--limit", 100))
        assert len(listed) == records + 1 and not listed[0]["final_race"], "it ran alone"

    @pytest.mark.long
    def test_each_best_is_verified_in_the_mode_of_its_record(self, folder: Path) -> None:
        (folder / "hot.yaml").write_text(ONE_THREAD.replace("workers: 1", "workers: 1, mode: hot-graph-v1"))
        ok("tune", "hot.yaml", "--db", "tuned.db", "--trials", 1)
        entries = events(schedsearch("records", "verify", "--db", "tuned.db", "--target", "cpu", "--json").stdout)
        assert [entry["mode"] for entry in entries] == ["cold-graph-v1", "hot-graph-v1"]

    def test_a_slower_kernel_exits_with_5(self, folder: Path) -> None:
        self.claim_a_time(0.001)
        result = schedsearch("records", "verify", "--db", "tuned.db", "--target", "cpu", "--json")
        assert result.exit_code == 5
        (entry,) = events(result.stdout)
        assert entry["regressed"] and entry["ratio"] > 1.1

    def test_a_wrong_kernel_exits_with_1_and_is_no_longer_best(self, folder: Path) -> None:
        """The stored code belongs to another workload: its tile leaves out the second half of the channels."""
        half, target = Workload.conv2d(**TINY_CONV | {"c": 4}), detect("cpu")
        template = load_template("conv2d_cpu")
        config = template.default(half, target, template.space(half, target))
        wrong = compile_source(template.kernel(half, target, config), target).artifact
        with Store.open("tuned.db") as store:
            (entry,) = store.bests()
            store.promote(entry.record_id, wrong)
        result = schedsearch("records", "verify", "--db", "tuned.db", "--target", "cpu")
        assert result.exit_code == 1, result.output
        assert "wrong_answer" in result.stdout
        assert json.loads(ok("records", "best", "--db", "tuned.db", "--json")) == []

    @pytest.mark.long
    def test_a_best_of_an_earlier_version_is_built_again_and_signed(self, folder: Path) -> None:
        with sqlite3.connect("tuned.db") as database:
            database.execute("UPDATE best SET signature = ''")
        with Store.open("tuned.db", readonly=True) as store:
            (before,) = store.bests()
            assert not before.vouched and store.code(before) is None
        schedsearch("records", "verify", "--db", "tuned.db", "--target", "cpu")
        with Store.open("tuned.db", readonly=True) as store:
            (after,) = store.bests()
            assert after.vouched and store.code(after) is not None
            assert after.record_id > before.record_id and after.record.config == before.record.config

    def test_what_another_toolchain_made_is_built_and_timed_again(self, folder: Path) -> None:
        """The stored code is not loaded, here it is of another kernel; what was built now takes its place."""
        with Store.open("tuned.db") as store:
            (best,) = store.bests()
            assert best.artifact_sha256
            times_ns = tuple(1000.0 * time_ns for time_ns in best.record.measurement.times_ns)
            measured = replace(best.record.measurement, times_ns=times_ns)
            older = replace(best.record, toolchain={"llvmlite": "0.1"}, measurement=measured, artifact=None)
            store.promote(store.append(older), store.artifact(best.artifact_sha256))
        (entry,) = events(ok("records", "verify", "--toolchain", "--db", "tuned.db", "--target", "cpu", "--json"))
        assert entry["outcome"] == "ok" and not entry["regressed"]
        with Store.open("tuned.db", readonly=True) as store:
            (after,) = store.bests()
            assert after.record.toolchain == best.record.toolchain and after.record.config == best.record.config
            assert after.vouched and store.code(after) is not None
        said = ok("records", "verify", "--toolchain", "--db", "tuned.db", "--target", "cpu")
        assert "no best record" in said and "that another toolchain made" in said

    @pytest.mark.long
    def test_code_of_this_toolchain_that_is_slower_does_not_replace_the_old(self, folder: Path) -> None:
        with Store.open("tuned.db") as store:
            (best,) = store.bests()
            assert best.artifact_sha256
            measured = replace(best.record.measurement, times_ns=(0.001,))
            older = replace(best.record, toolchain={"llvmlite": "0.1"}, measurement=measured, artifact=None)
            record_id = store.append(older)
            store.promote(record_id, store.artifact(best.artifact_sha256))
        result = schedsearch("records", "verify", "--toolchain", "--db", "tuned.db", "--target", "cpu")
        assert result.exit_code == 5
        with Store.open("tuned.db", readonly=True) as store:
            (after,) = store.bests()
            assert after.record_id == record_id

    def test_nothing_to_verify_is_said(self, folder: Path) -> None:
        Store.open("empty.db").close()
        assert "nothing to verify" in ok("records", "verify", "--db", "empty.db", "--target", "cpu")


class TestDeploy:
    def test_compile_writes_a_file_that_serves_exactly_these_workloads(self, folder: Path) -> None:
        out = ok("compile", "tiny.yaml", "--db", "tuned.db", "--output", "kernels.db")
        assert "tiny" in out and "kernels.db" in out
        (explained,) = json.loads(ok("explain", "tiny.yaml", "--db", "kernels.db", "--json"))
        assert explained["name"] == "tiny"
        assert (explained["levels"][0]["level"], explained["levels"][0]["serves"]) == ("exact", True)

    def test_a_workload_without_record_exits_with_4_and_writes_nothing(self, folder: Path) -> None:
        result = schedsearch("compile", "other.yaml", "--db", "tuned.db", "--output", "kernels.db")
        assert result.exit_code == 4
        assert "schedsearch tune other.yaml" in result.stderr
        assert not Path("kernels.db").exists()

    @pytest.mark.parametrize(
        ("options", "remedy"),
        [
            (["--target", "cpu"], "make one: schedsearch tune other.yaml"),
            (["--target", "auto"], "make one: schedsearch tune other.yaml --target auto"),
            (["--mode", HOT_GRAPH], f"make one: schedsearch tune other.yaml --mode {HOT_GRAPH}"),
            (
                ["--target", "h200", "--mode", HOT_GRAPH],
                f"make one on a machine with that card: schedsearch tune other.yaml --target cuda --mode {HOT_GRAPH}",
            ),
        ],
        ids=["that of the file", "another", "a mode", "a card"],
    )
    def test_the_command_that_makes_the_record_names_what_was_asked_for(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], remedy: str
    ) -> None:
        """`other.yaml` is for the CPU, so a command without --target would tune another device than the one asked for."""
        result = schedsearch("compile", "other.yaml", "--db", "tuned.db", *options)
        assert (result.exit_code, result.stderr.partition("; ")[2]) == (4, f"{remedy} --db {folder / 'tuned.db'}\n")

    def test_explain_says_which_level_would_serve_a_workload_that_was_not_tuned(self, folder: Path) -> None:
        out = ok("explain", "other.yaml", "--db", "tuned.db")
        assert "nearest" in out and "default" in out

    def test_a_deployment_file_of_everything(self, folder: Path) -> None:
        counts = json.loads(ok("records", "export", "deploy.db", "--db", "tuned.db", "--deploy", "--json"))
        assert counts["bests"] == 1

    def test_a_deployment_file_of_nothing_is_not_written(self, folder: Path) -> None:
        ok("records", "export", "deploy.db", "--db", "tuned.db", "--deploy")
        before = Path("deploy.db").read_bytes()
        result = schedsearch("records", "export", "deploy.db", "--db", "tuned.db", "--deploy", "--target", "h200")
        assert result.exit_code == 4 and "no best kernel to deploy" in result.stderr
        assert Path("deploy.db").read_bytes() == before

    def test_trust_marks_a_file_of_another_machine(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(folder / "another-machine"))
        with Store.open("tuned.db", readonly=True) as store:
            assert not next(store.bests()).vouched
        out = ok("records", "trust", "tuned.db")
        assert "1 kernel in tuned.db, 1 newly trusted" in out and "with all your rights" in out
        with Store.open("tuned.db", readonly=True) as store:
            assert next(store.bests()).vouched
        assert "1 kernel in tuned.db, 0 newly trusted" in ok("records", "trust", "tuned.db")
        assert schedsearch("records", "trust", "nope.db").exit_code == 6
        assert "1 kernel  " in (listed := ok("records", "trust", "--list")) and str(Path("tuned.db").absolute()) in listed
        assert "1 kernel of tuned.db trusted no more" in ok("records", "trust", "tuned.db", "--remove")
        assert "no kernels of other machines are trusted" in ok("records", "trust", "--list")
        assert "records trust --list" in ok("records", "trust", "tuned.db", "--remove")
        with Store.open("tuned.db", readonly=True) as store:
            assert not next(store.bests()).vouched

    @pytest.mark.parametrize("words", [[], ["--list", "tuned.db"], ["--list", "--remove"], ["--remove"]])
    def test_trust_takes_a_file_or_lists(self, folder: Path, words: list[str]) -> None:
        result = schedsearch("records", "trust", *words)
        assert result.exit_code == 2 and "or --list alone" in result.stderr
