"""`schedsearch runs`: lists the tuning runs of databases, and compares two of them as the dashboard's Compare page does."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from schedsearch.cli import render
from schedsearch.cli.stores import json_option
from schedsearch.errors import NoRecordError, UsageError
from schedsearch.measurement import DEFAULT_DB

if TYPE_CHECKING:
    from schedsearch.dashboard.answers import Answers
    from schedsearch.dashboard.views.compare import CompareRow, CompareView
    from schedsearch.dashboard.views.overview import RunRow

db_option = click.option(
    "--db",
    "databases",
    metavar="FILE",
    multiple=True,
    default=(DEFAULT_DB,),
    help="Record store; may be given several times.",
)


@click.group(invoke_without_command=True, short_help="List tuning runs, or compare two of them.")
@db_option
@json_option
@click.pass_context
def runs(context: click.Context, databases: Sequence[str], as_json: bool) -> None:
    """List the tuning runs of databases, the newest first; `runs diff` compares two of them."""
    if context.invoked_subcommand is not None:
        return
    from schedsearch.dashboard.views.values import to_json

    with _answers(databases) as answers:
        found = answers.overview().runs
        names = {source.key: source.name for source in answers.sources}
    if as_json:
        render.echo_json([{**to_json(run), "database": names[run.database]} for run in found])
        return
    cells = [
        (
            run.id,
            *([names[run.database]] if len(names) > 1 else []),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started_at_s)),
            run.state,
            run.target,
            len(run.tasks),
            run.trials,
            run.failures,
            render.seconds(run.wall_s),
            run.tuner,
            "-" if run.seed is None else run.seed,
        )
        for run in found
    ]
    headers = ("run", *(["database"] if len(names) > 1 else []), "started", "state", "target")
    numbers = ("tasks", "trials", "failures", "wall", "tuner", "seed")
    render.say(render.table((*headers, *numbers), cells, right=("tasks", "trials", "failures", "wall", "seed")))
    if len(found) > 1:
        render.note("compare two of them: schedsearch runs diff A B")


@runs.command(short_help="Compare the best kernels of two runs.")
@click.argument("a", metavar="[A", required=False)
@click.argument("b", metavar="B]", required=False)
@db_option
@json_option
def diff(a: str | None, b: str | None, databases: Sequence[str], as_json: bool) -> None:
    """Compare the best kernels of runs A and B, task by task; without A and B, of the last two runs.

    A and B are ids as `schedsearch runs` shows them, or their beginnings. A ratio above 1 says that B is faster. A task is
    faster or slower if the 95 % interval of its ratio excludes 1 and the ratio is more than 2 % away from it.
    """
    from schedsearch.dashboard.views.values import to_json

    with _answers(databases) as answers:
        found = answers.overview().runs
        if a is None:
            if len(found) < 2:
                raise NoRecordError(
                    f"{', '.join(databases)} holds {render.counted(len(found), 'run')}; a comparison needs two"
                )
            first, second = found[1], found[0]
        else:
            if b is None:
                raise click.UsageError("runs diff takes two runs, or none for the last two")
            first, second = (_run(text, found, databases) for text in (a, b))
        view = answers.compare(first.key, second.key)
    if as_json:
        render.echo_json(to_json(view))
        return
    render.say(f"A: {view.a.label}\nB: {view.b.label}\n")
    rows = [_cells(row) for row in view.rows]
    if rows:
        render.say(
            render.table(
                ("task", "A", "B", "A / B", "95 % interval", "B is", "knobs that differ"), rows, right=("A", "B", "A / B")
            )
        )
    for line in _conclusions(view):
        render.say(line)


@contextmanager
def _answers(databases: Sequence[str]) -> Iterator[Answers]:
    from schedsearch.cli.stores import open_store
    from schedsearch.dashboard.answers import Answers

    for path in databases:  # the message about a database that cannot be used is that of other commands
        open_store(path).close()
    answers = Answers(databases)
    try:
        answers.refresh()
        yield answers
    finally:
        answers.close()


def _run(text: str, found: Sequence[RunRow], databases: Sequence[str]) -> RunRow:
    named = [run for run in found if run.id == text] or [run for run in found if run.id.startswith(text)]
    if len(named) == 1:
        return named[0]
    what = f"fits {len(named)} runs: {', '.join(run.id for run in named[:5])}" if named else "is not the id of a run"
    options = "".join(f" --db {shlex.quote(path)}" for path in databases if path != DEFAULT_DB)
    raise UsageError(f"{text!r} {what}; list them: schedsearch runs{options}")


_VERDICTS = {"same": "not shown to differ", "unknown": "unknown: too few repetitions, or two groups of times"}


def _cells(row: CompareRow) -> tuple[str, ...]:
    known = row.low is not None and row.high is not None
    knobs = [f"{each.knob}: {each.here} -> {each.best}" for each in row.differences]
    if row.a.template != row.b.template:
        knobs = [f"{row.a.template} -> {row.b.template}"]
    return (
        row.name,
        render.duration(row.a.time_ns),
        render.duration(row.b.time_ns),
        f"{row.ratio:.3f}",
        f"{row.low:.3f} to {row.high:.3f}" if known else "-",
        _VERDICTS.get(row.verdict, row.verdict),
        ", ".join(knobs) or "none",
    )


def _conclusions(view: CompareView) -> Iterator[str]:
    if view.geomean is not None and len(view.rows) > 1:
        interval = "" if view.low is None or view.high is None else f" (95 %: {view.low:.3f} to {view.high:.3f})"
        yield f"geometric mean of A / B: {view.geomean:.3f}{interval}; {view.regressions} slower"
    for side, names in (("A", view.only_a), ("B", view.only_b)):
        if names:
            yield f"only in {side}: {', '.join(names)}"
    yield from view.notes
