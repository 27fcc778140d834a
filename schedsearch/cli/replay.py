"""`schedsearch replay`: shows how good a tuner is on recorded spaces."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from schedsearch.cli import render
from schedsearch.cli.options import AtLeast
from schedsearch.text import printable

if TYPE_CHECKING:
    from schedsearch.replay import Report


def _budgets(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        budgets = [int(text) for text in value.split(",")]
    except ValueError:
        budgets = []
    if not budgets or min(budgets) < 1:
        raise click.BadParameter(f"{value!r} must be integers of at least 1 with commas, e.g. 25,50,100", ctx, param)
    return tuple(sorted(set(budgets)))


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(dir_okay=False))
@click.option("--tuner", metavar="NAME", default="xgb", help="xgb, ga, annealing, random or grid.")
@click.option(
    "--evaluations",
    metavar="LIST",
    default="25,50,100,200,400",
    callback=_budgets,
    help="Numbers of evaluations to look at.",
)
@click.option("--seeds", metavar="N", type=AtLeast(1), default=20, help="Runs per space.")
@click.option(
    "--warm",
    metavar="FILE",
    multiple=True,
    type=click.Path(dir_okay=False),
    help="Learn from this recording beforehand; may be given several times.",
)
@click.option("--t1", metavar="FILE", type=click.Path(exists=True, dir_okay=False), help="T1 description of T4 results.")
@click.option("--noise", is_flag=True, help="Answer with single recorded repetitions, drawn at random.")
@click.option("--jobs", metavar="N", type=AtLeast(1), default=1, help="Processes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def replay(
    files: tuple[str, ...],
    tuner: str,
    evaluations: tuple[int, ...],
    seeds: int,
    warm: tuple[str, ...],
    t1: str | None,
    noise: bool,
    jobs: int,
    as_json: bool,
) -> None:
    """Replay a search over recorded spaces and print which fraction of the optimum it finds.

    FILE is a Kernel Tuner cache, T4 results (both also as gzip), or a schedsearch database. Data given twice counts once.
    """
    from schedsearch import replay as replaying
    from schedsearch.tuner import require_tuner

    require_tuner(tuner)
    loaded = replaying.load(files, t1)
    warming = replaying.load(warm, t1) if warm else replaying.Loaded((), ())
    for text in (*loaded.left_out, *warming.left_out):
        render.note(f"left out: {text}")
    for text in (*loaded.warnings, *warming.warnings):
        render.note(f"warning: {text}")
    for text in replaying.cold_spaces(loaded.spaces, warming.spaces):
        render.note(f"warning: {text}")
    for space in loaded.spaces if noise else ():
        if not any(len(times_ns) > 1 for times_ns in space.repetitions_ns):
            render.note(f"warning: {space.file} ({space.name}) has no repetitions: --noise changes nothing there")
    with _Progress() as progress:
        report = replaying.replay(
            loaded.spaces,
            tuner,
            evaluations=evaluations,
            seeds=seeds,
            warm=warming.spaces,
            noise=noise,
            jobs=jobs,
            progress=progress,
        )
    if as_json:
        render.echo_json({**replaying.to_json(report), "left_out": [*loaded.left_out, *warming.left_out]})
    else:
        _print(report)


_CLEAR_LINE = "\r\x1b[2K"


def _terminal_columns() -> int:
    """The width of the terminal on standard error. Of a longer text only the last line could be cleared."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:
        return 80


class _Progress:
    """Progress on standard error: one line that is rewritten on a terminal, else a line for each tenth of the runs."""

    def __enter__(self) -> _Progress:
        self._tenth, self._drawn = 0, False
        return self

    def __call__(self, done: int, total: int, name: str) -> None:
        if sys.stderr.isatty():
            self._drawn = True
            line = printable(f"{done} of {total} runs, {name}")[: max(_terminal_columns() - 1, 0)]
            click.echo(f"{_CLEAR_LINE}{line}", err=True, nl=False)
        elif 10 * done // total > self._tenth:
            self._tenth = 10 * done // total
            render.say(f"{done} of {total} runs", err=True)

    def __exit__(self, *error: object) -> None:
        if self._drawn:
            click.echo(_CLEAR_LINE, err=True, nl=False)


def _print(report: Report) -> None:
    budgets = list(report.geomean)
    headers = ["space", "optimum", "valid", *(f"at {budget}" for budget in budgets)]
    rows = []
    for space in report.spaces:
        valid = f"{space.valid:,} of {space.configurations:,}"
        intervals = [_interval(space.fractions[b], space.low[b], space.high[b]) for b in budgets]
        rows.append([_short(space.file, space.name), render.duration(space.best_ns), valid, *intervals])
        rows.append(["  runs within 5 %", "", "", *(f"{space.within_5[b]:.0%}" for b in budgets)])
    geomean = [_interval(report.geomean[b], report.geomean_low[b], report.geomean_high[b]) for b in budgets]
    rows.append(["geometric mean", "", "", *geomean])
    render.say(render.table(headers, rows, right=headers[1:]))
    runs = f"{report.seeds} seed{'s' if report.seeds > 1 else ''}"
    render.say(
        f"\n{report.tuner}, {runs}: mean fraction of the optimum [95 % interval]; "
        f"{report.cpu_s_per_64:.3g} CPU seconds per 64 proposals"
    )


def _interval(mean: float, low: float, high: float) -> str:
    return f"{mean:.3f} [{low:.3f} {high:.3f}]"


def _short(file: str, name: str) -> str:
    base = file.rpartition("/")[2].removesuffix(".gz")
    return base.removesuffix(".json") if base.endswith(".json") else f"{base}: {name}"  # a database has several
