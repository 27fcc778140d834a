"""A tuner's results for one kernel on one device, independent of the file format, and helpers that read such files.

All formats meet in a `Recording`: `kernel_tuner`, `t4` and `autotvm` read and write it, `exchange` converts it to and from
records, and replay searches it. Readers trust nothing: every mistake is a UsageError that names the file and the place.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from schedsearch.config import Config
from schedsearch.errors import ConfigError, UsageError
from schedsearch.measurement import Outcome
from schedsearch.records.damage import LATEST_S
from schedsearch.records.formats.content import MAX_DEPTH, Content, document_limits, nesting, values_at_most
from schedsearch.records.formats.unfinished import Unfinished, closed
from schedsearch.space import Knob, Value
from schedsearch.text import type_text
from schedsearch.typed import JsonMapping, JsonObject

_INT64 = 2**63
MAX_KNOB_VALUES = 100_000
_MAX_MESSAGE = 1000  # characters of a message, which may quote values of the file
_SHOWN = 100  # characters of a key in the place of a value
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_HALF = re.compile("[\ud800-\udfff]")
TIME_SLACK = 1.5  # a time this far outside of its own repetitions has another unit or another origin
_UNIT_FACTORS = (1e3, 1e6, 1e9, 1e-3, 1e-6, 1e-9)


@dataclass(frozen=True)
class Entry:
    """One configuration and its outcome.

    Attributes:
        time_ns: the configuration's time according to the file; None exactly if it failed.
        times_ns: its single repetitions, if the file has them.
        message: the file's text about a failure.
        build_s, run_s: seconds spent on it. finished_at: seconds since the epoch.
        extra: JSON objects of schedsearch's own records (`rows.to_json`), if schedsearch wrote the file.
    """

    config: Config
    outcome: Outcome
    time_ns: float | None = None
    times_ns: tuple[float, ...] = ()
    message: str = ""
    build_s: float = 0.0
    run_s: float = 0.0
    finished_at: float = 0.0
    extra: tuple[JsonMapping, ...] = ()

    def __post_init__(self) -> None:
        if (self.time_ns is None) == (self.outcome is Outcome.OK):
            raise ValueError(f"outcome {self.outcome} with time {self.time_ns}; only ok has a time")


@dataclass(frozen=True)
class Recording:
    """Every configuration of one kernel that was evaluated on one device, each once.

    Attributes:
        tuner: the program that made it, e.g. "kernel-tuner".
        kernel, problem, device: the file's own names, "" if it has none.
        knobs: in the order of the file.
        source: the file.
        toolchain: versions, if the file has them.
        warnings: what the reader of the file should know about its data.
    """

    tuner: str
    kernel: str
    problem: str
    device: str
    knobs: tuple[Knob, ...]
    entries: tuple[Entry, ...]
    source: str = ""
    toolchain: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


class Place:
    """A position in a file, for messages: `place["cache"]["16,1"]` reads as file: cache["16,1"]."""

    def __init__(self, path: str | Path, inside: str = "") -> None:
        self._path, self._inside = str(path), inside

    def __getitem__(self, key: str | int) -> Place:
        if isinstance(key, str) and key.isidentifier():
            step = f".{key}" if self._inside else key
        else:
            step = f"[{json.dumps(key if isinstance(key, int) else key[:_SHOWN])}]"
        return Place(self._path, self._inside + step)

    def line(self, number: int) -> Place:
        return Place(f"{self._path}:{number}")

    def __str__(self) -> str:
        return f"{self._path}: {self._inside}" if self._inside else self._path

    def fail(self, message: str) -> NoReturn:
        raise UsageError(f"{self}: {message if len(message) <= _MAX_MESSAGE else f'{message[:_MAX_MESSAGE]} ...'}")

    def object(self, value: Any) -> JsonObject:
        if not isinstance(value, dict):
            self.fail(f"this must be a JSON object, got {_kind(value)}")
        return value

    def list(self, value: Any) -> list[Any]:
        if not isinstance(value, list):
            self.fail(f"this must be a list, got {_kind(value)}")
        return value

    def text(self, value: Any) -> str:
        if not isinstance(value, str):
            self.fail(f"this must be a string, got {_kind(value)}")
        return value

    def need(self, mapping: JsonMapping, key: str) -> Any:
        if key not in mapping:
            self.fail(f"the field {key!r} is missing")
        return mapping[key]

    def positive(self, value: Any, what: str, scale: float) -> float:
        """A time in the file's unit, times `scale`."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(f"{what} must be a positive number, got {_kind(value)}")
        number = _float(value) * scale
        if not (math.isfinite(number) and number > 0):
            self.fail(f"{what} must be a positive number, got {value!r}")
        return number

    def seconds(self, value: Any, scale: float) -> float:
        """A duration, kept for information only; 0 if the file has no usable one."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return 0.0
        number = _float(value) * scale
        return number if math.isfinite(number) and number > 0 else 0.0


def read_json(path: str | Path) -> Any:
    """The JSON value of a file, gzip or not. A key that occurs twice in an object is a mistake.

    Raises:
        UsageError: the file cannot be read, is a truncated or damaged gzip, holds more than a document may
            (`content.document_limits`), or is not JSON; it names the position.
    """
    with Content(path) as content:
        return parse_json(content.document(), Place(path))


def parse_json(data: bytes, place: Place) -> Any:
    """See `read_json`. Values and nesting are limited, so that memory is. An unfinished cache of Kernel Tuner is an
    `Unfinished`."""
    if not data.strip():
        place.fail("empty; get the file again")
    if values_at_most(data) > (limit := document_limits()[1]):
        place.fail(f"holds more than {limit:,} values, where an object counts as 16; split the file")
    if nesting(data) > MAX_DEPTH:
        place.fail(f"not the JSON of any known format: nested too deeply, more than {MAX_DEPTH} lists and objects")
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=lambda pairs: _object(pairs, place))
    except UnicodeDecodeError as error:
        if (rest := closed(data)) is not None:  # cut within a character
            return Unfinished(parse_json(rest[0], place), rest[1])
        place.fail(f"not a text file in UTF-8 ({error.reason} at byte {error.start})")
    except json.JSONDecodeError as error:
        if (rest := closed(data)) is not None:
            return Unfinished(parse_json(rest[0], place), rest[1])
        place.fail(f"not JSON: {error.msg} at line {error.lineno} column {error.colno}")
    except UsageError:
        raise
    except ValueError as error:  # a number with more digits than Python converts
        place.fail(f"not the JSON of any known format: {error}")
    if _SURROGATE.search(data) and _has_half_character(value):
        place.fail("a string holds half of a character, \\ud8xx to \\udfxx alone, which no text file can; remove it")
    return value


def _has_half_character(value: object) -> bool:
    """Whether any text in a JSON value has half of a surrogate pair, which cannot be encoded."""
    if isinstance(value, str):
        return not value.isascii() and _HALF.search(value) is not None
    if isinstance(value, dict):
        return any(_has_half_character(key) or _has_half_character(item) for key, item in value.items())
    return isinstance(value, list) and any(map(_has_half_character, value))


def _object(pairs: list[tuple[str, Any]], place: Place) -> JsonObject:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                place.fail(f"the key {key!r} occurs twice in one object; keep one")
            seen.add(key)
    return made


class KnobTable:
    """The knobs of a foreign file, and its values in the types of this project.

    Configurations hold integers, strings and booleans. If all floats of a knob are whole, they become ints. Otherwise the
    values of a knob with floats become strings, e.g. "0.5".

    Args:
        params: name -> the values that the file allows, not empty.
        place: the position of `params` in the file.
    """

    def __init__(self, params: Mapping[str, Sequence[Any]], place: Place) -> None:
        if not params:
            place.fail("has no tunable parameter; at least one is needed")
        self._known: dict[str, dict[tuple[bool, Any], Value]] = {}
        self._given: dict[str, dict[tuple[bool, Any], Any]] = {}
        knobs = []
        for name, values in params.items():
            own = _own_values(place[name].list(values), place[name])
            self._known[name] = {_key(value): mine for value, mine in zip(values, own)}
            self._given[name] = {_key(mine): value for value, mine in zip(values, own)}
            try:
                knobs.append(Knob(name, tuple(own)))
            except ConfigError as error:
                place[name].fail(str(error))
        self.knobs = tuple(knobs)
        self.names: Collection[str] = self._known.keys()

    def config(self, values: JsonMapping, place: Place) -> Config:
        """The configuration of one entry. Fields that are not knobs are ignored.

        Raises:
            UsageError: a knob is missing or has an unknown value.
        """
        config = {}
        for name, known in self._known.items():
            if name not in values:
                place.fail(f"the value of {name!r} is missing")
            value = values[name]
            if isinstance(value, list | dict) or _key(value) not in known:
                place.fail(f"{name} is {value!r}; the values of this parameter are {_listing(known.values())}")
            config[name] = known[_key(value)]
        return Config(config)

    def given(self, config: Config, name: str) -> Any:
        """The value of a knob as the file writes it."""
        return self._given[name][_key(config[name])]


def _own_values(values: list[Any], place: Place) -> list[Value]:
    if not values:
        place.fail("has no values; give at least one")
    if len(values) > MAX_KNOB_VALUES:
        place.fail(f"has {len(values):,} values; a parameter may have at most {MAX_KNOB_VALUES:,}")
    for value in values:
        if not isinstance(value, bool | int | float | str):
            place.fail(f"value {value!r} is {_kind(value)}; allowed are numbers, strings and true or false")
        if isinstance(value, float) and not math.isfinite(value):
            place.fail(f"value {value!r} is not a finite number")
    own = [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]
    if large := [value for value in own if isinstance(value, int) and abs(value) >= _INT64]:
        place.fail(f"value {large[0]} does not fit into 64 bits")
    if any(isinstance(value, float) for value in own):
        return [value if isinstance(value, bool) else str(value) for value in values]
    return own


def parse_stamp(value: Any) -> float:
    """Seconds since the epoch of an ISO 8601 text; 0 for any other value, because stamps are for information only."""
    try:
        return moment(datetime.datetime.fromisoformat(value).timestamp())
    except (TypeError, ValueError, OverflowError):
        return 0.0


def moment(seconds: float) -> float:
    """Seconds since the epoch; 0 for those that no record may have, because stamps are for information only."""
    return seconds if 0.0 <= seconds <= LATEST_S else 0.0


def format_stamp(seconds: float) -> str:
    """ISO 8601 text of seconds since the epoch; the epoch itself if the number is not a date."""
    try:
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(sep=" ")
    except (ValueError, OverflowError, OSError):
        return format_stamp(0.0)


def settle_times(entries: Sequence[tuple[Entry, Place]]) -> tuple[list[tuple[Entry, Place]], tuple[str, ...]]:
    """Compares the time of each entry with its repetitions.

    A time that is not that of its repetitions is the recorded objective nevertheless: the entry keeps it and loses the
    repetitions. But if all entries disagree by the same factor between two units, the file has a wrong unit.

    Returns:
        The entries, and one warning if some of them lost their repetitions.

    Raises:
        UsageError: the times of all entries and their repetitions are in different units.
    """
    judged = [(entry, place) for entry, place in entries if entry.time_ns is not None and entry.times_ns]
    strange = [(entry, place) for entry, place in judged if not _fits(entry, 1.0)]
    if not strange:
        return list(entries), ()
    entry, place = strange[0]
    example = (
        f"the time, {entry.time_ns:g} ns, does not fit its {len(entry.times_ns)} repetitions, {min(entry.times_ns):g} to "
        f"{max(entry.times_ns):g} ns"
    )
    for factor in _UNIT_FACTORS:
        if all(_fits(entry, factor) for entry, _ in judged):
            place.fail(
                f"{example}; so it is in all {len(judged)} configurations: they are in different units, give both in the "
                "unit of the format"
            )
    lost = {id(entry) for entry, _ in strange}
    kept = [(replace(entry, times_ns=()) if id(entry) in lost else entry, place) for entry, place in entries]
    return kept, (
        f"{place}: {example}; so it is in {len(strange)} of {len(judged)} configurations, whose recorded times were taken "
        "without the repetitions",
    )


def _fits(entry: Entry, factor: float) -> bool:
    """Whether the time, times a factor, is within the range of the repetitions, or outside by no more than TIME_SLACK."""
    assert entry.time_ns is not None
    return min(entry.times_ns) / TIME_SLACK <= entry.time_ns * factor <= max(entry.times_ns) * TIME_SLACK


def once_each(entries: Iterable[tuple[Entry, Place]]) -> tuple[Entry, ...]:
    """The entries. Raises UsageError if a configuration occurs twice."""
    first: dict[Config, Place] = {}
    kept = []
    for entry, place in entries:
        if entry.config in first:
            place.fail(f"the same configuration as {first[entry.config]}: {entry.config}; keep one")
        first[entry.config] = place
        kept.append(entry)
    return tuple(kept)


def _float(value: float) -> float:
    """The value as a float; infinity if an integer is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _key(value: object) -> tuple[bool, Any]:
    """A key that tells true from 1, although Python takes them as equal; 16.0 and 16 have the same key."""
    return isinstance(value, bool), value


def _listing(values: Iterable[object]) -> str:
    shown = [repr(value) for value in values]
    return ", ".join(shown[:16]) + (f", ... ({len(shown)} values)" if len(shown) > 16 else "")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    text = names.get(type(value), "a number" if isinstance(value, int | float) else type_text(value))
    return f"{text} ({value!r})" if isinstance(value, str | bool | int | float) else text
