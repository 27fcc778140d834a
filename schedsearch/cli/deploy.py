"""`schedsearch compile` and `explain`: turn a database of records into kernels for programs."""

from __future__ import annotations

import json
import shlex

import click

from schedsearch.cli import render
from schedsearch.cli.inspect import TARGET_HELP, resolve
from schedsearch.cli.options import mode_option
from schedsearch.errors import NoRecordError


@click.command("compile")
@click.argument("workload_file", metavar="WORKLOAD.yaml", type=click.Path())
@click.option("--db", metavar="FILE", help="Record store to read. Default: the workload file's, records.db.")
@click.option("--target", "selector", metavar="TARGET", help=TARGET_HELP)
@mode_option
@click.option(
    "--output", metavar="FILE", type=click.Path(dir_okay=False), default="kernels.db", show_default=True, help="Written."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compile_(workload_file: str, db: str | None, selector: str | None, mode: str | None, output: str, as_json: bool) -> None:
    """Write the best kernels of the tasks in WORKLOAD.yaml to a small file for deployment.

    A program passes the file to schedsearch.compile(workload, db=FILE). Another machine has to trust it first. Exits
    with 4 and writes nothing when a task has no record on the target; `schedsearch tune` makes one.
    """
    from schedsearch.records.deployment import export_deploy
    from schedsearch.records.store import Store

    file, target = resolve(workload_file, selector)
    mode = mode or file.measure.mode
    with Store.open(db or file.db, create=False, readonly=True) as store:
        workloads = [task.workload for task in file.tasks]
        bests = {workload.id: store.best(workload, target.key, mode) for workload in workloads}
        missing = [task.name for task in file.tasks if bests[task.workload.id] is None]
        if missing:
            raise NoRecordError(
                f"no record on {target.name} in mode {mode} for {', '.join(missing)}; make one: "
                f"schedsearch tune {shlex.quote(workload_file)} --mode {mode} --db {shlex.quote(str(store.path))}"
            )
        counts = export_deploy(store, output, target=target.key, mode=mode, workloads=workloads)
    if as_json:
        render.echo_json({"output": output, "target": target.key, **counts})
        return
    rows = [
        (task.name, best.template, render.duration(best.measurement.time_ns), render.config_text(best.config))
        for task in file.tasks
        if (best := bests[task.workload.id])
    ]
    render.say(render.table(("task", "template", "time", "configuration"), rows, right=("time",)))
    render.say(f"{render.counted(counts['bests'], 'kernel')}, {render.size_bytes(counts['size_bytes'])} in {output}")


@click.command()
@click.argument("workload_file", metavar="WORKLOAD.yaml", type=click.Path())
@click.option("--db", metavar="FILE", help="Record store or deployment file. Default: the workload file's, records.db.")
@click.option("--target", "selector", metavar="TARGET", help=TARGET_HELP)
@mode_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain(workload_file: str, db: str | None, selector: str | None, mode: str | None, as_json: bool) -> None:
    """Show for each task which kernel deployment would use, on which rung of the ladder, and why no higher rung serves."""
    from schedsearch.runtime import explain as explain_

    file, target = resolve(workload_file, selector)
    db, mode = db or file.db, mode or file.measure.mode
    explanations = [(task, explain_(task.workload, db, target=target, mode=mode)) for task in file.tasks]
    if as_json:
        render.echo_json([{"name": task.name, **json.loads(explanation.to_json())} for task, explanation in explanations])
        return
    for task, explanation in explanations:
        render.say(f"{task.name} ({task.workload.label})")
        for line in explanation.lines:
            render.say(f"  {line}")
