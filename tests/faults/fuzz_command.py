"""`python -m tests.faults fuzz NAME`: runs one fuzzer, or repeats one of its cases."""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from . import fuzzing

# name -> module and class
FUZZERS = {
    "workload_files": ("fuzz_workload_files", "WorkloadFiles"),
    "databases": ("fuzz_databases", "Databases"),
    "imports": ("fuzz_imports", "Imports"),
    "conditions": ("fuzz_conditions", "Conditions"),
    "plans": ("fuzz_plans", "Plans"),
    "arguments": ("fuzz_arguments", "Arguments"),
}


def make(name: str) -> fuzzing.Fuzzer:
    """The fuzzer of this name."""
    module, kind = FUZZERS[name]
    made: fuzzing.Fuzzer = getattr(importlib.import_module(f"{__package__}.{module}"), kind)()
    return made


def run(
    name: str, seed: int, count: int, deadline_s: float | None = None, first: int = 0, report: Callable[..., None] = print
) -> fuzzing.Result:
    """Runs a fuzzer in a folder of its own, with a state folder of its own; see `fuzzing.run`."""
    with _own_folder() as folder:
        return fuzzing.run(name, make(name), seed, count, folder, deadline_s, first=first, report=report)


def main(arguments: Sequence[str]) -> int:
    """The command. Returns 1 if there is a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults fuzz", description=__doc__)
    parser.add_argument("name", choices=[*FUZZERS, "all"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--deadline", type=float, help="stop after so many seconds")
    parser.add_argument("--case", type=int, help="repeat this case in this process")
    parser.add_argument("--keep", type=Path, help="with --case: leave its files in this folder")
    options = parser.parse_args(arguments)
    if options.case is not None:
        return _repeat(options)
    broken = 0
    for name in FUZZERS if options.name == "all" else [options.name]:
        result = run(name, options.seed, options.count, options.deadline, options.first, _tell)
        print(result, flush=True)
        broken += result.broken
    return min(broken, 1)


def _tell(finding: fuzzing.Finding) -> None:
    print(finding, f"   [{finding.place}]" if finding.place else "", flush=True)


def _repeat(options: argparse.Namespace) -> int:
    """Tries one case in this process and shows the whole traceback."""
    with _own_folder() as folder:
        if options.keep is not None:
            folder = options.keep
            folder.mkdir(parents=True, exist_ok=True)
        fuzzer = make(options.name)
        found = fuzzing.repeat(options.name, fuzzer, options.seed, options.case, folder, keep=options.keep is not None)
    print(found)
    return int(not isinstance(found, str))


class _own_folder:  # reads as a function
    def __enter__(self) -> Path:
        memory = Path("/dev/shm")
        self._folder: Any = tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory if memory.is_dir() else None)
        folder = Path(self._folder.name)
        self._patch = pytest.MonkeyPatch()
        self._patch.setenv("SCHEDSEARCH_STATE_DIR", str(folder / "state"))
        self._patch.setenv("SCHEDSEARCH_BUILD_CACHE", str(folder / "builds"))
        return folder

    def __exit__(self, *error: object) -> None:
        self._patch.undo()
        self._folder.cleanup()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
