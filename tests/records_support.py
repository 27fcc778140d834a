"""Shared by the tests of the record store: records of every outcome, artifacts, and a way to give up root's rights."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from child_environment import child_environment
from store_contract import A100, H100, H200, TOOLCHAIN, artifact, conv, profile, record

from schedsearch.config import Config
from schedsearch.identity import sha256_hex
from schedsearch.launch_sizes import SizedPlan
from schedsearch.measurement import Record, Verdict
from schedsearch.records.rows import content_id
from schedsearch.size_table import SizedKernel, SizeTable

__all__ = [
    "A100", "H100", "H200", "TOOLCHAIN", "artifact", "as_of_an_operator_that_is_not_installed", "before_version_3",
    "before_version_6", "conv", "forked", "profile", "python", "record", "size_table",
]  # fmt: skip


def size_table(time_ns: float = 1000.0) -> SizeTable:
    """One kernel for the sizes 1 to 4."""
    sizes = range(1, 5)
    plan = SizedPlan.of({size: replace(artifact().plan, workspaces={"w": 4 * size}) for size in sizes})
    kernel = SizedKernel("conv2d_wgmma", 1, Config({"bm": 64}), artifact().code, plan, dict.fromkeys(sizes, time_ns))
    return SizeTable(1, 4, (kernel,), ((1, 4, 0),), {1: time_ns, 4: time_ns / 2}, 4)


def before_version_3(record: Record) -> Record:
    """The same record without the fields that schema version 3 and later ones added."""
    record = before_version_6(record)
    return replace(record, measurement=replace(record.measurement, host="", device_uuid=""), model=None, anchor=None)


def before_version_6(record: Record) -> Record:
    """The same record without the fields that schema version 6 added."""
    return replace(record, measurement=replace(record.measurement, sustained_ns=None), verdict=Verdict.NONE)


def as_of_an_operator_that_is_not_installed(path: Path, *, except_for: str = "") -> None:
    """Turns conv2d workloads of a database into those of an operator `attention`, with the ids that follow from it."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.row_factory = sqlite3.Row
        triggers = connection.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'").fetchall()
        for trigger in triggers:
            connection.execute(f"DROP TRIGGER {trigger['name']}")
        for old_id, text in connection.execute("SELECT id, json FROM workload WHERE id != ?", (except_for,)).fetchall():
            renamed = text.replace("conv2d", "attention")
            new_id = sha256_hex(renamed)
            connection.execute("INSERT INTO workload VALUES (?, 'attention', ?)", (new_id, renamed))
            for table in ("record", "best"):
                connection.execute(f"UPDATE {table} SET workload_id = ? WHERE workload_id = ?", (new_id, old_id))
            connection.execute("DELETE FROM workload WHERE id = ?", (old_id,))
        whole = """SELECT r.*, w.json AS workload_json, t.json AS toolchain_json FROM record r
            JOIN workload w ON w.id = r.workload_id JOIN toolchain t ON t.id = r.toolchain_id"""
        for row in connection.execute(whole).fetchall():
            connection.execute("UPDATE record SET content_id = ? WHERE id = ?", (content_id(dict(row)), row["id"]))
        for trigger in triggers:
            connection.execute(trigger["sql"])


def python(code: str, *arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    """Starts another Python process that can import this module."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment(), **options)


def forked(action: Callable[[], str], *, drop_root: bool = False) -> str:
    """Runs `action` in a forked process and returns its text. The process can give up the right to override permissions."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            if drop_root and os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            text = action()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text
