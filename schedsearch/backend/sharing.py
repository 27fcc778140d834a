"""Shares work between builds: one process does it, and other processes of the run and later runs use the result.

There are two places: a folder of the run, which is deleted with it, and the user's build cache. If a piece's key names
everything that decides it, the cache keeps it. If the key is valid only among processes with the same sources, the piece
stays in the run's folder.
"""

from __future__ import annotations

import contextlib
import contextvars
import fcntl
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from schedsearch.backend.build_cache import BuildCache

_run_folder: Path | None = None
_builds = contextvars.ContextVar("builds", default=True)  # of this thread


class NotKeptError(BaseException):
    """A piece would have to be made, within `only_kept`. No handler of a compiler's exceptions must take it."""


@dataclass(frozen=True)
class Key:
    """`digest` is a hex digest; `lasting` says that it names everything that decides the piece."""

    digest: str
    lasting: bool


def share_through(folder: Path) -> None:
    """From now on this process shares through `folder` with other processes of its run, which run the same sources."""
    global _run_folder
    _run_folder = folder


@contextlib.contextmanager
def only_kept() -> Iterator[None]:
    """Within it this thread uses what is kept and makes nothing: what is missing raises NotKeptError."""
    token = _builds.set(False)
    try:
        yield
    finally:
        _builds.reset(token)


def check_may_build() -> None:
    """For everything that compiles. Raises NotKeptError within `only_kept`."""
    if not _builds.get():
        raise NotKeptError


def piece(key: Key, make: Callable[[], bytes]) -> bytes:
    """The piece called `key`: found from another process, or made now and kept for others.

    If another process of the run is making the piece, this one waits, and takes over if the other one dies.

    Raises:
        Exception: any exception of `make`; nothing is then kept.
        NotKeptError: there is no such piece, and `only_kept` forbids making it.
    """
    store = user_cache() if key.lasting else None
    if store is None and _run_folder is not None:
        store = BuildCache(_run_folder)
    if store is None:
        check_may_build()
        return make()
    found = store.load(key.digest)
    if found is None:
        check_may_build()
        with _lock(key.digest):
            found = store.load(key.digest)
            if found is None:
                found = make()
                store.store(key.digest, found)
    return found


@functools.cache
def user_cache() -> BuildCache | None:
    """The user's build cache, looked up once per process."""
    return BuildCache.open()


@contextlib.contextmanager
def _lock(name: str) -> Iterator[None]:
    if _run_folder is None:
        yield
        return
    with (_run_folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
