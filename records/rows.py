"""Converts `Record` to table rows and to and from JSON objects; the identity of a record; a record as stored.

What each column holds is declared in `fields`; `reader` reads rows. Exchange files use the JSON objects. They are valid
JSON: a float that is not finite is written as the text "inf".
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

from schedsearch.errors import WorkloadError
from schedsearch.identity import canonical_json, sha256_hex
from schedsearch.measurement import Anchor, Attempt, Measurement, Record, Resources
from schedsearch.ops.own_kernel import without_reference
from schedsearch.records import claims
from schedsearch.records.damage import DamagedRow
from schedsearch.records.fields import RECORD, Field
from schedsearch.typed import JsonMapping, JsonObject
from schedsearch.workload import Workload

_CONTENT = [(each, each.path.split(".")) for each in RECORD.fields if each.path]
_IN_JSON = [(each, path) for each, path in _CONTENT if not each.derived]
_NOT_IN_IDENTITY = ("artifact", "source")
_LATER = [(each, path) for each, path in _IN_JSON if each.since > 1]


def _by_part(content: list[tuple[Field, list[str]]]) -> list[tuple[list[str], list[tuple[str, Field]]]]:
    """The path of each part of a record that has fields (the record itself comes first), and these with their last names."""
    parts: dict[str, tuple[list[str], list[tuple[str, Field]]]] = {}
    for field, path in content:
        parts.setdefault(".".join(path[:-1]), (path[:-1], []))[1].append((path[-1], field))
    return list(parts.values())


# What a record has in each part: how to get all values at once, and the fields.
_VALUES = [
    (path, operator.attrgetter(*(name for name, _ in named)), [field for _, field in named])
    for path, named in _by_part(_CONTENT)
]
_JSON = [(path, [(name, field.name, field.show) for name, field in named]) for path, named in _by_part(_IN_JSON)]


def to_row(record: Record) -> JsonObject:
    """The row of table record without its id, and with `workload_json` and `toolchain_json` as in `queries.records`.

    Raises:
        ValueError: a time or score is not a finite number, a time stamp is before 1970 or after the year 9999, or a count is
            negative or does not fit into 64 bits.
    """
    row = _values(record, record.workload.id, record.workload.json)
    return {**row, "content_id": content_id(row)}


def _values(record: Attempt, workload_id: str, workload_json: str) -> JsonObject:
    toolchain_json = canonical_json(dict(record.toolchain))
    return {
        "workload_id": workload_id,
        "workload_json": workload_json,
        "toolchain_id": sha256_hex(toolchain_json),
        "toolchain_json": toolchain_json,
        **{
            field.name: field.keep(value)
            for path, values, columns in _VALUES
            for field, value in zip(columns, _values_of(record, path, values, len(columns)))
        },
    }


def _values_of(record: object, path: list[str], values: Callable[[Any], Iterable[Any]], count: int) -> Iterable[Any]:
    """The values of a part of a record; None for each if there is no such part."""
    for name in path:
        record = getattr(record, name)
    return [None] * count if record is None else values(record)


def to_json(row: JsonMapping) -> JsonObject:
    """The JSON object of a row with the keys of `to_row`. It does not need the operator."""
    found = {"workload": json.loads(row["workload_json"]), "toolchain": json.loads(row["toolchain_json"])}
    for path, named in _JSON:
        part = found
        for name in path:
            part = part.setdefault(name, {})
        part |= {name: show(row[column]) for name, column, show in named}
    if row["anchor_code"] is None:
        found["anchor"] = None
    return found


def content_id(row: JsonMapping) -> str:
    """sha256 of everything that was measured and when, of a row of `queries.records`. It does not cover the source of an
    import and the artifact.

    A field that was added to Record or Measurement later is left out while it has its default, so ids do not change.
    """
    content = to_json(row)
    for name in _NOT_IN_IDENTITY:
        del content[name]
    for field, path in _LATER:
        if row[field.name] == field.default:
            part = content
            for name in path[:-1]:
                part = part[name] or {}
            part.pop(path[-1], None)
    if not content["anchor"]:
        del content["anchor"]
    return sha256_hex(canonical_json(content))


def from_json(data: JsonMapping) -> Record:
    """The record of an object made by `to_json`. Fields that later versions added may be missing.

    Raises:
        WorkloadError: the workload is invalid.
        KeyError, TypeError, ValueError, OverflowError: a field is missing or has the wrong type.
    """
    return Record(
        workload=_workload(canonical_json(data["workload"])),
        toolchain={str(name): str(value) for name, value in data["toolchain"].items()},
        **attempt({field.name: field.take(_given(data, field, path)) for field, path in _IN_JSON}),
    )


def _given(data: Any, field: Field, path: list[str]) -> Any:
    for name in path:
        if field.since > 1 and (data is None or name not in data):
            return field.default
        data = data[name]
    return data


def attempt(values: JsonMapping) -> JsonObject:
    """The arguments of an `Attempt` except its toolchain, from the values of the columns as `Field.read` gives them.

    Raises:
        ValueError: the values do not fit together.
    """
    code, anchor_ns = values["anchor_code"], values["anchor_ns"]
    if (code is None) != (anchor_ns is None):
        raise DamagedRow("anchor_code and anchor_ns must both have a value or both be NULL")
    measured = {name: values[column] for name, column in _MEASURED}
    resources = Resources(**{name: values[name] for name in _RESOURCES})
    return {
        "measurement": Measurement(**measured, resources=resources),
        "anchor": None if code is None else Anchor(code, anchor_ns),
        **{name: values[column] for name, column in _CIRCUMSTANCES},
    }


def _names(*folders: str) -> list[tuple[str, str]]:
    return [(path[-1], field.name) for field, path in _IN_JSON if tuple(path[:-1]) == folders]


_CIRCUMSTANCES, _MEASURED = _names(), _names("measurement")
_RESOURCES = [column for _, column in _names("measurement", "resources")]


def sign_record(content_id: str, artifact_sha256: str | None) -> str:
    """This machine's signature of a record that it measured, and of the code that was kept for it."""
    return sign_records([(content_id, artifact_sha256)])[0]


def sign_records(measured: Iterable[tuple[str, str | None]]) -> list[str]:
    """The same for several records."""
    return claims.sign_all(claims.Kind.RECORD, list(itertools.starmap(claims.record_text, measured)))


def is_own_record(row: JsonMapping) -> bool:
    """Whether this machine measured exactly what a row says, with the keys of `queries.records`."""
    text = claims.record_text(row["content_id"], row["artifact_sha256"])
    return claims.is_ours(claims.Kind.RECORD, text, row["signature"]) and not problem_of_ids(row)


def problem_of_ids(row: JsonMapping) -> str:
    """Which identity of a row, with the keys of `queries.records`, does not belong to its content; "" if all do."""
    content = content_id(row)
    if row["prediction"] == 0 and row["content_id"] != content:
        # Earlier versions hashed a prediction of -0.0, of which SQLite keeps 0.0.
        content = content_id({**row, "prediction": -0.0})
    for name, wanted in (
        ("workload_id", sha256_hex(row["workload_json"])),
        ("toolchain_id", sha256_hex(row["toolchain_json"])),
        ("content_id", content),
    ):
        if row[name] != wanted:
            return f"its {name} is {str(row[name])[:12]}, that of its content is {wanted[:12]}"
    return ""


@dataclass(frozen=True, kw_only=True)
class RecordRow(Attempt):
    """A record as stored. It can be listed even if its operator is not installed.

    Attributes:
        id: its number in this store; ids grow in the order of appending.
        op: the name of the workload's operator.
        workload_id, workload_json: the workload as written.
        best: whether deployment serves it.
    """

    id: int
    op: str
    workload_id: str
    workload_json: str
    best: bool

    @property
    def workload(self) -> Workload:
        """The workload, parsed at the first access.

        Raises:
            WorkloadError: this installation does not know the operator, or not this version of it.
        """
        return _workload(self.workload_json)

    @property
    def label(self) -> str:
        """The workload's label; if the operator is not installed, its name and the beginning of the workload's id."""
        return label_of(self.workload_id, self.op, self.workload_json)

    @property
    def problem(self) -> str:
        """Why the workload cannot be read here; "" if it can."""
        try:
            self.workload  # noqa: B018  reading it is the test
        except WorkloadError as error:
            return str(error)
        return ""

    @property
    def unreferenced(self) -> str:
        """As `schedsearch.ops.own_kernel.without_reference`."""
        params = json.loads(self.workload_json).get("params")
        return without_reference(params if isinstance(params, dict) else {})

    def record(self) -> Record:
        """Raises WorkloadError as `workload` does."""
        return Record(workload=self.workload, **{each.name: getattr(self, each.name) for each in fields(Attempt)})

    def to_json(self) -> JsonObject:
        """The JSON object of exchange files (`to_json`) with the record's id."""
        return {"id": self.id, **to_json(_values(self, self.workload_id, self.workload_json))}


@dataclass(frozen=True)
class Best:
    """What deployment serves for one (workload, target, mode).

    Attributes:
        row: the promoted record, with its measurement and circumstances.
        verified: whether exactly this code computed right results when it was measured.
        artifact_sha256: that of the stored code; None if no code is kept, so that it is rebuilt from the config.
        promoted_at: seconds since the epoch.
        signature: of the claim, by the machine that made it the best; "" before schema version 4.
        content_id: of the record, see `content_id`.
    """

    row: RecordRow
    verified: bool
    artifact_sha256: str | None
    promoted_at: float
    signature: str
    content_id: str

    @property
    def task(self) -> tuple[str, str, str]:
        """Workload id, target key and mode."""
        return self.row.workload_id, self.row.target, self.row.measurement.mode

    @property
    def claim(self) -> claims.Claim:
        """What a row of table best with this record says."""
        row, time_ns = self.row, self.row.measurement.time_ns
        candidate = row.template, row.template_version
        return claims.Claim(*self.task, *candidate, row.config.json, time_ns, self.verified, self.artifact_sha256)

    @property
    def vouched(self) -> bool:
        """Whether this machine measured and verified exactly this, or its user marked it as trusted."""
        return claims.vouches(self.claim, self.signature)

    @property
    def record_id(self) -> int:
        return self.row.id

    @property
    def record(self) -> Record:
        """Raises WorkloadError if its operator is not installed."""
        return self.row.record()


def label_of(workload_id: str, op: str, workload_json: str) -> str:
    """The label of a stored workload; if its operator is not installed, its name and the beginning of the workload's id."""
    try:
        return _workload(workload_json).label
    except WorkloadError:
        return f"{op} {workload_id[:12]}"


@functools.lru_cache(maxsize=4096)  # the same few workloads recur in every listing and file
def _workload(text: str) -> Workload:
    return Workload.from_json(text)
