"""Messages between a run and its child processes, over a stream socket that foreign code may write to.

Candidates run in the children. A template or a kernel can write to the child's descriptor, close it, or fork: then two
processes hold the same socket. Therefore a message travels in a frame whose header says who sent it, which request it
answers, how long it is and what its checksum is. The parent's end never blocks and takes at most `limit_bytes` for one
message. It unpickles nothing but plain data and the message classes of schedsearch. Anything else raises
`ForeignBytesError`, and the child must be replaced. The child's end works only in the process that opened it.

See docs/decisions/011-messages-between-processes.md.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import enum
import io
import os
import pickle
import socket
import struct
import sys
import zlib
from typing import Any

LIMIT_BYTES = 64 << 20
"""The largest message that a parent accepts from a child. The code of a kernel has at most a few megabytes."""

_MAGIC = b"schd"
_HEADER = struct.Struct("!4sIQQI")  # magic, process id of the sender, number of the request, length, crc32 of the body
_CHUNK_BYTES = 1 << 20
_PLAIN = frozenset({"set", "frozenset", "complex", "bytearray", "slice", "range"})


class ForeignBytesError(Exception):
    """The bytes on the socket are not a message that this child should send. The text says why."""


def _frame(message: object, number: int) -> bytes:
    """Raises whatever the pickling of the message raises."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(_MAGIC, os.getpid(), number, len(body), zlib.crc32(body)) + body


class ParentEnd:
    """The run's end. No method blocks.

    Args:
        sender: process id of the child; frames of any other process are refused.
        limit_bytes: of one message.
        any_class: unpickle objects of every class. Only for children that run no foreign code.
    """

    def __init__(self, end: socket.socket, sender: int, limit_bytes: int = LIMIT_BYTES, any_class: bool = False) -> None:
        end.setblocking(False)
        self._end, self._sender, self._limit_bytes, self._any_class = end, sender, limit_bytes, any_class
        self._received = bytearray()
        self._outgoing = bytearray()
        self.requests = 0

    def fileno(self) -> int:
        return self._end.fileno()

    @property
    def unsent(self) -> bool:
        """Whether `flush` must be called again when the socket takes more."""
        return bool(self._outgoing)

    def send(self, message: object) -> int:
        """Queues a request and sends as much as the socket takes. Returns the request's number, from 1."""
        self.requests += 1
        self._outgoing += _frame(message, self.requests)
        self.flush()
        return self.requests

    def flush(self) -> None:
        """Sends what the socket takes now. A child that has closed its end is reported by `receive`."""
        try:
            while self._outgoing:
                sent = self._end.send(memoryview(self._outgoing)[:_CHUNK_BYTES])
                del self._outgoing[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing.clear()

    def receive(self) -> tuple[int, Any] | None:
        """The next message and the number of the request that it answers; None if it has not arrived completely.

        Raises:
            EOFError: the other end is closed, and no complete message is left.
            ForeignBytesError: these bytes are not a message. The child must not be used any more.
        """
        closed = self._pump()
        message = self._parse()
        if message is None and closed:
            raise EOFError
        return message

    def close(self) -> None:
        self._end.close()

    def _pump(self) -> bool:
        """Reads until one message may be complete; returns whether the other end is closed."""
        while len(self._received) < self._wanted():
            try:
                chunk = self._end.recv(_CHUNK_BYTES)
            except BlockingIOError:
                return False
            except OSError:
                return True
            if not chunk:
                return True
            self._received += chunk
        return False

    def _wanted(self) -> int:
        """Bytes of the header, or of the header and the body once the length is known."""
        if len(self._received) < _HEADER.size:
            return _HEADER.size
        magic, sender, _, length, _ = _HEADER.unpack_from(self._received)
        if magic != _MAGIC or sender != self._sender:
            raise ForeignBytesError(f"it wrote {bytes(self._received[:24])!r}, which is not the start of a message")
        if length > self._limit_bytes:
            raise ForeignBytesError(f"it sent a message of {length} bytes; allowed are {self._limit_bytes}")
        return _HEADER.size + int(length)

    def _parse(self) -> tuple[int, Any] | None:
        end = self._wanted()
        if len(self._received) < _HEADER.size or len(self._received) < end:
            return None
        _, _, number, _, checksum = _HEADER.unpack_from(self._received)
        body = bytes(self._received[_HEADER.size : end])
        del self._received[:end]
        if zlib.crc32(body) != checksum:
            raise ForeignBytesError("the checksum of its message is wrong")
        try:
            message = pickle.loads(body) if self._any_class else _MessageUnpickler(io.BytesIO(body)).load()
        except Exception as error:  # a wrong pickle can raise anything
            raise ForeignBytesError(f"its message cannot be read: {type(error).__name__}: {str(error)[:500]}") from error
        return int(number), message


class _MessageUnpickler(pickle.Unpickler):
    """Makes plain values, and objects of the dataclasses, enums and exceptions of modules that are already imported."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "builtins":
            found = getattr(builtins, name, None)
            if name in _PLAIN or (isinstance(found, type) and issubclass(found, Exception)):
                return found
        elif module.startswith("schedsearch."):
            found = getattr(sys.modules.get(module), name, None)
            if isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum | Exception)):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into a message")


class ChildEnd:
    """The child's end: blocks until a request comes, and answers it. Ends every other process that tries to use it."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        end.set_inheritable(False)
        self._end, self._owner, self._number = end, os.getpid(), 0
        self._identity = _identity(end)
        os.register_at_fork(after_in_child=self.close)

    def send(self, message: object) -> None:
        """Answers the last request that `recv` returned.

        Raises:
            OSError: the parent is gone, or the descriptor is no longer this socket.
            Exception: the message cannot be pickled; nothing was sent.
        """
        frame = _frame(message, self._number)
        self._check()
        self._end.sendall(frame)

    def recv(self) -> Any:
        """The next request. Raises EOFError when the parent has closed its end."""
        _, _, self._number, length, _ = _HEADER.unpack(self._exactly(_HEADER.size))
        return pickle.loads(self._exactly(length))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._end.close()

    @property
    def intact(self) -> bool:
        """Whether the descriptor is still the socket of this process."""
        return os.getpid() == self._owner and _identity(self._end) == self._identity

    def _exactly(self, size: int) -> bytes:
        self._check()
        received = bytearray(size)
        view, start = memoryview(received), 0
        while start < size:
            count = self._end.recv_into(view[start:])
            if not count:
                raise EOFError
            start += count
        return bytes(received)

    def _check(self) -> None:
        if os.getpid() != self._owner:  # a copy that foreign code forked: the original answers
            os._exit(0)
        if not self.intact:
            raise OSError("the connection to the run was closed or replaced in this process")


def _identity(end: socket.socket) -> tuple[int, int] | None:
    try:
        found = os.fstat(end.fileno())
    except OSError:
        return None
    return found.st_dev, found.st_ino
