"""Converts `Record` to table rows and to and from JSON objects; the identity of a record; a record as stored.

`reader` reads rows.

Exchange files use the JSON objects. They are valid JSON: a float that is not finite is written as the text "inf".
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from schedsearch.config import Config
from schedsearch.errors import WorkloadError
from schedsearch.identity import canonical_json, sha256_hex
from schedsearch.measurement import Anchor, Attempt, Measurement, Record
from schedsearch.records import trust
from schedsearch.records.damage import LATEST_S
from schedsearch.workload import Workload

_INFINITY = "inf"
# Fields added by schema 3, with their defaults. A field at its default is left out of a record's identity.
_LATER: dict[str, Any] = {"model": None, "anchor": None, "host": "", "device_uuid": ""}
_RESOURCES = ("registers", "shared_bytes", "local_bytes", "spill_bytes", "code_bytes")


def to_row(record: Record) -> dict[str, Any]:
    """The row of table record without its id, and with `workload_json` and `toolchain_json` as in `queries.records`.

    Raises:
        ValueError: a time or score is not a finite number, a time stamp is before 1970 or after the year 9999, or a count is
            negative or does not fit into 64 bits.
    """
    row = _values(record, record.workload.id, record.workload.json)
    return {**row, "content_id": content_id(row)}


def _values(record: Attempt, workload_id: str, workload_json: str) -> dict[str, Any]:
    measurement = record.measurement
    resources = measurement.resources
    error = measurement.max_error
    toolchain_json = canonical_json(dict(record.toolchain))
    times_ns = [_finite("times_ns", time_ns) for time_ns in measurement.times_ns]
    return {
        "workload_id": workload_id,
        "workload_json": workload_json,
        "target_key": record.target,
        "template": record.template,
        "template_version": _whole("template_version", record.template_version),
        "config": record.config.json,
        "mode": measurement.mode,
        "toolchain_id": sha256_hex(toolchain_json),
        "toolchain_json": toolchain_json,
        "outcome": str(measurement.outcome),
        "time_ns": measurement.time_ns,
        "times_ns": canonical_json(times_ns) if times_ns else None,
        "registers": _whole("registers", resources.registers),
        "shared_bytes": _whole("shared_bytes", resources.shared_bytes),
        "local_bytes": _whole("local_bytes", resources.local_bytes),
        "spill_bytes": _whole("spill_bytes", resources.spill_bytes),
        "code_bytes": _whole("code_bytes", resources.code_bytes),
        # SQL has no NaN. An output with NaN gets an infinite error.
        "max_error": None if error is None else float(error) + 0.0 if math.isfinite(error) else math.inf,
        "message": measurement.message,
        "build_s": _finite("build_s", measurement.build_s, 0.0),
        "run_s": _finite("run_s", measurement.run_s, 0.0),
        "clocks": canonical_json(dict(measurement.clocks)),
        "run": record.run,
        "batch": _whole("batch", record.batch),
        "prediction": None if record.prediction is None else _finite("prediction", record.prediction),
        "started_at": _finite("started_at", record.started_at, 0.0, LATEST_S),
        "finished_at": _finite("finished_at", record.finished_at, 0.0, LATEST_S),
        "final_race": int(record.final_race),
        "artifact_sha256": record.artifact,
        "source": record.source,
        "model": None if record.model is None else _whole("model", record.model),
        "anchor_code": record.anchor.code if record.anchor else None,
        "anchor_ns": _finite("anchor_ns", record.anchor.time_ns) if record.anchor else None,
        "host": measurement.host,
        "device_uuid": measurement.device_uuid,
    }


def to_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object of a row with the keys of `to_row`. It does not need the operator."""
    return {
        "workload": json.loads(row["workload_json"]),
        "target": row["target_key"],
        "template": row["template"],
        "template_version": row["template_version"],
        "config": json.loads(row["config"]),
        "measurement": {
            "outcome": row["outcome"],
            "mode": row["mode"],
            "times_ns": json.loads(row["times_ns"]) if row["times_ns"] else [],
            "resources": {name: row[name] for name in _RESOURCES},
            "max_error": _INFINITY if row["max_error"] == math.inf else row["max_error"],
            "message": row["message"],
            "build_s": row["build_s"],
            "run_s": row["run_s"],
            "clocks": json.loads(row["clocks"]),
            "host": row["host"],
            "device_uuid": row["device_uuid"],
        },
        "toolchain": json.loads(row["toolchain_json"]),
        "run": row["run"],
        "batch": row["batch"],
        "prediction": row["prediction"],
        "started_at": row["started_at"],
        "finished_at": row["finished_at"],
        "final_race": bool(row["final_race"]),
        "artifact": row["artifact_sha256"],
        "source": row["source"],
        "model": row["model"],
        "anchor": None if row["anchor_code"] is None else {"code": row["anchor_code"], "time_ns": row["anchor_ns"]},
    }


def content_id(row: Mapping[str, Any]) -> str:
    """sha256 of everything that was measured and when, of a row of `queries.records`. It does not cover the source of an
    import and the artifact.

    A field that was added to Record or Measurement later is left out while it has its default, so ids do not change.
    """
    content = to_json(row)
    del content["artifact"], content["source"]
    for part in (content, content["measurement"]):
        for name in [name for name, default in _LATER.items() if name in part and part[name] == default]:
            del part[name]
    return sha256_hex(canonical_json(content))


def sign_record(content_id: str, artifact_sha256: str | None) -> str:
    """This machine's signature of a record that it measured, and of the code that was kept for it."""
    return trust.sign(trust.Kind.RECORD, trust.record_text(content_id, artifact_sha256))


def is_own_record(row: Mapping[str, Any]) -> bool:
    """Whether this machine measured exactly what a row says, with the keys of `queries.records`."""
    text = trust.record_text(row["content_id"], row["artifact_sha256"])
    return trust.is_ours(trust.Kind.RECORD, text, row["signature"]) and not problem_of_ids(row)


def problem_of_ids(row: Mapping[str, Any]) -> str:
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


def from_json(data: Mapping[str, Any]) -> Record:
    """The record of an object made by `to_json`. Fields that later versions added may be missing.

    Raises:
        WorkloadError: the workload is invalid.
        KeyError, TypeError, ValueError, OverflowError: a field is missing or has the wrong type.
    """
    measured = {"host": "", "device_uuid": "", **data["measurement"]}
    error = measured["max_error"]
    measured["max_error"] = None if error is None else float(error)
    for name, kind in (
        ("mode", str), ("message", str), ("times_ns", list), ("clocks", dict), ("resources", dict), ("host", str),
        ("device_uuid", str),
    ):  # fmt: skip
        if not isinstance(measured[name], kind):
            raise TypeError(f"{name} is {measured[name]!r}; it must be a {kind.__name__}")
    measured["times_ns"] = [float(time_ns) for time_ns in measured["times_ns"]]
    if wrong := [time_ns for time_ns in measured["times_ns"] if not time_ns > 0]:
        raise ValueError(f"times_ns of a record must be positive, got {wrong[0]!r}")
    config = data["config"]
    if not isinstance(config, dict) or not all(isinstance(value, int | str | bool) for value in config.values()):
        raise TypeError(f"config must map knobs to integers, strings or true/false, got {config!r}")
    anchor = data.get("anchor")
    return Record(
        workload=Workload.from_json(canonical_json(data["workload"])),
        target=str(data["target"]),
        template=str(data["template"]),
        template_version=int(data["template_version"]),
        config=Config(config),
        measurement=Measurement.from_json(canonical_json(measured)),
        toolchain={str(name): str(value) for name, value in data["toolchain"].items()},
        run=str(data["run"]),
        batch=int(data["batch"]),
        prediction=None if data["prediction"] is None else float(data["prediction"]),
        started_at=float(data["started_at"]),
        finished_at=float(data["finished_at"]),
        artifact=None if data["artifact"] is None else str(data["artifact"]),
        source=str(data["source"]),
        final_race=bool(data["final_race"]),
        model=None if data.get("model") is None else int(data["model"]),
        anchor=None if anchor is None else Anchor(str(anchor["code"]), float(anchor["time_ns"])),
    )


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
        try:
            return self.workload.label
        except WorkloadError:
            return f"{self.op} {self.workload_id[:12]}"

    @property
    def problem(self) -> str:
        """Why the workload cannot be read here; "" if it can."""
        try:
            self.workload  # noqa: B018  reading it is the test
        except WorkloadError as error:
            return str(error)
        return ""

    def record(self) -> Record:
        """Raises WorkloadError as `workload` does."""
        return Record(workload=self.workload, **{each.name: getattr(self, each.name) for each in fields(Attempt)})

    def to_json(self) -> dict[str, Any]:
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
    def claim(self) -> trust.Claim:
        """What a row of table best with this record says."""
        row, time_ns = self.row, self.row.measurement.time_ns
        candidate = row.template, row.template_version
        return trust.Claim(*self.task, *candidate, row.config.json, time_ns, self.verified, self.artifact_sha256)

    @property
    def vouched(self) -> bool:
        """Whether this machine measured and verified exactly this, or its user marked it as trusted."""
        return trust.vouches(self.claim, self.signature)

    @property
    def record_id(self) -> int:
        return self.row.id

    @property
    def record(self) -> Record:
        """Raises WorkloadError if its operator is not installed."""
        return self.row.record()


@functools.lru_cache(maxsize=4096)  # the same few workloads recur in every listing
def _workload(text: str) -> Workload:
    return Workload.from_json(text)


def _whole(name: str, value: int) -> int:
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} of a record must fit into 64 bits, got {value!r}")
    if value < 0:
        raise ValueError(f"{name} of a record must not be negative, got {value!r}")
    return int(value)


def _finite(name: str, value: float, low: float = -math.inf, high: float = math.inf) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} of a record must be finite, got {value!r}")
    if not low <= number <= high:
        raise ValueError(f"{name} of a record must be from {low:g} to {high:g}, got {value!r}")
    return number + 0.0  # SQLite keeps no negative zero
