"""A PostgreSQL server for tests: Debian's, on a Unix socket in a temporary folder, ended with the tests.

The server refuses to run as root. If root runs the tests, it runs as the user `postgres`, or as `nobody`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

_SETTINGS = "-c fsync=off -c full_page_writes=off -c max_connections=60 -c shared_buffers=32MB -c listen_addresses=''"
USER = "tester"  # the server's superuser


class Unavailable(Exception):
    """No server can be started here; the text says why."""


def binaries() -> Path:
    """The folder of initdb and pg_ctl. Raises Unavailable."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    if not installed:
        raise Unavailable("needs PostgreSQL, which is not installed here (Debian: apt install postgresql)")
    return installed[-1].parent


def _account() -> dict[str, Any]:
    """The arguments of subprocess for the user that the server runs as. Raises Unavailable."""
    if os.getuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            found = pwd.getpwnam(name)
            return {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": []}
    raise Unavailable("PostgreSQL does not run as root, and there is neither a user postgres nor nobody")


class Server:
    """A server of its own in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._data = folder, folder / "data"
        self._bin, self._as = binaries(), _account()
        if self._as:
            os.chown(folder, self._as["user"], self._as["group"])
        folder.chmod(0o755)
        self._numbers = itertools.count()
        self._run("initdb", "-D", self._data, "-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")

    def _run(self, program: str, *arguments: str | Path, check: bool = True) -> None:
        command = [str(self._bin / program), *map(str, arguments)]
        log = self._folder / "commands.log"
        with log.open("ab") as output:  # a server that was started would hold a pipe open
            try:
                done = subprocess.run(command, stdout=output, stderr=output, cwd="/", timeout=600, check=False, **self._as)
            except OSError as error:
                raise Unavailable(f"PostgreSQL's {program} cannot be started: {error}") from error
        if check and done.returncode:
            raise Unavailable(f"PostgreSQL's {program} failed: {log.read_text(errors='replace')[-500:].strip()}")

    def start(self) -> None:
        log = self._folder / "server.log"
        self._run("pg_ctl", "start", "-D", self._data, "-w", "-t", "500", "-l", log, "-o", f"-k {self._folder} {_SETTINGS}")

    def stop(self, mode: str = "fast", *, check: bool = True) -> None:
        """`immediate` is as if the power failed."""
        self._run("pg_ctl", "stop", "-D", self._data, "-w", "-t", "500", "-m", mode, check=check)

    def url(self, database: str, user: str = USER) -> str:
        return f"postgresql://{user}@/{database}?host={quote(str(self._folder), safe='')}"

    def execute(self, *statements: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Runs statements as the superuser, each in a transaction of its own; returns the rows of the last."""
        import psycopg

        rows: list[tuple[Any, ...]] = []
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            for statement in statements:
                cursor = connection.execute(statement)  # type: ignore[call-overload]
                rows = cursor.fetchall() if cursor.description else []
        return rows

    def new_database(self, options: str = "") -> str:
        """The name of a new, empty database."""
        name = f"store_{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name} {options}")
        return name


@contextlib.contextmanager
def running_server() -> Iterator[Server]:
    """A server that runs during the block. Raises Unavailable."""
    with tempfile.TemporaryDirectory(prefix="pg-", ignore_cleanup_errors=True) as name:
        server = Server(Path(name))
        server.start()
        try:
            yield server
        finally:
            server.stop("immediate", check=False)
