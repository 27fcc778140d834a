"""Keeps the kernels of one database on one device. Each is found once, and replaced when a better one is recorded.

See docs/decisions/042-kernel-cache.md.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from schedsearch.closing import Closing
from schedsearch.deadline import NEVER, Deadline
from schedsearch.device import Device, open_device
from schedsearch.device.detect import detect
from schedsearch.errors import DatabaseError, UsageError
from schedsearch.measurement import COLD_GRAPH, DEFAULT_DB
from schedsearch.records.damage import DamageError
from schedsearch.records.location import require_file
from schedsearch.records.lookup import Lookup
from schedsearch.records.shipped import shipped_records
from schedsearch.runtime.alternatives import Alternative, Found, Miss
from schedsearch.runtime.explanation import Explanation, explain_fallback
from schedsearch.runtime.fallback import LEVELS, Fallback, check_levels
from schedsearch.runtime.kernel import Kernel
from schedsearch.target import Target
from schedsearch.text import quoted
from schedsearch.workload import Workload, WorkloadRange

if TYPE_CHECKING:
    from schedsearch.backend import BuildResult
    from schedsearch.backend.code_cache import CodeCache
    from schedsearch.runtime.ahead import Compilers, Recipe


_File = tuple[int, int]  # device and inode
_Version = tuple[int, int]  # how many files were opened before this one, and the number of its content
_CHANGED = 0, 0  # of a file that is not open yet
_Best = tuple[int, str | None, str, int, str]  # record, artifact, template with version, and configuration


@dataclass
class _Entry:
    kernel: Kernel
    best: _Best | None  # the exact record when the kernel was found
    version: _Version | None  # of the database when that was last looked at


class KernelCache(Closing):
    """The kernels that a program uses, from one database on one device.

    The first time, `kernel` finds a kernel as `schedsearch.compile` does. Later it returns the same object until the
    database has another best record of that workload; this check costs about 10 us a call. All kernels share one open
    device and one open database. Methods may be called from any thread.

    A kernel from the shipped, nearest or default level is kept until the workload itself is recorded, so that a tuning run
    beside the program does not make it build kernels repeatedly. The cache closes its kernels; do not close them yourself.

    A database that was replaced is closed, and its kernels stay in use unless the new one has others. While the file is
    damaged, calls raise DatabaseError; they go on when it is restored, by renaming a copy or in place. While it is missing
    nothing changes.

    Args:
        db: a live database or one written by `records export --deploy`. It may be missing if `allow` has the level default,
            or shipped and there are shipped records of this kind of device, and may appear or be replaced later.
        target: auto, cpu, cuda, cuda:N, or a detected `Target`.
        allow: the levels that may serve; see `schedsearch.compile`.
        mode: how the records were timed.

    Raises:
        UsageError: an unknown level.
        DatabaseError, DeviceError: the database cannot be used, or the device does not exist.

    Examples:
        >>> with schedsearch.KernelCache("records.db", "cuda") as kernels:
        ...     y = kernels.kernel(workload)(x, weight)
    """

    def __init__(
        self,
        db: str | os.PathLike[str] = DEFAULT_DB,
        target: str | Target = "auto",
        *,
        allow: Iterable[str] = LEVELS,
        mode: str = COLD_GRAPH,
    ) -> None:
        self.db, self.mode = require_file(db), mode
        self.target = detect(target) if isinstance(target, str) else target
        self.allowed = check_levels(allow)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._entries: dict[Workload, _Entry] = {}
        self._lookup: Lookup | None = None
        self._file: _File | None = None  # of the lookup
        self._opened = 0  # number of files so far
        self._readers = 0  # threads that read outside of the lock
        self._replaced: list[Lookup] = []  # from which they may read
        self._seen: _Version | None = None
        self._looked_up: dict[Workload, tuple[_Version | None, Fallback]] = {}  # by `build_ahead`, for `kernel`
        self._device = LazyDevice(self.target)
        self._code: CodeCache | None = None
        self._closed = False
        self._open()

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
            # nothing changes while a database is missing that was there
            best = self._best(workload) if self._lookup or entry is None else entry.best
            if entry is None or entry.best != best:
                kernel = self._find(workload)
                if kernel.level == "shipped":  # the database may have it now
                    self._refresh()
                    best = self._best(workload)
                entry = self._entries[workload] = _Entry(kernel, best, None)
            entry.version = self._seen
            return entry.kernel

    def has_stored(self, workload: Workload) -> bool:
        """Whether the database has machine code of exactly this workload that can be used here: `kernel` then compiles and
        verifies nothing. Raises the errors of `kernel` about the database."""
        with self._reading():
            fallback = self._fallback(workload)
            # Without a record in the mode that is asked for, one in another mode comes next.
            found = (each for each in fallback.alternatives() if not (isinstance(each, Miss) and each.level == "exact"))
            alternative = next(found, None)
            if not isinstance(alternative, Alternative) or alternative.level not in ("exact", "other_mode"):
                return False
            return not alternative.verifies and fallback.obstacle(alternative) is None

    def build_ahead(
        self,
        workloads: Iterable[Workload],
        also: Iterable[Recipe[BuildResult]] = (),
        deadline: Deadline = NEVER,
        compilers: Compilers | None = None,
    ) -> int:
        """Compiles the kernels that `kernel` would have to build, and those that verify them, in a process for each core.
        `kernel` compiles nothing then, unless a kernel turns out to be wrong.

        Args:
            also: what is needed besides; `code` has it then.
            deadline: what is not compiled by then is left to `kernel`.
            compilers: processes that may have been started already.

        Returns:
            How many workloads this was done for. A kernel that cannot be compiled ahead is left to `kernel`.

        Raises:
            UsageError: the cache was closed, or made in another process.
            DeviceError: no compiler process can start.
        """
        with self._reading():
            return self._build_ahead(workloads, list(also), deadline, compilers)

    def _build_ahead(
        self,
        workloads: Iterable[Workload],
        others: list[Recipe[BuildResult]],
        deadline: Deadline,
        compilers: Compilers | None,
    ) -> int:
        from schedsearch.runtime.ahead import compile_ahead, verifying_recipes

        with self._lock:
            fallbacks = {each: self._fallback(each) for each in workloads if each not in self._entries}
            self._looked_up |= {each: (self._seen, fallback) for each, fallback in fallbacks.items()}
        code, target = self.code, self.target
        alternatives = {each: fallback.viable() for each, fallback in fallbacks.items()}
        done = set()
        while (
            alternatives or others
        ) and not deadline.passed:  # once, and again for those whose alternative the compiler refuses
            kernels: dict[Workload, Recipe[BuildResult]] = {}
            for workload in list(alternatives):
                alternative = next(alternatives[workload], None)
                if alternative is None or not alternative.verifies:
                    del alternatives[workload]
                    continue
                others += verifying_recipes(workload, target)
                if alternative.recipe is None:
                    del alternatives[workload]
                else:
                    kernels[workload] = alternative.recipe()
            built = compile_ahead([*kernels.values(), *others], code, target, deadline, compilers)
            done |= {workload for workload, recipe in kernels.items() if recipe.name in built}
            others = []
            alternatives = {
                each: alternatives[each] for each, recipe in kernels.items() if code.refusal(recipe.name) is not None
            }
        return len(done)

    @property
    def code(self) -> CodeCache:
        """What was compiled ahead, and what verifies kernels."""
        from schedsearch.backend.code_cache import CodeCache

        with self._lock:
            self._code = CodeCache() if self._code is None else self._code
            return self._code

    def explain(self, workload: Workload) -> Explanation:
        """What `kernel` would do for a new workload; builds and loads nothing. Raises the errors of `kernel`."""
        check_workload(workload)
        with self._lock:
            self._refresh()
            return explain_fallback(workload, self.target, self._fallback(workload))

    def close(self) -> None:
        """Unloads all kernels and closes device and database; does nothing the second time.

        The kernels must not be used afterwards.
        """
        with self._lock:
            self._closed = True
            entries, self._entries = self._entries, {}
            self._looked_up.clear()
            for entry in entries.values():
                entry.kernel.close()
            self._device.close()
            self._retire()

    def _version(self) -> _Version | None:
        """The present state of the database; None if there is none. It asks nothing of a database that was replaced, which
        may be damaged. A file that vanished counts as unchanged."""
        lookup, file = self._lookup, self._present()
        if lookup is None:
            return None if file is None else _CHANGED
        if file is not None and file != self._file:
            return _CHANGED
        try:
            return self._opened, lookup.version()
        except DatabaseError:  # damaged, or closed by another thread a moment ago: `_refresh` knows
            return _CHANGED

    def _present(self) -> _File | None:
        """The file that is at `db` now."""
        try:
            status = self.db.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def _refresh(self) -> None:
        """Notices changes of the database since the last call.

        Raises:
            DatabaseError: it cannot be used; the next call tries again.
        """
        if self._closed or self._pid != os.getpid():
            state = "was closed" if self._closed else "was made in another process"
            raise UsageError(f"this KernelCache {state}; make a new one")
        version = self._version()
        if version is None and does_without(self.allowed, self.target):  # there is none, and none is needed
            self._seen = None
            return
        if version == self._seen:
            return
        if version is None or version == _CHANGED:
            self._open()
            version = self._version()
        if self._lookup is not None:
            self._lookup.refresh()
        self._seen = version

    def _open(self) -> None:
        """Opens the file that is at `db` now, after the one before was closed: SQLite would let them share a log."""
        self._retire()
        self._file = self._present()
        self._lookup = open_lookup(self.db, self.allowed, self.target)
        self._opened += 1

    def _retire(self) -> None:
        """Closes the database when nobody reads from it any more."""
        if self._lookup is not None:
            self._replaced.append(self._lookup)
            self._lookup = self._file = None
        while self._replaced and not self._readers:
            self._replaced.pop().close()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Within it the database stays open for this thread, outside of the lock too, even if it is replaced."""
        with self._lock:
            self._refresh()
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1
                while self._replaced and not self._readers:
                    self._replaced.pop().close()

    def _best(self, workload: Workload) -> _Best | None:
        try:
            row = self._lookup.exact(workload.id, self.target.key, self.mode) if self._lookup else None
        except DamageError:  # it becomes the reason of its level, and the next one is tried
            return None
        if row is None:
            return None
        return row.record_id, row.artifact_sha256, row.template, row.template_version, row.config_json

    def _find(self, workload: Workload) -> Kernel:
        version, fallback = self._looked_up.pop(workload, (None, None))
        if fallback is None or version != self._seen:  # the database may have something else now
            fallback = self._fallback(workload)
        return make_kernel(workload, self.target, fallback.serve(self._device.open))

    def _fallback(self, workload: Workload) -> Fallback:
        return Fallback(workload, self.target, self._lookup, self.db, self.mode, self.allowed, lambda: self.code)


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


def does_without(allowed: Collection[str], target: Target) -> bool:
    """Whether kernels may be found without a database: defaults, or shipped records of this kind of device."""
    return "default" in allowed or ("shipped" in allowed and shipped_records(target.key).lookup is not None)


def open_lookup(db: Path, allowed: Collection[str], target: Target) -> Lookup | None:
    """The database; None if there is no file and none is needed.

    Raises:
        DatabaseError: there is no file, or it cannot be used.
    """
    if db.exists():
        return Lookup(db)
    if does_without(allowed, target):
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
