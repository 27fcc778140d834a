"""Keeps the kernels of one database on one device. Each is found once, and replaced when a better one is recorded."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from schedsearch.deadline import NEVER, Deadline
from schedsearch.device import Device, open_device
from schedsearch.device.detect import detect
from schedsearch.errors import DatabaseError, UsageError
from schedsearch.measurement import COLD_GRAPH
from schedsearch.records.damage import DamageError
from schedsearch.records.lookup import Lookup
from schedsearch.runtime.explanation import Explanation, explain_ladder
from schedsearch.runtime.kernel import Kernel
from schedsearch.runtime.ladder import RUNGS, Found, Ladder, check_rungs
from schedsearch.target import Target
from schedsearch.text import quoted
from schedsearch.workload import Workload
from schedsearch.workload_range import WorkloadRange

if TYPE_CHECKING:
    from schedsearch.backend import BuildResult
    from schedsearch.measure.ahead import Recipe
    from schedsearch.measure.code_cache import CodeCache

DEFAULT_DB = "records.db"

_Version = tuple[int, int, int]  # device and inode of the file, and the number of its content
_Best = tuple[int, str | None]  # record and artifact


@dataclass
class _Entry:
    kernel: Kernel
    best: _Best | None  # the exact record when the kernel was found
    version: _Version | None  # of the database when that was last looked at


class KernelCache:
    """The kernels that a program uses, from one database on one device.

    The first time, `kernel` finds a kernel as `schedsearch.compile` does. Later it returns the same object until the
    database has another best record of that workload; this check costs about 10 us a call. All kernels share one open
    device and one open database. Methods may be called from any thread.

    A kernel from the nearest or the default rung is kept until the workload itself is recorded, so that a tuning run
    beside the program does not make it build kernels repeatedly. The cache closes its kernels; do not close them yourself.

    Args:
        db: a live database or one written by `records export --deploy`. It may be missing when `allow` has the rung default,
            and may appear or be replaced later.
        target: auto, cpu, cuda, cuda:N, or a detected `Target`.
        allow: the rungs that may serve; see `schedsearch.compile`.
        mode: how the records were timed.

    Raises:
        UsageError: an unknown rung.
        DatabaseError, DeviceError: the database cannot be used, or the device does not exist.

    Example:
        >>> with schedsearch.KernelCache("records.db", "cuda") as kernels:
        ...     y = kernels.kernel(workload)(x, weight)
    """

    def __init__(
        self,
        db: str | os.PathLike[str] = DEFAULT_DB,
        target: str | Target = "auto",
        *,
        allow: Iterable[str] = RUNGS,
        mode: str = COLD_GRAPH,
    ) -> None:
        self.db, self.mode = Path(db), mode
        self.target = detect(target) if isinstance(target, str) else target
        self.allowed = check_rungs(allow)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._entries: dict[Workload, _Entry] = {}
        self._lookups: list[Lookup] = []  # the last is in use; a thread may still read from an earlier one
        self._file: tuple[int, int] | None = None  # device and inode of the last one's file
        self._seen: _Version | None = None
        self._device = LazyDevice(self.target)
        self._code: CodeCache | None = None
        self._closed = False
        self._open_lookup()

    def kernel(self, workload: Workload) -> Kernel:
        """The best kernel for a workload, without searching.

        Raises:
            NoRecordError, WrongResultError: as `schedsearch.compile`.
            UsageError: `workload` is not a Workload, or the cache was closed or made in another process.
            DatabaseError, DeviceError: the database or the device cannot be used.
        """
        entry = self._entries.get(workload) if isinstance(workload, Workload) else None
        if entry is not None and self._pid == os.getpid() and entry.version == self._version():
            return entry.kernel
        check_workload(workload)
        with self._lock:
            self._refresh()
            entry = self._entries.get(workload)
            best = self._best(workload)
            if entry is None or entry.best != best:
                entry = self._entries[workload] = _Entry(self._find(workload), best, None)
            entry.version = self._seen
            return entry.kernel

    def build_ahead(
        self, workloads: Iterable[Workload], also: Iterable[Recipe[BuildResult]] = (), deadline: Deadline = NEVER
    ) -> int:
        """Compiles the kernels that `kernel` would have to build, and those that verify them, in a process for each core.
        `kernel` compiles nothing then, unless a kernel turns out to be wrong.

        Args:
            also: what is needed besides; `code` has it then.
            deadline: what is not compiled by then is left to `kernel`.

        Returns:
            How many workloads this was done for. A kernel that cannot be compiled ahead is left to `kernel`.

        Raises:
            UsageError: the cache was closed, or made in another process.
            DeviceError: no compiler process can start.
        """
        from schedsearch.measure.ahead import compile_ahead, verifying_recipes

        with self._lock:
            self._refresh()
            ladders = {each: self._ladder(each) for each in workloads if each not in self._entries}
        code, target, others = self.code, self.target, list(also)
        ways = {each: ladder.viable() for each, ladder in ladders.items()}
        done = set()
        while (ways or others) and not deadline.passed:  # once, and again for those whose way the compiler refuses
            kernels: dict[Workload, Recipe[BuildResult]] = {}
            for workload in list(ways):
                way = next(ways[workload], None)
                if way is None or not way.verifies:
                    del ways[workload]
                    continue
                others += verifying_recipes(workload, target)
                if way.recipe is None:
                    del ways[workload]
                else:
                    kernels[workload] = way.recipe()
            built = compile_ahead([*kernels.values(), *others], code, target, deadline)
            done |= {workload for workload, recipe in kernels.items() if recipe.name in built}
            others = []
            ways = {each: ways[each] for each, recipe in kernels.items() if code.refusal(recipe.name) is not None}
        return len(done)

    @property
    def code(self) -> CodeCache:
        """What was compiled ahead, and what verifies kernels."""
        from schedsearch.measure.code_cache import CodeCache

        with self._lock:
            self._code = CodeCache() if self._code is None else self._code
            return self._code

    def explain(self, workload: Workload) -> Explanation:
        """What `kernel` would do for a new workload; builds and loads nothing. Raises the errors of `kernel`."""
        check_workload(workload)
        with self._lock:
            self._refresh()
            return explain_ladder(workload, self.target, self._ladder(workload))

    def close(self) -> None:
        """Unloads all kernels and closes device and database; does nothing the second time.

        The kernels must not be used afterwards.
        """
        with self._lock:
            self._closed = True
            entries, self._entries = self._entries, {}
            for entry in entries.values():
                entry.kernel.close()
            self._device.close()
            while self._lookups:
                self._lookups.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _version(self) -> _Version | None:
        """The present state of the database; None if there is none. A file that vanished counts as unchanged."""
        lookup = self._lookups[-1] if self._lookups else None
        if lookup is None:
            return None if not self.db.exists() else (0, 0, 0)
        try:
            status = self.db.stat()
            file = status.st_dev, status.st_ino
        except OSError:
            file = self._file or (0, 0)
        return (*file, lookup.version())

    def _refresh(self) -> None:
        """Notices changes of the database since the last call."""
        if self._closed or self._pid != os.getpid():
            state = "was closed" if self._closed else "was made in another process"
            raise UsageError(f"this KernelCache {state}; make a new one")
        version = self._version()
        if version is None or version == self._seen:
            return
        if version[:2] != self._file:
            self._open_lookup()
            version = self._version()
        self._lookups[-1].refresh()
        self._seen = version

    def _open_lookup(self) -> None:
        """Opens the file that is at `db` now."""
        lookup = open_lookup(self.db, self.allowed)
        if lookup is not None:
            status = self.db.stat()
            self._lookups.append(lookup)
            self._file = status.st_dev, status.st_ino

    def _best(self, workload: Workload) -> _Best | None:
        try:
            row = self._lookups[-1].exact(workload.id, self.target.key, self.mode) if self._lookups else None
        except DamageError:  # the ladder gives it as the reason of its rung, and goes on
            return None
        return None if row is None else (row.record_id, row.artifact_sha256)

    def _find(self, workload: Workload) -> Kernel:
        return make_kernel(workload, self.target, self._ladder(workload).climb(self._device.open))

    def _ladder(self, workload: Workload) -> Ladder:
        lookup = self._lookups[-1] if self._lookups else None
        return Ladder(workload, self.target, lookup, self.db, self.mode, self.allowed, lambda: self.code)


class LazyDevice:
    """A device that is opened when it is needed."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._device: Device | None = None

    def open(self) -> Device:
        """The device, opened the first time. Raises DeviceError when it cannot be opened."""
        self._device = self._device or open_device(self._target)
        return self._device

    def close(self) -> None:
        """Closes the device if it was opened; does nothing the second time."""
        device, self._device = self._device, None
        if device is not None:
            device.close()


def open_lookup(db: Path, allowed: Collection[str]) -> Lookup | None:
    """The database; None if there is no file and none is needed.

    Raises:
        DatabaseError: there is no file, or it cannot be used.
    """
    if db.exists():
        return Lookup(db)
    if "default" in allowed:
        return None
    raise DatabaseError(f"there is no database {db}; tune first, or name the database with --db")


def make_kernel(workload: Workload, target: Target, found: Found, on_close: Callable[[], None] = lambda: None) -> Kernel:
    device = target.kind, target.ordinal if target.kind == "cuda" else 0
    return Kernel(workload, found.loaded, device, found.provenance, found.verified, on_close)


def check_workload(workload: object) -> None:
    """Raises UsageError when `workload` is not a Workload."""
    if isinstance(workload, WorkloadRange):
        raise UsageError(
            f"{workload.label} is a range of sizes, which only schedsearch.compile takes; keep its RangeKernel, "
            f"or give the workload of one size: range.at({workload.low})"
        )
    if not isinstance(workload, Workload):
        raise UsageError(f"workload is {quoted(workload)}; give a schedsearch.Workload")
