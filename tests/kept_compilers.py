"""Compiler processes that live as long as the tests: to start one takes longer than to compile most networks of tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from schedsearch.processes.builder import Builder
from schedsearch.target import Target

_OF_THE_TEST = "PYTEST_CURRENT_TEST"


def _surroundings() -> tuple[object, ...]:
    """What a process that starts now would inherit."""
    return {key: each for key, each in os.environ.items() if key != _OF_THE_TEST}, tuple(sys.path), Path.cwd()


class KeptCompilers:
    """Stands in for `Builder` where kernels are compiled ahead: one process for each target, which stays.

    A test that changes what such a process would inherit (the environment, sys.path, the working directory) gets processes
    of its own.
    """

    def __init__(self) -> None:
        self._surroundings = _surroundings()
        self._kept: dict[Target, Builder] = {}

    @contextmanager
    def __call__(self, target: Target, workers: int, **options: Any) -> Iterator[Builder]:
        if _surroundings() != self._surroundings:
            with Builder(target, workers, **options) as builder:
                yield builder
            return
        if target not in self._kept:
            self._kept[target] = Builder(target, 1, **options)
        builder = self._kept[target]
        try:
            yield builder
        finally:
            if builder.pending:  # of a call that failed, or whose time was over
                self._kept.pop(target).close()

    def close(self) -> None:
        while self._kept:
            self._kept.popitem()[1].close()
