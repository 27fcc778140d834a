"""What the columns of every table hold: the one table of fields that schema, codec and deployment derive from.

A column is declared once, with its SQL type, where its value is found in a record and in the JSON of an exchange file, how
it is stored, and what is checked when it is read. `schema` makes tables and migrations of it, `rows` and `reader` convert
records, `columns` reads single columns, `lookup` and `size_tables` check what deployment reads. A new column is one line
here, with the next schema version. Standard library only, because deployment reads with it.
"""

from __future__ import annotations

import functools
import json
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from schedsearch.config import Config
from schedsearch.identity import canonical_json
from schedsearch.measurement import Outcome, Verdict
from schedsearch.records import damage
from schedsearch.records.damage import DamagedRow

Check = Callable[[str, Any], Any]


def _same(value: object) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Field:
    """A column.

    Attributes:
        name: of the column.
        sql: its type in SQL: INTEGER, REAL, TEXT or BLOB.
        check: (name, stored value) -> the value, checked; text of JSON is not parsed. Raises `DamagedRow`.
        read: the same for a whole reading: JSON is parsed and all of it checked. `check` if None.
        store: the value of a record, or of JSON -> what is stored.
        show: what is stored -> the value in JSON.
        path: where the value is in a record and in its JSON object, e.g. "measurement.run_s"; "" if it is in neither.
        derived: whether other fields determine it, so that JSON leaves it out.
        key: whether it is part of the primary key.
        null: whether it may be NULL.
        since: the schema version that added it. JSON of earlier versions may lack it, and a record's identity leaves it out
            while it has its `default`.
        constraint: what follows in the column's definition.
    """

    name: str
    sql: str
    check: Check
    read: Check
    store: Callable[[Any], Any] = _same
    show: Callable[[Any], Any] = _same
    path: str = ""
    derived: bool = False
    key: bool = False
    null: bool = False
    since: int = 1
    default: Any = None
    constraint: str = ""

    def optional(self) -> Field:
        """The field where NULL is allowed."""

        def reads(action: Check) -> Check:
            return lambda name, value: None if value is None else action(name, value)

        def converts(action: Callable[[Any], Any]) -> Callable[[Any], Any]:
            return lambda value: None if value is None else action(value)

        check, read = reads(self.check), reads(self.read)
        return replace(self, null=True, check=check, read=read, store=converts(self.store), show=converts(self.show))

    def keep(self, value: object) -> Any:
        """What the column keeps of a value of a record.

        Raises:
            ValueError: the value is not what the column may hold.
        """
        stored = self.store(value)
        try:
            self.check(self.name, stored)
        except DamagedRow:
            self.check(f"{self.name} of a record", stored)  # the same again, for its message
        return stored

    def take(self, value: object) -> Any:
        """The value of a record for one from JSON: what `read` gives of what would be kept. Raises as `keep`."""
        return self.read(f"{self.name} of a record", self.store(value))


@dataclass(frozen=True)
class TableFields:
    """A table: its fields, and what follows them in its definition.

    Attributes:
        since: the schema version that added it.
        deployed: whether files of `records export --deploy` have it too.
    """

    name: str
    fields: tuple[Field, ...]
    constraints: str = ""
    options: str = "STRICT"
    since: int = 1
    deployed: bool = True

    def __getitem__(self, name: str) -> Field:
        return self._by_name[name]

    @functools.cached_property
    def _by_name(self) -> dict[str, Field]:
        return {field.name: field for field in self.fields}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def select(self, names: Iterable[str]) -> list[Field]:
        return [self._by_name[name] for name in names]


# ---- kinds of fields


def _text(name: str, **more: Any) -> Field:
    return Field(name, "TEXT", damage.text, damage.text, **more)


def _integer(name: str, low: int = 0, **more: Any) -> Field:
    check = functools.partial(damage.whole, low=low)
    return Field(name, "INTEGER", check, check, _plain_integer, **more)


def _real(name: str, check: Check = damage.number, **more: Any) -> Field:
    return Field(name, "REAL", check, check, _plain_real, **more)


def _json(name: str, read: Check, **more: Any) -> Field:
    return Field(name, "TEXT", damage.text, read, functools.partial(_stored_json, name), _decoded, **more)


def _flag(name: str, **more: Any) -> Field:
    return Field(name, "INTEGER", damage.flag, damage.flag, int, bool, **more)


_decoded = json.JSONDecoder().decode  # what json.loads does, with its options settled


def _stored_json(name: str, value: Any) -> str:
    if isinstance(value, Config):
        return value.json
    try:
        return canonical_json(dict(value) if isinstance(value, Mapping) else value, finite=True)
    except ValueError as error:
        raise DamagedRow(f"{name} of a record is not JSON ({error})") from None


def _plain_integer(value: Any) -> Any:
    if type(value) is int:
        return value
    return int(value) if isinstance(value, numbers.Integral) else value


def _plain_real(value: Any) -> Any:
    if type(value) is float or isinstance(value, numbers.Real):
        return float(value) + 0.0  # SQLite keeps no negative zero
    return value


_at_least_0 = functools.partial(damage.number, low=0.0)
_above_0 = functools.partial(damage.number, above=0.0)


@functools.lru_cache(maxsize=1 << 16)  # a search repeats few configurations
def _config(name: str, value: str) -> Config:
    return Config(damage.config_values(name, value))


def _outcome(name: str, value: object) -> Outcome:
    found = _OUTCOMES.get(value) if isinstance(value, str) else None
    if found is None:
        raise DamagedRow(f"{name} is {ascii(value)[:60]}; it must be one of {', '.join(_OUTCOMES)}")
    return found


def _verdict(name: str, value: object) -> Verdict:
    found = _VERDICTS.get(value) if isinstance(value, str) else None
    if found is None:
        raise DamagedRow(f"{name} is {ascii(value)[:60]}; it must be one of {', '.join(filter(None, _VERDICTS))}, or empty")
    return found


_VERDICTS = {str(verdict): verdict for verdict in Verdict}
_OUTCOMES = {str(outcome): outcome for outcome in Outcome}


def _times(name: str, value: object) -> tuple[float, ...]:
    if value is None:
        return ()
    times_ns = damage.parsed(name, value)
    if not isinstance(times_ns, list) or not times_ns:
        raise DamagedRow(f"{name} is not a list of times")
    return tuple([damage.number(f"a time of {name}", time_ns, above=0.0) for time_ns in times_ns])


def _stored_times(times_ns: Any) -> Any:
    if not times_ns:
        return None
    return canonical_json(
        [damage.number("a time of times_ns of a record", _plain_real(time_ns), above=0.0) for time_ns in times_ns]
    )


def _error(name: str, value: object) -> Any:
    """An output with NaN has an infinite error, because SQL has no NaN."""
    return value if value == math.inf else damage.number(name, value)


def _stored_error(value: object) -> Any:
    error = _plain_real(math.inf if value == "inf" else value)
    return math.inf if isinstance(error, float) and not math.isfinite(error) else error


def _configuration(name: str, value: object) -> Config:
    return _config(name, damage.text(name, value))


def _code(name: str = "code") -> Field:
    return Field(name, "BLOB", damage.blob, damage.blob)


# ---- tables

META = TableFields("meta", (_text("key", key=True), _text("value")), options="STRICT, WITHOUT ROWID")
"""key: schema_version, uuid, kind (store | deploy), machine, signature, created_at"""

WORKLOAD = TableFields(
    "workload",
    (_text("id", key=True), _text("op"), _json("json", damage.mapping)),  # id: sha256 of json
    options="STRICT, WITHOUT ROWID",
)

_KIND_OF_CODE = "sha256", "kind", "arch", "plan", "machine", "signature"
ARTIFACT = TableFields(
    "artifact",  # the code is last, so that reading the other columns does not touch its pages
    (
        *(_text(name, key=name == "sha256") for name in _KIND_OF_CODE),  # signature: by the machine that wrote the row
        _real("created_at", damage.stamp),
        _code(),
    ),
)

BEST = TableFields(
    "best",
    (
        _text("workload_id", key=True, constraint="REFERENCES workload (id)"),
        _text("target_key", key=True),
        _text("mode", key=True),
        _integer("record_id", 1),
        _text("template"),
        _integer("template_version"),
        _json("config", _configuration),
        _real("time_ns", _above_0, constraint="CHECK (time_ns > 0)"),
        _flag("verified"),
        _text("artifact_sha256", constraint="REFERENCES artifact (sha256)").optional(),
        _real("promoted_at", damage.stamp),
        _text("signature", since=4, default=""),  # of its `claims.Claim`
    ),
    options="STRICT, WITHOUT ROWID",
)

TOOLCHAIN = TableFields(
    "toolchain",
    (_text("id", key=True), _json("json", damage.mapping)),
    options="STRICT, WITHOUT ROWID",
    deployed=False,
)

RUN = TableFields(
    "run",
    (
        _text("id", key=True),
        _text("machine"),
        _real("started_at", damage.stamp),
        _real("finished_at", damage.stamp).optional(),
        _json("info", damage.mapping),
        _json("summary", damage.mapping).optional(),
    ),
    deployed=False,
)

RECORD = TableFields(
    "record",
    (
        _integer("id", -(2**63), key=True, constraint="AUTOINCREMENT"),
        _text("content_id", constraint="UNIQUE"),  # sha256 of the whole content; the same record twice is one
        _text("workload_id", constraint="REFERENCES workload (id)"),
        _text("target_key", path="target"),
        _text("template", path="template"),
        _integer("template_version", path="template_version"),
        _json("config", _configuration, path="config"),
        _text("mode", path="measurement.mode"),
        _text("toolchain_id", constraint="REFERENCES toolchain (id)"),
        Field("outcome", "TEXT", lambda *at: str(_outcome(*at)), _outcome, str, path="measurement.outcome"),
        _real("time_ns", _above_0, path="measurement.time_ns", derived=True).optional(),  # median; NULL unless ok
        Field(
            "times_ns", "TEXT", damage.optional_text, _times, _stored_times, lambda text: _decoded(text) if text else [],
            path="measurement.times_ns", null=True,
        ),
        _integer("registers", path="measurement.resources.registers"),
        _integer("shared_bytes", path="measurement.resources.shared_bytes"),
        _integer("local_bytes", path="measurement.resources.local_bytes"),
        _integer("spill_bytes", path="measurement.resources.spill_bytes"),
        _integer("code_bytes", path="measurement.resources.code_bytes"),
        Field(
            "max_error", "REAL", _error, _error, _stored_error, lambda error: "inf" if error == math.inf else error,
            path="measurement.max_error",
        ).optional(),
        _text("message", path="measurement.message"),
        _real("build_s", _at_least_0, path="measurement.build_s"),
        _real("run_s", _at_least_0, path="measurement.run_s"),
        _json("clocks", damage.mapping, path="measurement.clocks"),
        _text("run", path="run"),
        _integer("batch", path="batch"),
        _real("prediction", path="prediction").optional(),
        _real("started_at", damage.stamp, path="started_at"),
        _real("finished_at", damage.stamp, path="finished_at"),
        _flag("final_race", path="final_race"),
        _text("artifact_sha256", path="artifact").optional(),  # the code that was measured, even if no longer stored
        _text("source", path="source"),
        _integer("model", path="model", since=3).optional(),  # state of the cost model that made the prediction
        _text("anchor_code", path="anchor.code", since=3).optional(),  # of the default in the same race; both or none
        _real(
            "anchor_ns", _above_0, path="anchor.time_ns", since=3,
            constraint="CHECK (anchor_ns > 0 AND (anchor_ns IS NULL) = (anchor_code IS NULL))",
        ).optional(),
        _text("host", path="measurement.host", since=3, default=""),
        _text("device_uuid", path="measurement.device_uuid", since=3, default=""),
        _text("signature", since=4, default=""),  # by this machine if it measured the record; see `claims`
        _real(
            "sustained_ns", _above_0, path="measurement.sustained_ns", since=6, constraint="CHECK (sustained_ns > 0)"
        ).optional(),
        Field("verdict", "TEXT", lambda *at: str(_verdict(*at)), _verdict, str, path="verdict", since=6, default=""),
    ),
    constraints="CHECK ((outcome = 'ok') = (time_ns IS NOT NULL) AND (outcome = 'ok') = (times_ns IS NOT NULL)), "
    "CHECK (time_ns > 0)",
    deployed=False,
)  # fmt: skip

PROFILE = TableFields(
    "profile",
    (
        _integer("id", 1, key=True, constraint="AUTOINCREMENT"),
        _integer("record_id", 1, constraint="REFERENCES record (id)"),
        _text("subject"),
        _real("taken_at", damage.stamp),
        _json("json", damage.mapping),  # `schedsearch.profiling.profile.Profile`
    ),
    constraints="UNIQUE (record_id, subject, taken_at)",
    since=2,
    deployed=False,
)

SIZE_TABLE = TableFields(
    "size_table",
    (
        _text("family", key=True),  # `WorkloadRange.family`
        _text("target_key", key=True),
        _text("mode", key=True),
        _integer("low", 1, key=True),
        _integer("high", 2, key=True),
        _text("label"),
        _text("size_table"),  # `schedsearch.size_table.SizeTable`
        _text("signature"),  # of its `claims.RangeClaim`
        _real("made_at", damage.stamp),
        _code(),
    ),
    since=5,
)

TABLES = (META, WORKLOAD, ARTIFACT, BEST, TOOLCHAIN, RUN, RECORD, PROFILE, SIZE_TABLE)
SCHEMA_VERSION = max(max(table.since, *(field.since for field in table.fields)) for table in TABLES)
"""The newest version that this code knows; `schema.MIGRATIONS` leads to it."""
