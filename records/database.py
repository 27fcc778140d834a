"""What the store needs of a database. `records.sqlite.Database` is the one that exists; PostgreSQL would be a sibling.

`store`, `writes` and `exchange` speak SQLAlchemy Core and this protocol, and know no dialect. A dialect also
brings its texts in `schema.MIGRATIONS`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sa


class Database(Protocol):
    """An open database. All methods may be called from any thread.

    Attributes:
        name: for messages.
        path: tells this database from the others on this machine. Marks of trust are kept by it.
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
        """A transaction that no other writer can interrupt: commits at the end, rolls back on an exception.

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
        """Gives the space of deleted rows back, as far as the dialect does that."""
        ...

    def health(self) -> dict[str, Any]:
        """Facts for `doctor`, among them `problems`, [] when sound."""
        ...

    def close(self) -> None: ...
