"""Runs on several real GPUs of one host."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedsearch.device.detect import detect_all
from schedsearch.records.store import Store
from schedsearch.session import tune
from schedsearch.target import Target
from schedsearch.workload import Workload


@pytest.fixture(scope="module")
def cards() -> list[Target]:
    found = detect_all("cuda:all")
    if len(found) < 2:
        pytest.skip("needs two GPUs of one kind, and there is one")
    return found


@pytest.mark.gpu
@pytest.mark.xdist_group("device")
def test_every_card_measures_and_each_record_names_its_card(cards: list[Target], tmp_path: Path) -> None:
    workloads = [Workload.conv2d(n=1, h=14, w=14, c=64, k=64, r=r, s=r, padding=r // 2) for r in (1, 3)]
    summary = tune(workloads, tmp_path / "records.db", target="cuda:all", trials=16, tuner="random")
    uuids = {card.uuid for card in cards}
    with Store.open(tmp_path / "records.db") as store:
        records = [row for row in store.rows() if row.measurement.ok and not row.final_race]
        races = [{row.measurement.device_uuid for row in store.last_race(workload, cards[0].key)} for workload in workloads]
    assert {row.measurement.device_uuid for row in records} == uuids
    assert all(len(race) == 1 and race <= uuids for race in races), "a race stays on one card"
    assert summary.complete and [device.problem for device in summary.devices] == [""] * len(cards)
    assert {device.uuid for device in summary.devices} == uuids
