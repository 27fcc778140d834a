"""Replays a search over recorded spaces, to judge a tuner without a device.

The tuner proposes as in `tune`, through ask and tell; a proposal is answered from the recording. An evaluation is one unique
legal configuration, and failed ones count. Every run makes its space and tuner anew.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from schedsearch.config import Config
from schedsearch.errors import UsageError
from schedsearch.processes.process import call_in_children
from schedsearch.replay.figures import Report, Run, summarise
from schedsearch.replay.recorded import RecordedSpace
from schedsearch.session.hints import MAX_HINTS
from schedsearch.tuner import make_tuner, require_tuner

EVALUATIONS = (25, 50, 100, 200, 400)
SEEDS = 20
WARM_RECORDS = 400  # a run knows at most this many configurations of each warm recording, drawn by its seed
FINALISTS = 5  # with noise: how many of the lowest readings are measured properly before a winner is named


# ---- one run


def run(
    recorded: RecordedSpace,
    tuner_name: str,
    seed: int,
    evaluations: int,
    *,
    warm: Sequence[RecordedSpace] = (),
    noise: bool = False,
) -> Run:
    """Searches a recorded space once, with new objects.

    Args:
        recorded: the space to search.
        tuner_name, seed: the tuner.
        evaluations: how many; fewer if the space is exhausted before.
        warm: recordings of the same knobs for other devices or shapes. The fastest of each is a hint, as in `tune`; the
            tuner may learn from all of them.
        noise: answer with one recorded repetition, drawn at random, instead of the recorded time. The winner is then the
            best of the `FINALISTS` lowest readings.

    Raises:
        UsageError: no tuner has this name.
    """
    space = recorded.space()
    keys = space.keys(recorded.rows)
    started = time.process_time()
    evidence = [_evidence(source, seed) for source in warm]
    tuner = make_tuner(tuner_name, space, seed=seed, hints=_fastest(evidence)[:MAX_HINTS])
    if evidence:
        tuner.transfer(evidence)
    cpu_s = time.process_time() - started
    rng = np.random.default_rng([seed, 1])  # for the readings; the tuner has random numbers of its own
    true_ns: list[float] = []
    readings_ns: list[float] = []
    proposals = 0
    while len(true_ns) < evaluations and not tuner.finished:
        started = time.process_time()
        configs = tuner.ask(tuner.batch)  # a whole batch, also at the end: the result must not depend on the budget
        cpu_s += time.process_time() - started
        proposals += len(configs)
        at = np.searchsorted(keys, space.keys(space.indices(configs))) if configs else np.empty(0, dtype=np.int64)
        true = recorded.times_ns[at]
        readings = np.array([rng.choice(recorded.repetitions_ns[i] or (t,)) for i, t in zip(at, true)]) if noise else true
        true_ns += true.tolist()
        readings_ns += readings.tolist()
        answers = [(config, None if np.isnan(t) else float(t)) for config, t in zip(configs, readings)]
        started = time.process_time()
        tuner.tell(answers)
        cpu_s += time.process_time() - started
    best = _best_so_far(true_ns[:evaluations], readings_ns[:evaluations], FINALISTS if noise else 1)
    fractions = np.zeros(evaluations)
    fractions[: len(best)] = recorded.best_ns / best
    fractions[len(best) :] = fractions[len(best) - 1] if len(best) else 0.0  # the space was exhausted
    return Run(fractions, proposals, cpu_s, tuple(true_ns[:evaluations]))


def _evidence(source: RecordedSpace, seed: int) -> list[tuple[Config, float | None]]:
    rows = np.arange(len(source.rows))
    if len(rows) > WARM_RECORDS:
        rows = np.sort(np.random.default_rng([seed, 2]).choice(rows, size=WARM_RECORDS, replace=False))
    times = source.times_ns[rows].tolist()
    configs = source.space().configs(source.rows[rows])
    return [(config, None if np.isnan(time_ns) else time_ns) for config, time_ns in zip(configs, times)]


def _fastest(evidence: Sequence[Sequence[tuple[Config, float | None]]]) -> list[Config]:
    """The fastest configuration of each source that has one."""
    valid = [[(time_ns, config) for config, time_ns in results if time_ns is not None] for results in evidence]
    return [min(timed, key=lambda pair: pair[0])[1] for timed in valid if timed]


def _best_so_far(true_ns: Sequence[float], readings_ns: Sequence[float], finalists: int) -> NDArray[np.float64]:
    """The winner's true time after each evaluation: the best of those with the lowest readings; inf: none is valid."""
    lowest: list[tuple[float, float]] = []  # (-reading, true), the highest reading on top
    best = np.full(len(true_ns), np.inf)
    for i, (true, reading) in enumerate(zip(true_ns, readings_ns)):
        if not np.isnan(true):
            heapq.heappush(lowest, (-reading, true))
            if len(lowest) > finalists:
                heapq.heappop(lowest)
        best[i] = min((time_ns for _, time_ns in lowest), default=np.inf)
    return best


# ---- many runs


def replay(
    spaces: Sequence[RecordedSpace],
    tuner: str = "xgb",
    *,
    evaluations: Sequence[int] = EVALUATIONS,
    seeds: int = SEEDS,
    warm: Sequence[RecordedSpace] = (),
    noise: bool = False,
    jobs: int = 1,
    progress: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Runs a tuner over every space with seeds 0, 1, ...; figures do not depend on `jobs`.

    Args:
        spaces: where to search, at least one.
        tuner: a name in `schedsearch.tuner.TUNERS`.
        evaluations: the budgets after which to report.
        seeds: how many runs each space gets.
        warm: recordings to learn from. Each warms every space with the same knobs, except its own data.
        noise: see `run`.
        jobs: the number of processes that share the runs.
        progress: called after each run with the number of runs done, the number of all, and the space's name.

    Raises:
        UsageError: no tuner has this name, no space was given, or no recording of a warm file fits any space.
    """
    if not spaces or seeds < 1 or not evaluations or min(evaluations) < 1:
        raise UsageError("a replay needs at least one space, one seed and one budget of one evaluation or more")
    require_tuner(tuner)
    sources = _sources(spaces, warm)
    # Without noise, other processes do not need the repetitions, which are most of the data.
    searched = spaces if noise else [replace(space, repetitions_ns=()) for space in spaces]
    tasks = [(i, seed) for seed in range(seeds) for i in range(len(spaces))]
    calls = ((searched[i], tuner, seed, min(max(evaluations), len(spaces[i].rows)), sources[i], noise) for i, seed in tasks)
    runs: dict[tuple[int, int], Run] = {}
    for number, result in call_in_children(f"{__name__}:_run", calls, min(jobs, len(tasks))):
        runs[tasks[number]] = result
        if progress:
            progress(len(runs), len(tasks), spaces[tasks[number][0]].name)
    return summarise(spaces, tuner, evaluations, [[runs[i, s] for s in range(seeds)] for i in range(len(spaces))])


def _run(
    recorded: RecordedSpace, tuner: str, seed: int, evaluations: int, warm: Sequence[RecordedSpace], noise: bool
) -> Run:
    return run(recorded, tuner, seed, evaluations, warm=warm, noise=noise)


def cold_spaces(spaces: Sequence[RecordedSpace], warm: Sequence[RecordedSpace]) -> list[str]:
    """The spaces that no warm recording fits, each with the reasons; they are searched cold."""
    if not warm:
        return []
    names = [{knob.name for knob in source.knobs} for source in warm]
    lines = []
    for space, sources in zip(spaces, _sources(spaces, warm)):
        if not sources:
            own = {knob.name for knob in space.knobs}
            why = [
                f"{source.file} ({source.name}) {'is its own data' if known == own else 'has other knobs'}"
                for source, known in zip(warm, names)
            ]
            lines.append(f"{space.file} ({space.name}) is searched cold, nothing warms it: {'; '.join(why)}")
    return lines


def _sources(spaces: Sequence[RecordedSpace], warm: Sequence[RecordedSpace]) -> list[list[RecordedSpace]]:
    """For each space, the recordings that may warm it."""
    if not warm:
        return [[] for _ in spaces]
    prints = {id(space): space.fingerprint() for space in (*spaces, *warm)}
    names = {id(space): {knob.name for knob in space.knobs} for space in (*spaces, *warm)}
    searched = [names[id(space)] for space in spaces]
    useful = {source.file for source in warm if names[id(source)] in searched}  # a database contains other tasks, too
    for source in warm:
        if source.file not in useful:
            raise UsageError(f"{source.file} ({source.name}) has other knobs than every space to search; it cannot warm any")
    return [[w for w in warm if names[id(w)] == names[id(space)] and prints[id(w)] != prints[id(space)]] for space in spaces]
