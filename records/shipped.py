"""The records that come with the package: configurations that were measured for kinds of cards, a file for each kind.

A file is one of `records ship`: a deployment file without machine code. It says which configuration is the fastest of a
workload; whoever takes one builds and verifies its kernel here first, so that it needs no trust. Standard library only.

See docs/decisions/257-shipped-records-are-a-source.md.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedsearch.errors import DatabaseError, UsageError
from schedsearch.records.lookup import Lookup, LookupRow, NeighbourRow
from schedsearch.text import counted
from schedsearch.workload import Workload

if TYPE_CHECKING:
    from schedsearch.similar import Similar

FOLDER_VARIABLE = "SCHEDSEARCH_TUNED_DIR"
"""Environment: a folder of such files in place of the package's; if it is empty, there are no shipped records."""

MANIFEST, GAINS = "manifest", "gains"
"""Rows of table meta: JSON of what the file is and who measured it; and of workload id -> time of the default configuration
over the time of the row, 1 where the default is the row, by `gain_key`."""


@dataclass(frozen=True)
class Shipped:
    """The shipped records of one kind of device.

    Attributes:
        lookup: the file; None if there is none that can be used.
        problem: why there is none; "" with a file.
    """

    lookup: Lookup | None
    problem: str = ""

    @property
    def name(self) -> str:
        return "" if self.lookup is None else self.lookup.path.name

    @functools.cached_property
    def manifest(self) -> dict[str, Any]:
        """What `records ship` wrote about the file: target, who, toolchain, made_at ...; empty if it cannot be read."""
        return self._object(MANIFEST)

    @property
    def summary(self) -> str:
        """The file, how many records it has and who measured them; or why there is none."""
        if self.lookup is None:
            return self.problem
        records = self.manifest.get("records")
        count = counted(records, "record") if isinstance(records, int) else "records"
        return f"{self.name}, {count} by {self.manifest.get('who', 'nobody named')}"

    def exact(self, workload_id: str, target_key: str, mode: str) -> LookupRow | None:
        """The fastest configuration of exactly this task. Raises DamageError if its row is damaged."""
        return None if self.lookup is None else self.lookup.exact(workload_id, target_key, mode)

    def gain(self, workload_id: str, mode: str) -> float | None:
        """How many times as fast as the default configuration the record of a task was where it was measured; None if it is
        not known."""
        found = self._gains.get(gain_key(workload_id, mode))
        return float(found) if isinstance(found, int | float) and found >= 1 else None

    def neighbours(self, op: str, mode: str, target_prefix: str) -> tuple[tuple[NeighbourRow, Workload], ...]:
        """As `Lookup.nearest`, with the workloads, as far as this installation can read them. Kept, for the file does not
        change."""
        return _neighbours(self, op, mode, target_prefix)

    def similar(self, workload: Workload, mode: str, target_prefix: str, count: int) -> list[tuple[NeighbourRow, Workload]]:
        """The `count` neighbours that are most similar to a workload."""
        return [each for _, each in _similar(self, workload.op, mode, target_prefix).nearest(workload, count)]

    @functools.cached_property
    def _gains(self) -> dict[str, Any]:
        return self._object(GAINS)

    def _object(self, key: str) -> dict[str, Any]:
        try:
            found = json.loads(self.lookup.meta.get(key, "{}")) if self.lookup else {}
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def __hash__(self) -> int:
        return id(self)


def gain_key(workload_id: str, mode: str) -> str:
    """The key of a task in the row `GAINS`."""
    return f"{workload_id[:16]} {mode}"


def shipped_folder() -> Path | None:
    """Where the files are: the package's folder, or that of `SCHEDSEARCH_TUNED_DIR`; None if that is empty."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return Path(str(sys.modules[__name__.partition(".")[0]].__file__)).parent / "tuned"
    return Path(folder) if folder else None


def file_name(target_key: str) -> str:
    """The name of the file for a kind of device.

    >>> file_name("cuda:sm_90:132:NVIDIA H200")
    'cuda-sm_90-132-nvidia-h200.db'
    """
    return re.sub(r"[^a-z0-9_]+", "-", target_key.lower()).strip("-")[:100] + ".db"


def any_shipped() -> bool:
    """Whether there are shipped records of any kind of device."""
    folder = shipped_folder()
    return folder is not None and any(folder.glob("*.db"))


def shipped_records(target_key: str) -> Shipped:
    """The shipped records of a kind of device; they are opened once in a process. It raises nothing: what cannot be used is
    left out, with the reason."""
    folder = shipped_folder()
    if folder is None:
        return Shipped(None, f"shipped records are switched off ({FOLDER_VARIABLE} is empty)")
    path = folder / file_name(target_key)
    try:
        status = path.stat()
    except OSError:
        return Shipped(None, f"no records are shipped for {target_key}")
    return _opened(os.getpid(), path, status.st_ino, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=16)
def _opened(_pid: int, path: Path, *_state: int) -> Shipped:
    """A forked process opens its own, and a file that was replaced is opened again."""
    try:
        lookup = Lookup(path)
    except DatabaseError as error:
        return Shipped(None, str(error))
    if lookup.kind != "deploy":
        lookup.close()
        return Shipped(None, f"{path} is not a file of `schedsearch records ship`")
    return Shipped(lookup)


@functools.lru_cache(maxsize=64)
def _neighbours(shipped: Shipped, op: str, mode: str, target_prefix: str) -> tuple[tuple[NeighbourRow, Workload], ...]:
    rows = [] if shipped.lookup is None else shipped.lookup.nearest(op, mode, target_prefix)
    return tuple((row, workload) for row in rows if (workload := workload_of(row)) is not None)


@functools.lru_cache(maxsize=64)
def _similar(shipped: Shipped, op: str, mode: str, target_prefix: str) -> Similar[tuple[NeighbourRow, Workload]]:
    from schedsearch.similar import Similar

    return Similar((workload, (row, workload)) for row, workload in _neighbours(shipped, op, mode, target_prefix))


def workload_of(row: NeighbourRow) -> Workload | None:
    """The workload of a row; None if it is of an operator or a version that this installation does not know."""
    try:
        return Workload.from_json(row.workload_json)
    except UsageError:
        return None
