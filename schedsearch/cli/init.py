"""`schedsearch init`: writes a workload file to start from."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from schedsearch.cli import render
from schedsearch.cli.inspect import TARGET_HELP
from schedsearch.errors import UsageError
from schedsearch.measurement import DEFAULT_DB


@click.command()
@click.argument("output", metavar="[FILE]", default="workload.yaml", type=click.Path(dir_okay=False))
@click.option(
    "--op", "ops", metavar="NAME", multiple=True, default=("conv2d",), help="A task of this operator; may be repeated."
)
@click.option(
    "--target", "selector", metavar="TARGET", default="auto", help=f"The device whose knobs the comments name: {TARGET_HELP}"
)
@click.option("--db", metavar="FILE", default=DEFAULT_DB, help="Record store that the file names.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def init(output: str, ops: tuple[str, ...], selector: str, db: str, force: bool) -> None:
    """Write a commented workload file to start from: workload.yaml, or FILE.

    It has an example of each operator with all its keys, and the templates and knobs of this machine's device in comments.
    Change the shapes to your own.
    """
    from schedsearch.device.detect import detect
    from schedsearch.records.output import new_file
    from schedsearch.workload_file.starter import starter_file

    path = Path(output)
    if path.exists() and not force:
        raise UsageError(f"{output} exists; give another name, or --force to replace it")
    text = starter_file(ops, detect(selector, presets=True), name=output, db=db)
    with new_file(path) as file:
        file.write(text.encode())
    render.say(f"{output}: check it, and then tune:")
    render.say(f"  schedsearch tune {shlex.quote(output)} --dry-run\n  schedsearch tune {shlex.quote(output)}")
