"""Which of the many cases on a GPU run: --gpu-share in conftest.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from child_environment import child_environment

ROOT = Path(__file__).resolve().parents[1]
FILE = "tests/test_epilogue.py"
TEST = f"{FILE}::test_arithmetic_is_exact_and_keeps_nan"


def collected(*words: str) -> list[str]:
    """The cases of a test with 12 epilogues, each of 12 cases, that would run."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", "-m", "gpu", *words]
    done = subprocess.run(command, cwd=ROOT, env=child_environment(), capture_output=True, text=True, timeout=100)
    return re.findall(rf"{re.escape(TEST)}\[(.*)\]", done.stdout)


def test_a_share_of_each_kind_of_case_runs() -> None:
    every, some = collected(FILE, "--gpu-share", "1"), collected(FILE, "--gpu-share", "0.25")
    assert len(every) == 144
    assert set(some) < set(every)
    stages = [case.rsplit("-", 3)[0] for case in some]
    assert {name: stages.count(name) for name in stages} == {case.rsplit("-", 3)[0]: 3 for case in every}


def test_one_of_each_kind_is_the_least_and_a_case_that_is_named_always_runs() -> None:
    assert len(collected(FILE, "--gpu-share", "0")) == 12
    assert collected(f"{TEST}[relu-bfloat16-float32-k5]") == ["relu-bfloat16-float32-k5"]
