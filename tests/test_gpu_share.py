"""Which of the many cases on a GPU run: --gpu-share in conftest.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from child_environment import child_environment

ROOT = Path(__file__).resolve().parents[1]
FILE = "tests/test_epilogue.py"
TEST = f"{FILE}::test_arithmetic_is_exact_and_keeps_nan"


CALLS = {
    "all": [FILE, "--gpu-share", "1"],
    "a quarter": [FILE, "--gpu-share", "0.25"],
    "the least": [FILE, "--gpu-share", "0"],
    "named": [f"{TEST}[relu-bfloat16-float32-k5]"],
}
PROGRAM = """
import json, sys
import pytest
for name, words in json.loads(sys.argv[1]).items():
    print(f"-- {name}")
    pytest.main(["-p", "no:cacheprovider", "--collect-only", "-q", "-m", "gpu", *words])
"""


@pytest.fixture(scope="module")
def collected() -> dict[str, list[str]]:
    """For each of `CALLS`, the cases that would run of a test with 12 epilogues, each of 12 cases. One process collects
    them all: most of the time of a collection is that of imports."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(CALLS)]
    done = subprocess.run(command, cwd=ROOT, env=child_environment(), capture_output=True, text=True, timeout=100)
    parts = re.split(r"^-- (.*)$", done.stdout, flags=re.MULTILINE)[1:]
    assert parts[::2] == list(CALLS), done.stderr
    return {name: re.findall(rf"{re.escape(TEST)}\[(.*)\]", text) for name, text in zip(parts[::2], parts[1::2])}


def test_a_share_of_each_kind_of_case_runs(collected: dict[str, list[str]]) -> None:
    every, some = collected["all"], collected["a quarter"]
    assert len(every) == 144
    assert set(some) < set(every)
    stages = [case.rsplit("-", 3)[0] for case in some]
    assert {name: stages.count(name) for name in stages} == {case.rsplit("-", 3)[0]: 3 for case in every}


def test_one_of_each_kind_is_the_least_and_a_case_that_is_named_always_runs(collected: dict[str, list[str]]) -> None:
    assert len(collected["the least"]) == 12
    assert collected["named"] == ["relu-bfloat16-float32-k5"]
