"""What kind of file a command was given, so that the message about a wrong one names the command that takes it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal

from schedsearch.errors import UsageError

Kind = Literal["workload", "model", "executable", "database", "kernel"]

_BY_SUFFIX: dict[str, Kind] = {
    ".yaml": "workload", ".yml": "workload", ".onnx": "model", ".ssx": "executable", ".db": "database",
    ".sqlite": "database", ".py": "kernel",
}  # fmt: skip
_NAMES = {
    "workload": "a workload file",
    "model": "an ONNX model",
    "executable": "a built network",
    "database": "a record store",
    "kernel": "a Python file",
}
_COMMANDS = {
    "workload": "schedsearch tune {file}",
    "model": "schedsearch build {file} --tune 10m (as a whole), or schedsearch extract {file} -o {stem}.yaml (its layers)",
    "executable": "schedsearch run {file}",
    "database": "schedsearch records list --db {file}",
    "kernel": "schedsearch tune {file}:KERNEL",
}


def require(path: str, wanted: Kind) -> None:
    """Raises UsageError if the name of a file says that it is of another kind; names without a known end pass."""
    got = _BY_SUFFIX.get(Path(path).suffix.lower())
    if got is None or got == wanted:
        return
    command = _COMMANDS[got].format(file=shlex.quote(path), stem=shlex.quote(str(Path(path).with_suffix(""))))
    raise UsageError(f"{path} is {_NAMES[got]}, and this command takes {_NAMES[wanted]}; for {path}: {command}")
