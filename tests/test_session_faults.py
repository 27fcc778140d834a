"""`tune` with candidates that crash, hang or compute nonsense: each costs a trial, keeps its text and leaves no trace."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import faulty_templates as faulty
import hostile_templates as hostile
import pytest
from child_environment import child_environment
from test_measure_lock import alive, gone

from schedsearch.device.detect import detect
from schedsearch.errors import NoValidConfigError, UsageError
from schedsearch.measure import DeviceLock
from schedsearch.measurement import MESSAGE_CHARACTERS, Outcome, Record
from schedsearch.records.store import Store
from schedsearch.session import tune
from schedsearch.session.summary import RunSummary
from schedsearch.task import Task
from schedsearch.template import Template
from schedsearch.workload import Workload

WORKLOAD = Workload.conv2d(n=2, h=14, w=14, c=64, k=64, r=1, s=1, dtype="float32")
EXPECTED = {
    "none": (Outcome.OK, ""),
    "abort": (Outcome.WORKER_LOST, "SIGABRT"),
    "endless compile": (Outcome.COMPILE_TIMEOUT, "not compiled within"),
    "raise": (Outcome.COMPILE_ERROR, "a tile of no elements"),
    "untypable": (Outcome.COMPILE_ERROR, "no_such_attribute"),
    "wrong": (Outcome.WRONG_ANSWER, "elements are wrong"),
    "unwritten": (Outcome.WRONG_ANSWER, "elements were never written"),
    "stray": (Outcome.WRONG_ANSWER, "wrote outside y"),
    "hang": (Outcome.RUN_TIMEOUT, "not verified and timed within"),
}


def run(database: Path, template: Template, target: str) -> RunSummary:
    """Tries every configuration of a template with one input channel per step."""
    return tune(
        [Task(WORKLOAD, restrict={"step": [1]})],
        database,
        target=target,
        tuner="grid",
        templates=[template],
        workers=1,
        build_timeout_s=8.0,  # builders have low priority, and other programs may keep the machine busy
        run_timeout_s=5.0,
    )


def children(pid: int) -> list[int]:
    """Process ids of the living children of all threads of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return [child for child in found if alive(child)]


def trials(database: Path) -> list[Record]:
    with Store.open(database, create=False) as store:
        return [record for record in store.history(WORKLOAD) if not record.final_race]


@pytest.mark.parametrize(
    ("template", "target", "crash"),
    [
        pytest.param(faulty.MinefieldCpu(), "cpu", (Outcome.WORKER_LOST, "SIGSEGV"), id="cpu", marks=pytest.mark.faults),
        pytest.param(
            faulty.MinefieldCuda(),
            "cuda",
            (Outcome.LAUNCH_ERROR, "ILLEGAL_ADDRESS"),
            id="cuda",
            marks=[pytest.mark.gpu, pytest.mark.xdist_group("device")],
        ),
    ],
)
def test_every_fault_costs_one_trial_and_is_recorded(
    template: faulty.MinefieldCpu | faulty.MinefieldCuda, target: str, crash: tuple[Outcome, str], tmp_path: Path
) -> None:
    before = set(children(os.getpid()))
    (task,) = run(tmp_path / "faults.db", template, target).tasks
    records = trials(tmp_path / "faults.db")
    assert sorted(record.config["fault"] for record in records) == sorted(template.templates)
    assert task.trials == len(template.templates)
    for record in records:
        outcome, text = {**EXPECTED, "crash": crash}[record.config["fault"]]
        assert record.measurement.outcome is outcome, record.measurement.message
        assert text in record.measurement.message
    assert task.best_config is not None and task.best_config["fault"] == "none"
    assert set(children(os.getpid())) <= before
    DeviceLock(detect(target), wait=True).close()


def test_a_race_condition_that_shows_under_load_only_is_never_best(tmp_path: Path) -> None:
    with contextlib.suppress(NoValidConfigError):  # on a busy machine the search notices it, too
        assert not run(tmp_path / "t.db", faulty.WrongWhenHot(), "cpu").complete
    with Store.open(tmp_path / "t.db", readonly=True) as store:
        raced = [record.measurement.outcome for record in store.history() if record.final_race]
        assert list(store.bests()) == []
    assert set(raced) <= {Outcome.WRONG_ANSWER}


def test_a_template_that_workers_cannot_import_is_refused_before_anything_runs(tmp_path: Path) -> None:
    class Local(faulty.PointwiseCpu):
        name = "local"

    with pytest.raises(UsageError, match="top level"):
        run(tmp_path / "t.db", Local(), "cpu")
    assert trials(tmp_path / "t.db") == []


HOSTILE = {
    "surrogate": (Outcome.COMPILE_ERROR, r"lone \udc80 and NUL \x00 in a message"),
    "huge text": (Outcome.COMPILE_ERROR, "characters left out"),
    "no text": (Outcome.COMPILE_ERROR, "_SilentError"),
    "no compiler text": (Outcome.COMPILE_ERROR, "SystemExit"),
    "unpicklable error": (Outcome.COMPILE_ERROR, "_UnpicklableError"),
    "SystemExit": (Outcome.COMPILE_ERROR, "SystemExit"),
    "KeyboardInterrupt": (Outcome.COMPILE_ERROR, "KeyboardInterrupt"),
    "GeneratorExit": (Outcome.COMPILE_ERROR, "GeneratorExit"),
    "fork": (Outcome.OK, ""),
    "exit": (Outcome.WORKER_LOST, "exited with status 0"),
    "exec": (Outcome.WORKER_LOST, "closed its connection"),
    "garbage": (Outcome.WORKER_LOST, "garbage"),
    "old length": (Outcome.WORKER_LOST, "not the start of a message"),
    "close": (Outcome.WORKER_LOST, "closed"),
    "close everything": (Outcome.WORKER_LOST, ""),
    "close and live": (Outcome.WORKER_LOST, "closed its connection"),
    "stop": (Outcome.COMPILE_TIMEOUT, ""),
    "no signals": (Outcome.COMPILE_TIMEOUT, ""),
    "print": (Outcome.OK, ""),
    "recursion limit": (Outcome.COMPILE_ERROR, "RecursionError"),
    "nonsense result": (Outcome.COMPILE_ERROR, "work_items"),
    "kernel exits": (Outcome.WORKER_LOST, "exited with status 0"),
    "kernel closes": (Outcome.WORKER_LOST, "closed or replaced"),
    "kernel stops": (Outcome.RUN_TIMEOUT, ""),
}


@pytest.mark.faults
def test_no_attack_of_a_candidate_on_its_process_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has an outcome of its own, and what it leaves behind harms no other one."""
    pids = tmp_path / "pids"
    monkeypatch.setenv(hostile.GRANDCHILDREN, str(pids))
    tune(
        [Task(WORKLOAD)],
        tmp_path / "t.db",
        target="cpu",
        tuner="grid",
        templates=[hostile.Hostile()],
        workers=2,
        build_timeout_s=8.0,
        run_timeout_s=5.0,
    )
    outcomes = {record.config["attack"]: record.measurement for record in trials(tmp_path / "t.db")}
    assert sorted(outcomes) == sorted(hostile.ATTACKS)
    for attack, (outcome, text) in HOSTILE.items():
        assert outcomes[attack].outcome is outcome, (attack, outcomes[attack].message)
        assert text in outcomes[attack].message, (attack, outcomes[attack].message)
        assert len(outcomes[attack].message) <= MESSAGE_CHARACTERS
    assert outcomes["none"].ok and outcomes["after"].ok
    assert gone([int(pid) for pid in pids.read_text().split()])


PARENT = """
import sys
import faulty_templates as faulty
from schedsearch.task import Task
from schedsearch.session import tune
from schedsearch.workload import Workload

class Announce:
    def __getattr__(self, name):
        return lambda *args, **kwargs: print(name, flush=True)

workload = Workload.conv2d(n=2, h=14, w=14, c=64, k=64, r=1, s=1, dtype="float32")
template = {"cpu": faulty.MinefieldCpu, "cuda": faulty.MinefieldCuda}[sys.argv[1]]()
task = Task(workload, restrict={"fault": ["none", "hang"], "step": [1]})
options = {"target": sys.argv[1], "tuner": "grid", "templates": [template], "workers": 1, "run_timeout_s": 1000}
tune([task], sys.argv[2], observers=[Announce()], **options)
"""


@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_kill_9_loses_the_trial_in_flight_and_nothing_else(target: str, tmp_path: Path) -> None:
    environment = child_environment(TMPDIR=str(tmp_path))  # its own lock file
    database = tmp_path / "records.db"
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, target, database], stdout=subprocess.PIPE, text=True, env=environment
    ) as run:
        assert run.stdout is not None
        while "trial" not in (line := run.stdout.readline()):
            assert line, "the run ended before its first trial"
        time.sleep(2.0)  # the second candidate is being built or already hangs
        offspring = children(run.pid)
        assert len(offspring) >= 2  # a builder and the runner
        run.kill()
    assert gone(offspring, within_s=30.0)
    (record,) = trials(database)
    assert record.measurement.ok and record.config["fault"] == "none"
    DeviceLock(detect(target), wait=False, folder=tmp_path).close()
