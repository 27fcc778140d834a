"""Records of all databases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from schedsearch.dashboard.views.noise import Doubt
from schedsearch.dashboard.views.overview import TaskRow
from schedsearch.dashboard.views.values import JSON


@dataclass(frozen=True)
class RecordColumns:
    """Records column by column. `task` is an index into `RecordsView.tasks`, `outcome` a name, `config` a string of
    name=value, `message` its first 200 characters, `doubt` why its time is
    not to be trusted. `values` are those of the knobs of its template
    (`RecordsView.knobs`), null for a knob that it lacks. The record's key is `database of its task + "." + id`."""

    id: list[int]
    task: list[int]
    template: list[str]
    outcome: list[str]
    time_ns: list[float | None]
    doubt: list[Doubt]
    race: list[bool]
    config: list[str]
    values: list[list[JSON]]
    message: list[str]
    run: list[str]
    at_s: list[float]


@dataclass(frozen=True)
class RecordsView:
    """Records of all databases, the newest first. `total` matched; these are `offset` and following.

    Without a query the path `records` gives the newest 1,000 (all of them in a report). Live, the query narrows and sorts:
    task=KEY, template=NAME, outcome=NAME (or `failed`), run=ID, text=WORDS (in config or message), sort=time_ns|at_s|id,
    descending=0|1, offset=N, limit=N (at most 5,000).

    Attributes:
        knobs: template -> the names of the knobs of its records, in the order of their first occurrence.
        varying: template -> those of them that have more than one value in these records.
        runs: id of each run of these records -> its `RunRow.key`; records that were imported have no run.
        shell_paths: `DatabaseRow.key` -> the path of the database, quoted for commands to copy.
    """

    total: int
    offset: int
    tasks: tuple[TaskRow, ...]
    records: RecordColumns
    knobs: Mapping[str, tuple[str, ...]]
    varying: Mapping[str, tuple[str, ...]]
    runs: Mapping[str, str]
    notes: tuple[str, ...]
    shell_paths: Mapping[str, str]
