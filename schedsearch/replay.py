"""A search replayed over recorded spaces: how good a tuner is, without a device.

The tuner proposes as in `tune`, through ask and tell; a proposal is answered from the recording. An evaluation is one unique
legal configuration, and failed ones count. Figures are fractions of the optimum: best known time over best time so far, 0
while nothing valid was found. Every run makes its space and tuner anew.
"""

from __future__ import annotations

import functools
import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedsearch.errors import UsageError
from schedsearch.hints import MAX_HINTS
from schedsearch.listed_space import ListedSpace
from schedsearch.measure.process import ChildProcess
from schedsearch.records import kernel_tuner, t4
from schedsearch.records.recording import Recording, read_json
from schedsearch.space import Knob, Rows
from schedsearch.tuner import make_tuner, require_tuner
from schedsearch.workload import Config, sha256_hex

EVALUATIONS = (25, 50, 100, 200, 400)
SEEDS = 20
MIN_RECORDS = 50  # different configurations that make (workload, template, target, mode) of a database a space
WARM_RECORDS = 400  # of each warm recording a run knows at most so many, drawn by its seed
FLOOR = 0.001  # of a space's fraction in the geometric mean, where one that found nothing would make it 0
NEAR = 1.05  # "within 5 %": at most this times the best known time
FINALISTS = 5  # with noise: how many of the lowest readings are measured properly before a winner is named
RESAMPLES, CONFIDENCE = 2000, 0.95  # of the bootstrap
_SQLITE = b"SQLite format 3\x00"


@dataclass(frozen=True)
class RecordedSpace:
    """A space with the outcome of each of its legal configurations.

    Attributes:
        file: where it comes from. name: which one of that file, and what it is.
        rows: (n, knobs) index rows, in ascending order of their keys.
        times_ns: (n,), NaN where the configuration failed.
        repetitions_ns: per row the single readings behind its time, () where there are none; only noise needs them.
    """

    file: str
    name: str
    knobs: tuple[Knob, ...]
    rows: Rows
    times_ns: NDArray[np.float64]
    repetitions_ns: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, recording: Recording, name: str) -> RecordedSpace:
        """Raises UsageError when there is nothing to search: one configuration, or none that works."""
        entries = recording.entries
        if len(entries) < 2:
            raise UsageError(f"{recording.source}: {name} has one single configuration; a search needs at least two")
        if all(entry.time_ns is None for entry in entries):
            raise UsageError(f"{recording.source}: all {len(entries)} configurations of {name} failed; there is no optimum")
        position = [{(type(value), value): i for i, value in enumerate(knob.values)} for knob in recording.knobs]
        rows = np.array(
            [
                [
                    where[type(entry.config[knob.name]), entry.config[knob.name]]
                    for where, knob in zip(position, recording.knobs)
                ]
                for entry in entries
            ],
            dtype=np.int32,
        )
        order = np.lexsort(rows.T[::-1])
        times = np.array([np.nan if entry.time_ns is None else entry.time_ns for entry in entries])
        repetitions = tuple(entries[i].times_ns for i in order)
        return cls(recording.source, name, recording.knobs, rows[order], times[order], repetitions)

    @property
    def best_ns(self) -> float:
        return float(np.nanmin(self.times_ns))

    def space(self) -> ListedSpace:
        """A new space object, which no other run has seen."""
        return ListedSpace(self.knobs, self.rows)

    def fingerprint(self) -> str:
        """The same for the same data in another format, unit or order of knobs; times count to six digits."""
        names = sorted(knob.name for knob in self.knobs if len(knob.values) > 1)
        column = {knob.name: i for i, knob in enumerate(self.knobs)}
        values = {knob.name: [str(value) for value in knob.values] for knob in self.knobs}
        lines = [
            ",".join(values[name][row[column[name]]] for name in names) + f"={time_ns:.5e}"
            # A bit more, so that 29.94895 and 29.948949999999996 are rounded alike.
            for row, time_ns in zip(self.rows.tolist(), (self.times_ns * (1 + 1e-9)).tolist())
        ]
        return sha256_hex(f"{names}\n" + "\n".join(sorted(lines)))


# ---- reading


@dataclass(frozen=True)
class Loaded:
    """Recorded spaces, each once, and what was left out with the reason."""

    spaces: tuple[RecordedSpace, ...]
    left_out: tuple[str, ...]


def load(paths: Sequence[str | Path], t1: str | Path | None = None) -> Loaded:
    """Reads recorded spaces; a space whose data came before, in whatever format, is left out.

    Args:
        paths: Kernel Tuner caches, T4 results, both also as gzip, and schedsearch databases.
        t1: the T1 description of the T4 results; the one beside each unless given.

    Raises:
        UsageError: a file cannot be read or something in it is wrong, or no space is in it; names file and place.
        DatabaseError: a database cannot be read.
    """
    spaces: list[RecordedSpace] = []
    left_out: list[str] = []
    first: dict[str, RecordedSpace] = {}
    for path in paths:
        for space in _read(path, t1, left_out):
            twin = first.setdefault(space.fingerprint(), space)
            if twin is space:
                spaces.append(space)
            else:
                left_out.append(f"{space.file} ({space.name}): the same data as {twin.file}, counted once")
    return Loaded(tuple(spaces), tuple(left_out))


def _read(path: str | Path, t1: str | Path | None, left_out: list[str]) -> Iterator[RecordedSpace]:
    if _is_database(path):
        yield from _read_database(path, left_out)
        return
    data = read_json(path)
    if kernel_tuner.is_cache(data):
        recording = kernel_tuner.parse(data, path)
    elif t4.is_results(data):
        recording = t4.parse(data, path, t1)
    else:
        raise UsageError(
            f"{path}: neither a Kernel Tuner cache (with 'tune_params' and 'cache'), nor T4 results (with 'results'), "
            "nor a schedsearch database"
        )
    yield RecordedSpace.of(recording, " ".join(text for text in (recording.kernel, recording.device) if text) or "space")


def _is_database(path: str | Path) -> bool:
    if not Path(path).is_file():
        return False  # a pipe can be read once only; whoever reads what is not there says so
    try:
        with Path(path).open("rb") as file:
            return file.read(len(_SQLITE)) == _SQLITE
    except OSError:
        return False


def _read_database(path: str | Path, left_out: list[str]) -> Iterator[RecordedSpace]:
    from schedsearch.records.exchange_formats import recordings
    from schedsearch.records.store import Store

    found = False
    with Store.open(path, create=False, readonly=True) as store:
        for task, recording in recordings(store):
            if len(recording.entries) < MIN_RECORDS:
                left_out.append(f"{path} ({task}): {len(recording.entries)} configurations, fewer than {MIN_RECORDS}")
                continue
            if all(entry.time_ns is None for entry in recording.entries):
                left_out.append(f"{path} ({task}): all {len(recording.entries)} configurations failed")
                continue
            found = True
            yield RecordedSpace.of(replace(recording, source=str(path)), str(task))
    if not found:
        raise UsageError(
            f"{path}: no workload has {MIN_RECORDS} or more recorded configurations of one template, target and mode, "
            "one of them valid; record more with: schedsearch tune --trials N"
        )


# ---- one run


@dataclass(frozen=True)
class Run:
    """What one run of a tuner over one space came to.

    Attributes:
        fractions: (evaluations,), the fraction of the optimum after each evaluation.
        proposals, cpu_s: how many configurations the tuner proposed, and the CPU seconds it spent, fitting included.
        times_ns: the recorded time of each evaluation, NaN for a failure; fewer where the space was exhausted.
    """

    fractions: NDArray[np.float64]
    proposals: int
    cpu_s: float
    times_ns: tuple[float, ...] = ()


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
        recorded: where.
        tuner_name, seed: the tuner.
        evaluations: how many; fewer are made where the space holds no more.
        warm: recordings of the same knobs for other devices or shapes. The fastest of each is a hint, as in `tune`; the
            tuner may learn from all of them.
        noise: answer with one recorded repetition, drawn at random, instead of the recorded time. The winner then is the
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
    rng = np.random.default_rng([seed, 1])  # of the readings; the tuner's own random choices are its business
    true_ns: list[float] = []
    readings_ns: list[float] = []
    proposals = 0
    while len(true_ns) < evaluations and not tuner.finished:
        started = time.process_time()
        configs = tuner.ask(tuner.batch)  # a whole batch, also at the end: what is found must not depend on the budget
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
    """After each evaluation the true time of the winner: the best of those with the lowest readings; inf: none is valid."""
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


@dataclass(frozen=True)
class SpaceResult:
    """Figures of one space, by budget: `fractions` is the mean over seeds, `low` and `high` its bootstrap interval,
    `within_5` the share of runs within 5 % of the optimum."""

    file: str
    name: str
    configurations: int
    valid: int
    best_ns: float
    fractions: dict[int, float]
    low: dict[int, float]
    high: dict[int, float]
    within_5: dict[int, float]
    cpu_s_per_64: float


@dataclass(frozen=True)
class Report:
    """Figures of a replay; `geomean` is over the spaces, `geomean_low` and `geomean_high` its bootstrap interval."""

    tuner: str
    seeds: int
    spaces: tuple[SpaceResult, ...]
    geomean: dict[int, float]
    geomean_low: dict[int, float]
    geomean_high: dict[int, float]
    cpu_s_per_64: float


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
        evaluations: the budgets at which to look.
        seeds: how many runs each space gets.
        warm: recordings to learn from; each serves the spaces that have its knobs, but not the one of its own data.
        noise: see `run`.
        jobs: processes to spread the runs over.
        progress: called after each run with the number of runs done, the number of all, and the space's name.

    Raises:
        UsageError: no tuner has this name, no space was given, or a warm recording fits no space.
    """
    if not spaces or seeds < 1 or not evaluations or min(evaluations) < 1:
        raise UsageError("a replay needs at least one space, one seed and one budget of one evaluation or more")
    require_tuner(tuner)
    sources = _sources(spaces, warm)
    # Without noise the repetitions, most of the data, stay out of what goes to other processes.
    searched = spaces if noise else [replace(space, repetitions_ns=()) for space in spaces]
    tasks = (
        (i, seed, (space, tuner, seed, min(max(evaluations), len(space.rows))), {"warm": sources[i], "noise": noise})
        for seed in range(seeds)
        for i, space in enumerate(searched)
    )
    total = seeds * len(spaces)
    runs: dict[tuple[int, int], Run] = {}
    for number, (i, seed, result) in enumerate(_execute(tasks, min(jobs, total)), 1):
        runs[i, seed] = result
        if progress:
            progress(number, total, spaces[i].name)
    return summarise(spaces, tuner, evaluations, [[runs[i, s] for s in range(seeds)] for i in range(len(spaces))])


def cold_spaces(spaces: Sequence[RecordedSpace], warm: Sequence[RecordedSpace]) -> list[str]:
    """Which spaces none of the warm recordings serves, each with the reasons: they are searched cold all the same."""
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
    """For each space what it may be warmed by."""
    if not warm:
        return [[] for _ in spaces]
    prints = {id(space): space.fingerprint() for space in (*spaces, *warm)}
    names = {id(space): {knob.name for knob in space.knobs} for space in (*spaces, *warm)}
    for source in warm:
        if all(names[id(source)] != names[id(space)] for space in spaces):
            raise UsageError(f"{source.file} ({source.name}) has other knobs than every space to search; it cannot warm any")
    return [[w for w in warm if names[id(w)] == names[id(space)] and prints[id(w)] != prints[id(space)]] for space in spaces]


_Task = tuple[int, int, tuple[Any, ...], dict[str, Any]]  # space, seed, arguments of `run`


def _execute(tasks: Iterable[_Task], jobs: int) -> Iterator[tuple[int, int, Run]]:
    if jobs == 1:
        for i, seed, arguments, options in tasks:
            yield i, seed, run(*arguments, **options)
        return
    tasks = iter(tasks)
    children: list[ChildProcess] = []
    busy: dict[ChildProcess, tuple[int, int]] = {}  # to the space and seed of its run

    def give(child: ChildProcess) -> None:
        if task := next(tasks, None):
            i, seed, arguments, options = task
            child.send((arguments, options))
            busy[child] = i, seed

    try:
        for _ in range(jobs):
            children.append(ChildProcess("schedsearch.replay:serve"))
            give(children[-1])
        while busy:
            ready = wait([child.conn for child in busy])
            for child in [child for child in busy if child.conn in ready]:
                result, (i, seed) = child.receive(), busy.pop(child)
                give(child)
                yield i, seed, result
    finally:  # also when interrupted: a run takes seconds
        for child in children:
            child.kill()


def serve(conn: Connection) -> None:
    """Entry of a child process: answers arguments of `run` with its result, until the parent closes the pipe."""
    while True:
        arguments, options = conn.recv()
        conn.send(run(*arguments, **options))


def summarise(
    spaces: Sequence[RecordedSpace], tuner: str, evaluations: Sequence[int], runs: Sequence[Sequence[Run]]
) -> Report:
    """Figures of runs that were made already, for each space one per seed, as long as the greatest budget or the space."""
    budgets = sorted(set(evaluations))
    fractions = _fractions(runs, budgets)
    means = fractions.mean(axis=1)
    resampled = _resample(fractions)  # (resamples, spaces, budgets)
    tails = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    low, high = np.quantile(resampled, tails, axis=0)
    near = (fractions >= 1 / NEAR).mean(axis=1)
    geomean = _geometric_mean(means)
    geomean_low, geomean_high = np.quantile(_geometric_mean(resampled), tails, axis=0)

    by_budget = functools.partial(_by_budget, budgets)
    results = tuple(
        SpaceResult(
            file=space.file,
            name=space.name,
            configurations=len(space.rows),
            valid=int(np.count_nonzero(~np.isnan(space.times_ns))),
            best_ns=space.best_ns,
            fractions=by_budget(means[i]),
            low=by_budget(low[i]),
            high=by_budget(high[i]),
            within_5=by_budget(near[i]),
            cpu_s_per_64=_cpu_s_per_64(runs[i]),
        )
        for i, space in enumerate(spaces)
    )
    return Report(
        tuner=tuner,
        seeds=len(runs[0]),
        spaces=results,
        geomean=by_budget(geomean),
        geomean_low=by_budget(geomean_low),
        geomean_high=by_budget(geomean_high),
        cpu_s_per_64=_cpu_s_per_64([one for of_space in runs for one in of_space]),
    )


@dataclass(frozen=True)
class Difference:
    """By how much one tuner's fraction of the optimum exceeds another's, by budget: `mean`, and the ends `low` and `high` of
    its bootstrap interval, in which runs of the same seed stay together. `of` is a space's name, or "geometric mean"."""

    of: str
    mean: dict[int, float]
    low: dict[int, float]
    high: dict[int, float]


def differences(
    spaces: Sequence[RecordedSpace],
    ours: Sequence[Sequence[Run]],
    theirs: Sequence[Sequence[Run]],
    evaluations: Sequence[int],
) -> list[Difference]:
    """Compares runs of two tuners, for each space one per seed: space by space, and last the geometric means."""
    budgets = sorted(set(evaluations))
    mine, other = _fractions(ours, budgets), _fractions(theirs, budgets)
    means, other_means = mine.mean(axis=1), other.mean(axis=1)
    drawn, other_drawn = _resample(mine), _resample(other)  # the same seeds are drawn for both
    names = [*(f"{space.file}: {space.name}" for space in spaces), "geometric mean"]
    mean = [*(means - other_means), _geometric_mean(means) - _geometric_mean(other_means)]
    spread = [*np.moveaxis(drawn - other_drawn, 1, 0), _geometric_mean(drawn) - _geometric_mean(other_drawn)]
    ends = [np.quantile(resampled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0) for resampled in spread]
    by_budget = functools.partial(_by_budget, budgets)
    return [
        Difference(name, by_budget(exact), by_budget(low), by_budget(high))
        for name, exact, (low, high) in zip(names, mean, ends)
    ]


def _fractions(runs: Sequence[Sequence[Run]], budgets: Sequence[int]) -> NDArray[np.float64]:
    """(spaces, seeds, budgets)"""
    # A run over a space that holds no more ends, and stays at its last fraction.
    return np.array(
        [[[one.fractions[min(b, len(one.fractions)) - 1] for b in budgets] for one in of_space] for of_space in runs]
    )


def _by_budget(budgets: Sequence[int], values: NDArray[np.float64]) -> dict[int, float]:
    return {budget: float(value) for budget, value in zip(budgets, values)}


def _geometric_mean(means: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the spaces, the last axis but one."""
    result: NDArray[np.float64] = np.exp(np.log(np.maximum(means, FLOOR)).mean(axis=-2))
    return result


def _resample(fractions: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bootstrap: the means over seeds drawn with replacement, of each space apart; (resamples, spaces, budgets)."""
    rng = np.random.default_rng(0)
    n_spaces, n_seeds, n_budgets = fractions.shape
    out = np.empty((RESAMPLES, n_spaces, n_budgets))
    for i in range(n_spaces):
        chosen = rng.integers(0, n_seeds, size=(RESAMPLES, n_seeds))
        out[:, i] = fractions[i][chosen].mean(axis=1)
    return out


def _cpu_s_per_64(runs: Sequence[Run]) -> float:
    return 64 * sum(one.cpu_s for one in runs) / max(1, sum(one.proposals for one in runs))


def to_json(report: Report) -> dict[str, Any]:
    """The object of `schedsearch replay --json`; budgets are keys as text."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, tuple):
            return [plain(vars(item)) for item in value]
        return value

    return {name: plain(value) for name, value in vars(report).items()}
