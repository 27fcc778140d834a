"""Reads the content of a file from elsewhere, gzip or not, in bounded memory and time.

JSON lines are read one by one, so a file of them may have any size. Formats that are one JSON value (caches of Kernel Tuner,
T4, T1) and AutoTVM's logs are held in memory and therefore limited. What a value takes in memory differs from what it takes
in the file: 64 MiB of `[],` are 1.6 GB. So values are counted before they are parsed.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from schedsearch.errors import UsageError
from schedsearch.reading import open_input

MAX_LINE_BYTES = 16 << 20  # the longest real lines hold machine code, below 2 MiB
MAX_DOCUMENT_BYTES = 64 << 20  # the largest public cache that we know takes 17 MB
MAX_VALUES = 4_000_000  # in MAX_DOCUMENT_BYTES; that cache has 1.5 million
OBJECT_VALUES = 16  # an object counts as so many values
MAX_DEPTH = 100  # of lists and objects in each other
LIMIT_VARIABLE = "SCHEDSEARCH_MAX_DOCUMENT_MIB"

_CHUNK = 1 << 16
_FREE_UNPACKED_BYTES = 64 << 20  # a gzip may unpack to this much in any case, and beyond it to _MAX_RATIO times its size
_MAX_RATIO = 200  # JSON of records packs 10 to 50 times
_MAX_EMPTY_MEMBERS = 1000


class Content:
    """The unpacked content of a file, which is read once. A context manager.

    Whether the file is a gzip is told by its first bytes, not by its name. It may be a pipe.

    Args:
        path: the file.

    Raises:
        UsageError: the file cannot be read, or is a pipe to which nobody writes.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        try:
            self._file: BinaryIO = open_input(path)
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error
        self._chunks = self._unpacked()
        self._ahead: list[bytes] = []  # chunks that `first_line` has looked at

    def __enter__(self) -> Content:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._chunks.close()
        self._file.close()

    def first_line(self) -> bytes:
        """The first line that is not blank, for recognising a format. It stays in the content.

        Raises:
            UsageError: the file cannot be read, or the line is longer than a document may be.
        """
        begun: list[bytes] = []
        size = 0
        for chunk in self._chunks:
            self._ahead.append(chunk)
            self._check_document(size := size + len(chunk))
            part = chunk if begun else chunk.lstrip()
            line, end, _ = part.partition(b"\n")
            if line:
                begun.append(line)
            if end:
                break
        return b"".join(begun)

    def document(self) -> bytes:
        """The whole content.

        Raises:
            UsageError: the file cannot be read, or holds more than a document may.
        """
        parts = []
        size = 0
        for chunk in self._all():
            size += len(chunk)
            self._check_document(size)
            parts.append(chunk)
        return b"".join(parts)

    def lines(self) -> Iterator[bytes]:
        """The lines, without their ends.

        Raises:
            UsageError: the file cannot be read, or a line is longer than MAX_LINE_BYTES.
        """
        number, size = 1, 0
        begun: list[bytes] = []
        for chunk in self._all():
            first, *others = chunk.split(b"\n")
            begun.append(first)
            size += len(first)
            if size > MAX_LINE_BYTES:
                raise UsageError(
                    f"{self.path}:{number}: the line is longer than {_mib(MAX_LINE_BYTES)}, the limit; split it"
                )
            if others:
                yield b"".join(begun)
                yield from others[:-1]
                number += len(others)
                begun, size = [others[-1]], len(others[-1])
        if size:
            yield b"".join(begun)

    def _all(self) -> Iterator[bytes]:
        yield from self._ahead
        self._ahead = []
        yield from self._chunks

    def _check_document(self, size: int) -> None:
        limit, _ = document_limits()
        if size > limit:
            raise UsageError(
                f"{self.path}: holds more than {_mib(limit)}, the limit of a file that is read as a whole; split it, or "
                f"raise the limit with {LIMIT_VARIABLE}=N (reading takes up to 15 times that memory)"
            )

    def _packed(self) -> Iterator[bytes]:
        try:
            while chunk := self._file.read(_CHUNK):
                yield chunk
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError | ValueError) -> UsageError:
        return UsageError(f"cannot read {self.path}: {getattr(error, 'strerror', None) or error}; check the path")

    def _unpacked(self) -> Generator[bytes, None, None]:
        chunks = self._packed()
        first = next(chunks, b"")
        if first[:2] == b"\x1f\x8b":
            yield from self._gunzip(first, chunks)
        else:
            yield first
            yield from chunks

    def _gunzip(self, first: bytes, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """The content of all members of a gzip, which zeros may follow."""
        packed = unpacked = members = 0
        machine = zlib.decompressobj(wbits=31)
        chunk = first
        while chunk:
            packed += len(chunk)
            while chunk:
                if machine.eof:
                    chunk = chunk.lstrip(b"\0")
                    if not chunk:
                        break
                    members += 1
                    if members > _MAX_EMPTY_MEMBERS + unpacked // 1024:
                        raise UsageError(f"{self.path}: the gzip has thousands of empty members; get the file again")
                    machine = zlib.decompressobj(wbits=31)
                try:
                    out = machine.decompress(chunk, _CHUNK)
                except zlib.error as error:
                    raise self._damaged(packed, f"damaged ({error})") from error
                unpacked += len(out)
                if unpacked > max(_FREE_UNPACKED_BYTES, _MAX_RATIO * packed):
                    raise UsageError(
                        f"{self.path}: the gzip unpacks to more than {_mib(_FREE_UNPACKED_BYTES)} and {_MAX_RATIO} times "
                        "its size, as no file of records does; unpack it before if you know what it is"
                    )
                if out:
                    yield out
                chunk = machine.unused_data if machine.eof else machine.unconsumed_tail
            chunk = next(chunks, b"")
        if not machine.eof and (rest := machine.flush()):
            yield rest
        if not machine.eof:
            raise self._damaged(packed, "truncated")

    def _damaged(self, packed: int, how: str) -> UsageError:
        return UsageError(f"{self.path}: the gzip of {packed:,} bytes is {how}; get the file again")


def document_limits() -> tuple[int, int]:
    """How many bytes and how many values a file may hold that is read as a whole.

    Raises:
        UsageError: the environment variable SCHEDSEARCH_MAX_DOCUMENT_MIB is set and is not an integer above 0.
    """
    given = os.environ.get(LIMIT_VARIABLE, "")
    if not given:
        return MAX_DOCUMENT_BYTES, MAX_VALUES
    if not re.fullmatch(r"[1-9][0-9]{0,6}", given):
        raise UsageError(f"{LIMIT_VARIABLE} is {given!r}; give an integer of MiB, e.g. 256")
    limit = int(given) << 20
    return limit, limit * MAX_VALUES // MAX_DOCUMENT_BYTES


def values_at_most(data: bytes) -> int:
    """A bound on the values in JSON text, by what they take in memory: an object counts as OBJECT_VALUES."""
    return 1 + data.count(b",") + data.count(b"[") + OBJECT_VALUES * data.count(b"{")


def nesting(data: bytes) -> int:
    """How deep lists and objects are nested in JSON text; any number if the text is not JSON."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return 0  # it cannot be too deep
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # then every quote begins or ends a string
    deepest = depth = inside = 0
    for start in range(0, len(data), _CHUNK):
        part = np.frombuffer(data, np.uint8, min(_CHUNK, len(data) - start), start)
        quoted = np.bitwise_xor.accumulate((part == ord('"')).view(np.uint8)) ^ inside
        opens = (part == ord("[")) | (part == ord("{"))
        closes = (part == ord("]")) | (part == ord("}"))
        depths = depth + np.cumsum((opens.astype(np.int8) - closes) * (quoted == 0), dtype=np.int64)
        deepest, depth, inside = max(deepest, int(depths.max())), int(depths[-1]), int(quoted[-1])
    return deepest


def _mib(size: int) -> str:
    return f"{size >> 20} MiB"
