"""`schedsearch records export`: as a file of records, as a database for deployment, or as C."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from schedsearch.cli import c_export
from schedsearch.cli.stores import db_option, json_option, open_store, print_counts, target_key, target_option
from schedsearch.records.formats import FORMATS
from schedsearch.typed import JsonObject


@click.command(short_help="Write records to a file.")
@click.argument("file", metavar="[FILE]", type=click.Path(dir_okay=False), required=False)
@db_option
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    help="jsonl, our own and complete, or that of another tuner.  [default: jsonl]",
)
@click.option("--deploy", is_flag=True, help="Write a small database of best kernels for deployment instead.")
@c_export.c_options
@click.option("--artifacts", is_flag=True, help="Put machine code into the JSON lines too.")
@click.option(
    "--workload",
    "workloads",
    metavar="ID",
    multiple=True,
    help="Only this workload: its label, or how its id begins; several times with --c.",
)
@click.option("--template", metavar="NAME", help="Only this template.")
@target_option
@json_option
def export(
    file: str | None,
    db: str,
    form: str | None,
    deploy: bool,
    c_folder: str | None,
    mode: str | None,
    torch: bool,
    prefix: str | None,
    artifacts: bool,
    workloads: tuple[str, ...],
    template: str | None,
    selector: str | None,
    as_json: bool,
) -> None:
    """Write records to FILE: all as JSON lines, a task's in another tuner's format, or the best kernels with --deploy.

    With --c write the best GPU kernels as C functions to a folder.
    """
    from schedsearch.records import exchange
    from schedsearch.records.deployment import export_deploy

    given = {"--deploy": deploy, "--format": form, "--artifacts": artifacts, "--template": template}
    c_export.check_options(file, c_folder, mode, torch, prefix, [name for name, value in given.items() if value])
    if c_folder is not None:
        with open_store(db) as store:
            c_export.export(store, c_folder, workloads, target_key(selector), mode, torch, prefix, as_json)
        return
    assert file is not None  # or check_options has raised
    if deploy and (artifacts or form):
        raise click.UsageError("--artifacts and --format are not for --deploy, which writes a database with machine code")
    foreign = form not in (None, "jsonl")
    if foreign and artifacts:
        raise click.UsageError(f"--artifacts is for jsonl; the format {form} has no place for machine code")
    if not foreign and (workloads or template or (selector and not deploy)):
        raise click.UsageError(
            "--workload and --template need the format of another tuner, --target that or --deploy; JSON lines have all"
        )
    if len(workloads) > 1:
        raise click.UsageError("a file in another tuner's format has one task; give --workload once")
    into_stdout = _is_stdout(file)  # then nothing else may go there
    with open_store(db) as store:
        counts: JsonObject
        if deploy:
            counts = export_deploy(store, file, target=target_key(selector))
        elif form is not None and foreign:
            from schedsearch.records.formats.exchange import export_file

            workload = workloads[0] if workloads else None
            counts = export_file(store, file, form, workload=workload, template=template, target=target_key(selector))
        else:
            counts = {"records": exchange.export_jsonl(store, file, artifacts=artifacts)}
    print_counts({"file": file, **counts}, as_json, err=into_stdout)


def _is_stdout(file: str) -> bool:
    """Whether a path, e.g. /dev/stdout, is the standard output of this process."""
    try:
        return os.path.samestat(Path(file).stat(), os.fstat(sys.stdout.fileno()))
    except OSError:
        return False
