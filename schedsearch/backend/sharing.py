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
_waits = contextvars.ContextVar("waits", default=True)


class NotKeptError(BaseException):
    """A piece would have to be made, within `only_kept`. No handler of a compiler's exceptions must take it."""


class InWorkError(BaseException):
    """Another process is making a piece, within `without_waiting`. No handler of a compiler's exceptions must take it."""


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


@contextlib.contextmanager
def without_waiting() -> Iterator[None]:
    """Within it this thread waits for no other process: a piece that another one is making raises InWorkError."""
    token = _waits.set(False)
    try:
        yield
    finally:
        _waits.reset(token)


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
        InWorkError: another process is making it, and `without_waiting` forbids waiting for that.
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
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if _waits.get() else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise InWorkError from error
        yield
