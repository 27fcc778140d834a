"""What two files of records disagree about, and whether it is more than noise (`records diff`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from schedsearch.config import Config
from schedsearch.records.entries import NOISE, Entry, Task, merged
from schedsearch.records.lookup import Lookup
from schedsearch.records.output import is_database
from schedsearch.records.rows import label_of
from schedsearch.records.sharing import read_pushed
from schedsearch.records.shipped import Shipped
from schedsearch.records.store import Store
from schedsearch.text import counted

Verdict = Literal["the same", "within noise", "A is faster", "B is faster", "only in A", "only in B"]


@dataclass(frozen=True)
class Difference:
    """A task.

    Attributes:
        ratio: by how much B takes longer than A: A's gain over B's, or their times if a gain is not known. None if one has
            no such task.
        by: what was compared: gain or time; "" if nothing was.
        one, other: the configurations of A and B in words, "" if there is none.
        change: the template, or that of A and that of B; and of one template the knobs that differ.
    """

    label: str
    target: str
    mode: str
    verdict: Verdict
    ratio: float | None = None
    by: str = ""
    one: str = ""
    other: str = ""
    change: str = ""


@dataclass(frozen=True)
class Differences:
    rows: tuple[Difference, ...]

    def count(self, *verdicts: Verdict) -> int:
        return sum(each.verdict in verdicts for each in self.rows)

    @property
    def headline(self) -> str:
        """Counts, and the geometric mean of the tasks that both have."""
        ratios = [each.ratio for each in self.rows if each.ratio is not None]
        mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else None
        both = self.count("the same", "within noise", "A is faster", "B is faster")
        text = (
            f"{counted(both, 'task')} in both: {self.count('the same')} the same, "
            f"{self.count('within noise')} others within noise, "
            f"{self.count('A is faster')} faster in A, {self.count('B is faster')} in B"
        )
        text += "" if mean is None else f"; B takes {mean:.3f} times as long in the geometric mean"
        return f"{text}; {self.count('only in A')} only in A, {self.count('only in B')} only in B"

    def to_json(self) -> dict[str, Any]:
        return {"tasks": [asdict(each) for each in self.rows], "summary": self.headline}


def differences(one: Mapping[Task, Entry], other: Mapping[Task, Entry]) -> Differences:
    """Every task of two files, the largest differences first."""
    rows = [_difference(task, one.get(task), other.get(task)) for task in {**one, **other}]
    return Differences(tuple(sorted(rows, key=lambda each: (-abs(math.log(each.ratio or 1.0)), each.label, each.target))))


def _difference(task: Task, one: Entry | None, other: Entry | None) -> Difference:
    some = one or other
    assert some is not None
    named = some.label, task[1], task[2]
    if one is None or other is None:
        only: Verdict = "only in A" if one else "only in B"
        return Difference(*named, only, one=_text(one), other=_text(other), change=some.template)
    texts = _text(one), _text(other), _change(one, other)
    if one.gain is not None and other.gain is not None:
        ratio, by = one.gain / other.gain, "gain"
    else:
        ratio, by = other.time_ns / one.time_ns, "time"
    verdict: Verdict = "B is faster" if ratio < 1 else "A is faster"
    if one.same_kernel(other):
        verdict = "the same"
    elif abs(ratio - 1) <= max(NOISE, one.spread, other.spread):
        verdict = "within noise"
    return Difference(*named, verdict, ratio, by, *texts)


def _text(entry: Entry | None) -> str:
    if entry is None:
        return ""
    return f"{entry.template} " + " ".join(f"{name}={value}" for name, value in sorted(entry.config.items()))


def _change(one: Entry, other: Entry) -> str:
    if one.template != other.template:
        return f"{one.template} -> {other.template}"
    names = sorted({*one.config, *other.config})
    knobs = [(name, one.config.get(name, "none"), other.config.get(name, "none")) for name in names]
    changed = ", ".join(f"{name} {before} -> {after}" for name, before, after in knobs if before != after)
    return f"{one.template}: {changed}" if changed else one.template


def read_entries(path: str | Path) -> dict[Task, Entry]:
    """The entries of a file: a database of records, a deployment file, shipped records, or a file of `records push`.

    Raises:
        UsageError, DatabaseError: it cannot be read.
    """
    if not is_database(path) and Path(path).exists():
        return merged(read_pushed(Path(path)).entries)
    with Lookup(path) as lookup:
        if lookup.kind == "deploy":
            return _deployed(lookup)
    with Store.open(path, create=False, readonly=True) as store:
        return merged(Entry.of(best.record) for best in store.bests() if not best.row.problem)


def _deployed(lookup: Lookup) -> dict[Task, Entry]:
    shipped = Shipped(lookup)
    found = {}
    for row, op, workload_json in lookup.bests():
        task = row.workload_id, row.target_key, row.mode
        label = label_of(row.workload_id, op, workload_json)
        config = Config.from_json(row.config_json)
        gain = shipped.gain(row.workload_id, row.mode)
        found[task] = Entry(task, label, row.template, row.template_version, config, row.time_ns, gain)
    return found
