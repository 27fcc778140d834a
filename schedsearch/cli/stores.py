"""What the commands about a database of records share: options, opening it, and how they print counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from schedsearch.cli import render
from schedsearch.cli.damaged import report_damage
from schedsearch.cli.options import CARDS
from schedsearch.measurement import DEFAULT_DB
from schedsearch.typed import JsonObject

if TYPE_CHECKING:
    from schedsearch.records.store import Store


def db_option(function: Any) -> Any:
    return click.option("--db", metavar="FILE", default=DEFAULT_DB, help="Record store: a file, or postgresql://...")(
        function
    )


def json_option(function: Any) -> Any:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def target_option(function: Any) -> Any:
    return click.option(
        "--target",
        "selector",
        metavar="TARGET",
        help=f"Only this device: auto, cpu, cuda, cuda:N, {CARDS} or a key.",
    )(function)


def open_store(db: str) -> Store:
    from schedsearch.records.store import Store

    return report_damage(Store.open(db, create=False, readonly=True))


def target_key(selector: str | None) -> str | None:
    """The key of a target given as --target: the key of a device or preset; any other text is taken as a target key."""
    if selector is None or ":" in selector.removeprefix("cuda:"):
        return selector
    from schedsearch.device.detect import detect

    return detect(selector, presets=True).key


def print_counts(counts: JsonObject, as_json: bool, err: bool = False, note: str = "") -> None:
    if as_json:
        render.echo_json(counts, err=err)
    else:
        shown = {name: value for name, value in counts.items() if name != "warnings"}
        render.say(", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in shown.items()), err=err)
    for text in counts.get("warnings", ()):
        render.note(f"warning: {text}")
    if note:
        render.note(f"note: {note}")
