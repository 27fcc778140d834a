"""The short size of the campaign: every scenario about once, group by group, in a process that forks nothing of pytest's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def campaign(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.faults", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("group", ["candidate.*", "process.*", "system.*", "database.*"])
def test_everything_holds(group: str) -> None:
    ran = campaign("--short", "--jobs", "2", "--only", group)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert "held" in ran.stdout
