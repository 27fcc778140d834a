"""Workload files as texts: what they mean, and the mistakes that are found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schedsearch.target import PRESETS, Target
from schedsearch.workload_file import WorkloadFileError, parse

ROOT = Path(__file__).resolve().parents[1]
GPU = PRESETS["h200"]
CPU = Target("cpu", "some CPU")
TASK = "{op: conv2d, shape: {n: 1, h: 8, w: 8, c: 16, k: 32, r: 3, s: 3}}"


def one(text: str) -> str:
    """A file with one task, to which lines are added."""
    return f"tasks:\n  - op: conv2d\n    shape: {{n: 1, h: 8, w: 8, c: 16, k: 32, r: 3, s: 3}}\n{text}"


def problems(text: str) -> list[tuple[int, int, str]]:
    """(line, column, message) of every mistake in a file."""
    with pytest.raises(WorkloadFileError) as caught:
        parse(text, "f.yaml")
    assert all(p.key == f"f.yaml:{p.span.line}:{p.span.column}" for p in caught.value.problems)
    return [(p.span.line, p.span.column, p.message) for p in caught.value.problems]


def only(text: str) -> tuple[int, int, str]:
    found = problems(text)
    assert len(found) == 1, found
    return found[0]


def plain(text: str) -> Any:
    from ruamel.yaml import YAML

    return YAML(typ="safe", pure=True).load(text)


def refused() -> Iterator[str]:
    """Files with a mistake that an editor can also see."""
    yield from (
        one(f"    {line}\n")
        for line in ("strid: 2", "stride: 0", "padding: [1, 2, 3]", "dtype: fp16", "weight: 0", "templates: []")
    )
    yield from (
        f"{line}\ntasks: [{TASK}]\n" for line in ("version: 2", "target: gpu", "tuner: {name: x}", "budget: {trials: 0}")
    )
    yield from ("tasks: []\n", "version: 1\n", "- a\n")
