"""Damages of SQLite databases: wrong contents in valid pages, wrong schemas, and wrong bytes.

A database that a stranger made has any content that SQLite allows: columns without types, views in place of tables,
triggers, strings that are not UTF-8. Most damages here know nothing of what a column means. Some swap ids of workloads and
code, as one would do who wants to have foreign code run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

TABLES = ("meta", "workload", "toolchain", "run", "record", "artifact", "best", "profile")
_LONG_VIEW = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000) SELECT i FROM n"
_TYPES = re.compile(r"\b(TEXT|INTEGER|REAL|BLOB)\b(?! NOT NULL PRIMARY KEY AUTOINCREMENT)")

ODD_VALUES: tuple[Any, ...] = (
    *(None, "", "x", "{}", "[]", "null", "true", "0", "-1", "[1, 2", '{"a": ', '{"a": 1, "a": 2}', '"\\ud800"', "NaN"),
    *("[NaN]", "[1e999]", "inf", "-inf", "1e300", '{"op": "conv2d"}', '{"op": "nothing", "params": {}}', "[" * 101),
    *("[" * 2_000, "9" * 400, "[" + "9" * 5000 + "]", "\x1b[31mred\x1b[0m\x1b]0;title\x07", "line\nline\r\nline", "\x00"),
    *(
        "a\x00b",
        "\u202e\u2028",
        "x" * 100_000,
        "ok",
        "wrong_answer",
        "best",
        "conv2d_cpu",
        "foreign",
        "cpu",
        "sm_90",
        "%s%n",
    ),
    *(b"", b"\xff\xfe\xfd", b"\x00", b"{}", b"x" * 1000, 0, 1, -1, 2, 3, 255, 2**31, 2**53 + 1, 2**63 - 1, -(2**63)),
    *(0.0, -0.0, 1.5, -1e300, 1e300, 1e-300, 1e18, float("inf"), float("-inf")),
)
_NOT_UTF8 = ("CAST(x'ff' AS TEXT)", "CAST(x'eda080' AS TEXT)", "CAST(x'7b22ff223a317d' AS TEXT)", "CAST(x'c3' AS TEXT)")

Connection = sqlite3.Connection
Damage = Callable[[Connection, random.Random], str]


def damage(path: Path, rng: random.Random) -> list[str]:
    """Damages a database file in one to three ways. Returns what was done."""
    done = []
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.text_factory = bytes
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            if rng.random() < 0.85:
                # Nothing is left to damage, or an earlier damage is in the way.
                with contextlib.suppress(sqlite3.Error, IndexError, AttributeError, TypeError, UnicodeError):
                    done.append(rng.choice(CONTENT_DAMAGES)(connection, rng))
    if rng.random() < 0.15 or not done:
        done.append(damage_bytes(path, rng))
    return done


@contextlib.contextmanager
def _untyped(connection: Connection, table: str, rng: random.Random) -> Any:
    """Takes types, checks and triggers from a table, and sometimes gives them back, so that the damage hides behind them."""
    rows = connection.execute("SELECT rowid, type, name, sql FROM sqlite_schema WHERE tbl_name = ?", (table,)).fetchall()
    for _, kind, name, _ in rows:
        if kind == b"trigger":
            connection.execute(f"DROP TRIGGER {name.decode()}")
    connection.execute("PRAGMA writable_schema = ON")
    for rowid, kind, _, sql in rows:
        if kind == b"table":
            text = _TYPES.sub("BLOB", sql.decode()).replace(" STRICT,", " ").replace(" STRICT", "").replace(" NOT NULL", "")
            text = re.sub(r"CHECK \((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", "", text)
            text = re.sub(r",\s*(?=,|\))", "", text)
            connection.execute("UPDATE sqlite_schema SET sql = ? WHERE rowid = ?", (text, rowid))
    _reread(connection)
    yield
    if rng.random() < 0.6:
        for rowid, kind, _, sql in rows:
            if kind == b"table":
                connection.execute("UPDATE sqlite_schema SET sql = ? WHERE rowid = ?", (sql.decode(), rowid))
        _reread(connection)
        if rng.random() < 0.5:
            for _, kind, _, sql in rows:
                if kind == b"trigger":
                    connection.execute(sql.decode())
    connection.execute("PRAGMA writable_schema = OFF")


def _reread(connection: Connection) -> None:
    version = connection.execute("PRAGMA schema_version").fetchone()[0]
    connection.execute(f"PRAGMA schema_version = {version + 1}")


def _table(connection: Connection, rng: random.Random) -> str:
    found = {row[0].decode() for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    weights = {"record": 4, "best": 4, "artifact": 3, "meta": 2}
    known = [table for table in TABLES if table in found]
    return rng.choices(known, [weights.get(table, 1) for table in known])[0]


def _columns(connection: Connection, table: str) -> list[str]:
    return [row[1].decode() for row in connection.execute(f"PRAGMA table_info({table})")]


def _some_row(connection: Connection, table: str, rng: random.Random) -> tuple[str, tuple[Any, ...]]:
    """A condition that holds for one row of a table, or for all of them."""
    keys = [row[1].decode() for row in connection.execute(f"PRAGMA table_info({table})") if row[5]]
    rows = connection.execute(f"SELECT {', '.join(keys)} FROM {table}").fetchall()
    if not rows or rng.random() < 0.15:
        return "1", ()
    chosen = tuple(value.decode(errors="replace") if isinstance(value, bytes) else value for value in rng.choice(rows))
    return " AND ".join(f"{key} IS ?" for key in keys), chosen


def _change_column(connection: Connection, rng: random.Random) -> str:
    table = _table(connection, rng)
    column = rng.choice(_columns(connection, table))
    where, values = _some_row(connection, table, rng)
    how = rng.random()
    with _untyped(connection, table, rng):
        if how < 0.1:
            expression = rng.choice(_NOT_UTF8)
            connection.execute(f"UPDATE OR IGNORE {table} SET {column} = {expression} WHERE {where}", values)
            return f"{table}.{column} = {expression}"
        value = rng.choice(ODD_VALUES)
        before = connection.execute(f"SELECT {column} FROM {table} WHERE {where}", values).fetchone()
        if how < 0.5 and before and isinstance(before[0], bytes) and before[0][:1] in (b"{", b"["):
            value = _changed_json(before[0].decode(errors="replace"), rng)
        elif how < 0.6 and before and isinstance(before[0], bytes) and before[0]:
            text = bytearray(before[0])
            text[rng.randrange(len(text))] ^= 1 << rng.randrange(8)
            value = bytes(text) if column == "code" else text.decode("latin-1")
        elif how < 0.7 and before and isinstance(before[0], int | float):
            value = before[0] * rng.choice((-1, 0, 2, 1e-3, 1e6, 1e12))
        connection.execute(f"UPDATE OR IGNORE {table} SET {column} = ? WHERE {where}", (value, *values))
    return f"{table}.{column} = {value!r:.80}"


def _changed_json(text: str, rng: random.Random) -> str:
    from .json_mutations import mutated

    with contextlib.suppress(ValueError):
        return mutated(json.loads(text), rng)
    return text[: rng.randrange(len(text))]


def _swap_rows(connection: Connection, rng: random.Random) -> str:
    """One column gets the value of another row."""
    table = _table(connection, rng)
    column = rng.choice(_columns(connection, table))
    where, values = _some_row(connection, table, rng)
    with _untyped(connection, table, rng):
        others = [row[0] for row in connection.execute(f"SELECT DISTINCT {column} FROM {table}")]
        other = rng.choice(others) if others else None
        value = other.decode("latin-1") if isinstance(other, bytes) and column != "code" else other
        connection.execute(f"UPDATE OR IGNORE {table} SET {column} = ? WHERE {where}", (value, *values))
    return f"{table}.{column} of another row"


def _swap_columns(connection: Connection, rng: random.Random) -> str:
    table = _table(connection, rng)
    first, second = rng.choice(_columns(connection, table)), rng.choice(_columns(connection, table))
    where, values = _some_row(connection, table, rng)
    with _untyped(connection, table, rng):
        connection.execute(f"UPDATE OR IGNORE {table} SET {first} = {second}, {second} = {first} WHERE {where}", values)
    return f"{table}.{first} and {second} swapped"


def _foreign_code(connection: Connection, rng: random.Random) -> str:
    """A best record, or all of them, point at the code of another workload, as the fastest."""
    shas = [row[0].decode(errors="replace") for row in connection.execute("SELECT sha256 FROM artifact")]
    sha = rng.choice(shas)
    connection.execute("DROP TRIGGER IF EXISTS record_artifact_is_added_once")
    connection.execute("UPDATE best SET artifact_sha256 = ?, verified = 1", (sha,))
    if rng.random() < 0.7:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("UPDATE record SET artifact_sha256 = ?", (sha,))
    if rng.random() < 0.3:
        with contextlib.suppress(sqlite3.Error), _untyped(connection, "best", rng):
            connection.execute("UPDATE best SET time_ns = 1.0")
    return "best points at other code"


def _foreign_workload(connection: Connection, rng: random.Random) -> str:
    """Bests, records or workloads exchange their ids."""
    ids = [row[0].decode(errors="replace") for row in connection.execute("SELECT id FROM workload")]
    first, second = rng.choice(ids), rng.choice(ids)
    for table, column in (
        ("best", "workload_id"),
        ("record", "workload_id"),
        ("workload", "id"),
        ("artifact", "workload_id"),
    ):
        if rng.random() < 0.6:
            with contextlib.suppress(sqlite3.Error), _untyped(connection, table, rng):
                connection.execute(f"UPDATE {table} SET {column} = '?' WHERE {column} = ?", (first,))
                connection.execute(f"UPDATE OR IGNORE {table} SET {column} = ? WHERE {column} = ?", (first, second))
                connection.execute(f"UPDATE OR IGNORE {table} SET {column} = ? WHERE {column} = '?'", (second,))
    return "workloads exchanged"


def _changed_code(connection: Connection, rng: random.Random) -> str:
    """Code or plan changes, and the sha256 everywhere with it; the signature cannot."""
    rows = connection.execute("SELECT sha256, plan, code FROM artifact").fetchall()
    sha, plan, code = rng.choice(rows)
    if rng.random() < 0.5 and code:
        changed = bytearray(code)
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        code = bytes(changed)
    else:
        plan = _changed_json(plan.decode(errors="replace"), rng).encode("utf-8", "replace")
    new = hashlib.sha256(plan + b"\0" + code).hexdigest()
    for table, column in (("artifact", "sha256"), ("best", "artifact_sha256"), ("record", "artifact_sha256")):
        with contextlib.suppress(sqlite3.Error), _untyped(connection, table, rng):
            connection.execute(f"UPDATE {table} SET {column} = ? WHERE {column} = ?", (new, sha.decode()))
    connection.execute("UPDATE artifact SET plan = ?, code = ? WHERE sha256 = ?", (plan.decode(), code, new))
    return "code or plan changed, with its sha256"


def _change_meta(connection: Connection, rng: random.Random) -> str:
    keys = [row[0].decode() for row in connection.execute("SELECT key FROM meta")]
    key = rng.choice([*keys, "schema_version", "uuid", "kind"])
    value = rng.choice(
        (
            *(
                "x",
                "",
                "-1",
                "0",
                "1",
                "2",
                "3",
                "4",
                "5",
                "999",
                "1e9",
                "3.0",
                " 3",
                "9" * 400,
                "deploy",
                "store",
                "\x1b[31m",
            ),
            "٣",
        )
    )
    if rng.random() < 0.25:
        connection.execute("DELETE FROM meta WHERE key = ?", (key,))
        return f"meta.{key} deleted"
    connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))
    return f"meta.{key} = {value[:40]!r}"


def _change_schema(connection: Connection, rng: random.Random) -> str:
    table = _table(connection, rng)
    column = rng.choice(_columns(connection, table))
    names = [
        row[0].decode() for row in connection.execute("SELECT name FROM sqlite_schema WHERE type IN ('index', 'trigger')")
    ]
    other = rng.choice([name for name in names if not name.startswith("sqlite_")] or ["none"])
    statement = rng.choice(
        (
            f"DROP TABLE {table}",
            f"DELETE FROM {table}",
            f"ALTER TABLE {table} RENAME TO {table}_before",
            f"ALTER TABLE {table} RENAME COLUMN {column} TO {column}_before",
            f"ALTER TABLE {table} DROP COLUMN {column}",
            f"ALTER TABLE {table} ADD COLUMN added TEXT",
            f"ALTER TABLE {table} ADD COLUMN added AS (abs(random()) % 3)",
            f"DROP INDEX {other}",
            f"DROP TRIGGER {other}",
            "CREATE TABLE more (a, b)",
        )
    )
    connection.execute("PRAGMA foreign_keys = OFF")
    connection.execute(statement)
    return statement


def _plant(connection: Connection, rng: random.Random) -> str:
    """A view in place of a table, or a trigger, an index or a table that computes something when it is used."""
    table = _table(connection, rng)
    column = rng.choice(_columns(connection, table))
    statements = rng.choice(
        (
            (f"ALTER TABLE {table} RENAME TO hidden", f"CREATE VIEW {table} AS SELECT * FROM hidden"),
            (f"ALTER TABLE {table} RENAME TO hidden", f"CREATE VIEW {table} AS SELECT hidden.* FROM hidden, ({_LONG_VIEW})"),
            (f"ALTER TABLE {table} RENAME TO hidden", f"CREATE VIEW {table} AS SELECT {column} FROM {table}_other"),
            (f"CREATE TRIGGER t1 AFTER INSERT ON {table} BEGIN UPDATE best SET time_ns = 1, verified = 1; END",),
            (f"CREATE TRIGGER t2 AFTER INSERT ON {table} BEGIN DELETE FROM record; DELETE FROM best; END",),
            (f"CREATE TRIGGER t3 BEFORE INSERT ON {table} BEGIN SELECT max(i) FROM ({_LONG_VIEW}); END",),
            (f"CREATE TRIGGER t4 BEFORE INSERT ON {table} BEGIN SELECT RAISE(IGNORE); END",),
            (f"CREATE TRIGGER t5 AFTER DELETE ON {table} BEGIN SELECT load_extension('x'); END",),
            (f"CREATE INDEX i1 ON {table} (length(randomblob(8)))",),
            (f"CREATE INDEX i2 ON {table} (hex({column}))",),
            (f"CREATE VIEW other AS {_LONG_VIEW}",),
            (f"DROP TABLE {table}", f"CREATE TABLE {table} ({column})"),
            (f"DROP TABLE {table}", f"CREATE VIRTUAL TABLE {table} USING fts5({column})"),
        )
    )
    connection.execute("PRAGMA foreign_keys = OFF")
    connection.execute("PRAGMA legacy_alter_table = ON")  # other objects keep the names that they use
    for statement in statements:
        connection.execute(statement)
    return "; ".join(statements)[:160]


CONTENT_DAMAGES: tuple[Damage, ...] = (
    *((_change_column,) * 8),
    *(_swap_rows, _swap_rows, _swap_columns, _foreign_code, _foreign_workload, _changed_code),
    *(_change_meta, _change_schema, _change_schema, _plant, _plant),
)


def damage_bytes(path: Path, rng: random.Random) -> str:
    """Damages the file as a broken disk or copy would."""
    data = bytearray(path.read_bytes())
    page = 4096
    how = rng.randrange(10)
    at = rng.randrange(len(data))
    if how < 3:
        for _ in range(rng.choice((1, 1, 5, 100))):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif how == 3:
        data[rng.randrange(100)] = rng.randrange(256)  # the header
    elif how == 4:
        del data[at:]
    elif how == 5:
        start = at // page * page
        data[start : start + page] = bytes(page)
    elif how == 6:
        start, other = at // page * page, rng.randrange(len(data)) // page * page
        data[start : start + page] = data[other : other + page]
    elif how == 7:
        start = rng.randrange(0, len(data), page)
        data[start : start + 16] = rng.randbytes(16)  # the header of a page
    elif how == 8:
        data += rng.randbytes(rng.choice((1, page, 3 * page)))
    else:
        ending = rng.choice(("-wal", "-shm", "-journal"))
        beside = path.with_name(path.name + ending)
        start = rng.choice((b"", b"\x37\x7f\x06\x82\x00\x2d\xe2\x18\x00\x00\x10\x00", b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7"))
        beside.write_bytes(start + rng.randbytes(rng.choice((0, 20, 4096, 40_000))))
        return f"garbage in {ending}"
    path.write_bytes(bytes(data))
    return f"bytes, way {how}"
