"""Standard streams and signals of the command's process. Standard library only.

A run must not depend on who reads its output. These rules hold for every command:

- A closed standard descriptor is opened on /dev/null. Otherwise the next file that is opened, perhaps a database, would get
  the number 1 or 2, and messages would be written into it.
- A write that fails ends the output and not the command. If the command succeeds, its exit code says that standard output
  was lost: 141 if the reader went away, as a shell reports a death by SIGPIPE, and 74 otherwise.
- SIGTERM and SIGHUP act like Ctrl-C. A signal that is ignored at the start, e.g. because of nohup, stays ignored.
"""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import sys
from types import FrameType
from typing import TextIO

INTERRUPTED = 130
READER_GONE = 141  # 128 + SIGPIPE
BUG = 70  # EX_SOFTWARE of sysexits.h
SYSTEM_FAILED = 74  # EX_IOERR of sysexits.h

_LOSSLESS = ("strict", "surrogateescape")  # encoding errors that would raise, or write foreign bytes


class _Descriptor(io.FileIO):
    """A standard output stream that never raises: `lost` keeps the first error, and what follows is dropped."""

    lost: OSError | None = None

    def write(self, data: object) -> int:
        size = memoryview(data).nbytes  # type: ignore[arg-type]
        while self.lost is None:
            try:
                written = super().write(data)  # type: ignore[arg-type]
            except OSError as error:
                self.lost = error
                break
            if written is not None:
                return written
            ready = select.poll()  # the pipe is full, and whoever made it made it non-blocking
            ready.register(self.fileno(), select.POLLOUT)
            ready.poll()
        return size


class StandardStreams:
    """Replaces the three standard streams of this process by streams that obey the rules of this module.

    Characters that the encoding lacks are written as escapes.
    """

    def __init__(self) -> None:
        _open_closed()
        if sys.stdin is None:
            sys.stdin = open(0, closefd=False)  # noqa: SIM115  open as long as the process
        self._out, sys.stdout = _text(1, sys.stdout)
        self._err, sys.stderr = _text(2, sys.stderr)

    def exit_code(self, code: int) -> int:
        """The exit code of a command that ended with `code`. Writes what is still in the buffers."""
        sys.stdout.flush()
        lost = self._out.lost
        if code == 0 and lost is not None:
            code = READER_GONE if lost.errno == errno.EPIPE else SYSTEM_FAILED
            if code == SYSTEM_FAILED:
                print(f"schedsearch: cannot write to standard output: {lost.strerror}", file=sys.stderr)
        sys.stderr.flush()
        return code


def _open_closed() -> None:
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is `descriptor`
            os.set_inheritable(opened, True)


def _text(descriptor: int, before: TextIO | None) -> tuple[_Descriptor, TextIO]:
    """An unfailing stream on a descriptor, with the encoding of Python's own stream."""
    raw = _Descriptor(descriptor, "w", closefd=False)
    errors = "backslashreplace" if before is None or before.errors in _LOSSLESS else before.errors
    stream = io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding="utf-8" if before is None else before.encoding,
        errors=errors,
        line_buffering=descriptor == 2 or raw.isatty(),
        write_through=bool(os.environ.get("PYTHONUNBUFFERED")),
    )
    return raw, stream


def interrupt_on_signals() -> None:
    """Makes SIGTERM and SIGHUP raise KeyboardInterrupt, as SIGINT does, unless they are ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def die_on_signals() -> None:
    """Lets a signal end the process at once: nothing is left to save, and Python's own shutdown must not be disturbed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
