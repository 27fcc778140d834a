"""Benchmarks of cases in stages (benchmarks/stages.py): what was measured is kept, whatever a stage does."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPT = """
import os, time, stages

def fast(turn):
    return {{"fast_us": 1.0}}

def wrong(turn):
    raise ValueError("it is wrong")

def slow(turn):
    turn.tell({{"half_us": 2.0}})
    time.sleep(600)

def dies(turn):
    os._exit(3)

def later(turn):
    return {{"later_us": 3.0, "seen": turn.found.get("half_us")}}

every = {{"fast": 1.0, "wrong": 1.0, "slow": 1.0, "dies": 1.0, "later": 1.0}}
parser = stages.options("", ["a"], list(every), 60.0)
stages.LEAST_S = 1.0
given = parser.parse_args()
found = {{name: globals()[name] for name in every}}
stages.run_cases(given, lambda *case: found, every, lambda case: {{"batch": 1}}, print, lambda rows: {{}}, {{}})
"""


def run(tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], Any, float]:
    script, out = tmp_path / "script.py", tmp_path / "out.json"
    script.write_text(textwrap.dedent(SCRIPT.format()))
    started = time.monotonic()
    command = [sys.executable, str(script), "--out", str(out), *arguments]
    process = subprocess.run(command, capture_output=True, text=True, timeout=240, env={"PYTHONPATH": str(BENCHMARKS)})
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    return process, rows, time.monotonic() - started


def test_stages_that_fail_hang_or_die_do_not_end_the_others(tmp_path: Path) -> None:
    process, (row,), seconds = run(tmp_path, "--limit", "20")
    assert process.returncode == 0, process.stderr
    assert (row["case"], row["batch"]) == ("a", 1)
    assert (row["fast_us"], row["half_us"], row["later_us"]) == (1.0, 2.0, 3.0)
    assert row["seen"] == 2.0  # a new process knows what earlier ones found
    assert "it is wrong" in row["wrong_failed"]
    assert row["slow_failed"].startswith("stopped after its share of ")
    assert row["dies_failed"] == "its process ended"
    assert seconds < 200, "a stage that hangs would take 600 s"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_a_stage_found_is_printed_and_written_at_once(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format())
    command = [sys.executable, str(script), "--stages", "slow,fast", "--out", str(tmp_path / "out.json")]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes, env={"PYTHONPATH": str(BENCHMARKS)})
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]  # fast comes first, then the half of slow
        assert ['"fast_us": 1.0' in lines[0], '"half_us": 2.0' in lines[1]] == [True, True], lines
        ends = time.monotonic() + 120
        while time.monotonic() < ends and "half_us" not in (tmp_path / "out.json").read_text():
            time.sleep(0.05)
        assert "half_us" in (tmp_path / "out.json").read_text()
    finally:
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert f"stopped by {number.name}; " in errors and "Traceback" not in errors


def test_nothing_measured_is_a_failure(tmp_path: Path) -> None:
    process, (row,), _ = run(tmp_path, "--stages", "wrong", "--limit", "10")
    assert process.returncode != 0
    assert "nothing was measured" in process.stderr
    assert "it is wrong" in row["wrong_failed"]


def test_unknown_stages_are_refused(tmp_path: Path) -> None:
    process, rows, _ = run(tmp_path, "--stages", "fast,fats")
    assert process.returncode != 0 and not rows
    assert "stages fats are not known; allowed: fast, wrong, slow, dies, later" in process.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "net:1:fp32", "nte:1:fp32"], "'nte:1:fp32' is not possible; allowed: (net|other):BATCH:(amp|fp32)"),
        (["--cases", "net"], "case 'net' is not possible; allowed"),
        (["--cases", "net:0:amp"], "case 'net:0:amp' is not possible; allowed"),
        (["--cases", "net:x:amp"], "e.g. net:1:fp32"),
        (["--limit", "-3"], "-3 seconds are not possible; allowed: more than 0"),
        (["--limit", "nan"], "nan seconds are not possible"),
    ],
)
def test_impossible_arguments_end_the_program_before_anything_is_measured(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import stages

    known = ["net:1:fp32", "other:32:amp"]
    monkeypatch.setattr(sys, "argv", ["benchmark", "--cases", "other:7:fp32"])
    assert stages.parsed(stages.options("", known, ["fast"], 60.0), known).cases == ["other:7:fp32"]
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    with pytest.raises(SystemExit):
        stages.parsed(stages.options("", known, ["fast"], 60.0), known)
    assert message in capsys.readouterr().err
