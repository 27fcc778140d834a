"""Which cases of a run are drawn, and which files a run need not import. `conftest.py` registers the options.

Two kinds of tests have more cases than one run has time for: those marked `many` on a GPU, and those marked `long` or
`drawn`. A run takes a share of each test's cases, one at least. Those on a GPU are the same in each run. The others depend
on --draw, which the Makefile takes from the commit, so that all cases run in the course of time.

Of a test marked `mostly_long(n)` every nth case runs in `make test`, and the others are long.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

COMPILES = "test_candidates_compile"  # of the contract of templates

# Mark -> what a file contains that gives it to one of its tests. A run of one mark imports no other file: to import all of
# them takes 20 seconds of each worker.
_FILES = {
    "long": rf"mark\.(mostly_)?long\b|\blong_cases\b|\bTemplateContract\b|{COMPILES}",
    "integrations": r"mark\.integrations\b|\btorch\b|\bkernel_tuner_package\b",
    **{name: rf"mark\.{name}\b" for name in ("browser", "faults", "fleet", "gpu", "postgres")},
}


_ELSEWHERE = ("long", "gpu", "integrations")  # marks of the cases of a test that other runs have


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-share",
        type=float,
        default=0.1,
        metavar="S",
        help="the share of the many cases on a GPU that runs, 0 to 1 (default 0.1); compiling all takes hours of a core",
    )
    parser.addoption(
        "--drawn-share",
        type=float,
        default=1.0,
        metavar="S",
        help="the share of the cases of each test marked long or drawn that runs, 0 to 1 (default 1)",
    )
    parser.addoption("--draw", default="0", metavar="TEXT", help="decides which cases --drawn-share takes (default 0)")


def report(config: pytest.Config) -> str | None:
    """The line that says how the same cases run again."""
    share, draw = config.getoption("--drawn-share"), config.getoption("--draw")
    return f"{share:g} of the cases of long tests, those of --drawn-share={share:g} --draw={draw}" if share < 1 else None


def left_out(cases: Sequence[Any], share: float, draw: str) -> list[Any]:
    """All but a share of the cases, one at least, that `draw` decides."""
    return random.Random(draw).sample(cases, len(cases) - max(1, round(share * len(cases))))


def some_of(choices: Sequence[Any], share: float, number: int) -> list[Any]:
    """The share of the choices, one at least. Each number begins at another choice."""
    count = min(len(choices), max(1, math.floor(share * len(choices))))
    return [choices[(number + i) % len(choices)] for i in range(count)]


def mark_long(items: Sequence[pytest.Item]) -> None:
    """Marks the cases of tests marked `mostly_long(n)` `long`, but for the first and every nth after it. Cases that other
    runs have do not count."""
    cases = dict[str, list[pytest.Item]]()
    for item in items:
        if item.get_closest_marker("mostly_long") and not any(map(item.get_closest_marker, _ELSEWHERE)):
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for each in cases.values():
        for number, item in enumerate(each):
            if number % item.get_closest_marker("mostly_long").args[0]:  # type: ignore[union-attr]
                item.add_marker("long")


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps what this run draws of the cases of tests marked `many`, `long` or `drawn`. All stay if the command line names a
    case.

    Tests marked `long(of="detectors")` are cases of one test in any file. With `many(each="stages")` the share
    is one of the cases with each value of the parameter `stages`. The candidates that the contract of templates compiles are
    cases of one test: `make test-targets` compiles a kernel of each template, too.
    """
    if any("[" in argument for argument in config.args):
        return
    out = set[pytest.Item]()
    draws: list[tuple[str, float, str]] = [
        ("many", config.getoption("--gpu-share"), ""),
        *((mark, config.getoption("--drawn-share"), config.getoption("--draw")) for mark in ("long", "drawn")),
    ]
    for mark, share, draw in draws:
        if share >= 1:
            continue
        cases = dict[str, list[pytest.Item]]()
        for item in items:
            if found := item.get_closest_marker(mark):
                name = COMPILES if item.nodeid.endswith(COMPILES) else item.nodeid.split("[")[0]
                name = found.kwargs.get("of", name)
                of = str(item.callspec.params[found.kwargs["each"]]) if "each" in found.kwargs else ""  # type: ignore[attr-defined]
                cases.setdefault(f"{name} {of}", []).append(item)
        for name, each in cases.items():
            out |= set(left_out(each, share, draw + name))
    if out:
        config.hook.pytest_deselected(items=[item for item in items if item in out])
        items[:] = [item for item in items if item not in out]


def is_of_no_use(path: Path, expression: str) -> bool:
    """Whether a file of tests has none that `-m expression` selects, as far as a look at its text tells."""
    words = re.findall(r"\w+|\S", expression)
    if not path.match("test_*.py") or not words or "or" in words or "(" in words:
        return False
    needed = [term for term in expression.split(" and ") if term.strip() in _FILES]
    return not all(_text_has(path, term.strip()) for term in needed)


def check_files(items: Sequence[pytest.Item]) -> None:
    """Raises UsageError if a run of a mark would not import the file of a test that has the mark."""
    for item in items:
        for mark in item.iter_markers():
            if mark.name in _FILES and not _text_has(item.path, mark.name):
                raise pytest.UsageError(
                    f"{item.nodeid} is marked {mark.name}, but its file contains nothing of {_FILES[mark.name]!r}, so -m "
                    f"{mark.name} would not run it; write what gives it the mark in that file, or change {__name__}._FILES"
                )


@cache
def _text_has(path: Path, mark: str) -> bool:
    return re.search(_FILES[mark], path.read_text(encoding="utf-8")) is not None
