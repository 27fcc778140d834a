"""Deployment's reader: it finds bests, also while a writer is active, and needs only the standard library."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from records_support import A100, H100, H200, artifact, conv, python, record

from schedsearch.config import Config
from schedsearch.errors import DatabaseError
from schedsearch.launch import LaunchPlan
from schedsearch.records.lookup import Lookup
from schedsearch.records.store import Store
from schedsearch.workload import Workload

MODE = "cold-graph-v1"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def store(tmp_path: Path):
    with Store.open(tmp_path / "records.db") as store:
        store.promote(store.append(record(1000.0, number=1)), artifact(b"h200"))
        store.promote(store.append(record(800.0, number=2, target=A100)), artifact(b"a100", "sm_80"))
        store.promote(store.append(record(1500.0, number=3, target=H100)))
        store.promote(store.append(record(700.0, number=4, workload=conv(k=128))), artifact(b"k128"))
        store.promote(store.append(record(9.0, number=5, target="cpu:512:8:EPYC", template="conv2d_cpu")), verified=False)
        yield store


@pytest.fixture
def lookup(store: Store):
    with Lookup(store.path) as lookup:
        yield lookup


def test_an_exact_row_has_all_that_a_launch_needs(lookup: Lookup) -> None:
    row = lookup.exact(conv().id, H200, MODE)
    assert row is not None
    assert (row.workload_id, row.target_key, row.mode, row.record_id) == (conv().id, H200, MODE, 1)
    assert (row.template, row.template_version, row.time_ns, row.verified) == ("conv2d_wgmma", 1, 1000.0, True)
    assert Config.from_json(row.config_json) == record(number=1).config
    assert LaunchPlan.from_json(row.plan_json or "") == artifact().plan and row.arch == "sm_90a"
    assert row.vouched and lookup.code(row) == b"h200"


def test_a_missing_row_is_none(lookup: Lookup) -> None:
    assert lookup.exact(conv(k=8).id, H200, MODE) is None
    assert lookup.exact(conv().id, "cuda:sm_120:170:RTX 5090", MODE) is None
    assert lookup.exact(conv().id, H200, "hot-graph-v1") is None


def test_code_that_was_pruned_meanwhile_is_said_to_be(store: Store, lookup: Lookup) -> None:
    store.promote(store.append(record(3000.0, number=8)), artifact(b"slow"))
    row = lookup.exact(conv().id, H200, MODE)
    assert row is not None
    store.promote(store.append(record(2000.0, number=9)))
    store.prune(1)
    with pytest.raises(DatabaseError, match=f"has no artifact {row.artifact_sha256}; it was pruned"):
        lookup.code(row)


def test_the_same_workload_on_other_targets_with_code_fastest_first(store: Store, lookup: Lookup) -> None:
    slow_first_by_name, fast_last_by_name = "cuda:sm_70:80:NVIDIA V100", "cuda:sm_90:78:NVIDIA H20"
    store.promote(store.append(record(1200.0, number=6, target=slow_first_by_name)), artifact(b"v100", "sm_70"))
    store.promote(store.append(record(700.0, number=7, target=fast_last_by_name)), artifact(b"h20"))
    rows = lookup.same_architecture(conv().id, MODE)
    assert [(row.target_key, row.time_ns, row.arch) for row in rows] == [
        (fast_last_by_name, 700.0, "sm_90a"), (A100, 800.0, "sm_80"), (H200, 1000.0, "sm_90a"),
        (slow_first_by_name, 1200.0, "sm_70"),
    ]  # fmt: skip


def test_neighbours_are_the_bests_of_an_operator_on_a_kind_of_target(lookup: Lookup) -> None:
    rows = lookup.nearest("conv2d", MODE, "cuda:")
    found = {(Workload.from_json(row.workload_json).k, row.target_key, row.time_ns) for row in rows}
    assert found == {(64, H200, 1000.0), (64, A100, 800.0), (64, H100, 1500.0), (128, H200, 700.0)}
    assert all(json.loads(row.config_json)["bm"] == 128 and row.template == "conv2d_wgmma" for row in rows)
    assert {row.target_key for row in lookup.nearest("conv2d", MODE, "cuda:sm_80:")} == {A100}
    assert len(lookup.nearest("conv2d", MODE)) == 5
    assert lookup.nearest("conv2d", MODE, "cuda:%") == lookup.nearest("matmul", MODE) == []


def test_a_row_is_remembered_and_a_miss_is_not(store: Store, lookup: Lookup) -> None:
    assert lookup.exact(conv(k=8).id, H200, MODE) is None
    store.promote(store.append(record(workload=conv(k=8))))
    assert lookup.exact(conv(k=8).id, H200, MODE) is not None, "what is tuned meanwhile is found"
    first = lookup.exact(conv().id, H200, MODE)
    store.promote(store.append(record(5.0, number=9)), artifact(b"new"))
    assert lookup.exact(conv().id, H200, MODE) is first
    lookup.refresh()
    fresh = lookup.exact(conv().id, H200, MODE)
    assert fresh is not None and fresh.time_ns == 5.0


def test_threads_may_share_a_lookup(lookup: Lookup) -> None:
    def find(number: int) -> float | None:
        lookup.refresh()
        row = lookup.exact(conv().id, (H200, A100)[number % 2], MODE)
        return row and row.time_ns

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(find, range(200))) == [1000.0, 800.0] * 100


WRITE_FOR_EVER = """
import sys
from records_support import artifact, record
from schedsearch.records.store import Store
with Store.open(sys.argv[1]) as store:
    for number in range(10, 10**6):
        code = artifact(b"%d" % number * 5000)
        store.promote(store.append(record(1e6 - number, number=number)), code)
        if number % 25 == 0:
            store.prune(1)
        print(number, flush=True)
"""


def test_reading_beside_a_writer_always_finds_a_whole_row(store: Store) -> None:
    writer = python(WRITE_FOR_EVER, store.path)
    try:
        assert writer.stdout
        writer.stdout.readline()
        seen = set()
        with Lookup(store.path) as lookup:
            deadline = time.monotonic() + 60
            reads = 0
            while (reads := reads + 1) < 1000 or len(seen) < 2:
                assert time.monotonic() < deadline, "the writer made no progress"
                lookup.refresh()
                row = lookup.exact(conv().id, H200, MODE)
                assert row is not None and row.plan_json
                seen.add(row.time_ns)
                number = json.loads(row.config_json)["number"]
                assert row.time_ns == 1e6 - number
    finally:
        writer.kill()
        writer.wait()


BANNED = ("numba", "llvmlite", "xgboost", "sqlalchemy", "numpy", "pydantic", "rich", "ruamel", "click")


def test_looking_up_needs_the_standard_library_only(store: Store) -> None:
    store.close()
    code = f"""
import sys
class Ban:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {BANNED!r}:
            raise AssertionError('imports ' + name)
        if name in ('schedsearch.templates', 'schedsearch.tuner', 'schedsearch.workload'):
            raise AssertionError('imports ' + name)
sys.meta_path.insert(0, Ban())
from schedsearch.records.lookup import Lookup
with Lookup(sys.argv[1]) as lookup:
    row = lookup.exact({conv().id!r}, {H200!r}, {MODE!r})
    print(lookup.code(row).decode())
"""
    process = python(code, store.path)
    assert process.communicate()[0] == "h200\n" and process.returncode == 0
