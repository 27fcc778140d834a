"""Some columns of many records at once: for readers that draw thousands of records and need little of each.

`Reader.record` makes a whole value of each row, which takes ten times as long. Each value is checked here too, and a row
with a damaged one is skipped and logged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from schedsearch.records import damage, schema
from schedsearch.records.damage import DamageLog
from schedsearch.records.database import Database
from schedsearch.records.fields import RECORD

_CHUNK = 5000


def read_columns(
    database: Database,
    log: DamageLog,
    names: Sequence[str],
    *,
    after: int = 0,
    task: tuple[str, str, str] | None = None,
    run: str | None = None,
) -> Iterator[tuple[Any, ...]]:
    """The named columns of table record, in the order of appending, in chunks of one snapshot each.

    JSON columns stay strings. A chunk ends the transaction, so a long reading never keeps a writer's log from shrinking.

    Args:
        names: columns; the first one must be `id`.
        after: give only records with a larger id.
        task: only records of this (workload id, target key, mode).
        run: only records of this run.

    Raises:
        KeyError: there is no such column.
    """
    checked = _checker(names)

    record = schema.record.c
    query = sa.select(*(record[name] for name in names)).order_by(record.id).limit(_CHUNK)
    if task is not None:
        workload_id, target, mode = task
        query = query.where(record.workload_id == workload_id, record.target_key == target, record.mode == mode)
    if run is not None:
        query = query.where(record.run == run)
    while True:
        with database.read() as connection:
            fetched = connection.execute(query.where(record.id > after)).all()
        yield from damage.sound(log, database.path, "record", fetched, checked, lambda row: row[0])
        if len(fetched) < _CHUNK:
            return
        after = fetched[-1][0]


LISTED = (
    "id", "workload_id", "target_key", "mode", "template", "outcome", "time_ns", "final_race", "config", "message", "run",
    "finished_at", "times_ns",
)  # fmt: skip
"""The columns of `list_records`; JSON columns stay strings."""


@dataclass(frozen=True)
class Wanted:
    """Which records to list; an empty field matches all. They have all of `words` in their config or message."""

    task: tuple[str, str, str] | None = None
    template: str = ""
    outcomes: tuple[str, ...] = ()
    run: str = ""
    words: tuple[str, ...] = ()


def list_records(
    database: Database, log: DamageLog, wanted: Wanted, *, sort: str, descending: bool, limit: int
) -> tuple[int, list[tuple[Any, ...]]]:
    """How many records match, and the columns `LISTED` of the first `limit` of them.

    Args:
        sort: id, time_ns or finished_at; records without a time come last.
    """
    record = schema.record.c
    conditions: list[sa.ColumnElement[bool]] = []
    if wanted.task is not None:
        columns = record.workload_id, record.target_key, record.mode
        conditions += [column == value for column, value in zip(columns, wanted.task)]
    for column, value in ((record.template, wanted.template), (record.run, wanted.run)):
        if value:
            conditions.append(column == value)
    if wanted.outcomes:
        conditions.append(record.outcome.in_(wanted.outcomes))
    for word in wanted.words:
        conditions.append(
            sa.or_(record.config.icontains(word, autoescape=True), record.message.icontains(word, autoescape=True))
        )
    key = record[sort]
    order = (key.is_(None), key.desc() if descending else key, record.id)
    with database.read() as connection:
        total = connection.execute(sa.select(sa.func.count()).select_from(schema.record).where(*conditions)).scalar_one()
        query = sa.select(*(record[name] for name in LISTED)).where(*conditions).order_by(*order).limit(limit)
        fetched = connection.execute(query).all()
    return total, list(damage.sound(log, database.path, "record", fetched, _checker(LISTED), lambda row: row[0]))


def _checker(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    checks = [(name, RECORD[name].check) for name in names]
    return lambda row: tuple([check(name, value) for (name, check), value in zip(checks, row)])


def read_stamp(database: Database) -> tuple[Any, ...]:
    """A value that changes whenever records, runs or bests of this database do. It reads a few index entries only."""
    record, run, best = schema.record.c, schema.run.c, schema.best.c
    columns = (
        sa.select(schema.meta.c.value).where(schema.meta.c.key == "uuid").scalar_subquery(),
        sa.select(sa.func.max(record.id)).scalar_subquery(),
        sa.select(sa.func.count(run.id)).scalar_subquery(),
        sa.select(sa.func.max(run.finished_at)).scalar_subquery(),
        sa.select(sa.func.max(best.promoted_at)).scalar_subquery(),
        sa.select(sa.func.count(best.record_id)).scalar_subquery(),
    )
    with database.read() as connection:
        return tuple(connection.execute(sa.select(*columns)).one())
