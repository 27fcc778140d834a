"""Kernels of users: references and files that end, die, hang or eat memory, and arguments that change between calls."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numba import cuda

import schedsearch
from schedsearch.errors import ArgumentError

from . import told
from .scenario import Batch, Scenario

_KERNELS = """\
import os, resource, signal, sys, time
import schedsearch
from numba import cuda

{before}

def reference(x):
    {reference}
    return 2 * x

@schedsearch.tunable(
    knobs={{"threads": (256, 64)}}, grid=lambda x, k: -(-x.size // k.threads), block=lambda k: k.threads, outputs=["y"],
    reference=reference, db="own.db",
)
def double(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = 2 * x[i]
"""
_MEMORY = (
    "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30)); "  # the process may not fill the machine
    "kept = [bytearray(64 << 20) for _ in range(1000)]"
)
_REFERENCES = (
    *(f"sys.exit({status})" for status in (0, 1, 3, 4, 300, None, "'bye'")),
    *(f"os._exit({status})" for status in (0, 1, 4)),
    *(f"os.kill(os.getpid(), signal.SIG{name})" for name in ("KILL", "SEGV", "TERM", "ABRT", "INT", "HUP")),
    "os.abort()",
    "raise KeyboardInterrupt",
    "raise type('Odd', (BaseException,), {})('odd')",
    "raise MemoryError",
    "return x[:1]",
    "return 'x'",
    "return None",
    _MEMORY,
)
_HANGS = ("time.sleep(10_000)", "signal.pause()", "sum(0 for _ in iter(int, 1))", "os.kill(os.getpid(), signal.SIGSTOP)")
_ENDS = (
    *(f"sys.exit({status})" for status in (0, 1, 4, None, "'bye'")),
    "raise SystemExit",
    "raise KeyboardInterrupt",
    "raise type('Odd', (BaseException,), {})('odd')",
    "raise MemoryError",
    "1 / 0",
    "import no_such_module",
    "def double(x, y) return",
)
_HANG_LIMIT_S = 30.0  # what is promised
_START_S = 30.0  # of the processes around it, on a busy machine


def _tuned(batch: Batch, *, before: str = "", reference: str = "pass", limit_s: float) -> Any:
    Path("kernels.py").write_text(_KERNELS.format(before=before, reference=reference))
    shapes = ("--shape", "x=1000:float32", "--shape", "y=1000:float32")
    return told.command(
        batch.folder, "tune", "kernels.py:double", *shapes, "--target", "cpu", "--trials", "2", limit_s=limit_s
    )


def _reference_ends(batch: Batch) -> None:
    for seed in batch.each():
        reference = batch.random(seed).choice(_REFERENCES)
        ended = _tuned(batch, reference=reference, limit_s=_HANG_LIMIT_S + _START_S)
        for text in told.refusals(ended, (1, 2), ("reference", "double"), reference):
            batch.failed(seed, text)


def _reference_hangs(batch: Batch) -> None:
    for seed in batch.each():
        reference = batch.random(seed).choice(_HANGS)
        ended = _tuned(batch, reference=reference, limit_s=_HANG_LIMIT_S + _START_S)
        for text in told.refusals(ended, (1, 2), ("reference",), reference):
            batch.failed(seed, text)


def _file_ends(batch: Batch) -> None:
    for seed in batch.each():
        text = batch.random(seed).choice(_ENDS)
        ended = _tuned(batch, before=text, limit_s=_START_S)
        for wrong in told.refusals(ended, (2,), ("kernels.py",), text):
            batch.failed(seed, wrong)


# ---- arguments that change between calls

_EXTENT = 16
_NUMBERS = (0.0, -0.0, 1.0, 1, True, 0, float("inf"), float("nan"), np.float32(-0.0), np.int64(3))


class _Arguments:
    """x, s and y of `y = x / s`, and what may become of them."""

    def __init__(self) -> None:
        self.x, self.s, self.y = np.arange(_EXTENT, dtype=np.float32), 2.0, np.zeros(_EXTENT, np.float32)

    def number(self, rng: random.Random) -> None:
        self.s = rng.choice(_NUMBERS)

    def contents(self, rng: random.Random) -> None:
        if self.x.flags.writeable:
            self.x[...] = rng.randrange(-3, 4)

    def memory(self, rng: random.Random) -> None:
        """NumPy moves the array; the object stays."""
        if self.x.flags.owndata and self.y.base is None:
            self.x.resize(200_000, refcheck=False)
            self.x.resize(_EXTENT, refcheck=False)

    def dtype(self, rng: random.Random) -> None:
        self.x.dtype = rng.choice((np.float32, np.int32))

    def strides(self, rng: random.Random) -> None:
        self.x = np.arange(2 * _EXTENT, dtype=np.float32)[:: rng.choice((1, 2))][:_EXTENT]

    def read_only(self, rng: random.Random) -> None:
        array = rng.choice((self.x, self.y))
        if array.flags.owndata:
            array.flags.writeable = not array.flags.writeable

    def overlap(self, rng: random.Random) -> None:
        self.y = self.x.view(np.float32)

    def new(self, rng: random.Random) -> None:
        self.y = np.zeros(_EXTENT, np.float32)


_CHANGES: tuple[Callable[[_Arguments, random.Random], None], ...] = (
    *(_Arguments.number, _Arguments.number, _Arguments.contents, _Arguments.memory, _Arguments.dtype, _Arguments.strides),
    *(_Arguments.read_only, _Arguments.overlap, _Arguments.new),
)


def _divide() -> Any:
    def divide(x: Any, s: Any, y: Any) -> None:
        i = cuda.grid(1)
        if i < x.size:
            y[i] = x[i] / s

    decorate = schedsearch.tunable(
        knobs={"threads": (64,)}, grid=1, block=lambda k: k.threads, outputs=["y"], verify="once", db="divided.db"
    )
    return decorate(divide)


def _same(found: Any, expected: Any) -> bool:
    return bool(np.array_equal(found, expected, equal_nan=True) and np.array_equal(np.signbit(found), np.signbit(expected)))


def _call(divide: Any, given: _Arguments) -> Iterator[str]:
    """Calls it, and compares with NumPy in float64."""
    before, may = given.x.copy(), given.y.flags.writeable
    old = given.y.copy()
    with np.errstate(all="ignore"):
        expected = (before.astype(np.float64) / np.float64(given.s)).astype(np.float32)
    try:
        divide(given.x, given.s, given.y)
    except ArgumentError:
        if not _same(given.y, old):
            yield "a call that was refused has written"
        dense = given.x.strides == given.y.strides == (4,)
        if may and dense and not np.shares_memory(given.x, given.y):
            yield "a call that fits is refused"
        return
    if not may:
        yield "a read-only output was taken"
    elif not _same(given.y, expected):
        yield f"x / {given.s!r} is {given.y[:4]}, not {expected[:4]}"


def _arguments_change(batch: Batch) -> None:
    divide = _divide()
    for seed in batch.each():
        rng = batch.random(seed)
        given, done = _Arguments(), []
        for _ in range(rng.randrange(2, 9)):
            change = rng.choice(_CHANGES)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of the assignment of a dtype
                change(given, rng)
            done.append(change.__name__)
            for text in _call(divide, given):
                batch.failed(seed, f"after {', '.join(done)}: {text}")


SCENARIOS = [
    Scenario(
        "own.reference-ends", "the reference of a kernel exits, dies by a signal, raises, or takes all memory",
        _reference_ends, batch=5, short=1,
    ),
    Scenario("own.reference-hangs", "the reference of a kernel never returns", _reference_hangs, short=1),
    Scenario("own.file-ends", "the Python file of a kernel exits or raises", _file_ends, batch=10, short=2),
    Scenario(
        "own.arguments-change", "the arguments of a kernel change between calls, in place or by others",
        _arguments_change, share=20.0, batch=100, short=20,
    ),
]  # fmt: skip
