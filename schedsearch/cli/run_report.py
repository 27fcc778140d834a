"""The end of a tuning run as text: the tables of `schedsearch.session.report`, with explanations."""

from __future__ import annotations

from collections.abc import Mapping

from schedsearch.cli.render import counted, counts, duration, table
from schedsearch.session.report import ResultRow, result_table, search_table
from schedsearch.session.summary import RunSummary

_BUSY = 0.2  # above this spread of its repeats, other programs disturb a final race
_SAME = 0.03  # two measurements of one kernel may normally differ by this much


def nothing_new_text(summary: RunSummary) -> str:
    """Why a run measured nothing: everything was known, or it ended before its first result."""
    if summary.stopped in ("interrupted", "time"):
        return f"no new trial on {summary.target}: the run ended before its first result"
    return f"nothing new to try on {summary.target}: all trials were measured before (--trials N tries more)"


def results_text(summary: RunSummary, names: Mapping[str, str]) -> str:
    """One line per task. `names` maps workload ids to their names in the workload file."""
    result = result_table(summary, names)
    columns: dict[str, list[object]] = {
        "task": [row.name for row in result.rows],
        "template": [row.template or ("none is valid" if row.trials else "not tried yet") for row in result.rows],
        "plain": [_time(row.plain_ns, row.plain_spread, row) for row in result.rows],
        "default": [_time(row.default_ns, row.default_spread, row) for row in result.rows],
        "best": [_time(row.best_ns, row.best_spread, row) for row in result.rows],
        "over plain": [_ratio(row.over_plain) for row in result.rows],
        "over default": [_ratio(row.speedup) for row in result.rows],
        result.rate_unit: [_rate(row.rate) for row in result.rows],
        "trials": [row.trials for row in result.rows],
        "failures": [counts(row.failures) for row in result.rows],
    }
    if all(row.plain_ns is None for row in result.rows):
        del columns["plain"], columns["over plain"]
    right = [name for name in columns if name not in ("task", "template", "failures")]
    text = table(list(columns), list(zip(*columns.values())), right)
    if any(row.best_ns is not None and not row.raced for row in result.rows):
        text += "\n~ a single measurement: no final race was held, so there is no speed-up to show"
    if any(max(row.default_spread or 0, row.best_spread or 0) > _BUSY for row in result.rows):
        text += (
            f"\ntimes vary by more than {_BUSY:.0%}: the machine is busy, and ratios say little; run again on a quiet one"
        )
    return text


def _time(time_ns: float | None, spread: float | None, row: ResultRow) -> str:
    if time_ns is None:
        return "-"
    return f"{duration(time_ns)} ±{spread:.1%}" if row.raced and spread is not None else f"~{duration(time_ns)}"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def search_text(summary: RunSummary, names: Mapping[str, str]) -> str:
    """The best time after some numbers of trials, and how several tasks shared the budget; '' without any trials."""
    search = search_table(summary, names)
    if search is None:
        return ""
    headers = ["best so far", *(f"at {mark}" for mark in search.marks)]
    headers += ["of trials", "of time"] if search.several else []
    rows = []
    for row in search.rows:
        shares = [f"{row.share_of_trials:.0%}", f"{row.share_of_time:.0%}"] if search.several else []
        rows.append([row.name, *("" if best is None else duration(best) for best in row.best_ns), *shares])
    text = table(headers, rows, right=headers[1:])
    return text + (f"\nand {counted(search.hidden, 'task')} more (--json has all)" if search.hidden else "")


def race_line(summary: RunSummary) -> str:
    """Why the times of `results_text` differ from those of `search_text`; '' if they do not."""
    pairs = [(task.race.best.time_ns, task.best_after_ns[-1]) for task in summary.tasks if task.race and task.best_after_ns]
    if all(found is None or abs(raced / found - 1) <= _SAME for raced, found in pairs):
        return ""
    return "default and best are of the final race, timed in turns; best so far is of single measurements before it"


def builds_line(summary: RunSummary) -> str:
    """Says that candidates were compiled without sharing work; '' if all shared it."""
    if not summary.unshared:
        return ""
    return (
        f"{counted(summary.unshared, 'candidate')} shared no work with others when compiled, which takes several times "
        "longer; see `shaped_by` in docs/templates.md"
    )


def model_line(summary: RunSummary) -> str:
    """One sentence on how good the cost model was, and on the proposals that cost no trial."""
    rho = summary.ranking.correlation
    ranked = (
        "no predictions to judge the model by"
        if rho is None
        else f"model: rank correlation {rho:.2f} with {counted(summary.ranking.trials, 'new measurement')} "
        "(1 perfect, 0 chance)"
    )
    borrowed = f"; it began with {counted(summary.borrowed, 'result')} of similar tasks" if summary.borrowed else ""
    return f"{ranked}{borrowed}; {counted(summary.duplicates, 'duplicate')}, {counted(summary.illegal, 'illegal proposal')}"
