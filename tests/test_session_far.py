"""Runs on devices that are elsewhere and may go away: nothing is lost, nothing is counted twice."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from session_support import GPU, FakeRunner, World
from test_session_lanes import WORKLOADS, Notices, config_counts

from schedsearch.config import Config
from schedsearch.errors import AwayError, LostError, OperatorError
from schedsearch.measurement import Measurement, Outcome
from schedsearch.processes.builder import Built
from schedsearch.session.summary import name_of
from schedsearch.target import Target
from schedsearch.workload import Workload


@dataclass
class Far(FakeRunner):
    """A device of which every `dies_every`-th call loses its worker, or every race; it is back after `back_s`."""

    batch: int = 4
    dies_every: int = 0
    races_die: bool = False
    back_s: float = 0.02
    returns: bool = True
    poison: Config | None = None  # loses every worker that has it
    calls: int = 0
    away_until_s: float = 0.0
    batches: list[int] = field(default_factory=list)
    races_lost: Counter[Workload] = field(default_factory=Counter)

    @property
    def is_there(self) -> bool:
        return time.monotonic() >= self.away_until_s

    @property
    def gone_for_good(self) -> str:
        return "" if self.is_there or self.returns else "no worker has had it for 60 s"

    def _lose(self) -> None:
        self.away_until_s = time.monotonic() + (self.back_s if self.returns else 1e9)
        raise AwayError("the worker tcp://there was lost")

    def _call(self) -> None:
        if not self.is_there:
            raise AwayError("no worker has it now", begun=False)
        self.calls += 1
        if self.dies_every and self.calls % self.dies_every == 0:
            self._lose()

    def measure_many(self, jobs: Sequence[tuple[Workload, Built, float | None]]) -> list[Measurement | Exception]:
        self._call()
        self.batches.append(len(jobs))
        if self.poison is not None and any(built.artifact.code.decode() == self.poison.json for _, built, _ in jobs):
            self._lose()
        return [super(Far, self).measure(*job) for job in jobs]

    def race(self, workload: Workload, built: Sequence[Built]) -> list[Measurement]:
        try:
            self._call()
            if self.races_die:
                self._lose()
        except AwayError as error:
            self.races_lost[workload] += error.begun
            raise
        return super().race(workload, built)


def races_lost(world: World) -> Counter[Workload]:
    """How many races of each workload lost their worker."""
    return sum((runner.races_lost for runner in world.runners), Counter())  # type: ignore[attr-defined]


def far(count: int = 2, *, world: dict[str, Any] | None = None, **options: Any) -> World:
    return World(make_runners=[functools.partial(Far, **options)] * count, **(world or {}))


def test_candidates_go_in_batches_and_each_is_measured_once() -> None:
    world = far()
    summary = world.tune(*WORKLOADS, trials=24, queue_depth=48)
    assert summary.new_trials == 24 * len(WORKLOADS)
    assert set(config_counts(world).values()) == {1}
    sizes = Counter(size for runner in world.runners for size in runner.batches)  # type: ignore[attr-defined]
    assert max(sizes) == 4 and sum(size * count for size, count in sizes.items()) >= summary.new_trials


@pytest.mark.parametrize("count", [1, 3])
def test_workers_that_are_lost_all_the_time_cost_no_candidate_its_result(count: int) -> None:
    world = far(count, dies_every=5)
    summary = world.tune(*WORKLOADS, trials=24, queue_depth=48)
    assert summary.new_trials == 24 * len(WORKLOADS) and set(config_counts(world).values()) == {1}
    lost = [record for record in world.store.records if record.measurement.outcome is Outcome.WORKER_LOST]
    assert len(lost) < 0.1 * summary.new_trials, "only what lost a worker twice"
    assert all(device.problem == "" for device in summary.devices), "a device that comes back is not taken out"
    lost_races = races_lost(world)
    assert all(task.race is not None or lost_races[task.workload] == 3 for task in summary.tasks)


def test_a_race_that_loses_three_workers_is_given_up_and_the_task_keeps_what_the_search_found() -> None:
    world = far(2, races_die=True)
    summary = world.tune(*WORKLOADS, trials=24, queue_depth=48)
    assert races_lost(world) == dict.fromkeys(WORKLOADS, 3)
    for task in summary.tasks:
        valid = [record.measurement.time_ns for record in world.store.records if record.workload == task.workload]
        assert task.race is None and task.problem == "" and task.best_ns == min(each for each in valid if each is not None)
    assert all(device.problem == "" for device in summary.devices), "a device that comes back is not taken out"


def test_a_candidate_that_loses_its_worker_twice_has_failed_and_takes_no_other_with_it() -> None:
    poison = Config(x=0, y=0)  # the default, which is tried in any case
    world = far(2, poison=poison)
    summary = world.tune(trials=40, queue_depth=32)
    (lost,) = [record for record in world.store.records if record.measurement.outcome is Outcome.WORKER_LOST]
    assert lost.config == poison and "as another one was before" in lost.measurement.message
    assert lost.measurement.device_uuid in {"GPU-0", "GPU-1"}
    assert summary.new_trials == 40 and set(config_counts(world).values()) == {1}


def test_work_of_a_device_that_stays_away_goes_to_another() -> None:
    notices = Notices()
    gone = functools.partial(Far, dies_every=3, returns=False)
    world = World(make_runners=[Far, gone])
    summary = world.tune(*WORKLOADS, trials=24, queue_depth=48, observers=[notices])
    assert summary.new_trials == 24 * len(WORKLOADS) and set(config_counts(world).values()) == {1}
    assert [bool(device.problem) for device in summary.devices] == [False, True]
    assert [notice.uuid for notice in notices.found] == ["GPU-1"] and "for 60 s" in notices.found[0].text


def test_a_run_whose_last_device_stays_away_ends_cleanly_and_goes_on_later() -> None:
    world = far(1, dies_every=6, returns=False)
    with pytest.raises(LostError, match="no worker has had it for 60 s"):
        world.tune(*WORKLOADS[:2], trials=24, queue_depth=48)
    done = len(world.store.records)
    assert 0 < done < 48
    assert world.store.runs["run0"]["stopped"] == "lost", "the run in the store has an end"
    world.make_runners = [Far]
    summary = world.tune(*WORKLOADS[:2], trials=24, queue_depth=48)
    assert summary.new_trials == 48 - done and set(config_counts(world).values()) == {1}


def test_a_task_that_cannot_be_prepared_there_is_given_up_and_others_go_on() -> None:
    class Refuses(Far):
        def measure_many(self, jobs: Sequence[tuple[Workload, Built, float | None]]) -> list[Measurement | Exception]:
            found = super().measure_many(jobs)
            return [OperatorError("no inputs") if job[0] == WORKLOADS[1] else each for job, each in zip(jobs, found)]

    world = World(make_runners=[Refuses, Refuses])
    summary = world.tune(*WORKLOADS[:2], trials=20, queue_depth=32)
    assert summary.tasks[1].problem == "no inputs" and summary.tasks[0].new_trials >= 20


def test_a_device_elsewhere_is_named_with_its_host() -> None:
    there = Target("cuda", "NVIDIA H200", (9, 0), 132, ordinal=1, host="node7")
    assert name_of(there) == "node7 cuda:1 (NVIDIA H200)"
    assert there.key == Target("cuda", "NVIDIA H200", (9, 0), 132).key, "cards of a kind share records, wherever they are"
    assert name_of(GPU) == "cuda:0 (a pretended GPU)"
