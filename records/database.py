"""What the store needs from a database. `records.sqlite.Database` implements it; PostgreSQL would be a sibling.

`store`, `writes` and `exchange` use SQLAlchemy Core and this protocol only, so they know no dialect. A dialect also
brings its statements in `schema.MIGRATIONS`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sa

from schedsearch.typed import JsonObject


class Database(Protocol):
    """An open database. All methods may be called from any thread.

    Attributes:
        name: for messages.
        path: identifies this database among the others on this machine. Marks of trust refer to it.
        readonly: whether `write` is refused.

    Raises (all methods):
        DatabaseLockedError: another process kept the write lock for longer than the time-out.
        DatabaseError: no permission, no connection, disk full, damaged, or not a database of schedsearch.
    """

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> Path: ...
    @property
    def readonly(self) -> bool: ...

    def read(self) -> AbstractContextManager[sa.Connection]:
        """A connection that sees one snapshot of the database."""
        ...

    def write(self) -> AbstractContextManager[sa.Connection]:
        """A transaction that no other writer can interrupt. It commits at the end and rolls back on an exception.

        Raises:
            DatabaseError: the database was opened read-only.
        """
        ...

    def insert(self, table: sa.Table) -> Any:
        """The dialect's insert. It has `on_conflict_do_update`, `on_conflict_do_nothing`, `excluded` and `returning`."""
        ...

    def migrate(self) -> dict[str, str]:
        """Brings the schema to the newest version, unless the database is read-only, and returns the table meta.

        Raises:
            SchemaVersionError: the database is newer than this code.
            DatabaseError: it is not a store.
        """
        ...

    def vacuum(self) -> None:
        """Frees the space of deleted rows if the dialect can."""
        ...

    def health(self) -> JsonObject:
        """Facts for `doctor`, including `problems`, which is [] if the database is sound."""
        ...

    def close(self) -> None: ...
