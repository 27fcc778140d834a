"""Events and summaries as JSON: the output of `tune --json` and the stored summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from session_support import GPU, OTHER, WORKLOAD, FakeBuilder, FakeRunner, Line, Square, World, square_ns

from schedsearch.config import Config
from schedsearch.measurement import Outcome
from schedsearch.processes.builder import Candidate
from schedsearch.records.store import Store
from schedsearch.session.loop import Session
from schedsearch.session.observer import (
    Best,
    Event,
    Observer,
    Phase,
    RunStart,
    TaskEnd,
    Trial,
    event_json,
)
from schedsearch.session.options import Options
from schedsearch.session.plan import plan_tasks
from schedsearch.session.summary import RangeSummary, RunSummary, Shares, TaskSummary
from schedsearch.template import TemplateSet
from schedsearch.workload import Workload, WorkloadRange


class Keep(Observer):
    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_start(self, event: RunStart) -> None:
        self.events.append(event)

    def on_phase(self, event: Phase) -> None:
        self.events.append(event)

    def on_trial(self, event: Trial) -> None:
        self.events.append(event)

    def on_best(self, event: Best) -> None:
        self.events.append(event)

    def on_task_end(self, index: int, summary: TaskSummary) -> None:
        self.events.append(TaskEnd(index, summary))

    def on_end(self, summary: RunSummary) -> None:
        self.events.append(summary)


def eventful(**options: Any) -> list[Event]:
    """The events of a run with duplicates, failures and a second, resumed task."""

    def behaviour(candidate: Candidate) -> float | Outcome:
        return Outcome.WRONG_ANSWER if candidate.config.get("x") == 7 else square_ns(candidate)

    world = World(behaviour, code=lambda config: str(config.get("x", config.json)), templates=(Square(), Line()))
    world.tune(WORKLOAD.replace(epilogue=["bias", "relu"]), trials=20)
    keep = Keep()
    world.tune(WORKLOAD.replace(epilogue=["bias", "relu"]), OTHER, trials=40, observers=[keep], **options)
    return keep.events


def test_every_event_is_an_object_of_json_with_its_name() -> None:
    events = eventful()
    assert {type(event) for event in events} == {RunStart, Phase, Trial, Best, TaskEnd, RunSummary}
    assert any(isinstance(event, Trial) and event.outcome is None for event in events), "a duplicate is among them"
    assert any(isinstance(event, Trial) and event.outcome is Outcome.WRONG_ANSWER for event in events)
    names = {RunStart: "start", Phase: "phase", Trial: "trial", Best: "best", TaskEnd: "task_end", RunSummary: "summary"}
    for event in events:
        line = json.loads(json.dumps(event_json(event), allow_nan=False))
        assert line["event"] == names[type(event)]
        if isinstance(event, Trial | Best):
            assert Workload.from_json(json.dumps(line["workload"])) == event.workload and line["config"] == event.config
            assert (line["time_ns"], line["elapsed_s"]) == (event.time_ns, event.elapsed_s)


def test_a_summary_tells_the_kernels_of_ranges() -> None:
    of_range = WorkloadRange(WORKLOAD, "n", 1, 8)
    summary = RunSummary(
        "run", "records.db", GPU.key, (), 1.0, Shares(1.0, 0.0, 0.0), "trials", (RangeSummary(of_range, None, 3, "no"),)
    )
    (told,) = summary.to_json()["ranges"]
    assert (told["parameter"], told["low"], told["high"], told["trials"], told["problem"]) == ("n", 1, 8, 3, "no")


def test_the_phases_of_a_run_come_in_order() -> None:
    phases = [event.name for event in eventful() if isinstance(event, Phase)]
    assert phases[0] == "building" and phases[-1] == "racing"
    assert "measuring" in phases or "preparing" in phases


def test_the_store_keeps_what_the_start_told_and_the_summary(tmp_path: Path) -> None:
    world, keep = World(), Keep()
    with Store.open(tmp_path / "t.db") as store:
        plans = plan_tasks([WORKLOAD], TemplateSet([Square()]), GPU)
        runner = FakeRunner(world.behaviour, world._template_of, [])
        builder = FakeBuilder(world.behaviour, world.code, [])
        summary = Session(
            plans, store, builder, runner, GPU, Options(trials=12, tuner="random"), {"compiler": "1"}, [keep]
        ).run()
        (run,) = store.runs()
    start = keep.events[0]
    assert isinstance(start, RunStart)
    assert run["info"] | {"run": run["id"]} == json.loads(json.dumps(start.to_json()))
    assert run["summary"] == json.loads(json.dumps(summary.to_json()))
    (arm,) = start.tasks[0].arms
    assert (arm.size.count, arm.size.exact, arm.default, arm.resumed) == (256, True, Config(x=0, y=0), 0)
    assert start.options["trials"] == 12 and start.toolchain == {"compiler": "1"} and start.device["name"] == GPU.name
