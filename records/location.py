"""Where records are: a file, or a database of a PostgreSQL server. Standard library only, because deployment asks too."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from urllib.parse import urlsplit

from schedsearch.errors import UsageError

Place = Path | str
"""The file of a database, or the URL of one on a server."""

_URL = re.compile(r"(\w[\w+.-]*)://")
_SERVERS = ("postgresql", "postgres")


def server_url(db: str | os.PathLike[str]) -> str | None:
    """The URL of a database on a server; None for a file.

    Raises:
        UsageError: it is a URL of another kind of database.
    """
    found = _URL.match(db) if isinstance(db, str) else None
    if found is None or found[1] == "sqlite":
        return None
    if found[1] not in _SERVERS:
        raise UsageError(
            f"databases of {found[1]} are not supported, got {db}; give a path, sqlite:///PATH or postgresql://HOST/DATABASE"
        )
    return str(db)


def short_name(db: str) -> str:
    """The name of a file without its folder, or of a database without its server."""
    return Path(db if server_url(db) is None else urlsplit(db).path).name


def require_file(db: str | os.PathLike[str]) -> Path:
    """The path of a database that deployment reads, which must be a file.

    Raises:
        UsageError: it is a database of a server.
    """
    if (url := server_url(db)) is not None:
        raise UsageError(
            f"{url} is a database of a server, and kernels are loaded from files; write one: "
            f"schedsearch records export --deploy kernels.db --db {shlex.quote(url)}"
        )
    return Path(db)
