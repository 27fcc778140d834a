"""Sample databases for the tests of the dashboard, made without a device in a fraction of a second.

    from dashboard_support import HOSTILE, sample_database, hostile_database
    sample_database(tmp_path / "a.db")                       # 2 devices, 3 tasks, 2 templates, failures, predictions, races
    sample_database(tmp_path / "b.db", seed=1, trials=40)     # another one; same tasks, so that both compare
    sample_database(tmp_path / "live.db", live=True)          # its last run has not ended; `add_trials` continues it
    sample_database(tmp_path / "big.db", trials=25_000)       # 25,000 trials for each of 4 (task, device)
    add_trials(path, 5)                                       # what a live tune appends: 5 records, committed
    hostile_database(tmp_path / "h.db")                       # HOSTILE in every text field

Times follow a smooth function of the knobs with noise, so that importance, correlation and pairs have known answers: knob
`tile` matters most, `order` a little, `unused`, `panel`, `split` and `swizzle` not at all. `tile=256` with `stages=4` fails
to compile, `vector=True` with `tile=32` computes wrong results, and `stages=5` is rejected.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from schedsearch.config import Config
from schedsearch.dashboard.answers import Answers
from schedsearch.measurement import Anchor, Measurement, Outcome, Record, Resources
from schedsearch.records import rows, schema
from schedsearch.records.store import Store
from schedsearch.session.observer import ArmStart, RunStart, TaskStart
from schedsearch.space import SpaceSize
from schedsearch.workload import Workload

H200 = "cuda:sm_90:132:NVIDIA H200"
A100 = "cuda:sm_80:108:NVIDIA A100-SXM4-80GB"
SMALL = Workload.conv2d(n=1, h=14, w=14, c=256, k=256, r=3, s=3, padding=1)
LARGE = Workload.conv2d(n=32, h=28, w=28, c=128, k=128, r=3, s=3, padding=1)
TASKS = ((SMALL, H200), (LARGE, H200), (SMALL, A100))
NAMES = {SMALL.id: "small", LARGE.id: "large"}
TEMPLATES = ("conv2d_wgmma", "conv2d_mma")
TOOLCHAIN = {"numba-cuda": "0.30.4", "nvjitlink": "13.0.88", "driver": "580.65"}
DEFAULT = Config(tile=64, stages=2, order="row", vector=False, unused=0, panel=0, split=1, swizzle=0)
START_S = 1.79e9
TRIAL_S = 0.25
HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>&amp;'\"`\u202e"


def configs(rng: random.Random) -> Iterator[Config]:
    """Random configurations, each once, `DEFAULT` first."""
    seen = {DEFAULT}
    yield DEFAULT
    while True:
        config = Config(
            tile=rng.choice((32, 64, 128, 256)),
            stages=rng.choice((2, 3, 4, 5)),
            order=rng.choice(("row", "column")),
            vector=rng.random() < 0.5,
            unused=rng.randrange(4),
            panel=rng.randrange(16),
            split=rng.choice((1, 2, 4, 8, 16, 32, 64, 128)),
            swizzle=rng.randrange(8),
        )
        if config not in seen:
            seen.add(config)
            yield config


def true_ns(workload: Workload, target: str, template: str, config: Mapping[str, Any]) -> float:
    """The time of a configuration without noise."""
    base = workload.flops / 2e5 + 2000.0
    tile = {32: 2.6, 64: 1.6, 128: 1.0, 256: 1.25}[config["tile"]]
    order = 1.0 if config["order"] == "row" else 1.08
    return (
        base
        * tile
        * order
        * (1.3 - 0.1 * config["stages"])
        * (1.0 if target == H200 else 1.9)
        * (1.0 if template == TEMPLATES[0] else 1.4)
    )


def outcome_of(config: Mapping[str, Any], rng: random.Random) -> tuple[Outcome, str]:
    if config["stages"] == 5:
        return Outcome.REJECTED, f"{rng.randrange(200, 300)} KiB of shared memory are needed; use fewer stages"
    if config["tile"] == 256 and config["stages"] == 4:
        return Outcome.COMPILE_ERROR, f"ptxas: error at line {rng.randrange(1000)}: too many registers\nkernel conv"
    if config["vector"] and config["tile"] == 32:
        return Outcome.WRONG_ANSWER, f"element {rng.randrange(1000)} is 1.5, not 0.25"
    if rng.random() < 0.01:
        return rng.choice(((Outcome.RUN_TIMEOUT, "ran over 10 s"), (Outcome.WORKER_LOST, "the runner died: signal 9")))
    return Outcome.OK, ""


def a_trial(
    workload: Workload, target: str, template: str, config: Config, rng: random.Random, at_s: float, **changes: Any
) -> Record:
    outcome, message = outcome_of(config, rng)
    time_ns = true_ns(workload, target, template, config)
    times = tuple(time_ns * rng.lognormvariate(0.0, 0.01) for _ in range(5)) if outcome is Outcome.OK else ()
    built = outcome not in (Outcome.REJECTED, Outcome.COMPILE_ERROR)
    measurement = Measurement(
        outcome,
        times_ns=times,
        resources=Resources(96 + config["tile"] // 4, 16384 * config["stages"], 0, 0, 9000) if built else Resources(),
        max_error=None if not outcome.is_verified else 0.0 if outcome is Outcome.OK else 1.25,
        message=message,
        build_s=0.8,
        run_s=0.05 if built else 0.0,
        clocks={"sm_mhz": 1980, "temperature_c": 45, "power_w": 310, "throttle": "none"} if times else {},
        host="node7",
        device_uuid="GPU-6e1c8a3d-0000-0000-0000-000000000001",
    )
    values: dict[str, Any] = {
        "workload": workload, "target": target, "template": template, "template_version": 1, "config": config,
        "measurement": measurement, "toolchain": TOOLCHAIN, "started_at": at_s - TRIAL_S, "finished_at": at_s,
    }  # fmt: skip
    return Record(**{**values, **changes})


def search(workload: Workload, target: str, trials: int, rng: random.Random, run: str, start_s: float) -> Iterator[Record]:
    """A search of `trials` candidates over both templates; from the 33rd on a model predicts, a new state every 16."""
    sources = {template: configs(rng) for template in TEMPLATES}
    for number in range(trials):
        template = TEMPLATES[number % 2]
        config = next(sources[template])
        prediction = model = None
        if number >= 32:
            exact = -math.log(true_ns(workload, target, template, config))
            prediction, model = exact + rng.gauss(0.0, 0.1), number // 16
        at_s = start_s + TRIAL_S * (number + 1)
        yield a_trial(
            workload, target, template, config, rng, at_s, run=run, batch=number // 8, prediction=prediction, model=model
        )


def race(found: list[Record], rng: random.Random, run: str, start_s: float) -> Iterator[Record]:
    """The final race: the three fastest and the default, with an anchor and 16 repetitions."""
    valid = sorted((each for each in found if each.measurement.ok), key=lambda each: each.measurement.time_ns or 0.0)
    default = next((each for each in valid if each.config == DEFAULT and each.template == TEMPLATES[0]), None)
    for number, each in enumerate([*valid[:3], *([default] if default else [])]):
        middle = true_ns(each.workload, each.target, each.template, each.config)
        times = tuple(middle * rng.lognormvariate(0.0, 0.004) for _ in range(16))
        anchor = Anchor("c0ffee", true_ns(each.workload, each.target, TEMPLATES[0], DEFAULT)) if default else None
        at_s = start_s + 0.1 * (number + 1)
        yield replace(
            each, measurement=replace(each.measurement, times_ns=times), run=run, batch=0, prediction=None, model=None,
            started_at=at_s - 0.1, finished_at=at_s, final_race=True, anchor=anchor,
        )  # fmt: skip


def insert(store: Store, records: list[Record]) -> None:
    """Many records in one transaction. Unsigned, as those of another machine."""
    filled = [rows.to_row(record) | {"signature": ""} for record in records]
    workloads = {row["workload_id"]: {"id": row["workload_id"], "op": record.workload.op, "json": row["workload_json"]}
                 for row, record in zip(filled, records)}  # fmt: skip
    toolchains = {row["toolchain_id"]: {"id": row["toolchain_id"], "json": row["toolchain_json"]} for row in filled}
    for row in filled:
        del row["workload_json"], row["toolchain_json"]
    with store.database.write() as connection:
        for table, values in ((schema.workload, list(workloads.values())), (schema.toolchain, list(toolchains.values()))):
            connection.execute(store.database.insert(table).on_conflict_do_nothing(), values)
        connection.execute(sa.insert(schema.record), filled)


def start_run(store: Store, target: str, workloads: list[Workload], trials: int, start_s: float) -> str:
    """A row of table run as `tune` writes it, with a chosen start."""
    size = SpaceSize(4 * 4 * 2 * 2 * 4 * 16 * 8 * 8, True)
    arms = tuple(ArmStart(template, size, DEFAULT, 0) for template in TEMPLATES)
    tasks = tuple(TaskStart(workload, NAMES.get(workload.id, workload.label), 1.0, arms) for workload in workloads)
    options = {"tuner": "xgb", "seed": 0, "mode": "cold-graph-v1", "trials": trials}
    event = RunStart("", target, tasks, trials * len(tasks), None, 0, {"name": target}, options, TOOLCHAIN)
    info = event.to_json()
    del info["run"]
    run = store.start_run(info)
    with store.database.write() as connection:
        connection.execute(sa.update(schema.run).where(schema.run.c.id == run).values(started_at=start_s))
    return run


def sample_database(path: Path, *, trials: int = 120, seed: int = 0, live: bool = False) -> Path:
    """A store of `TASKS`, each with `trials` candidates in a run for each device. With `live` the last run has no end."""
    rng = random.Random(seed)
    now = time.time()
    with Store.open(path) as store:
        for target in (H200, A100):
            workloads = [workload for workload, of in TASKS if of == target]
            seconds = TRIAL_S * trials * len(workloads) + 2
            unfinished = live and target == A100
            start_s = now - seconds if unfinished else START_S + seed * 1e6 + (0 if target == H200 else 1e5)
            run = start_run(store, target, workloads, trials * (4 if unfinished else 1), start_s)
            for number, workload in enumerate(workloads):
                found = list(search(workload, target, trials, rng, run, start_s + TRIAL_S * trials * number))
                if not unfinished:
                    found += race(found, rng, run, start_s + TRIAL_S * trials * len(workloads))
                insert(store, found)
            if not unfinished:
                finish_run(store, run, start_s + seconds, seconds)
            promote_fastest(store, workloads, target)
    return path


def finish_run(store: Store, run: str, end_s: float, wall_s: float) -> None:
    shares = {"device": 0.61, "build": 0.22, "tuner": 0.05, "preparing": 0.04}
    store.finish_run(run, {"run": run, "stopped": "trials", "wall_s": wall_s, "shares": shares, "tasks": []})
    with store.database.write() as connection:
        connection.execute(sa.update(schema.run).where(schema.run.c.id == run).values(finished_at=end_s))


def promote_fastest(store: Store, workloads: list[Workload], target: str) -> None:
    for workload in workloads:
        valid = [row for row in store.rows(workload=workload, target=target) if row.measurement.ok]
        raced = [row for row in valid if row.final_race] or valid
        if raced:
            store.promote(min(raced, key=lambda row: row.measurement.time_ns or 0.0).id)


def add_trials(path: Path, count: int = 1, *, seed: int = 99, run_so_far: dict[str, Any] | None = None) -> list[int]:
    """Appends candidates of `SMALL` to the newest run, as a live tune does; returns the ids."""
    rng = random.Random(seed)
    with Store.open(path) as store:
        run = store.runs()[-1]["id"]
        sources = configs(rng)
        next(sources)
        trials = (a_trial(SMALL, A100, TEMPLATES[0], next(sources), rng, time.time(), run=run) for _ in range(count))
        return [store.append(trial, run_so_far) for trial in trials]


def hostile_database(path: Path) -> Path:
    """Foreign text in every field that can hold any: knobs, values, messages, hosts, devices, templates, names."""
    target = f"cuda:sm_90:132:{HOSTILE}"
    config = Config({HOSTILE: HOSTILE, "tile": 1})
    other = Config({HOSTILE: "plain", "tile": 1})
    toolchain = {HOSTILE: HOSTILE}
    with Store.open(path) as store:
        arm = ArmStart(HOSTILE, SpaceSize(2, True), other, 0)
        task = TaskStart(SMALL, HOSTILE, 1.0, (arm,))
        options = {"tuner": HOSTILE, HOSTILE: HOSTILE}
        info = RunStart("", target, (task,), 2, None, 0, {"name": HOSTILE}, options, toolchain).to_json()
        del info["run"]
        run = store.start_run(info)
        for number, (knobs, outcome) in enumerate(
            ((other, Outcome.OK), (config, Outcome.OK), (config, Outcome.LAUNCH_ERROR))
        ):
            ok = outcome is Outcome.OK
            measurement = Measurement(
                outcome, times_ns=(1e5 - 1e4 * number,) * 5 if ok else (), message="" if ok else f"{HOSTILE}\n{HOSTILE}",
                clocks={"throttle": HOSTILE, HOSTILE: HOSTILE}, host=HOSTILE, device_uuid=HOSTILE,
            )  # fmt: skip
            store.append(
                Record(
                    workload=SMALL,
                    target=target,
                    template=HOSTILE,
                    template_version=1,
                    config=knobs,
                    run=run,
                    measurement=measurement,
                    toolchain=toolchain,
                    started_at=START_S + number,
                    finished_at=START_S + number,
                )
            )
    return path


@contextmanager
def answers_of(*files: Path | str) -> Iterator[Answers]:
    """The answers about these files, which have been read."""
    answers = Answers([str(file) for file in files])
    try:
        answers.refresh()
        yield answers
    finally:
        answers.close()


def raced_database(path: Path, *races: tuple[tuple[float, ...], tuple[float, ...]], target: str = H200) -> Path:
    """Tasks with a final race of two entrants: all repetitions of the default, and of another configuration, in ns."""
    rng = random.Random(0)
    with Store.open(path) as store:
        workloads = [Workload.conv2d(n=number, h=14, w=14, c=64, k=64, r=1, s=1) for number in range(1, len(races) + 1)]
        run = start_run(store, target, workloads, 2, START_S)
        for number, (workload, (default, other)) in enumerate(zip(workloads, races)):
            faster = Config({**DEFAULT, "tile": 128})
            for config, times in ((DEFAULT, default), (faster, other)):
                measured = Measurement(Outcome.OK, times_ns=times, resources=Resources(112, 32768, 0, 0, 9000))
                for race in (False, True):
                    store.append(
                        a_trial(
                            workload, target, TEMPLATES[0], config, rng, START_S + number, run=run, measurement=measured,
                            final_race=race,
                        )
                    )  # fmt: skip
        finish_run(store, run, START_S + 10, 10.0)
    return path
