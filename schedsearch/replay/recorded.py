"""Spaces whose every configuration was measured before, read from the files that tuners keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from schedsearch.errors import UsageError
from schedsearch.identity import sha256_hex
from schedsearch.records.formats import kernel_tuner, t4
from schedsearch.records.formats.recording import Recording, read_json
from schedsearch.records.output import is_database
from schedsearch.space import Knob, Rows
from schedsearch.space.listed import ListedSpace

MIN_RECORDS = 50  # different configurations that make (workload, template, target, mode) of a database a space


@dataclass(frozen=True)
class RecordedSpace:
    """A space with the outcome of each of its legal configurations.

    Attributes:
        file: where it comes from.
        name: which space of that file it is.
        rows: (n, knobs) index rows, in ascending order of their keys.
        times_ns: (n,), NaN where the configuration failed.
        repetitions_ns: per row the single readings behind its time, () where there are none; only noise needs them.
    """

    file: str
    name: str
    knobs: tuple[Knob, ...]
    rows: Rows
    times_ns: NDArray[np.float64]
    repetitions_ns: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, recording: Recording, name: str) -> RecordedSpace:
        """Raises UsageError if there is nothing to search: a single configuration, or no valid one."""
        entries = recording.entries
        if len(entries) < 2:
            raise UsageError(f"{recording.source}: {name} has one single configuration; a search needs at least two")
        if all(entry.time_ns is None for entry in entries):
            raise UsageError(f"{recording.source}: all {len(entries)} configurations of {name} failed; there is no optimum")
        position = [{(type(value), value): i for i, value in enumerate(knob.values)} for knob in recording.knobs]
        rows = np.array(
            [
                [
                    where[type(entry.config[knob.name]), entry.config[knob.name]]
                    for where, knob in zip(position, recording.knobs)
                ]
                for entry in entries
            ],
            dtype=np.int32,
        )
        order = np.lexsort(rows.T[::-1])
        times = np.array([np.nan if entry.time_ns is None else entry.time_ns for entry in entries])
        repetitions = tuple(entries[i].times_ns for i in order)
        return cls(recording.source, name, recording.knobs, rows[order], times[order], repetitions)

    @property
    def best_ns(self) -> float:
        return float(np.nanmin(self.times_ns))

    def space(self) -> ListedSpace:
        """A new space object, which no other run has seen."""
        return ListedSpace(self.knobs, self.rows)

    def fingerprint(self) -> str:
        """A digest that is equal for the same data in another format, unit or order of knobs. It rounds times to six digits.

        It covers only values that occur, because a database does not know which others its source allowed.
        """
        varies = (self.rows != self.rows[0]).any(axis=0)
        names = sorted(knob.name for knob, more in zip(self.knobs, varies) if more)
        column = {knob.name: i for i, knob in enumerate(self.knobs)}
        values = {knob.name: [str(value) for value in knob.values] for knob in self.knobs}
        lines = [
            ",".join(values[name][row[column[name]]] for name in names) + f"={time_ns:.5e}"
            # Slightly increased, so that 29.94895 and 29.948949999999996 round alike.
            for row, time_ns in zip(self.rows.tolist(), (self.times_ns * (1 + 1e-9)).tolist())
        ]
        return sha256_hex(f"{names}\n" + "\n".join(sorted(lines)))


# ---- reading


@dataclass(frozen=True)
class Loaded:
    """Recorded spaces, each once, the spaces that were left out with the reason, and what is strange about the data."""

    spaces: tuple[RecordedSpace, ...]
    left_out: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def load(paths: Sequence[str | Path], t1: str | Path | None = None) -> Loaded:
    """Reads recorded spaces. Leaves out a space whose data came before, in any format.

    Args:
        paths: Kernel Tuner caches, T4 results, both also as gzip, and schedsearch databases.
        t1: the T1 description of the T4 results; default: the one beside each.

    Raises:
        UsageError: a file cannot be read, has a mistake, or contains no space; the message names file and place.
        DatabaseError: a database cannot be read.
    """
    spaces: list[RecordedSpace] = []
    left_out: list[str] = []
    warnings: list[str] = []
    first: dict[str, RecordedSpace] = {}
    for path in paths:
        for space in _read(path, t1, left_out, warnings):
            twin = first.setdefault(space.fingerprint(), space)
            if twin is space:
                spaces.append(space)
            else:
                left_out.append(f"{space.file} ({space.name}): the same data as {twin.file}, counted once")
    return Loaded(tuple(spaces), tuple(left_out), tuple(warnings))


def _read(path: str | Path, t1: str | Path | None, left_out: list[str], warnings: list[str]) -> Iterator[RecordedSpace]:
    if is_database(path):
        yield from _read_database(path, left_out)
        return
    data = read_json(path)
    if kernel_tuner.is_cache(data):
        recording = kernel_tuner.parse(data, path)
    elif t4.is_results(data):
        recording = t4.parse(data, path, t1)
    else:
        t4.refuse_description(data, path)
        raise UsageError(
            f"{path}: neither a Kernel Tuner cache (with 'tune_params' and 'cache'), nor T4 results (with 'results'), "
            "nor a schedsearch database"
        )
    warnings += recording.warnings
    yield RecordedSpace.of(recording, " ".join(text for text in (recording.kernel, recording.device) if text) or "space")


def _read_database(path: str | Path, left_out: list[str]) -> Iterator[RecordedSpace]:
    from schedsearch.records.formats.exchange import recordings
    from schedsearch.records.store import Store

    found = False
    with Store.open(path, create=False, readonly=True) as store:
        for task, recording in recordings(store):
            if len(recording.entries) < MIN_RECORDS:
                left_out.append(f"{path} ({task}): {len(recording.entries)} configurations, fewer than {MIN_RECORDS}")
                continue
            if all(entry.time_ns is None for entry in recording.entries):
                left_out.append(f"{path} ({task}): all {len(recording.entries)} configurations failed")
                continue
            found = True
            yield RecordedSpace.of(replace(recording, source=str(path)), str(task))
    if not found:
        raise UsageError(
            f"{path}: no workload has {MIN_RECORDS} or more recorded configurations of one template, target and mode, "
            "one of them valid; record more with: schedsearch tune --trials N"
        )
