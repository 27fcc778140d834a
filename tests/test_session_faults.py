"""`tune` on this machine's CPU with candidates that crash, hang, compute nonsense or corrupt memory."""

from __future__ import annotations

from pathlib import Path

import faulty_templates as faulty
import pytest

from schedsearch.arms import Task
from schedsearch.errors import UsageError
from schedsearch.measure import DeviceLock
from schedsearch.measurement import Outcome
from schedsearch.observer import RunSummary
from schedsearch.records.store import Store
from schedsearch.session import tune
from schedsearch.target import detect
from schedsearch.template import Template
from schedsearch.workload import Workload

WORKLOAD = Workload.conv2d(n=1, h=14, w=14, c=64, k=64, r=1, s=1, dtype="float32")
EXPECTED = {
    "abort_in_builder": Outcome.WORKER_LOST,
    "endless_compile": Outcome.COMPILE_TIMEOUT,
    "raising_template": Outcome.COMPILE_ERROR,
    "untypable": Outcome.COMPILE_ERROR,
    "null_write": Outcome.WORKER_LOST,
    "endless_kernel": Outcome.RUN_TIMEOUT,
    "missing_product": Outcome.WRONG_ANSWER,
    "unwritten_row": Outcome.WRONG_ANSWER,
}


def run(db: Path, *templates: Template) -> RunSummary:
    task = Task(WORKLOAD, restrict={"step": [1]})
    return tune(
        [task], db, target="cpu", trials=len(templates), tuner="grid", templates=templates,
        build_timeout_s=8.0, run_timeout_s=3.0,
    )  # fmt: skip


def children() -> set[str]:
    return {child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()}


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "state"))


def test_every_fault_costs_one_trial_and_spoils_nothing_after_it(tmp_path: Path) -> None:
    before = children()
    faults = [
        faulty.AbortInBuilder(), faulty.EndlessCompile(), faulty.RaisingTemplate(), faulty.Untypable(), faulty.NullWrite(),
        faulty.EndlessKernel(), faulty.MissingProduct(), faulty.UnwrittenRow(),
    ]  # fmt: skip
    summary = run(tmp_path / "faulty.db", *faults, faulty.PointwiseCpu())

    arms = {arm.template: arm for arm in summary.tasks[0].arms}
    for name, outcome in EXPECTED.items():
        assert arms[name].outcomes == {outcome: 1}, name
    assert arms["pointwise_cpu"].outcomes == {Outcome.OK: 1}
    assert summary.tasks[0].trials == len(arms)
    with Store.open(tmp_path / "faulty.db", readonly=True) as store:
        failed = [record for record in store.history() if not record.measurement.ok]
    assert len(failed) == len(EXPECTED) and all(record.measurement.message for record in failed)

    assert children() == before, "no process is left behind"
    DeviceLock(detect("cpu"), wait=True).close()


def test_a_race_condition_that_shows_under_load_only_is_never_best(tmp_path: Path) -> None:
    summary = run(tmp_path / "t.db", faulty.WrongWhenHot())
    with Store.open(tmp_path / "t.db", readonly=True) as store:
        raced = [record.measurement.outcome for record in store.history() if record.final_race]
        assert list(store.bests()) == []
    assert not summary.complete
    assert set(raced) <= {Outcome.WRONG_ANSWER}


def test_a_template_that_workers_cannot_import_is_refused_before_anything_runs(tmp_path: Path) -> None:
    class Local(faulty.PointwiseCpu):
        name = "local"

    with pytest.raises(UsageError, match="top level"):
        run(tmp_path / "t.db", Local())
    with Store.open(tmp_path / "t.db", readonly=True) as store:
        assert store.history() == []
