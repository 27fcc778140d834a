"""The runner verifies every element, times right candidates, and survives faults of candidates in its process."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import faulty_templates as faulty
import pytest

from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.device.detect import detect
from schedsearch.errors import DeviceBusyError, DeviceMemoryError, PreparationError, UsageError
from schedsearch.measure import Built, Runner, run_worker
from schedsearch.measure.run_worker import Prepare, Race, Ran, Run
from schedsearch.measurement import Measurement, Outcome
from schedsearch.processes import restarts
from schedsearch.processes.process import ChildProcess
from schedsearch.template import Template
from schedsearch.workload import Workload

CPU = detect("cpu")
WORKLOAD = Workload.conv2d(n=2, h=14, w=14, c=64, k=64, r=1, s=1, dtype="float32")


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(CPU, timeout_s=3.0) as runner:
        yield runner


def build(template: Template, workload: Workload = WORKLOAD) -> Built:
    result = compile_source(template.kernel(workload, CPU, Config(step=1)), CPU)
    return Built(result.artifact, result.resources, result.canonical_hash, result.compile_s)


def measure(runner: Runner, template: Template) -> Measurement:
    return runner.measure(WORKLOAD, build(template))


def test_a_right_candidate_is_verified_and_timed(runner: Runner) -> None:
    measurement = measure(runner, faulty.PointwiseCpu())
    assert measurement.outcome is Outcome.OK, measurement.message
    assert measurement.max_error == 0.0  # integers: fp32 sums are exact in any order
    assert measurement.time_ns is not None
    # 1.6 M multiply-adds without vectors: any machine that runs this has between 10 Mmul/s and 10 Gmul/s.
    assert 1.6e5 < measurement.time_ns < 1.6e8
    assert len(measurement.times_ns) >= 3
    assert measurement.message == "" and measurement.build_s > 0 and measurement.run_s > 0


def test_ordinary_candidates_share_a_process(runner: Runner) -> None:
    pids = {runner.pid for _ in range(3) if measure(runner, faulty.PointwiseCpu()).ok}
    assert len(pids) == 1


def test_cold_operands_rotate_over_more_than_the_cache_or_the_record_says_so(runner: Runner) -> None:
    facts = measure(runner, faulty.PointwiseCpu()).clocks
    assert facts["sets"] > 1
    assert facts["rotated_bytes"] >= 2 * CPU.l2_bytes or facts["rotation_capped"]


def test_a_step_that_is_called_constant_and_reads_x_is_refused(runner: Runner) -> None:
    measurement = measure(runner, faulty.FalseConstantCpu())
    assert measurement.outcome is Outcome.LAUNCH_ERROR
    assert measurement.message == "a step that is marked constant reads x, which may change between calls; allowed: weight"


def test_a_workload_can_be_prepared_ahead(runner: Runner) -> None:
    def share_left(n: int) -> float:
        """The share of a new workload's preparation time that its measurement still spends."""
        workload = WORKLOAD.replace(n=n)
        before = runner.prepare_s
        runner.prepare(workload)
        prepared = runner.prepare_s
        assert runner.measure(workload, build(faulty.PointwiseCpu(), workload)).outcome is Outcome.OK
        return (runner.prepare_s - prepared) / (prepared - before)

    assert min(map(share_left, (3, 4, 5))) < 0.5  # the minimum, because others may use the machine


def test_runs_are_counted_as_busy_time(runner: Runner) -> None:
    before = runner.busy_s
    measurement = measure(runner, faulty.PointwiseCpu())
    assert 0 < runner.busy_s - before <= measurement.run_s + 1e-6


def test_a_hopeless_candidate_is_timed_once_only(runner: Runner) -> None:
    assert len(runner.measure(WORKLOAD, build(faulty.PointwiseCpu()), best_ns=1.0).times_ns) == 1


def test_one_missing_product_is_a_wrong_answer(runner: Runner) -> None:
    measurement = measure(runner, faulty.MissingProduct())
    assert measurement.outcome is Outcome.WRONG_ANSWER
    assert measurement.times_ns == ()
    assert measurement.max_error is not None and measurement.max_error >= 1.0
    assert "elements are wrong" in measurement.message and "expected" in measurement.message


def test_a_process_whose_memory_somebody_spoiled_does_not_accuse_the_next_candidate(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure(runner, faulty.PointwiseCpu()).ok
    spoiled, run = runner.pid, runner._run

    def judged_by_spoiled_memory(request: object, timeout_s: float) -> Ran:
        return Ran(Outcome.WRONG_ANSWER, message="spoiled") if runner.pid == spoiled else run(request, timeout_s)

    monkeypatch.setattr(runner, "_run", judged_by_spoiled_memory)
    assert measure(runner, faulty.PointwiseCpu()).ok
    assert runner.pid != spoiled


def test_a_wrong_candidate_costs_no_process_while_a_right_one_is_still_right_there(runner: Runner) -> None:
    assert measure(runner, faulty.PointwiseCpu()).ok
    before = runner.pid
    assert [measure(runner, faulty.MissingProduct()).outcome for _ in range(3)] == [Outcome.WRONG_ANSWER] * 3
    assert runner.pid == before


def test_elements_that_are_never_written_are_wrong(runner: Runner) -> None:
    measure(runner, faulty.PointwiseCpu())  # its output must not count as this candidate's output
    measurement = measure(runner, faulty.UnwrittenRow())
    assert measurement.outcome is Outcome.WRONG_ANSWER
    found = f"y: 64 of {WORKLOAD.output.size:,} elements were never written, the first is y[n=1, h=13, w=13"
    assert found in measurement.message


@pytest.mark.parametrize(
    ("template", "where"),
    [
        (faulty.WriteAfterEnd(), "after the end of y changed, the first at +"),
        (faulty.WriteBeforeStart(), "4 bytes before y"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
@pytest.mark.mostly_long(2)
def test_a_write_outside_the_output_is_a_wrong_answer(runner: Runner, template: Template, where: str) -> None:
    measurement = measure(runner, template)
    assert measurement.outcome is Outcome.WRONG_ANSWER
    assert "wrote outside y" in measurement.message and where in measurement.message
    assert measure(runner, faulty.PointwiseCpu()).ok  # the inputs are restored


@pytest.mark.parametrize(
    ("template", "outcome", "text"),
    [
        (faulty.NullWrite(), Outcome.WORKER_LOST, "SIGSEGV"),
        (faulty.EndlessKernel(), Outcome.RUN_TIMEOUT, "within 3 s"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
@pytest.mark.mostly_long(2)
def test_a_lost_process_is_replaced_and_the_next_candidate_is_measured(
    runner: Runner, template: Template, outcome: Outcome, text: str
) -> None:
    assert measure(runner, faulty.PointwiseCpu()).ok
    restarts, pid = runner.restarts, runner.pid
    measurement = measure(runner, template)
    assert measurement.outcome is outcome and text in measurement.message
    after = measure(runner, faulty.PointwiseCpu())
    assert after.ok and runner.restarts == restarts + 1 and runner.pid != pid


class _Killing:
    """Kills each new child of a runner, as often as it is told, when the runner sends it a request of a kind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type, times: int) -> None:
        self.left, send = times, ChildProcess.send

        def sending(child: ChildProcess, message: object) -> int:
            if isinstance(message, kind) and self.left:
                self.left -= 1
                os.kill(child.pid, signal.SIGKILL)
            return send(child, message)

        monkeypatch.setattr(ChildProcess, "send", sending)
        monkeypatch.setattr(restarts, "FIRST_WAIT_S", 0.001)


def test_processes_that_are_killed_while_they_prepare_are_replaced(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    _Killing(monkeypatch, Prepare, 3)
    assert measure(runner, faulty.PointwiseCpu()).ok


def test_processes_that_are_killed_before_they_are_ready_are_replaced(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.kill(runner.pid or 0, signal.SIGKILL)
    killing = _Killing(monkeypatch, tuple, 2)  # the first message names the entry
    assert measure(runner, faulty.PointwiseCpu()).ok and not killing.left


def test_when_no_process_survives_preparing_the_error_says_why(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "ATTEMPTS", 2)
    _Killing(monkeypatch, Prepare, 3)
    with pytest.raises(PreparationError, match=r"2 failed in a row.*killed by signal 9 \(SIGKILL\)"):
        measure(runner, faulty.PointwiseCpu())
    assert measure(runner, faulty.PointwiseCpu()).ok


@pytest.mark.parametrize("error", [DeviceMemoryError("12 bytes of memory cannot be allocated"), MemoryError("12 bytes")])
def test_a_workload_that_needs_too_much_memory_is_given_up_by_its_name(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The run goes on with its other tasks, as for every PreparationError."""

    def refuse(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(run_worker, "_WorkloadState", refuse)
    worker = run_worker._RunWorker(detect("cpu"), "cold-graph-v1")
    with pytest.raises(PreparationError) as caught:
        worker.answer(Prepare(WORKLOAD, 0, {}))
    text = str(caught.value)
    assert text.startswith(f"the arrays of {WORKLOAD.label} do not fit into the free memory of ")
    assert "12 bytes" in text and text.endswith("; tune a smaller shape, or free memory")


def test_a_process_that_answers_another_request_is_replaced(runner: Runner) -> None:
    runner.prepare(WORKLOAD)
    assert runner._child is not None
    pid = runner.pid
    runner._child.send(Prepare(WORKLOAD, 0, {}))  # nobody takes its answer, so it comes before the next one
    assert measure(runner, faulty.PointwiseCpu()).ok and runner.pid != pid


def test_several_workloads_can_be_measured_in_turns(runner: Runner) -> None:
    other = WORKLOAD.replace(k=4)
    times: dict[Workload, list[float]] = {WORKLOAD: [], other: []}
    for workload in (WORKLOAD, other, WORKLOAD, other):
        measurement = runner.measure(workload, build(faulty.PointwiseCpu(), workload))
        assert measurement.ok, measurement.message
        times[workload] += measurement.times_ns
    assert min(times[other]) < min(times[WORKLOAD])  # a sixteenth of the work


def test_a_race_times_all_finalists_and_finds_faults_that_only_show_under_load(runner: Runner) -> None:
    hot = build(faulty.WrongWhenHot())
    good, slow = build(faulty.PointwiseCpu()), build(faulty.PointwiseCpu())
    results = runner.race(WORKLOAD, [good, hot, slow])
    assert [result.outcome for result in results] == [Outcome.OK, Outcome.WRONG_ANSWER, Outcome.OK]
    assert len(results[0].times_ns) == len(results[2].times_ns) > 5
    assert results[0].max_error == 0.0


def test_a_crash_in_a_race_costs_the_culprit_only(runner: Runner) -> None:
    results = runner.race(WORKLOAD, [build(faulty.NullWrite()), build(faulty.PointwiseCpu())])
    assert [result.outcome for result in results] == [Outcome.WORKER_LOST, Outcome.OK]


def spoil_the_first_race(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, finds: Mapping[str, Any], *, judges: bool = True
) -> list[int]:
    """Replaces what the first race finds, and, unless `judges`, every later verdict of its process.

    Returns:
        How many racers each race has; filled while they run.
    """
    raced: list[int] = []
    run, spoiled = runner._run, set[int | None]()

    def spoiling(request: Run | Race, timeout_s: float) -> Ran:
        pid = runner.pid
        ran = run(request, timeout_s)
        if pid in spoiled:
            return replace(ran, outcome=Outcome.WRONG_ANSWER, times_ns=())
        if isinstance(request, Race):
            raced.append(len(request.artifacts))
            if len(raced) == 1:
                spoiled.update([] if judges else [pid])
                return replace(ran, **finds)
        return ran

    monkeypatch.setattr(runner, "_run", spoiling)
    return raced


@pytest.mark.parametrize(
    ("finds", "judges"),
    [
        ({"wrong": {1: "spoiled"}, "worn": "its child processes"}, True),
        pytest.param({"wrong": {1: "spoiled"}}, False, marks=pytest.mark.long),
        ({"wrong": {0: "spoiled", 1: "spoiled"}}, False),
        pytest.param({"outcome": Outcome.WORKER_LOST, "times_ns": ()}, True, marks=pytest.mark.long),
    ],
    ids=["a racer forked", "a racer spoiled the memory", "all are wrong", "a racer ended the process"],
)
@pytest.mark.long
def test_a_racer_that_another_one_may_have_spoiled_races_alone_in_a_fresh_process(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, finds: Mapping[str, Any], judges: bool
) -> None:
    raced = spoil_the_first_race(runner, monkeypatch, finds, judges=judges)
    results = runner.race(WORKLOAD, [build(faulty.PointwiseCpu()) for _ in range(2)])
    assert [result.outcome for result in results] == [Outcome.OK] * 2
    assert raced == [2, 1, 1]


def test_a_racer_that_wrote_where_it_must_not_is_alone_to_blame(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    finds = {"wrong": {0: "perhaps overwritten", 1: "wrote outside y"}, "broken": True}
    raced = spoil_the_first_race(runner, monkeypatch, finds)
    results = runner.race(WORKLOAD, [build(faulty.PointwiseCpu()) for _ in range(3)])
    assert [result.outcome for result in results] == [Outcome.OK, Outcome.WRONG_ANSWER, Outcome.OK]
    assert raced == [3, 2]


def test_a_second_runner_of_the_same_process_is_refused(runner: Runner) -> None:
    with pytest.raises(DeviceBusyError, match="this process"):
        Runner(CPU)


def test_nonsense_is_refused_before_the_device_is_touched() -> None:
    with pytest.raises(UsageError, match="cold-graph-v1"):
        Runner(CPU, mode="warm")
    with pytest.raises(UsageError, match="timeout_s"):
        Runner(CPU, timeout_s=0)


def test_clocks_hold_finite_numbers_or_text(runner: Runner) -> None:
    for value in runner.clocks().values():
        assert isinstance(value, str) or math.isfinite(value)
