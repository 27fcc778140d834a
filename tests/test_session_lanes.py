"""Runs on several devices of one kind, with simulated collaborators: shared tasks, and devices that fail or are slow."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from session_support import OTHER, WORKLOAD, FakeRunner, Line, Square, World, square_ns

from schedsearch.config import Config
from schedsearch.device import cuda_driver
from schedsearch.device.detect import detect, detect_all
from schedsearch.errors import DeviceError, Interrupted, OperatorError, UsageError
from schedsearch.launch import Artifact
from schedsearch.measurement import Measurement, Outcome
from schedsearch.processes.builder import Built, Candidate
from schedsearch.session.observer import DeviceNotice, Observer
from schedsearch.session.tune import queue_depth
from schedsearch.workload import Workload

WORKLOADS = [Workload.conv2d(n=n, h=8, w=8, c=8, k=8, r=3, s=3) for n in range(1, 7)]


@dataclass
class Card(FakeRunner):
    """A device that takes some time for a measurement, and may be slower or break."""

    measure_s: float = 0.004
    slower: float = 1.0
    breaks_after: int = 10**9  # measurements; later ones fail with `broken`
    broken: Outcome | type[Exception] = Outcome.LAUNCH_ERROR
    calls: int = 0

    def __post_init__(self) -> None:
        self.workloads: Counter[Workload] = Counter()
        self.raced_workloads: list[Workload] = []
        self.busy = threading.Lock()

    def measure(self, workload: Workload, built: Built, best_ns: float | None) -> Measurement:
        assert self.busy.acquire(blocking=False), "one call at a time"
        try:
            time.sleep(self.measure_s)
            self.calls += 1
            if self.calls > self.breaks_after:
                if isinstance(self.broken, Outcome):
                    return Measurement(self.broken, message="the device is broken", run_s=0.1)
                raise self.broken("the device fell off the bus")
            self.workloads[workload] += 1
            measured = super().measure(workload, built, best_ns)
            times_ns = tuple(time_ns * self.slower for time_ns in measured.times_ns)
            return Measurement(measured.outcome, times_ns=times_ns, message=measured.message, run_s=0.1, max_error=0.0)
        finally:
            self.busy.release()

    def race(self, workload: Workload, built: Sequence[Built]) -> list[Measurement]:
        assert self.busy.acquire(blocking=False), "one call at a time"
        try:
            self.raced_workloads.append(workload)
            if self.calls > self.breaks_after and not isinstance(self.broken, Outcome):
                raise self.broken("the device fell off the bus")
            return super().race(workload, built)
        finally:
            self.busy.release()


class Notices(Observer):
    def __init__(self) -> None:
        self.found: list[DeviceNotice] = []

    def on_device(self, event: DeviceNotice) -> None:
        self.found.append(event)


def cards(*made: Callable[..., Card], **world: Any) -> World:
    return World(make_runners=made, **world)


def config_counts(world: World) -> Counter[tuple[Workload, Config]]:
    return Counter((record.workload, record.config) for record in world.store.records if not record.final_race)


@pytest.mark.parametrize("count", [2, 3])
def test_devices_share_the_tasks_and_every_configuration_is_measured_once(count: int) -> None:
    world = cards(*[Card] * count)
    summary = world.tune(*WORKLOADS, trials=24, queue_depth=16 * count)
    assert [task.trials for task in summary.tasks] == [24] * len(WORKLOADS) or summary.new_trials == 24 * len(WORKLOADS)
    assert set(config_counts(world).values()) == {1}
    assert [device.uuid for device in summary.devices] == [f"GPU-{number}" for number in range(count)]
    assert sum(device.trials for device in summary.devices) == summary.new_trials
    least = min(device.trials for device in summary.devices)
    assert least > 0.5 * summary.new_trials / count, "the work is shared"


def test_a_task_stays_where_its_inputs_are() -> None:
    world = cards(Card, Card)
    world.tune(*WORKLOADS, trials=24, queue_depth=32)
    prepared = sum(len(runner.workloads) for runner in world.runners)
    assert prepared <= len(WORKLOADS) + 3, "a few that an idle device took over, and the kernel that both measure"


def test_devices_share_even_one_task() -> None:
    world = cards(Card, Card)
    summary = world.tune(trials=120, queue_depth=32)
    assert min(device.trials for device in summary.devices) > 30
    assert set(config_counts(world).values()) == {1}
    assert len(world.tuners) == 1, "one tuner knows what is under way on both"


def test_measurements_go_on_at_the_same_time_and_so_do_races() -> None:
    meeting = threading.Barrier(2, timeout=120)

    class Meets(Card):
        met = 0

        def measure(self, workload: Workload, built: Built, best_ns: float | None) -> Measurement:
            if len(self.measured) == 5:
                meeting.wait()  # breaks unless both devices measure at once
            return super().measure(workload, built, best_ns)

        def race(self, workload: Workload, built: Sequence[Built]) -> list[Measurement]:
            if not self.raced_workloads:
                meeting.wait()
            return super().race(workload, built)

    world = cards(Meets, Meets)
    world.tune(*WORKLOADS[:2], trials=24, queue_depth=32)


def test_a_race_is_held_on_one_device_and_every_task_has_one() -> None:
    world = cards(Card, Card)
    summary = world.tune(*WORKLOADS, trials=12, queue_depth=32)
    held = [workload for runner in world.runners for workload in runner.raced_workloads]
    assert Counter(held) == Counter(WORKLOADS)
    assert all(task.race is not None for task in summary.tasks)


def test_shares_are_those_of_each_device() -> None:
    world = cards(functools.partial(Card, measure_s=0.02), functools.partial(Card, measure_s=0.02))
    summary = world.tune(*WORKLOADS[:2], trials=20, queue_depth=32)
    for device in summary.devices:
        shares = device.shares
        assert 0 < shares.device <= 1 and shares.device + shares.build + shares.tuner + shares.preparing < 1.05
    mean = sum(device.shares.device for device in summary.devices) / 2
    assert summary.shares.device == pytest.approx(mean)


@pytest.mark.parametrize("broken", [Outcome.LAUNCH_ERROR, Outcome.RUN_TIMEOUT, Outcome.WRONG_ANSWER, DeviceError])
def test_a_broken_device_is_taken_out_and_costs_no_candidate_its_result(broken: Any) -> None:
    notices = Notices()
    world = cards(Card, functools.partial(Card, breaks_after=10, broken=broken))
    summary = world.tune(*WORKLOADS, trials=24, queue_depth=32, observers=[notices])
    assert summary.new_trials == 24 * len(WORKLOADS)
    assert [record for record in world.store.records if not record.measurement.ok] == [], "all were measured elsewhere"
    sound, lost = summary.devices
    assert sound.problem == "" and lost.problem != "" and lost.trials <= 10
    (notice,) = notices.found
    assert (notice.device, notice.uuid) == ("cuda:1 (a pretended GPU)", "GPU-1") and "takes no more work" in notice.text
    assert all(task.race is not None for task in summary.tasks)


def test_candidates_that_fail_are_not_the_fault_of_a_device() -> None:
    def mostly_wrong(candidate: Candidate) -> float | Outcome:
        return square_ns(candidate) if sum(candidate.config.values()) % 7 == 0 else Outcome.WRONG_ANSWER

    world = cards(Card, Card, behaviour=mostly_wrong)
    summary = world.tune(*WORKLOADS[:2], trials=60, queue_depth=32)
    assert [device.problem for device in summary.devices] == ["", ""]
    wrong = [record for record in world.store.records if record.measurement.outcome is Outcome.WRONG_ANSWER]
    assert len(wrong) > 60 and summary.new_trials == 120


def test_the_last_device_is_never_taken_out() -> None:
    world = cards(functools.partial(Card, breaks_after=9), functools.partial(Card, breaks_after=6))
    summary = world.tune(*WORKLOADS[:2], trials=20, queue_depth=32)
    assert sum(device.problem == "" for device in summary.devices) == 1
    assert summary.new_trials == 40
    with pytest.raises(DeviceError, match="fell off the bus"):
        cards(*[functools.partial(Card, breaks_after=6, broken=DeviceError)] * 2).tune(*WORKLOADS[:2], trials=20)


def test_a_device_that_is_lost_in_a_race_leaves_it_to_another() -> None:
    class BreaksInRace(Card):
        def race(self, workload: Workload, built: Sequence[Built]) -> list[Measurement]:
            raise DeviceError("the device fell off the bus")

    world = cards(Card, BreaksInRace)
    summary = world.tune(*WORKLOADS, trials=8, queue_depth=32)
    assert all(task.race is not None for task in summary.tasks) and summary.devices[1].problem


@pytest.mark.parametrize(("slower", "named"), [(1.3, True), (1.04, False)])
def test_a_slow_device_is_named(slower: float, named: bool) -> None:
    notices = Notices()
    world = cards(Card, functools.partial(Card, slower=slower))
    summary = world.tune(*WORKLOADS[:3], trials=20, queue_depth=32, observers=[notices])
    assert bool(notices.found) is named
    if named:
        assert all(notice.uuid == "GPU-1" and "1.30 times as long as cuda:0" in notice.text for notice in notices.found)
    times = [device.baseline_ns for device in summary.devices]
    assert None not in times and times[1] == pytest.approx(times[0] * slower)


def test_a_device_that_becomes_slow_is_named_before_the_races() -> None:
    notices = Notices()

    class Throttles(Card):
        def measure(self, workload: Workload, built: Built, best_ns: float | None) -> Measurement:
            self.slower = 2.0 if self.calls > 20 else 1.0
            return super().measure(workload, built, best_ns)

    cards(Card, Throttles).tune(*WORKLOADS[:3], trials=40, queue_depth=32, observers=[notices])
    assert [notice.uuid for notice in notices.found] == ["GPU-1"]


def test_a_task_whose_inputs_cannot_be_made_is_given_up_on_all_devices() -> None:
    class Refuses(Card):
        def prepare(self, workload: Workload) -> None:
            if workload == OTHER:
                raise OperatorError("no inputs")
            super().prepare(workload)

        def learn_reference(self, workload: Workload, artifact: Artifact) -> None:
            assert workload in (WORKLOAD, OTHER)

    summary = cards(Refuses, Refuses).tune(WORKLOAD, OTHER, trials=20, queue_depth=32)
    assert summary.tasks[0].new_trials >= 20 and summary.tasks[1].problem == "no inputs"


def test_several_templates_and_a_resumed_run() -> None:
    world = cards(Card, Card, templates=(Square(), Line()))
    first = world.tune(*WORKLOADS[:3], trials=16, queue_depth=32)
    again = world.tune(*WORKLOADS[:3], trials=24, queue_depth=32)
    assert first.new_trials == 48 and again.new_trials == 24
    assert set(config_counts(world).values()) == {1}


def test_an_interrupted_run_keeps_what_the_devices_had_begun() -> None:
    counter = itertools.count()

    def stop(config: Config) -> None:
        if next(counter) == 20:
            os.kill(os.getpid(), signal.SIGINT)

    world = cards(Card, Card, before=stop)
    with pytest.raises(Interrupted) as caught:
        world.tune(*WORKLOADS, trials=40, queue_depth=32)
    assert caught.value.summary.new_trials == len(world.store.records) >= 20


# ---- naming devices


def some_cards(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "compute_capability": (9, 0), "sms": 132, "uuid": f"GPU-{i}"} for i, name in enumerate(names)]


def test_devices_are_named_by_numbers_or_all(monkeypatch: pytest.MonkeyPatch) -> None:
    present = some_cards("NVIDIA H200", "NVIDIA H200", "NVIDIA H200")
    monkeypatch.setattr(cuda_driver, "iterate_devices", lambda: iter(present))
    monkeypatch.setattr(cuda_driver, "describe_device", lambda ordinal: present[ordinal])
    assert [target.ordinal for target in detect_all("cuda:all")] == [0, 1, 2]
    assert [target.uuid for target in detect_all("cuda:2,0,2")] == ["GPU-0", "GPU-2"]
    assert [target.ordinal for target in detect_all("cuda:1")] == [1]
    assert detect_all("cpu") == [detect("cpu")]
    with pytest.raises(UsageError, match="names several devices, and only tuning takes them"):
        detect("cuda:0,1")
    with pytest.raises(UsageError, match=r"'cuda:0,x' is not known.*allowed: auto, cpu, cuda, cuda:N, cuda:N,M, cuda:all"):
        detect_all("cuda:0,x")
    present[1] = some_cards("NVIDIA L4")[0]
    assert [target.name for target in detect_all("cuda:all")] == ["NVIDIA H200", "NVIDIA L4", "NVIDIA H200"]
    present.clear()
    with pytest.raises(DeviceError, match="there is no GPU"):
        detect_all("cuda:all")


def test_more_devices_have_more_candidates_under_way() -> None:
    assert queue_depth(16, 2) > queue_depth(16) and queue_depth(1, 4) >= 4 * 8
