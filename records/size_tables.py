"""Tables of kernels for ranges of sizes: how the store keeps them, and how deployment finds them.

The standard library only, for deployment.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from schedsearch.errors import DatabaseError, UntrustedDatabaseError
from schedsearch.records import dbfile, trust

_SINCE = 5  # the schema version that added the table
COLUMNS = ("family", "target_key", "mode", "low", "high", "label", "size_table", "signature", "made_at", "code")
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
    def claim(self) -> trust.RangeClaim:
        digest = hashlib.sha256(self.size_table.encode(errors="surrogateescape") + b"\0" + self.code).hexdigest()
        return trust.RangeClaim(self.family, self.target_key, self.mode, self.low, self.high, digest)

    @property
    def vouched(self) -> bool:
        """Whether this machine made the table, or its user marked it as trusted."""
        return trust.vouches_range(self.claim, self.signature)


def signed(
    family: str, target_key: str, mode: str, low: int, high: int, label: str, table: str, code: bytes
) -> SizeTableRow:
    """A row that this machine vouches for. Raises DatabaseError if the state folder cannot be written."""
    row = SizeTableRow(family, target_key, mode, low, high, label, table, "", time.time(), code)
    return row._replace(signature=trust.sign(trust.Kind.RANGE, row.claim.text))


def find(path: Path, family: str, low: int, high: int, target_key: str, mode: str) -> SizeTableRow | None:
    """The narrowest table with all sizes from `low` to `high`, on exactly this target and in this mode; None without one.

    Raises:
        UntrustedDatabaseError: there are tables, but this machine vouches for none of them.
        DatabaseError: the file cannot be read, or a row is damaged.
    """
    key = (family, target_key, mode, low, high)
    rows = list(_rows(path, _COVERING, key))
    for row in rows:
        if row.vouched:
            return row
    if rows:
        raise UntrustedDatabaseError(
            f"this machine did not sign the kernels in {path} for {rows[0].label}; if you trust their origin: "
            f"schedsearch records trust {path}; else tune the range here"
        )
    return None


def all_rows(path: Path) -> list[SizeTableRow]:
    """Every table in a database. Raises DatabaseError if the file cannot be read."""
    return list(_rows(path, _QUERY, ()))


def _rows(path: Path, query: str, values: tuple[object, ...]) -> Iterable[SizeTableRow]:
    connection = dbfile.connect(path, readonly=True, busy_timeout_s=dbfile.BUSY_TIMEOUT_S)
    try:
        version = connection.execute("SELECT value FROM main.meta WHERE key = 'schema_version'").fetchone()
        if version is None or int(version[0]) < _SINCE:
            return []
        return [_checked(path, row) for row in connection.execute(query, values)]
    except (*dbfile.ERRORS, ValueError) as error:
        raise dbfile.explain(error, path) or DatabaseError(f"{path} cannot be read: {error}") from error
    finally:
        connection.close()


def _checked(path: Path, row: tuple[object, ...]) -> SizeTableRow:
    kinds = (str, str, str, int, int, str, str, str, float, bytes)
    if not all(isinstance(value, kind) for value, kind in zip(row, kinds)):
        raise DatabaseError(f"{path}: a row of table size_table is damaged; tune the range again")
    return SizeTableRow._make(row)
