"""The installed command `schedsearch`. Standard library only until a command runs: a slim installation lacks the rest."""

from __future__ import annotations

import re
import sys
from importlib.metadata import requires

from schedsearch.cli import process


def run() -> None:
    """Runs the command line and exits.

    If a library is missing, it says what to install and exits with 2. A bug of schedsearch shows its traceback and exits
    with 70, which no result of a command has.
    """
    streams = process.StandardStreams()
    process.interrupt_on_signals()
    try:
        code = _command()
    except KeyboardInterrupt:
        code = process.INTERRUPTED
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = process.BUG
    process.die_on_signals()
    sys.exit(streams.exit_code(code))


def _command() -> int:
    try:
        import click

        from schedsearch.cli.main import main

        try:
            code = main(standalone_mode=False)
        except click.ClickException as error:
            error.show()
            return error.exit_code
        except click.Abort:
            return process.INTERRUPTED
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _required():
            raise
        print(
            f"schedsearch: this command needs {missing}, which is not installed; install schedsearch with all that it "
            "requires (pip install schedsearch, without --no-deps); schedsearch.compile in Python needs less",
            file=sys.stderr,
        )
        return 2
    return code if isinstance(code, int) else 0  # of `--help` and the like; a command returns None


def _required() -> set[str]:
    """Import names of the packages that schedsearch requires, extras included."""
    found = {"llvmlite"}
    for requirement in requires("schedsearch") or ():
        match = re.match(r"[\w.-]+", requirement)
        if match is not None:
            found.add(match[0].partition(".")[0].replace("-", "_"))
    return found
