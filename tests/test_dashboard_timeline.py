"""The timeline of a run: who had the device when, and what was under way beside it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from dashboard_support import A100, H200, add_trials, answers_of, sample_database

from schedsearch.dashboard.answers import UnknownPathError
from schedsearch.dashboard.timeline import Stretch, in_turns, joined, lanes_of
from schedsearch.records.store import Store


def stretches(seed: int, count: int = 60) -> list[Stretch]:
    rng = random.Random(seed)
    starts = [rng.choice((rng.random() * 30, float(rng.randrange(30)))) for _ in range(count)]
    return [Stretch(start, start + rng.random() * 4 + 0.01, n % 3, "ok", False, f"0.{n}") for n, start in enumerate(starts)]


def most_at_once(found: list[Stretch]) -> int:
    return max(sum(each.start_s <= at.start_s < each.end_s for each in found) for at in found)


@pytest.mark.parametrize("seed", range(8))
def test_lanes_are_as_many_as_candidates_were_under_way_at_once(seed: int) -> None:
    found = stretches(seed)
    lanes = lanes_of(found)
    assert sorted((each for lane in lanes for each in lane), key=lambda each: each.trial) == sorted(
        found, key=lambda each: each.trial
    )
    for lane in lanes:
        assert all(one.end_s <= other.start_s for one, other in pairwise(lane))
    assert len(lanes) == most_at_once(found)


@pytest.mark.parametrize("seed", range(4))
def test_the_device_has_one_candidate_at_a_time(seed: int) -> None:
    given = [*stretches(seed), stretches(seed)[7]]
    found = in_turns(given)
    assert all(one.end_s <= other.start_s for one, other in pairwise(found))
    assert all(each.start_s < each.end_s for each in found)
    assert sum(each.count for each in found) == len(given)
    assert {each.end_s for each in found} == {each.end_s for each in given}


@pytest.mark.parametrize("least_s", [0.0, 0.5, 5.0])
def test_joined_neighbours_cover_the_same_time_and_nothing_is_lost(least_s: float) -> None:
    lane = [Stretch(each / 10, each / 10 + 0.08, each % 2, "ok", False, f"0.{each}") for each in range(300)]
    found = joined(lane, least_s)
    assert sum(each.count for each in found) == len(lane)
    assert (found[0].start_s, found[-1].end_s) == (lane[0].start_s, lane[-1].end_s)
    assert all(one.end_s <= other.start_s for one, other in pairwise(found))
    assert all(each.end_s - each.start_s < least_s for each in found if each.count > 1)
    assert len(found) == {0.0: 300, 0.5: 60, 5.0: 6}[least_s]
    assert {each.task for each in found} == ({0, 1} if least_s == 0.0 else {-1})


class TestRun:
    def run_of(self, answers: Any, target: str = H200) -> dict[str, Any]:
        key = next(run["key"] for run in answers.get("overview")["runs"] if run["target"] == target)
        found: dict[str, Any] = answers.get(f"run/{key}")
        return found

    def test_the_device_is_busy_as_long_as_the_records_say(self, tmp_path: Path) -> None:
        path = sample_database(tmp_path / "a.db", trials=30)
        with answers_of(path) as answers:
            view = self.run_of(answers)
        bars = view["bars"]
        device = [i for i, lane in enumerate(bars["lane"]) if lane == 0]
        with Store.open(path, readonly=True) as store:
            records = [record for record in store.history() if record.target == H200]
        searched = sum(record.measurement.run_s for record in records if not record.final_race)
        assert sum(bars["end_s"][i] - bars["start_s"][i] for i in device if not bars["race"][i]) == pytest.approx(
            searched, abs=0.01
        )
        assert sum(bars["count"][i] for i in device if bars["race"][i]) == sum(record.final_race for record in records)
        assert (view["tasks"], view["lanes"]) == (["small", "large"], 1 + max(bars["lane"]))
        assert {len(column) for column in bars.values()} == {len(device) + sum(lane > 0 for lane in bars["lane"])}

    def test_every_candidate_of_the_search_is_on_the_timeline(self, tmp_path: Path) -> None:
        path = sample_database(tmp_path / "a.db", trials=30)
        with answers_of(path) as answers:
            bars = self.run_of(answers)["bars"]
        with Store.open(path, readonly=True) as store:
            searched = [row for row in store.rows() if row.target == H200 and not row.final_race]
        assert {f"0.{row.id}" for row in searched} <= set(bars["trial"])
        outcomes = {trial: outcome for trial, outcome in zip(bars["trial"], bars["outcome"], strict=True) if trial}
        assert all(outcomes[f"0.{row.id}"] == row.measurement.outcome for row in searched)

    def test_each_of_several_devices_has_a_lane_and_its_state(self, tmp_path: Path) -> None:
        """Two cards of one host, of which one was taken out; what a third one measured has a lane, too."""
        path = sample_database(tmp_path / "a.db", trials=20)
        uuid = "GPU-6e1c8a3d-0000-0000-0000-000000000001"  # of all records of the sample
        said = [
            {"name": "node7 cuda:0", "uuid": "GPU-other", "trials": 3, "problem": "it fell off the bus"},
            {"name": "node7 cuda:1", "uuid": uuid, "trials": 40, "problem": ""},
        ]
        with Store.open(path) as store:
            run = next(run for run in store.runs() if run["info"]["target"] == H200)
            store.finish_run(run["id"], {**(run["summary"] or {}), "devices": said})
        with answers_of(path) as answers:
            view = self.run_of(answers)
        assert [(each["name"], each["state"], each["trials"]) for each in view["devices"]] == [
            ("node7 cuda:0", "quarantined", 3),
            ("node7 cuda:1", "", 40),
        ]
        assert view["devices"][0]["note"] == "it fell off the bus"
        lanes = set(view["bars"]["lane"])
        assert 0 not in lanes and 1 in lanes, "the first card has no record"
        assert view["lanes"] > max(lanes)

    @pytest.mark.parametrize("state", ["busy", "waiting", "lost"])
    def test_a_running_run_says_what_each_device_does(self, tmp_path: Path, state: str) -> None:
        path = sample_database(tmp_path / "live.db", live=True, trials=5)
        with Store.open(path) as store:
            (run,) = [run for run in store.runs() if run["finished_at"] is None]
            device = {"name": "node8 cuda:0", "uuid": "GPU-x", "state": state, "trials": 1, "problem": ""}
            record = next(row.record() for row in store.rows() if row.target == A100)
            store.append(replace(record, finished_at=record.finished_at + 1, run=run["id"]), {"devices": [device] * 1})
        with answers_of(path) as answers:
            found = self.run_of(answers, A100)["devices"]
        assert [(each["name"], each["state"]) for each in found] == [("node8 cuda:0", state)]

    @pytest.mark.long
    def test_a_long_run_stays_small(self, tmp_path: Path) -> None:
        with answers_of(sample_database(tmp_path / "a.db", trials=1500)) as answers:
            view = self.run_of(answers)
        assert view["joined"]
        assert len(view["bars"]["lane"]) <= 2 * 1500 * view["lanes"]
        assert sum(n for n, lane in zip(view["bars"]["count"], view["bars"]["lane"], strict=True) if lane) == pytest.approx(
            3000, rel=0.02
        )

    def test_a_live_run_is_announced_with_its_timeline(self, tmp_path: Path) -> None:
        path = sample_database(tmp_path / "live.db", live=True, trials=20)
        with answers_of(path) as answers:
            before = self.run_of(answers, A100)
            add_trials(path, 2)
            assert f"run/{before['row']['key']}" in answers.refresh()
            after = self.run_of(answers, A100)
        assert after["row"]["trials"] > before["row"]["trials"]
        assert len(after["bars"]["lane"]) > len(before["bars"]["lane"])

    def test_a_run_that_is_not_there_is_said_to_be_unknown(self, tmp_path: Path) -> None:
        with answers_of(sample_database(tmp_path / "a.db", trials=5)) as answers, pytest.raises(UnknownPathError):
            answers.get("run/0.rffff")
