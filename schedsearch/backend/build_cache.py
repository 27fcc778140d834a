"""Keeps compiled pieces between runs, in a folder of the user.

A key names everything that decides the piece (see `kernel_identity`), so that no file ever becomes invalid. Files are
checked when they are read: a truncated or changed file counts as absent. The pieces are code that will run. The folder must
therefore belong to this user and be closed to others; otherwise it is not used.

Nothing is deleted but pieces, which are known by their names and by how they begin. A folder is used if it is empty, has the
cache's `CACHEDIR.TAG`, or holds only pieces (of versions that wrote no tag). A folder of other things is not used.

The folder is `SCHEDSEARCH_BUILD_CACHE`, or `builds` in the user's cache folder. `SCHEDSEARCH_BUILD_CACHE=off` switches the
cache off.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import os
import re
import stat
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from schedsearch.text import quoted

ENVIRONMENT_VARIABLE = "SCHEDSEARCH_BUILD_CACHE"
OFF = ("off", "0", "no")
LIMIT_BYTES = 256 << 20
_MAGIC = b"schedsearch build 1\n"
_SUFFIX = ".piece"
_PIECE = re.compile(r"[0-9a-f]{64}\.piece")
_UNFINISHED = re.compile(r"(unfinished-|tmp)[a-z0-9_]{8}")  # until this version they had the names of `tempfile`
_ABANDONED_S = 3600.0  # an unfinished file of this age was left behind by a process that died
_TAG = "CACHEDIR.TAG"  # programs that make backups know it: https://bford.info/cachedir/
_TAG_TEXT = b"""Signature: 8a477f597d28d172789f06886806bc55
# This folder is a build cache of schedsearch. It may be deleted at any time.
"""
_TRIM_EVERY = 200  # pieces written by one process


@dataclass(frozen=True)
class CacheState:
    """Where the cache is. `problem` says why it is not used; None when it is."""

    folder: Path | None
    problem: str | None = None


def cache_state(environment: Mapping[str, str] = os.environ) -> CacheState:
    """Looks at the folder; creates nothing."""
    configured = environment.get(ENVIRONMENT_VARIABLE, "")
    if configured.lower() in OFF:
        return CacheState(None, f"switched off by {ENVIRONMENT_VARIABLE}={configured}")
    if configured:
        folder = Path(configured)
    else:
        import platformdirs

        folder = platformdirs.user_cache_path("schedsearch") / "builds"
    try:
        return CacheState(folder, _objection(folder.lstat()) or _other_contents(folder))
    except FileNotFoundError:
        return CacheState(folder)
    except OSError as error:
        return CacheState(folder, error.strerror)


@functools.cache
def warn_if_unfit() -> None:
    """Logs a warning, once in a process, if there is a folder for the cache that is not used. Builds only take longer."""
    state = cache_state()
    if state.folder is not None and state.problem is not None:
        logging.getLogger("schedsearch.backend").warning(
            "schedsearch: warning: no build cache in %s: %s", state.folder, state.problem
        )


def _objection(found: os.stat_result) -> str | None:
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a folder"
    if found.st_uid != os.geteuid():
        return "it belongs to another user"
    if found.st_mode & 0o077:
        return f"other users have access to it (mode {stat.S_IMODE(found.st_mode):o}); chmod 700 makes it usable"
    return None


def _other_contents(folder: Path) -> str | None:
    """The objection to using a folder that holds something else; None for a cache and for an empty folder."""
    if _is_tagged(folder):
        return None
    with os.scandir(folder) as entries:
        for entry in entries:
            known = _PIECE.fullmatch(entry.name) or _is_unfinished(folder / entry.name)
            # another process may have removed it, or may have put the tag there
            if not known and os.path.lexists(folder / entry.name) and not _is_tagged(folder):
                return (
                    f"it holds {quoted(entry.name)}, which is not of a build cache; set {ENVIRONMENT_VARIABLE} to a new or "
                    "an empty folder"
                )
    return None


def _is_tagged(folder: Path) -> bool:
    return _content(folder / _TAG, len(_TAG_TEXT)) == _TAG_TEXT


def _is_piece(path: Path) -> bool:
    return bool(_PIECE.fullmatch(path.name)) and _content(path, len(_MAGIC)) == _MAGIC


def _is_unfinished(path: Path) -> bool:
    """Whether a process is writing the file, or died while it did."""
    if not _UNFINISHED.fullmatch(path.name):
        return False
    return _content(path, len(_MAGIC)) in (b"", _MAGIC, _TAG_TEXT[: len(_MAGIC)])


def _content(path: Path, length: int) -> bytes | None:
    """The first bytes of a regular file; None of anything else, links included."""
    try:
        with _opened(path) as file:
            return file.read(length)
    except OSError:
        return None


def _opened(path: Path) -> BinaryIO:
    """A regular file. Raises OSError for anything else: a link leads elsewhere, and a pipe would make its reader wait."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


class BuildCache:
    """The pieces in one folder; any number of processes may use it at the same time.

    No method raises: without the cache a build only takes longer.
    """

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder, self._limit_bytes = folder, limit_bytes
        self._written = 0

    @classmethod
    def open(cls) -> BuildCache | None:
        """The user's cache; creates its folder if it is missing. None when the cache is switched off or unfit."""
        state = cache_state()
        if state.folder is None or state.problem is not None:
            return None
        try:
            state.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # another process may have made it, or put something there, in the meantime
            if _objection(state.folder.lstat()) is not None or _other_contents(state.folder) is not None:
                return None
        except OSError:
            return None
        cache = cls(state.folder)
        cache._put_tag()
        cache._written = _TRIM_EVERY - 1  # many processes write only a few pieces: each trims at the first
        return cache

    def load(self, key: str) -> bytes | None:
        """The piece, or None when it is absent or damaged."""
        path = self._path(key)
        try:
            with _opened(path) as file:
                content = file.read()
                with contextlib.suppress(OSError):  # of a folder that can only be read
                    os.utime(file.fileno())  # the oldest go first
        except OSError:
            return None
        start = len(_MAGIC) + hashlib.sha256().digest_size
        checksum, body = content[len(_MAGIC) : start], content[start:]
        if not content.startswith(_MAGIC) or hashlib.sha256(key.encode() + body).digest() != checksum:
            return None
        try:
            return zlib.decompress(body)
        except zlib.error:
            return None

    def store(self, key: str, piece: bytes) -> None:
        """Writes the piece; a reader sees all of it or nothing."""
        body = zlib.compress(piece, 1)
        with (
            contextlib.suppress(OSError),
            self._unfinished(_MAGIC + hashlib.sha256(key.encode() + body).digest() + body) as path,
        ):
            path.replace(self._path(key))
        self._written += 1
        if self._written % _TRIM_EVERY == 0:
            self.trim()

    def size(self) -> tuple[int, int]:
        """The number of pieces, and their bytes."""
        files = self._pieces()
        return len(files), sum(found.st_size for _, found in files)

    def trim(self) -> None:
        """Removes what killed processes left, and the least recently used pieces until the rest is within the limit."""
        for path, found in self._entries(_UNFINISHED):
            if found.st_mtime < time.time() - _ABANDONED_S and _content(path, 1) and _is_unfinished(path):
                with contextlib.suppress(OSError):
                    path.unlink()
        pieces = sorted(self._pieces(), key=lambda each: each[1].st_mtime_ns)
        excess = sum(found.st_size for _, found in pieces) - self._limit_bytes
        for path, found in pieces:
            if excess <= 0:
                return
            if _is_piece(path):
                with contextlib.suppress(OSError):
                    path.unlink()
                excess -= found.st_size

    def _put_tag(self) -> None:
        """Marks the folder as a cache, so that it stays one when other files come into it."""
        with contextlib.suppress(OSError):
            if not os.path.lexists(self.folder / _TAG):
                with self._unfinished(_TAG_TEXT) as path:
                    os.link(path, self.folder / _TAG)  # in one step, and never over another file

    @contextlib.contextmanager
    def _unfinished(self, content: bytes) -> Iterator[Path]:
        """A file that is gone after the block unless it got another name there."""
        descriptor, name = tempfile.mkstemp(dir=self.folder, prefix="unfinished-")
        path = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _pieces(self) -> list[tuple[Path, os.stat_result]]:
        """What has the name of a piece; its content is looked at before it is removed."""
        return self._entries(_PIECE)

    def _entries(self, names: re.Pattern[str]) -> list[tuple[Path, os.stat_result]]:
        """The regular files with such names."""
        found = []
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                with contextlib.suppress(OSError):  # another process removed it
                    if names.fullmatch(path.name) and stat.S_ISREG((status := path.lstat()).st_mode):
                        found.append((path, status))
        return found
