"""Work that builds have in common: done by one process, and found by the others of the run and by later runs.

Two places: a folder of the run, which goes with it, and the user's build cache. A piece whose key names everything that
decides it is kept in the cache; one whose key is good among processes with the same sources only stays in the run's folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from schedsearch.backend.build_cache import BuildCache

_run_folder: Path | None = None


@dataclass(frozen=True)
class Key:
    """`digest` is a hex digest; `lasting` says that it names everything that decides the piece."""

    digest: str
    lasting: bool


def share_through(folder: Path) -> None:
    """From now on this process shares with others of its run through `folder`, which they run the same sources with."""
    global _run_folder
    _run_folder = folder


def piece(key: Key, make: Callable[[], bytes]) -> bytes:
    """The piece called `key`: as another process left it, or made now and left for others.

    A process that needs a piece while another of the run makes it waits, and takes over when that one dies.

    Raises:
        Exception: whatever `make` raises; nothing is kept then.
    """
    store = user_cache() if key.lasting else None
    if store is None and _run_folder is not None:
        store = BuildCache(_run_folder)
    if store is None:
        return make()
    found = store.load(key.digest)
    if found is None:
        with _lock(key.digest):
            found = store.load(key.digest)
            if found is None:
                found = make()
                store.store(key.digest, found)
    return found


@functools.cache
def user_cache() -> BuildCache | None:
    """The user's build cache, looked up once a process."""
    return BuildCache.open()


@contextlib.contextmanager
def _lock(name: str) -> Iterator[None]:
    if _run_folder is None:
        yield
        return
    with (_run_folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
