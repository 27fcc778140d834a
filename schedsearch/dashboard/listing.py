"""Fills the list of records: filtered, sorted, page by page."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from schedsearch.dashboard import loose
from schedsearch.dashboard.noise import doubt_of
from schedsearch.dashboard.overview import run_key
from schedsearch.dashboard.source import Source, TaskId
from schedsearch.dashboard.views.overview import TaskRow
from schedsearch.dashboard.views.records import RecordColumns, RecordsView
from schedsearch.errors import SchedsearchError
from schedsearch.identity import canonical_json
from schedsearch.measurement import Outcome
from schedsearch.records.columns import Wanted
from schedsearch.text import printable, shortened

PAGE = 1000
MOST = 5000
_MESSAGE_CHARACTERS = 200
_SORTS = {"id": "id", "time_ns": "time_ns", "at_s": "finished_at"}


class _Listed(NamedTuple):
    """The columns of `records.columns.LISTED`, and the record's task as an index into those of the view."""

    id: int
    workload_id: str
    target: str
    mode: str
    template: str
    outcome: str
    time_ns: float | None
    race: bool
    config: str
    message: str
    run: str
    finished_at: float
    times_ns: str | None
    task: int

    @property
    def times(self) -> tuple[float, ...]:
        return tuple(filter(None, map(loose.number, loose.sequence(loose.parsed(self.times_ns or "")))))


def records_view(
    sources: Sequence[Source],
    rows: Mapping[str, Mapping[TaskId, TaskRow]],
    query: Mapping[str, str],
    *,
    most: int = MOST,
    keep: Mapping[str, Collection[int]] | None = None,
) -> RecordsView:
    """A page of records.

    Args:
        rows: the tasks' rows of the overview, by source key.
        query: see `RecordsView`; what is not valid there is taken as not given.
        most: records on a page at most.
        keep: task key -> the ids of the only records to list; `total` and `tasks` are of all.
    """
    sort = _SORTS.get(query.get("sort", ""), "finished_at")
    descending = query.get("descending", "0" if sort == "time_ns" else "1") != "0"
    offset, limit = _number(query, "offset", 0), min(_number(query, "limit", PAGE), most)
    tasks: dict[tuple[str, TaskId], int] = {}
    shown_tasks: list[TaskRow] = []
    found: list[_Listed] = []
    total, notes = 0, []
    for source in sources:
        wanted = _wanted(source, query)
        if wanted is None or source.store is None:
            continue
        try:
            count, listed = source.store.listing(wanted, sort=sort, descending=descending, limit=offset + limit)
        except SchedsearchError as error:
            notes.append(str(error))
            continue
        total += count
        for row in listed:
            task = row[1:4]
            if task not in rows[source.key]:
                continue  # appended since the last refresh
            if (source.key, task) not in tasks:
                tasks[source.key, task] = len(shown_tasks)
                shown_tasks.append(rows[source.key][task])
            if keep is None or row[0] in keep[rows[source.key][task].key]:
                found.append(_Listed._make((*row, tasks[source.key, task])))
    found.sort(key=lambda row: getattr(row, sort) or 0, reverse=descending)
    found.sort(key=lambda row: getattr(row, sort) is None)
    paths = {source.key: shlex.quote(source.path) for source in sources}
    page = found[offset : offset + limit]
    columns, knobs, varying = _columns(page)
    ids = {row.run for row in page}
    runs = {run["id"]: run_key(source, run["id"]) for source in sources for run in source.runs if run["id"] in ids}
    return RecordsView(total, offset, tuple(shown_tasks), columns, knobs, varying, runs, tuple(notes), paths)


def _wanted(source: Source, query: Mapping[str, str]) -> Wanted | None:
    """The conditions for one source; None if nothing of it can match."""
    task = source.task_of(query["task"]) if query.get("task") else None
    if query.get("task") and task is None:
        return None
    outcome = query.get("outcome", "")
    outcomes = tuple(str(each) for each in Outcome if each != Outcome.OK) if outcome == "failed" else (outcome,)
    words = tuple(query.get("text", "").split()[:10])
    return Wanted(task, query.get("template", ""), outcomes if outcome else (), query.get("run", ""), words)


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else default


def _columns(
    rows: Sequence[_Listed],
) -> tuple[RecordColumns, dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """The columns, and for each template the names of its knobs, and of those that vary."""

    def text(value: str) -> str:
        return printable(value, lines=True)

    configs = [loose.mapping(loose.parsed(row.config)) for row in rows]
    found: dict[str, dict[str, set[str]]] = {}
    for row, config in zip(rows, configs):
        of = found.setdefault(text(row.template), {})
        for name, value in config.items():
            of.setdefault(name, set()).add(canonical_json(value))
    counts = Counter(text(row.template) for row in rows)
    present = Counter((text(row.template), name) for row, config in zip(rows, configs) for name in config)
    knobs = {template: tuple(of) for template, of in found.items()}
    varying = {
        template: tuple(name for name, values in of.items() if len(values) > 1 or present[template, name] < counts[template])
        for template, of in found.items()
    }
    columns = RecordColumns(
        id=[row.id for row in rows],
        task=[row.task for row in rows],
        template=[text(row.template) for row in rows],
        outcome=[row.outcome for row in rows],
        time_ns=[row.time_ns for row in rows],
        doubt=[doubt_of(row.times) for row in rows],
        race=[row.race for row in rows],
        config=[text(config_text(row.config)) for row in rows],
        values=[[_value(config.get(name)) for name in knobs[text(row.template)]] for row, config in zip(rows, configs)],
        message=[text(shortened(row.message.partition("\n")[0], _MESSAGE_CHARACTERS)) for row in rows],
        run=[text(row.run) for row in rows],
        at_s=[row.finished_at for row in rows],
    )
    return columns, knobs, varying


def _value(value: object) -> Any:
    return printable(value, lines=True) if isinstance(value, str) else value


def config_text(config_json: str) -> str:
    """A config as name=value, as the command line shows it; the JSON itself if it is damaged."""
    try:
        config = json.loads(config_json)
        return " ".join(f"{name}={value}" for name, value in config.items())
    except (ValueError, AttributeError, RecursionError):
        return config_json
