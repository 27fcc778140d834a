"""Tuning runs of the campaign: `schedsearch tune --json` in a forked process, and what must hold after each.

A run tunes one task with the template `faulty_cpu` or `faulty_cuda`, whose knob `fault` chooses what goes wrong.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from schedsearch.measurement import Outcome, Record
from schedsearch.workload import Workload

from . import lab

SHAPE = {"n": 1, "h": 9, "w": 7, "c": 8, "k": 8, "r": 1, "s": 1}
WORKLOAD = Workload.conv2d(**SHAPE, dtype="float32")
BUILD_TIMEOUT_S = 10.0
RUN_TIMEOUT_S = 8.0
HEALTHY = "none"
HEALTHY_NUMBERS = 32
NUMBERS = 1000
_LIMIT_S = 90.0
_DUPLICATE = "duplicate"


@dataclass(frozen=True)
class Plan:
    """What one run tunes.

    Attributes:
        configs: values of the knob `fault` with the numbers that each is tried with: below `HEALTHY_NUMBERS` for `none`,
            which is right, from there on for faults.
        target, build_timeout_s, run_timeout_s: as in a workload file, for an idle machine.
        arguments: further options of `schedsearch tune`.
    """

    configs: Mapping[str, Sequence[int]]
    target: str = "cpu"
    build_timeout_s: float = BUILD_TIMEOUT_S
    run_timeout_s: float = RUN_TIMEOUT_S
    arguments: Sequence[str] = ()
    workers: int = 1

    @property
    def wanted(self) -> Counter[tuple[str, int]]:
        """Every configuration that the run must try once."""
        return Counter((fault, number) for fault, numbers in self.configs.items() for number in numbers)

    def workload_file(self) -> str:
        numbers = sorted({number for each in self.configs.values() for number in each})
        patience = lab.patience()
        document = {
            "target": self.target,
            "tuner": {"name": "grid"},
            "budget": {"trials": sum(self.wanted.values())},
            "measure": {
                "workers": self.workers,
                "build_timeout": f"{self.build_timeout_s * patience:.1f}s",
                "timeout": f"{self.run_timeout_s * patience:.1f}s",
            },
            "tasks": [
                {
                    "name": "task",
                    "op": "conv2d",
                    "shape": SHAPE,
                    "dtype": "float32",
                    "templates": [f"faulty_{self.target}"],
                    "restrict": {"fault": list(self.configs), "number": numbers},
                }
            ],
        }
        return json.dumps(document)


@dataclass
class Run:
    """A run that ended, with the events that it printed."""

    ended: lab.Ended
    db: Path
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def summary(self) -> dict[str, Any] | None:
        return next((event for event in reversed(self.events) if event["event"] == "summary"), None)

    @property
    def reported(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "trial"]


def start(plan: Plan, folder: Path, name: str = "run", prepare: Callable[[], None] = lambda: None) -> lab.Process:
    """Starts `schedsearch tune --json` into `folder/records.db`; `prepare` is called in its process before it begins."""
    file = folder / f"{name}.yaml"
    file.write_text(plan.workload_file())

    def tune() -> None:
        from schedsearch.cli import console
        from schedsearch.template import registry

        module = {"cpu": "candidates", "cuda": "candidates_cuda"}[plan.target]
        name = f"faulty_{plan.target}"
        registry.BUILT_IN[name] = f"{__package__}.{module}:Faulty{plan.target.capitalize()}"
        sys.argv = ["schedsearch", "tune", str(file), "--db", str(folder / "records.db"), "--json", *plan.arguments]
        prepare()
        console.run()

    return lab.start(tune, folder, name)


def finish(process: lab.Process, limit_s: float = _LIMIT_S) -> Run:
    """Waits for the end of a run."""
    return read(process.wait(limit_s), process.folder / "records.db")


def read(ended: lab.Ended, db: Path) -> Run:
    run = Run(ended, db)
    for line in ended.out.splitlines():
        try:
            run.events.append(json.loads(line))
        except ValueError:
            break  # the last line of a run that was killed
    return run


def tune(plan: Plan, folder: Path, prepare: Callable[[], None] = lambda: None, limit_s: float = _LIMIT_S) -> Run:
    """Runs to the end."""
    return finish(start(plan, folder, prepare=prepare), limit_s)


def records(db: Path) -> list[Record]:
    from schedsearch.records.store import Store

    with Store.open(db, readonly=True) as store:
        return store.history()


def key(config: Mapping[str, Any]) -> tuple[str, int]:
    return config["fault"], config["number"]


# What must hold. Each function yields what does not.


def complete(run: Run, plan: Plan, *, status: int = 0) -> Iterable[str]:
    """The run went on to its end: exit status, summary, no traceback."""
    if run.ended.status is None:
        yield f"the run hung: it did not end within {run.ended.seconds:.0f} s"
    elif run.ended.status != status:
        yield f"exit status {run.ended.status}, not {status}: {run.ended.err[-1500:]}"
    if "Traceback" in run.ended.err:
        yield f"a traceback: {run.ended.err[-1500:]}"
    if run.summary is None and status in (0, 1, 130):
        yield "no summary"


def nothing_lost(runs: Iterable[Run], stored: Sequence[Record]) -> Iterable[str]:
    """Every reported trial is in the store, with its outcome."""
    kept = Counter((key(record.config), record.measurement.outcome.value, record.final_race) for record in stored)
    for run in runs:
        for event in run.reported:
            if event["outcome"] == _DUPLICATE:
                continue  # it has no record of its own
            trial = key(event["config"]), event["outcome"], event["final_race"]
            kept[trial] -= 1
            if kept[trial] < 0:
                yield f"reported, but not in the store: {trial}"


def each_tried_once(runs: Iterable[Run], stored: Sequence[Record], plan: Plan) -> Iterable[str]:
    """Every configuration has one record outside the race, or was reported as a duplicate of one that has."""
    tried = Counter(key(record.config) for record in stored if not record.final_race)
    twins = {key(event["config"]) for run in runs for event in run.reported if event["outcome"] == _DUPLICATE}
    if missing := {each: count for each, count in (plan.wanted - tried).items() if each not in twins}:
        yield f"never measured: {missing}"
    if twice := tried - plan.wanted:
        yield f"measured again: {dict(twice)}"


def outcomes(stored: Sequence[Record], allowed: Mapping[str, frozenset[Outcome]]) -> Iterable[tuple[int, str]]:
    """Every candidate has one of the outcomes that its fault allows; yields its number with what is wrong."""
    for record in stored:
        fault, number = key(record.config)
        if record.measurement.outcome not in allowed[fault]:
            text = record.measurement.message[-300:]
            yield number, f"{fault} {number} is recorded as {record.measurement.outcome.value}: {text}"


def blamed(stored: Sequence[Record], faults: int) -> Iterable[str]:
    """Healthy candidates failed at most as often as something was injected."""
    bad = [record for record in stored if record.config["fault"] == HEALTHY and not record.measurement.ok]
    if len(bad) > faults:
        texts = [f"{key(record.config)} {record.measurement.outcome.value}" for record in bad]
        yield f"{faults} faults cost {len(bad)} outcomes of right candidates: {texts}"


def right_best(db: Path, target: str = "cpu", right: Collection[str] = (HEALTHY,)) -> Iterable[str]:
    """The best is verified and computes what NumPy computes in float64. Looks in a process of its own.

    Args:
        right: faults whose kernels may be best, because they compute the right thing.
    """

    def look() -> None:
        for text in _wrong_best(db, target, right):
            print(json.dumps(text))

    ended = lab.start(look, db.parent, "best").wait(_LIMIT_S)
    yield from map(json.loads, ended.out.splitlines())
    if ended.status != 0:
        yield f"the best kernel cannot be used (status {ended.status}): {ended.err[-1500:]}"


def _wrong_best(db: Path, target: str, right: Collection[str]) -> Iterable[str]:
    import schedsearch
    from schedsearch.records.store import Store

    with Store.open(db, readonly=True) as store:
        bests = list(store.bests())
        problems = store.health()["problems"]
    if problems:
        yield f"the database has problems: {problems}"
    if len(bests) != 1:
        yield f"there are {len(bests)} best kernels, not 1"
        return
    if bests[0].record.config["fault"] not in right:
        yield f"the best kernel is {dict(bests[0].record.config)}"
    kernel = schedsearch.compile(WORKLOAD, db=db, target=target, allow=("exact",))
    if not kernel.verified:
        yield "the kernel that is served is not verified"
    rng = np.random.default_rng(7)
    for _ in range(3):
        x, weight = (rng.standard_normal(spec.shape).astype(np.float32) for spec in WORKLOAD.signature)
        expected = x.astype(np.float64).reshape(-1, SHAPE["c"]) @ weight.astype(np.float64).reshape(SHAPE["k"], SHAPE["c"]).T
        served = _call(kernel, target, x, weight)
        if not np.allclose(served.reshape(expected.shape), expected, rtol=1e-5, atol=1e-5):
            yield "the kernel that is served computes something else than NumPy"
    kernel.close()


def _call(kernel: Any, target: str, x: Any, weight: Any) -> Any:
    if target == "cpu":
        return np.asarray(kernel(x, weight), np.float64)
    from numba import cuda

    y = cuda.device_array(WORKLOAD.output.shape, np.float32)
    kernel(cuda.to_device(x), cuda.to_device(weight), out=y)
    cuda.synchronize()
    return y.copy_to_host().astype(np.float64)


def lock_is_free(folder: Path) -> Iterable[str]:
    """No process holds a lock file of TMPDIR."""
    import fcntl
    import tempfile

    for path in Path(tempfile.gettempdir()).glob("*.lock"):
        with path.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield f"{path.name} is still held"


def before_and_after(stored: Sequence[Record]) -> dict[str, float]:
    """What the right candidate number 0 took when it was tried first, and what it took in the race, after all faults."""
    times = {
        record.final_race: min(record.measurement.times_ns)
        for record in stored
        if key(record.config) == (HEALTHY, 0) and record.measurement.ok
    }
    return {"before_ns": times[False], "after_ns": times[True]} if len(times) == 2 else {}
