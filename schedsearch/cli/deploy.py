"""`schedsearch compile` and `explain`: turn a database of records into kernels for programs."""

from __future__ import annotations

import json

import click

from schedsearch.cli import render
from schedsearch.cli.inspect import TARGET_HELP, make_one, resolve
from schedsearch.cli.options import mode_option
from schedsearch.cli.ranges import table_text
from schedsearch.errors import NoRecordError


@click.command("compile")
@click.argument("workload_file", metavar="WORKLOAD.yaml", type=click.Path())
@click.option("--db", metavar="FILE", help="Record store to read. Default: the workload file's, records.db.")
@click.option("--target", "selector", metavar="TARGET", help=TARGET_HELP)
@mode_option
@click.option("--output", metavar="FILE", type=click.Path(dir_okay=False), default="kernels.db", help="Written.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compile_(workload_file: str, db: str | None, selector: str | None, mode: str | None, output: str, as_json: bool) -> None:
    """Write the best kernels of the tasks in WORKLOAD.yaml to a small file for deployment.

    A program passes the file to schedsearch.compile(workload, db=FILE). Another machine has to trust it first. Exits
    with 4 and writes nothing when a task has no record on the target; `schedsearch tune` makes one. For a range of sizes it
    takes the kernels that serve the whole range.
    """
    from schedsearch.records.deployment import export_deploy
    from schedsearch.records.store import Store
    from schedsearch.size_table import SizeTable

    file, target = resolve(workload_file, selector)
    mode = mode or file.measure.mode
    tasks = [task for task in file.tasks if task.of_range is None]
    ranges = list(dict.fromkeys(task.of_range for task in file.tasks if task.of_range is not None))
    with Store.open(db or file.db, create=False, readonly=True) as store:
        workloads = [task.workload for task in tasks]
        bests = {workload.id: store.best(workload, target.key, mode) for workload in workloads}
        tables = {each: store.range_of(each, target.key, mode) for each in ranges}
        missing = [task.name for task in tasks if bests[task.workload.id] is None]
        missing += [of_range.label for of_range, table in tables.items() if table is None]
        if missing:
            raise NoRecordError(
                f"no record on {target.name} in mode {mode} for {', '.join(missing)}; "
                f"{make_one(file, selector, mode, store.path)}"
            )
        counts = export_deploy(store, output, target=target.key, mode=mode, workloads=workloads, ranges=ranges)
    if as_json:
        render.echo_json({"output": output, "target": target.key, **counts})
        return
    rows = [
        (task.name, best.template, render.duration(best.measurement.time_ns), render.config_text(best.config))
        for task in tasks
        if (best := bests[task.workload.id])
    ]
    if rows:
        render.say(render.table(("task", "template", "time", "configuration"), rows, right=("time",)))
    for of_range, row in tables.items():
        if row is not None:
            render.say(f"{of_range.label}, served by the kernels of {row.low} to {row.high}:")
            render.say(table_text(SizeTable.from_bytes(row.size_table, row.code), of_range.parameter))
    kernels = render.counted(counts["bests"], "kernel")
    kernels += f", those of {render.counted(counts['ranges'], 'range')} of sizes" if ranges else ""
    render.say(f"{kernels}, {render.size_bytes(counts['size_bytes'])} in {output}")


@click.command()
@click.argument("workload_file", metavar="WORKLOAD.yaml", type=click.Path())
@click.option("--db", metavar="FILE", help="Record store or deployment file. Default: the workload file's, records.db.")
@click.option("--target", "selector", metavar="TARGET", help=TARGET_HELP)
@mode_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain(workload_file: str, db: str | None, selector: str | None, mode: str | None, as_json: bool) -> None:
    """Show for each task which kernel deployment would use, on which fallback level, and why no higher one serves."""
    from schedsearch.runtime.deploy import explain as explain_

    file, target = resolve(workload_file, selector)
    db, mode = db or file.db, mode or file.measure.mode
    wanted = {task.of_range or task.workload: task.of_range.label if task.of_range else task.name for task in file.tasks}
    explanations = [(name, explain_(what, db, target=target, mode=mode)) for what, name in wanted.items()]
    if as_json:
        render.echo_json([{"name": name, **json.loads(explanation.to_json())} for name, explanation in explanations])
        return
    for name, explanation in explanations:
        label = explanation.workload.label
        render.say(name if name == label else f"{name} ({label})")
        for line in explanation.lines:
            render.say(f"  {line}")
