"""The harness of the fuzzers finds what it must find, and a few cases of every fuzzer end well."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import fuzz_command, fuzzing
from faults.fuzzing import Broken, Result


class Faulty:
    """A fuzzer whose case 3 does something bad."""

    def __init__(self, bad: Callable[[], object]) -> None:
        self._bad = bad
        self._calls = 0

    def case(self, random: random.Random, folder: Path) -> str:
        if self._calls == 3:
            self._bad()
        self._calls += 1
        return str(random.randrange(2))


class Draws:
    def case(self, random: random.Random, folder: Path) -> str:
        return str(random.random())


def run(fuzzer: fuzzing.Fuzzer, folder: Path, **options: int) -> Result:
    return fuzzing.run("faulty", fuzzer, 0, options.pop("count", 6), folder, **options)


def broken() -> None:
    raise Broken("served a wrong result")


def spin() -> None:
    while True:
        pass


FAULTS = {
    "served a wrong result": broken,
    "ZeroDivisionError": lambda: 1 / 0,
    "the process died of SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "the process exited with 3": lambda: os._exit(3),
    "MemoryError": lambda: bytes(2 << 30),
    "took more than 0.2 s of processor time": spin,
    "was not finished after 1 s": lambda: os.read(os.pipe()[0], 1),
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_fault_is_a_finding_and_the_other_cases_go_on(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "processor" in text:
        monkeypatch.setattr(fuzzing, "CPU_LIMIT_S", 0.2)
    if "finished" in text:
        monkeypatch.setattr(fuzzing, "WALL_LIMIT_S", 1.0)
    result = run(Faulty(FAULTS[text]), tmp_path)
    # A worker that died is replaced by a copy of the process as it was at first, whose fourth case is none of the last two.
    assert (result.cases, result.broken) == (6, 1) or "Error" in text or "served" in text
    assert text in result.findings[0].text
    assert result.findings[0].case == 3
    assert result.cases == 6


def test_memory_over_the_limit_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []  # in the worker, a copy of this process
    measured = fuzzing._memory
    peak = lambda name: measured(name) + (sum(taken) if name == "VmHWM" else 0)  # noqa: E731
    monkeypatch.setattr(fuzzing, "_memory", peak)
    result = run(Faulty(lambda: taken.append(fuzzing.MEMORY_LIMIT_BYTES + 1)), tmp_path)
    assert [(finding.case, "of memory" in finding.text) for finding in result.findings] == [(3, True)]
    assert result.cases == 6


def test_a_case_depends_on_seed_and_number_alone(tmp_path: Path) -> None:
    whole = run(Draws(), tmp_path, count=5).outcomes
    parts = run(Draws(), tmp_path, count=2).outcomes + run(Draws(), tmp_path, count=3, first=2).outcomes
    assert whole == parts
    assert len(whole) == 5


def test_a_deadline_ends_a_run(tmp_path: Path) -> None:
    assert fuzzing.run("faulty", Faulty(broken), 0, 10**9, tmp_path, 0.2).cases < 10**9


COUNTS = {"workload_files": 80, "databases": 60, "imports": 60, "conditions": 300, "plans": 100, "arguments": 150}


@pytest.mark.faults
def test_some_cases_of_every_fuzzer_end_well(tmp_path: Path) -> None:
    """`make faults` tries many thousands. They share one sample database, so they are one test."""
    assert COUNTS.keys() == fuzz_command.FUZZERS.keys()
    results = [fuzzing.run(name, fuzz_command.make(name), 0, count, tmp_path) for name, count in COUNTS.items()]
    assert [str(finding) for result in results for finding in result.findings] == []
    assert [result.cases for result in results] == list(COUNTS.values())
    assert all(len(result.outcomes) > 1 for result in results), "a generator that only makes nonsense tests little"
