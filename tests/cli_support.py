"""A tiny workload for the tests of the command line, and functions that call the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from schedsearch.cli.main import main

TINY = """\
target: cpu
budget: {trials: 4}
tuner: {name: random}
measure: {workers: 1}
tasks:
  - name: tiny
    op: conv2d
    shape: {n: 1, h: 8, w: 8, c: 8, k: 8, r: 3, s: 3}
    dtype: float32
"""
# The tests themselves use all cores: threads that wait for one another burn the time of others.
ONE_THREAD = TINY + "    restrict: {threads: [1]}\n"


def isolate(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Keeps the state folder and the device's lock of this test, and of the processes it starts, in `folder`."""
    (folder / "tmp").mkdir(exist_ok=True)
    patch.setenv("SCHEDSEARCH_STATE_DIR", str(folder / "state"))
    patch.setenv("TMPDIR", str(folder / "tmp"))
    patch.setattr(tempfile, "tempdir", None)  # makes tempfile read TMPDIR again


def schedsearch(*arguments: str | Path) -> Result:
    """Runs the command in this process, with separate standard output and standard error."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def start(*arguments: str | Path, cwd: Path) -> subprocess.Popen[str]:
    """Runs the command in its own process, as a user does."""
    return subprocess.Popen(
        [sys.executable, "-c", "from schedsearch.cli.console import run; run()", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # If a shell starts the tests in the background, they and their children ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def events(text: str) -> list[dict[str, Any]]:
    """The JSON events of `tune --json`. Fails if the output has anything else."""
    return [json.loads(line) for line in text.splitlines()]


def children(pid: int) -> set[int]:
    """Living child processes, as the kernel lists them."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        found |= {int(child) for child in (task / "children").read_text().split()}
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
