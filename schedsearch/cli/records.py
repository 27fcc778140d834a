"""`schedsearch records ...`: shows measurements, and exports and imports them as files."""

from __future__ import annotations

import json
import shlex
import textwrap
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import click

from schedsearch.cli import render
from schedsearch.cli.damaged import report_damage
from schedsearch.cli.options import AtLeast
from schedsearch.cli.ranges import ranges
from schedsearch.cli.records_export import export
from schedsearch.cli.sharing import admit_imported, diff, pull, push, ship
from schedsearch.cli.stores import db_option, json_option, open_store, print_counts, target_key, target_option
from schedsearch.cli.trust import trust
from schedsearch.errors import NoValidConfigError, RegressionError
from schedsearch.measurement import Outcome, Verdict
from schedsearch.records.formats import FORMATS
from schedsearch.text import MESSAGE_LIMIT, printable, shortened
from schedsearch.typed import JsonObject

if TYPE_CHECKING:
    from schedsearch.records.exchange import Report
    from schedsearch.records.rows import RecordRow
    from schedsearch.records.store import Store
    from schedsearch.target import Target


@click.group()
def records() -> None:
    """Look at measurements, move them between files, check them and keep the database small."""


records.add_command(trust)
records.add_command(export)
records.add_command(ranges)
for _command in (push, pull, diff, ship):
    records.add_command(_command)


@records.command("list", short_help="List records, newest first.")
@db_option
@click.option("--op", metavar="NAME", help="Only this operator.")
@click.option("--workload", metavar="TEXT", help="Only workloads whose label contains TEXT, or whose id begins with it.")
@target_option
@click.option("--template", metavar="NAME", help="Only this template.")
@click.option("--outcome", type=click.Choice([str(outcome) for outcome in Outcome]), help="Only this outcome.")
@click.option("--failed", is_flag=True, help="Only outcomes other than ok.")
@click.option("--run", metavar="ID", help="Only this tuning run.")
@click.option("--sort", type=click.Choice(["newest", "fastest"]), default="newest", help="What comes first.")
@click.option("--limit", metavar="N", type=AtLeast(1), default=50, help="Show at most this many.")
@json_option
def list_(
    db: str,
    op: str | None,
    workload: str | None,
    selector: str | None,
    template: str | None,
    outcome: str | None,
    failed: bool,
    run: str | None,
    sort: Literal["newest", "fastest"],
    limit: int,
    as_json: bool,
) -> None:
    """List records, the newest first, or the fastest."""
    if failed and outcome is not None:
        raise click.UsageError("--failed and --outcome exclude each other; give one")
    outcomes = set(Outcome) - {Outcome.OK} if failed else {Outcome(outcome)} if outcome else None
    with open_store(db) as store:
        rows = store.rows(
            op=op, target=target_key(selector), template=template, outcomes=outcomes, run=run,
            named=workload, order=sort, limit=limit,
        )  # fmt: skip
    if as_json:
        render.echo_json([_listed(row) for row in rows])
        return
    cells = [
        (
            row.id,
            row.label,
            row.template,
            render.duration(row.measurement.time_ns) if row.measurement.ok else row.measurement.outcome,
            "best" if row.best else "race" if row.final_race else row.measurement.sizes,
            render.config_text(row.config),
            row.measurement.message.partition("\n")[0][:80],
        )
        for row in rows
    ]
    render.say(
        render.table(("id", "workload", "template", "time", "", "configuration", "message"), cells, right=("id", "time"))
    )
    if not rows:
        render.note(f"no record fits; give fewer conditions: schedsearch records list --db {shlex.quote(db)}")
    _note_problems(rows)
    for note in dict.fromkeys(f"note: {row.label}: {row.unreferenced}" for row in rows if row.unreferenced):
        render.say(printable(note))


@records.command(short_help="Show everything about one record.")
@click.argument("record_id", metavar="ID", type=int)
@db_option
@json_option
def show(record_id: int, db: str, as_json: bool) -> None:
    """Show everything about one record; ids are those of `records list`."""
    with open_store(db) as store:
        record = store.row(record_id)
        profiles = store.profiles(record_id)
    if as_json:
        shown = [render.profile_json(profile) for profile in profiles]
        render.echo_json({**record.to_json(), "profiles": shown})
        return
    measurement = record.measurement
    spread = (
        f" (median of {len(measurement.times_ns)}, interquartile range {measurement.spread:.1%})" if measurement.ok else ""
    )
    lines = {
        "workload": f"{record.label}  {record.workload_json}",
        "target": record.target,
        "template": f"{record.template} version {record.template_version}",
        "configuration": render.config_text(record.config),
        "outcome": str(measurement.outcome),
        "verified": record.unreferenced or "compared with a reference" if measurement.ok else "-",
        "time": render.duration(measurement.time_ns) + spread,
        "mode": measurement.mode + (", final race" if record.final_race else ""),
        "policy": str(measurement.policy(record.target.partition(":")[0])),
        "race": _race(record),
        "largest error": "-" if measurement.max_error is None else f"{measurement.max_error:g}",
        "resources": ", ".join(f"{value} {name}" for name, value in asdict(measurement.resources).items() if value) or "-",
        "build, run": f"{measurement.build_s:.2f} s, {measurement.run_s:.2f} s",
        "clocks": render.config_text(measurement.clocks) or "-",
        "toolchain": render.config_text(record.toolchain),
        "run, batch": f"{record.run or '-'}, {record.batch}",
        "prediction": _prediction(record),
        "anchor": _anchor(record),
        "host, card": f"{record.measurement.host or '-'}, {record.measurement.device_uuid or '-'}",
        "measured at": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.finished_at)),
        "source": record.source or "measured on this machine",
        "artifact": record.artifact or "-",
        "message": measurement.message or "-",
    }
    width = max(map(len, lines))
    for name, value in lines.items():
        # An indented line cannot pass for another field.
        text = printable(shortened(value, MESSAGE_LIMIT), lines=True).replace("\n", "\n".ljust(width + 3))
        render.say(f"{name.ljust(width)}  {text}")
    for profile in profiles:
        taken_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(profile.taken_at))
        render.say(f"\nprofile of {taken_at}, {profile.tool}, caches {profile.cache}")
        render.say(render.profile_table([profile]))
    _note_problems([record])


@records.command(short_help="Compile a GPU record again and print its PTX.")
@click.argument("record_id", metavar="ID", type=int)
@db_option
def ptx(record_id: int, db: str) -> None:
    """Compile the GPU kernel of a record again and print its PTX; needs no GPU.

    The installed template and compiler make it, so other versions than those of the record may give another text.
    """
    from schedsearch.backend import other_versions
    from schedsearch.dashboard.kernels import ptx as ptx_of_record
    from schedsearch.dashboard.kernels import target_of

    with open_store(db) as store:
        record, runs = store.row(record_id), store.runs()
    text = ptx_of_record(record, target_of(record, runs))
    other = [each for each in other_versions("cuda", record.toolchain) if "nvjitlink" not in each]  # it links PTX
    if other:
        render.note(f"warning: the record was made by other versions, so this may be another text: {', '.join(other)}")
    render.say(text.expandtabs(4))


@records.command(short_help="List the best record of every task: what deployment serves.")
@db_option
@click.option("--op", metavar="NAME", help="Only this operator.")
@target_option
@json_option
def best(db: str, op: str | None, selector: str | None, as_json: bool) -> None:
    """List the best record of every workload and target: what deployment serves."""
    with open_store(db) as store:
        bests = list(store.bests(op=op, target=target_key(selector)))
        of_ranges = len(store.ranges(target=target_key(selector)))
    if as_json:
        render.echo_json(
            [
                {
                    "id": entry.record_id,
                    "workload": _workload_json(entry.row),
                    "workload_id": entry.row.workload_id,
                    "label": entry.row.label,
                    "target": entry.row.target,
                    "template": entry.row.template,
                    "config": dict(entry.row.config),
                    "time_ns": entry.row.measurement.time_ns,
                    "mode": entry.row.measurement.mode,
                    "problem": entry.row.problem,
                    "verified": entry.verified,
                    "artifact": entry.artifact_sha256,
                }
                for entry in bests
            ]
        )
        return
    rows = [
        (
            entry.record_id,
            entry.row.label,
            entry.row.target,
            entry.row.template,
            render.duration(entry.row.measurement.time_ns),
            render.config_text(entry.row.config),
        )
        for entry in bests
    ]
    render.say(render.table(("id", "workload", "target", "template", "time", "configuration"), rows, right=("id", "time")))
    _note_problems([entry.row for entry in bests])
    if of_ranges:
        render.note(f"kernels of {render.counted(of_ranges, 'range')} of sizes: schedsearch records ranges --db {db}")


@records.command("import", short_help="Add the records of a file: all of them or none.")
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False))
@db_option
@click.option(
    "--format", "form", type=click.Choice(FORMATS), help="Format of the file; recognised from its content by default."
)
@click.option("--t1", metavar="FILE", type=click.Path(exists=True, dir_okay=False), help="T1 description of T4 results.")
@click.option("--trusted", is_flag=True, help="Take bests and machine code of another machine; they are left out otherwise.")
@json_option
def import_(file: str, db: str, form: str | None, t1: str | None, trusted: bool, as_json: bool) -> None:
    """Add the records of a file: all of them, or none if anything in it is wrong."""
    from schedsearch.records.filling import fill_store
    from schedsearch.records.formats.exchange import import_file

    def fill(store: Store) -> Report:
        report_damage(store)
        return import_file(store, file, form, t1=t1, trusted=trusted)

    report = fill_store(db, fill)
    print_counts(asdict(report), as_json, note=report.note)


@records.command(short_help="Add the records of other databases.")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path())
@db_option
@json_option
def merge(files: tuple[str, ...], db: str, as_json: bool) -> None:
    """Add the records of other databases to the one given by --db, which is created when missing."""
    from schedsearch.records import exchange
    from schedsearch.records.filling import fill_store

    def fill(store: Store) -> Report:
        report_damage(store)
        return exchange.merge(store, files)

    report = fill_store(db, fill)
    print_counts(asdict(report), as_json, note=report.note)


@records.command(short_help="Drop stored machine code except that of the fastest.")
@click.option("--keep", metavar="K", type=AtLeast(1), default=1, help="Fastest per workload and target.")
@db_option
@json_option
def prune(keep: int, db: str, as_json: bool) -> None:
    """Drop the stored machine code of all records except the K fastest; every measurement stays.

    Kernels of ranges of sizes stay, too.
    """
    from schedsearch.records.store import Store

    with Store.open(db, create=False) as store:
        counts = store.prune(keep)
    print_counts(counts, as_json)


@records.command(short_help="Verify and time the best records of this device again.")
@db_option
@click.option("--target", "selector", metavar="TARGET", default="auto", help="auto, cpu, cuda or cuda:N.")
@click.option("--no-wait", is_flag=True, help="Exit with 3 instead of waiting while another run holds the device.")
@click.option(
    "--sanitize",
    "tool",
    is_flag=False,
    flag_value="memcheck",
    metavar="[TOOL]",
    help="Also run each kernel under NVIDIA's compute-sanitizer; memcheck by default, or initcheck, racecheck, synccheck.",
)
@click.option("--imported", "others", is_flag=True, help="Instead race what others measured with the defaults here.")
@click.option(
    "--toolchain",
    "rebuild",
    is_flag=True,
    help="Only what another toolchain than the installed one made, built again; it replaces the old code if it is as fast.",
)
@json_option
def verify(db: str, selector: str, no_wait: bool, tool: str | None, others: bool, rebuild: bool, as_json: bool) -> None:
    """Verify and time the best records of this device again, each in its recorded timing mode.

    Exits with 1 if a kernel is wrong, else with 5 if one takes over 1.1 times its recorded time.

    With --imported it races the configurations that were pulled or imported with the default of their template on this
    device. One that is at least 1.02 times as fast becomes the best record, otherwise the default does.
    """
    if others and (tool or rebuild):
        raise click.UsageError(f"--imported and --{'sanitize' if tool else 'toolchain'} exclude each other; give one")
    if others:
        admit_imported(db, selector, no_wait, as_json)
        return
    from schedsearch.device.detect import detect
    from schedsearch.measure.recheck import SLOWER, recheck
    from schedsearch.measurement import COLD_GRAPH, MODES
    from schedsearch.records.store import Store

    target = detect(selector)
    checks = []
    with Store.open(db, create=False) as store:
        options: dict[str, Any] = {"wait": not no_wait, "on_wait": render.note}
        for check in (
            check
            for mode in MODES
            for check in recheck(store, target, mode=mode, rebuild=rebuild, on_skip=render.note, **options)
        ):
            checks.append(check)
            record, measurement = check.record, check.measurement
            if as_json:
                render.echo_json(
                    {
                        "id": check.record_id,
                        "workload_id": record.workload.id,
                        "label": record.workload.label,
                        "template": record.template,
                        "mode": measurement.mode,
                        "recorded_ns": record.measurement.time_ns,
                        "time_ns": measurement.time_ns,
                        "ratio": check.ratio,
                        "outcome": str(measurement.outcome),
                        "message": measurement.message,
                        "regressed": check.regressed,
                    }
                )
            else:
                verdict = str(measurement.outcome) if check.wrong else "slower" if check.regressed else "ok"
                times = f"{render.duration(record.measurement.time_ns)} -> {render.duration(measurement.time_ns)}"
                mode = "" if measurement.mode == COLD_GRAPH else f"  {measurement.mode}"
                render.say(f"{verdict:>6}  {record.workload.label}  {record.template}  {times}{mode}")
    if not checks and not as_json:
        of_others = " that another toolchain made" if rebuild else ""
        render.say(f"no best record of {target.key}{of_others} in {db}; nothing to verify")
    wrong = [str(check.record_id) for check in checks if check.wrong]
    if tool:
        wrong += _sanitize(db, target, tool, options, as_json)
    if wrong:
        raise NoValidConfigError(f"wrong or failing: record {', '.join(wrong)}; tune these workloads again")
    if slow := [str(check.record_id) for check in checks if check.regressed]:
        raise RegressionError(
            f"over {SLOWER}x slower than recorded: record {', '.join(slow)}; is the device busy or throttled?"
        )


def _sanitize(db: str, target: Target, tool: str, options: Mapping[str, Any], as_json: bool) -> list[str]:
    """Ids of the records whose kernels have findings; these are no longer best."""
    from schedsearch.measure.sanitizer import sanitize_bests
    from schedsearch.records.store import Store

    found = []
    with Store.open(db, create=False) as store:
        for each in sanitize_bests(store, target, tool, **options):
            if each.finding:
                found.append(str(each.record_id))
            label = each.record.workload.label
            if as_json:
                render.echo_json({"id": each.record_id, "label": label, "tool": tool, "finding": each.finding})
            else:
                render.say(f"{'error' if each.finding else 'ok':>6}  {label}  {each.record.template}  {tool}")
                if each.finding:
                    render.say(textwrap.indent(each.finding, " " * 8))
    return found


def _workload_json(row: RecordRow) -> JsonObject:
    """Operator and parameters, in their stored form if the operator is not installed."""
    if row.problem:
        return dict(json.loads(row.workload_json))
    return {"op": row.op, "params": dict(row.workload.params)}


def _listed(row: RecordRow) -> JsonObject:
    """A line of `records list --json`: all fields on one level, with only the median of the times."""
    whole = row.to_json()
    measurement = whole.pop("measurement")
    for name in ("times_ns", "resources", "max_error", "clocks"):
        del measurement[name]
    own = {"workload_id": row.workload_id, "op": row.op, "label": row.label, "problem": row.problem, "best": row.best}
    del whole["toolchain"]
    return {**whole, **measurement, "time_ns": row.measurement.time_ns, **own}


def _note_problems(rows: Iterable[RecordRow]) -> None:
    """Notes below a table which workloads could not be read, and why."""
    for problem in dict.fromkeys(row.problem for row in rows):
        if problem:
            render.say(printable(f"note: {problem}"))


def _prediction(row: RecordRow) -> str:
    if row.prediction is None:
        return "-"
    return f"{row.prediction:.4g}" + (f" (state {row.model} of the model)" if row.model is not None else "")


def _race(row: RecordRow) -> str:
    """What the final race found."""
    found = {Verdict.WON: "won", Verdict.TIED: "cannot be told from the fastest, and lost the tie"}.get(row.verdict, "-")
    under_load = row.measurement.sustained_ns
    return found if under_load is None else f"{found}; {render.duration(under_load)} under load"


def _anchor(row: RecordRow) -> str:
    if row.anchor is None:
        return "-"
    ratio = f", {row.anchor_ratio:.3f} of it" if row.anchor_ratio is not None else ""
    return f"the default took {render.duration(row.anchor.time_ns)} in the same race{ratio}"
