"""Databases that are created by filling them: they appear under their name when they are complete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from schedsearch.errors import DatabaseError
from schedsearch.records import dbfile
from schedsearch.records.exchange import Report, merge
from schedsearch.records.location import server_url
from schedsearch.records.output import place, temporary_beside
from schedsearch.records.store import Store


def fill_store(path: str | Path, fill: Callable[[Store], Report]) -> Report:
    """Opens the record store at `path` and calls `fill`. A new file appears only if `fill` succeeds.

    If another process creates a store at `path` in the meantime, the records are added to that one; `fill` is called once
    in any case, so it may read a pipe.

    Raises:
        DatabaseError: the store cannot be opened or created.
    """
    if server_url(path) is not None:
        with Store.open(path) as store:
            return fill(store)
    path = Path(path).absolute()
    dbfile.check(path, create=True, readonly=False)
    if path.exists():
        with Store.open(path) as store:
            return fill(store)
    try:
        with temporary_beside(path) as temporary:
            with Store.open(temporary) as store:
                report = fill(store)
            if dbfile.has_content(dbfile.beside(temporary, "-wal")):  # SQLite could not copy its log into the database
                raise DatabaseError(
                    f"the disk of {path} is full; nothing was kept; free some space and run the same command again"
                )
            try:
                place(temporary, path)
            except FileExistsError:
                with Store.open(path) as store:
                    merged = merge(store, [temporary])
                return replace(
                    merged,
                    bests_dropped=report.bests_dropped,
                    artifacts_dropped=report.artifacts_dropped,
                    warnings=report.warnings,
                )
            return report
    except OSError as error:
        raise DatabaseError(f"cannot write {path}: {error.strerror}; give another path") from error
