"""`schedsearch records push`, `pull`, `diff` and `ship`: records for others, and those of others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from schedsearch.cli import render
from schedsearch.cli.damaged import report_damage
from schedsearch.cli.options import AtLeast
from schedsearch.cli.stores import db_option, json_option, open_store, target_key, target_option
from schedsearch.cli.tune import Duration
from schedsearch.errors import UsageError
from schedsearch.measurement import MODES, check_mode

if TYPE_CHECKING:
    from schedsearch.records.exchange import Report
    from schedsearch.records.store import Store

_who_option = click.option("--who", metavar="NAME", required=True, help="Who measured; it stands in the file.")


@click.command(short_help="Write the fastest configurations to a file for others.")
@click.argument("place", metavar="FOLDER|FILE", type=click.Path())
@_who_option
@db_option
@target_option
@json_option
def push(place: str, who: str, db: str, selector: str | None, as_json: bool) -> None:
    """Write the fastest configuration of each task to a new FILE, or to a new file in FOLDER, which others may write to.

    FILE ends with .jsonl.gz; any other name is a FOLDER, which is made if its parent is there. No file is replaced.

    Only what raced with its default counts. A configuration less than 1.02 times as fast as the default is none: the default
    is written. Names of hosts and cards are left out, and so is machine code.
    """
    from schedsearch.records.sharing import push as push_

    with open_store(db) as store:
        path, manifest, found = push_(store, place, who, target=target_key(selector))
    defaults = sum(each.is_default for each in found.entries)
    if as_json:
        render.echo_json({"file": str(path), "defaults": defaults, "left_out": found.left_out, "manifest": manifest})
        return
    render.say(f"{path}: {render.counted(manifest['records'], 'record')} of {', '.join(manifest['targets'])}")
    if defaults:
        render.note(f"{render.counted(defaults, 'record')} of them: the default, which nothing beats by 2 %")
    _note_left_out(found.left_out)


def _note_left_out(count: int) -> None:
    if count:
        render.note(f"left out: {render.counted(count, 'best record')} without a final race with the default")


@click.command(short_help="Take configurations that others measured.")
@click.argument("place", metavar="FOLDER|FILE", type=click.Path(exists=True))
@db_option
@target_option
@json_option
def pull(place: str, db: str, selector: str | None, as_json: bool) -> None:
    """Take the configurations of FILE, or of all files in FOLDER, that are better than those measured here.

    Of several for a task the one with the largest gain over its default comes in. None of them is trusted: `compile` builds
    and verifies a kernel of it first, and `schedsearch records verify --imported` races it with the default on this card.
    Exits with 2 if a single FILE cannot be used; of a FOLDER such files are left out, with the reason.
    """
    from dataclasses import asdict

    from schedsearch.records.exchange import Report
    from schedsearch.records.filling import fill_store
    from schedsearch.records.sharing import PullReport
    from schedsearch.records.sharing import pull as pull_
    from schedsearch.template import load_templates

    versions = {name: template.version for name, template in load_templates().items()}
    reports: list[PullReport] = []

    def fill(store: Store) -> Report:
        report_damage(store)
        reports.append(pull_(store, place, target=target_key(selector), versions=versions))
        return Report(records_added=reports[-1].added)

    fill_store(db, fill)
    report = reports[0]
    if as_json:
        render.echo_json(asdict(report))
    else:
        files, records = render.counted(report.files, "file"), render.counted(report.added, "record")
        render.say(f"{records} from {files}; {report.known} are no better than what is known here")
    for problem in report.problems:
        render.note(problem)
    if report.added and not as_json:
        render.note(f"race them with the defaults on this card: schedsearch records verify --imported --db {db}")


def admit_imported(db: str, selector: str, no_wait: bool, as_json: bool) -> None:
    """`records verify --imported`."""
    from schedsearch.device.detect import detect
    from schedsearch.measure.admission import admit
    from schedsearch.measurement import MODES
    from schedsearch.records.store import Store

    target, count = detect(selector), 0
    with Store.open(db, create=False) as store:
        for mode in MODES:
            for each in admit(store, target, mode=mode, wait=not no_wait, on_wait=render.note):
                count += 1
                entry = each.entry
                if as_json:
                    shown = {"workload_id": entry.task[0], "label": entry.label, "template": entry.template, "mode": mode}
                    told = {"verdict": each.verdict, "gain": each.gain, "gain_there": entry.gain, "reason": each.reason}
                    render.echo_json({**shown, **told})
                    continue
                gain = "" if each.gain is None else f"  {each.gain:.2f} times as fast as the default"
                there = "" if entry.gain is None else f" ({entry.gain:.2f} where it was measured)"
                why = f"  {each.reason}" if each.reason else f"{gain}{there}"
                render.say(f"{each.verdict:>8}  {entry.label}  {entry.template}{why}")
    if not count and not as_json:
        render.say(f"no imported record of {target.key} in {db} could be better than its own; nothing to verify")


@click.command(short_help="Compare the configurations of two files.")
@click.argument("one", metavar="A", type=click.Path(exists=True, dir_okay=False))
@click.argument("other", metavar="B", type=click.Path(exists=True, dir_okay=False))
@click.option("--all", "everything", is_flag=True, help="Also list tasks with the same configuration.")
@json_option
def diff(one: str, other: str, everything: bool, as_json: bool) -> None:
    """Compare the configurations of A and B: databases, deployment files, shipped records, or files of `records push`.

    Where both raced with their defaults the gains are compared, otherwise the times. Differences within what races vary by
    count as none.
    """
    from schedsearch.records.differences import differences, read_entries

    found = differences(read_entries(one), read_entries(other))
    if as_json:
        render.echo_json(found.to_json())
        return
    shown = [each for each in found.rows if everything or each.verdict != "the same"]
    modes, targets = ({getattr(each, name) for each in found.rows} for name in ("mode", "target"))
    rows = [
        (
            f"{each.label} ({each.mode})" if len(modes) > 1 else each.label, *([each.target] if len(targets) > 1 else []),
            each.verdict, "" if each.ratio is None else f"{each.ratio:.3f}", each.change,
        )
        for each in shown
    ]  # fmt: skip
    columns = ("workload", *(["target"] if len(targets) > 1 else []), "verdict", "B / A", "from A to B")
    render.say(render.table(columns, rows, right=("B / A",)))
    render.say(found.headline)


@click.command(short_help="Tune workload files and write shipped records.")
@click.argument("files", metavar="[WORKLOAD.yaml]...", nargs=-1, type=click.Path(exists=True, dir_okay=False))
@_who_option
@db_option
@click.option("--target", "selector", metavar="TARGET", default="auto", help="auto, cpu, cuda or cuda:N.")
@click.option("--trials", metavar="N", type=AtLeast(1), default=64, help="Trials of each task.")
@click.option("--time", "time_s", metavar="TIME", type=Duration(), help="For all tuning, e.g. 250s or 2h.")
@click.option("--mode", type=click.Choice(MODES), help="How times are taken. Default: as networks ask for on the device.")
@click.option("--output", metavar="FOLDER", type=click.Path(file_okay=False), required=True, help="Made if it is missing.")
@json_option
def ship(
    files: tuple[str, ...],
    who: str,
    db: str,
    selector: str,
    trials: int,
    time_s: float | None,
    mode: str | None,
    output: str,
    as_json: bool,
) -> None:
    """Tune the tasks of the files that have no final race yet, then write the shipped records of this device to FOLDER.

    The same command goes on where it stopped: it passes over what raced in the database, and what the file in FOLDER has.
    To measure everything again, remove that file. Without files it writes what the database has.
    """
    from schedsearch.device.detect import detect
    from schedsearch.executable.build_options import network_mode
    from schedsearch.records.shipped import file_name
    from schedsearch.records.shipping import ship as ship_
    from schedsearch.records.shipping import shipped_ids
    from schedsearch.records.store import Store
    from schedsearch.session.gradual import tune_gradually
    from schedsearch.template import load_templates
    from schedsearch.workload_file import load

    try:
        Path(output).mkdir(parents=True, exist_ok=True)  # before the tuning, which may take hours
    except OSError as error:
        raise UsageError(f"cannot make {output}: {error.strerror}; give another folder") from error
    target = detect(selector)
    tasks = [task for file in files for task in load(file).resolve(target).tasks if task.of_range is None]
    if files and not tasks:
        raise UsageError(f"{', '.join(files)} have no task of fixed sizes; give other files")
    mode = mode or network_mode(target)
    check_mode(mode, target.kind)
    progress, wanted = None, tasks
    if tasks:
        versions = {name: template.version for name, template in load_templates().items()}
        known = shipped_ids(output, target.key, mode, versions)
        wanted = [task for task in tasks if task.workload.id not in known]
        if not wanted:
            _say_complete(Path(output) / file_name(target.key), len(tasks), as_json)
            return
        progress = tune_gradually(wanted, db, target, trials=trials, time_s=time_s, mode=mode, say=render.note)
    with Store.open(db, create=False, readonly=True) as store:
        counts = ship_(store, Path(output), target.key, who)
    if progress is not None:
        counts |= {
            "raced": len(tasks) - len(wanted) + progress.raced,
            "left": len(progress.left),
            "unsupported": len(progress.unsupported),
            "seconds": round(progress.seconds, 1),
        }
    if as_json:
        render.echo_json(counts)
        return
    size = render.size_bytes(counts["size_bytes"])
    render.say(
        f"{counts['file']}: {render.counted(counts['records'] + counts['kept'], 'record')}, {size}; "
        f"{counts['defaults']} are defaults"
    )
    if progress is not None:
        render.say(
            f"{counts['raced']} of {render.counted(len(tasks), 'task')} {'has' if len(tasks) == 1 else 'have'} raced, "
            f"{len(progress.left)} are left, no template computes {len(progress.unsupported)}; {progress.seconds:.0f} s"
        )
    _note_left_out(counts["left_out"])


def _say_complete(file: Path, tasks: int, as_json: bool) -> None:
    """There is nothing to tune: the file has all tasks."""
    if as_json:
        nothing = dict.fromkeys(("records", "defaults", "left_out", "left", "unsupported"), 0)
        found = {"file": str(file), "kept": tasks, "size_bytes": file.stat().st_size, "raced": tasks, "seconds": 0.0}
        render.echo_json({**found, **nothing})
        return
    render.say(f"{file} has {render.counted(tasks, 'task')} already; to measure again, remove it")
