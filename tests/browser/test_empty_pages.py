"""What there is to see when there is little: every page says it in words, and no chart is blank."""

from dataclasses import replace
from random import Random

import pytest
from browser_support import Watched, served
from dashboard_support import H200, SMALL, START_S, TEMPLATES, a_trial, configs

from schedsearch.measurement import Measurement, Outcome
from schedsearch.records.store import Store

pytestmark = pytest.mark.browser


def stored(path, outcomes):
    """A database with one trial for each outcome, without a run and without a model."""
    rng = Random(0)
    with Store.open(path) as store:
        for number, (outcome, config) in enumerate(zip(outcomes, configs(rng))):
            ok = outcome is Outcome.OK
            measurement = Measurement(outcome, times_ns=(2e4,) if ok else (), message="" if ok else "no")
            record = a_trial(SMALL, H200, TEMPLATES[0], config, rng, START_S + number)
            store.append(replace(record, measurement=measurement))
    return path


def words_of(watched: Watched, address: str) -> str:
    page = watched.go(address)
    assert watched.problems == []
    return page.locator("main").inner_text()


def test_no_database_and_an_empty_one(tmp_path, watch):
    with Store.open(tmp_path / "empty.db"):
        pass
    with served(tmp_path / "missing.db", tmp_path / "empty.db") as root:
        watched: Watched = watch(root)
        words = words_of(watched, "#/")
        assert "missing.db" in words and "There are no trials yet" in words
        assert "There are no rows." in words_of(watched, "#/records")
        assert "No replay was given" in words_of(watched, "#/replay")
        assert words_of(watched, "#/compare")


@pytest.mark.parametrize(
    ("outcomes", "words"),
    [
        (
            [Outcome.COMPILE_ERROR] * 3,
            ["none valid", "Every trial failed", "compile error"],
        ),
        ([Outcome.OK], ["Nothing failed.", "There was no final race yet", "No trial was chosen by a model"]),
        ([Outcome.REJECTED], ["No trial was measured yet.", "none valid"]),
    ],
    ids=["all failed", "one trial", "only a reject"],
)
def test_a_task_with_little(tmp_path, watch, outcomes, words):
    path = stored(tmp_path / "little.db", outcomes)
    with served(path) as root:
        watched: Watched = watch(root)
        page = watched.go("#/")
        href = page.locator("td.task a").first.get_attribute("href")
        said = words_of(watched, href)
        assert [word for word in words if word not in said] == []
        watched.go("#/records")
        trial = page.locator("tbody tr td:first-child a").first.get_attribute("href")
        assert "Configuration" in words_of(watched, trial)
