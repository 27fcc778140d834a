"""AutoTVM's log: one JSON object per line, costs in seconds, version 0.2.

`input` is [target, task, arguments, keyword arguments]; `config.entity` lists [knob, kind, value], where kind is "sp" (a
split), "re" (an order), "an" (annotations) or "ot" (anything else); `result` is [costs, error number, seconds spent, stamp].
Values of the first three kinds are lists. They become strings that begin with the kind, e.g. "sp[-1,2,32]". The log does not
describe the space, so the knobs have the values that occur. A configuration may occur more than once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from schedsearch.identity import canonical_json
from schedsearch.measurement import Outcome
from schedsearch.records.formats.content import OBJECT_VALUES, document_limits, values_at_most
from schedsearch.records.formats.recording import Entry, KnobTable, Place, Recording, moment, parse_json
from schedsearch.typed import JsonMapping, JsonObject

VERSION = 0.2
FAILED_S = 1e9  # the cost that AutoTVM writes for a failure
NS_PER_S = 1e9
# Error numbers of tvm.autotvm.measure.MeasureErrorNo.
_ERRORS = {
    0: ("", Outcome.OK),
    1: ("InstantiationError", Outcome.REJECTED),
    2: ("CompileHostError", Outcome.COMPILE_ERROR),
    3: ("CompileDeviceError", Outcome.COMPILE_ERROR),
    4: ("RuntimeDeviceError", Outcome.LAUNCH_ERROR),
    5: ("WrongAnswerError", Outcome.WRONG_ANSWER),
    6: ("BuildTimeoutError", Outcome.COMPILE_TIMEOUT),
    7: ("RunTimeoutError", Outcome.RUN_TIMEOUT),
    8: ("UnknownError", Outcome.WORKER_LOST),
}
_NUMBERS = {outcome: number for number, (_, outcome) in reversed(_ERRORS.items())}
_LISTS = ("sp", "re", "an")
_TAGGED = re.compile(r"(sp|re|an)(\[.*\])", re.DOTALL)
_EMBEDDED = "schedsearch"  # a field of our own in a line: the JSON of the records behind it


def parse(lines: Iterable[bytes], path: str | Path) -> list[Recording]:
    """Reads the lines of the log at `path`: one recording per task, target and set of knobs, in the order of their first
    lines.

    Raises:
        UsageError: a line is wrong; it names file and line. Or the lines together hold more values than a document may.
    """
    _, limit = document_limits()
    values = 0
    tasks: dict[tuple[str, str, str, tuple[str, ...]], list[tuple[JsonObject, JsonMapping, Place]]] = {}
    for number, line in enumerate(lines, 1):
        blank = not line.strip()
        values += OBJECT_VALUES if blank else values_at_most(line)
        if values > limit:
            Place(path).line(number).fail(
                f"the log holds more than {limit:,} values up to here, where an object counts as {OBJECT_VALUES}; split it"
            )
        if blank:
            continue
        place = Place(path).line(number)
        row = place.object(parse_json(line, place))
        given = place["input"].list(place.need(row, "input"))
        if len(given) < 3:
            place["input"].fail(f"[target, task, arguments, ...] is wanted, got {len(given)} elements")
        target, kernel = place["input"][0].text(given[0]), place["input"][1].text(given[1])
        config = _values(place.object(place.need(row, "config")), place["config"])
        task = (target, kernel, canonical_json(given[2]), tuple(config))
        tasks.setdefault(task, []).append((config, row, place))
    if not tasks:
        Place(path).fail("empty; give a log of AutoTVM")
    return [_recording(path, *task, lines) for task, lines in tasks.items()]


def _values(config: Mapping[str, object], place: Place) -> JsonObject:
    values: JsonObject = {}
    for i, item in enumerate(place["entity"].list(place.need(config, "entity"))):
        at = place["entity"][i]
        if len(at.list(item)) != 3 or not isinstance(item[0], str):
            at.fail(f"[name, kind, value] is wanted, got {item!r}")
        name, kind, value = item
        if name in values:
            at.fail(f"the knob {name!r} is there twice; keep one")
        if kind not in (*_LISTS, "ot"):
            at.fail(f"unknown kind {kind!r}; allowed: {', '.join(_LISTS)}, ot")
        values[name] = value if kind == "ot" else f"{kind}{canonical_json(at.list(value))}"
    if not values:
        place["entity"].fail("has no knob; at least one is needed")
    return values


def _recording(
    path: str | Path,
    target: str,
    kernel: str,
    problem: str,
    names: tuple[str, ...],
    lines: Iterable[tuple[JsonObject, JsonMapping, Place]],
) -> Recording:
    lines = list(lines)
    seen: dict[str, dict[Any, Any]] = {name: {} for name in names}
    for values, _, _ in lines:
        for name, value in values.items():
            seen[name].setdefault((type(value), str(value)), value)
    table = KnobTable({name: list(values.values()) for name, values in seen.items()}, Place(path)["config"])
    entries = tuple(_entry(table, values, row, place) for values, row, place in lines)
    return Recording("autotvm", kernel, problem, target, table.knobs, entries, str(path))


def _entry(table: KnobTable, values: JsonObject, row: Mapping[str, object], place: Place) -> Entry:
    at = place["result"]
    result = at.list(place.need(row, "result"))
    if len(result) != 4:
        at.fail(f"[costs, error number, seconds, time stamp] is wanted, got {len(result)} elements")
    costs, error, spent_s, stamp = result
    if isinstance(error, bool) or not isinstance(error, int) or error not in _ERRORS:
        at[1].fail(f"unknown error number {error!r}; allowed: 0 (none) to {max(_ERRORS)}")
    message, outcome = _ERRORS[error]
    times_ns: tuple[float, ...] = ()
    if outcome is Outcome.OK:
        times_ns = tuple(at[0][i].positive(cost, "a cost in seconds", NS_PER_S) for i, cost in enumerate(at[0].list(costs)))
        if not times_ns:
            at[0].fail("has neither a cost nor an error")
    elif isinstance(costs, list) and costs and isinstance(costs[0], str):
        message += f": {costs[0]}"
    embedded = place[_EMBEDDED].list(row.get(_EMBEDDED, []))
    return Entry(
        config=table.config(values, place["config"]),
        outcome=outcome,
        time_ns=sum(times_ns) / len(times_ns) if times_ns else None,
        times_ns=times_ns,
        message=message,
        run_s=at[2].seconds(spent_s, 1.0),
        finished_at=moment(at[3].seconds(stamp, 1.0)),
        extra=tuple(place[_EMBEDDED][i].object(one) for i, one in enumerate(embedded)),
    )


def to_lines(recording: Recording) -> list[str]:
    """The log of one recording, as JSON lines. It includes `entry.extra`, which AutoTVM ignores."""
    arguments = json.loads(recording.problem) if recording.tuner == "autotvm" else [recording.problem]
    return [json.dumps(_row(recording, arguments, entry, i), allow_nan=False) for i, entry in enumerate(recording.entries)]


def _row(recording: Recording, arguments: object, entry: Entry, index: int) -> JsonObject:
    entity: list[list[Any]] = []
    for knob in recording.knobs:
        value = entry.config[knob.name]
        tagged = _TAGGED.fullmatch(value) if isinstance(value, str) else None
        entity.append([knob.name, tagged[1], json.loads(tagged[2])] if tagged else [knob.name, "ot", value])
    costs = [time_ns / NS_PER_S for time_ns in entry.times_ns] if entry.time_ns is not None else [FAILED_S]
    row: JsonObject = {
        "input": [recording.device, recording.kernel, arguments, {}],
        "config": {"index": index, "code_hash": None, "entity": entity},
        "result": [costs, _NUMBERS[entry.outcome], entry.build_s + entry.run_s, entry.finished_at],
        "version": VERSION,
        "tvm_version": "0.8.0",
    }
    if entry.extra:
        row[_EMBEDDED] = list(entry.extra)
    return row
