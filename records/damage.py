"""What happens when a row of a database is damaged. Standard library only, because deployment reads with it.

A file may come from anywhere: a disk that failed, a tool that wrote to it, a stranger. SQLite checks the structure of a
file, not what its columns mean, and even the types of STRICT tables can be circumvented. Every row that is read is therefore
checked column by column with the functions below. They return the value, or raise `DamagedRow`. One place, `sound`, decides
what follows: the row is skipped, and the log remembers it. The caller gets all other rows.

    rows = list(sound(log, path, "record", fetched, read_record))
    log.raise_if_any()
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from schedsearch.errors import DatabaseError
from schedsearch.records.location import Place
from schedsearch.typed import JsonObject

T = TypeVar("T")
Row = TypeVar("Row")

LATEST_S = 253_402_300_799.0  # the last second of the year 9999; calendars end there
_LARGEST = 2**63 - 1
_SHOWN = 60


@dataclass(frozen=True)
class Damage:
    """A row that cannot be used, and why."""

    path: Place
    table: str
    row: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}: table {self.table}, row {self.row}: {self.what}"


class DamageError(DatabaseError):
    """The one row that was asked for is damaged."""

    def __init__(self, damage: Damage) -> None:
        super().__init__(f"{damage}; restore the file from a copy, or measure again: schedsearch tune")
        self.damage = damage

    def __reduce__(self) -> tuple[object, ...]:
        return DamageError, (self.damage,)


class DamagedRow(ValueError):
    """A column is not what it must be. `table` and `row` name the row if it is not the one that is being read."""

    def __init__(self, what: str, table: str = "", row: str = "") -> None:
        super().__init__(what)
        self.table, self.row = table, row


class DamageLog:
    """The damaged rows that were skipped, each once.

    Attributes:
        warns: whether `close` logs a warning; a caller that reports the damage itself sets it to False.
    """

    def __init__(self) -> None:
        self.warns = True
        self._found: dict[tuple[Place, str, str], Damage] = {}

    def add(self, damage: Damage) -> None:
        self._found.setdefault((damage.path, damage.table, damage.row), damage)

    def extend(self, other: DamageLog) -> None:
        """Takes over what another log found; that one then has nothing to warn about."""
        for each in other:
            self.add(each)
        other.warns = False

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Damage]:
        return iter(tuple(self._found.values()))

    def summary(self) -> str:
        """How many rows were skipped and where the first is; "" if there was none."""
        first = next(iter(self), None)
        if first is None:
            return ""
        count = "1 damaged row was" if len(self) == 1 else f"{len(self)} damaged rows were"
        return f"{count} skipped, the first: {first}; see all: schedsearch doctor --db {first.path}"

    def raise_if_any(self) -> None:
        """Raises DatabaseError with the summary if rows were skipped."""
        if self._found:
            raise DatabaseError(self.summary())

    def close(self) -> None:
        """Logs the summary as a warning, unless there is nothing to say or `warns` is False."""
        if self._found and self.warns:
            import logging

            logging.getLogger("schedsearch.records").warning("schedsearch: warning: %s", self.summary())
            self.warns = False


def damage(path: Place, table: str, row: object, error: Exception) -> Damage:
    """The damage that an exception of reading a row means."""
    if isinstance(error, DamagedRow):
        return Damage(path, error.table or table, error.row or _row_name(row), str(error))
    if isinstance(error, KeyError):
        return Damage(path, table, _row_name(row), f"the field {_short(repr(error.args[0]))} is missing")
    return Damage(path, table, _row_name(row), _short(str(error), 200))


# Exceptions of code that interprets the content of a row. Anything else is a bug of schedsearch.
UNREADABLE = (ValueError, TypeError, KeyError, OverflowError, RecursionError, AttributeError)


def sound(
    log: DamageLog, path: Place, table: str, rows: Iterable[Row], read: Callable[[Row], T], name: Callable[[Row], object]
) -> Iterator[T]:
    """What `read` makes of each row. It skips damaged rows and adds them to the log.

    Args:
        log: remembers the rows that are skipped.
        path, table: where the rows are from.
        rows: as fetched.
        read: raises `DamagedRow`, or another of `UNREADABLE`, for a row that cannot be used.
        name: what identifies a row in messages, e.g. its id.
    """
    for row in rows:
        try:
            value = read(row)
        except UNREADABLE as error:
            log.add(damage(path, table, name(row), error))
        else:
            yield value


def text(column: str, value: Any) -> str:
    if isinstance(value, str):
        if value.isascii():
            return value
        try:
            value.encode()
        except UnicodeEncodeError:
            raise DamagedRow(f"{column} is not valid UTF-8: {_short(ascii(value))}") from None
        return value
    raise DamagedRow(f"{column} is {_shown(value)}; it must be text")


def optional_text(column: str, value: object) -> str | None:
    return None if value is None else text(column, value)


def whole(column: str, value: Any, low: int = 0, high: int = _LARGEST) -> int:
    if type(value) is int and low <= value <= high:
        return value
    raise DamagedRow(f"{column} is {_shown(value)}; it must be an integer from {low} to {high}")


def flag(column: str, value: Any) -> bool:
    return bool(whole(column, value, 0, 1))


def blob(column: str, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    raise DamagedRow(f"{column} is {_shown(value)}; it must be a blob")


def number(column: str, value: Any, low: float = -math.inf, high: float = math.inf, *, above: float = -math.inf) -> float:
    """A finite number in [low, high] and larger than `above`."""
    if type(value) in (float, int) and abs(value) < math.inf and low <= value <= high and value > above:
        return float(value)
    limits = f" above {above:g}" if above > -math.inf else f" from {low:g} to {high:g}" if low > -math.inf else ""
    raise DamagedRow(f"{column} is {_shown(value)}; it must be a finite number{limits}")


def stamp(column: str, value: object) -> float:
    """Seconds since the epoch, up to the year 9999."""
    return number(column, value, 0.0, LATEST_S)


def parsed(column: str, value: object) -> Any:
    """What a column of JSON holds."""
    try:
        return _decoded(text(column, value))
    except DamagedRow:
        raise
    except (ValueError, RecursionError) as error:
        raise DamagedRow(f"{column} is not JSON ({_short(str(error))}): {_shown(value)}") from None


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON value")


_decoded = json.JSONDecoder(parse_constant=_not_json).decode


def mapping(column: str, value: Any) -> JsonObject:
    """A column that holds a JSON object."""
    found = parsed(column, value)
    if not isinstance(found, dict):
        raise DamagedRow(f"{column} is {_shown(value)}; it must be a JSON object")
    return found


def config_values(column: str, value: object) -> dict[str, int | str | bool]:
    """A column that holds a configuration: a JSON object of integers, strings and booleans."""
    found = mapping(column, value)
    for knob, setting in found.items():
        if not isinstance(setting, int | str):
            raise DamagedRow(
                f"{column} has {_shown(setting)} for {_short(repr(knob))}; it must be a number, string or true/false"
            )
        if isinstance(setting, str):
            text(f"{column}[{_short(repr(knob))}]", setting)
        text(f"a knob of {column}", knob)
    return found


def _row_name(row: object) -> str:
    return _short(row if isinstance(row, str) and row.isprintable() else ascii(row))


def _shown(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"a blob of {len(value)} bytes"
    return _short(ascii(value[: 2 * _SHOWN] if isinstance(value, str) else value))


def _short(shown: str, limit: int = _SHOWN) -> str:
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."
