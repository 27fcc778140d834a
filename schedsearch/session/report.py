"""The tables of a run as values, which a command prints and a dashboard draws. `RunSummary` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

from schedsearch.measurement import BUSY_SPREAD
from schedsearch.text import counts, duration, html_table, rate_text, table


@dataclass(frozen=True)
class ResultRow:
    """The result of one task.

    Attributes:
        name: of the task.
        template: the template of the best configuration; None if none is valid.
        default_ns, best_ns: from the final race if `raced`; else single measurements, which are not comparable.
        default_spread, best_spread: interquartile range over the median of the race's repeats; None without a race.
        plain_ns, plain_spread: of the plain configuration (`Template.plain`); None without a race or such a configuration.
        speedup, over_plain: default over best, plain over best; None without a race.
        rate: 1e9 operations, or bytes, per second of the best; see `ResultTable.rate_unit`.
        trials: number of trials, including those of earlier runs.
        failures: outcome -> count, for outcomes other than ok.
        failed_default: what is wrong with the default, if it failed and another configuration is valid; else "".
        unreferenced: what kernels were compared with if there was no reference; see `own_kernel.without_reference`.
    """

    name: str
    template: str | None
    default_ns: float | None
    best_ns: float | None
    default_spread: float | None
    best_spread: float | None
    plain_ns: float | None
    plain_spread: float | None
    speedup: float | None
    over_plain: float | None
    rate: float | None
    trials: int
    failures: Mapping[str, int]
    unreferenced: str = ""
    failed_default: str = ""

    @property
    def raced(self) -> bool:
        return self.best_spread is not None


@dataclass(frozen=True)
class ResultTable:
    """The end of a run. `rate_unit` is GFLOP/s, or GB/s if a task's operator does no arithmetic worth counting."""

    rows: tuple[ResultRow, ...]
    rate_unit: str


@dataclass(frozen=True)
class SearchRow:
    """How the search of one task went.

    Attributes:
        best_ns: the best time after each of the table's marks; None if nothing was valid yet, or there were fewer trials.
        share_of_trials, share_of_time: of the run.
    """

    name: str
    best_ns: tuple[float | None, ...]
    share_of_trials: float
    share_of_time: float


@dataclass(frozen=True)
class SearchTable:
    """The best time after some numbers of trials of this run.

    Attributes:
        marks: these numbers.
        hidden: how many tasks are left out.
        several: whether the run has several tasks, which share its budget.
    """

    marks: tuple[int, ...]
    rows: tuple[SearchRow, ...]
    hidden: int
    several: bool


@dataclass(frozen=True)
class Cells:
    """A table as texts: for a terminal, a notebook or a page. `right` names the columns that are aligned to the right."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[str, ...]
    notes: tuple[str, ...]


def result_cells(result: ResultTable) -> Cells:
    """The strings of a result table, and notes about what they do not say."""
    rows = result.rows
    columns: dict[str, list[str]] = {
        "task": [row.name for row in rows],
        "template": [row.template or ("none is valid" if row.trials else "not tried yet") for row in rows],
        "plain": [_time(row.plain_ns, row.plain_spread, row) for row in rows],
        "default": [_time(row.default_ns, row.default_spread, row) for row in rows],
        "best": [_time(row.best_ns, row.best_spread, row) for row in rows],
        "over plain": [_ratio(row.over_plain) for row in rows],
        "over default": [_ratio(row.speedup) for row in rows],
        result.rate_unit: [rate_text(row.rate) for row in rows],
        "trials": [str(row.trials) for row in rows],
        "failures": [counts(row.failures) for row in rows],
    }
    if all(row.plain_ns is None for row in rows):
        del columns["plain"], columns["over plain"]
    notes = []
    if any(row.best_ns is not None and not row.raced for row in rows):
        notes.append("~ a single measurement: no final race was held, so there is no speed-up to show")
    if any(max(row.default_spread or 0, row.best_spread or 0) > BUSY_SPREAD for row in rows):
        notes.append(
            f"times vary by more than {BUSY_SPREAD:.0%}: the machine is busy, and ratios say little; run again on a quiet "
            "one"
        )
    notes += [f"{row.name}: {row.failed_default}" for row in rows if row.failed_default]
    notes += dict.fromkeys(f"{row.name}: {row.unreferenced}" for row in rows if row.unreferenced)
    right = tuple(name for name in columns if name not in ("task", "template", "failures"))
    return Cells(tuple(columns), tuple(zip(*columns.values())), right, tuple(notes))


def result_text(result: ResultTable) -> str:
    """A result table as lines of text."""
    cells = result_cells(result)
    return "\n".join([table(cells.headers, cells.rows, cells.right), *cells.notes])


def result_html(result: ResultTable) -> str:
    """A result table as HTML, for notebooks."""
    cells = result_cells(result)
    return html_table(cells.headers, cells.rows) + "".join(f"<p>{escape(note)}</p>" for note in cells.notes)


def _time(time_ns: float | None, spread: float | None, row: ResultRow) -> str:
    if time_ns is None:
        return "-"
    return f"{duration(time_ns)} ±{spread:.1%}" if row.raced and spread is not None else f"~{duration(time_ns)}"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"
