"""Keeps compiled pieces between runs, in a folder of the user.

A key names everything that decides the piece (see `kernel_identity`), so that no file ever becomes invalid. Files are
checked when they are read: a truncated or changed file counts as absent. The pieces are code that will run. The folder must
therefore belong to this user and be closed to others; otherwise it is not used.

The folder is `SCHEDSEARCH_BUILD_CACHE`, or `builds` in the user's cache folder. `SCHEDSEARCH_BUILD_CACHE=off` switches the
cache off.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT_VARIABLE = "SCHEDSEARCH_BUILD_CACHE"
OFF = ("off", "0", "no")
LIMIT_BYTES = 256 << 20
_MAGIC = b"schedsearch build 1\n"
_SUFFIX = ".piece"
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
        found = folder.lstat()
    except FileNotFoundError:
        return CacheState(folder)
    except OSError as error:
        return CacheState(folder, str(error))
    return CacheState(folder, _objection(found))


def _objection(found: os.stat_result) -> str | None:
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a folder"
    if found.st_uid != os.geteuid():
        return "it belongs to another user"
    if found.st_mode & 0o077:
        return f"other users have access to it (mode {stat.S_IMODE(found.st_mode):o}); chmod 700 makes it usable"
    return None


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
            if _objection(state.folder.lstat()) is not None:  # another process made it in the meantime
                return None
        except OSError:
            return None
        cache = cls(state.folder)
        cache._written = _TRIM_EVERY - 1  # many processes write only a few pieces: each trims at the first
        return cache

    def load(self, key: str) -> bytes | None:
        """The piece, or None when it is absent or damaged."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        with contextlib.suppress(OSError):  # of a folder that can only be read
            os.utime(path)  # the oldest go first
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
        with contextlib.suppress(OSError):
            descriptor, unfinished = tempfile.mkstemp(dir=self.folder)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(_MAGIC + hashlib.sha256(key.encode() + body).digest() + body)
                Path(unfinished).replace(self._path(key))
            except OSError:
                Path(unfinished).unlink(missing_ok=True)
        self._written += 1
        if self._written % _TRIM_EVERY == 0:
            self.trim()

    def size(self) -> tuple[int, int]:
        """The number of pieces, and their bytes."""
        files = self._files()
        return len(files), sum(found.st_size for _, found in files)

    def trim(self) -> None:
        """Removes the least recently used pieces until the rest is within the limit."""
        files = sorted(self._files(), key=lambda each: each[1].st_mtime_ns)
        excess = sum(found.st_size for _, found in files) - self._limit_bytes
        for path, found in files:
            if excess <= 0:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            excess -= found.st_size

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        files = []
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                with contextlib.suppress(OSError):  # another process removed it
                    files.append((path, path.lstat()))
        return files
