"""Compiler processes that live as long as the tests: to start one takes longer than to compile most networks of tests."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from schedsearch.processes.builder import Builder
from schedsearch.target import Target

_OF_THE_TEST = "PYTEST_CURRENT_TEST"


def _surroundings() -> tuple[object, ...]:
    """What a process that starts now would inherit."""
    return {key: each for key, each in os.environ.items() if key != _OF_THE_TEST}, tuple(sys.path), Path.cwd()


class _Kept(Builder):
    """Whoever closes it leaves it to the next one."""

    ended = False

    def close(self) -> None:
        if self.pending:  # of a call that failed, or whose time was over
            self.end()

    def end(self) -> None:
        self.ended = True
        super().close()


class KeptCompilers:
    """Stands in for `Builder` where kernels are compiled ahead: some processes for each target, which stay.

    Who changes what such a process would inherit (the environment, sys.path, the working directory), compiles in another
    thread, or needs a second one meanwhile, gets processes of its own.

    Args:
        processes: how many for each target.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._surroundings = _surroundings()
        self._kept: dict[Target, _Kept] = {}

    def __call__(self, target: Target, workers: int, **options: Any) -> Builder:
        here = threading.current_thread() is threading.main_thread()
        if not here or _surroundings() != self._surroundings:
            return Builder(target, workers, **options)
        kept = self._kept.get(target)
        if kept is None or kept.ended:
            kept = self._kept[target] = _Kept(target, self._processes, **options)
        return kept if not kept.pending else Builder(target, workers, **options)

    def close(self) -> None:
        while self._kept:
            self._kept.popitem()[1].end()
