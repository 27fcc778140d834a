"""T4 results and T1 descriptions, the auto-tuning community's exchange formats: JSON or gzip of it.

A T1 file describes a kernel: its parameters with their values, and conditions that they must satisfy. A T4 file has the
results of one search over it. Only T1 lists a parameter's possible values, so a T4 file is read together with its T1.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from schedsearch.errors import UsageError
from schedsearch.measurement import Outcome
from schedsearch.records.formats.conditions import Condition
from schedsearch.records.formats.recording import (
    Entry,
    KnobTable,
    Place,
    Recording,
    format_stamp,
    once_each,
    parse_stamp,
    read_json,
    settle_times,
)
from schedsearch.space import Knob
from schedsearch.typed import Array, JsonObject

# Kernel Tuner writes "miliseconds".
TIME_UNITS_NS = {
    "seconds": 1e9, "s": 1e9,
    "milliseconds": 1e6, "miliseconds": 1e6, "ms": 1e6,
    "microseconds": 1e3, "us": 1e3,
    "nanoseconds": 1.0, "ns": 1.0,
}  # fmt: skip
_INVALIDITY = {
    "correct": Outcome.OK,
    "compile": Outcome.COMPILE_ERROR,
    "runtime": Outcome.LAUNCH_ERROR,
    "timeout": Outcome.RUN_TIMEOUT,
    "correctness": Outcome.WRONG_ANSWER,
    "constraints": Outcome.REJECTED,
}
_WORDS = {outcome: word for word, outcome in _INVALIDITY.items()} | {
    Outcome.COMPILE_TIMEOUT: "compile",
    Outcome.WORKER_LOST: "runtime",
}
# A description with more than this is refused: its conditions are computed for every configuration.
MAX_CONDITION_CHARACTERS = 200_000  # of all conditions together
MAX_OPERATIONS = 100_000_000  # of all conditions for all configurations; about two seconds
MAX_LIST_CHARACTERS = 200_000  # of a list that is written as a string, which Python's own parser reads
_EMBEDDED = "schedsearch"  # a field of our own in a result: the JSON of the records behind it


def is_results(data: object) -> bool:
    return isinstance(data, dict) and "results" in data


def refuse_description(data: object, path: str | Path) -> None:
    """Raises UsageError if the JSON value in `path` is a T1 description instead of results."""
    if isinstance(data, dict) and "ConfigurationSpace" in data:
        raise UsageError(f"{path}: a T1 description, which is read with its T4 results (--t1); give a file with results")


def description_of(path: str | Path) -> Path:
    """The T1 file beside a T4 file: `<name>_T1.json` for the longest `<name>` that the T4 file's name begins with, otherwise
    the only T1 file in the folder.

    Raises:
        UsageError: there is none, or there are several and no name fits.
    """
    path = Path(path)
    stem = re.sub(r"(_T4)?(\.json)?(\.gz)?$", "", path.name)
    there = sorted([*path.parent.glob("*_T1.json"), *path.parent.glob("*_T1.json.gz")])
    name = {each: re.sub(r"_T1\.json(\.gz)?$", "", each.name) for each in there}
    fitting = [each for each in there if stem == name[each] or stem.startswith(f"{name[each]}_")]
    if fitting:
        return max(fitting, key=lambda each: len(name[each]))
    if len(there) == 1:
        return there[0]
    listed = ", ".join(each.name for each in there[:5]) + (", ..." if len(there) > 5 else "")
    found = f"none of {listed} fits its name" if there else "there is no *_T1.json beside it"
    raise UsageError(f"{path}: T4 results need their T1 description, and {found}; give it with --t1 FILE")


class Description:
    """The space that a T1 file describes: `table` of knobs, `conditions`, the kernel's name.

    Raises:
        UsageError: it cannot be read, or anything in it is wrong, e.g. it has a condition that is not allowed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        place = Place(path)
        top = place.object(read_json(path))
        at = place["ConfigurationSpace"]
        space = at.object(place.need(top, "ConfigurationSpace"))
        parameters = at["TuningParameters"].list(at.need(space, "TuningParameters"))
        values: JsonObject = {}
        for i, item in enumerate(parameters):
            here = at["TuningParameters"][i]
            parameter = here.object(item)
            name = here["Name"].text(here.need(parameter, "Name"))
            if name in values:
                here.fail(f"the parameter {name!r} is there twice; keep one")
            values[name] = _values(here.need(parameter, "Values"), here["Values"])
        self.table = KnobTable(values, at["TuningParameters"])
        self.conditions = []
        characters = 0
        for i, item in enumerate(at["Conditions"].list(space.get("Conditions") or [])):
            here = at["Conditions"][i]
            text = here["Expression"].text(here.need(here.object(item), "Expression"))
            characters += 1 + len(text)
            if characters > MAX_CONDITION_CHARACTERS:
                here.fail(f"the conditions up to here have more than {MAX_CONDITION_CHARACTERS:,} characters; give fewer")
            self.conditions.append(Condition(text, values, here["Expression"]))
        kernel = top.get("KernelSpecification")
        kernel = kernel if isinstance(kernel, dict) else {}
        self.kernel = str(kernel.get("KernelName", ""))
        self.problem = str(kernel.get("ProblemSize", ""))

    def require(self, entries: Sequence[Entry], places: Sequence[Place]) -> None:
        """Raises UsageError if an entry breaks a condition, because the description then belongs to other results."""
        operations = len(entries) * sum(condition.operations for condition in self.conditions)
        if operations > MAX_OPERATIONS:
            Place(self.path)["ConfigurationSpace"]["Conditions"].fail(
                f"the conditions take {operations:,} operations for {len(entries):,} configurations; at most "
                f"{MAX_OPERATIONS:,} are possible"
            )
        columns = {
            knob.name: _column([self.table.given(entry.config, knob.name) for entry in entries]) for knob in self.table.knobs
        }
        for number, condition in enumerate(self.conditions):
            broken = np.flatnonzero(~condition.holds(columns, len(entries)))
            if len(broken):
                places[broken[0]].fail(
                    f"{str(entries[broken[0]].config)[:300]} breaks the condition {condition.text[:300]!r} "
                    f"(number {number + 1} of {self.path}); give the description that belongs to these results"
                )


def _column(values: list[Any]) -> Array:
    """An array of numbers of one kind, or of objects if there are texts: NumPy would give all the length of the longest."""
    kinds = {type(value) for value in values}
    numbers = str not in kinds and (len(kinds) == 1 or kinds == {int, float})
    return np.array(values, dtype=None if numbers else object)


def _values(value: Any, place: Place) -> list[Any]:
    """A list, or a string that is a literal of a list."""
    if isinstance(value, str):
        if len(value) > MAX_LIST_CHARACTERS:
            place.fail(
                f"a list in a string of {len(value):,} characters; at most {MAX_LIST_CHARACTERS:,} are read, or a JSON list"
            )
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            place.fail(f"{value[:80]!r} is not a list of numbers and strings; it is never run as code")
    return list(value) if isinstance(value, tuple) else place.list(value)


def parse(data: object, path: str | Path, t1: str | Path | None = None) -> Recording:
    """Reads T4 results (the JSON value in `path`) with their T1 description, by default the one beside them.

    Raises:
        UsageError: the description cannot be read, or anything in either is wrong; it names file and place.
    """
    place = Place(path)
    top = place.object(data)
    results = place["results"].list(place.need(top, "results"))
    if not results:
        place["results"].fail("holds no result")
    metadata = place["metadata"].object(place.need(top, "metadata"))
    unit = place["metadata"].need(metadata, "timeunit")
    description = Description(description_of(path) if t1 is None else t1)
    entries, places = [], []
    for i, item in enumerate(results):
        at = place["results"][i]
        entries.append(_entry(at.object(item), description.table, _unit_ns(unit, place["metadata"]["timeunit"]), at))
        places.append(at)
    description.require(entries, places)
    settled, warnings = settle_times(list(zip(entries, places)))
    return Recording(
        tuner=str(metadata.get("tuner", "t4")),
        kernel=str(metadata.get("kernel", "")) or description.kernel,
        problem=str(metadata.get("problem", "")) or description.problem,
        device=str(metadata.get("device", "")),
        knobs=description.table.knobs,
        entries=once_each(settled),
        source=str(path),
        warnings=warnings,
    )


def _unit_ns(unit: object, place: Place) -> float:
    if not isinstance(unit, str) or unit.lower() not in TIME_UNITS_NS:
        place.fail(f"unknown unit of time {unit!r}; allowed: {', '.join(TIME_UNITS_NS)}")
    return TIME_UNITS_NS[unit.lower()]


def _entry(result: Mapping[str, object], table: KnobTable, unit_ns: float, at: Place) -> Entry:
    given = at["configuration"].object(at.need(result, "configuration"))
    if strangers := [name for name in given if name not in table.names]:
        known = ", ".join(table.names)
        at["configuration"].fail(f"the description has no parameter {strangers[0]!r}; its parameters are {known}")
    config = table.config(given, at["configuration"])
    word = at.need(result, "invalidity")
    if not isinstance(word, str) or word not in _INVALIDITY:
        at["invalidity"].fail(f"unknown word {word!r}; allowed: {', '.join(_INVALIDITY)}")
    times = at["times"].object(result.get("times") or {})
    outcome, time_ns = _INVALIDITY[word], None
    times_ns: tuple[float, ...] = ()
    if outcome is Outcome.OK:
        runs = at["times"]["runtimes"]
        times_ns = tuple(
            runs[i].positive(one, "a time", unit_ns) for i, one in enumerate(runs.list(times.get("runtimes") or []))
        )
        time_ns = _time_ns(result, times_ns, unit_ns, at)
    embedded = at[_EMBEDDED].list(result.get(_EMBEDDED, []))
    return Entry(
        config=config,
        outcome=outcome,
        time_ns=time_ns,
        times_ns=times_ns,
        message="" if outcome is Outcome.OK else word,
        build_s=at.seconds(times.get("compilation"), unit_ns / 1e9),
        run_s=at.seconds(times.get("validation"), unit_ns / 1e9) + sum(times_ns) / 1e9,
        finished_at=parse_stamp(result.get("timestamp")),
        extra=tuple(at[_EMBEDDED][i].object(one) for i, one in enumerate(embedded)),
    )


def _time_ns(result: Mapping[str, object], times_ns: Sequence[float], unit_ns: float, at: Place) -> float:
    """The measurement called "time"; if there is none, the mean of the repetitions."""
    for i, item in enumerate(at["measurements"].list(result.get("measurements") or [])):
        here = at["measurements"][i]
        measured = here.object(item)
        if measured.get("name") == "time":
            own = _unit_ns(measured["unit"], here["unit"]) if measured.get("unit") else unit_ns
            return here["value"].positive(here.need(measured, "value"), "the time", own)
    if not times_ns:
        at.fail("a correct result has neither a measurement called 'time' nor runtimes")
    return sum(times_ns) / len(times_ns)


def to_json(recording: Recording) -> tuple[JsonObject, JsonObject]:
    """The JSON values of the T4 results (times in milliseconds) and of their T1 description."""
    per_ms = TIME_UNITS_NS["milliseconds"]
    results = []
    for entry in recording.entries:
        result: JsonObject = {
            "timestamp": format_stamp(entry.finished_at),
            "configuration": {knob.name: entry.config[knob.name] for knob in recording.knobs},
            "times": {
                "compilation": entry.build_s * 1e3,
                "framework": 0,
                "search_algorithm": 0,
                "validation": 0,
                "runtimes": [time_ns / per_ms for time_ns in entry.times_ns],
            },
            "invalidity": _WORDS[entry.outcome],
            "correctness": int(entry.outcome is Outcome.OK),
            "measurements": [],
            "objectives": ["time"],
        }
        if entry.time_ns is not None:
            result["measurements"] = [{"name": "time", "value": entry.time_ns / per_ms, "unit": "ms"}]
        if entry.extra:
            result[_EMBEDDED] = list(entry.extra)
        results.append(result)
    facts = {"tuner": recording.tuner, "device": recording.device, "kernel": recording.kernel, "problem": recording.problem}
    metadata = {"timeunit": "milliseconds", **facts}
    parameters = [
        {"Name": knob.name, "Type": _type_name(knob), "Values": repr(list(knob.values)), "Default": knob.values[0]}
        for knob in recording.knobs
    ]
    t1 = {
        "General": {"BenchmarkName": recording.kernel, "OutputFormat": "JSON"},
        "ConfigurationSpace": {"TuningParameters": parameters, "Conditions": []},
        "KernelSpecification": {"KernelName": recording.kernel, "ProblemSize": recording.problem},
    }
    return {"results": results, "schema_version": "1.0.0", "metadata": metadata}, t1


def _type_name(knob: Knob) -> str:
    kinds = {type(value).__name__ for value in knob.values}
    return {"int": "int", "bool": "bool"}.get(kinds.pop(), "string") if len(kinds) == 1 else "string"
