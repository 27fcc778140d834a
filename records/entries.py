"""What is worth giving to others of a database: the fastest configuration of each task, by its ratio to the default.

Times of two cards, or of one card on two days, do not compare; times of one final race do. An entry is therefore a record of
a final race in which the default took part. One that is less than `LEAST_GAIN` times as fast as the default there is within
what races vary by: the default's own record takes its place, with a gain of 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from schedsearch.config import Config
from schedsearch.errors import WorkloadError
from schedsearch.measurement import Outcome, Record
from schedsearch.records.rows import RecordRow
from schedsearch.records.store import Store
from schedsearch.roofline import least_time_ns

LEAST_GAIN = 1.02
"""Below this, a configuration counts as no faster than the default."""

MOST_GAIN = 100.0
"""Somebody else's configuration that is said to be more times as fast as the default was not measured: no rule is so bad."""

NOISE = 0.02
"""Times or gains that differ by less are within what two races of the same code differ by; more if the repeats scatter
more."""

Task = tuple[str, str, str]  # workload id, target key, mode
Kernel = tuple[str | int, ...]  # the same, and template, its version, configuration
_KERNEL = "workload_id", "target_key", "mode", "template", "template_version", "config"  # columns


@dataclass(frozen=True)
class Entry:
    """The fastest configuration of a task.

    Attributes:
        task: workload id, target key and mode.
        label: of the workload.
        gain: the default's time over its time in the same race; None if it is not known.
        spread: interquartile range of its repeats over their median; 0 if it is not known.
        record: its record; None if the file holds none.
    """

    task: Task
    label: str
    template: str
    template_version: int
    config: Config
    time_ns: float
    gain: float | None
    spread: float = 0.0
    record: Record | None = None

    @classmethod
    def of(cls, record: Record) -> Entry:
        """From a record that is ok."""
        ratio, time_ns = record.anchor_ratio, record.measurement.time_ns
        assert time_ns is not None
        task = record.workload.id, record.target, record.measurement.mode
        return cls(
            task, record.workload.label, record.template, record.template_version, record.config, time_ns,
            None if ratio is None else 1 / ratio, record.measurement.spread, record,
        )  # fmt: skip

    @property
    def is_default(self) -> bool:
        return self.gain == 1

    def same_kernel(self, other: Entry) -> bool:
        mine, theirs = ((each.template, each.template_version, each.config.json, each.task[0]) for each in (self, other))
        return mine == theirs


@dataclass(frozen=True)
class Chosen:
    """Entries of a store, and how many of its bests are none: without a final race that the default took part in."""

    entries: tuple[Entry, ...]
    left_out: int


def chosen(store: Store, *, target: str | None = None, mode: str | None = None) -> Chosen:
    """The entries among the bests that this machine measured, or whose origin it trusts."""
    entries, left_out = [], 0
    for best in store.bests(target=target, mode=mode):
        if best.row.source or not best.vouched:
            continue
        try:
            entry = Entry.of(best.record)
        except WorkloadError:  # of an operator that is not installed
            left_out += 1
            continue
        if entry.gain is not None and entry.gain < LEAST_GAIN:
            default = _default_of(store, best.row)
            entry = replace(Entry.of(default), gain=1.0) if default else replace(entry, gain=None)
        if entry.gain is None:
            left_out += 1
        else:
            entries.append(entry)
    return Chosen(tuple(entries), left_out)


def _default_of(store: Store, row: RecordRow) -> Record | None:
    """The record of the default in the race of another record."""
    assert row.anchor is not None
    for other in store.history(row.workload, row.target, mode=row.measurement.mode):
        if (other.run, other.final_race, other.anchor) == (row.run, True, row.anchor) and (
            other.measurement.time_ns == row.anchor.time_ns
        ):
            return other
    return None


def better(one: Entry, other: Entry) -> bool:
    """Whether an entry of a task is better than another of it: by the gain, which is better known than unknown; equal gains
    keep the other."""
    return (one.gain or 0.0) > (other.gain or 0.0)


def merged(entries: Iterable[Entry]) -> dict[Task, Entry]:
    """The best entry of each task; the first of equal ones."""
    found: dict[Task, Entry] = {}
    for each in entries:
        if each.task not in found or better(each, found[each.task]):
            found[each.task] = each
    return found


def imported(store: Store, target: str, mode: str) -> Iterator[Entry]:
    """The best configuration that others measured of each task, of those that are not known here, where this machine has
    measured none as good."""
    rows = [row for row in store.rows(target=target, mode=mode, outcomes={Outcome.OK}, limit=None) if row.source]
    known = known_here(store) if rows else set()
    bests = {best.task: Entry.of(best.record) for best in store.bests(target=target, mode=mode) if not best.row.source}
    records = [row.record() for row in rows if not row.problem]
    entries = [Entry.of(each) for each in records if kernel_of(each) not in known]
    for task, entry in merged(entries).items():
        if task not in bests or better(entry, bests[task]):
            yield entry


def kernel_of(record: Record) -> Kernel:
    """The task and the configuration of a record."""
    return (
        record.workload.id, record.target, record.measurement.mode,
        record.template, record.template_version, record.config.json,
    )  # fmt: skip


def known_here(store: Store) -> set[Kernel]:
    """The configurations that this machine has raced, or that failed here: nobody else's claim about them counts."""
    found = store.columns(("id", *_KERNEL, "outcome", "final_race", "source"))
    return {tuple(kernel) for _, *kernel, outcome, raced, source in found if not source and (raced or outcome != Outcome.OK)}


def why_impossible(entry: Entry) -> str:
    """Why no card can have measured somebody else's entry, as words that follow its label: a kernel in less time than
    `roofline.least_time_ns`, or one more than `MOST_GAIN` times as fast as its default. "" if it is possible."""
    assert entry.record is not None
    if entry.time_ns < least_time_ns(entry.record.workload, entry.task[1], entry.task[2]):
        return f"in {entry.time_ns:g} ns is not possible"
    if entry.gain is not None and entry.gain > MOST_GAIN:
        return f"{entry.gain:.3g} times as fast as its default is not possible, at most {MOST_GAIN:g}"
    return ""
