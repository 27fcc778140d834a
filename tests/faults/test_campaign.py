"""The short size of the campaign: every scenario about once, group by group, in a process that forks nothing of pytest's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def campaign(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.faults", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.faults
@pytest.mark.timeout(3000)  # batches that hang are ended, and told, long before
@pytest.mark.parametrize(
    "groups",
    [
        ["candidate.*"],
        ["process.*", "database.*"],
        ["system.*"],
        ["store.*", "own.*", "service.*", "network.*"],
    ],
)
def test_everything_holds(groups: list[str]) -> None:
    ran = campaign("--short", "--jobs", "2", *(word for group in groups for word in ("--only", group)))
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert "held" in ran.stdout


@pytest.mark.faults
def test_what_does_not_hold_is_told_with_the_command_that_repeats_it(tmp_path: Path) -> None:
    """Two faulty scenarios take the place of real ones: one reports a failure, the other dies."""
    script = """
import os, sys
from tests.faults import __main__ as command, scenario

def fails(batch):
    for seed in batch.each():
        batch.check(seed, seed % 2 == 0, f"{seed} is odd")

def dies(batch):
    os.abort()

def leaves(batch):
    if not os.fork():
        os.execlp("sleep", "sleep", "600")

command.catalogue = lambda: [
    scenario.Scenario("some.fails", "odd seeds fail", fails, batch=3),
    scenario.Scenario("some.dies", "its process dies", dies),
    scenario.Scenario("some.leaves", "it leaves a process", leaves),
]
sys.exit(command.main(sys.argv[1:]))
"""
    arguments = ["--n", "4", "--seed", "10", "--out", str(tmp_path / "out.json"), "--jobs", "4"]
    ran = subprocess.run([sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 1, ran.stderr
    assert "python -m tests.faults --only some.fails --seed 11 --n 1\n" in ran.stdout
    result = json.loads((tmp_path / "out.json").read_text())
    fails, dies, leaves = result["scenarios"]
    assert (fails["tries"], fails["held"]) == (4, 2) and [each["seed"] for each in fails["failures"]] == [11, 13]
    assert (dies["tries"], dies["held"]) == (4, 0) and "died" in dies["failures"][0]["text"]
    assert leaves["held"] == 0 and "sleep 600" in leaves["failures"][0]["text"]


@pytest.mark.faults
def test_limits_of_time_are_longer_where_processes_share_cores() -> None:
    """The process that sleeps needs 2 s and has 1: it is killed where it is alone, and ends by itself among 20 to a core."""
    script = """
import os, sys, tempfile, time
from pathlib import Path
from tests.faults import lab

cores = len(os.sched_getaffinity(0))
for each in (0.5, 20.0):
    os.getloadavg = lambda: (each * cores, each * cores / 2, 0.0)
    ended = lab.start(lambda: time.sleep(2.0), Path(tempfile.mkdtemp(dir=sys.argv[1])), "sleep").wait(1.0)
    print(lab.patience(), ended.status)
"""
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run([sys.executable, "-c", script, folder], cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout == "1.0 None\n20.0 0\n", ran.stderr
