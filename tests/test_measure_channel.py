"""The connection to a child carries messages of schedsearch, and nothing else gets through or stops the run."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedsearch.config import Config
from schedsearch.errors import DeviceError
from schedsearch.launch import Artifact, Grid, LaunchPlan, Pointer, Step
from schedsearch.measure.run_worker import Failed, Ran, Ready
from schedsearch.measurement import Outcome
from schedsearch.processes.channel import ChildEnd, ForeignBytesError, ParentEnd
from schedsearch.processes.process import ChildDiedError, ChildProcess, wait_for

PLAN = LaunchPlan("cpu", "native", (Step("kernel", (Pointer("x"),), Grid(1), 1),), {"scratch": 8})


@pytest.fixture
def pair() -> Iterator[tuple[ParentEnd, ChildEnd, socket.socket]]:
    """Both ends in one process, and the child's socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ParentEnd(ours, os.getpid(), limit_bytes=1 << 20), ChildEnd(theirs), theirs


def frame(body: bytes, *, sender: int | None = None, magic: bytes = b"schd", checksum: int | None = None) -> bytes:
    """The format as the module describes it: magic, sender, number, length, checksum, body."""
    sums = zlib.crc32(body) if checksum is None else checksum
    return struct.pack("!4sIQQI", magic, os.getpid() if sender is None else sender, 1, len(body), sums) + body


@pytest.mark.parametrize(
    "message",
    [
        None,
        {"text": ["of", 1, 2.5, b"bytes", {3}]},
        Ran(Outcome.OK, [(1.0, 2.0)], 0.0, facts={"sets": 3}),
        Failed("text", DeviceError),
        Failed("text", RuntimeError),
        Ready({"fill": Artifact(b"code", PLAN)}),
    ],
)
def test_messages_arrive_with_the_number_of_their_request(pair: Any, message: object) -> None:
    parent, child, _ = pair
    for number in (1, 2):
        assert parent.send(["request"]) == number
        assert child.recv() == ["request"]
        child.send(message)
        assert parent.receive() == (number, message)
        assert parent.receive() is None


class _Anything:
    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


@pytest.mark.parametrize(
    "data",
    [
        b"garbage on the wire, more than a header of it",
        frame(pickle.dumps(1), magic=b"sche"),
        frame(pickle.dumps(1), sender=1),
        frame(pickle.dumps(1), checksum=7),
        struct.pack("!4sIQQI", b"schd", os.getpid(), 1, 2 << 30, 0),
        frame(b"not a pickle"),
        frame(b""),
        frame(pickle.dumps(_Anything())),
        frame(pickle.dumps(os.getcwd)),
        frame(pickle.dumps(getattr)),
        frame(pickle.dumps(Config(step=1))),
        frame(pickle.dumps(ChildProcess)),
    ],
    ids=["text", "magic", "sender", "checksum", "length", "no pickle", "empty", "call", "os", "getattr", "Config", "class"],
)
def test_anything_else_is_refused(pair: Any, data: bytes) -> None:
    parent, _, theirs = pair
    theirs.sendall(data)
    with pytest.raises(ForeignBytesError):
        for _ in range(2):
            parent.receive()


@given(st.binary(max_size=200), st.booleans())
@settings(max_examples=200)
def test_no_bytes_raise_anything_else_or_block(data: bytes, closed: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        parent = ParentEnd(ours, os.getpid())
        theirs.sendall(data)
        if closed:
            theirs.close()
        with contextlib.suppress(ForeignBytesError, EOFError):
            assert parent.receive() is None


def test_half_a_message_is_not_waited_for(pair: Any) -> None:
    parent, _, theirs = pair
    whole = frame(pickle.dumps("a message"))
    for byte in whole[:-1]:
        theirs.sendall(bytes([byte]))
        assert parent.receive() is None
    theirs.sendall(whole[-1:])
    assert parent.receive() == (1, "a message")


def test_a_message_that_cannot_be_pickled_leaves_the_connection_usable(pair: Any) -> None:
    parent, child, _ = pair
    with pytest.raises(AttributeError):
        child.send(lambda: None)
    child.send("a message")
    assert parent.receive() == (0, "a message")


def test_a_child_notices_that_its_descriptor_was_replaced(pair: Any) -> None:
    _, child, theirs = pair
    child.send(1)
    with Path(os.devnull).open() as other:
        os.dup2(other.fileno(), theirs.fileno())
    with pytest.raises(OSError, match="closed or replaced"):
        child.send(2)


def read_slowly(conn, *_):  # type: ignore[no-untyped-def]
    time.sleep(0.5)
    conn.send(len(conn.recv()))


def fork_and_answer(conn, *_):  # type: ignore[no-untyped-def]
    copied = os.fork() == 0
    if copied:
        time.sleep(0.1)
    conn.send("the copy" if copied else "the original")
    if copied:
        os.abort()
    os.wait()
    conn.send("a second answer")


def test_a_large_request_does_not_wait_for_its_reader() -> None:
    child = ChildProcess("test_measure_channel:read_slowly")
    try:
        child.send(bytes(20 << 20))
        assert child._end.unsent
        assert child.receive(60) == 20 << 20
    finally:
        child.kill()


def echo(conn, *_):  # type: ignore[no-untyped-def]
    while True:
        conn.send(conn.recv())


def end_at_once(conn, *_):  # type: ignore[no-untyped-def]
    conn.recv()


def test_children_that_answered_or_ended_are_told_from_the_others() -> None:
    silent, answers, ends = children = [
        ChildProcess(f"test_measure_channel:{name}") for name in ("echo", "echo", "end_at_once")
    ]
    try:
        assert wait_for(children, 0.0) == []
        answers.send("hello")
        ends.send("end")
        found: set[ChildProcess] = set()
        until_s = time.monotonic() + 30
        while found != {answers, ends} and time.monotonic() < until_s:
            found |= set(wait_for(children, 0.5))
        assert found == {answers, ends}
        assert answers.take() == (2, "hello") and silent.take() is None
        with pytest.raises(ChildDiedError, match="status 0"):
            ends.take()
        assert answers not in wait_for(children, 0.0), "it has nothing more to say"
    finally:
        for child in children:
            child.kill()


def test_a_forked_copy_of_a_child_does_not_answer() -> None:
    child = ChildProcess("test_measure_channel:fork_and_answer")
    try:
        assert [child.receive(30), child.receive(30)] == ["the original", "a second answer"]
        with pytest.raises(ChildDiedError, match="status 0"):
            child.receive(30)
    finally:
        child.kill()
