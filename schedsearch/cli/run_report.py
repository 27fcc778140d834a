"""The end of a tuning run as text: the tables of `schedsearch.session.report`, with explanations."""

from __future__ import annotations

from collections.abc import Mapping

from schedsearch.cli.ranges import table_text
from schedsearch.cli.render import counted, duration, table
from schedsearch.session.report import result_text
from schedsearch.session.summary import RangeSummary, RunSummary

_SAME = 0.03  # two measurements of one kernel may normally differ by this much


def nothing_new_text(summary: RunSummary) -> str:
    """Why a run measured nothing: everything was known, or it ended before its first result."""
    if summary.stopped in ("interrupted", "time"):
        return f"no new trial on {summary.target}: the run ended before its first result"
    return f"nothing new to try on {summary.target}: all trials were measured before (--trials N tries more)"


def results_text(summary: RunSummary, names: Mapping[str, str]) -> str:
    """One line per task. `names` maps workload ids to their names in the workload file."""
    return result_text(summary.result_table(names))


def search_text(summary: RunSummary, names: Mapping[str, str]) -> str:
    """The best time after some numbers of trials, and how several tasks shared the budget; '' without any trials."""
    search = summary.search_table(names)
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


def ranges_text(summary: RunSummary) -> str:
    """For each range of sizes: which kernels serve it, and what specialising would still gain; '' without ranges."""
    return "\n\n".join(_range_text(each) for each in summary.ranges)


def _range_text(found: RangeSummary) -> str:
    name, table_of = found.of_range.parameter, found.table
    if table_of is None:
        return f"{found.of_range.label}: no kernels ({found.problem})"
    return (
        f"{found.of_range.label}: {counted(len(table_of.kernels), 'kernel')}, "
        f"{counted(found.trials, 'measurement')} to choose them\n{table_text(table_of, name)}"
    )


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
        "longer; see `shaped_by` in docs/own-templates.md"
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


def devices_text(summary: RunSummary) -> str:
    """What each of several devices did, one line each."""
    lines = []
    for each in summary.devices:
        kernel = "" if each.baseline_ns is None else f", the same kernel in {duration(each.baseline_ns)}"
        problem = f"; taken out of the run: {each.problem}" if each.problem else ""
        lines.append(f"  {each.name} {each.uuid}: {counted(each.trials, 'trial')}, {each.shares}{kernel}{problem}")
    return "\n".join(lines)
