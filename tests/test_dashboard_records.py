"""The list of records has the values of knobs; the page of a trial says whether its time can be trusted."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from dashboard_support import H200, TEMPLATES, answers_of, hostile_database, raced_database, sample_database

from schedsearch.records.store import Store

CPU = "cpu:512:2:AMD EPYC"
QUIET = tuple(100_000.0 + each for each in (0, 40, -30, 10, 60, -50, 20, 5, -10, 70, -60, 30, -20, 15, 25, 35))
TWO_GROUPS = (10_000.0, 10_100.0, 9_950.0, 10_040.0) * 2 + (40_000.0, 40_500.0, 39_800.0, 40_100.0) * 2


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_database(tmp_path_factory.mktemp("sample") / "a.db", trials=40)


def test_values_are_the_configurations_of_the_records(sample: Path) -> None:
    with answers_of(sample) as answers:
        view = answers.get("records")
    with Store.open(sample, readonly=True) as store:
        configs = {row.id: dict(row.config) for row in store.rows()}
    columns = view["records"]
    assert set(view["knobs"]) == set(TEMPLATES)
    for number, template, values in zip(columns["id"], columns["template"], columns["values"], strict=True):
        assert dict(zip(view["knobs"][template], values, strict=True)) == configs[number]


def test_a_knob_varies_if_these_records_have_two_values_of_it(sample: Path) -> None:
    with answers_of(sample) as answers:
        whole = answers.get("records")
        part = answers.get("records", {"text": '"tile":128 "order":"row"', "template": TEMPLATES[0]})
    assert set(whole["varying"][TEMPLATES[0]]) == set(whole["knobs"][TEMPLATES[0]])
    assert part["records"]["id"], "the filter matches"
    assert set(part["knobs"][TEMPLATES[0]]) - set(part["varying"][TEMPLATES[0]]) == {"tile", "order"}


def test_every_run_of_the_records_has_its_page(sample: Path) -> None:
    with answers_of(sample) as answers:
        view = answers.get("records")
        assert set(view["runs"]) == set(view["records"]["run"])
        for run, key in view["runs"].items():
            assert answers.get(f"run/{key}")["row"]["id"] == run
            assert set(answers.get("records", {"run": run})["records"]["run"]) == {run}


def test_times_that_are_not_to_be_trusted_are_marked_in_the_list(tmp_path: Path) -> None:
    with answers_of(raced_database(tmp_path / "a.db", (QUIET, TWO_GROUPS))) as answers:
        columns = answers.get("records")["records"]
    doubts = dict(zip(columns["time_ns"], columns["doubt"], strict=True))
    assert doubts == {statistics.median(QUIET): "", statistics.median(TWO_GROUPS): "bimodal"}


def test_foreign_values_of_knobs_are_escaped(tmp_path: Path) -> None:
    with answers_of(hostile_database(tmp_path / "h.db")) as answers:
        values = answers.get("records")["records"]["values"]
    assert not any("\u202e" in str(value) for row in values for value in row)


def test_a_time_of_two_groups_says_that_it_is_not_to_be_trusted(tmp_path: Path) -> None:
    with answers_of(raced_database(tmp_path / "a.db", (QUIET, TWO_GROUPS))) as answers:
        (task,) = answers.get("overview")["tasks"]
        trial = answers.get(f"trial/0.{task['best_id']}")
        quiet = answers.get(f"trial/0.{task['default_id']}")
        race = answers.get(f"task/{task['key']}")["race"]
    assert [(mode["time_ns"], mode["share"]) for mode in trial["modes"]] == [(10_020.0, 0.5), (40_050.0, 0.5)]
    assert trial["words"].endswith("so their median is not to be trusted")
    assert (quiet["doubt"], quiet["words"], quiet["modes"]) == ("", "", [])
    assert {entry["id"]: (entry["doubt"], entry["words"]) for entry in race} == {
        task["best_id"]: ("bimodal", trial["words"]), task["default_id"]: ("", "")
    }  # fmt: skip


@pytest.mark.parametrize("target", [CPU, H200])
def test_a_cpu_has_no_registers_shared_memory_and_spills_to_show(tmp_path: Path, target: str) -> None:
    with answers_of(raced_database(tmp_path / "a.db", (QUIET, QUIET), target=target)) as answers:
        trial = answers.get("trial/0.1")
    with Store.open(tmp_path / "a.db", readonly=True) as store:
        resources = store.row(1).measurement.resources
    names = ("registers", "shared_bytes", "local_bytes", "spill_bytes")
    assert [trial[name] for name in names] == [None if target == CPU else getattr(resources, name) for name in names]
    assert trial["code_bytes"] == (resources.code_bytes or None)
