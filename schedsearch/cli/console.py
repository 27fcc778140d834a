"""The installed command `schedsearch`. Standard library only until a command runs: a slim installation lacks the rest."""

from __future__ import annotations

import re
import sys
from importlib.metadata import requires


def run() -> None:
    """Runs the command line. If a library is missing, it says what to install and exits with 2."""
    try:
        from schedsearch.cli.main import main

        main()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _required():
            raise
        print(
            f"schedsearch: this command needs {missing}, which is not installed; install schedsearch with all that it "
            "requires (pip install schedsearch, without --no-deps); schedsearch.compile in Python needs less",
            file=sys.stderr,
        )
        sys.exit(2)


def _required() -> set[str]:
    """Import names of the packages that schedsearch requires, extras included."""
    found = {"llvmlite"}
    for requirement in requires("schedsearch") or ():
        match = re.match(r"[\w.-]+", requirement)
        if match is not None:
            found.add(match[0].partition(".")[0].replace("-", "_"))
    return found
