"""The fuzzers as scenarios: their cases are tries, counted by `--files` or `--databases`."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from . import fuzz_command
from .scenario import Batch, Scenario

_FILES = ("workload_files",)  # the others count as databases and imports
_BATCH = 500
_LIMIT_S = 900.0


def _cases(name: str) -> Callable[[Batch], None]:
    def run(batch: Batch) -> None:
        first, last = batch.seeds[0], batch.seeds[-1]
        result = fuzz_command.run(name, 0, last - first + 1, first=first, report=lambda finding: None)
        for finding in result.findings:
            batch.failed(finding.case, str(finding))
        batch.facts.append(dict(result.outcomes))

    return run


def _what(name: str) -> str:
    module = importlib.import_module(f"{__package__}.{fuzz_command.FUZZERS[name][0]}")
    return (module.__doc__ or name).strip().split("\n")[0].rstrip(".")


SCENARIOS = [
    Scenario(
        f"fuzz.{name}",
        _what(name),
        _cases(name),
        unit="files" if name in _FILES else "databases",
        batch=_BATCH,
        short=0,
        limit_s=_LIMIT_S,
    )
    for name in fuzz_command.FUZZERS
]
