"""The builder compiles in processes that candidates may crash or hang, and reports the outcome of each candidate."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faulty_templates as faulty
import hostile_templates as hostile
import pytest

from schedsearch.config import Config
from schedsearch.device.detect import detect
from schedsearch.errors import DeviceError, UsageError
from schedsearch.measure import Builder, Built, Candidate
from schedsearch.measurement import Measurement, Outcome
from schedsearch.processes import process, restarts
from schedsearch.processes.builder import TASKS_PER_WORKER
from schedsearch.processes.sessions import MARK
from schedsearch.target import PRESETS
from schedsearch.template import Template, load_template
from schedsearch.verification.reference import CheckedReference
from schedsearch.workload import Workload

CPU = detect("cpu")
WORKLOAD = Workload.conv2d(n=1, h=4, w=4, c=8, k=8, r=1, s=1, dtype="float32")


@pytest.fixture(scope="module")
def builder() -> Iterator[Builder]:
    with Builder(CPU, workers=1, timeout_s=60.0) as builder:
        yield builder


def candidate(template: Template, step: int = 1) -> Candidate:
    return Candidate(WORKLOAD, template, Config(step=step))


def outcome(builder: Builder, template: Template) -> Built | Measurement:
    token = builder.submit(candidate(template))
    ((reported, result),) = builder.drain()
    assert reported == token
    return result


def failure(builder: Builder, template: Template) -> Measurement:
    result = outcome(builder, template)
    assert isinstance(result, Measurement)
    return result


def test_a_candidate_becomes_an_artifact_with_its_resources(builder: Builder) -> None:
    built = outcome(builder, faulty.PointwiseCpu())
    assert isinstance(built, Built)
    assert built.artifact.plan.kind == "cpu" and built.artifact.code
    assert built.resources.code_bytes > 0
    assert 0 < built.build_s < 60


def test_a_reference_is_built_like_a_candidate(builder: Builder) -> None:
    token = builder.submit_reference(WORKLOAD)
    ((reported, built),) = builder.drain()
    assert reported == token and isinstance(built, Built)
    assert built.artifact == CheckedReference(WORKLOAD).build(CPU).artifact


def test_every_submission_is_reported_once_under_its_token(builder: Builder) -> None:
    tokens = [builder.submit(candidate(faulty.PointwiseCpu(), step)) for step in (1, 2, 4, 8)]
    assert builder.pending == 4
    results = builder.drain()
    assert sorted(token for token, _ in results) == sorted(tokens)
    assert all(isinstance(built, Built) for _, built in results)
    assert builder.pending == 0
    assert builder.poll(5.0) == []  # nothing pending: returns at once


def test_what_no_worker_was_given_can_be_taken_back(builder: Builder) -> None:
    tokens = [builder.submit(candidate(faulty.PointwiseCpu(), step)) for step in (1, 2, 4, 8)]
    taken = builder.withdraw(tokens[1:])
    assert taken == set(tokens[TASKS_PER_WORKER:])
    assert sorted(token for token, _ in builder.drain()) == tokens[:TASKS_PER_WORKER]
    assert builder.withdraw(tokens) == set(), "all are done"


def test_a_worker_builds_other_candidates_while_another_one_makes_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = tmp_path / "done"
    monkeypatch.setenv(faulty.CommonPieceCpu.DONE, str(done))
    with Builder(CPU, workers=2, timeout_s=60.0) as builder:
        first, twin, other, another = (builder.submit(candidate(faulty.CommonPieceCpu(), step)) for step in (1, 2, 4, 8))
        ((early, _),) = builder.poll(60.0)
        assert early in (other, another)
        done.touch()
        late = dict(builder.drain())
        assert {first, twin} <= late.keys() and all(isinstance(built, Built) for built in late.values())


def test_an_illegal_configuration_is_rejected_before_it_is_built(builder: Builder) -> None:
    builder.submit(candidate(faulty.PointwiseCpu(), step=3))
    ((_, result),) = builder.drain()
    assert isinstance(result, Measurement) and result.outcome is Outcome.REJECTED
    assert result.message == "illegal configuration: knob 'step' is 3; allowed are 1, 2, 4, 8"


def test_a_pipeline_of_one_stage_which_would_hang_is_rejected() -> None:
    """A producer waits for the stage that consumers free, and the consumers wait for the stage that is filled next."""
    h200, template = PRESETS["h200"], load_template("conv2d_wgmma")
    workload = Workload.conv2d(n=32, h=14, w=14, c=256, k=256, r=3, s=3, padding=1)
    config = Config({**template.default(workload, h200, template.space(workload, h200)), "stages": 1})
    with Builder(h200, workers=1) as builder:
        builder.submit(Candidate(workload, template, config))
        builder.submit(Candidate(WORKLOAD, template, config))
        (_, stages), (_, other) = sorted(builder.drain(), key=lambda item: item[0])
    assert isinstance(stages, Measurement) and stages.outcome is Outcome.REJECTED and "knob 'stages' is 1" in stages.message
    assert isinstance(other, Measurement) and other.outcome is Outcome.REJECTED and "cannot run" in other.message


def test_equal_code_has_an_equal_hash_whichever_worker_compiled_it() -> None:
    with Builder(CPU, workers=2) as builder:
        for template in (faulty.PointwiseCpu(), faulty.PointwiseCpu(), faulty.MissingProduct()):
            builder.submit(candidate(template))
        first, again, other = (built.canonical_hash for _, built in sorted(builder.drain(), key=lambda item: item[0]))  # type: ignore[union-attr]
    assert first == again != other


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether a condition becomes true in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def compilers() -> set[int]:
    """The child processes that compile: they have this process's environment and a mark."""
    children = [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    return {pid for pid in children if MARK.encode() in Path(f"/proc/{pid}/environ").read_bytes()}


def test_workers_can_be_started_before_there_is_work_for_them() -> None:
    others = compilers()  # of the builders that other tests of this module share

    def workers() -> int:
        return len(compilers() - others)

    with Builder(CPU, workers=2) as builder:
        assert workers() == 0
        builder.warm_up(1)
        # The environment of a new process shows a moment after its start.
        assert within(60.0, lambda: workers() == 1) and builder.pending == 0
        builder.warm_up(100)
        assert within(60.0, lambda: workers() == 2), "no more than the builder may have"
        assert builder.poll(5.0) == [] and builder.pending == 0
        builder.submit(candidate(faulty.PointwiseCpu()))
        assert isinstance(builder.drain()[0][1], Built)
        assert workers() == 2


def test_a_template_that_raises_is_a_compile_error_with_its_traceback(builder: Builder) -> None:
    measurement = failure(builder, faulty.RaisingTemplate())
    assert measurement.outcome is Outcome.COMPILE_ERROR
    assert "ZeroDivisionError: a tile of no elements" in measurement.message


def test_a_kernel_that_does_not_compile_keeps_the_compilers_text(builder: Builder) -> None:
    measurement = failure(builder, faulty.Untypable())
    assert measurement.outcome is Outcome.COMPILE_ERROR
    assert "no_such_attribute" in measurement.message


def test_a_compile_that_never_ends_is_killed_and_the_next_one_works() -> None:
    with Builder(CPU, workers=1, timeout_s=4.0) as builder:
        measurement = failure(builder, faulty.EndlessCompile())
        assert measurement.outcome is Outcome.COMPILE_TIMEOUT
        assert "4 s" in measurement.message
        assert isinstance(outcome(builder, faulty.PointwiseCpu()), Built)


def test_a_candidate_that_aborts_the_compiler_costs_itself_only() -> None:
    """Candidates queued behind it in the same process are built elsewhere."""
    with Builder(CPU, workers=1, timeout_s=30.0) as builder:
        templates = [faulty.PointwiseCpu(), faulty.AbortInBuilder(), faulty.PointwiseCpu(), faulty.PointwiseCpu()]
        tokens = [builder.submit(candidate(template)) for template in templates]
        results = dict(builder.drain())
    lost = results.pop(tokens[1])
    assert isinstance(lost, Measurement) and lost.outcome is Outcome.WORKER_LOST
    assert "SIGABRT" in lost.message
    assert "os.abort" in lost.message or "faulty_templates.py" in lost.message  # the place, from the process's last words
    assert len(results) == 3 and all(isinstance(built, Built) for built in results.values())


def test_closing_ends_the_workers_even_while_they_compile() -> None:
    builder = Builder(CPU, workers=1)
    builder.submit(candidate(faulty.EndlessCompile()))
    builder.poll(3.0)
    (worker,) = builder._pool
    builder.close()
    with pytest.raises(ProcessLookupError):
        os.kill(worker.process.pid, 0)
    assert builder.pending == 0


def test_a_template_that_workers_cannot_import_is_refused() -> None:
    class Local(faulty.PointwiseCpu):
        name = "local"

    with Builder(CPU, workers=1) as builder, pytest.raises(UsageError, match="module of its own"):
        builder.submit(candidate(Local()))


def test_gpu_candidates_compile_without_a_gpu() -> None:
    with Builder(PRESETS["h200"], workers=1) as builder:
        built = outcome(builder, faulty.PointwiseCuda())
    assert isinstance(built, Built), built
    assert built.artifact.code.startswith(b"\x7fELF")
    assert built.resources.registers > 0


def test_workers_that_are_killed_before_they_are_ready_are_started_again() -> None:
    with Builder(CPU, workers=1, timeout_s=60.0) as builder:
        token = builder.submit(candidate(faulty.PointwiseCpu()))
        for _ in range(3):
            (worker,) = builder._pool
            assert not worker.ready
            os.kill(worker.process.pid, signal.SIGKILL)
            await_restart(builder, worker)
        ((reported, result),) = builder.drain()
    assert reported == token and isinstance(result, Built)


def await_restart(builder: Builder, lost: object) -> None:
    """Until another worker has been started in place of `lost`. No message of the new one has been read by then."""
    deadline = time.monotonic() + 60.0
    while builder._pool in ([], [lost]):
        assert time.monotonic() < deadline, "no worker was started"
        assert not builder.poll(), "the candidate is still to be built"
        time.sleep(0.01)


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE])
@pytest.mark.mostly_long(3)
def test_a_process_that_the_system_cannot_start_now_is_started_later(error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    start, refusals = process._start, iter(range(2))

    def sometimes(*args: Any) -> Any:
        if next(refusals, None) is not None:
            raise OSError(error, os.strerror(error))
        return start(*args)

    monkeypatch.setattr(process, "_start", sometimes)
    with Builder(CPU, workers=2, timeout_s=60.0) as builder:
        builder.warm_up(2)
        for _ in range(2):
            builder.submit(candidate(faulty.PointwiseCpu()))
        assert all(isinstance(result, Built) for _, result in builder.drain())
        assert builder._most_workers == (2 if error == errno.EMFILE else 1), "fewer workers when memory is short"


def test_when_no_worker_can_be_started_the_error_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> Any:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(process, "_start", never)
    monkeypatch.setattr(restarts, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(restarts, "LONGEST_WAIT_S", 0.001)
    with Builder(CPU, workers=2) as builder, pytest.raises(DeviceError) as caught:
        builder.submit(candidate(faulty.PointwiseCpu()))
        builder.drain()
    text = str(caught.value)
    assert f"no compiler process can be started: {restarts.ATTEMPTS} failed in a row" in text
    assert "Resource temporarily unavailable" in text


def test_a_worker_that_ends_by_itself_before_it_is_ready_is_not_tried_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(process, "_BOOTSTRAP", "import a_module_that_is_missing  # {path} {fd} {parent}")
    with (
        Builder(CPU, workers=1) as builder,
        pytest.raises(DeviceError, match=r"(?s)5 failed in a row.*a_module_that_is_missing"),
    ):
        builder.submit(candidate(faulty.PointwiseCpu()))
        builder.drain()


def test_a_process_that_a_candidate_changed_builds_no_other_one() -> None:
    with Builder(CPU, workers=1, timeout_s=60.0) as builder:
        pids = []
        for attack in ("none", "after", "folder", "none"):
            builder.submit(Candidate(WORKLOAD, hostile.Hostile(), Config(attack=attack)))
            pids.append(builder._pool[0].process.pid)
            assert isinstance(builder.drain()[0][1], Built)
    assert pids[0] == pids[1] == pids[2] != pids[3]


def test_many_restarts_leave_no_descriptors_and_no_processes() -> None:
    """Children that only die cost 20 ms each."""
    process.ChildProcess("builtins:print").kill()  # starts what a process has once
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        child = process.ChildProcess("os:abort")
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(process.ChildDiedError, match="SIGKILL"):
            child.receive(30)
        child.kill()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
