"""Two runs on one task at the same time, into one PostgreSQL store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from postgres_support import Server, Unavailable, running_server
from session_support import GPU, OTHER, WORKLOAD, World

pytest.importorskip("psycopg", reason="needs psycopg, which `make test-postgres` installs")

from schedsearch.records.store import Store

pytestmark = pytest.mark.postgres


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    try:
        with running_server() as started:
            yield started
    except Unavailable as error:
        pytest.skip(str(error))


def test_two_coordinators_on_one_task_keep_all_records_and_the_fastest_kernel(server: Server) -> None:
    url = server.url(server.new_database())
    Store.open(url).close()

    def coordinate(seed: int) -> Any:
        world = World()
        with Store.open(url) as store:
            world.store = store  # type: ignore[assignment]
            return world.tune(WORKLOAD, OTHER, trials=40, seed=seed)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(coordinate, (0, 1))
    assert (first.new_trials, second.new_trials) == (80, 80)
    with Store.open(url, readonly=True) as store:
        records = [row.record() for row in store.rows()]
        for run in (first.run, second.run):
            counts = Counter((r.workload, r.config) for r in records if r.run == run and not r.final_race)
            assert len(counts) == 80 and set(counts.values()) == {1}, "each run has each of its trials once"
        for number, workload in enumerate((WORKLOAD, OTHER)):
            best = store.best(workload, GPU.key)
            assert best is not None
            assert best.measurement.time_ns == min(run.tasks[number].best_ns for run in (first, second))
        assert {run["id"] for run in store.runs()} == {first.run, second.run}
        assert all(run["finished_at"] is not None for run in store.runs()) and store.find_damage() == []
    later = coordinate(2)
    assert later.new_trials == 0, "a run that begins later knows the records of both"
