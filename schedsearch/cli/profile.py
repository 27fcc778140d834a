"""`schedsearch profile`: hardware counters of the kernels that deployment serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from schedsearch.cli import render
from schedsearch.cli.inspect import make_one
from schedsearch.cli.options import AtLeast
from schedsearch.errors import NoRecordError, UsageError
from schedsearch.typed import JsonObject

if TYPE_CHECKING:
    from schedsearch.profiling.best import Profiled
    from schedsearch.task import Task


@click.command()
@click.argument("workload_file", metavar="WORKLOAD.yaml", type=click.Path())
@click.option("--db", metavar="FILE", help="Record store. Default: the workload file's, records.db.")
@click.option("--target", "selector", metavar="TARGET", help="cuda or cuda:N.")
@click.option("--task", metavar="N", type=AtLeast(1), help="Only the N-th task of the file, from 1.")
@click.option("--peer", type=click.Choice(["torch"]), help="Also profile PyTorch's version of the operator, for comparison.")
@click.option(
    "--ncu", "ncu_path", metavar="PATH", help="Nsight Compute's program. Default: ncu on PATH, or its usual place."
)
@click.option("--no-wait", is_flag=True, help="Exit with 3 instead of waiting while another run holds the device.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def profile(
    workload_file: str,
    db: str | None,
    selector: str | None,
    task: int | None,
    peer: str | None,
    ncu_path: str | None,
    no_wait: bool,
    as_json: bool,
) -> None:
    """Read tensor-pipe use, occupancy, L2 and DRAM throughput of the best kernels of WORKLOAD.yaml with Nsight Compute.

    The record keeps the results; `schedsearch records show` shows them again.
    """
    from schedsearch.device.detect import detect
    from schedsearch.profiling.best import check, profile_best
    from schedsearch.records.store import Store
    from schedsearch.workload_file import load

    file = load(workload_file)
    target = detect(selector or file.target)
    file = file.resolve(target)
    if task is not None and task > len(file.tasks):
        raise UsageError(f"there is no --task {task}; the file has {len(file.tasks)} tasks, counted from 1")
    tasks = [one for number, one in enumerate(file.tasks, 1) if task in (None, number)]
    check(target, [one.workload for one in tasks], ncu_path=ncu_path, peer=peer)
    results = []
    with Store.open(db or file.db, create=False) as store:
        missing = [one.name for one in tasks if store.best(one.workload, target.key, file.measure.mode) is None]
        if missing:
            raise NoRecordError(
                f"no record on {target.name} for {', '.join(missing)}; "
                f"{make_one(file, selector, file.measure.mode, store.path)}"
            )
        for one in tasks:
            profiled = profile_best(
                store,
                one.workload,
                target,
                mode=file.measure.mode,
                ncu_path=ncu_path,
                peer=peer,
                wait=not no_wait,
                on_wait=render.note,
            )
            if as_json:
                results.append(_json(one, profiled))
            else:
                _print(one, profiled)
    if as_json:
        render.echo_json(results)


def _json(task: Task, profiled: Profiled) -> JsonObject:
    record = profiled.record
    return {
        "name": task.name,
        "label": task.workload.label,
        "workload_id": task.workload.id,
        "record_id": profiled.record_id,
        "template": record.template,
        "config": dict(record.config),
        "time_ns": record.measurement.time_ns,
        "profiles": [render.profile_json(each) for each in profiled.profiles],
    }


def _print(task: Task, profiled: Profiled) -> None:
    render.say(f"{task.name} ({task.workload.label}), record {profiled.record_id}")
    render.say(f"{profiled.record.template}, {render.config_text(profiled.record.config)}")
    render.say(render.profile_table(profiled.profiles))
    for each in profiled.profiles:
        sources = dict.fromkeys(name for figure in each.figures() for name in each.source(figure))
        render.say(f"{each.subject}: {each.tool}, caches {each.cache}; {', '.join(sources)}")
    render.say()
