"""Runs a fuzzer: many cases in forked workers, each of which must end well, in time and in little memory.

A fuzzer is a class with two methods. `__init__` makes what all cases share, once and before the workers are forked. `case`
draws one input from a random generator, gives it to schedsearch and says in a word what came of it; it raises `Broken` if
what came of it is wrong. Case number i of a seed is a pure function of fuzzer, seed and i, so that a finding is repeated by

    python -m tests.faults fuzz NAME --seed S --case I

Why own generators, not atheris or Hypothesis: a byte that coverage guides through a YAML or JSON parser tests that parser.
Our own holes are behind it, in what a well-formed file means, and the generators start from real files there. Hypothesis
shrinks well, but costs more per case than the code under test, and it cannot stop a hang or a crash of its own process.
`test_foreign_files_fuzz.py` has its property tests.

A worker that hangs, crashes or fills the memory is a finding like any other, and a new worker goes on with the next case.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import mmap
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

CPU_LIMIT_S = 5.0  # of one case; the promise is "no hang over 5 s"
WALL_LIMIT_S = 60.0  # of one case that waits for something; generous, because the machine may be busy
MEMORY_LIMIT_BYTES = 1 << 30
MAX_FINDINGS_KEPT = 200


class Broken(Exception):
    """schedsearch did not do what it promises for the input of this case."""


class Fuzzer(Protocol):
    def case(self, random: random.Random, folder: Path) -> str:
        """Tries one input.

        Args:
            random: the only source of randomness.
            folder: an empty folder; it is removed afterwards.

        Returns:
            What came of the input, in a word, to be counted ("served", "refused" ...).

        Raises:
            Broken: what came of it is wrong. Any other exception is a finding, too.
        """
        ...


@dataclass(frozen=True)
class Finding:
    """One case that went wrong. `text` says how; `place` is the last line of our own code, to tell findings apart."""

    fuzzer: str
    seed: int
    case: int
    text: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.fuzzer} --seed {self.seed} --case {self.case}: {self.text}"


@dataclass
class Result:
    """What a run of a fuzzer found.

    Attributes:
        cases: how many cases were tried.
        findings: those that went wrong, at most `MAX_FINDINGS_KEPT` of them.
        broken: how many went wrong.
        outcomes: word -> how many cases ended like this.
        cpu_s, wall_s: processor time of the workers, and time that passed.
        peak_bytes: the largest memory that a worker had.
    """

    fuzzer: str
    seed: int
    cases: int = 0
    broken: int = 0
    findings: list[Finding] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    cpu_s: float = 0.0
    wall_s: float = 0.0
    peak_bytes: int = 0

    def __str__(self) -> str:
        words = ", ".join(f"{word} {count}" for word, count in self.outcomes.most_common())
        return (
            f"{self.fuzzer}: {self.cases} cases, {self.broken} findings; {words}; "
            f"{self.cpu_s:.1f} s CPU ({self.cases / max(self.cpu_s, 1e-9):.0f} cases/s), peak {self.peak_bytes >> 20} MiB"
        )


def generator(name: str, seed: int, case: int) -> random.Random:
    """The source of randomness of one case."""
    return random.Random(f"{name}:{seed}:{case}")


def run(
    name: str,
    fuzzer: Fuzzer,
    seed: int,
    count: int,
    folder: Path,
    deadline_s: float | None = None,
    *,
    first: int = 0,
    report: Callable[[Finding], None] = lambda finding: None,
) -> Result:
    """Tries the cases first .. first + count - 1, or as many as the deadline allows.

    Args:
        name: the name of the fuzzer in findings.
        fuzzer: its shared state is inherited by the workers.
        seed, first: which cases.
        count: how many of them.
        folder: an existing folder for the files of the cases.
        deadline_s: stop after this time.
        report: called with each finding at once.
    """
    result = Result(name, seed)
    began = time.monotonic()
    following = first
    while following < first + count:
        left_s = None if deadline_s is None else deadline_s - (time.monotonic() - began)
        if left_s is not None and left_s <= 0:
            break
        worker = _Worker(name, fuzzer, seed, range(following, first + count), folder, left_s)
        following = worker.follow(result, report)
    result.wall_s = time.monotonic() - began
    return result


def repeat(name: str, fuzzer: Fuzzer, seed: int, case: int, folder: Path, *, keep: bool = False) -> Finding | str:
    """Tries one case in this process, without limits, and prints tracebacks. Returns the finding or the outcome."""
    _prepare_process()
    return _try(name, fuzzer, seed, case, folder, keep=keep, show=True)


_SHARED = struct.Struct("<qdd")  # number of the case that runs, CPU time used before it, wall time when it began


class _Worker:
    """A forked process that tries cases one after the other and writes what came of each into a pipe."""

    def __init__(self, name: str, fuzzer: Fuzzer, seed: int, cases: range, folder: Path, deadline_s: float | None) -> None:
        self._name, self._seed, self._cases, self._folder = name, seed, cases, folder
        self._now = mmap.mmap(-1, _SHARED.size)
        self._now[:] = _SHARED.pack(cases.start, 0.0, time.monotonic())
        reading, writing = os.pipe()
        self._stacks = folder / "stacks"
        self._pid = os.fork()
        if not self._pid:
            os.close(reading)
            try:
                self._work(fuzzer, writing, deadline_s)
            except BaseException:
                traceback.print_exc()
                os._exit(70)
            os._exit(0)
        os.close(writing)
        self._pipe = reading

    def _work(self, fuzzer: Fuzzer, pipe: int, deadline_s: float | None) -> None:
        _prepare_process()
        gc.freeze()  # what the parent made stays
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit = _memory("VmSize") + MEMORY_LIMIT_BYTES + (256 << 20)
        inherited = _memory("VmRSS")
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        stacks = self._stacks.open("w")
        faulthandler.enable(stacks)
        for number in (signal.SIGPROF, signal.SIGALRM):  # a test may have handlers of its own
            signal.signal(number, signal.SIG_DFL)
        faulthandler.register(signal.SIGPROF, stacks, all_threads=True, chain=True)  # and then it ends the process
        faulthandler.register(signal.SIGALRM, stacks, all_threads=True, chain=True)
        began = time.monotonic()
        with os.fdopen(pipe, "wb") as out:
            for case in self._cases:
                if deadline_s is not None and time.monotonic() - began > deadline_s:
                    break
                self._now[:] = _SHARED.pack(case, time.process_time(), time.monotonic())
                signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
                signal.setitimer(signal.ITIMER_REAL, WALL_LIMIT_S)
                found = _try(self._name, fuzzer, self._seed, case, self._folder)
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.setitimer(signal.ITIMER_REAL, 0)
                peak = max(0, _memory("VmHWM") - inherited)
                if isinstance(found, str) and peak > MEMORY_LIMIT_BYTES:
                    found = Finding(self._name, self._seed, case, f"took {peak >> 20} MiB of memory")
                pickle.dump((case, found, peak, time.process_time()), out)
                out.flush()
                if peak > MEMORY_LIMIT_BYTES:  # the peak never falls: a new process goes on
                    break

    def follow(self, result: Result, report: Callable[[Finding], None]) -> int:
        """Adds what the worker reports to the result, until it ends. Returns the number of the next case."""
        following, cpu_s = self._cases.start, 0.0

        def add(found: Finding | str) -> None:
            result.cases += 1
            if isinstance(found, str):
                result.outcomes[found] += 1
                return
            result.broken += 1
            result.outcomes["FINDING"] += 1
            if len(result.findings) < MAX_FINDINGS_KEPT:
                result.findings.append(found)
            report(found)

        with os.fdopen(self._pipe, "rb") as pipe:
            while True:
                try:
                    case, found, peak, cpu_s = pickle.load(pipe)
                except (EOFError, pickle.UnpicklingError):
                    break
                following = case + 1
                result.peak_bytes = max(result.peak_bytes, peak)
                add(found)
        _, status = os.waitpid(self._pid, 0)
        result.cpu_s += cpu_s
        if status:
            case = _SHARED.unpack(self._now[:])[0]
            add(Finding(self._name, self._seed, case, self._how_it_ended(status), self._last_place()))
            following = case + 1
        return following

    def _how_it_ended(self, status: int) -> str:
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            if number == signal.SIGPROF:
                return f"took more than {CPU_LIMIT_S:g} s of processor time"
            if number == signal.SIGALRM:
                return f"was not finished after {WALL_LIMIT_S:g} s"
            return f"the process died of {signal.Signals(number).name}"
        return f"the process exited with {os.WEXITSTATUS(status)}"

    def _last_place(self) -> str:
        with contextlib.suppress(OSError):
            lines = [line.strip() for line in self._stacks.read_text(errors="replace").splitlines()]
            ours = [line for line in lines if line.startswith("File") and "/tests/" not in line and "schedsearch" in line]
            return " <- ".join((ours or lines)[:3])[:500]
        return ""


def _prepare_process() -> None:
    """Makes leaks of resources and errors in destructors visible, and keeps the machine's own state out of it."""
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", ResourceWarning)
    sys.unraisablehook = _unraisable


_unraised: list[str] = []


def _unraisable(what: Any) -> None:
    _unraised.append(f"{type(what.exc_value).__name__}: {what.exc_value} in {what.object!r}")


def _try(
    name: str, fuzzer: Fuzzer, seed: int, case: int, folder: Path, *, keep: bool = False, show: bool = False
) -> Finding | str:
    place = folder / "case"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    _unraised.clear()
    try:
        word = fuzzer.case(generator(name, seed, case), place)
    except Broken as broken:
        return Finding(name, seed, case, str(broken)[:2000])
    except Exception as error:
        if show:
            traceback.print_exc()
        trace = traceback.extract_tb(error.__traceback__)
        text = "".join(traceback.format_exception_only(error)).strip()
        return Finding(name, seed, case, text[:2000], f"{Path(trace[-1].filename).name}:{trace[-1].name}")
    finally:
        if not keep:
            shutil.rmtree(place, ignore_errors=True)
    if case % 64 == 0:
        gc.collect()
    if _unraised:
        return Finding(name, seed, case, f"an error in a destructor: {_unraised[0]}"[:2000])
    return word


def _memory(name: str) -> int:
    """A figure of /proc/self/status, in bytes; 0 where there is no such file."""
    with contextlib.suppress(OSError), Path("/proc/self/status").open() as file:
        for line in file:
            if line.startswith(name):
                return int(line.split()[1]) << 10
    return 0
