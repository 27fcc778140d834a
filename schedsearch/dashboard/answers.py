"""The answers of the dashboard by path, from any number of databases. The server and the report take them from here."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from schedsearch.dashboard import effects, overview
from schedsearch.dashboard.compare import compare_view
from schedsearch.dashboard.importance import Importances
from schedsearch.dashboard.kernels import Kernels
from schedsearch.dashboard.listing import records_view
from schedsearch.dashboard.machine_code import Listings
from schedsearch.dashboard.replays import replay_view
from schedsearch.dashboard.source import Source, TaskId, task_key
from schedsearch.dashboard.task import task_view
from schedsearch.dashboard.timeline import run_view
from schedsearch.dashboard.trial import TrialViews
from schedsearch.dashboard.views.compare import CompareView
from schedsearch.dashboard.views.importance import ImportanceView
from schedsearch.dashboard.views.overview import Overview, Side, TaskRow
from schedsearch.dashboard.views.task import PairEffect
from schedsearch.dashboard.views.values import JSON, to_json
from schedsearch.errors import SchedsearchError

_BODIES = 8  # answers kept as text, the last ones
_COMPARED_SIDES = 6  # of which a report holds every pair


class UnknownPathError(LookupError):
    """There is no such answer; the text says why."""


class Answers:
    """Any thread may call its methods; one call runs at a time.

    Args:
        databases: paths of databases; they need not exist yet.
        replays: files of `schedsearch replay --json`.
        notes: remarks for the overview.

    Attributes:
        revision: grows with every change of a database.
        cost_s: seconds that the slowest of the last answers took; those who push changes wait in proportion to it.
    """

    def __init__(self, databases: Sequence[str], replays: Sequence[str] = (), notes: Sequence[str] = ()) -> None:
        self.sources = [Source(str(index), path) for index, path in enumerate(databases)]
        self.replays, self.notes = tuple(replays), tuple(notes)
        self.revision = 0
        self.cost_s = 0.0
        self.listings = Listings()
        self.kernels = Kernels()
        self._importances = Importances()
        self._lock = threading.RLock()
        self._bodies: OrderedDict[tuple[str, ...], tuple[tuple[Any, ...], bytes]] = OrderedDict()
        self._pairs: dict[str, tuple[int, tuple[PairEffect, ...]]] = {}
        self._rows_seen: dict[str, int] = {}
        self._going: dict[str, set[str]] = {}  # source key -> runs without an end at the last refresh

    def close(self) -> None:
        with self._lock:
            for source in self.sources:
                source.close()

    def refresh(self) -> list[str]:
        """Reads what is new in the databases. Returns the paths whose answers changed, [] if nothing did."""
        with self._lock:
            changed = [source for source in self.sources if source.refresh()]
            if not changed:
                return []
            self.revision += 1
            paths = ["overview", "records"]
            for source in changed:
                going = {overview.run_key(source, run["id"]) for run in source.runs if run["finished_at"] is None}
                paths += [f"run/{key}" for key in sorted(going | self._going.get(source.key, set()))]
                self._going[source.key] = going
                for task, progress in source.tasks.items():
                    key = task_key(source.key, task)
                    if self._rows_seen.get(key) != progress.rows:
                        self._rows_seen[key] = progress.rows
                        paths.append(f"task/{key}")
            for key in set(self._rows_seen).difference(self.task_keys()):  # of a database that was replaced
                del self._rows_seen[key]
                paths.append(f"task/{key}")
            return paths

    def body(self, path: str, query: Mapping[str, str] | None = None) -> bytes:
        """The answer as JSON text in UTF-8; the last ones are kept as long as nothing changes.

        Raises:
            UnknownPathError: there is no such answer.
        """
        if path.startswith("importance/"):  # it is slow, and kept elsewhere; nobody else should wait
            return _text(self.get(path))
        wanted = dict(query or {})
        key = path, *(f"{name}={value}" for name, value in sorted(wanted.items()))
        with self._lock:
            state = self.revision, int(time.time()) if self._has_open_runs() else 0
            known = self._bodies.pop(key, None)
            if known is None or known[0] != state:
                start = time.perf_counter()
                known = state, _text(self.get(path, wanted))
                self.cost_s = max(time.perf_counter() - start, self.cost_s / 2)
            self._bodies[key] = known
            while len(self._bodies) > _BODIES:
                self._bodies.popitem(last=False)
            return known[1]

    def _has_open_runs(self) -> bool:
        return any(run["finished_at"] is None for source in self.sources for run in source.runs)

    def get(self, path: str, query: Mapping[str, str] | None = None) -> JSON:
        """The JSON value of a path; see `views` for the paths.

        Raises:
            UnknownPathError: there is no such answer.
        """
        kind, *parts = path.split("/")
        if kind == "importance" and len(parts) == 1:
            return to_json(self.importance(parts[0]))
        with self._lock:
            try:
                match kind, parts:
                    case "overview", []:
                        return to_json(self.overview())
                    case "task", [key]:
                        return self._task(key)
                    case "trial", [key]:
                        return self._trial(key)
                    case "run", [key]:
                        return self._run(key)
                    case "compare", [a, b]:
                        return to_json(self.compare(a, b))
                    case "records", []:
                        return to_json(records_view(self.sources, self._all_rows(), query or {}))
                    case "replay", []:
                        return to_json(replay_view(self.replays))
            except SchedsearchError as error:
                raise UnknownPathError(str(error)) from error
            raise UnknownPathError(f"there is no answer of this name: {path[:100]!r}")

    def overview(self) -> Overview:
        now_s = time.time()
        rows = {source.key: list(overview.task_rows(source, now_s).values()) for source in self.sources}
        tasks = [row for source in self.sources for row in rows[source.key]]
        total = overview.Headline.of(tasks)
        runs = [row for source in self.sources for row in overview.run_rows(source, now_s)]
        sides = self.sides()
        compared = self.compared(sides)
        content = {"overview": True, "runs": runs, "compare": compared, "records": tasks, "replay": self.replays}
        return Overview(
            revision=self.revision,
            version=package_version(),
            now_s=now_s,
            notes=self.notes,
            pages=tuple(name for name, found in content.items() if found),
            databases=tuple(overview.database_row(source, rows[source.key]) for source in self.sources),
            runs=tuple(sorted(runs, key=lambda run: -run.started_at_s)),
            tasks=tuple(tasks),
            sides=tuple(sides),
            compared=tuple(compared),
            replays=tuple(path.replace("\\", "/").rpartition("/")[2] for path in self.replays),
            geomean_speedup=total.geomean,
            raced_tasks=total.raced,
            trusted_tasks=total.trusted,
        )

    def compare(self, a: str, b: str) -> CompareView:
        """Two sides by their keys. Raises UnknownPathError if there is no such side."""
        with self._lock:
            return compare_view(self._side(a), self._side(b), self._all_rows())

    def sides(self) -> list[Side]:
        return [side for source in self.sources for side in overview.sides(source)]

    def compared(self, sides: Sequence[Side]) -> list[tuple[str, str]]:
        """The pairs with a task in common, of up to six sides, whole databases and devices first."""
        ranked = sorted(sides, key=lambda side: ("database", "target", "run").index(side.kind))[:_COMPARED_SIDES]
        tasks = {side.key: overview.tasks_of(self._source(side.key), side) for side in ranked}
        return [
            (one.key, other.key)
            for one in ranked
            for other in ranked
            if one is not other and tasks[one.key] & tasks[other.key]
        ]

    def task_keys(self) -> list[str]:
        return [task_key(source.key, task) for source in self.sources for task in source.tasks]

    def find_task(self, key: str) -> tuple[Source, TaskId]:
        """Raises UnknownPathError if there is no such task."""
        source = self._source(key)
        task = source.task_of(key)
        if task is None:
            raise UnknownPathError(
                f"there is no task {key[:40]!r}"
                + (f"; {source.problem}" if source.problem else "; it may have been replaced")
            )
        return source, task

    def pairs(self, key: str) -> tuple[PairEffect, ...]:
        """The pairs of a task's trials that differ in one knob; kept until it has new trials."""
        source, task = self.find_task(key)
        trials = source.trials(task)
        known = self._pairs.get(key)
        if known is None or known[0] != len(trials):
            knobs, configs = trials.knobs()
            found = [pair for each in trials.searched(knobs, configs) for pair in effects.pair_effects(each)]
            known = self._pairs[key] = len(trials), tuple(found)
        return known[1]

    def importance(self, key: str) -> ImportanceView:
        """What a cost model says about the knobs of a task. Other answers need not wait while it is trained.

        Raises:
            UnknownPathError: there is no such task, or its database cannot be read now.
        """
        with self._lock:
            source, task = self.find_task(key)
            try:
                trials = source.trials(task)
            except SchedsearchError as error:
                raise UnknownPathError(str(error)) from error
            database, count = trials.stamp[:1], len(trials)
            if known := self._importances.known(key, database, count):
                return known
            searched = trials.searched(*trials.knobs())
        return self._importances.train(key, database, count, searched)

    def _task(self, key: str, keep: set[int] | None = None) -> JSON:
        source, task = self.find_task(key)
        row = overview.task_rows(source)[task]
        view = to_json(task_view(source, task, row, time.time(), keep))
        if source.problem:
            view["notes"].append(f"this is what was read before: {source.problem}")
        return view

    def sampled_task(self, key: str, keep: set[int]) -> JSON:
        """The view of a task whose columns show some trials only; all figures are of all trials."""
        return self._task(key, keep)

    def _trial(self, key: str) -> JSON:
        source, number = self._source(key), key.partition(".")[2]
        if not (number.isascii() and number.isdigit() and len(number) < 19):
            raise UnknownPathError(f"{key[:40]!r} is not the key of a trial")
        if source.store is None:
            raise UnknownPathError(source.problem)
        record = source.store.row(int(number))
        task = record.workload_id, record.target, record.measurement.mode
        if task not in source.tasks:
            source.refresh()
        rows = overview.task_rows(source)
        if task not in rows:
            raise UnknownPathError(f"the task of trial {key} cannot be read")
        return self.trial_views(source, task).json(record, listing=self.listings.get)

    def trial_views(self, source: Source, task: TaskId) -> TrialViews:
        """What makes the views of a task's trials as they are now. The task has a row in the overview."""
        row = overview.task_rows(source)[task]
        return TrialViews(source, row, self.pairs(row.key), self.kernels)

    def _run(self, key: str) -> JSON:
        source = self._source(key)
        for row in overview.run_rows(source):
            if row.key == key:
                return to_json(run_view(source, row, overview.task_rows(source)))
        raise UnknownPathError(f"there is no run {key[:40]!r}" + (f"; {source.problem}" if source.problem else ""))

    def run_keys(self) -> list[str]:
        return [overview.run_key(source, run["id"]) for source in self.sources for run in source.runs]

    def _source(self, key: str) -> Source:
        name = key.partition(".")[0]
        for source in self.sources:
            if source.key == name:
                return source
        raise UnknownPathError(f"there is no database {name[:20]!r}")

    def _side(self, key: str) -> tuple[Source, Side]:
        source = self._source(key)
        for side in (
            *overview.sides(source),
            *overview.run_sides(source),
        ):  # the only run of a database is no side of its own
            if side.key == key:
                return source, side
        raise UnknownPathError(f"there is nothing to compare under {key[:40]!r}")

    def _all_rows(self) -> dict[str, dict[TaskId, TaskRow]]:
        return {source.key: overview.task_rows(source) for source in self.sources}


def _text(value: JSON) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "backslashreplace")


def split_files(files: Iterable[str]) -> tuple[list[str], list[str]]:
    """Databases, and files of `schedsearch replay --json` by their name's end."""
    given = list(files)
    return [name for name in given if not name.endswith(".json")], [name for name in given if name.endswith(".json")]


def package_version() -> str:
    try:
        return version("schedsearch")
    except PackageNotFoundError:
        return "unknown"
