"""One database as the dashboard sees it: opened read-only, followed while others write to it, replace it or remove it.

A `Source` never raises for what a file is. If the file cannot be read, `problem` says why, and what was read before stays.
It holds no transaction between two calls, so it never keeps a writer waiting, and it writes nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schedsearch.dashboard import loose
from schedsearch.dashboard.progress import COLUMNS, Progress, Row
from schedsearch.dashboard.trials import COLUMNS as COLUMNS_OF_TRIALS
from schedsearch.dashboard.trials import Trials
from schedsearch.errors import SchedsearchError, WorkloadError
from schedsearch.identity import canonical_json, sha256_hex
from schedsearch.measurement import Outcome
from schedsearch.records.location import short_name
from schedsearch.records.store import Store
from schedsearch.typed import JsonObject
from schedsearch.workload import Workload

TaskId = tuple[str, str, str]  # workload id, target key, mode

_NOTES = 20
_TRIALS_IN_MEMORY = 60_000  # of the tasks that were looked at last
_RECENT = 5000
_BUSY_TIMEOUT_S = 2.0


def task_key(source_key: str, task: TaskId) -> str:
    """A short name that is fit for a path, and the same whenever the same file is opened."""
    return f"{source_key}.t{sha256_hex(canonical_json(list(task)))[:12]}"


class Source:
    """A database that may be missing, empty, damaged, newer, locked, or replaced at any moment.

    All attributes are of the last `refresh`. Hold `lock` while you read them.

    Args:
        key: names it in paths: "0", "1", ...
        path: as the user gave it; it may be the URL of a database on a server.

    Attributes:
        problem: why the file cannot be read; "" if it can.
        tasks: in the order of their first record.
        runs: rows of `Store.runs`.
        workloads: id -> (operator, JSON).
        size_bytes: what the database takes on the disk.
        revision: grows with every change.
    """

    def __init__(self, key: str, path: str | Path) -> None:
        self.key, self.path = key, str(path)
        self.lock = threading.RLock()
        self.revision = 0
        self.problem = ""
        self._store: Store | None = None
        self._identity: tuple[int, int] | None = None
        self._forget()

    def _forget(self) -> None:
        self.tasks: dict[TaskId, Progress] = {}
        self.runs: list[JsonObject] = []
        self.workloads: dict[str, tuple[str, str]] = {}
        self.last_id = 0
        self.records = self.size_bytes = 0
        self._stamp: tuple[Any, ...] = ()
        self._recent: dict[str, deque[float]] = {}
        self._keys: dict[str, TaskId] = {}
        self._trials: OrderedDict[TaskId, Trials] = OrderedDict()
        self._repetitions: dict[int, tuple[float, ...]] = {}

    @property
    def name(self) -> str:
        return short_name(self.path)

    @property
    def notes(self) -> tuple[str, ...]:
        """The damaged rows that were skipped."""
        if self._store is None:
            return ()
        found = [str(each) for each in self._store.damage]
        return tuple(found[:_NOTES] + ([f"and {len(found) - _NOTES} more damaged rows"] if len(found) > _NOTES else []))

    def close(self) -> None:
        with self.lock:
            if self._store is not None:
                self._store.close()
            self._store = self._identity = None

    def refresh(self) -> bool:
        """Reads what is new. Returns whether anything changed, `problem` included."""
        with self.lock:
            before = self.problem, self._stamp
            try:
                self._reopen_if_replaced()
                assert self._store is not None
                stamp = self._store.stamp()
                if stamp != self._stamp:
                    self._read(self._store, stamp)
                self.problem = ""
            except (SchedsearchError, OSError) as error:
                self.problem = str(error) or type(error).__name__
                self.close()
            changed = (self.problem, self._stamp) != before
            self.revision += changed
            return changed

    def _reopen_if_replaced(self) -> None:
        """A file may be replaced by another one; a database on a server keeps its name."""
        try:
            found = Path(self.path).stat()
            identity: tuple[int, int] | None = (found.st_dev, found.st_ino)
        except OSError:
            identity = None  # opening it says why
        if self._store is None or identity != self._identity:
            self.close()
            store = Store.open(self.path, readonly=True, busy_timeout_s=_BUSY_TIMEOUT_S)
            store.damage.warns = False
            self._store, self._identity = store, identity
            if self._stamp and store.stamp()[0] != self._stamp[0]:
                self._forget()  # another database is there now

    def _read(self, store: Store, stamp: tuple[Any, ...]) -> None:
        if self._stamp and (stamp[0] != self._stamp[0] or (stamp[1] or 0) < self.last_id):
            self._forget()
        self.runs = store.runs()
        self.workloads = store.workloads()
        starts = {run["id"]: run["started_at"] for run in self.runs}
        defaults = self._defaults()
        for record in store.columns((*COLUMNS, "workload_id", "target_key", "mode"), after=self.last_id):
            row, task = Row._make(record[:-3]), record[-3:]
            progress = self.tasks.get(task)
            if progress is None:
                known = defaults.get((task[0], task[1]), set())
                progress = self.tasks[task] = Progress(task[0], task[1], task[2], known)
                self._keys[task_key(self.key, task)] = task
            else:
                progress.defaults |= defaults.get((task[0], task[1]), set())
            progress.add(row, starts.get(row.run))
            if not row.race and row.outcome != Outcome.REJECTED:
                self._recent.setdefault(row.run, deque(maxlen=_RECENT)).append(row.finished_at)
            self.last_id = row.id
            self.records += 1
        self.size_bytes = store.size_bytes
        self._stamp = stamp

    def _defaults(self) -> dict[tuple[str, str], set[tuple[str, str]]]:
        """(workload id, target) -> the (template, config JSON) that runs name as their defaults."""
        found: dict[tuple[str, str], set[tuple[str, str]]] = {}
        for run in self.runs:
            info = loose.mapping(run["info"])
            for task in loose.sequence(info.get("tasks")):
                task = loose.mapping(task)
                target = loose.text(task.get("target") or info.get("target"))
                known = found.setdefault((loose.text(task.get("workload_id")), target), set())
                for arm in loose.sequence(task.get("templates")):
                    arm = loose.mapping(arm)
                    if isinstance(arm.get("default"), dict):
                        known.add((loose.text(arm.get("template")), canonical_json(arm["default"])))
        return found

    def recent(self, run_id: str) -> Sequence[float]:
        """When the last trials of a run were measured, up to 5,000."""
        return tuple(self._recent.get(run_id, ()))

    def task_of(self, key: str) -> TaskId | None:
        return self._keys.get(key)

    def trials(self, task: TaskId) -> Trials:
        """All records of a task at the last `refresh`. While the file cannot be read, those that were read before.

        Raises:
            SchedsearchError: the file cannot be read now.
        """
        with self.lock:
            found = self._trials.pop(task, None) or Trials()
            self._trials[task] = found
            while len(self._trials) > 1 and sum(map(len, self._trials.values())) > _TRIALS_IN_MEMORY:
                self._trials.popitem(last=False)
            if self._store is not None and found.stamp != self._stamp:
                starts = {run["id"]: run["started_at"] for run in self.runs}
                found.add(self._store.columns(COLUMNS_OF_TRIALS, after=found.last_id, task=task), starts)
                found.stamp = self._stamp
            return found

    def repetitions(self, record_id: int) -> tuple[float, ...]:
        """All repetitions of a record in ns, kept; () if it has none or cannot be read now."""
        with self.lock:
            found = self._repetitions.get(record_id)
            if found is None and self._store is not None:
                try:
                    found = self._repetitions[record_id] = self._store.row(record_id).measurement.times_ns
                except SchedsearchError:
                    return ()
            return found or ()

    @property
    def store(self) -> Store | None:
        """The open store; None while the file cannot be read. Use it while you hold `lock`."""
        return self._store

    def workload(self, workload_id: str) -> Workload | str:
        """A workload, or why it cannot be read here."""
        found = self.workloads.get(workload_id)
        if found is None:
            return "its workload is damaged or missing"
        try:
            return Workload.from_json(found[1])
        except WorkloadError as error:
            return str(error)
