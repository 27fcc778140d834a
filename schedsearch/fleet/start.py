"""Starts a Dask worker that is a worker of a fleet, and starts it again when its scheduler went away and is back."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from schedsearch.errors import DeviceError, UsageError
from schedsearch.fleet import host
from schedsearch.fleet.connection import Connection, is_loopback
from schedsearch.text import counted

_RETRY_S = 1.0
_LOOK_S = 0.2
_CLOSES_S = 10.0
_PR_SET_PDEATHSIG = 1
_DEATH_S = 60  # without a scheduler; then the worker ends


def parse_cores(text: str) -> set[int]:
    """The cores that text like "0-3,8" names.

    Raises:
        UsageError: it does not name cores that this process may use.

    Examples:
        >>> sorted(parse_cores("0"))
        [0]
    """
    allowed = os.sched_getaffinity(0)
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        if match is None:
            raise UsageError(f"{part!r} names no cores; write numbers and ranges, e.g. 0-3,8")
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    if not found or not found <= allowed:
        raise UsageError(f"cores {text} cannot be used; allowed: {host.ranges(sorted(allowed)).replace('_', ',')}")
    return found


def command(connection: Connection, *, builds: int, gpus: int, name: str | None = None) -> list[str]:
    """The command of a Dask worker, without its program: one process, which builds and measures in children of its own."""
    arguments = [
        "-m", "distributed.cli.dask_worker", connection.address, "--nworkers", "1", "--nthreads", str(builds + gpus + 2),
        "--resources", f"CPU={builds},GPU={gpus}", "--memory-limit", "0", "--no-dashboard",
        "--death-timeout", str(_DEATH_S), "--preload", "schedsearch.fleet.preload",
        "--local-directory", tempfile.gettempdir(),
    ]  # fmt: skip
    if certificates := connection.certificates:
        for option, path in zip(("--tls-ca-file", "--tls-cert", "--tls-key"), certificates):
            arguments += [option, path]
    if is_loopback(connection.endpoint[0]):
        arguments += ["--host", "127.0.0.1"]
    if name:
        arguments += ["--name", name]
    return arguments


def become_worker(
    connection: Connection, *, builds: int | None, cores: str | None, measures: bool, name: str | None
) -> None:
    """Runs a Dask worker until a signal ends this process, or there has been no scheduler for `_DEATH_S`.

    Args:
        builds: candidates that it builds at the same time; default: one for each of its cores.
        cores: the only ones that it uses.
        measures: whether runs may measure on its devices.

    Raises:
        UsageError: Dask is not installed, or `cores` is none.
        DeviceError: the scheduler cannot be reached.
    """
    try:
        import distributed  # noqa: F401
    except ImportError as error:
        raise UsageError("a worker needs Dask: pip install 'schedsearch[fleet]'") from error
    connection.require_scheduler()
    environment = {**os.environ}
    if cores is not None:
        os.sched_setaffinity(0, parse_cores(cores))
        environment[host.CORES] = cores
    if not measures:
        environment[host.ONLY_BUILDS] = "1"
        environment["CUDA_VISIBLE_DEVICES"] = ""
    builds = len(os.sched_getaffinity(0)) if builds is None else builds
    gpus = sum(device.kind == "cuda" for device in host.devices()) if measures else 0
    environment.setdefault("DASK_LOGGING__DISTRIBUTED", "warning")
    arguments = [sys.executable, *command(connection, builds=builds, gpus=gpus, name=name)]
    # An exception of a signal's handler would be lost if the signal came while Popen forks, so handlers only take notes.
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.append(number))
    lent = counted(gpus, "GPU") if gpus else "the CPU" if measures else "no device"
    print(f"a worker of {connection.address}: {counted(builds, 'build')} at a time, {lent} to measure on", flush=True)
    while True:  # a Dask worker ends when its scheduler goes away
        _run(arguments, environment, signals)
        _wait_for_scheduler(connection, signals)


def _run(arguments: list[str], environment: dict[str, str], signals: Sequence[int]) -> None:
    """Runs a command to its end, which comes at the latest with the end of this process, or with a signal: then it raises
    KeyboardInterrupt."""
    process = subprocess.Popen(arguments, env=environment, preexec_fn=_die_with_parent)
    try:
        while process.poll() is None:
            _require_none(signals)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_S)
        _require_none(signals)
    finally:
        process.terminate()
        try:
            process.wait(_CLOSES_S)
        except subprocess.TimeoutExpired:  # one without a scheduler may try to say goodbye to it for minutes
            process.kill()
            process.wait()


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _require_none(signals: Sequence[int]) -> None:
    if signals:
        raise KeyboardInterrupt


def _wait_for_scheduler(connection: Connection, signals: Sequence[int]) -> None:
    """Raises DeviceError if it does not come back, and KeyboardInterrupt after a signal."""
    ends_s = time.monotonic() + _DEATH_S
    while True:
        time.sleep(_RETRY_S)
        _require_none(signals)
        try:
            connection.require_scheduler()
            return
        except DeviceError:
            if time.monotonic() > ends_s:
                raise
