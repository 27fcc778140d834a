"""Attacks on what deployment serves: files and edited databases that name the code of one workload for another.

The attacker writes whole files, and edits databases that this machine made, but does not have this machine's key. Whatever
they write, `compile` computes right results or refuses.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from records_support import python

from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.device.detect import detect
from schedsearch.errors import UntrustedDatabaseError, UsageError
from schedsearch.launch import Artifact
from schedsearch.measurement import COLD_GRAPH, Measurement, Outcome, Record
from schedsearch.records.deployment import export_deploy
from schedsearch.records.exchange import export_jsonl, import_jsonl, merge
from schedsearch.records.lookup import Lookup
from schedsearch.records.store import Store
from schedsearch.template import load_template
from schedsearch.workload import Workload

# The code for B reads and writes far behind the operands of A.
A = Workload.conv2d(n=1, h=4, w=4, c=8, k=8, r=1, s=1, dtype="float32")
B = Workload.conv2d(n=2, h=64, w=64, c=32, k=32, r=3, s=3, padding=1, dtype="float32")
HOST = detect("cpu")


def made(workload: Workload) -> tuple[Config, Artifact]:
    """The default configuration of a workload and its code."""
    template = load_template("conv2d_cpu")
    config = template.default(workload, HOST, template.space(workload, HOST))
    return config, compile_source(template.kernel(workload, HOST, config), HOST).artifact


@pytest.fixture(scope="module")
def code() -> dict[Workload, tuple[Config, Artifact]]:
    return {workload: made(workload) for workload in (A, B)}


def measured(workload: Workload, config: Config, time_ns: float = 50_000.0, **changes: Any) -> Record:
    times = (time_ns,) if changes.get("outcome", Outcome.OK) is Outcome.OK else ()
    measurement = Measurement(changes.pop("outcome", Outcome.OK), mode=COLD_GRAPH, times_ns=times)
    version = load_template("conv2d_cpu").version
    values = {"template": "conv2d_cpu", "template_version": version, "config": config, "finished_at": 1.7e9, **changes}
    return Record(workload=workload, target=HOST.key, measurement=measurement, **values)


def demote(store: Store, workload: Workload) -> bool:
    (best,) = store.bests(workload=workload)
    return store.demote(best.record)


@pytest.fixture(autouse=True)
def this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "state"))


def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "state of the attacker"))


def back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def db(tmp_path: Path, code: dict[Workload, tuple[Config, Artifact]]) -> Path:
    """A database of this machine that serves B."""
    path = tmp_path / "records.db"
    config, artifact = code[B]
    with Store.open(path) as store:
        store.promote(store.append(measured(B, config)), artifact)
    return path


@pytest.fixture
def both(db: Path, code: dict[Workload, tuple[Config, Artifact]]) -> Path:
    """A database of this machine that serves A and B."""
    with Store.open(db) as store:
        config, artifact = code[A]
        store.promote(store.append(measured(A, config, 70_000.0)), artifact)
    return db


SERVE = """
import sys
import numpy as np
import schedsearch
from conv2d_numpy import numpy_conv2d
from schedsearch.workload import Workload
workload = Workload.from_json(sys.argv[2])
try:
    kernel = schedsearch.compile(workload, sys.argv[1], target="cpu", allow=("exact",))
except schedsearch.SchedsearchError as error:
    print("refused:", error)
    raise SystemExit
rng = np.random.default_rng(0)
arguments = {arg.name: rng.standard_normal(arg.shape).astype(arg.dtype) for arg in workload.signature}
np.testing.assert_allclose(kernel(**arguments), numpy_conv2d(workload, arguments, {}), rtol=1e-4, atol=1e-3)
print("right:", kernel.provenance.reasons if hasattr(kernel.provenance, "reasons") else kernel.provenance)
"""


def serve(db: Path, workload: Workload) -> str:
    """What a program that deploys gets, in a process of its own: "right: why" or "refused: why"."""
    process = python(SERVE, db, workload.json)
    out = process.communicate(timeout=120)[0]
    assert process.returncode == 0, f"the program died: {process.returncode}"
    return out


def loads_stored_code(db: Path, workload: Workload) -> bool:
    """Whether stored code would be loaded for a workload, by either reader."""
    with Lookup(db) as lookup:
        row = lookup.exact(workload.id, HOST.key, COLD_GRAPH)
        if row is None or row.artifact_sha256 is None:
            return False
        try:
            loaded = bool(lookup.code(row))
        except UntrustedDatabaseError:
            loaded = False
        if lookup.kind == "store":
            with Store.open(db, readonly=True) as store:
                bests = list(store.bests(workload=workload))
                assert [store.code(best) is not None for best in bests if best.artifact_sha256] in ([loaded], [])
        return loaded


def forged(sha256: str, config: Config, time_ns: float) -> list[dict[str, Any]]:
    """Lines that name A with this code: the best there is, and verified."""
    from schedsearch.records import rows

    record = rows.to_row(measured(A, config, time_ns))
    line = {"kind": "record", **rows.to_json(record), "artifact": sha256}
    best = {"kind": "best", "content_id": record["content_id"], "verified": True, "artifact": sha256, "promoted_at": 1.8e9}
    return [{"kind": "header", "format": 3, "uuid": "x"}, line, best]


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_line_that_names_the_code_of_another_workload_is_not_served(
    db: Path, tmp_path: Path, code: dict[Workload, tuple[Config, Artifact]]
) -> None:
    """The attack as it was found: no code in the file, only the sha256 of B's code under the name of A."""
    file = write(tmp_path / "gift.jsonl", forged(code[B][1].sha256, code[A][0], 5000.0))
    with Store.open(db) as store:
        report = import_jsonl(store, file)
        assert (report.records_added, report.bests_changed, report.bests_dropped) == (1, 0, 1)
        (record,) = store.history(workload=A)
        assert record.artifact is None and record.source == str(file) and list(store.bests(workload=A)) == []
        with pytest.raises(UsageError, match=r"came from .*only what was measured here can be best"):
            store.promote(2)
    out = serve(db, A)
    assert out.startswith("right") and "imported record 2" in out, "its configuration is built and verified here"


@pytest.mark.parametrize("time_ns", [1.0, 1e-9, 9.9])
def test_a_time_that_physics_forbids_is_named_and_nothing_of_the_file_is_taken(
    db: Path, tmp_path: Path, code: dict[Workload, tuple[Config, Artifact]], time_ns: float
) -> None:
    file = write(tmp_path / "gift.jsonl", forged(code[B][1].sha256, code[A][0], time_ns))
    with Store.open(db) as store:
        with pytest.raises(UsageError, match=rf"{file}:2: a time of {time_ns:g} ns is not possible.*less than 10 ns"):
            import_jsonl(store, file)
        assert store.stats()["records"] == 1


def test_a_row_with_a_time_that_physics_forbids_is_not_merged(
    db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: dict[Workload, tuple[Config, Artifact]]
) -> None:
    elsewhere(monkeypatch, tmp_path)
    with Store.open(tmp_path / "gift.db") as gift:
        gift.promote(gift.append(measured(A, code[A][0], 1.0)))
        gift.append(measured(A, code[A][0], 5000.0))
    back(monkeypatch, tmp_path)
    with Store.open(db) as store:
        assert merge(store, [tmp_path / "gift.db"]).records_added == 1
        (damage,) = store.damage
        assert (damage.path, damage.table, damage.row) == (tmp_path / "gift.db", "record", "1")
        assert "a time of 1 ns is not possible" in damage.what
        assert [record.measurement.time_ns for record in store.history(workload=A)] == [5000.0]


def test_a_best_of_another_machine_is_not_merged(
    db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: dict[Workload, tuple[Config, Artifact]]
) -> None:
    """Its code for A is the code for B, which this machine compiled and has."""
    elsewhere(monkeypatch, tmp_path)
    with Store.open(tmp_path / "gift.db") as gift:
        gift.promote(gift.append(measured(A, code[A][0], 5000.0)), code[B][1])
    back(monkeypatch, tmp_path)
    with Store.open(db) as store:
        report = merge(store, [tmp_path / "gift.db"])
        assert (report.bests_dropped, report.artifacts_dropped, report.bests_changed) == (1, 1, 0)
        assert list(store.bests(workload=A)) == []
    assert not loads_stored_code(db, A)


def test_a_record_whose_identity_is_not_that_of_its_content_is_not_merged(db: Path, tmp_path: Path, both: Path) -> None:
    gift = tmp_path / "gift.db"
    shutil.copy(both, gift)
    with sqlite3.connect(gift) as other:
        other.execute("DROP TRIGGER record_is_never_changed")
        other.execute("UPDATE record SET workload_id = ? WHERE workload_id = ?", (A.id, B.id))
    with Store.open(tmp_path / "mine.db") as mine:
        assert merge(mine, [gift]).records_added == 1
        assert [each.row for each in mine.damage if each.table == "record"] == ["1"]


SWAP = "(SELECT artifact_sha256 FROM best WHERE workload_id = :b)"
EDITS: dict[str, str] = {
    "the code of another workload": f"UPDATE best SET artifact_sha256 = {SWAP} WHERE workload_id = :a",
    "the whole row of another workload": """UPDATE best SET (template, template_version, config, time_ns, verified,
        artifact_sha256, signature) = (SELECT template, template_version, config, time_ns, verified, artifact_sha256,
        signature FROM best WHERE workload_id = :b) WHERE workload_id = :a""",
    "another time": "UPDATE best SET time_ns = 1.0",
    "another configuration": "UPDATE best SET config = (SELECT config FROM best WHERE workload_id = :b) || ' '",
    "another template": "UPDATE best SET template = 'conv2d_other'",
    "another version": "UPDATE best SET template_version = 99",
    "not verified": "UPDATE best SET verified = 1 - verified",
    "no signature": "UPDATE best SET signature = ''",
    "the signature of the artifact": "UPDATE best SET signature = (SELECT signature FROM artifact LIMIT 1)",
    "the signature of the database": "UPDATE best SET signature = (SELECT value FROM meta WHERE key = 'signature')",
    "the signature of the record": "UPDATE best SET signature = (SELECT signature FROM record LIMIT 1)",
}


def edit(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as other:
        other.execute("DROP TRIGGER IF EXISTS record_is_never_changed")
        other.execute(statement, {"a": A.id, "b": B.id})


@pytest.mark.parametrize("what", EDITS)
@pytest.mark.parametrize("kind", ["store", "deploy"])
@pytest.mark.mostly_long(3)
def test_an_edited_best_is_a_configuration_and_no_code(both: Path, tmp_path: Path, what: str, kind: str) -> None:
    file = both
    if kind == "deploy":
        if "record" in what:
            pytest.skip("a deployment file has no records")
        with Store.open(both) as store:
            export_deploy(store, tmp_path / "deploy.db")
        file = tmp_path / "deploy.db"
    assert loads_stored_code(file, A) and loads_stored_code(file, B)
    edit(file, EDITS[what])
    with Lookup(file) as lookup:
        row = lookup.exact(A.id, HOST.key, COLD_GRAPH)
        assert row is not None and not row.vouched
        with pytest.raises(UntrustedDatabaseError, match="did not sign"):
            lookup.code(row)


def test_a_best_moved_to_another_device_is_no_code(both: Path) -> None:
    edit(both, f"UPDATE best SET target_key = '{HOST.key} Plus'")
    with Lookup(both) as lookup:
        row = lookup.exact(A.id, f"{HOST.key} Plus", COLD_GRAPH)
        assert row is not None and not row.vouched


def test_a_swap_in_a_database_of_this_machine_is_served_right(both: Path) -> None:
    edit(both, EDITS["the code of another workload"])
    out = serve(both, A)
    assert out.startswith("right") and "built again from its configuration" in out


def test_a_plan_that_was_exchanged_with_its_digest_is_no_code(both: Path) -> None:
    """The sha256 in both tables fits code and plan; only the signature of the best does not."""
    import hashlib

    with sqlite3.connect(both) as other:
        other.execute("PRAGMA foreign_keys = OFF")
        joined = "artifact a JOIN best b ON b.artifact_sha256 = a.sha256"
        old, plan, machine = other.execute(
            f"SELECT a.sha256, a.plan, a.code FROM {joined} WHERE workload_id = ?", (A.id,)
        ).fetchone()
        new = hashlib.sha256(plan.replace("1", "2").encode() + b"\0" + machine).hexdigest()
        other.execute("UPDATE artifact SET sha256 = ?, plan = replace(plan, '1', '2') WHERE sha256 = ?", (new, old))
        other.execute("UPDATE best SET artifact_sha256 = ? WHERE workload_id = ?", (new, A.id))
    assert not loads_stored_code(both, A)


def test_a_database_from_before_signatures_is_built_again(both: Path) -> None:
    with sqlite3.connect(both) as other:
        for table in ("best", "record"):
            other.execute(f"ALTER TABLE {table} DROP COLUMN signature")
        for column in ("sustained_ns", "verdict"):
            other.execute(f"ALTER TABLE record DROP COLUMN {column}")
        other.execute("DROP TABLE size_table")
        other.execute("UPDATE meta SET value = '3' WHERE key = 'schema_version'")
        other.execute(f"UPDATE best SET artifact_sha256 = {SWAP} WHERE workload_id = :a", {"a": A.id, "b": B.id})
    assert not loads_stored_code(both, A)
    with Store.open(both) as store:  # brings the schema to the newest, and signs nothing
        assert not any(best.vouched for best in store.bests())
    assert not loads_stored_code(both, A) and not loads_stored_code(both, B)


def test_promoting_a_record_uses_the_code_that_it_names_only_if_this_machine_named_it(
    both: Path, code: dict[Workload, tuple[Config, Artifact]]
) -> None:
    with Store.open(both) as store:
        of_a = next(store.bests(workload=A)).record_id
        store.promote(of_a)
        assert next(store.bests(workload=A)).artifact_sha256 == code[A][1].sha256
    with sqlite3.connect(both) as other:
        other.execute("DROP TRIGGER record_artifact_is_added_once")
        other.execute("UPDATE record SET artifact_sha256 = ?", (code[B][1].sha256,))
    with Store.open(both) as store:
        store.promote(of_a)
        assert next(store.bests(workload=A)).artifact_sha256 is None


def test_code_that_turned_out_wrong_is_not_brought_back(both: Path, tmp_path: Path) -> None:
    """The attacker has an old export and an old copy, both with signatures of this machine."""
    copy, export = tmp_path / "old.db", tmp_path / "old.jsonl"
    with Store.open(both) as store:
        export_jsonl(store, export, artifacts=True)
    shutil.copy(both, copy)
    with Store.open(both) as store:
        assert demote(store, A)
        assert import_jsonl(store, export).bests_dropped == 1 and merge(store, [copy]).bests_dropped == 1
        assert list(store.bests(workload=A)) == []
        assert loads_stored_code(both, B)
    assert not loads_stored_code(copy, A) and loads_stored_code(copy, B)
    with Lookup(copy) as lookup:
        row = lookup.exact(A.id, HOST.key, COLD_GRAPH)
        assert row is not None
        with pytest.raises(UntrustedDatabaseError, match="turned out wrong for this workload on this machine"):
            lookup.code(row)


def test_code_that_is_verified_again_is_served_again(both: Path, code: dict[Workload, tuple[Config, Artifact]]) -> None:
    with Store.open(both) as store:
        demote(store, A)
        store.promote(store.append(measured(A, code[A][0], 80_000.0, finished_at=1.9e9)), code[A][1])
    assert loads_stored_code(both, A)


def test_a_foreign_best_that_is_wrong_does_not_revoke_code_of_ours(both: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    shutil.copy(both, copy)
    edit(copy, "UPDATE best SET signature = ''")
    with Store.open(copy) as store:
        demote(store, A)
    assert loads_stored_code(both, A)


def test_records_of_others_are_no_results_of_ours(
    db: Path, tmp_path: Path, code: dict[Workload, tuple[Config, Artifact]]
) -> None:
    """A file that calls good configurations wrong, or bad ones fast, does not keep the search from trying them."""
    config = code[A][0]
    lines = forged("0" * 64, config, 5000.0)
    wrong = forged("0" * 64, config, 5000.0)[1]
    wrong["measurement"] |= {"outcome": "wrong_answer", "times_ns": []}
    wrong["finished_at"] += 1
    race = {**lines[1], "final_race": True, "run": "a race"}
    key = (A, HOST.key, "conv2d_cpu", load_template("conv2d_cpu").version)
    with Store.open(db) as store:
        assert import_jsonl(store, write(tmp_path / "gift.jsonl", [lines[0], lines[1], wrong, race])).records_added == 3
        assert store.measured(*key) == {} and store.last_race(A, HOST.key) == []
        assert store.evidence(*key, limit=9, imported=True) == [(config, 5000.0)], "but the model may learn from them"
        own = measured(A, config, 60_000.0)
        store.append(own)
        assert store.measured(*key) == {config: own}


def test_records_of_this_machine_come_back_as_its_own(both: Path, tmp_path: Path) -> None:
    with Store.open(both) as store:
        export_jsonl(store, tmp_path / "own.jsonl")
    key = (A, HOST.key, "conv2d_cpu", load_template("conv2d_cpu").version)
    for number, bring in enumerate((lambda new: import_jsonl(new, tmp_path / "own.jsonl"), lambda new: merge(new, [both]))):
        with Store.open(tmp_path / f"new{number}.db") as new:
            bring(new)
            assert len(new.measured(*key)) == 1
    lines = [json.loads(line) for line in (tmp_path / "own.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["kind"] != "best"]
    lines[-1]["measurement"]["times_ns"] = [71_000.0]
    assert lines[-1]["workload"] == json.loads(A.json)
    write(tmp_path / "own.jsonl", lines)
    with Store.open(tmp_path / "edited.db") as new:
        import_jsonl(new, tmp_path / "own.jsonl")
        assert new.measured(*key) == {}, "a line that was edited is somebody else's"


def test_configurations_that_failed_here_are_not_offered_from_imports(
    db: Path, tmp_path: Path, code: dict[Workload, tuple[Config, Artifact]]
) -> None:
    config = code[A][0]
    with Store.open(db) as store:
        import_jsonl(store, write(tmp_path / "gift.jsonl", forged("0" * 64, config, 5000.0)))
        with Lookup(db) as lookup:
            (row,) = lookup.imported(A.id, HOST.key, COLD_GRAPH, 4)
            assert (row.template, row.config_json, row.time_ns) == ("conv2d_cpu", config.json, 5000.0)
            assert lookup.imported(A.id, HOST.key, "hot-graph-v1", 4) == lookup.imported(B.id, HOST.key, COLD_GRAPH, 4) == []
            store.append(measured(A, config, outcome=Outcome.WRONG_ANSWER))
            assert lookup.imported(A.id, HOST.key, COLD_GRAPH, 4) == []


def test_a_run_of_this_machine_is_not_changed_by_a_file(db: Path, tmp_path: Path) -> None:
    with Store.open(db) as store:
        run = store.start_run({"command": "tune"})
        line = {"kind": "run", "id": run, "machine": "x", "started_at": 0.0, "finished_at": 1.0, "info": {}, "summary": {}}
        import_jsonl(store, write(tmp_path / "gift.jsonl", [{"kind": "header", "format": 4}, line]))
        (kept,) = [each for each in store.runs() if each["id"] == run]
        assert kept["finished_at"] is None and kept["info"] == {"command": "tune"}
