"""The dashboard, and clients that connect to it without the token and never finish what they ask."""

from __future__ import annotations

import contextlib
import http.client
import random
import re
import socket
import sys
import time
from typing import Any

from . import lab
from .scenario import Batch, Scenario

_HEADS_S = 30.0  # after which a request whose head is not complete has ended
_HEAD = b"GET /api/overview HTTP/1.1\r\nHost: localhost\r\nUser-Agent: half\r\nAccept: */*\r\nX-More: "


def _dashboard(batch: Batch) -> tuple[lab.Process, int, str]:
    def serve() -> None:
        from schedsearch.cli import console

        sys.argv = ["schedsearch", "dashboard", "none.db", "--no-browser", "--port", "0", "--token", "new"]
        console.run()

    process, told = lab.start(serve, batch.folder, "dashboard"), batch.folder / "dashboard.err"
    deadline = time.monotonic() + 60.0 * lab.patience()
    while time.monotonic() < deadline:
        process.poll()
        said = told.read_text(errors="replace") if told.exists() else ""
        if found := re.search(r":(\d+)/\?token=(\S+)", said):
            return process, int(found[1]), found[2]
        time.sleep(0.05)
    raise RuntimeError("the dashboard does not start")


def _status(port: int, token: str) -> int | str:
    """The status of the answer to a whole request, or what went wrong."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10.0 * lab.patience())) as connection:
        try:
            connection.request("GET", "/api/overview", headers={"Authorization": f"Bearer {token}"})
            return connection.getresponse().status
        except OSError as error:
            return f"{type(error).__name__}: {error}"


def _half(port: int, rng: random.Random) -> Any:
    """A connection with the beginning of a request, some of which go on with one byte after the other."""
    connected = socket.create_connection(("127.0.0.1", port), timeout=10.0 * lab.patience())
    connected.sendall(_HEAD[: rng.randrange(0, len(_HEAD))])
    return connected


def _half_requests(batch: Batch) -> None:
    for seed in batch.each():
        rng = batch.random(seed)
        process, port, token = _dashboard(batch)
        with contextlib.ExitStack() as held:
            before = _status(port, token)
            connections = [held.enter_context(_half(port, rng)) for _ in range(rng.choice((50, 300, 500)))]
            slow = rng.random() < 0.5
            deadline, last = time.monotonic() + (_HEADS_S + 5.0) * lab.patience(), before
            while (last := _status(port, token)) != 200 and time.monotonic() < deadline:
                for connected in connections if slow else ():
                    with contextlib.suppress(OSError):
                        connected.sendall(b"x")
                time.sleep(0.5)
            batch.check(seed, before == 200, f"the first answer is {before}")
            batch.check(seed, last == 200, f"{len(connections)} half requests{', slow ones' * slow}: then {last}")
        process.kill()


SCENARIOS = [
    Scenario(
        "service.half-requests", "up to 500 clients without a token send half a request to the dashboard, and wait",
        _half_requests, short=1,
    ),
]  # fmt: skip
