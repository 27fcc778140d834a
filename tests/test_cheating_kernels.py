"""Kernels that are wrong after the first launches, on other numbers, or in their workspaces are never measured as ok."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import cheating_templates as cheating
import faulty_templates as faulty
import pytest

from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.device.detect import detect
from schedsearch.measure import Built, Runner
from schedsearch.measurement import COLD_GRAPH, GPU_MODES, MODES, Outcome
from schedsearch.target import PRESETS, Target
from schedsearch.template import Template
from schedsearch.workload import Workload

WORKLOAD = Workload.conv2d(n=1, h=9, w=7, c=12, k=8, r=1, s=1, dtype="float32")
SAID = {
    "skips finite outputs": "after x changed in its place",
    "remembers addresses": "after x changed in its place",
    "copies its previous result": "changed in its place",
    "wrong on fractions": "on the timing's random numbers",
    "wrong after 200 launches": "are wrong",
    "writes behind its workspace": "at +0 after the end of space",
    "writes before its workspace": "at 4 before the start of space",
    "reads what no launch wrote": "elements are wrong",
}


def build(template: Template, target: Target, workload: Workload = WORKLOAD) -> Built:
    result = compile_source(template.kernel(workload, target, Config(step=1)), target)
    return Built(result.artifact, result.resources, result.canonical_hash, result.compile_s)


OTHER_MODES = [pytest.param(mode, marks=pytest.mark.long) for mode in MODES if mode not in (COLD_GRAPH, *GPU_MODES)]


@pytest.fixture(scope="module", params=[COLD_GRAPH, *OTHER_MODES])
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    with Runner(detect("cpu"), mode=request.param, timeout_s=20.0) as runner:
        yield runner


@pytest.mark.parametrize("fault", cheating.FAULTS)
@pytest.mark.mostly_long(4)
def test_a_cheating_kernel_is_a_wrong_answer(runner: Runner, fault: str) -> None:
    measurement = runner.measure(WORKLOAD, build(cheating.CPU[fault], detect("cpu")))
    assert measurement.outcome is Outcome.WRONG_ANSWER and measurement.times_ns == ()
    assert SAID[fault] in measurement.message, measurement.message
    assert runner.measure(WORKLOAD, build(faulty.PointwiseCpu(), detect("cpu"))).ok


@pytest.mark.parametrize("fault", cheating.FAULTS)
@pytest.mark.mostly_long(4)
def test_the_cuda_cheats_compile(fault: str) -> None:
    assert build(cheating.CUDA[fault], PRESETS["h200"]).artifact.code


@pytest.mark.gpu
@pytest.mark.xdist_group("device")
@pytest.mark.parametrize("mode", MODES)
def test_no_cheating_kernel_is_ok_on_a_gpu(mode: str) -> None:
    target = detect("cuda")
    with Runner(target, mode=mode, timeout_s=20.0) as runner:
        for fault in cheating.FAULTS:
            measurement = runner.measure(WORKLOAD, build(cheating.CUDA[fault], target))
            assert measurement.outcome is Outcome.WRONG_ANSWER and SAID[fault] in measurement.message, (fault, measurement)
            assert runner.measure(WORKLOAD, build(faulty.PointwiseCuda(), target)).ok
        right, late = build(faulty.PointwiseCuda(), target), build(cheating.CUDA["wrong after 200 launches"], target)
        assert [raced.outcome for raced in runner.race(WORKLOAD, [late, right])] == [Outcome.WRONG_ANSWER, Outcome.OK]


def test_a_finalist_that_goes_wrong_after_200_launches_does_not_win(runner: Runner) -> None:
    right = build(faulty.PointwiseCpu(), detect("cpu"))
    late = build(cheating.CPU["wrong after 200 launches"], detect("cpu"))
    results = runner.race(WORKLOAD, [late, right, right])
    assert [result.outcome for result in results] == [Outcome.WRONG_ANSWER, Outcome.OK, Outcome.OK]
    assert "after" in results[0].message and "launches" in results[0].message


@pytest.mark.parametrize("nbytes", [-8, 0, 1 << 62])
def test_an_impossible_workspace_is_refused_before_a_launch(runner: Runner, nbytes: int) -> None:
    built = build(cheating.CPU["reads what no launch wrote"], detect("cpu"))
    plan = replace(built.artifact.plan, workspaces={"space": nbytes})
    measurement = runner.measure(WORKLOAD, replace(built, artifact=replace(built.artifact, plan=plan)))
    assert measurement.outcome is Outcome.LAUNCH_ERROR and f"workspaces/space: {nbytes}" in measurement.message


def test_verification_is_counted(runner: Runner) -> None:
    busy_s, verify_s = runner.busy_s, runner.verify_s
    assert runner.measure(WORKLOAD, build(faulty.PackedCpu(), detect("cpu"))).ok
    assert 0 < runner.verify_s - verify_s < runner.busy_s - busy_s
