"""What a command does about damaged rows: it shows or copies all others, then exits with 6 and says what it left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from schedsearch.records.damage import DamageLog
    from schedsearch.records.store import Store

_KEY = "schedsearch.cli.damaged"


def report_damage(store: Store) -> Store:
    """Makes the present command end with exit code 6 if the store had to skip rows. Returns the store."""
    logs: list[DamageLog] = click.get_current_context().meta.setdefault(_KEY, [])
    logs.append(store.damage)
    store.damage.warns = False
    return store


def raise_for_damage(ctx: click.Context) -> None:
    """Called when a command has ended well. Raises DatabaseError if it skipped rows."""
    for log in ctx.meta.get(_KEY, ()):
        log.raise_if_any()
