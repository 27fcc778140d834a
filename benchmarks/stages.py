"""Benchmarks of cases in stages: each case in a process of its own, each stage with its share of the time.

What a stage finds is printed with the seconds since the start and written to the file at once. A stage that takes longer
than its share is ended with the process that runs it, and a new one runs the stages that follow. The processes are forks, so
that nothing is imported twice; whoever calls `run_cases` must not have used a GPU before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NoReturn

import common

LEAST_S = 20.0  # of a stage: a process, a GPU and libraries have to start, however little a stage measures
END_S = 3.0  # of --limit, to write what was found and to end
_ENDING = (signal.SIGINT, signal.SIGTERM)
Found = dict[str, Any]
_STARTED = time.monotonic()  # before the imports that take seconds, if this one comes first


@dataclass(frozen=True)
class Turn:
    """What a stage is given.

    Attributes:
        share_s: seconds after which it is ended.
        found: what earlier stages of the case found.
        tell: takes what is found before the stage ends.
    """

    share_s: float
    found: Mapping[str, Any]
    tell: Callable[[Found], None]


Stage = Callable[[Turn], Found]
Make = Callable[[str, argparse.Namespace], Mapping[str, Stage]]


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} seconds are not possible; allowed: more than 0")
    return value


def parsed(parser: argparse.ArgumentParser, known: Sequence[str]) -> argparse.Namespace:
    """The arguments of a benchmark whose cases are like the known ones: names, and a batch of any size in the second place.

    Ends the program with a message if a case is not like them.
    """
    given = parser.parse_args()
    columns = [sorted(set(column)) for column in zip(*(case.split(":") for case in known))]
    for case in given.cases:
        parts = case.split(":")
        fits = len(parts) == len(columns) and parts[1].isdecimal() and int(parts[1]) > 0
        if not fits or any(part not in names for place, (part, names) in enumerate(zip(parts, columns)) if place != 1):
            allowed = ":".join("BATCH" if place == 1 else f"({'|'.join(names)})" for place, names in enumerate(columns))
            parser.error(f"case {case!r} is not possible; allowed: {allowed}, e.g. {known[0]}")
    return given


def options(description: str | None, cases: Sequence[str], stages: Sequence[str], limit_s: float) -> argparse.ArgumentParser:
    """The arguments that every benchmark of cases takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(cases), metavar="CASE")
    parser.add_argument("--stages", default=",".join(stages), help="separated by commas; they run in the order above")
    parser.add_argument("--limit", type=_seconds, default=limit_s, help="seconds for all cases and for imports")
    parser.add_argument("--out", help="file for the data")
    return parser


def run_cases(
    given: argparse.Namespace,
    make: Make,
    weights: Mapping[str, float],
    describe: Callable[[str], Found],
    show: Callable[[Found], None],
    summary: Callable[[list[Found]], Found],
    facts: Mapping[str, Any],
) -> None:
    """Runs all cases, and writes after each stage what is known. Exits with 1 if nothing at all was measured.

    Args:
        make: makes a case in its own process: stage -> function.
        weights: of all stages, in their order: their shares of a case's time.
        describe: what the name of a case says.
        show: prints a case.
        summary: of all cases.
        facts: to write beside.
    """
    wanted = given.stages.split(",")
    if strange := sorted({*wanted} - {*weights}):
        raise SystemExit(f"stages {', '.join(strange)} are not known; allowed: {', '.join(weights)}")
    _end_cleanly()
    ends = _STARTED + given.limit - END_S
    rows: list[Found] = []
    for place, case in enumerate(given.cases):
        left_s = ends - time.monotonic()
        if left_s < 1.0:
            print(f"no time is left for {' '.join(given.cases[place:])}")
            break
        row: Found = {"case": case, **describe(case)}
        rows.append(row)

        def take(found: Found, row: Found = row) -> None:
            row |= found
            _print(f"{row['case']}: {json.dumps(found)}", sys.stdout)
            common.write(given.out, {**facts, "rows": rows, "summary": summary(rows)})

        case_ends = time.monotonic() + left_s / (len(given.cases) - place)
        _measure(case, given, make, {name: weights[name] for name in weights if name in wanted}, case_ends, row, take)
        show(row)
    print(json.dumps(summary(rows), indent=1), flush=True)
    if not any(key.endswith("_us") for row in rows for key in row):
        raise SystemExit("nothing was measured")


def _measure(
    case: str,
    given: argparse.Namespace,
    make: Make,
    weights: dict[str, float],
    ends: float,
    row: Found,
    take: Callable[[Found], None],
) -> None:
    while weights:
        with _process(case, given, make) as connection:
            while weights:
                name = next(iter(weights))
                left_s = ends - time.monotonic()
                if left_s < 1.0:
                    take({f"{each}_failed": "no time was left" for each in weights})
                    return
                share_s = max(min(LEAST_S, left_s), left_s * weights[name] / sum(weights.values()))
                del weights[name]
                started = time.monotonic()
                ended, reason = _stage(connection, name, share_s, row, take)
                if reason:
                    take({f"{name}_failed": reason, f"{name}_s": round(time.monotonic() - started, 1)})
                if not ended:
                    break


def _stage(connection: Connection, name: str, share_s: float, row: Found, take: Callable[[Found], None]) -> tuple[bool, str]:
    """Whether the process of a case is ready for another stage, and why this one failed."""
    ends = time.monotonic() + share_s
    try:
        connection.send((name, share_s, row))
        while connection.poll(max(0.0, ends - time.monotonic())):
            kind, found = connection.recv()
            if kind == "failed":
                return True, found
            if found:
                take(found)
            if kind == "done":
                return True, ""
    except (EOFError, ConnectionError):
        return False, "its process ended"
    return False, f"stopped after its share of {share_s:.0f} s"


@contextlib.contextmanager
def _process(case: str, given: argparse.Namespace, make: Make) -> Any:
    """A process that runs stages; all that it started ends with it."""
    sys.stdout.flush()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(ours, theirs, make, case, given))
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        for end in (os.killpg, os.kill):  # with its builders and its runner, which hold the GPU
            with contextlib.suppress(ProcessLookupError, TypeError):
                end(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        process.join()
        ours.close()


def _serve(parents: Connection, connection: Connection, make: Make, case: str, given: argparse.Namespace) -> None:
    """Runs the stages that are asked for, in the process of a case."""
    parents.close()
    os.setsid()
    for number in _ENDING:
        signal.signal(number, signal.SIG_DFL)
    made: Mapping[str, Stage] = {}
    with contextlib.suppress(EOFError):
        while True:
            name, share_s, row = connection.recv()
            started = time.monotonic()
            _log_to_stderr(f"{case} {name}")
            try:
                if not made:
                    progress("the model is made")
                    made = make(case, given)
                progress(f"starts, {share_s - time.monotonic() + started:.0f} s")
                turn = Turn(share_s - (time.monotonic() - started), row, lambda found: connection.send(("found", found)))
                found = made[name](turn)
                connection.send(("done", {**found, f"{name}_s": round(time.monotonic() - started, 1)}))
            except Exception:
                connection.send(("failed", traceback.format_exc()[-600:]))


def progress(text: str) -> None:
    """A line on standard error about what is done now, in the process of a case."""
    logging.getLogger("schedsearch.benchmark").info("%s", text)


class _Lines(logging.Handler):
    """Lines of schedsearch's logs with the time since the start."""

    def __init__(self, where: str) -> None:
        super().__init__(logging.INFO)
        self._where = where

    def emit(self, record: logging.LogRecord) -> None:
        _print(f"{self._where}: {record.getMessage().splitlines()[0]}", sys.stderr)


def _log_to_stderr(where: str) -> None:
    log = logging.getLogger("schedsearch")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers = [_Lines(where)]


def _print(text: str, file: Any) -> None:
    print(f"[{time.monotonic() - _STARTED:6.1f} s] {text}", file=file, flush=True)


def _end_cleanly() -> None:
    """Ctrl-C and SIGTERM end the processes of cases, too; what was found is written already."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        print(
            f"stopped by {signal.Signals(number).name}; what was measured is printed above and written to the file of --out",
            file=sys.stderr,
        )
        raise SystemExit(128 + number)

    for number in _ENDING:
        signal.signal(number, end)
