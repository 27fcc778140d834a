"""Every process of a run is killed, stopped or told to end, at every stage."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator

from . import inject, lab, runs
from .inject import STAGE_S, Moment, Strike
from .scenario import Batch, Scenario

_CHILD_KILLS = 8  # per run
_PARENT_KILLS = 10  # runs per database
_CHILD_STAGES: dict[str, tuple[Moment, str]] = {
    "builder-starting": ("start builder", "while it starts"),
    "builder-building": ("BuildTask", "while it has work"),
    "runner-starting": ("start runner", "while it opens the device"),
    "runner-preparing": ("Prepare", "while it makes inputs and reference"),
    "runner-measuring": ("Run", "while it verifies and times"),
    "runner-racing": ("Race", "during the final race"),
}
# How often a moment comes in a run of few candidates.
_OCCURRENCES: dict[Moment, int] = {"start builder": 2, "start runner": 2, "Race": 3}
_PARENT_STAGES: dict[str, tuple[list[Moment], str]] = {
    "starting": (["start builder", "start runner", "BuildTask"], "while its children start and build"),
    "measuring": (["Prepare", "Run"], "while a candidate is prepared, verified and timed"),
    "ending": (["append", "Race", "finish"], "while a record is written, in the final race, and at the end"),
}
_MOMENTS = [moment for moments, _ in _PARENT_STAGES.values() for moment in moments]


def _fail(batch: Batch, seed: int, texts: Iterator[str]) -> None:
    for text in texts:
        batch.failed(seed, text)


def _impatient() -> None:
    """Shortens the time-outs that no option sets, because a process that is stopped may be met by any of them."""
    from schedsearch.measure import runner
    from schedsearch.processes import builder

    for module, name, seconds in (
        (builder, "_START_S", 15.0), (builder, "_BEGIN_S", 5.0), (runner, "_START_S", 15.0), (runner, "_PREPARE_S", 8.0)
    ):  # fmt: skip
        assert hasattr(module, name)
        setattr(module, name, seconds * lab.patience())


def _children_struck(
    moment: Moment, act: Callable[[int], None], lost: int = 1, slow: bool = False
) -> Callable[[Batch], None]:
    """A scenario that strikes a child at several occurrences of a moment, in one run.

    Args:
        lost: how many outcomes of right candidates a strike may cost.
    """

    def run(batch: Batch) -> None:
        first = batch.seeds[0]
        rng = batch.random(first)
        count = len(batch.seeds)
        occurrences = rng.sample(range(max(_OCCURRENCES.get(moment, count), count)), count)
        strikes = [
            Strike(moment, occurrence, batch.random(seed).random() * STAGE_S[moment], act)
            for seed, occurrence in zip(batch.seeds, occurrences)
        ]
        plan = runs.Plan(
            {runs.HEALTHY: range(count + 1)},
            build_timeout_s=4.0 if slow else runs.BUILD_TIMEOUT_S,
            run_timeout_s=3.0 if slow else runs.RUN_TIMEOUT_S,
        )

        def prepare() -> None:
            if slow:
                _impatient()
            inject.install(strikes)

        ran = runs.tune(plan, batch.folder, prepare)
        stored = runs.records(ran.db)

        def texts() -> Iterator[str]:
            yield from runs.complete(ran, plan)
            yield from runs.nothing_lost([ran], stored)
            yield from runs.each_tried_once([ran], stored, plan)
            yield from runs.blamed(stored, lost * count)
            yield from runs.right_best(ran.db)
            yield from runs.lock_is_free(batch.folder)

        _fail(batch, first, texts())

    return run


def _children_killed_everywhere(batch: Batch) -> None:
    """Kills a child at every stage of one run."""
    (seed,) = batch.seeds
    rng = batch.random(seed)
    occurrences: dict[Moment, int] = {
        "start builder": 0, "start runner": 1, "BuildTask": rng.randrange(1, 4), "Prepare": rng.randrange(1, 3),
        "Run": rng.randrange(3), "Race": rng.randrange(3),
    }  # fmt: skip
    strikes = [Strike(moment, at, rng.random() * STAGE_S[moment], inject.kill) for moment, at in occurrences.items()]
    plan = runs.Plan({runs.HEALTHY: range(5)})
    ran = runs.tune(plan, batch.folder, lambda: inject.install(strikes))
    stored = runs.records(ran.db)
    for texts in (
        runs.complete(ran, plan), runs.nothing_lost([ran], stored), runs.each_tried_once([ran], stored, plan),
        runs.blamed(stored, len(strikes)), runs.right_best(ran.db), runs.lock_is_free(batch.folder),
    ):  # fmt: skip
        _fail(batch, seed, iter(texts))


def _parent_struck(
    choose: Callable[[random.Random], tuple[int, Moment]], statuses: Callable[[int], set[int]]
) -> Callable[[Batch], None]:
    """A scenario that strikes one run after another, all into one database, and then lets one finish.

    Args:
        choose: the signal and the moment of a try.
        statuses: the exit statuses that a struck run may have.
    """

    def run(batch: Batch) -> None:
        first = batch.seeds[0]
        ended: list[runs.Run] = []

        def texts(seed: int, number: int) -> Iterator[str]:
            rng = batch.random(seed)
            signum, moment = choose(rng)
            delay_s = rng.random() * STAGE_S[moment]
            # Each run has a candidate of its own, so that it has something to do.
            plan = runs.Plan({runs.HEALTHY: [number]})
            strike = Strike(moment, 0, delay_s, lambda pid: os.kill(pid, signum), "self")
            process = runs.start(plan, batch.folder, f"run{number}", lambda: inject.install([strike]))
            ran = runs.finish(process)
            ended.append(ran)
            if ran.ended.status not in statuses(signum):
                yield f"{signal.Signals(signum).name} at {moment}: status {ran.ended.status}: {ran.ended.err[-1500:]}"
            if "Traceback" in ran.ended.err:
                yield f"{signal.Signals(signum).name} at {moment}: a traceback: {ran.ended.err[-1500:]}"
            if ran.ended.status == 130 and ran.events and ran.summary is None:
                yield f"{signal.Signals(signum).name} at {moment}: no summary"
            for left in lab.reap():
                yield f"{signal.Signals(signum).name} at {moment}: it outlived the run: {left}"
            yield from runs.lock_is_free(batch.folder)

        for number, seed in enumerate(batch.each()):
            _fail(batch, seed, texts(seed, number))

        def at_the_end() -> Iterator[str]:
            plan = runs.Plan({runs.HEALTHY: range(1 + len(batch.seeds))})
            last = runs.tune(plan, batch.folder)
            stored = runs.records(last.db)
            yield from runs.complete(last, plan)
            yield from runs.nothing_lost([*ended, last], stored)
            yield from runs.each_tried_once([*ended, last], stored, plan)
            yield from runs.blamed(stored, 0)
            yield from runs.right_best(last.db)

        _fail(batch, first, at_the_end())

    return run


def _at(signum: int, moments: list[Moment]) -> Callable[[random.Random], tuple[int, Moment]]:
    return lambda rng: (signum, rng.choice(moments))


def _in_any_way(rng: random.Random) -> tuple[int, Moment]:
    return rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP]), rng.choice(_MOMENTS)


def _ended_or_done(signum: int) -> set[int]:
    """130 after a clean stop, 0 when the signal came after the end, and death by the signal before the run began."""
    return {130, 0, -signum}


def _killed_or_done(signum: int) -> set[int]:
    return {-signum, 0}


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def _parent_paused(batch: Batch) -> None:
    """The whole run stops for half a second at random moments, as in a terminal or on a machine that sleeps."""
    first = batch.seeds[0]
    plan = runs.Plan({runs.HEALTHY: range(1 + len(batch.seeds))})
    waker, write = os.pipe()  # a stopped process cannot wake itself

    def stop(pid: int) -> None:
        os.write(write, b"x")
        os.kill(pid, signal.SIGSTOP)

    strikes = []
    for number, seed in enumerate(batch.seeds):
        rng = batch.random(seed)
        moments: list[Moment] = ["BuildTask", "Prepare", "Run", "append", *(["start runner", "Race"] if not number else [])]
        moment = rng.choice(moments)
        strikes.append(Strike(moment, number, rng.random() * STAGE_S[moment], stop, "self"))
    process = runs.start(plan, batch.folder, prepare=lambda: inject.install(strikes))
    os.close(write)
    while os.read(waker, 1):  # nothing when the run has ended
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGCONT)
    ran = runs.finish(process)
    stored = runs.records(ran.db)
    for texts in (
        runs.complete(ran, plan), runs.nothing_lost([ran], stored), runs.each_tried_once([ran], stored, plan),
        runs.blamed(stored, 0), runs.right_best(ran.db),
    ):  # fmt: skip
        _fail(batch, first, iter(texts))


def _scenarios() -> Iterator[Scenario]:
    for name, (moment, when) in _CHILD_STAGES.items():
        most = _OCCURRENCES.get(moment, _CHILD_KILLS)
        yield Scenario(
            f"process.kill-{name}", f"kill -9 of the {name.partition('-')[0]} {when}",
            _children_struck(moment, inject.kill), batch=min(most, _CHILD_KILLS),
        )  # fmt: skip
    for name, (moments, when) in _PARENT_STAGES.items():
        yield Scenario(
            f"process.kill-parent-{name}", f"kill -9 of `tune` {when}; then the next run goes on",
            _parent_struck(_at(signal.SIGKILL, moments), _killed_or_done), batch=_PARENT_KILLS,
        )  # fmt: skip
    yield Scenario(
        "process.kill-children", "kill -9 of the children at every stage of one run", _children_killed_everywhere,
        share=0.1, short=1,
    )  # fmt: skip
    yield Scenario(
        "process.end-parent", "kill -9 or a signal to `tune` at any stage; then the next run goes on",
        _parent_struck(_in_any_way, _ended_or_done), batch=_PARENT_KILLS, share=0.1,
        short=5,
    )  # fmt: skip
    for signum, short in ((signal.SIGTERM, "sigterm"), (signal.SIGINT, "sigint"), (signal.SIGHUP, "sighup")):
        yield Scenario(
            f"process.{short}", f"{signum.name} to `tune` at any stage; then the next run goes on",
            _parent_struck(_at(signum, _MOMENTS), _ended_or_done), batch=_PARENT_KILLS,
        )  # fmt: skip
    for name in ("builder-building", "runner-measuring"):
        moment, when = _CHILD_STAGES[name]
        yield Scenario(
            f"process.stop-{name}", f"SIGSTOP to the {name.partition('-')[0]} {when}; it never goes on",
            _children_struck(moment, _stop, slow=True), batch=_CHILD_KILLS,
        )  # fmt: skip
    yield Scenario(
        "process.pause", "`tune` is stopped for half a second at any stage (SIGSTOP, SIGCONT)", _parent_paused, batch=5
    )


SCENARIOS = list(_scenarios())
