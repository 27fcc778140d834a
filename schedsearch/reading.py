"""Opens files that come from elsewhere: regular files, pipes and devices. Opening never waits without limit.

The caller limits how many bytes it reads, because a device can be endless and a file can grow while it is read.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import time
from pathlib import Path
from typing import BinaryIO, cast

WRITER_WAIT_S = 3.0  # how long a pipe may have no writer before it is refused
_POLL_S = 0.02
_CHUNK = 1 << 16


def open_input(path: str | Path, *, writer_wait_s: float = WRITER_WAIT_S) -> BinaryIO:
    """Opens a file for reading bytes.

    A pipe must get a writer within `writer_wait_s`. Once it has one, reading waits for the writer's data.

    Raises:
        OSError: there is no such file, it is a directory, it cannot be read, or it is a pipe to which nobody writes. The
            error's `strerror` says which.
        ValueError: the path cannot be the name of a file, e.g. it contains a NUL character.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        start = _first_bytes(descriptor, str(path), writer_wait_s) if stat.S_ISFIFO(mode) else b""
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return cast(BinaryIO, io.BufferedReader(_Continued(start, descriptor)))


def _first_bytes(descriptor: int, path: str, writer_wait_s: float) -> bytes:
    """What a non-blocking pipe holds once it has a writer; empty if the writer has written nothing yet."""
    deadline = time.monotonic() + writer_wait_s
    while True:
        try:
            start = os.read(descriptor, _CHUNK)
        except BlockingIOError:  # there is a writer
            return b""
        if start:
            return start
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, f"it is a pipe, and nobody wrote to it within {writer_wait_s:g} s", path)
        time.sleep(_POLL_S)


class _Continued(io.FileIO):
    """The bytes of a descriptor behind those that were read from it already."""

    def __init__(self, start: bytes, descriptor: int) -> None:
        super().__init__(descriptor, "rb")
        self._start = memoryview(start)

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # FileIO declares any buffer
        if not self._start:
            return super().readinto(buffer)
        count = min(len(self._start), len(buffer))
        memoryview(buffer)[:count] = self._start[:count]
        self._start = self._start[count:]
        return count
