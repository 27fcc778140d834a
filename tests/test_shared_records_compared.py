"""`records diff`: entries of databases, shipped records and pushed files are compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from records_support import H200, conv
from shared_records_support import of_race, ok, raced

from schedsearch.config import Config
from schedsearch.measurement import CHAIN_GRAPH, COLD_GRAPH, Record
from schedsearch.records.differences import differences, read_entries
from schedsearch.records.entries import Entry, merged
from schedsearch.records.sharing import push
from schedsearch.records.shipped import file_name
from schedsearch.records.shipping import ship
from schedsearch.records.store import Store


def test_differences_by_gain_time_and_noise(tmp_path: Path) -> None:
    def entries(*found: Record) -> dict[Any, Entry]:
        return merged(map(Entry.of, found))

    def fast(k: int, time_ns: float, bm: int = 64, anchor_ns: float = 4000.0) -> Record:
        return of_race(time_ns, anchor_ns, workload=conv(k=k), config=Config(bm=bm))

    one = entries(fast(8, 1000.0), fast(16, 1000.0), fast(32, 1000.0), fast(64, 1000.0), fast(128, 1000.0))
    other = entries(
        fast(8, 2000.0, anchor_ns=8000.0), fast(16, 1010.0, bm=32), fast(32, 1300.0, bm=32), fast(64, 800.0, bm=32),
        fast(256, 1.0),
    )  # fmt: skip
    found = {each.label: each for each in differences(one, other).rows}
    verdicts = {k: found[conv(k=k).label].verdict for k in (8, 16, 32, 64, 128, 256)}
    assert verdicts == {
        8: "the same", 16: "within noise", 32: "A is faster", 64: "B is faster", 128: "only in A", 256: "only in B"
    }  # fmt: skip
    assert found[conv(k=8).label].ratio == 1 and found[conv(k=32).label].ratio == pytest.approx(1.3)
    changes = [found[conv(k=k).label].change for k in (8, 32, 128)]
    assert changes == ["conv2d_wgmma", "conv2d_wgmma: bm 64 -> 32", "conv2d_wgmma"]
    headline = differences(one, other).headline
    assert headline.startswith("4 tasks in both: 1 the same, 1 others within noise, 1 faster in A, 1 in B")
    assert headline.endswith("1 only in A, 1 only in B")


def test_databases_shipped_records_and_pushed_files_compare(tmp_path: Path) -> None:
    with Store.open(tmp_path / "own.db") as store:
        raced(store, 1000.0)
        raced(store, 2000.0, workload=conv(k=128))
        path, _, _ = push(store, tmp_path / "file.jsonl.gz", "Ada")
        ship(store, tmp_path, H200, "Ada")
    files = [tmp_path / "own.db", path, tmp_path / file_name(H200)]
    for one in files:
        for other in files:
            found = differences(read_entries(one), read_entries(other))
            assert [(each.verdict, each.by, each.ratio) for each in found.rows] == [("the same", "gain", 1.0)] * 2


def test_a_difference_names_the_mode_where_a_layer_has_several(tmp_path: Path) -> None:
    cold = of_race(1000.0)
    chained = replace(cold, measurement=replace(cold.measurement, mode=CHAIN_GRAPH))
    for name, made in (("one.db", [cold]), ("other.db", [cold, chained])):
        with Store.open(tmp_path / name) as store:
            for each in made:
                store.promote(store.append(each))
    text = ok("records", "diff", tmp_path / "one.db", tmp_path / "other.db", "--all")
    assert f"{cold.workload.label} ({COLD_GRAPH})" in text and f"{cold.workload.label} ({CHAIN_GRAPH})" in text
    assert cold.target not in text, "both are of one device"
    assert "(" not in ok("records", "diff", tmp_path / "one.db", tmp_path / "one.db", "--all").splitlines()[2]
