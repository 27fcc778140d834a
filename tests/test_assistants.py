"""The page for programs: its files and commands run in their order, and the JSON has the keys that the page shows."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = (DOCS / "assistants.md").read_text(encoding="utf-8")
COMMAND = re.compile(r"^    \$ (schedsearch .+)\n    ([\[{].+)$", re.MULTILINE)


def test_the_page_has_sixty_lines_at_most() -> None:
    assert len(PAGE.splitlines()) <= 60


def test_the_list_of_pages_leads_to_pages() -> None:
    links = re.findall(r"\]\(([^)]+)\)", (DOCS / "llms.txt").read_text(encoding="utf-8"))
    assert len(links) > 10
    assert [link for link in links if not (DOCS / link).exists()] == []


def lacks(shown: Any, printed: Any, place: str = "") -> list[str]:
    """Places in the JSON of the page that the printed one lacks, or where it has another type."""
    if isinstance(shown, dict) and isinstance(printed, dict):
        inner = [lacks(value, printed[key], f"{place}.{key}") for key, value in shown.items() if key in printed]
        return [f"{place}.{key}" for key in shown.keys() - printed.keys()] + [found for each in inner for found in each]
    if isinstance(shown, list) and isinstance(printed, list):
        return [found for value in shown[:1] for found in (lacks(value, printed[0], f"{place}[0]") if printed else [])]
    both_numbers = isinstance(shown, int | float) and isinstance(printed, int | float)
    return [] if both_numbers or type(shown) is type(printed) else [f"{place}: {type(printed).__name__}"]


@pytest.mark.parametrize(
    ("shown", "printed", "found"),
    [
        ({"a": 1}, {"a": 2.5, "b": 3}, []),
        ({"a": [{"b": ""}]}, {"a": [{"b": 1}]}, [".a[0].b: int"]),
        ({"a": {"b": 1}}, {"a": {"c": 1}}, [".a.b"]),
    ],
)
def test_missing_keys_and_other_types_are_found(shown: Any, printed: Any, found: list[str]) -> None:
    assert lacks(shown, printed) == found


@pytest.mark.long
def test_everything_on_the_page_runs_and_prints_the_keys_that_it_shows(tmp_path: Path) -> None:
    kernels, use = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "kernels.py").write_text(kernels, encoding="utf-8")
    (tmp_path / "use.py").write_text(use, encoding="utf-8")
    environment = {**os.environ, "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}  # the page shows a CPU

    def output(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=800
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    commands = COMMAND.findall(PAGE)
    assert len(commands) == PAGE.count("    $ ") == 6
    for command, shown in commands:
        printed = output("-m", "schedsearch", *shlex.split(command)[1:]).splitlines()
        assert lacks(json.loads(shown), json.loads(printed[-1])) == [], command
    assert "own_kernel_cpu" in output("use.py")
