"""Marks what files from elsewhere hold as trusted on this machine, and takes marks back: `schedsearch records trust`.

`claims` says what a mark means.

See docs/decisions/004-trust.md.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from schedsearch.records import size_tables, state
from schedsearch.records.claims import AnyClaim, mark_of
from schedsearch.records.executables import ExecutableFile, is_executable
from schedsearch.records.lookup import Lookup
from schedsearch.records.state import state_dir

_MARK = re.compile(r"[0-9a-f]{64}")  # the name of a mark's file


def mark(marked: Iterable[AnyClaim], source: Path) -> int:
    """Marks claims as trusted on this machine; `source` is noted in the marks. Returns how many had no mark before.

    Raises:
        DatabaseError: the state folder cannot be written.
    """
    note = json.dumps({"source": str(source.absolute()), "at": time.time()}).encode()
    new = [path for claim in marked if not state.holds(path := mark_of(claim))]
    for path in new:
        state.write(path, note)
    return len(new)


@dataclass(frozen=True)
class Trusted:
    """What `trust` did: how many kernels the file holds, and how many of them were neither signed nor marked before.
    A model.ssx counts as one, and so does the table of a range of sizes."""

    kernels: int
    marked: int


def trust(path: str | Path) -> Trusted:
    """Marks the kernels that a database holds now, or a whole model.ssx, as trusted on this machine, wherever the file goes.

    Raises:
        DatabaseError: it is not a file of schedsearch, or a mark cannot be written.
    """
    if is_executable(path):
        with ExecutableFile(path) as file:
            return Trusted(1, mark([] if file.vouched else [file.claim], file.path))
    with Lookup(path) as lookup:
        rows, tables = lookup.with_code(), size_tables.all_rows(lookup.path, lookup.damage)
        claims: list[AnyClaim] = [row.claim for row in rows if not row.vouched]
        claims += [row.claim for row in tables if not row.vouched]
        return Trusted(len(rows) + len(tables), mark(claims, lookup.path))


@dataclass(frozen=True)
class Source:
    """A file whose kernels were marked.

    Attributes:
        path: where the file was when `trust` read it.
        marks: how many of its kernels are still marked.
        last_s: when the last of them was marked, in seconds since 1970.
    """

    path: str
    marks: int
    last_s: float


def sources() -> list[Source]:
    """The files whose kernels are marked on this machine, the latest first.

    Raises:
        DatabaseError: the state folder cannot be read, or others may write to it.
    """
    state.check()
    found: dict[str, list[float]] = {}
    for note in _notes().values():
        found.setdefault(note[0], []).append(note[1])
    return sorted((Source(path, len(times), max(times)) for path, times in found.items()), key=lambda each: -each.last_s)


def distrust(path: str | Path) -> int:
    """Removes the marks of the kernels that were marked when a file was at `path`, and of those that it holds now.

    The file may be gone. Returns the number of marks removed. Kernels that this machine signed need no mark, and stay.

    Raises:
        DatabaseError: a mark cannot be removed, or the file is not a database of schedsearch.
    """
    path = Path(path)
    marks = {mark for mark, (source, _) in _notes().items() if source == str(path.absolute())}
    if is_executable(path):
        with ExecutableFile(path) as file:
            marks |= {mark_of(file.claim)} if state.holds(mark_of(file.claim)) else set()
    elif path.exists():
        with Lookup(path) as lookup:
            held = [mark_of(row.claim) for row in lookup.with_code()]
            held += [mark_of(row.claim) for row in size_tables.all_rows(lookup.path, lookup.damage)]
            marks |= {each for each in held if each.is_file()}
    for each in marks:
        try:
            each.unlink(missing_ok=True)
        except OSError as error:
            raise state.unusable(each, error) from error
    return len(marks)


def _notes() -> dict[Path, tuple[str, float]]:
    """Every mark with its source and its time; both are empty in a mark whose note cannot be read."""
    folder = state_dir() / "trusted"
    try:
        marks = sorted(folder.iterdir()) if folder.is_dir() else []
        texts = {mark: mark.read_bytes() for mark in marks if _MARK.fullmatch(mark.name)}
    except OSError as error:
        raise state.unusable(folder, error) from error
    found = {}
    for mark, text in texts.items():
        try:
            note = json.loads(text)
            found[mark] = (str(note["source"]), float(note["at"]))
        except (ValueError, TypeError, KeyError):
            found[mark] = ("", 0.0)
    return found
