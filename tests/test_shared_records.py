"""Records that people give one another: `records push`, `pull`, `ship` and `verify --imported`."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_support import ONE_THREAD, events, isolate, schedsearch
from records_support import A100, H100, H200, artifact, conv, record
from shared_records_support import of_race, ok, raced

from schedsearch.config import Config
from schedsearch.device.detect import detect
from schedsearch.errors import NoRecordError, SchemaVersionError, UsageError
from schedsearch.measurement import COLD_GRAPH
from schedsearch.records.entries import Entry, chosen, imported, merged
from schedsearch.records.exchange import import_jsonl
from schedsearch.records.lookup import Lookup
from schedsearch.records.sharing import pull, push, read_pushed
from schedsearch.records.shipped import file_name
from schedsearch.records.store import Store
from schedsearch.session.gradual import tune_gradually
from schedsearch.task import Task
from schedsearch.workload import Workload


@pytest.fixture
def pushed(tmp_path: Path) -> Path:
    """A file with one record, of which the gain is 4."""
    with Store.open(tmp_path / "theirs.db") as store:
        raced(store, 1000.0)
        path, _, _ = push(store, tmp_path / "theirs.jsonl.gz", "Ada")
    return path


def content(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def rewrite(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    lines = content(path)
    change(lines)
    path.write_bytes(gzip.compress(b"".join(json.dumps(line).encode() + b"\n" for line in lines)))


# ---- push


def test_a_pushed_file_says_what_it_is_and_keeps_names_of_machines_out(tmp_path: Path) -> None:
    with Store.open(tmp_path / "own.db") as store:
        raced(store, 1000.0)
        raced(store, 2000.0, workload=conv(k=128), target=H100)
        path, manifest, found = push(store, tmp_path / "file.jsonl.gz", "Ada <ada@example.org>")
    header, *records = content(path)
    assert header["manifest"] == manifest and (found.left_out, len(records)) == (0, 2)
    assert (manifest["who"], manifest["records"], manifest["targets"]) == ("Ada <ada@example.org>", 2, [H100, H200])
    assert manifest["toolchains"] == [record().toolchain] and manifest["policy"]["modes"] == [COLD_GRAPH]
    assert manifest["policy"]["timed"] == ["operands cold, constants plain, launched as graph, load burst"]
    text = gzip.decompress(path.read_bytes()).decode()
    assert "secret-host" not in text and "GPU-1234" not in text and '"code"' not in text.replace('"code":"c0de"', "")


def test_only_what_raced_with_its_default_is_pushed_and_ties_are_the_default(tmp_path: Path) -> None:
    with Store.open(tmp_path / "own.db") as store:
        store.promote(store.append(record(workload=conv(k=256), anchor=None)))
        with pytest.raises(NoRecordError, match="no record of a final race"):
            push(store, tmp_path, "Ada")
        default = of_race(4000.0, config=Config(bm=1))
        store.append(default)
        raced(store, 3950.0)
        path, _, found = push(store, tmp_path, "Ada")
    (entry,) = read_pushed(path).entries
    assert (found.left_out, entry.config, entry.gain, entry.is_default) == (1, Config(bm=1), 1.0, True)


def test_of_one_target_only(tmp_path: Path) -> None:
    with Store.open(tmp_path / "own.db") as store:
        raced(store, 1000.0)
        raced(store, 2000.0, target=H100)
        path, manifest, _ = push(store, tmp_path, "Ada", target=H100)
        assert manifest["targets"] == [H100] and len(read_pushed(path).entries) == 1
        with pytest.raises(NoRecordError, match="A100"):
            push(store, tmp_path, "Ada", target=A100)


@pytest.mark.parametrize("who", ["", "  ", "a\nb", "x" * 101, "\x1b[31mred"])
def test_a_name_that_could_fool_a_reader_is_refused(who: str, tmp_path: Path) -> None:
    with Store.open(tmp_path / "own.db") as store:
        raced(store, 1000.0)
        with pytest.raises(UsageError, match="printable characters"):
            push(store, tmp_path, who)


def test_pushing_into_a_folder_adds_a_file_and_the_same_again_none(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    with Store.open(tmp_path / "own.db") as store:
        raced(store, 1000.0)
        first, _, _ = push(store, folder, "Ada")
        before = first.read_bytes()
        again, _, _ = push(store, folder, "Ada")
        assert again == first and first.read_bytes() == before
        raced(store, 900.0, number=5)
        second, _, _ = push(store, folder, "Ada")
    assert sorted(folder.iterdir()) == sorted([first, second])


def test_a_folder_that_is_not_there_is_made_so_that_the_first_push_is_no_file_of_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "team"
    for name, time_ns in (("Ada", 1000.0), ("Grace", 900.0)):
        with Store.open(tmp_path / f"{name}.db") as store:
            raced(store, time_ns)
            push(store, folder, name)
    assert sorted(read_pushed(each).who for each in folder.iterdir()) == ["Ada", "Grace"]


def test_no_file_is_replaced(tmp_path: Path) -> None:
    workload_file, theirs = tmp_path / "layers.yaml", tmp_path / "theirs.jsonl.gz"
    workload_file.write_text("tasks: []")
    with Store.open(tmp_path / "own.db") as store:
        raced(store, 1000.0)
        with pytest.raises(UsageError, match=r"layers\.yaml is another file"):
            push(store, workload_file, "Ada")
        push(store, theirs, "Ada")
        before = theirs.read_bytes()
        push(store, theirs, "Ada")
        raced(store, 900.0, number=5)
        with pytest.raises(UsageError, match=r"theirs\.jsonl\.gz is another file"):
            push(store, theirs, "Ada")
        with pytest.raises(UsageError, match=r"cannot make the folder .*/b: No such file or directory; make its parent"):
            push(store, tmp_path / "a" / "b", "Ada")
    assert workload_file.read_text() == "tasks: []" and theirs.read_bytes() == before


def test_two_who_push_at_once_lose_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    for name in ("one", "two"):
        with Store.open(tmp_path / f"{name}.db") as store:
            raced(store, 1000.0, workload=conv(k=64 if name == "one" else 128))

    def write(name: str) -> None:
        with Store.open(tmp_path / f"{name}.db", readonly=True) as store:
            for _ in range(5):
                push(store, folder, name)

    threads = [threading.Thread(target=write, args=(name,)) for name in ("one", "two", "one")]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(read_pushed(each).who for each in folder.iterdir() if each.is_file()) == ["one", "two"]


# ---- pull


def test_what_is_pulled_is_the_measurement_of_others_and_serves_nothing_yet(pushed: Path, tmp_path: Path) -> None:
    with Store.open(tmp_path / "own.db") as store:
        report = pull(store, pushed)
        assert (report.files, report.added, report.known, report.problems) == (1, 1, 0, ())
        assert list(store.bests()) == []
        (row,) = store.rows()
        assert row.source == f"{pushed.name} of Ada" and not row.measurement.host
        again = pull(store, pushed)
        assert (again.added, again.known) == (0, 1)
    with Lookup(tmp_path / "own.db") as lookup:
        assert lookup.exact(conv().id, H200, COLD_GRAPH) is None
        assert len(lookup.imported(conv().id, H200, COLD_GRAPH, 4)) == 1


def test_of_several_files_the_largest_gain_comes_in_whatever_the_times(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    for name, time_ns, anchor_ns in (("slow card", 2000.0, 8000.0), ("fast card", 1500.0, 3000.0)):
        with Store.open(tmp_path / f"{name}.db") as store:
            raced(store, time_ns, anchor_ns, config=Config(bm=64, of=name))
            push(store, folder, name)
    with Store.open(tmp_path / "own.db") as store:
        report = pull(store, folder)
        (row,) = store.rows()
    assert (report.files, report.added, report.known) == (2, 1, 1)
    assert row.config["of"] == "slow card"


@pytest.mark.parametrize(("own_ns", "added"), [(900.0, 0), (1100.0, 1)])
def test_what_this_machine_measured_stays_unless_the_gain_of_others_is_larger(
    own_ns: float, added: int, pushed: Path, tmp_path: Path
) -> None:
    with Store.open(tmp_path / "own.db") as store:
        own = raced(store, own_ns, number=3)
        assert pull(store, pushed).added == added
        (best,) = store.bests()
        assert best.record_id == own


def test_cards_keep_apart(tmp_path: Path) -> None:
    with Store.open(tmp_path / "theirs.db") as store:
        raced(store, 1000.0)
        raced(store, 1500.0, target=H100)
        path, _, _ = push(store, tmp_path, "Ada")
    with Store.open(tmp_path / "own.db") as store:
        assert pull(store, path, target=H100).added == 1
        assert pull(store, path).added == 1
    with Lookup(tmp_path / "own.db") as lookup:
        times = {each: lookup.imported(conv().id, each, COLD_GRAPH, 4)[0].time_ns for each in (H100, H200)}
    assert times == {H100: 1500.0, H200: 1000.0}


def change_time(lines: list[dict[str, Any]]) -> None:
    lines[1]["measurement"]["times_ns"] = [100.0]


BAD: dict[str, tuple[Callable[[list[dict[str, Any]]], object], str]] = {
    "changed": (change_time, "does not match its manifest"),
    "cut": (lambda lines: lines.pop(), "does not match its manifest"),
    "added": (lambda lines: lines.append(lines[1]), "does not match its manifest"),
    "no manifest": (lambda lines: lines[0].pop("manifest"), "has no manifest"),
    "no header": (lambda lines: lines.pop(0), "has no manifest"),
    "newer manifest": (lambda lines: lines[0]["manifest"].update(format=99), "upgrade"),
    "newer format": (lambda lines: lines[0].update(format=99), "upgrade"),
    "strange version": (lambda lines: lines[0]["manifest"].update(format="1"), "version"),
    "code": (lambda lines: lines[1].update(kind="artifact"), "not a record"),
    "a failure": (lambda lines: lines[1]["measurement"].update(outcome="wrong_answer", times_ns=[]), ":2: "),
    "no race": (lambda lines: lines[1].update(anchor=None), ":2: it is not of a final race"),
    "no workload": (lambda lines: lines[1].pop("workload"), ":2: the field 'workload' is missing"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_line_and_adds_nothing(name: str, pushed: Path, tmp_path: Path) -> None:
    change, reason = BAD[name]
    rewrite(pushed, change)
    with Store.open(tmp_path / "own.db") as store:
        with pytest.raises((UsageError, SchemaVersionError)) as caught:
            pull(store, pushed)
        assert reason in str(caught.value) and "\n" not in str(caught.value) and pushed.name in str(caught.value)
        assert store.rows() == []


def test_a_bad_file_in_a_folder_is_left_out_and_the_others_are_taken(pushed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "good.jsonl.gz").write_bytes(pushed.read_bytes())
    rewrite(pushed, change_time)
    (folder / "bad.jsonl.gz").write_bytes(pushed.read_bytes())
    (folder / "cut.jsonl.gz").write_bytes(pushed.read_bytes()[:50])
    (folder / "README").write_text("not a file of records")
    with Store.open(tmp_path / "own.db") as store:
        report = pull(store, folder)
    assert (report.files, report.added, len(report.problems)) == (1, 1, 2)
    assert "bad.jsonl.gz" in report.problems[0] and "cut.jsonl.gz" in report.problems[1]


@pytest.mark.parametrize(("name", "value"), [("MAX_RECORDS", 0), ("MAX_BODY_BYTES", 100)])
def test_a_file_that_would_fill_the_memory_is_refused(
    name: str, value: int, pushed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"schedsearch.records.sharing.{name}", value)
    with Store.open(tmp_path / "own.db") as store, pytest.raises(UsageError, match=r"holds more than .* split the file"):
        pull(store, pushed)


def test_a_pushed_file_is_a_file_of_records_for_import_too(pushed: Path, tmp_path: Path) -> None:
    with Store.open(tmp_path / "own.db") as store:
        report = import_jsonl(store, pushed)
        assert (report.records_added, report.bests_changed, report.bests_dropped) == (1, 0, 0)


def test_a_folder_without_files_and_a_time_that_is_impossible(tmp_path: Path) -> None:
    with Store.open(tmp_path / "own.db") as store:
        with pytest.raises(UsageError, match="no file of records"):
            pull(store, tmp_path)
        large = conv(n=256, h=224, w=224)
        with Store.open(tmp_path / "theirs.db") as theirs:
            raced(theirs, 10.0, workload=large)
            path, _, _ = push(theirs, tmp_path, "Mallory")
        report = pull(store, path)
        assert report.added == 0 and "is not possible: left out" in report.problems[0]
        assert store.rows() == []


def test_a_gain_that_no_default_is_slow_enough_for_is_left_out(tmp_path: Path) -> None:
    with Store.open(tmp_path / "theirs.db") as theirs:
        raced(theirs, 1000.0, 1e300)
        path, _, _ = push(theirs, tmp_path, "Mallory")
    with Store.open(tmp_path / "own.db") as store:
        report = pull(store, path)
        assert report.added == 0 and store.rows() == []
        (problem,) = report.problems
        assert problem.endswith("1e+297 times as fast as its default is not possible, at most 100: left out")


def test_what_was_raced_here_hides_nobody_elses_entry(tmp_path: Path) -> None:
    """A file that exaggerates comes in first. Once its configuration was raced here, the honest one does."""
    team = tmp_path / "team"
    team.mkdir()
    for who, bm, anchor_ns in (("Mallory", 64, 90_000.0), ("Ada", 128, 1500.0)):
        with Store.open(tmp_path / f"{who}.db") as theirs:
            raced(theirs, 1000.0, anchor_ns, config=Config(bm=bm))
            push(theirs, team, who)
    with Store.open(tmp_path / "own.db") as store:
        assert pull(store, team).added == 1
        (first,) = store.rows()
        assert first.source.endswith("of Mallory")
        store.append(of_race(2000.0, 1000.0, config=Config(bm=64), number=5))  # slower than the default here
        raced(store, 1000.0, 1000.0, config=Config(bm=32), number=6)  # which won
        assert list(imported(store, H200, COLD_GRAPH)) == []
        assert pull(store, team).added == 1
        (second,) = imported(store, H200, COLD_GRAPH)
        assert second.gain == 1.5 and second.record is not None and second.record.source.endswith("of Ada")


def test_records_of_another_version_of_their_template_are_left_out_on_one_line(tmp_path: Path) -> None:
    team = tmp_path / "team"
    team.mkdir()
    with Store.open(tmp_path / "theirs.db") as theirs:
        for k in (64, 128):
            raced(theirs, 1000.0, 90_000.0, workload=conv(k=k), template_version=99, number=k)
        push(theirs, team, "Mallory")
    with Store.open(tmp_path / "ada.db") as theirs:
        raced(theirs, 1000.0, workload=conv(k=64))
        push(theirs, team, "Ada")
    with Store.open(tmp_path / "own.db") as store:
        known = of_race(1000.0)
        report = pull(store, team, versions={known.template: known.template_version})
        assert report.added == 1 and [row.source.rpartition(" of ")[2] for row in store.rows()] == ["Ada"]
        (problem,) = report.problems
        assert "2 records by version 99 of " in problem and f"which has version {known.template_version} here" in problem
        assert "not installed here" in pull(store, team, versions={}).problems[0]


# ---- which entry is better


def test_entries_are_compared_by_their_gain() -> None:
    slow_card, fast_card = Entry.of(of_race(2000.0, 8000.0)), Entry.of(of_race(1500.0, 3000.0))
    unknown = Entry.of(record(time_ns=1.0, anchor=None))
    assert merged([fast_card, unknown, slow_card])[slow_card.task] is slow_card
    assert merged([unknown, fast_card])[slow_card.task] is fast_card


def test_imported_entries_that_an_own_race_beats_are_not_raced_again(pushed: Path, tmp_path: Path) -> None:
    with Store.open(tmp_path / "own.db") as store:
        pull(store, pushed)
        assert [each.gain for each in imported(store, H200, COLD_GRAPH)] == [4.0]
        assert list(imported(store, H100, COLD_GRAPH)) == []
        raced(store, 900.0)
        assert list(imported(store, H200, COLD_GRAPH)) == []


def test_what_was_shipped_or_pulled_is_not_pushed_on(pushed: Path, tmp_path: Path) -> None:
    with Store.open(tmp_path / "own.db") as store:
        pull(store, pushed)
        assert store.adopt(replace(of_race(1000.0, number=9), source="shipped: file.db"), artifact())
        assert chosen(store).entries == ()


# ---- on this machine's CPU


TINY = Workload.conv2d(n=1, h=8, w=8, c=8, k=8, r=3, s=3, dtype="float32")


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the database tuned.db, that `records ship` made, the workload file tiny.yaml and the folder shipped."""
    isolate(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(ONE_THREAD)
    (tmp_path / "shipped").mkdir()
    return tmp_path


@pytest.mark.long
def test_ship_tunes_once_then_pushes_pulls_verifies_and_compares(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("records", "ship", "tiny.yaml", "--who", "Ada", "--db", "tuned.db", "--trials", "3", "--target", "cpu")
    first = json.loads(ok(*words, "--output", "shipped", "--json"))
    key = detect("cpu").key
    assert (first["records"], first["raced"], first["left"], first["unsupported"]) == (1, 1, 0, 0)
    assert first["size_bytes"] == (tuned / "shipped" / file_name(key)).stat().st_size
    with Store.open(tuned / "tuned.db", readonly=True) as store:
        trials = len(store.rows())
    for db in ("tuned.db", "another.db"):  # what the file has is passed over, whatever database it came from
        text = ok("records", "ship", "tiny.yaml", "--who", "Ada", "--db", db, "--target", "cpu", "--output", "shipped")
        assert "has 1 task already" in text
    assert not (tuned / "another.db").exists()
    (tuned / "shipped" / file_name(key)).unlink()
    text = ok(*words, "--output", "shipped")
    with Store.open(tuned / "tuned.db", readonly=True) as store:
        assert len(store.rows()) == trials  # nothing was left to tune
    assert "1 of 1 task has raced, 0 are left" in text

    told = json.loads(ok("records", "push", "shared.jsonl.gz", "--who", "Ada", "--db", "tuned.db", "--json"))
    assert told["manifest"]["records"] == 1
    assert "1 record from 1 file" in ok("records", "pull", "shared.jsonl.gz", "--db", "own.db")
    monkeypatch.setenv("SCHEDSEARCH_TUNED_DIR", "")
    (verdict,) = events(ok("records", "verify", "--imported", "--db", "own.db", "--target", "cpu", "--json"))
    assert verdict["verdict"] in ("admitted", "default") and verdict["gain"] > 0
    with Store.open(tuned / "own.db", readonly=True) as store:
        (best,) = store.bests()
        assert best.verified and best.vouched and best.record.anchor is not None and not best.row.source
    assert "1 task in both" in ok("records", "diff", "tuned.db", "own.db", "--all")
    (task,) = json.loads(ok("records", "diff", "tuned.db", "shared.jsonl.gz", "--json"))["tasks"]
    assert task["verdict"] in ("the same", "within noise")  # a winner by less than 2 % was pushed as the default


@pytest.mark.parametrize("case", ["another version", "not legal", "no template"])
def test_what_cannot_be_built_here_is_refused_and_serves_nothing(case: str, tuned: Path) -> None:
    changes: dict[str, Any] = {
        "another version": {"template_version": 99},
        "not legal": {"config": Config(threads=10**6)},
        "no template": {"template": "of_tomorrow"},
    }[case]
    made = of_race(5000.0, 9000.0, **{"workload": TINY, "target": detect("cpu").key, "template": "conv2d_cpu", **changes})
    with Store.open(tuned / "own.db") as store:
        store.append(replace(made, source="file of Mallory"))
    (verdict,) = events(ok("records", "verify", "--imported", "--db", "own.db", "--target", "cpu", "--json"))
    assert verdict["verdict"] == "refused" and verdict["reason"] and "\n" not in verdict["reason"]
    with Store.open(tuned / "own.db", readonly=True) as store:
        assert list(store.bests()) == []


def test_commands_refuse_bad_input_on_one_line(tuned: Path) -> None:
    (tuned / "other.jsonl.gz").write_bytes(gzip.compress(b'{"kind": "header", "format": 5}\n'))
    Store.open(tuned / "empty.db").close()
    cases: list[tuple[tuple[str, ...], int, str]] = [
        (("records", "pull", "other.jsonl.gz", "--db", "new.db"), 2, "has no manifest"),
        (
            ("records", "pull", "empty.db", "--db", "new.db"),
            2,
            "is a database; add its records with: schedsearch records merge",
        ),
        (("records", "push", "out.jsonl.gz", "--who", "Ada", "--db", "empty.db"), 4, "no record of a final race"),
        (("records", "push", "empty.db", "--who", "Ada", "--db", "empty.db"), 4, "no record of a final race"),
        (("records", "ship", "--who", "Ada", "--db", "empty.db", "--target", "cpu", "--output", "shipped"), 4, "tune first"),
        (("records", "diff", "other.jsonl.gz", "empty.db"), 2, "has no manifest"),
        (("records", "verify", "--imported", "--sanitize", "--db", "empty.db"), 2, "exclude each other"),
    ]
    for words, code, text in cases:
        result = schedsearch(*words)
        assert (result.exit_code, len(result.stderr.splitlines())) == (code, 1) and text in result.stderr, words
    assert not (tuned / "new.db").exists()
    text = ok("records", "verify", "--imported", "--db", "empty.db", "--target", "cpu")
    assert "nothing to verify" in text


def test_tasks_that_no_template_computes_are_counted(tuned: Path) -> None:
    task = Task(Workload.conv2d(n=1, h=8, w=8, c=8, k=8, r=3, s=3, dtype="float8_e4m3"), name="float8")
    found = tune_gradually([task], tuned / "new.db", detect("cpu"), trials=1)
    assert (found.raced, found.left, found.unsupported) == (0, (), (task,))
