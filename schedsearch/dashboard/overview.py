"""Fills the overview: databases, runs and tasks, from the progress that sources keep."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from schedsearch.dashboard import loose
from schedsearch.dashboard.noise import doubt_of, spread_of, words_of
from schedsearch.dashboard.progress import Progress, RunProgress, counted, race_default, race_winner
from schedsearch.dashboard.ratios import geometric_mean, median_ratio
from schedsearch.dashboard.source import Source, TaskId, task_key
from schedsearch.dashboard.views.overview import DatabaseRow, RunRow, RunState, RunTask, Shares, Side, TaskRow, TemplateRow
from schedsearch.identity import sha256_hex
from schedsearch.measurement import sizes_of_mode
from schedsearch.roofline import has_peaks, suspect_time_ns
from schedsearch.typed import JsonObject
from schedsearch.workload import Workload

SILENT_S = 120.0  # a run that stored nothing for this long is probably dead
_RECENT_S = 60.0


@dataclass(frozen=True)
class Known:
    """What the rows of runs say about the tasks of one source.

    Attributes:
        names: workload id -> name in the workload file.
        configurations: (workload id, target) -> template -> size of its space.
        plain_ns: (workload id, run) -> time of the plain configuration in that run's final race.
        live: ids of runs that go on.
    """

    names: dict[str, str] = field(default_factory=dict)
    configurations: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)
    plain_ns: dict[tuple[str, str], float] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, source: Source, last_at_s: dict[str, float], now_s: float) -> Known:
        known = cls()
        for run in source.runs:
            info, summary = loose.mapping(run["info"]), loose.mapping(run["summary"])
            for task in map(loose.mapping, loose.sequence(info.get("tasks"))):
                target = loose.text(task.get("target") or info.get("target"))
                workload_id = loose.text(task.get("workload_id"))
                if name := loose.text(task.get("name")):
                    known.names[workload_id] = name
                sizes = known.configurations.setdefault((workload_id, target), {})
                for arm in map(loose.mapping, loose.sequence(task.get("templates"))):
                    if (size := loose.whole(arm.get("configurations"))) is not None:
                        sizes[loose.text(arm.get("template"))] = size
            for task in map(loose.mapping, loose.sequence(summary.get("tasks"))):
                plain = loose.mapping(loose.mapping(task.get("race")).get("plain"))
                if time_ns := loose.number(plain.get("time_ns")):
                    known.plain_ns[loose.text(task.get("workload_id")), run["id"]] = time_ns
            started_at_s: float = run["started_at"]
            if run_state(run, last_at_s.get(run["id"], started_at_s), now_s) == "running":
                known.live.add(run["id"])
        return known


def run_state(run: JsonObject, last_at_s: float, now_s: float) -> RunState:
    if run["finished_at"] is not None:
        stopped = loose.text(loose.mapping(run["summary"]).get("stopped"))
        return "interrupted" if stopped in ("interrupted", "lost") else "finished"
    return "running" if now_s - max(last_at_s, run["started_at"]) < SILENT_S else "silent"


def run_key(source: Source, run_id: str) -> str:
    return f"{source.key}.r{sha256_hex(run_id)[:12]}"


def target_key(source: Source, target: str) -> str:
    return f"{source.key}.d{sha256_hex(target)[:12]}"


def database_row(source: Source, rows: Iterable[TaskRow]) -> DatabaseRow:
    """Args:
    rows: of its tasks.
    """
    tasks = list(rows)
    total = Headline.of(tasks)
    return DatabaseRow(
        key=source.key,
        path=source.path,
        name=source.name,
        problem=source.problem or ("" if source.records else "no trials yet: nothing was measured into this file so far"),
        notes=source.notes,
        records=source.records,
        tasks=len(source.tasks),
        runs=len(source.runs),
        size_bytes=source.size_bytes,
        trials=sum(task.trials for task in tasks),
        failures=sum(task.trials - task.valid for task in tasks),
        geomean_speedup=total.geomean,
        raced_tasks=total.raced,
        trusted_tasks=total.trusted,
    )


@dataclass(frozen=True)
class Headline:
    """The speed-up of many tasks: the geometric mean over those whose times can be trusted; None if there is none."""

    geomean: float | None
    raced: int
    trusted: int

    @classmethod
    def of(cls, tasks: Iterable[TaskRow]) -> Headline:
        raced = [task for task in tasks if task.speedup is not None]
        trusted = [task.speedup for task in raced if not task.doubt and task.speedup is not None]
        return cls(geometric_mean(trusted), len(raced), len(trusted))


def last_times(source: Source) -> dict[str, float]:
    """Run id -> when its last record was stored."""
    found: dict[str, float] = {}
    for progress in source.tasks.values():
        for run, done in progress.runs.items():
            found[run] = max(found.get(run, 0.0), done.last_at_s)
    return found


def task_rows(source: Source, now_s: float | None = None) -> dict[TaskId, TaskRow]:
    """One row for each task, in the order of their first record."""
    known = Known.of(source, last_times(source), time.time() if now_s is None else now_s)
    return {task: task_row(source, task, progress, known) for task, progress in source.tasks.items()}


def task_row(source: Source, task: TaskId, progress: Progress, known: Known) -> TaskRow:
    workload = source.workload(task[0])
    op, text = source.workloads.get(task[0], ("unknown", "null"))
    label = workload.label if isinstance(workload, Workload) else f"{op} {task[0][:12]}"
    race = progress.last_race
    best, default = (race_winner(race), race_default(race, progress.defaults)) if race else (progress.best, progress.default)
    best_ns, default_ns = (row.time_ns if row else None for row in (best, default))
    raced = bool(race)
    plain_ns = known.plain_ns.get((task[0], race[0].run)) if race else None
    default_times, best_times = (source.repetitions(row.id) if row else () for row in (default, best))
    doubts = [
        (doubt_of(times), f"{name}: {words_of(times)}") for name, times in (("default", default_times), ("best", best_times))
    ]
    if best and default and best.id == default.id:
        del doubts[0]
    speedup = median_ratio(default_times, best_times) if raced else None
    rate, rate_unit, limit_ns = _rate(workload, best_ns, task)
    sizes = known.configurations.get((task[0], task[1]), {})
    configurations = sum(sizes.values()) if sizes else None
    sized = sizes_of_mode(task[2])
    return TaskRow(
        key=task_key(source.key, task),
        database=source.key,
        name=(known.names.get(task[0]) or label) + (f", code for {sized}" if sized else ""),
        label=label,
        op=op,
        target=task[1],
        mode=task[2],
        workload=loose.parsed(text),
        problem="" if isinstance(workload, Workload) else workload,
        template=best.template if best else None,
        default_ns=default_ns,
        best_ns=best_ns,
        plain_ns=plain_ns,
        raced=raced,
        speedup=default_ns / best_ns if raced and default_ns and best_ns else None,
        speedup_low=speedup.low if speedup else None,
        speedup_high=speedup.high if speedup else None,
        default_spread=spread_of(default_times),
        best_spread=spread_of(best_times),
        doubt=max((doubt for doubt, _ in doubts), key=("", "noisy", "bimodal").index),
        doubts=tuple(words for doubt, words in doubts if doubt),
        over_plain=plain_ns / best_ns if plain_ns and best_ns else None,
        best_id=best.id if best else None,
        default_id=default.id if default else None,
        rate=rate,
        rate_unit=rate_unit,
        limit_ns=limit_ns,
        limit_share=limit_ns / best_ns if limit_ns and best_ns else None,
        trials=progress.trials,
        valid=progress.valid,
        rejected=progress.rejected,
        failures=counted(progress.failures),
        templates=tuple(
            TemplateRow(name, each.trials, each.failures, each.best_ns) for name, each in progress.templates.items()
        ),
        configurations=configurations,
        measured_share=min(1.0, progress.distinct / configurations) if configurations else None,
        since_improvement_trials=progress.trials - progress.improvements[-1][0] if progress.improvements else None,
        since_improvement_s=progress.clock.seconds - progress.improved_s if progress.improvements else None,
        seconds=progress.clock.seconds,
        last_at_s=max((run.last_at_s for run in progress.runs.values()), default=0.0),
        curve=progress.curve,
        live=any(run in known.live for run in progress.runs),
    )


def _rate(workload: Workload | str, best_ns: float | None, task: TaskId) -> tuple[float | None, str, float | None]:
    """Rate of the best, its unit, and the time of the device's limit where the peaks of the device are known."""
    if isinstance(workload, str) or workload.op == "foreign":
        return None, "", None
    limit_ns = suspect_time_ns(workload, task[1], task[2]) if has_peaks(task[1]) else None
    if workload.flops:
        return workload.flops / best_ns if best_ns else None, "GFLOP/s", limit_ns
    return workload.min_bytes / best_ns if best_ns else None, "GB/s", limit_ns


def run_rows(source: Source, now_s: float | None = None) -> list[RunRow]:
    """The runs of a source, the newest first."""
    now = time.time() if now_s is None else now_s
    parts: dict[str, list[tuple[TaskId, RunProgress]]] = {}
    for task, progress in source.tasks.items():
        for run_id, done in progress.runs.items():
            parts.setdefault(run_id, []).append((task, done))
    rows = [_run_row(source, run, parts.get(run["id"], []), now) for run in source.runs]
    return sorted(rows, key=lambda row: -row.started_at_s)


def _run_row(source: Source, run: JsonObject, parts: Sequence[tuple[TaskId, RunProgress]], now_s: float) -> RunRow:
    info, summary = loose.mapping(run["info"]), loose.mapping(run["summary"])
    options = loose.mapping(info.get("options"))
    last_at_s = max((done.last_at_s for _, done in parts), default=run["started_at"])
    state = run_state(run, last_at_s, now_s)
    end_s = run["finished_at"] if run["finished_at"] is not None else now_s if state == "running" else last_at_s
    told_s = loose.number(summary.get("wall_s"))  # of an open run: when it last noted its shares
    wall_s = max(0.0, told_s if told_s and run["finished_at"] is not None else end_s - run["started_at"])
    trials = sum(done.trials for _, done in parts)
    rate = _recent_rate(source, run["id"], parts, now_s) if state == "running" else trials / wall_s if wall_s else None
    budget, budget_s = loose.whole(info.get("trials")), loose.number(info.get("time_s"))
    left = []
    if state == "running":
        if budget is not None and rate:
            left.append(max(0, budget - trials) / rate)
        if budget_s is not None:
            left.append(max(0.0, budget_s - wall_s))
    seconds = [done.build_s + done.run_s for _, done in parts]
    return RunRow(
        key=run_key(source, run["id"]),
        database=source.key,
        id=run["id"],
        state=state,
        target=loose.text(info.get("target")),
        tuner=loose.text(options.get("tuner")),
        seed=loose.whole(options.get("seed")),
        started_at_s=run["started_at"],
        finished_at_s=run["finished_at"],
        last_at_s=last_at_s,
        wall_s=wall_s,
        phase=loose.text(summary.get("phase")) if state == "running" else "",
        stopped=loose.text(summary.get("stopped")),
        trials=trials,
        failures=sum(done.failures for _, done in parts),
        budget_trials=budget,
        budget_s=budget_s,
        trials_per_s=rate,
        left_s=min(left, default=None),
        shares=_shares(summary, parts, wall_s),
        tasks=tuple(
            RunTask(
                task_key(source.key, task), done.trials, done.trials / max(1, trials), each / sum(seconds) if each else 0.0
            )
            for (task, done), each in zip(parts, seconds)
        ),
        options=options,
        toolchain={name: str(version) for name, version in loose.mapping(info.get("toolchain")).items()},
    )


def _shares(summary: JsonObject, parts: Sequence[tuple[TaskId, RunProgress]], wall_s: float) -> Shares | None:
    if not wall_s:
        return None
    builders = sum(done.build_s for _, done in parts) / wall_s
    told = loose.mapping(summary.get("shares"))
    values = [loose.number(told.get(name)) for name in ("device", "build", "tuner", "preparing")]
    device, build, tuner, preparing = values
    if device is None or build is None or tuner is None:
        return Shares(sum(done.run_s for _, done in parts) / wall_s, None, None, None, None, builders)
    preparing = preparing or 0.0
    return Shares(device, build, tuner, preparing, max(0.0, 1 - device - build - tuner - preparing), builders)


def _recent_rate(source: Source, run_id: str, parts: Sequence[tuple[TaskId, RunProgress]], now_s: float) -> float | None:
    """Trials per second of the last minute of a running run."""
    started_at_s = min((done.first_at_s for _, done in parts), default=now_s)
    window_s = min(_RECENT_S, now_s - started_at_s)
    recent = sum(at_s > now_s - window_s for at_s in source.recent(run_id))
    return recent / window_s if window_s > 0 else None


def sides(source: Source) -> list[Side]:
    """The parts of a source that can be compared: all of it, each of several devices, each run that measured something."""
    targets = list(dict.fromkeys(task[1] for task in source.tasks))
    found = [Side(source.key, "database", source.name)]
    if len(targets) > 1:
        found += [Side(target_key(source, target), "target", f"{source.name}: {target}") for target in targets]
    runs = run_sides(source)
    return found + (runs if len(runs) > 1 else [])


def run_sides(source: Source) -> list[Side]:
    """Each run that measured something."""
    measured = {run for progress in source.tasks.values() for run in progress.runs}
    return [
        Side(run_key(source, run["id"]), "run", f"{source.name}: run {run['id']}")
        for run in source.runs
        if run["id"] in measured
    ]


def tasks_of(source: Source, side: Side) -> set[tuple[str, str]]:
    """The (workload id, mode) that a side has valid trials of."""
    found = set()
    for (workload, target, mode), progress in source.tasks.items():
        if side.kind == "target" and target_key(source, target) != side.key:
            continue
        runs = [run for run in progress.runs if side.kind != "run" or run_key(source, run) == side.key]
        if any(progress.runs[run].measured for run in runs):
            found.add((workload, mode))
    return found
