"""`schedsearch dashboard` and `schedsearch report`: tuning logs in a browser, live or as a file."""

from __future__ import annotations

import importlib.util
import os
import secrets
import subprocess
import sys
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import click

from schedsearch.cli import given, render
from schedsearch.cli.process import INTERRUPTED
from schedsearch.errors import DatabaseError, UsageError
from schedsearch.measurement import DEFAULT_DB

PORT = 8377
_NEEDED = ("starlette", "uvicorn")


def require_server() -> None:
    """Raises UsageError if the extra `dashboard` is not installed."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"the dashboard needs {' and '.join(missing)}: pip install 'schedsearch[dashboard]'; "
            "schedsearch report -o report.html makes a file that needs neither"
        )


_files_argument = click.argument("files", metavar="[DB...]", nargs=-1, type=click.Path(dir_okay=False))
_db_option = click.option(
    "--db",
    "databases",
    metavar="FILE",
    multiple=True,
    type=click.Path(dir_okay=False),
    help="Another way to give a DB; may be given several times.",
)


def _port(ctx: click.Context, param: click.Parameter, value: int) -> int:
    if not 0 <= value <= 65535:
        raise click.BadParameter(f"{value} is not a port; allowed: 0 (any free one) to 65535", ctx, param)
    return value


@click.command()
@_files_argument
@_db_option
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", help="Any but a loopback one needs --token.")
@click.option(
    "--port",
    metavar="N",
    type=int,
    default=PORT,
    callback=_port,
    help="If it is in use, the next free one.",
)
@click.option("--token", metavar="TEXT", default="", help="Secret that a browser must know; 'new' makes one.")
@click.option("--no-browser", is_flag=True, help="Only print the address.")
@click.option("--parent", metavar="PID", type=int, default=0, help="End when this process, which started it, has ended.")
def dashboard(
    files: tuple[str, ...], databases: tuple[str, ...], host: str, port: int, token: str, no_browser: bool, parent: int
) -> None:
    """Show tuning runs in a browser, while they go on or afterwards.

    DB is a database (default: records.db), or a file of `schedsearch replay --json`. Nothing is written to them. A database
    may appear, grow or be replaced while the dashboard is open.
    """
    require_server()
    from schedsearch.dashboard.answers import Answers, split_files
    from schedsearch.dashboard.server import bind, is_loopback, serve

    if token == "new":
        token = secrets.token_urlsafe(18)
    if not token and not is_loopback(host):
        raise UsageError(
            f"--host {host} lets others reach the dashboard, which needs a secret: --token new, or --token TEXT"
        )
    if token and len(token) < 8:
        raise UsageError("--token has fewer than 8 characters, which can be guessed; give a longer one, or --token new")
    stores, replays = split_files((*files, *databases) or (DEFAULT_DB,))
    for path in stores:
        given.require(path, "database")
    problems = [problem for path in stores if (problem := _what_is_wrong(path))]
    listening = bind(host, port)
    found = listening.getsockname()[1]
    if port and found != port:
        render.note(f"port {port} is in use; taking {found}")
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{found}/" + (f"?token={quote(token)}" if token else "")
    render.say(f"dashboard: {address} ({'it ends with the run' if parent else 'Ctrl-C ends it'})", err=True)
    for problem in problems:  # behind the address, which programs look for in the first line
        render.note(f"warning: {problem}")
    if not no_browser and sys.stderr.isatty():
        threading.Timer(0.5, webbrowser.open, [address]).start()
    answers = Answers(stores, replays)
    try:
        serve(answers, listening, host=host, token=token, parent=parent)
    except KeyboardInterrupt:
        if not parent:
            render.say("the dashboard has ended", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    finally:
        answers.close()
        listening.close()


def _what_is_wrong(db: str) -> str:
    """Why a database cannot be read now, or empty. It may appear or be mended while the dashboard is open.

    Raises:
        UsageError: it never can be, because of its URL or because a package is missing.
    """
    from schedsearch.records.store import Store

    try:
        Store.open(db, readonly=True).close()
    except (DatabaseError, OSError) as error:
        return str(error)
    return ""


@contextmanager
def beside(db: str) -> Iterator[subprocess.Popen[bytes] | None]:
    """A dashboard of `db` in a process of its own, which ends with the block, or when this process ends.

    Nothing that happens to it has an effect here. Gives the process; None if it cannot be started.
    """
    require_server()
    command = [sys.executable, "-m", "schedsearch.cli.dashboard_process", "--parent", str(os.getpid()), "--", db]
    child = None
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        render.note(f"warning: the dashboard does not start ({error.strerror}); the run goes on without it")
    try:
        yield child
    finally:
        if child is not None:
            child.terminate()
            try:
                child.wait(3)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


@click.command()
@_files_argument
@_db_option
@click.option("--output", "-o", metavar="FILE", type=click.Path(dir_okay=False), help="Default, and '-': standard output.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["html", "markdown", "csv", "json"]),
    help="Default: by the end of FILE, html if it has none; on standard output markdown.",
)
def report(files: tuple[str, ...], databases: tuple[str, ...], output: str | None, kind: str | None) -> None:
    """Write the dashboard of databases to one file that works offline, or their results as a table.

    DB is a database (default: records.db), or a file of `schedsearch replay --json`. The formats: html is the whole
    dashboard in one file, markdown and csv are tables of the results, json is everything that the pages show.
    """
    import json

    from schedsearch import progress
    from schedsearch.dashboard import report as reports
    from schedsearch.dashboard.answers import Answers, split_files

    ends = {".html": "html", ".htm": "html", ".md": "markdown", ".csv": "csv", ".json": "json"}
    if output == "-":
        output = None
    if kind is None and output is None:
        kind = "markdown"
    elif kind is None and (end := Path(str(output)).suffix.lower()):
        if end not in ends:
            raise UsageError(
                f"{output!r} ends in {end}, which is not a format of reports; allowed: {', '.join(ends)}, or name the "
                "format: --format html"
            )
        kind = ends[end]
    kind = kind or "html"
    if kind == "html" and output is None and sys.stdout.isatty():
        raise UsageError("an HTML report is for a file; name it: schedsearch report -o report.html")
    stores, replays = split_files((*files, *databases) or (DEFAULT_DB,))
    for path in stores:
        given.require(path, "database")
    answers = Answers(stores, replays)
    try:
        answers.refresh()
        problems = [f"{source.problem}" for source in answers.sources if source.problem]
        if problems and len(problems) == len(answers.sources):
            raise DatabaseError("; ".join(problems))
        for problem in problems:
            render.note(f"warning: {problem}")
        with progress.shown():
            if kind == "html":
                text = reports.report_html(answers)
            elif kind == "json":
                text = json.dumps(dict(reports.report_answers(answers)), allow_nan=False) + "\n"
            else:
                text = reports.report_markdown(answers) if kind == "markdown" else reports.report_csv(answers)
    finally:
        answers.close()
    _write(text, output)


def _write(text: str, output: str | None) -> None:
    """Writes a file that appears complete, or to standard output without one, as for `-`."""
    from schedsearch.records.output import new_file

    if output is None:
        click.echo(text, nl=False)  # foreign text in it is escaped already
        return
    data = text.encode("utf-8", "backslashreplace")
    with new_file(output) as file:
        file.write(data)
    render.note(f"wrote {output} ({render.size_bytes(len(data))})")
