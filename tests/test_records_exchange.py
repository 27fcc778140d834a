"""Records in and out: JSON lines, merging, deployment files."""

from __future__ import annotations

import io
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from records_support import A100, H200, artifact, conv, profile, record, size_table

from schedsearch.errors import DatabaseError, NoRecordError, SchemaVersionError, UsageError
from schedsearch.measurement import Measurement, Outcome
from schedsearch.records import size_tables, trust
from schedsearch.records.deployment import export_deploy
from schedsearch.records.exchange import Report, export_jsonl, import_jsonl, import_lines, merge
from schedsearch.records.lookup import Lookup
from schedsearch.records.store import Store
from schedsearch.records.writes import put_size_table


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "state"))


def another_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "state of another machine"))


@pytest.fixture
def store(tmp_path: Path):
    """Records of every outcome, two bests, one of them with code, a finished run and a killed one."""
    with Store.open(tmp_path / "records.db") as store:
        run = store.start_run({"command": "tune"})
        store.start_run({"command": "killed"})
        for number, outcome in enumerate(Outcome):
            store.append(record(outcome=outcome, number=number, run=run))
        wrong = Measurement(Outcome.WRONG_ANSWER, max_error=float("inf"), message="inf at 3")
        store.append(record(measurement=wrong, number=90, prediction=None))
        store.promote(1, artifact())
        store.promote(store.append(record(2000.0, number=91, target=A100)), verified=False)
        store.add_profile(1, profile())
        store.finish_run(run, {"trials": 8})
        yield store


def contents(store: Store) -> tuple:
    bests = [(best.record, best.verified, best.promoted_at) for best in store.bests()]
    runs = [{**run, "machine": ""} for run in store.runs()]
    return store.history(), bests, runs


def test_a_round_trip_through_json_lines_loses_nothing(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "all.jsonl"
    assert export_jsonl(store, file, artifacts=True) == 10
    with Store.open(tmp_path / "copy.db") as copy:
        report = import_jsonl(copy, file)
        assert report == Report(records_added=10, runs_added=2, bests_changed=2, artifacts_added=1, profiles_added=1)
        history, bests, runs = contents(copy)
        assert {item.source for item in history} == {str(file)}
        assert [type(item)(**{**vars(item), "source": ""}) for item in history] == store.history()
        assert runs == contents(store)[2] and [best[1:] for best in bests] == [best[1:] for best in contents(store)[1]]
        assert copy.artifact(artifact().sha256) == artifact()
        assert copy.profiles(1) == [profile()] and copy.profiles(2) == []
        assert import_jsonl(copy, file) == Report(records_known=10), "a second time adds nothing"
        second = tmp_path / "again.jsonl"
        export_jsonl(copy, second, artifacts=True)
        with Store.open(tmp_path / "copy of copy.db") as other:
            import_jsonl(other, second)
            assert contents(other) == contents(copy), "an origin that is known is kept"


def test_every_line_of_an_export_is_valid_json(store: Store) -> None:
    stream = io.StringIO()
    export_jsonl(store, stream)

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in stream.getvalue().splitlines()]
    assert [line["kind"] for line in lines] == ["header", *["run"] * 2, *["record"] * 10, "profile", *["best"] * 2]
    assert [line["measurement"]["max_error"] for line in lines if line.get("batch")].count("inf") == 1


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda line: line[: len(line) // 2], "not JSON: "),
        (lambda line: "[1]", "this must be a JSON object, got a list"),
        (lambda line: line.replace('"kind": "record"', '"kind": "rekord"'), "unknown kind 'rekord'; allowed: header"),
        (lambda line: line.replace('"target"', '"tarket"'), "the field 'target' is missing"),
        (lambda line: line.replace('"h": 14', '"h": -14'), "h must be an integer of at least 1, got -14"),
        (
            lambda line: line.replace('"op": "conv2d"', '"op": "conv3d"'),
            "unknown operator 'conv3d' (did you mean 'conv2d'?)",
        ),
        (
            lambda line: line.replace('"outcome": "ok"', '"outcome": "fine"'),
            "outcome of a record is 'fine'; it must be one of ok",
        ),
        (lambda line: line.replace('"outcome": "ok"', '"outcome": "rejected"'), "only ok has times"),
        (lambda line: line.replace('"run_s": 0.1', '"run_s": NaN'), "run_s of a record is nan; it must be a finite number"),
        (
            lambda line: line.replace('"number": 0', '"number": 0.5'),
            "config of a record has 0.5 for 'number'; it must be a number, string or true/false",
        ),
        (lambda line: line.replace('"batch": 3', '"batch": [3]'), "batch of a record is [3]; it must be an integer"),
        (
            lambda line: line.replace('"batch": 3', '"batch": Infinity'),
            "batch of a record is inf; it must be an integer",
        ),
        (
            lambda line: line.replace('"batch": 3', f'"batch": {2**63}'),
            f"batch of a record is {2**63}; it must be an integer from 0 to {2**63 - 1}",
        ),
        (lambda line: line.replace('"message": ""', '"message": {}'), "message of a record is {}; it must be text"),
        (
            lambda line: line.replace('"times_ns": [', '"times_ns": [-1.0, '),
            "a time of times_ns of a record is -1.0; it must be a finite number above 0",
        ),
        (lambda line: "[" * 101, "nested too deeply"),
        (lambda line: line.replace('"run": "', '"run": "\\ud800'), "a string holds half of a character"),
        (lambda line: line.replace('"code": "c0ffee"', '"code": ""'), "an anchor needs the hash of its code"),
        (
            lambda line: line.replace('"time_ns": 4000.0', '"time_ns": 0'),
            "anchor_ns of a record is 0.0; it must be a finite number above 0",
        ),
        (
            lambda line: line.replace('"time_ns": 4000.0', '"time_ns": Infinity'),
            "anchor_ns of a record is inf; it must be a finite number above 0",
        ),
        (lambda line: line.replace('"batch": 3', '"batch": 3, "batch": 4'), "the key 'batch' occurs twice"),
    ],
)
@pytest.mark.mostly_long(3)
def test_a_wrong_line_is_named_and_nothing_is_imported(store: Store, tmp_path: Path, change, wanted: str) -> None:
    file = tmp_path / "bad.jsonl"
    export_jsonl(store, file)
    lines = file.read_text().splitlines()
    lines[3], original = change(lines[3]), lines[3]
    assert lines[3] != original
    file.write_text("\n".join(lines))
    with Store.open(tmp_path / "copy.db") as copy:
        with pytest.raises(UsageError) as caught:
            import_jsonl(copy, file)
        assert f"{file}:4: " in str(caught.value) and wanted in str(caught.value)
        assert caught.value.exit_code == 2
        assert copy.stats()["records"] == 0 and copy.runs() == []


def test_several_wrong_lines_are_named_at_once(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    export_jsonl(store, file)
    file.write_text(file.read_text().replace('"batch": 3', '"batch": "x"'))
    with Store.open(tmp_path / "copy.db") as copy, pytest.raises(UsageError) as caught:
        import_jsonl(copy, file)
    assert all(f"{file}:{number}: " in str(caught.value) for number in range(4, 14))


def test_files_that_are_not_an_export(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "file.jsonl"
    for content, wanted in (
        (b"", "empty; give a file of: schedsearch records export"),
        (b'{"kind": "record"}\n', "1: the header is missing, got kind 'record'"),
        (b"\xff\xfe\x00", "not a text file in UTF-8"),
    ):
        file.write_bytes(content)
        with pytest.raises(UsageError, match=wanted):
            import_jsonl(store, file)
    with pytest.raises(UsageError, match=r"cannot read .*: No such file"):
        import_jsonl(store, tmp_path / "missing.jsonl")
    with pytest.raises(UsageError, match=r"cannot write .*: No such file"):
        export_jsonl(store, tmp_path / "nowhere" / "out.jsonl")
    file.write_text('{"kind": "header", "format": 9}\n')
    with pytest.raises(SchemaVersionError, match="has format 9, this schedsearch knows up to 6; upgrade"):
        import_jsonl(store, file)


def test_lines_are_read_one_by_one(store: Store, tmp_path: Path) -> None:
    """After ten wrong lines nothing more is read, so an import of any size needs little memory."""
    given = 0

    def lines() -> Iterator[bytes]:
        nonlocal given
        while True:
            given += 1
            yield b"{}"

    with pytest.raises(UsageError, match="later lines were not looked at"):
        import_lines(store, lines(), source="endless")
    assert given == 10


def test_a_truncated_gzip_adds_nothing(store: Store, tmp_path: Path) -> None:
    export_jsonl(store, tmp_path / "all.jsonl.gz")
    packed = (tmp_path / "all.jsonl.gz").read_bytes()
    (tmp_path / "all.jsonl.gz").write_bytes(packed[:-10])
    with Store.open(tmp_path / "copy.db") as copy:
        with pytest.raises(UsageError, match="truncated"):
            import_jsonl(copy, tmp_path / "all.jsonl.gz")
        assert copy.stats()["records"] == 0 and copy.runs() == []


def test_messages_about_wrong_lines_are_short(store: Store) -> None:
    lines = [b'{"kind": "header", "format": 3}', json.dumps({"kind": "x" * 10**6}).encode(), b'{"kind": "thing"}']
    with pytest.raises(UsageError) as caught:
        import_lines(store, lines, source="some.jsonl")
    assert "some.jsonl:2: unknown kind 'xxx" in str(caught.value) and "some.jsonl:3: unknown kind 'thing'" in str(
        caught.value
    )
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e400"])
def test_numbers_that_no_export_could_write_are_refused(store: Store, tmp_path: Path, number: str) -> None:
    export_jsonl(store, tmp_path / "all.jsonl")
    text = (tmp_path / "all.jsonl").read_text()
    assert '"trials": 8' in text
    (tmp_path / "all.jsonl").write_text(text.replace('"trials": 8', f'"trials": {number}'))
    with Store.open(tmp_path / "copy.db") as copy, pytest.raises(UsageError, match="Out of range float values"):
        import_jsonl(copy, tmp_path / "all.jsonl")


def test_an_import_drops_code_of_another_machine_unless_told_to_trust_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "all.jsonl"
    export_jsonl(store, file, artifacts=True)
    another_machine(monkeypatch, tmp_path)
    with Store.open(tmp_path / "copy.db") as copy:
        report = import_jsonl(copy, file)
        assert (report.artifacts_added, report.artifacts_dropped) == (0, 1)
        assert (report.bests_changed, report.bests_dropped) == (0, 2) and list(copy.bests()) == []
        assert "2 best records and 1 kernels' machine code" in report.note and "--trusted" in report.note
        assert {item.artifact for item in copy.history()} == {None}, "the name of code that somebody else made"
        report = import_jsonl(copy, file, trusted=True)
        assert (report.artifacts_added, report.artifacts_dropped, report.bests_changed) == (1, 0, 2) and not report.note
        best = next(copy.bests(workload=conv(), target=H200))
        assert best.vouched and copy.code(best) == artifact(), "this machine vouches for it now"


def test_a_merge_joins_and_a_second_one_adds_nothing(store: Store, tmp_path: Path) -> None:
    with Store.open(tmp_path / "other.db") as other:
        run = other.start_run({"command": "elsewhere"})
        faster = other.append(record(10.0, number=200, run=run))
        other.add_profile(faster, profile(duration_ns=10.0))
        other.promote(faster, artifact(b"faster"))
        other.append(record(number=0, run=store.history()[0].run))  # a record that both have
        other.promote(other.append(record(5000.0, number=201, target=A100)), artifact(b"slower"))
    report = merge(store, [tmp_path / "other.db"])
    assert report == Report(
        records_added=2, records_known=1, runs_added=1, bests_changed=1, artifacts_added=2, profiles_added=1
    )
    assert len(store.history()) == 12
    assert store.profiles(11) == [profile(duration_ns=10.0)], "it follows its record, whatever that is numbered here"
    best = store.best(conv(), H200)
    assert best is not None and best.measurement.time_ns == 10.0 and best.source == str(tmp_path / "other.db")
    assert store.artifact(best.artifact or "") == artifact(b"faster")
    slower = store.best(conv(), A100)
    assert slower is not None and slower.measurement.time_ns == 2000.0, "ours is faster and stays"
    before = contents(store)
    assert merge(store, [tmp_path / "other.db"] * 2) == Report(records_known=6)
    assert contents(store) == before


def test_a_merge_drops_code_of_another_machine(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.close()
    another_machine(monkeypatch, tmp_path)
    with Store.open(tmp_path / "mine.db") as mine:
        report = merge(mine, [store.path])
        assert (report.records_added, report.artifacts_added, report.artifacts_dropped) == (10, 0, 1)
        assert report.bests_dropped == 2 and list(mine.bests()) == []
        assert mine.artifact(artifact().sha256) is None


def test_a_merge_updates_a_run_that_had_not_ended(store: Store, tmp_path: Path) -> None:
    with Store.open(tmp_path / "other.db") as other:
        run = other.start_run({})
        merge(store, [other.path])
        assert {item["id"]: item for item in store.runs()}[run]["finished_at"] is None
        other.finish_run(run, {"trials": 0})
    merge(store, [tmp_path / "other.db"])
    assert {item["id"]: item for item in store.runs()}[run]["summary"] == {"trials": 0}


def test_sources_that_cannot_be_merged(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be merged into itself"):
        merge(store, [store.path])
    with pytest.raises(DatabaseError, match="no database at"):
        merge(store, [tmp_path / "missing.db"])
    export_deploy(store, tmp_path / "deploy.db")
    with pytest.raises(DatabaseError, match="is a deployment file: it holds best kernels and no measurements"):
        merge(store, [tmp_path / "deploy.db"])


def test_a_deployment_file_has_the_best_and_nothing_else(store: Store, tmp_path: Path) -> None:
    for number in range(300, 400):
        unused = record(number=number, workload=conv(k=128))
        store.promote(store.append(unused), artifact(b"unused" * 1000 + str(number).encode()))
        store.demote(unused)
    file = tmp_path / "deploy.db"
    report = export_deploy(store, file)
    assert report == {"bests": 2, "ranges": 0, "artifacts": 1, "unsigned": 0, "size_bytes": file.stat().st_size}
    assert report["size_bytes"] < 64 * 1024
    with sqlite3.connect(file) as other:
        tables = {name for (name,) in other.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
        assert tables == {"meta", "workload", "artifact", "best", "size_table"}
        assert other.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        assert other.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert other.execute("PRAGMA foreign_key_check").fetchall() == []
    assert file.stat().st_mode & 0o444, "it has the usual permissions of this user's files"
    with Lookup(file) as lookup, Lookup(store.path) as live:
        row = lookup.exact(conv().id, H200, "cold-graph-v1")
        assert row is not None and row == live.exact(conv().id, H200, "cold-graph-v1")
        assert lookup.kind == "deploy" and row.vouched
        assert lookup.code(row) == artifact().code
    assert sorted(tmp_path.glob("*deploy.db*")) == [file], "no temporary file is left"


def test_a_deployment_file_may_be_for_one_target(store: Store, tmp_path: Path) -> None:
    assert export_deploy(store, tmp_path / "deploy.db", target=A100)["bests"] == 1
    with Lookup(tmp_path / "deploy.db") as lookup:
        assert lookup.exact(conv().id, H200, "cold-graph-v1") is None
        row = lookup.exact(conv().id, A100, "cold-graph-v1")
        assert row is not None and row.artifact_sha256 is row.plan_json is None and not row.verified


def test_a_deployment_file_may_be_for_some_workloads(store: Store, tmp_path: Path) -> None:
    store.promote(store.append(record(number=400, workload=conv(k=128))))
    assert export_deploy(store, tmp_path / "deploy.db", workloads=[conv(k=128), conv(k=8)])["bests"] == 1
    with Lookup(tmp_path / "deploy.db") as lookup:
        assert lookup.exact(conv(k=128).id, H200, "cold-graph-v1") and not lookup.exact(conv().id, H200, "cold-graph-v1")
        assert len(lookup.nearest("conv2d", "cold-graph-v1")) == 1


def test_a_deployment_file_replaces_only_one_of_its_kind(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "deploy.db"
    export_deploy(store, file)
    with Lookup(file) as in_use:
        export_deploy(store, file, target=A100)
        assert in_use.exact(conv().id, H200, "cold-graph-v1"), "a process that has it open reads the old one to the end"
    notes = tmp_path / "notes.txt"
    notes.write_text("precious")
    for other in (store.path, notes):
        with pytest.raises(UsageError, match="exists and is not a deployment file, so it is left alone"):
            export_deploy(store, other)
    assert notes.read_text() == "precious" and store.stats()["records"] == 10
    with pytest.raises(DatabaseError, match="does not exist; create it"):
        export_deploy(store, tmp_path / "nowhere" / "deploy.db")


class TestRanges:
    """The kernels of ranges of sizes go wherever bests with code go."""

    RANGE = conv().with_dynamic("n", 1, 4)

    @pytest.fixture
    def ranged(self, store: Store) -> Store:
        put_size_table(store.database, self.RANGE, H200, "cold-graph-v1", size_table())
        return store

    @pytest.mark.parametrize("way", ["jsonl", "merge"])
    def test_they_come_along_once(self, way: str, ranged: Store, tmp_path: Path) -> None:
        def copied(into: Store) -> Report:
            return import_jsonl(into, tmp_path / "all.jsonl") if way == "jsonl" else merge(into, [ranged.path])

        export_jsonl(ranged, tmp_path / "all.jsonl", artifacts=True)
        with Store.open(tmp_path / "copy.db") as copy:
            assert (copied(copy).ranges_added, copied(copy).ranges_added) == (1, 0)
            assert copy.ranges() == ranged.ranges() and copy.ranges()[0].vouched
            assert copy.stats()["ranges"] == 1
            put_size_table(copy.database, self.RANGE, H200, "cold-graph-v1", size_table(500.0))
            assert copied(copy).ranges_added == 0, "ours is newer"
            put_size_table(ranged.database, self.RANGE, H200, "cold-graph-v1", size_table(2000.0))
            export_jsonl(ranged, tmp_path / "all.jsonl", artifacts=True)
            assert copied(copy).ranges_added == 1 and copy.ranges() == ranged.ranges(), "theirs is newer"

    def test_those_of_another_machine_need_trust(
        self, ranged: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "all.jsonl"
        export_jsonl(ranged, file, artifacts=True)
        another_machine(monkeypatch, tmp_path)
        with Store.open(tmp_path / "mine.db") as mine:
            for report in (import_jsonl(mine, file), merge(mine, [ranged.path])):
                assert (report.ranges_added, report.ranges_dropped) == (0, 1) and "the kernels of 1 range" in report.note
            trust.trust(ranged.path)
            assert merge(mine, [ranged.path]).ranges_added == 1
            trust.distrust(ranged.path)
            assert mine.ranges()[0].vouched, "this machine signed it"
        with Store.open(tmp_path / "other.db") as other:
            assert import_jsonl(other, file, trusted=True).ranges_added == 1 and other.ranges()[0].vouched

    @pytest.mark.parametrize("change", [{"code": "AAAA"}, {"size_table": {}}, {"low": 4}, {"family": 3}, {"made_at": "x"}])
    def test_a_wrong_line_imports_nothing(self, change: dict, ranged: Store, tmp_path: Path) -> None:
        file = tmp_path / "all.jsonl"
        export_jsonl(ranged, file, artifacts=True)
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        lines = [line | change if line["kind"] == "range" else line for line in lines]
        file.write_text("\n".join(map(json.dumps, lines)))
        with Store.open(tmp_path / "copy.db") as copy:
            with pytest.raises(UsageError, match=r"all\.jsonl:\d+: "):
                import_jsonl(copy, file)
            assert copy.ranges() == [] and copy.stats()["records"] == 0

    def test_a_deployment_file_has_those_that_are_asked_for(self, ranged: Store, tmp_path: Path) -> None:
        file = tmp_path / "deploy.db"
        assert export_deploy(ranged, file)["ranges"] == 1
        assert export_deploy(ranged, file, target=A100)["ranges"] == 0
        assert export_deploy(ranged, file, workloads=[conv()])["ranges"] == 0
        wanted = [self.RANGE, conv().with_dynamic("n", 2, 3)]
        counts = export_deploy(ranged, file, target=H200, workloads=[], ranges=wanted)
        assert (counts["bests"], counts["ranges"]) == (0, 1)
        found = size_tables.find(file, self.RANGE.family, 2, 4, H200, "cold-graph-v1")
        assert found is not None and found.vouched
        with pytest.raises(NoRecordError, match="has no best kernel to deploy"):
            export_deploy(ranged, file, workloads=[], ranges=[conv().with_dynamic("n", 1, 5)])
