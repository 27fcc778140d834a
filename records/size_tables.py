"""Tables of kernels for ranges of sizes: how the store keeps them, and how deployment finds them.

The standard library only, for deployment.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from schedsearch.errors import DatabaseError, UntrustedDatabaseError
from schedsearch.records import claims, damage, dbfile
from schedsearch.records.damage import DamageError, DamageLog
from schedsearch.records.fields import SIZE_TABLE

COLUMNS = SIZE_TABLE.names
_QUERY = f"SELECT {', '.join(COLUMNS)} FROM size_table"
_COVERING = f"{_QUERY} WHERE family = ? AND target_key = ? AND mode = ? AND low <= ? AND high >= ? ORDER BY high - low, low"


class SizeTableRow(NamedTuple):
    """A row of the table size_table, whose columns have the same names."""

    family: str
    target_key: str
    mode: str
    low: int
    high: int
    label: str
    size_table: str
    signature: str
    made_at: float
    code: bytes

    @property
    def claim(self) -> claims.RangeClaim:
        digest = hashlib.sha256(self.size_table.encode(errors="surrogateescape") + b"\0" + self.code).hexdigest()
        return claims.RangeClaim(self.family, self.target_key, self.mode, self.low, self.high, digest)

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        return self[:5]

    @property
    def vouched(self) -> bool:
        """Whether this machine made the table, or its user marked it as trusted."""
        return claims.vouches(self.claim, self.signature)


def signed(row: SizeTableRow) -> SizeTableRow:
    """The row as one that this machine vouches for. Raises DatabaseError if the state folder cannot be written."""
    return row._replace(signature=claims.sign(claims.Kind.RANGE, row.claim.text))


def made(family: str, target_key: str, mode: str, low: int, high: int, label: str, table: str, code: bytes) -> SizeTableRow:
    """A new row, signed. Raises DatabaseError if the state folder cannot be written."""
    return signed(SizeTableRow(family, target_key, mode, low, high, label, table, "", time.time(), code))


def find(path: Path, family: str, low: int, high: int, target_key: str, mode: str) -> SizeTableRow | None:
    """The narrowest table with all sizes from `low` to `high`, on exactly this target and in this mode; None without one.

    Raises:
        UntrustedDatabaseError: there are tables, but this machine vouches for none of them.
        DatabaseError: the file cannot be read, or there is no table because a row is damaged.
    """
    log = DamageLog()
    rows = _rows(path, _COVERING, (family, target_key, mode, low, high), log)
    for row in rows:
        if row.vouched:
            return row
    if rows:
        raise UntrustedDatabaseError(
            f"this machine did not sign the kernels in {path} for {rows[0].label}; if you trust their origin: "
            f"schedsearch records trust {path}; else tune the range here"
        )
    for each in log:
        raise DamageError(each)
    return None


def all_rows(path: Path, log: DamageLog) -> list[SizeTableRow]:
    """Every table in a database but damaged ones, which the log remembers. Raises DatabaseError if it cannot be read."""
    return _rows(path, _QUERY, (), log)


def read(row: Sequence[Any]) -> SizeTableRow:
    """A row with `COLUMNS`. Raises DamagedRow if a column is not what it must be."""
    found = SizeTableRow(*(field.read(field.name, value) for field, value in zip(SIZE_TABLE.fields, row, strict=True)))
    damage.whole("high", found.high, found.low + 1)
    return found


def name_of(row: Sequence[object]) -> str:
    """What identifies a row in messages."""
    return ", ".join(ascii(value)[:40].strip("'") for value in row[:5])


def _rows(path: Path, query: str, values: tuple[object, ...], log: DamageLog) -> list[SizeTableRow]:
    connection = dbfile.connect(path, readonly=True, busy_timeout_s=dbfile.BUSY_TIMEOUT_S)
    try:
        version = connection.execute("SELECT value FROM main.meta WHERE key = 'schema_version'").fetchone()
        if version is None or int(version[0]) < SIZE_TABLE.since:
            return []
        return list(damage.sound(log, path, "size_table", connection.execute(query, values), read, name_of))
    except (*dbfile.ERRORS, ValueError) as error:
        raise dbfile.explain(error, path) or DatabaseError(f"{path} cannot be read: {error}") from error
    finally:
        connection.close()
