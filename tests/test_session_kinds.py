"""Runs on GPUs of several kinds: every task is tuned for each kind, on the devices of that kind only."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from session_support import GPU, RandomTuner, Square, World
from test_session_far import Far
from test_session_lanes import WORKLOADS, Card, Notices

from schedsearch.errors import DeviceError, UsageError
from schedsearch.launch import Artifact
from schedsearch.measurement import Outcome
from schedsearch.session import tune
from schedsearch.session.loop import Session
from schedsearch.session.options import Options
from schedsearch.session.places import Place
from schedsearch.session.plan import plan_tasks
from schedsearch.session.summary import RunSummary
from schedsearch.session.tune import _check_kinds
from schedsearch.target import Target
from schedsearch.template import TemplateSet
from schedsearch.workload import Workload

SMALL = Target("cuda", "a small GPU", (8, 9), 58)


class Mixed(World):
    """The first cards are GPUs, the last is a small one."""

    def tune_all(self, *workloads: Workload, observers: Sequence[Any] = (), **options: Any) -> RunSummary:
        kinds = [GPU, SMALL]
        plans = [plan for kind in kinds for plan in plan_tasks(workloads, TemplateSet((Square(),)), kind)]
        builders = {kind.key: self.make_builder(self.behaviour, self.code, self.log) for kind in kinds}
        self.runners = [make(self.behaviour, self._template_of, self.log, self.race_behaviour) for make in self.make_runners]
        last = len(self.runners) - 1
        devices = [
            (replace(SMALL if number == last else GPU, ordinal=number, uuid=f"GPU-{number}"), runner)
            for number, runner in enumerate(self.runners)
        ]
        made = Options(**{"trials": 20, **options})
        return Session(
            plans,
            self.store,
            builders,
            devices,
            GPU,
            made,
            {"compiler": "1"},
            observers,
            db="r.db",
            tuner_factory=self._tuner,
        ).run()


def mixed(*make: Any) -> Mixed:
    return Mixed(make_runners=make, make_tuner=RandomTuner)


@pytest.mark.parametrize("card", [Card, Far])
def test_every_task_is_tuned_for_each_kind_on_its_own_devices(card: Any) -> None:
    world = mixed(card, card, card)
    summary = world.tune_all(*WORKLOADS[:3], trials=20, queue_depth=48)
    assert [(task.workload, task.target) for task in summary.tasks] == [
        (workload, kind.key) for kind in (GPU, SMALL) for workload in WORKLOADS[:3]
    ]
    trials = [record for record in world.store.records if not record.final_race]
    assert Counter(record.target for record in trials).keys() == {GPU.key, SMALL.key}
    assert set(Counter((record.workload, record.target, record.config) for record in trials).values()) == {1}
    assert summary.new_trials == 120 and all(task.race is not None for task in summary.tasks)
    of_small = sum(task.new_trials for task in summary.tasks if task.target == SMALL.key)
    assert summary.devices[2].trials == of_small, "a small GPU measures what is for small GPUs, and nothing else"
    assert summary.target == f"{GPU.key} + {SMALL.key}"
    names = [row.name for row in summary.result_table().rows]
    assert len(set(names)) == 6 and names[3].endswith(" on a small GPU")


def test_each_kind_has_a_best_of_its_own_and_a_resumed_run_knows_both() -> None:
    world = mixed(Card, Card)
    world.tune_all(*WORKLOADS[:2], trials=10)
    for kind in (GPU, SMALL):
        for workload in WORKLOADS[:2]:
            best = world.store.best(workload, kind.key)
            assert best is not None and best.target == kind.key
    assert world.tune_all(*WORKLOADS[:2], trials=10).new_trials == 0


def test_the_last_device_of_a_kind_may_be_lost_and_the_others_finish() -> None:
    world = mixed(Card, Card, functools.partial(Card, breaks_after=8, broken=DeviceError))
    summary = world.tune_all(*WORKLOADS[:2], trials=20, queue_depth=48)
    sound, lost = summary.tasks[:2], summary.tasks[2:]
    assert all(task.race is not None and not task.problem for task in sound)
    assert {task.problem for task in lost} == {"the device fell off the bus"}
    assert sum(task.new_trials for task in lost) == 8, "what was measured before counts"


def test_failures_of_the_only_device_of_a_kind_are_those_of_candidates() -> None:
    world = mixed(Card, Card, functools.partial(Card, breaks_after=8, broken=Outcome.LAUNCH_ERROR))
    summary = world.tune_all(*WORKLOADS[:2], trials=20, queue_depth=48)
    assert [device.problem for device in summary.devices] == ["", "", ""]
    failed = [record for record in world.store.records if record.measurement.outcome is Outcome.LAUNCH_ERROR]
    assert failed and {record.target for record in failed} == {SMALL.key}


def test_devices_of_different_kinds_are_not_compared() -> None:
    notices = Notices()
    mixed(Card, Card, functools.partial(Card, slower=3.0)).tune_all(*WORKLOADS[:2], trials=16, observers=[notices])
    assert notices.found == []


def test_a_reference_goes_to_the_devices_that_it_was_compiled_for() -> None:
    class Learns(Card):
        def learn_reference(self, workload: Workload, artifact: Artifact) -> None:
            super().learn_reference(workload, artifact)

    world = mixed(Learns, Learns)
    world.tune_all(*WORKLOADS[:2], trials=4)
    assert [Counter(runner.learned) for runner in world.runners] == [Counter(WORKLOADS[:2])] * 2


def test_a_run_in_the_store_says_which_task_is_for_which_kind() -> None:
    started: list[Any] = []

    class Starts(Notices):
        def on_start(self, event: Any) -> None:
            started.append(json.loads(json.dumps(event.to_json())))

    mixed(Card, Card).tune_all(WORKLOADS[0], trials=4, observers=[Starts()])
    assert [task["target"] for task in started[0]["tasks"]] == [GPU.key, SMALL.key]
    assert started[0]["target"] == f"{GPU.key} + {SMALL.key}"


def test_what_a_run_on_several_kinds_refuses() -> None:
    plans = plan_tasks(WORKLOADS[:1], TemplateSet((Square(),)), SMALL)
    with pytest.raises(UsageError, match=r"plans are for .*small GPU, and the run is on .*pretended GPU; plan"):
        _check_kinds(plans, Place([GPU]))
    with pytest.raises(UsageError, match="several GPUs; tune CPUs in a run of their own"):
        tune([WORKLOADS[0]], target=[GPU, Target("cpu", "a CPU")], progress=False)
    assert Place([GPU, replace(GPU, ordinal=1), SMALL]).kinds == [GPU, SMALL]
