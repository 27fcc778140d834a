"""Kernel Tuner's cache file: JSON or gzip of it, times in milliseconds.

`tune_params` has names and values. `cache` has one object per configuration, under the comma-joined values. It holds the
values, `time`, often `times` (single repetitions), durations, and metrics, which we do not keep. A failure has the name of
an error as `time`, in newer versions as `__error__`, or in place of another objective's value. A configuration that is not
in the cache was not allowed.

While a run goes on, and when it was aborted, the closing brackets are missing. Such a cache is read as far as it goes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from schedsearch.errors import UsageError
from schedsearch.measurement import Outcome
from schedsearch.records.formats.recording import (
    Entry,
    KnobTable,
    Place,
    Recording,
    format_stamp,
    once_each,
    parse_stamp,
    settle_times,
)
from schedsearch.records.formats.unfinished import Unfinished
from schedsearch.text import counted
from schedsearch.typed import JsonMapping, JsonObject

NS_PER_MS = 1e6
OLD_FAILURE_MS = 1e20  # what versions before 0.4 wrote instead of an error's name
OTHER_UNIT = 100  # if repetitions add up to this factor more than the time spent on them, they are not in milliseconds
_FAILURES = {
    "InvalidConfig": Outcome.REJECTED,
    "CompilationFailedConfig": Outcome.COMPILE_ERROR,
    "RuntimeFailedConfig": Outcome.LAUNCH_ERROR,
}
_ERROR_NAME = re.compile(r"[A-Za-z_]+Config")
_EMBEDDED = "schedsearch"  # a field of our own in an entry: the JSON of the records behind it
# The fields of an entry beside its parameters. No parameter can have one of these names.
_FIELDS = {
    "time", "times", "__error__", "compile_time", "verification_time", "benchmark_time", "strategy_time", "framework_time",
    "timestamp", _EMBEDDED,
}  # fmt: skip


def is_cache(data: object) -> bool:
    return isinstance(data, dict) and ("cache" in data or "tune_params" in data)


def parse(data: object, path: str | Path) -> Recording:
    """Reads a cache from the JSON value of the file `path`.

    Raises:
        UsageError: anything in it is wrong; it names file and place.
    """
    place = Place(path)
    top = place.object(data)
    params = place["tune_params"].object(place.need(top, "tune_params"))
    if hidden := _FIELDS.intersection(params):
        place["tune_params"].fail(f"a parameter is called {sorted(hidden)[0]!r} like a field of the format; rename it")
    table = KnobTable(params, place["tune_params"])
    order = _key_order(top, params, place)
    cache = place["cache"].object(place.need(top, "cache"))
    if not cache:
        begun = (
            ": the run did not finish any; let Kernel Tuner continue it with this cache"
            if isinstance(data, Unfinished)
            else ""
        )
        place["cache"].fail(f"holds no configuration{begun}")
    found = []
    for key, value in cache.items():
        at = place["cache"][key]
        fields = at.object(value)
        config = table.config(fields, at)
        expected = ",".join(str(fields[name]) for name in order)
        if key != expected:
            at.fail(f"the key does not belong to the configuration in it, whose key is {expected!r}")
        found.append((_entry(config, fields, at), at))
    _check_durations(cache, found)
    settled, warnings = settle_times(found)
    if isinstance(data, Unfinished):
        cut = ", and 1 entry that was cut off is left off" if data.cut else ""
        warnings = (*warnings, f"{path}: the run did not finish; read: {counted(len(found), 'configuration')}{cut}")
    problem = top.get("problem_size", "")
    return Recording(
        tuner="kernel-tuner",
        kernel=str(top.get("kernel_name", "")),
        problem=problem if isinstance(problem, str) else json.dumps(problem),
        device=str(top.get("device_name", "")),
        knobs=table.knobs,
        entries=once_each(settled),
        source=str(path),
        warnings=warnings,
    )


def _check_durations(cache: Mapping[str, JsonMapping], entries: Sequence[tuple[Entry, Place]]) -> None:
    """Refuses a file whose repetitions all take far longer than `benchmark_time`, which holds them all."""
    judged = []
    for fields, (entry, at) in zip(cache.values(), entries):
        spent_ns = at.seconds(fields.get("benchmark_time"), NS_PER_MS)
        if spent_ns and entry.times_ns:
            judged.append((sum(entry.times_ns), spent_ns, entry, at))
    if judged and all(total_ns > OTHER_UNIT * spent_ns for total_ns, spent_ns, _, _ in judged):
        total_ns, spent_ns, entry, at = judged[0]
        at.fail(
            f"its {len(entry.times_ns)} repetitions take {total_ns / NS_PER_MS:g} ms, but benchmark_time, which holds "
            f"them all, is {spent_ns / NS_PER_MS:g} ms; so it is in all {len(judged)} configurations: they are in different "
            "units, give both in milliseconds"
        )


def _key_order(top: Mapping[str, object], params: Mapping[str, object], place: Place) -> list[str]:
    names = top.get("tune_params_keys")
    if names is None:
        return list(params)
    names = place["tune_params_keys"].list(names)
    if any(not isinstance(name, str) for name in names) or sorted(names) != sorted(params):
        place["tune_params_keys"].fail(f"{names} are not the names in tune_params, which are {list(params)}")
    return names


def _entry(config: Any, fields: JsonMapping, at: Place) -> Entry:
    time, where = _time(fields, at)
    outcome, message, time_ns = Outcome.OK, "", None
    times_ns: tuple[float, ...] = ()
    if isinstance(time, str):
        if not _ERROR_NAME.fullmatch(time):
            names = ", ".join(_FAILURES)
            where.fail(f"{time!r} is neither a number of milliseconds nor the name of an error such as {names}")
        outcome, message = _FAILURES.get(time, Outcome.LAUNCH_ERROR), time
    elif time == OLD_FAILURE_MS:
        outcome, message = Outcome.LAUNCH_ERROR, "failed; the cache does not say why"
    else:
        time_ns = at["time"].positive(time, "the time in milliseconds", NS_PER_MS)
        repetitions = at["times"].list(fields.get("times", []))
        times_ns = tuple(at["times"][i].positive(one, "a time", NS_PER_MS) for i, one in enumerate(repetitions))
    embedded = at[_EMBEDDED].list(fields.get(_EMBEDDED, []))
    return Entry(
        config=config,
        outcome=outcome,
        time_ns=time_ns,
        times_ns=times_ns,
        message=message,
        build_s=at.seconds(fields.get("compile_time"), 1e-3),
        run_s=at.seconds(fields.get("benchmark_time"), 1e-3) + at.seconds(fields.get("verification_time"), 1e-3),
        finished_at=parse_stamp(fields.get("timestamp")),
        extra=tuple(at[_EMBEDDED][i].object(one) for i, one in enumerate(embedded)),
    )


def _time(fields: Mapping[str, object], at: Place) -> tuple[Any, Place]:
    """The time in milliseconds or the name of an error, and its place in the file."""
    if fields.get("__error__") is not None:
        return at["__error__"].text(fields["__error__"]), at["__error__"]
    if "time" not in fields:
        for name, value in fields.items():
            if value in (*_FAILURES, "ErrorConfig"):
                return value, at[name]
    return at.need(fields, "time"), at["time"]


def to_json(recording: Recording) -> JsonObject:
    """The JSON value of a cache. It includes `entry.extra`, which Kernel Tuner ignores.

    Raises:
        UsageError: a knob has the name of a field of the format.
    """
    names = [knob.name for knob in recording.knobs]
    if hidden := _FIELDS.intersection(names):
        raise UsageError(
            f"the knob {sorted(hidden)[0]!r} of {recording.kernel} has the name of a field of Kernel Tuner's cache; "
            "export it in another format"
        )
    return {
        "device_name": recording.device,
        "kernel_name": recording.kernel,
        "problem_size": _problem_size(recording),
        "tune_params_keys": names,
        "tune_params": {knob.name: list(knob.values) for knob in recording.knobs},
        "objective": "time",
        "cache": {",".join(str(entry.config[name]) for name in names): _fields(entry, names) for entry in recording.entries},
    }


def _problem_size(recording: Recording) -> Any:
    """The problem in the form of the original cache: a number, a list or a string."""
    if recording.tuner != "kernel-tuner":
        return recording.problem
    try:
        return json.loads(recording.problem, parse_constant=_refuse)
    except ValueError:
        return recording.problem


def _refuse(token: str) -> None:
    raise ValueError(f"{token} is not JSON")


def _fields(entry: Entry, names: list[str]) -> JsonObject:
    fields: JsonObject = {name: entry.config[name] for name in names}
    if entry.time_ns is None:
        fields["time"] = error_name(entry)
    else:
        fields["time"] = entry.time_ns / NS_PER_MS
        fields["times"] = [time_ns / NS_PER_MS for time_ns in entry.times_ns]
    fields |= {
        "compile_time": entry.build_s * 1e3,
        "verification_time": 0,
        "benchmark_time": entry.run_s * 1e3,
        "strategy_time": 0,
        "framework_time": 0,
        "timestamp": format_stamp(entry.finished_at),
    }
    if entry.extra:
        fields[_EMBEDDED] = list(entry.extra)
    return fields


def error_name(entry: Entry) -> str:
    """Kernel Tuner's name for a failure."""
    if _ERROR_NAME.fullmatch(entry.message):
        return entry.message
    if entry.outcome is Outcome.REJECTED:
        return "InvalidConfig"
    built = entry.outcome not in (Outcome.COMPILE_ERROR, Outcome.COMPILE_TIMEOUT)
    return "RuntimeFailedConfig" if built else "CompilationFailedConfig"
