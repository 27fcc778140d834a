"""The dashboard as a file: one HTML page that works offline, or tables in Markdown and CSV for pasting.

It needs neither server nor network. The HTML file holds the answers that the server would give, under the same paths.
"""

from __future__ import annotations

import csv
import io
import secrets
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from schedsearch import progress
from schedsearch.dashboard import overview
from schedsearch.dashboard.answers import Answers, package_version
from schedsearch.dashboard.assets import report_page
from schedsearch.dashboard.listing import records_view
from schedsearch.dashboard.source import Source, TaskId
from schedsearch.dashboard.trials import Trials
from schedsearch.dashboard.views.overview import Overview, RunRow, TaskRow
from schedsearch.dashboard.views.values import JSON, to_json
from schedsearch.text import counted, duration, printable, rate_text

WHOLE_TRIALS = 20_000  # up to so many a report holds every trial
_BEST_OF_A_TASK = 100  # that a sample holds in any case
_CODE = 1_000_000  # characters of machine code in a report, before compression
_CODE_OF_A_TRIAL = 100_000
_IMPORTANCE_S = 60.0  # after which no further model is trained; a report of many tasks then lacks some
_AT_ONCE = 500  # records that are read at once
_PLANNED = 200  # trials of a task whose launch plan and profiles a report holds, the fastest


def report_html(answers: Answers) -> str:
    """The whole dashboard as one HTML file.

    With more than `WHOLE_TRIALS` trials it holds the fastest of each task, the final races and an even sample of the
    others; the figures are of all trials, and the page says so.
    """
    # Trials last: what is alike stands together, so it packs better.
    found = dict(sorted(report_answers(answers), key=lambda answer: answer[0].startswith("trial/")))
    progress.stage("packing the page")
    return report_page(found, secrets.token_urlsafe(16), {"version": package_version(), "title": "schedsearch"})


def report_answers(answers: Answers) -> Iterator[tuple[str, JSON]]:
    """Path and JSON of every answer that a report holds. They have parts in common: do not change them.

    The trials of one task are read and shown before those of the next, because not all of a large database stay in memory.
    """
    progress.stage("reading the databases")
    answers.refresh()
    total = sum(source.records for source in answers.sources)
    keep: dict[str, set[int]] | None = None if total <= WHOLE_TRIALS else {}
    training_s = 0.0
    for source in answers.sources:
        rows = overview.task_rows(source)
        for task, row in rows.items():
            at = f"task {row.name} on {row.target}"
            progress.stage(f"{at}: reading its {counted(row.trials, 'trial')}")
            if keep is not None:
                keep[row.key] = _sample(source.trials(task), total)
            path = f"task/{row.key}"
            yield path, answers.get(path) if keep is None else answers.sampled_task(row.key, keep[row.key])
            if training_s < _IMPORTANCE_S:
                progress.stage(f"{at}: what the knobs are worth")
                start_s = time.monotonic()
                yield f"importance/{row.key}", answers.get(f"importance/{row.key}")
                training_s += time.monotonic() - start_s
            if source.store is not None:
                for trial in _trials(answers, source, task, None if keep is None else keep[row.key], at):
                    yield f"trial/{trial['key']}", trial
    progress.stage("runs and comparisons")
    shown = answers.get("overview")
    if keep is not None:
        count = sum(map(len, keep.values()))
        shown["notes"].append(
            f"This report shows {count:,} of {total:,} trials: the fastest {_BEST_OF_A_TASK} of each task, the final "
            "races and an even sample of the others. All figures are of all trials."
        )
    yield "overview", shown
    for a, b in shown["compared"]:
        yield f"compare/{a}/{b}", answers.get(f"compare/{a}/{b}")
    for key in answers.run_keys():
        yield f"run/{key}", answers.get(f"run/{key}")
    yield "records", _records(answers, keep)
    yield "replay", answers.get("replay")


def _sample(trials: Trials, total: int) -> set[int]:
    """The ids to keep of a task's trials, of `total` in all databases."""
    chosen = _fastest(trials, _BEST_OF_A_TASK)
    chosen |= {number for number, race in zip(trials.id, trials.race) if race}
    others = [number for number in trials.id if number not in chosen]
    room = max(0, WHOLE_TRIALS * len(trials) // total - len(chosen))
    return chosen | {others[i * len(others) // room] for i in range(min(room, len(others)))}


def _records(answers: Answers, keep: dict[str, set[int]] | None) -> JSON:
    rows = {source.key: overview.task_rows(source) for source in answers.sources}
    most = sum(source.records for source in answers.sources)
    view = to_json(records_view(answers.sources, rows, {"limit": str(most)}, most=most, keep=keep))
    if keep is not None:
        view["notes"].append(f"shows {len(view['records']['id']):,} of {view['total']:,} records")
    return view


def _trials(answers: Answers, source: Source, task: TaskId, keep: set[int] | None, at: str) -> Iterator[JSON]:
    """The views of the trials of a task, with launch plans and profiles of the fastest; `keep`: of these only."""
    assert source.store is not None
    views, trials = answers.trial_views(source, task), source.trials(task)
    planned = _fastest(trials, _PLANNED)
    most = min(_CODE_OF_A_TRIAL, _CODE // max(1, len(answers.task_keys())))
    shortly = partial(answers.listings.get, most=most)
    ids = sorted(trials.id if keep is None else keep)
    for first in range(0, len(ids), _AT_ONCE):
        progress.stage(f"{at}: trial {first:,} of {len(ids):,}")
        for record in source.store.records_of(ids[first : first + _AT_ONCE]):
            listing = shortly if record.id == views.row.best_id else None
            yield views.json(record, whole=record.id in planned, listing=listing)


def _fastest(trials: Trials, count: int) -> set[int]:
    valid = sorted((time_ns, number) for time_ns, number in zip(trials.time_ns, trials.id) if time_ns is not None)
    return {number for _, number in valid[:count]}


# ---- tables of the overview

_COLUMNS = (
    "task", "device", "template", "default", "best", "speed-up", "rate", "of the limit", "trials", "failures",
)  # fmt: skip


def report_markdown(answers: Answers) -> str:
    """The overview as Markdown tables, to paste into an issue. Foreign text cannot add markup or HTML to them."""
    answers.refresh()
    return markdown_of(answers.overview())


def markdown_of(view: Overview) -> str:
    parts = []
    for database in view.databases:
        if database.problem:
            parts.append(f"{_escaped(database.path)}: {_escaped(database.problem)}")
    if view.tasks:
        lines = [_line(_COLUMNS), _line("---" if i < 3 else "---:" for i in range(len(_COLUMNS)))]
        lines += [_line(map(_escaped, cells_of(task))) for task in view.tasks]
        parts.append("\n".join(lines))
    if view.geomean_speedup is not None:
        raced, left = counted(view.trusted_tasks, "raced task"), view.raced_tasks - view.trusted_tasks
        parts.append(f"Geometric mean of the speed-ups over {raced}: {view.geomean_speedup:.2f}x{_left_out(left)}")
    elif view.raced_tasks:
        parts.append("No speed-up can be trusted: the times of every final race are doubtful")
    parts += [f"{_escaped(task.name)}: {_escaped(words)}" for task in view.tasks for words in task.doubts]
    if any(task.best_ns is not None and not task.raced for task in view.tasks):
        parts.append("~ a single measurement: no final race was held, so there is no speed-up to show")
    parts += [_escaped(_run_line(run)) for run in view.runs[:20]]
    return "\n\n".join(parts) + "\n"


def _left_out(count: int) -> str:
    if not count:
        return ""
    return f"; {counted(count, 'more task')} {'is' if count == 1 else 'are'} left out, whose times are not to be trusted"


def _line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def _escaped(text: str) -> str:
    """Text that Markdown and HTML show as it is."""
    plain = printable(text).replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for character in "|`*_[]#":
        plain = plain.replace(character, f"\\{character}")
    return plain


def cells_of(task: TaskRow) -> list[str]:
    """The strings of a task's row under `_COLUMNS`."""
    mark = "" if task.raced else "~"
    failures = ", ".join(f"{count} {name}" for name, count in task.failures.items())
    return [
        task.name,
        task.target,
        task.template or "none is valid",
        _time(task.default_ns, mark),
        _time(task.best_ns, mark),
        "-" if task.speedup is None else f"{task.speedup:.2f}x" + (f" ({task.doubt})" if task.doubt else ""),
        "-"
        if task.rate is None
        else f"{task.rate:,.0f} {task.rate_unit}"
        if task.rate >= 100
        else f"{task.rate:.3g} {task.rate_unit}",
        "-" if task.limit_share is None else f"{task.limit_share:.0%}",
        f"{task.trials:,}",
        failures or "-",
    ]


def _rate(task: TaskRow) -> str:
    return "-" if task.rate is None else f"{rate_text(task.rate)} {task.rate_unit}"


def _time(time_ns: float | None, mark: str) -> str:
    return "-" if time_ns is None else mark + duration(time_ns)


def _run_line(run: RunRow) -> str:
    rate = f", {run.trials_per_s:.1f} a second" if run.trials_per_s else ""
    return f"Run {run.id} ({run.state}) on {run.target}: {run.trials:,} trials in {run.wall_s:,.0f} s{rate}"


def report_csv(answers: Answers) -> str:
    """The overview as CSV with numbers in base units, one line per task.

    A string that a spreadsheet would take for a formula gets an apostrophe in front.
    """
    answers.refresh()
    names = (
        "database", "key", "name", "label", "op", "target", "mode", "template", "default_ns", "best_ns", "plain_ns", "raced",
        "speedup", "doubt", "rate", "rate_unit", "limit_ns", "limit_share", "trials", "valid", "rejected",
        "since_improvement_trials", "seconds", "problem",
    )  # fmt: skip
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, "failures"])
    for task in answers.overview().tasks:
        cells: list[Any] = [getattr(task, name) for name in names]
        cells.append(" ".join(f"{name}={count}" for name, count in task.failures.items()))
        writer.writerow([_cell(value) for value in cells])
    return out.getvalue()


def _cell(value: object) -> Any:
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text
