"""`schedsearch records export --c`: what it refuses, and what it prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from schedsearch.cli import render
from schedsearch.measurement import COLD_GRAPH, MODES
from schedsearch.text import printable
from schedsearch.typed import JsonObject

if TYPE_CHECKING:
    from schedsearch.c_export import Exported
    from schedsearch.records.store import Store

_C = click.option(
    "--c",
    "c_folder",
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="Write the best GPU kernels as C to DIR instead.",
)
_MODE = click.option(
    "--mode", type=click.Choice(MODES), help=f"With --c: kernels whose times were taken so.  [default: {COLD_GRAPH}]"
)
_TORCH = click.option("--torch", is_flag=True, help="With --c: also write operators of PyTorch, in C++.")
_PREFIX = click.option(
    "--prefix",
    metavar="NAME",
    help="With --c: how all names begin; a program with several exports needs several.  [default: schedsearch]",
)


def c_options(command: Any) -> Any:
    """The options of `records export` for C."""
    return _C(_TORCH(_PREFIX(_MODE(command))))


def check_options(
    file: str | None, c_folder: str | None, mode: str | None, torch: bool, prefix: str | None, others: Sequence[str]
) -> None:
    """Raises UsageError if a FILE, options of C and other options of `records export` do not go together.

    Args:
        others: the given options that write a FILE.
    """
    if c_folder is None:
        if file is None:
            raise click.UsageError("give a FILE to write, or --c DIR")
        if mode is not None:
            raise click.UsageError("--mode is for --c; a FILE holds the records of all modes")
        if torch:
            raise click.UsageError("--torch is for --c DIR; give both")
        if prefix is not None:
            raise click.UsageError("--prefix is for --c DIR; give both")
    elif not c_folder:
        raise click.UsageError("--c is empty; give the folder to write")
    elif file is not None or others:
        raise click.UsageError(f"--c writes a folder; it does not go with {', '.join(others) or f'FILE ({file})'}")


def export(
    store: Store,
    folder: str,
    workloads: Sequence[str],
    target: str | None,
    mode: str | None,
    torch: bool,
    prefix: str | None,
    as_json: bool,
) -> None:
    """Writes the folder and says what it holds."""
    from schedsearch.c_export import export_c

    options: dict[str, Any] = {} if prefix is None else {"prefix": prefix}
    exported = export_c(store, folder, workloads=workloads, target=target, mode=mode or COLD_GRAPH, torch=torch, **options)
    if as_json:
        render.echo_json(_json(exported))
        return
    rows = [
        (each.name, each.workload.label, each.best.row.target, render.duration(each.time_ns)) for each in exported.kernels
    ]
    render.say(render.table(("function", "workload", "measured on", "time"), rows, right=("time",)))
    for each in exported.left_out:
        render.note(printable(f"left out: {each.label} on {each.target}: {each.reason}"))
    count = render.counted(len(exported.kernels), "kernel")
    render.say(f"{count}, {render.size_bytes(exported.code_bytes)} of machine code, in {exported.folder}")


def _json(exported: Exported) -> JsonObject:
    return {
        "folder": str(exported.folder),
        "kernels": [
            {
                "name": each.name,
                "label": each.workload.label,
                "workload_id": each.workload.id,
                "target": each.best.row.target,
                "time_ns": each.time_ns,
                "code_bytes": len(each.artifact.code),
            }
            for each in exported.kernels
        ],
        "left_out": [vars(each) for each in exported.left_out],
        "files": exported.files,
        "code_bytes": exported.code_bytes,
    }
