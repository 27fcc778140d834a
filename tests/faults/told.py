"""Commands in processes of their own, which their input may kill, stop or fill: how they must end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from . import lab


def command(
    folder: Path, *arguments: str | Path, limit_s: float = 60.0, prepare: Callable[[], None] = lambda: None
) -> lab.Ended:
    """Runs `schedsearch` with arguments in a forked process, in the current folder.

    Args:
        folder: takes what it writes to standard output and error.
        limit_s: wall seconds on an idle machine, after which it is killed.
        prepare: called in the process before the command begins.
    """

    def run() -> None:
        from schedsearch.cli import console

        sys.argv = ["schedsearch", *map(str, arguments)]
        prepare()
        console.run()

    return lab.start(run, folder, "command").wait(limit_s)


def refusals(ended: lab.Ended, codes: Collection[int], words: Collection[str] = (), what: str = "") -> Iterator[str]:
    """What does not hold of a command that may fail: it ends in time with one of the codes, and without a traceback; if it
    fails, its last line says so and has one of the words."""
    said = f"{what}: exit {ended.status} after {ended.seconds:.0f} s: {ended.err[-600:]}"
    lines = ended.err.strip().splitlines()
    if ended.status is None:
        yield f"it hangs: {said}"
    elif ended.status not in codes:
        yield f"not one of {sorted(codes)}: {said}"
    elif "Traceback" in ended.err:
        yield f"a traceback: {said}"
    elif ended.status and (not lines or not any(word in ended.err for word in words or ("schedsearch: ",))):
        yield f"nothing says why: {said}"
