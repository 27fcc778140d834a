"""What the store needs from a database. `records.sqlite` and `records.postgresql` implement it.

`store`, `writes` and `exchange` use SQLAlchemy Core and this protocol only, so they know no dialect. A dialect also
brings its statements in `schema.MIGRATIONS`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa

from schedsearch.records.location import Place
from schedsearch.typed import JsonObject

T = TypeVar("T")


class Database(Protocol):
    """An open database. All methods may be called from any thread.

    Attributes:
        name: for messages.
        path: of a file; the URL of a database on a server, without its password.
        identity: the same for every way in which the user may have named this database.
        readonly: whether `write` is refused.
        size_bytes: what it takes on the disk.

    Raises (all methods):
        DatabaseLockedError: another process kept the write lock for longer than the time-out.
        DatabaseLostError: the connection to the server was lost. Nobody knows whether the transaction was kept.
        DatabaseError: no permission, no connection, disk full, damaged, or not a database of schedsearch.
    """

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> Place: ...
    @property
    def identity(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
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

    def again(self, call: Callable[[], T]) -> T:
        """What `call` returns. It is called again, up to the time-out, when the connection was lost meanwhile.

        Args:
            call: may begin transactions of its own; doing it twice must be as doing it once.
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
