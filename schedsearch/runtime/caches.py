"""The kernels of one database on every device that a program uses: the one memo of `KernelCache`s."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterable
from pathlib import Path

from schedsearch.measurement import COLD_GRAPH
from schedsearch.records.location import require_file
from schedsearch.runtime.cache import KernelCache
from schedsearch.runtime.fallback import check_levels


class KernelCaches:
    """A `KernelCache` for each device, opened when it is first needed. Any thread may call its methods.

    In a forked child they begin anew, because it cannot use what its parent opened.

    Args:
        db, allow, mode: as `KernelCache`.

    Raises:
        UsageError: an unknown level.
    """

    def __init__(self, db: str | os.PathLike[str], allow: Iterable[str], mode: str = COLD_GRAPH) -> None:
        self._db, self._allow, self._mode = require_file(db), check_levels(allow), mode
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._caches: dict[str, KernelCache] = {}

    def on(self, device: str) -> KernelCache:
        """The kernels on cpu, cuda:0 ...

        Raises:
            DatabaseError, DeviceError: the database or the device cannot be used; the next call tries again.
        """
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            if device not in self._caches:
                self._caches[device] = KernelCache(self._db, device, allow=self._allow, mode=self._mode)
            return self._caches[device]

    def close(self) -> None:
        """Unloads all kernels; `on` opens them again."""
        with self._lock:
            while self._caches:
                self._caches.popitem()[1].close()


@functools.cache
def shared_caches(db: Path, allow: tuple[str, ...], mode: str = COLD_GRAPH) -> KernelCaches:
    """The same object for the same arguments, for the life of the process; `db` is absolute. Nobody closes it."""
    return KernelCaches(db, allow, mode)
