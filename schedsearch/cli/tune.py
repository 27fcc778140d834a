"""`schedsearch tune`: takes a workload file, or a kernel in a Python file, and makes records."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from schedsearch.cli import given as given_kind
from schedsearch.cli import render
from schedsearch.cli.options import CARDS, AtLeast, fleet_options, kernels_option, mode_option
from schedsearch.errors import (
    DeviceError,
    Interrupted,
    LostError,
    NoValidConfigError,
    SchedsearchError,
    SeveralErrors,
    UsageError,
)
from schedsearch.tuner import TUNERS

if TYPE_CHECKING:
    from schedsearch.fleet.connection import Connection
    from schedsearch.session.places import Place
    from schedsearch.session.plan import TaskPlan
    from schedsearch.session.summary import RunSummary
    from schedsearch.target import Target
    from schedsearch.workload_file import WorkloadFile


class Duration(click.ParamType["float"]):
    """Seconds, written as in a workload file."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from schedsearch.workload_file.schema import parse_duration_s

        try:
            return parse_duration_s(float(value) if str(value).replace(".", "", 1).isdigit() else value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.argument("workload_file", metavar="WORKLOAD.yaml|FILE.py:KERNEL", type=click.Path())
@click.option(
    "--shape", "shapes", metavar="NAME=SHAPE", multiple=True, help="An array of the KERNEL, e.g. a=4096x4096:float32."
)
@kernels_option
@click.option("--scalar", "scalars", metavar="NAME=NUMBER", multiple=True, help="A number that the KERNEL takes, e.g. n=5.")
@click.option("--db", metavar="FILE", help="Record store; created when missing. Default: the workload file's, records.db.")
@click.option(
    "--target",
    "selector",
    metavar="TARGET",
    help=f"auto, cpu, cuda, cuda:N, or several GPUs: cuda:all, cuda:0,2. With --dry-run also {CARDS}.",
)
@click.option("--trials", metavar="N", type=AtLeast(1), help="Trials per task; all tasks share the sum.")
@click.option("--time", "time_s", metavar="TIME", type=Duration(), help="For the whole run, e.g. 90s, 10m, 1h30m.")
@click.option(
    "--reference-timeout",
    "reference_timeout_s",
    metavar="TIME",
    type=Duration(),
    help="Longest time for your own code around the kernels: a file of kernels, a reference. Default: 30s.",
)
@click.option("--tuner", type=click.Choice(list(TUNERS)), help="xgb (models), ga (genetic), annealing, random or grid.")
@mode_option
@click.option("--seed", metavar="N", type=AtLeast(0), help="Seed of every random choice.")
@click.option(
    "--resume/--fresh",
    default=True,
    help="Go on from earlier records, which count as trials and teach the model, or ignore them.",
)
@click.option(
    "--dry-run", is_flag=True, help="Check the file, print tasks, templates, space sizes and an estimate; touch nothing."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON event per line, the summary last.")
@click.option("--dashboard", "with_dashboard", is_flag=True, help="Show the run in a browser; see schedsearch dashboard.")
@click.option("--scheduler", metavar="ADDRESS", help="Build and measure on the workers of this Dask scheduler.")
@click.option("--build-on", metavar="ADDRESS", help="Build on the workers of this Dask scheduler, and measure here.")
@click.option("--allow-mixed", is_flag=True, help="Let workers with other compilers than most measure, but not build.")
@fleet_options
@click.option("--no-wait", is_flag=True, help="Exit with 3 instead of waiting while another run holds the device.")
def tune(
    workload_file: str,
    shapes: tuple[str, ...],
    scalars: tuple[str, ...],
    kernel_files: tuple[str, ...],
    db: str | None,
    selector: str | None,
    trials: int | None,
    time_s: float | None,
    reference_timeout_s: float | None,
    tuner: str | None,
    mode: str | None,
    seed: int | None,
    resume: bool,
    dry_run: bool,
    as_json: bool,
    with_dashboard: bool,
    scheduler: str | None,
    build_on: str | None,
    allow_mixed: bool,
    tls: str | None,
    trust_network: bool,
    no_wait: bool,
) -> None:
    """Search for fast configurations of the tasks in WORKLOAD.yaml and record everything measured.

    Or of a kernel of your own, KERNEL in FILE.py, which is run; give each of its arguments with --shape or --scalar.

    Options override the file. Ctrl-C stops cleanly after the measurement under way; run the same command again to go on.
    """
    from schedsearch.session.options import DEFAULT_TRIALS

    file = load_tasks(workload_file, shapes, scalars, kernel_files, reference_timeout_s, selector)
    selector = selector or file.target
    given = (scheduler, build_on, allow_mixed, tls, trust_network, no_wait)
    with _place(selector, *_connections(*given), presets=dry_run, progress=not as_json) as place:
        file = file.resolve(place.devices[0])
        trials = file.budget.trials if trials is None else trials
        time_s = file.budget.time_s if time_s is None else time_s
        if trials is None and time_s is None:
            trials = DEFAULT_TRIALS
        if dry_run:
            for kind in place.kinds:
                _print_plan(file, kind, trials, time_s, as_json)
            return
        db, mode = db or file.db, mode or file.measure.mode
        options = {
            "trials": trials,
            "time_s": time_s,
            "tuner": tuner or file.tuner.name,
            "seed": file.tuner.seed if seed is None else seed,
            "resume": resume,
            "mode": mode,
            "reference_timeout_s": reference_timeout_s,
            "wait_for_device": not no_wait,
        }
        summary = _run(file, place, db, options, as_json, with_dashboard)
        _conclude(summary, file, db, selector if len(place.devices) == 1 else place.devices[0].kind, mode, as_json)


def _connections(
    scheduler: str | None, build_on: str | None, allow_mixed: bool, tls: str | None, trust_network: bool, no_wait: bool
) -> tuple[Connection | None, Connection | None]:
    """The fleets of --scheduler and --build-on."""
    from schedsearch.fleet.connection import Connection

    if scheduler is None and build_on is None and (tls or trust_network or allow_mixed):
        raise UsageError("--tls, --trust-network and --allow-mixed are for --scheduler ADDRESS and --build-on ADDRESS")

    def of(address: str | None) -> Connection | None:
        return (address and Connection(address, tls, trust_network, allow_mixed, wait_for_device=not no_wait)) or None

    return of(scheduler), of(build_on)


@contextmanager
def _place(
    selector: str, scheduler: Connection | None, build_on: Connection | None, *, presets: bool, progress: bool
) -> Iterator[Place]:
    from schedsearch.progress import shown
    from schedsearch.session.places import place_of

    with ExitStack() as stack:
        with shown(progress):
            place = stack.enter_context(place_of(selector, scheduler, build_on, presets=presets))
        yield place


def _run(
    file: WorkloadFile, place: Place, db: str, options: dict[str, Any], as_json: bool, with_dashboard: bool
) -> RunSummary:
    """Tunes the tasks of a resolved file. Raises Interrupted with the command that goes on."""
    from schedsearch.cli.json_lines import JsonLines
    from schedsearch.progress import shown
    from schedsearch.session import BUILD_TIMEOUT_S, REFERENCE_TIMEOUT_S, RUN_TIMEOUT_S
    from schedsearch.session import tune as run

    measure = file.measure
    limit_s = options.pop("reference_timeout_s") or measure.reference_timeout_s or REFERENCE_TIMEOUT_S
    again = shlex.join(["schedsearch", *_without_fresh(sys.argv[1:])])
    with ExitStack() as stack:
        if with_dashboard:
            from schedsearch.cli.dashboard import beside

            stack.enter_context(beside(db))
        display = stack.enter_context(shown(not as_json))
        display.stage(f"planning {render.counted(len(file.tasks), 'task')}")
        plans = [each for kind in place.kinds for each in plan(file, kind)]
        try:
            return run(
                plans,
                db,
                target=place.devices,
                scheduler=place.fleet if place.far else None,
                build_on=None if place.far else place.fleet,
                workers=measure.workers,
                build_timeout_s=measure.build_timeout_s or BUILD_TIMEOUT_S,
                run_timeout_s=measure.timeout_s or RUN_TIMEOUT_S,
                reference_timeout_s=limit_s,
                on_wait=render.note if as_json else None,
                observers=[JsonLines()] if as_json else [],
                **options,
            )
        except NoValidConfigError as error:
            summary: RunSummary = error.summary
            return summary
        except LostError as lost:
            raise DeviceError(f"{lost}; everything measured is saved in {db}; go on with: {again}") from lost
        except Interrupted as interrupted:
            display.close()
            if not as_json:
                _print_summary(interrupted.summary, file)
            raise Interrupted(f"interrupted; everything measured is saved in {db}; go on with: {again}") from interrupted


def _conclude(summary: RunSummary, file: WorkloadFile, db: str, selector: str, mode: str, as_json: bool) -> None:
    """Says what a run found. Raises NoValidConfigError if a task or a range has no kernel."""
    if as_json:
        for each in summary.ranges:
            render.echo_json({"event": "range", **each.to_json()})
    else:
        _print_summary(summary, file)
        _print_next(summary, file, db, selector, mode)
    failed: list[str] = []
    unmeasured: list[str] = []
    for task, name in zip(summary.tasks, _names(file).values()):
        if task.best_ns is None:
            reason = task.problem or task.why_invalid
            (failed if reason or task.outcomes else unmeasured).append(f"{name} ({reason})" if reason else name)
    lacking = [f"{each.of_range.label} ({each.problem})" for each in summary.ranges if each.table is None]
    if failed or lacking:
        is_recorded = lacking or any(task.failures for task in summary.tasks if task.best_ns is None)
        where = f"; see why: schedsearch records list --db {shlex.quote(db)} --failed" if is_recorded else ""
        raise NoValidConfigError(f"no valid configuration was found for {', '.join(failed + lacking + unmeasured)}{where}")
    if unmeasured:
        raise NoValidConfigError(f"the time was over before {', '.join(unmeasured)} had a result; give more, e.g. --time 5m")


def plan(file: WorkloadFile, target: Target) -> list[TaskPlan]:
    """The arms of every task of a resolved file. Mistakes that only a template can find point at their place in the file.

    Raises:
        UsageError: see `schedsearch.session.plan.plan_tasks`.
    """
    from schedsearch.session.plan import plan_tasks
    from schedsearch.template import load_templates

    templates = load_templates()
    for problem in templates.problems.values():
        render.note(f"warning: {problem}")
    try:
        return plan_tasks(file.tasks, templates, target)
    except UsageError as error:
        each = error.each if isinstance(error, SeveralErrors) else (error,)
        located = [(str(one), one.where.index, one.where.path) for one in each if one.where is not None]
        if not located:
            raise
        raise file.error(located) from error


def load_tasks(
    given: str,
    shapes: Sequence[str] = (),
    scalars: Sequence[str] = (),
    kernel_files: Sequence[str] = (),
    limit_s: float | None = None,
    selector: str | None = None,
) -> WorkloadFile:
    """A workload file, or the one task of FILE.py:KERNEL.

    Args:
        limit_s: running a file of kernels may take so long.
        selector: the device that the tasks of a file with mistakes are planned for, to find all mistakes.
    """
    from schedsearch.device.detect import detect_all
    from schedsearch.own.command_line import KernelFiles, arguments_of_options, is_kernel, load_kernel
    from schedsearch.processes.trial_run import RUN_LIMIT_S
    from schedsearch.workload_file import WorkloadFile, load

    if is_kernel(given):
        kernel = load_kernel(given, limit_s or RUN_LIMIT_S)
        task = kernel.task(*arguments_of_options(kernel, shapes, scalars))
        return WorkloadFile.of_task(given, task, os.fspath(kernel.db))
    if given.endswith(".py"):
        raise UsageError(f"{given} is a Python file; name the kernel in it, e.g. {given}:KERNEL")
    given_kind.require(given, "workload")
    if shapes or scalars:
        raise UsageError(
            f"--shape and --scalar describe a kernel of your own, and {given} is a workload file; leave them out, or give "
            "FILE.py:KERNEL"
        )

    def look(sound: WorkloadFile) -> None:
        with suppress(SchedsearchError):  # what the plan finds is reported to the file, and another error is not of the file
            target = detect_all(selector or sound.target, presets=True)[0]
            plan(sound.resolve(target), target)

    return load(given, KernelFiles(kernel_files, limit_s or RUN_LIMIT_S), look)


def _names(file: WorkloadFile) -> dict[str, str]:
    return {task.workload.id: task.name for task in file.tasks}


def _without_fresh(arguments: Sequence[str]) -> list[str]:
    return [argument for argument in arguments if argument != "--fresh"]


def _print_summary(summary: RunSummary, file: WorkloadFile) -> None:
    from schedsearch.cli import run_report

    render.say(run_report.results_text(summary, _names(file)))
    if summary.ranges:
        render.say(f"\n{run_report.ranges_text(summary)}\n")
    if not summary.new_trials:
        render.say(run_report.nothing_new_text(summary))
        return
    rate = summary.new_trials / summary.wall_s if summary.wall_s else 0.0
    new = render.counted(summary.new_trials, "new trial")
    render.say(f"{new} in {render.seconds(summary.wall_s)} ({rate:.1f}/s) on {summary.target}")
    render.say(f"of that time: {summary.shares}")
    if len(summary.devices) > 1:
        render.say(run_report.devices_text(summary))
    render.say(f"\n{run_report.search_text(summary, _names(file))}")
    if line := run_report.race_line(summary):
        render.say(line)
    render.say(run_report.model_line(summary))
    if line := run_report.builds_line(summary):
        render.say(line)


def _print_next(summary: RunSummary, file: WorkloadFile, db: str, selector: str, mode: str) -> None:
    """What to do with the results of a run on the target `selector` in a timing mode."""
    from schedsearch.measurement import COLD_GRAPH, PREPARED_MODES
    from schedsearch.ops.own_kernel import OwnKernelParams
    from schedsearch.records.location import server_url
    from schedsearch.workload import as_python

    if all(task.best_ns is None for task in summary.tasks):
        return
    option = "" if selector == file.target else f" --target {shlex.quote(selector)}"
    option += "" if mode == file.measure.mode else f" --mode {mode}"
    argument = "" if selector == "auto" else f", target={selector!r}"
    argument += "" if mode == COLD_GRAPH else f", mode={mode!r}"
    render.say(f"\nNext:\n  schedsearch records best --db {shlex.quote(db)}")
    file_of = "kernels.db" if server_url(db) else db  # kernels are loaded from files
    found = [task.workload for task in summary.tasks if task.best_ns is not None]
    own = next((workload for workload in found if workload.op == "own_kernel"), None)
    if own is not None:
        params = OwnKernelParams.of(own.params)
        names = ", ".join(text.partition(":")[0] for text in params.arguments)
        if file_of != db:
            render.say(f"  schedsearch records export --deploy {file_of} --db {shlex.quote(db)}")
        render.say(f"\n  import schedsearch\n  kernel = schedsearch.own_kernel({params.kernel!r}, db={file_of!r})")
        render.say(f"  kernel({names})")
        return
    render.say(f"  schedsearch compile {shlex.quote(file.path)} --db {shlex.quote(db)}{option} --output kernels.db")
    task = next((task for task in summary.tasks if task.best_ns is not None), None)
    if task is not None:
        module, workload = as_python(task.workload)
        served = (each.of_range for each in summary.ranges if each.table is not None)
        of_range = next((each for each in served if task.workload in map(each.at, each.samples())), None)
        if of_range is not None:
            module, workload = as_python(of_range.workload)
            workload += f".with_dynamic({of_range.parameter!r}, {of_range.low}, {of_range.high})"
        constants = task.workload.constants if mode in PREPARED_MODES else ()
        arguments = ", ".join(argument.name for argument in task.workload.signature if argument.name not in constants)
        render.say("\n  import schedsearch" + ("" if module == "schedsearch" else f", {module}"))
        render.say(f"  workload = {workload}")
        render.say(f"  kernel = schedsearch.compile(workload, db={file_of!r}{argument})")
        if constants:
            render.say(f"  prepared = kernel.prepare({', '.join(f'{name}={name}' for name in constants)})")
            arguments += ", **prepared"
        arguments += "".join(f", {scalar.name}={scalar.default:g}" for scalar in task.workload.scalars)
        render.say(f"  y = kernel({arguments})")


def _print_plan(file: WorkloadFile, target: Target, trials: int | None, time_s: float | None, as_json: bool) -> None:
    from schedsearch.session.preview import preview

    names = [task.name for task in file.tasks]
    planned = preview(plan(file, target), names, target, trials=trials, time_s=time_s, workers=file.measure.workers)
    if as_json:
        render.echo_json(planned.to_json())
        return
    rows = [
        (name, plan.task.workload.label, arm.template.name, arm.space.size, f"{plan.task.weight:g}")
        for name, plan in zip(planned.names, planned.plans)
        for arm in plan.arms
    ]
    render.say(f"target {planned.target}")
    render.say(
        render.table(("task", "workload", "template", "configurations", "weight"), rows, right=("configurations", "weight"))
    )
    said, trials = "as many trials as fit", planned.trials
    if trials is not None:
        said = f"{trials} trials a task, {trials * len(planned.plans)} in all"
    if planned.to_choose:
        ranges = render.counted(planned.ranges, "range")
        said += f", and up to {planned.to_choose} more to choose and verify the kernels of {ranges} of sizes"
    render.say(f"{said}; roughly {render.seconds(planned.estimate_s)} with {planned.workers} builders")
