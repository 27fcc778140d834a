"""Text and JSON for people and programs: the formats that several commands share."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from schedsearch.profiling.profile import Launch, Profile
    from schedsearch.session.summary import RunSummary


_MARKS = tuple(unit * 10**power for power in range(1, 5) for unit in (1, 2.5, 5))  # trials after which to look at the best
_FEW_MARKS = (1, 2, 5)  # where no task had as many
_REPORTED_TASKS = 8
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def echo_json(value: Any, *, err: bool = False) -> None:
    """One JSON value on one line of standard output, or of standard error."""
    click.echo(json.dumps(value, default=lambda each: each.to_json() if hasattr(each, "to_json") else str(each)), err=err)


def duration(time_ns: float | None) -> str:
    """A time in the unit that reads best, with three or four digits; '-' for None."""
    if time_ns is None:
        return "-"
    for unit, scale in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if time_ns >= scale:
            return f"{time_ns / scale:.4g} {unit}"
    return f"{time_ns:.4g} ns"


def seconds(time_s: float) -> str:
    """A wait: '8 s', '2 min 5 s', '1 h 20 min'."""
    whole = max(1, round(time_s))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def size_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.4g} {unit}"
        count /= 1024
    raise AssertionError


def config_text(config: Mapping[str, Any] | None) -> str:
    return "-" if config is None else " ".join(f"{name}={value}" for name, value in config.items())


def counts(outcomes: Mapping[str, int]) -> str:
    """'3 rejected, 1 wrong_answer', most frequent first; '-' when there is none."""
    ranked = sorted(outcomes.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {name}" for name, count in ranked if count) or "-"


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], right: Iterable[str] = ()) -> str:
    """Columns under headers, separated by two blanks; those named in `right` are aligned to the right.

    Names may come from files of others: line breaks and control characters are shown as escapes.
    """
    cells = [[_CONTROL.sub(lambda found: repr(found[0])[1:-1], str(cell)) for cell in row] for row in rows]
    widths = [
        max(len(header), *(len(row[i]) for row in cells)) if cells else len(header) for i, header in enumerate(headers)
    ]
    to_right = set(right)

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if header in to_right else cell.ljust(width)
            for header, cell, width in zip(headers, row, widths)
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, cells)])


def run_table(summary: RunSummary, names: Mapping[str, str]) -> str:
    """The end of a run: one line a task. `names` maps workload ids to what the workload file calls them."""
    headers = ("task", "template", "default", "best", "speed-up", "GFLOP/s", "trials", "failures")
    rows = [
        (
            names.get(task.workload.id, task.workload.label),
            task.template or "none is valid",
            duration(task.default_ns),
            duration(task.best_ns),
            "-" if task.speedup is None else f"{task.speedup:.2f}x",
            "-" if task.gflops is None else f"{task.gflops:,.0f}" if task.gflops >= 100 else f"{task.gflops:.1f}",
            task.trials,
            counts(task.failures),
        )
        for task in summary.tasks
    ]
    return table(headers, rows, right=("default", "best", "speed-up", "GFLOP/s", "trials"))


_KERNEL_NAME_WIDTH = 48
_SAME = 0.03  # by which two measurements of one kernel differ without anyone wondering


def profile_table(profiles: Sequence[Profile]) -> str:
    """One line a launch, and one for all launches of a subject that takes several."""
    headers = ("", "launch", "time", "tensor/active", "tensor/elapsed", "occupancy", "L2", "L2 GB/s", "DRAM", "DRAM GB/s")
    rows = []
    for profile in profiles:
        lines: list[tuple[str, Launch | None]] = [
            (launch.kernel[:_KERNEL_NAME_WIDTH], launch) for launch in profile.launches
        ]
        if len(lines) > 1:
            lines.append(("all", None))
        for name, launch in lines:
            read = profile.figures(launch)
            rows.append(
                (
                    profile.subject,
                    name,
                    duration(read["duration_ns"]),
                    _percent(read["tensor_active_pct"]),
                    _percent(read["tensor_elapsed_pct"]),
                    _percent(read["occupancy_pct"]),
                    _percent(read["l2_pct"]),
                    _rate(read["l2_bytes"], read["duration_ns"]),
                    _percent(read["dram_pct"]),
                    _rate(read["dram_bytes"], read["duration_ns"]),
                )
            )
    return table(headers, rows, right=headers[2:])


def profile_json(profile: Profile) -> dict[str, Any]:
    """All that was read: the figures of each launch and of all, where they come from, and every metric."""
    return {
        "subject": profile.subject,
        "tool": profile.tool,
        "cache": profile.cache,
        "taken_at": profile.taken_at,
        "all": profile.figures(),
        "sources": {name: list(profile.source(name)) for name in profile.figures()},
        "missing": list(profile.missing),
        "launches": [
            {
                "kernel": launch.kernel,
                "grid": launch.grid,
                "block": launch.block,
                **profile.figures(launch),
                "metrics": dict(launch.metrics),
            }
            for launch in profile.launches
        ],
    }


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} %"


def _rate(count_bytes: float | None, time_ns: float | None) -> str:
    """Bytes per nanosecond are gigabytes per second."""
    return "-" if count_bytes is None or not time_ns else f"{count_bytes / time_ns:,.0f}"


def search_table(summary: RunSummary, names: Mapping[str, str]) -> str:
    """How the search went: the best time after so many trials of this run; of several tasks also how they shared the budget.

    '' when there were no trials. Of many tasks only those that got most of the trials.
    """
    tasks = sorted(summary.tasks, key=lambda task: -task.new_trials)[:_REPORTED_TASKS]
    tasks = [task for task in summary.tasks if task.new_trials and any(task is one for one in tasks)]
    most = max((task.new_trials for task in tasks), default=0)
    if not most:
        return ""
    marks = [int(mark) for mark in (_FEW_MARKS if most < _MARKS[0] else _MARKS) if mark <= most]
    several = len(summary.tasks) > 1
    rows = []
    for task in tasks:
        after = task.best_after_ns
        bests = [duration(after[mark - 1]) if mark <= len(after) else "" for mark in marks]
        shares = [f"{share:.0%}" for share in summary.budget_shares(task)] if several else []
        rows.append([names.get(task.workload.id, task.workload.label), *bests, *shares])
    headers = ["best so far", *(f"at {mark}" for mark in marks), *(["of trials", "of time"] if several else [])]
    text = table(headers, rows, right=headers[1:])
    hidden = sum(task.new_trials > 0 for task in summary.tasks) - len(tasks)
    return text + (f"\nand {hidden} tasks more (--json has all)" if hidden else "")


def race_line(summary: RunSummary) -> str:
    """Why the times of `run_table` are not those of `search_table`; '' where they are."""
    pairs = [(task.best_ns, task.best_after_ns[-1]) for task in summary.tasks if task.best_after_ns]
    if all(raced is None or found is None or abs(raced / found - 1) <= _SAME for raced, found in pairs):
        return ""
    return "default and best are of the final race, timed in turns; best so far is of single measurements before it"


def model_line(summary: RunSummary) -> str:
    """What the cost model was worth, in a sentence; and whether the tuner kept the rules."""
    rho, illegal = summary.ranking.correlation, summary.illegal
    ranked = (
        "no predictions to judge the model by"
        if rho is None
        else f"model: rank correlation {rho:.2f} with {summary.ranking.trials} new measurements (1 perfect, 0 chance)"
    )
    borrowed = f"; it began with {summary.borrowed} results of similar tasks" if summary.borrowed else ""
    return f"{ranked}{borrowed}; {illegal} illegal proposals"
