"""Which cases of tests with many of them run, and which files are imported for them: drawn_cases.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import drawn_cases
import pytest
from child_environment import child_environment

ROOT = Path(__file__).resolve().parents[1]
FILE = "tests/test_epilogue.py"
TEST = f"{FILE}::test_arithmetic_is_exact_and_keeps_nan"
DETECTORS = ["tests/test_dynamic_detector.py", "tests/test_detector_benchmark.py"]  # with three long tests and one
LONG = "tests/test_cheating_kernels.py"  # five tests of cases, of which 38 are long

CALLS = {
    "all": ["-m", "gpu", FILE, "--gpu-share", "1"],
    "a quarter": ["-m", "gpu", FILE, "--gpu-share", "0.25"],
    "the least": ["-m", "gpu", FILE, "--gpu-share", "0"],
    "named": ["-m", "gpu", f"{TEST}[relu-bfloat16-float32-k5]"],
    "long": ["-m", "long", LONG],
    "half of the detectors": ["-m", "long", *DETECTORS, "--drawn-share", "0.5"],
    **{f"half of long, {draw}": ["-m", "long", LONG, "--drawn-share", "0.5", "--draw", draw] for draw in ("3f2a", "77be")},
}
PROGRAM = """
import json, sys
import pytest
for name, words in json.loads(sys.argv[1]).items():
    print(f"-- {name}")
    pytest.main(["-p", "no:cacheprovider", "--collect-only", "-q", *words])
"""


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What each of `CALLS` prints. One process collects them all: most of the time of a collection is that of imports."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(CALLS)]
    done = subprocess.run(command, cwd=ROOT, env=child_environment(), capture_output=True, text=True, timeout=200)
    parts = re.split(r"^-- (.*)$", done.stdout, flags=re.MULTILINE)[1:]
    assert parts[::2] == list(CALLS), done.stderr
    return dict(zip(parts[::2], parts[1::2]))


@pytest.fixture(scope="module")
def collected(printed: dict[str, str]) -> dict[str, list[str]]:
    """The cases that would run of a test with 12 epilogues, each of 12 cases."""
    return {name: re.findall(rf"{re.escape(TEST)}\[(.*)\]", text) for name, text in printed.items()}


def test_a_share_of_each_kind_of_case_runs(collected: dict[str, list[str]]) -> None:
    every, some = collected["all"], collected["a quarter"]
    assert len(every) == 144
    assert set(some) < set(every)
    stages = [case.rsplit("-", 3)[0] for case in some]
    assert {name: stages.count(name) for name in stages} == {case.rsplit("-", 3)[0]: 3 for case in every}


def test_one_of_each_kind_is_the_least_and_a_case_that_is_named_always_runs(collected: dict[str, list[str]]) -> None:
    assert len(collected["the least"]) == 12
    assert collected["named"] == ["relu-bfloat16-float32-k5"]


def test_a_draw_takes_a_share_of_the_cases_of_each_long_test_and_is_named(printed: dict[str, str]) -> None:
    cases = {name: re.findall(rf"{LONG}::(\w+)\[(.*)\]", text) for name, text in printed.items()}
    halves = [set(cases[name]) for name in cases if name.startswith("half of long")]
    count = lambda found: {name: [test for test, _ in found].count(name) for name, _ in cases["long"]}  # noqa: E731
    whole = count(cases["long"])
    assert all(half < set(cases["long"]) for half in halves) and halves[0] != halves[1]
    assert [count(half) for half in halves] == [{name: max(1, round(n / 2)) for name, n in whole.items()}] * 2
    assert max(whole.values()) > 10


def test_long_tests_of_several_files_may_be_cases_of_one(printed: dict[str, str]) -> None:
    assert len(re.findall(r"test_\w+\.py::test_\w+", printed["half of the detectors"])) == 2


def test_the_same_cases_run_again_by_what_the_report_says() -> None:
    options = {"--drawn-share": 0.5, "--draw": "3f2a"}
    config: Any = SimpleNamespace(getoption=options.__getitem__)
    assert "--drawn-share=0.5 --draw=3f2a" in str(drawn_cases.report(config))
    cases = list(range(30))
    assert len(first := drawn_cases.left_out(cases, 0.5, "3f2a")) == 15
    assert first == drawn_cases.left_out(cases, 0.5, "3f2a") != drawn_cases.left_out(cases, 0.5, "77be")
    options["--drawn-share"] = 1.0
    assert drawn_cases.report(config) is None


def test_of_a_mostly_long_test_every_nth_case_is_not_long() -> None:
    """Cases of other runs are not counted, and each test begins anew."""

    class Case:
        def __init__(self, nodeid: str, *marks: Any) -> None:
            self.nodeid, self.marks = nodeid, {mark.name: mark for mark in marks}

        def get_closest_marker(self, name: str) -> Any:
            return self.marks.get(name)

        def add_marker(self, name: str) -> None:
            self.marks[name] = getattr(pytest.mark, name)

    third = pytest.mark.mostly_long(3).mark
    items: Any = [Case(f"test_a[{number}]", third) for number in range(5)]
    items[1:1] = [Case("test_a[long]", third, pytest.mark.long), Case("test_a[gpu]", third, pytest.mark.gpu)]
    items += [Case("test_b[0]", third), Case("test_b[1]", third), Case("test_c[0]"), Case("test_c[1]")]
    drawn_cases.mark_long(items)
    run = {item.nodeid for item in items if "long" not in item.marks}
    assert run == {"test_a[0]", "test_a[gpu]", "test_a[3]", "test_b[0]", "test_c[0]", "test_c[1]"}


@pytest.mark.parametrize(
    ("expression", "of_use"),
    [
        ("long and not gpu", {"test_slow.py", "test_both.py"}),
        ("postgres", {"test_both.py"}),
        ("long and postgres", {"test_both.py"}),
        ("not gpu and not long", {"test_slow.py", "test_both.py", "test_none.py"}),
        ("long or postgres", {"test_slow.py", "test_both.py", "test_none.py"}),
        ("", {"test_slow.py", "test_both.py", "test_none.py"}),
    ],
)
def test_a_run_of_a_mark_imports_the_files_that_have_it(expression: str, of_use: set[str], tmp_path: Path) -> None:
    marks = {"test_slow.py": ["mostly_long(3)"], "test_both.py": ["long", "postgres"], "test_none.py": []}
    for name, words in marks.items():
        (tmp_path / name).write_text("".join(f"@pytest.mark.{word}\n" for word in words) + "def test(): pass\n")
    assert {name for name in marks if not drawn_cases.is_of_no_use(tmp_path / name, expression)} == of_use


def test_a_mark_that_a_file_does_not_show_is_refused(tmp_path: Path) -> None:
    """Otherwise a run of the mark would leave the test out and say nothing."""
    (tmp_path / "test_x.py").write_text("from elsewhere import test_y\n")
    item: Any = SimpleNamespace(
        nodeid="test_x.py::test_y", path=tmp_path / "test_x.py", iter_markers=lambda: [pytest.mark.fleet]
    )
    with pytest.raises(pytest.UsageError, match=r"test_x.py::test_y is marked fleet, but its file contains nothing of"):
        drawn_cases.check_files([item])
