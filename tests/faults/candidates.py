"""Candidates that misbehave on the CPU: in the template's code, which runs in a builder, and in the kernel, in the runner.

`FaultyCpu` has the knobs `fault` and `number`. `fault` names an entry of `FAULTS`. `number` seeds what is random in it, and
makes many tries of one fault into different candidates of one run.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faulty_templates import PointwiseCpu, pointwise_function, shape_of

from schedsearch.config import Config
from schedsearch.measurement import Outcome
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource
from schedsearch.workload import Workload

from . import runs
from .scenario import Batch, Scenario

_BATCH = 20
_SLOWER = 1.5


@dataclass(frozen=True)
class Fault:
    """One way to misbehave.

    Attributes:
        what: in words, for the table.
        outcomes: those that the store may record for it.
        make: called in the builder with (workload, generator); returns a kernel function, or a kernel function with
            the bytes of its workspaces.
        slow: whether it is noticed by a time-out only.
        right: whether it computes the right thing, so that it may be best.
    """

    what: str
    outcomes: frozenset[Outcome]
    make: Callable[[Workload, random.Random], Any]
    slow: bool
    right: bool


FAULTS: dict[str, Fault] = {}


class FaultyCpu(PointwiseCpu):
    """See the module."""

    name = "faulty_cpu"

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        return faulty_space(FAULTS)

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        return Config(fault=runs.HEALTHY, number=0)

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        number = config["number"]
        if config["fault"] == runs.HEALTHY:
            return self._source(workload, healthy(workload, number))
        made = FAULTS[config["fault"]].make(workload, random.Random(f"{config['fault']} {number}"))
        function, workspaces = made if isinstance(made, tuple) else (made, {})
        return self._source(workload, function, workspaces)


def faulty_space(faults: Mapping[str, Fault]) -> ConfigSpace:
    """Numbers below `HEALTHY_NUMBERS` are for the right candidate, the others for faults."""
    apart = Constraint(
        f"numbers below {runs.HEALTHY_NUMBERS} are for `{runs.HEALTHY}`, the others for faults",
        lambda at: (at["fault"] == runs.HEALTHY) == (at["number"] < runs.HEALTHY_NUMBERS),
    )
    return ConfigSpace([Knob("fault", (runs.HEALTHY, *faults)), Knob("number", tuple(range(runs.NUMBERS)))], [apart])


def healthy(workload: Workload, number: int) -> Any:
    """A right kernel; each number has machine code of its own."""
    from numba import types

    from schedsearch.backend.cpu_ops import as_array

    right = pointwise_function(workload, 1)
    if number == 0:
        return right

    def marked(x_at: Any, w_at: Any, y_at: Any, start: Any, stop: Any) -> None:
        right(x_at, w_at, y_at, start, stop)
        if start == -1 - number:  # never, but only a reader knows
            as_array(y_at, (1,), types.float32)[0] = types.float32(0.0)

    return marked


def fault(
    faults: dict[str, Fault], name: str, what: str, *outcomes: Outcome, slow: bool = False, right: bool | None = None
) -> Callable[[Any], Any]:
    """Decorates the function that makes a fault; see `Fault`. A kernel that may be recorded as ok is right by default."""

    def add(make: Any) -> Any:
        faults[name] = Fault(what, frozenset(outcomes), make, slow, Outcome.OK in outcomes if right is None else right)
        return make

    return add


_fault = functools.partial(fault, FAULTS)
LOST, COMPILE_ERROR, COMPILE_TIMEOUT = Outcome.WORKER_LOST, Outcome.COMPILE_ERROR, Outcome.COMPILE_TIMEOUT
WRONG, RUN_TIMEOUT, LAUNCH_ERROR = Outcome.WRONG_ANSWER, Outcome.RUN_TIMEOUT, Outcome.LAUNCH_ERROR
OK = Outcome.OK


# In the builder


@_fault("build-segfault", "the template reads address 0", LOST)
def _(workload: Workload, rng: random.Random) -> Any:
    ctypes.string_at(0)


@_fault("build-abort", "the template calls abort", LOST)
def _(workload: Workload, rng: random.Random) -> Any:
    os.abort()


@_fault("build-exit", "the template ends its process by exit, sys.exit, os._exit or a signal", LOST, COMPILE_ERROR)
def _(workload: Workload, rng: random.Random) -> Any:
    way = rng.randrange(5)
    if way == 0:
        sys.exit(rng.choice([0, 1, "some text", None]))
    if way == 1:
        os._exit(rng.choice([0, 1, 42]))
    if way == 2:
        os.kill(os.getpid(), rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGALRM, signal.SIGPIPE]))
        time.sleep(60)
    if way == 3:
        ctypes.CDLL(None).exit(rng.choice([0, 3]))
    raise rng.choice([KeyboardInterrupt, GeneratorExit, SystemExit, BaseException])("out")


@_fault("build-exec", "the template replaces its process by another program", LOST, COMPILE_TIMEOUT)
def _(workload: Workload, rng: random.Random) -> Any:
    os.execv("/bin/sh", ["/bin/sh", "-c", rng.choice(["exit 0", "echo garbage >&3; exit 1", "kill -9 $$"])])


@_fault("build-hang", "the template never returns: it sleeps", COMPILE_TIMEOUT, slow=True)
def _(workload: Workload, rng: random.Random) -> Any:
    while True:
        time.sleep(60.0)


@_fault(
    "build-hang-gil",
    "the template never returns: it sleeps in C and holds the interpreter's lock",
    COMPILE_TIMEOUT,
    slow=True,
)
def _(workload: Workload, rng: random.Random) -> Any:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        ctypes.PyDLL(None).sleep(60)


@_fault(
    "build-compile-forever",
    "the compiler gets a kernel that takes it hours",
    COMPILE_TIMEOUT,
    COMPILE_ERROR,
    LOST,
    slow=True,
)
def _(workload: Workload, rng: random.Random) -> Any:
    import numba.core.compiler

    def forever(*args: Any, **named: Any) -> None:
        while True:
            time.sleep(60.0)

    numba.core.compiler.compile_extra = forever
    return healthy(workload, rng.randrange(10_000, 1 << 30))


@_fault("build-fork", "the template forks, and both processes return", OK, LOST, COMPILE_ERROR)
def _(workload: Workload, rng: random.Random) -> Any:
    os.fork()
    return healthy(workload, rng.randrange(10_000, 1 << 30))


@_fault("build-fork-stays", "the template starts processes that do not end", OK, LOST, COMPILE_ERROR)
def _(workload: Workload, rng: random.Random) -> Any:
    way = rng.randrange(3)
    if way == 0:
        subprocess.Popen(["sleep", "600"])
    elif not os.fork():
        if way == 2:
            os.closerange(0, 64)
        while True:
            time.sleep(60.0)
    return healthy(workload, rng.randrange(10_000, 1 << 30))


@_fault("build-compiler-killed", "a process that the template started and waits for is killed", COMPILE_ERROR)
def _(workload: Workload, rng: random.Random) -> Any:
    waits = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL)
    time.sleep(rng.random() * 0.05)
    waits.kill()
    raise RuntimeError(f"the assembler ended with {waits.wait()}")


@_fault("build-memory", "the template allocates until a MemoryError or until the system kills it", LOST, COMPILE_ERROR)
def _(workload: Workload, rng: random.Random) -> Any:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20),) * 2)
    hoard = []
    try:
        while True:
            hoard.append(b"x" * (1 << rng.randrange(16, 25)))
    except MemoryError:
        if rng.random() < 0.5:  # what the system's OOM killer does
            os.kill(os.getpid(), signal.SIGKILL)
        raise


@_fault(
    "build-descriptors", "the template closes descriptors that are not its own", LOST, COMPILE_ERROR, OK, COMPILE_TIMEOUT
)
def _(workload: Workload, rng: random.Random) -> Any:
    first = rng.choice([0, 1, 2, 3])
    os.closerange(first, rng.choice([first + 1, 16, 256]))
    return healthy(workload, rng.randrange(10_000, 1 << 30))


@_fault("build-garbage", "the template writes garbage into every descriptor", LOST, COMPILE_ERROR, OK, COMPILE_TIMEOUT)
def _(workload: Workload, rng: random.Random) -> Any:
    data = rng.choice(
        [rng.randbytes(rng.randrange(1, 3000)), b"\0\0\0\4abcd", b"\xff" * 12, b"\0\0\0\0", b"\x7f\xff\xff\xff"]
    )
    for fd in range(64):
        try:
            os.set_blocking(fd, False)
            os.write(fd, data)
            os.set_blocking(fd, True)
        except OSError:
            pass
    return healthy(workload, rng.randrange(10_000, 1 << 30))


class _Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class _NotAString(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]


@_fault(
    "build-exception",
    "the template raises what is hard to print: surrogates, 20 MB, a broken __str__, a deep chain",
    COMPILE_ERROR,
    LOST,
)
def _(workload: Workload, rng: random.Random) -> Any:
    def recurse() -> None:
        recurse()

    way = rng.randrange(9)
    if way == 0:
        raise ValueError("a lone surrogate \udce4 and \ud800")
    if way == 1:
        raise ValueError("x\0\x1b[2J\u202e\n" * 2_000_000)
    if way == 2:
        raise _Odd
    if way == 3:
        raise _NotAString
    if way == 4:
        recurse()
    if way == 5:
        raise type("Made\udcff", (Exception,), {})("of a type with an odd name")
    if way == 6:
        raise ExceptionGroup("many", [ValueError(str(each)) for each in range(20_000)])
    if way == 7:
        error = ValueError("0")
        for number in range(500):
            following = ValueError(str(number))
            following.__cause__ = error
            error = following
        raise error
    raise UnicodeDecodeError("utf-8", b"\xff" * 1000, 0, 1, "odd\udc80")


@_fault("build-result", "the template returns something else than a kernel", COMPILE_ERROR, Outcome.REJECTED, LOST)
def _(workload: Workload, rng: random.Random) -> Any:
    class Unpicklable:
        __name__ = "unpicklable"

        def __reduce__(self) -> Any:
            raise RuntimeError("not to be pickled")

    right = pointwise_function(workload, 1)
    ways: list[Any] = [
        None, 7, Unpicklable(), lambda: None, print,
        (right, {"gap": -8}), (right, {"gap": 1 << 62}), (right, {"gap": "8"}), (right, {"y": 8}), (right, {7: 8}),
    ]  # fmt: skip
    return rng.choice(ways)


@_fault(
    "build-process-state",
    "the template changes its process: environment, folder, limits, signals, threads, builtins",
    *Outcome,
)
def _(workload: Workload, rng: random.Random) -> Any:
    import builtins
    import pickle

    way = rng.randrange(9)
    if way == 0:
        os.environ.clear()
    elif way == 1:
        os.chdir("/")
        sys.path.clear()
    elif way == 2:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    elif way == 3:
        threading.Thread(target=time.sleep, args=(600,)).start()
    elif way == 4:
        del builtins.len
    elif way == 5:
        pickle.dumps = None  # type: ignore[assignment]
        sys.modules.pop("schedsearch")
    elif way == 6:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    elif way == 7:
        os.setsid() if os.getpid() != os.getsid(0) else None
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.alarm(1)
    else:
        sys.stdout = sys.stderr = None  # type: ignore[assignment]
        gc.disable()
    return healthy(workload, rng.randrange(10_000, 1 << 30))


@_fault("build-stop", "the template stops its process (SIGSTOP)", COMPILE_TIMEOUT, slow=True)
def _(workload: Workload, rng: random.Random) -> Any:
    os.kill(os.getpid(), signal.SIGSTOP)


# In the runner


def external(name: str, result: str, *arguments: str) -> Any:
    """A function of the C library that kernels can call."""
    from numba import types

    return types.ExternalFunction(name, getattr(types, result)(*(getattr(types, each) for each in arguments)))


def calling(workload: Workload, name: str, value: int, marker: int, result: str = "int32") -> Any:
    """A right kernel that also calls one function of the C library with one int32."""
    from numba import types

    function = external(name, result, "int32")
    right, value_, marker_ = healthy(workload, 0), int(value), int(marker)

    def calls(x_at: Any, w_at: Any, y_at: Any, start: Any, stop: Any) -> None:
        right(x_at, w_at, y_at, start, stop)
        if start != -1 - marker_:
            function(types.int32(value_))

    return calls


def stray(workload: Workload, offset: int, workspaces: dict[str, int] | None = None) -> Any:
    """A right kernel that also writes one forbidden float at y + offset bytes, or at workspace + offset bytes."""
    from numba import types

    from schedsearch.backend.cpu_ops import as_array

    right, offset_ = healthy(workload, 0), int(offset)
    if workspaces is None:

        def strays(x_at: Any, w_at: Any, y_at: Any, start: Any, stop: Any) -> None:
            right(x_at, w_at, y_at, start, stop)
            as_array(types.uint64(types.int64(y_at) + offset_), (1,), types.float32)[0] = types.float32(77.0)

        return strays

    def strays_from_workspace(x_at: Any, w_at: Any, y_at: Any, space_at: Any, start: Any, stop: Any) -> None:
        right(x_at, w_at, y_at, start, stop)
        as_array(types.uint64(types.int64(space_at) + offset_), (1,), types.float32)[0] = types.float32(77.0)

    return strays_from_workspace, workspaces


@_fault("run-segfault", "the kernel writes to an address that is not mapped", LOST)
def _(workload: Workload, rng: random.Random) -> Any:
    from numba import types

    from schedsearch.backend.cpu_ops import as_array

    address = rng.choice([8, 0x1000, 0xDEAD_BEEF_0000, (1 << 63) + 64, (1 << 64) - 4096]) + 4 * rng.randrange(256)

    def crashes(x_at: Any, w_at: Any, y_at: Any, start: Any, stop: Any) -> None:
        as_array(types.uint64(address), (1,), types.float32)[0] = types.float32(1.0)

    return crashes


@_fault("run-abort", "the kernel calls abort or raises a signal in its process", LOST, RUN_TIMEOUT)
def _(workload: Workload, rng: random.Random) -> Any:
    number = rng.choice([signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGBUS, signal.SIGKILL, signal.SIGTERM])
    return calling(workload, "raise", number, rng.randrange(1 << 30))


@_fault("run-exit", "the kernel ends its process", LOST)
def _(workload: Workload, rng: random.Random) -> Any:
    return calling(workload, rng.choice(["exit", "_exit"]), rng.choice([0, 1, 9]), rng.randrange(1 << 30), "void")


@_fault("run-hang", "the kernel never returns: it loops, sleeps or waits for a signal", RUN_TIMEOUT, slow=True)
def _(workload: Workload, rng: random.Random) -> Any:
    from numba import types

    from schedsearch.backend.cpu_ops import as_array

    if rng.random() < 0.7:
        return calling(workload, "sleep", 3600, rng.randrange(1 << 30))
    marker = rng.randrange(1 << 20)

    def loops(x_at: Any, w_at: Any, y_at: Any, start: Any, stop: Any) -> None:
        y = as_array(y_at, (1,), types.float32)
        while True:
            y[0] += types.float32(marker)

    return loops


@_fault("run-stop", "the kernel stops its process (SIGSTOP)", RUN_TIMEOUT, slow=True)
def _(workload: Workload, rng: random.Random) -> Any:
    return calling(workload, "raise", signal.SIGSTOP, rng.randrange(1 << 30))


@_fault("run-fork", "the kernel forks, and both processes go on", OK, LOST, RUN_TIMEOUT, WRONG, LAUNCH_ERROR)
def _(workload: Workload, rng: random.Random) -> Any:
    from numba import types

    from schedsearch.backend.cpu_ops import as_array

    fork, right, marker = external("fork", "int32"), healthy(workload, 0), rng.randrange(1 << 30)

    def forks(x_at: Any, w_at: Any, y_at: Any, count_at: Any, start: Any, stop: Any) -> None:
        right(x_at, w_at, y_at, start, stop)
        count = as_array(count_at, (1,), types.int64)
        if count[0] < 1 or start == -1 - marker:
            count[0] += 1
            fork()

    return forks, {"count": 8}


@_fault("run-memory", "the kernel takes all memory that its process may have", LOST, LAUNCH_ERROR, RUN_TIMEOUT, OK, WRONG)
def _(workload: Workload, rng: random.Random) -> Any:
    from numba import types

    malloc, right, marker = external("malloc", "uint64", "int64"), healthy(workload, 0), rng.randrange(1 << 20)

    def hoards(x_at: Any, w_at: Any, y_at: Any, start: Any, stop: Any) -> None:
        right(x_at, w_at, y_at, start, stop)
        for _ in range(8):
            malloc(types.int64((1 << 44) + marker))  # address space: the machine stays alive

    return hoards


@_fault("run-descriptors", "the kernel closes descriptors of the runner", LOST, RUN_TIMEOUT, OK, WRONG, LAUNCH_ERROR)
def _(workload: Workload, rng: random.Random) -> Any:
    return calling(workload, "close", rng.randrange(3, 12), rng.randrange(1 << 30))


@_fault("run-garbage", "the kernel writes garbage into the pipe to the parent", LOST, RUN_TIMEOUT, OK, WRONG, LAUNCH_ERROR)
def _(workload: Workload, rng: random.Random) -> Any:
    from numba import types

    write, right = external("write", "int64", "int32", "uint64", "int64"), healthy(workload, 0)
    fd, size = rng.randrange(3, 10), rng.choice([1, 4, 8, 100])

    def writes(x_at: Any, w_at: Any, y_at: Any, start: Any, stop: Any) -> None:
        right(x_at, w_at, y_at, start, stop)
        write(types.int32(fd), types.uint64(x_at), types.int64(size))

    return writes


@_fault("run-wrong", "the kernel leaves out a channel, a pixel, or adds a little", WRONG)
def _(workload: Workload, rng: random.Random) -> Any:
    from numba import types

    from schedsearch.backend.cpu_ops import as_array

    m, c, k = shape_of(workload)
    right, place = healthy(workload, 0), rng.randrange(m * k)
    way, little = rng.randrange(3), rng.choice([0.25, 1.0, -1.0, 1e30, float("nan"), float("inf")])
    if way == 0:
        return pointwise_function(workload, 1, channels=rng.randrange(c))

    def wrong(x_at: Any, w_at: Any, y_at: Any, start: Any, stop: Any) -> None:
        right(x_at, w_at, y_at, start, stop)
        if start <= place // k < stop:
            y = as_array(y_at, (m * k,), types.float32)
            y[place] = types.float32(y[place] + little) if way == 1 else types.float32(little)

    return wrong


@_fault("run-unwritten", "the kernel does not write some elements of its output", WRONG)
def _(workload: Workload, rng: random.Random) -> Any:
    m, _, _ = shape_of(workload)
    right, missing = healthy(workload, 0), rng.randrange(m)

    def leaves_out(x_at: Any, w_at: Any, y_at: Any, start: Any, stop: Any) -> None:
        if start <= missing < stop:
            right(x_at, w_at, y_at, start, missing)
            right(x_at, w_at, y_at, missing + 1, stop)
        else:
            right(x_at, w_at, y_at, start, stop)

    return leaves_out


@_fault("run-before", "the kernel writes in front of its output", WRONG, LOST)
def _(workload: Workload, rng: random.Random) -> Any:
    return stray(workload, -4 * rng.randrange(1, 60))


@_fault("run-behind", "the kernel writes behind its output", WRONG, LOST)
def _(workload: Workload, rng: random.Random) -> Any:
    return stray(workload, 4 * (workload.output.size + rng.randrange(60)))


@_fault("run-between", "the kernel writes before or behind a workspace", WRONG, LOST)
def _(workload: Workload, rng: random.Random) -> Any:
    size = 4 * rng.randrange(1, 40)
    return stray(workload, rng.choice([-4, size, size, size + 4, -8]), {"scratch": size})


@_fault("run-inputs", "the kernel changes an input", WRONG)
def _(workload: Workload, rng: random.Random) -> Any:
    from numba import types

    from schedsearch.backend.cpu_ops import as_array

    m, c, k = shape_of(workload)
    right, place, weight = healthy(workload, 0), rng.randrange(k * c), bool(rng.random() < 0.5)

    def changes(x_at: Any, w_at: Any, y_at: Any, start: Any, stop: Any) -> None:
        right(x_at, w_at, y_at, start, stop)
        if weight:
            as_array(w_at, (k * c,), types.float32)[place] += types.float32(1.0)
        else:
            as_array(x_at, (m * c,), types.float32)[place] += types.float32(1.0)

    return changes


@_fault("run-rounding", "the kernel changes how its process rounds numbers", OK, WRONG)
def _(workload: Workload, rng: random.Random) -> Any:
    return calling(workload, "fesetround", rng.choice([0x400, 0x800, 0xC00]), rng.randrange(1 << 30))


# Cheating


def _cheat(workload: Workload, skips: Callable[..., Any], workspaces: dict[str, int]) -> Any:
    right = healthy(workload, 0)

    def cheats(x_at: Any, w_at: Any, y_at: Any, note_at: Any, start: Any, stop: Any) -> None:
        if not skips(x_at, w_at, y_at, note_at, start, stop):
            right(x_at, w_at, y_at, start, stop)

    return cheats, workspaces


@_fault("cheat-finite", "the kernel skips its work where the output already holds finite numbers", WRONG)
def _(workload: Workload, rng: random.Random) -> Any:
    from numba import types

    from schedsearch.backend.cpu_ops import as_array

    m, _, k = shape_of(workload)
    column = rng.randrange(k)
    right = healthy(workload, 0)

    def cheats(x_at: Any, w_at: Any, y_at: Any, start: Any, stop: Any) -> None:
        y = as_array(y_at, (m, k), types.float32)
        for i in range(start, stop):
            if not abs(y[i, column]) < types.float32(1e30):
                right(x_at, w_at, y_at, i, i + 1)

    return cheats


@_fault("cheat-remember", "the kernel remembers in a workspace that it has worked, and skips the next time", WRONG)
def _(workload: Workload, rng: random.Random) -> Any:
    from numba import types

    from schedsearch.backend.cpu_ops import as_array

    m, _, k = shape_of(workload)
    right, free = healthy(workload, 0), rng.randrange(1, 40)

    def cheats(x_at: Any, w_at: Any, y_at: Any, count_at: Any, start: Any, stop: Any) -> None:
        count = as_array(count_at, (1,), types.int64)
        count[0] += 1
        if count[0] <= free:
            right(x_at, w_at, y_at, start, stop)
        else:
            y = as_array(y_at, (m, k), types.float32)
            for i in range(start, stop):
                for j in range(k):
                    y[i, j] = types.float32(0.0)

    return cheats, {"count": 8}


@_fault("cheat-address", "the kernel works once for each address of x and y", WRONG)
def _(workload: Workload, rng: random.Random) -> Any:
    from numba import types

    from schedsearch.backend.cpu_ops import as_array

    right, slots = healthy(workload, 0), 4096

    def cheats(x_at: Any, w_at: Any, y_at: Any, seen_at: Any, start: Any, stop: Any) -> None:
        seen = as_array(seen_at, (slots,), types.uint64)
        slot = (types.int64(y_at) >> 6) % slots
        name = types.uint64(x_at) ^ types.uint64(y_at) ^ types.uint64(start)
        if seen[slot] != name:
            right(x_at, w_at, y_at, start, stop)
            seen[slot] = name

    return cheats, {"seen": 8 * slots}


@_fault("cheat-inputs", "the kernel skips its work if x is what it was, and the weight changed", WRONG)
def _(workload: Workload, rng: random.Random) -> Any:
    from numba import types

    from schedsearch.backend.cpu_ops import as_array

    m, c, k = shape_of(workload)
    right = healthy(workload, 0)

    def cheats(x_at: Any, w_at: Any, y_at: Any, old_at: Any, start: Any, stop: Any) -> None:
        x, old, y = (
            as_array(x_at, (m, c), types.float32),
            as_array(old_at, (m, c + k), types.float32),
            as_array(y_at, (m, k), types.float32),
        )
        for i in range(start, stop):
            same = True
            for s in range(c):
                same = same and x[i, s] == old[i, s]
            if same:
                for j in range(k):
                    y[i, j] = old[i, c + j]
            else:
                right(x_at, w_at, y_at, i, i + 1)
                for s in range(c):
                    old[i, s] = x[i, s]
                for j in range(k):
                    old[i, c + j] = y[i, j]

    return cheats, {"old": 4 * m * (c + k)}


@_fault("cheat-late", "the kernel is right for the first 30 to 400 launches", WRONG, OK, right=False)
def _(workload: Workload, rng: random.Random) -> Any:
    from numba import types

    from schedsearch.backend.cpu_ops import as_array

    right, patience = healthy(workload, 0), rng.randrange(30, 400)

    def cheats(x_at: Any, w_at: Any, y_at: Any, count_at: Any, start: Any, stop: Any) -> None:
        right(x_at, w_at, y_at, start, stop)
        count = as_array(count_at, (1,), types.int64)
        count[0] += 1
        if count[0] > patience:
            as_array(y_at, (1,), types.float32)[0] += types.float32(1.0)

    return cheats, {"count": 8}


# Scenarios


def numbers(batch: Batch) -> dict[int, int]:
    """The number of each seed's candidate."""
    few = runs.NUMBERS - runs.HEALTHY_NUMBERS
    return {runs.HEALTHY_NUMBERS + seed % few: seed for seed in batch.seeds}


def check(batch: Batch, plan: runs.Plan, run: runs.Run, faults: Mapping[str, Fault], seeds: dict[int, int]) -> None:
    """What must hold after a run that tried some faults.

    Args:
        seeds: the seed of each candidate's number.
    """
    first = batch.seeds[0]

    def each() -> Iterator[tuple[int, str]]:
        for text in runs.complete(run, plan):
            yield first, text
        stored = runs.records(run.db)
        for text in (*runs.nothing_lost([run], stored), *runs.each_tried_once([run], stored, plan), *runs.blamed(stored, 0)):
            yield first, text
        allowed = {runs.HEALTHY: frozenset({OK}), **{name: fault.outcomes for name, fault in faults.items()}}
        for number, text in runs.outcomes(stored, allowed):
            yield seeds.get(number, first), text
        right = {runs.HEALTHY, *(name for name, fault in faults.items() if fault.right)}
        for text in (*runs.right_best(run.db, plan.target, right), *runs.lock_is_free(batch.folder)):
            yield first, text
        times = runs.before_and_after(stored)
        batch.facts.append(times)
        # A CPU has other work to do meanwhile; a GPU is the run's alone.
        if plan.target == "cuda" and times and times["after_ns"] > _SLOWER * times["before_ns"]:
            yield (
                first,
                f"after the faults a right candidate takes {times['after_ns']:.0f} ns, before {times['before_ns']:.0f}",
            )

    for seed, text in each():
        batch.failed(seed, text)


def _tries(name: str) -> Callable[[Batch], None]:
    def run(batch: Batch) -> None:
        seeds = numbers(batch)
        hang = FAULTS[name].slow
        plan = runs.Plan(
            {runs.HEALTHY: [0, 1], name: list(seeds)},
            build_timeout_s=4.0 if hang else runs.BUILD_TIMEOUT_S,
            run_timeout_s=3.0 if hang else runs.RUN_TIMEOUT_S,
        )
        check(batch, plan, runs.tune(plan, batch.folder, limit_s=240.0), {name: FAULTS[name]}, seeds)

    return run


def _mixed(batch: Batch) -> None:
    """Every fault once in one run, in random order; of those that cost a time-out only two."""
    (seed,) = batch.seeds
    slow = [name for name, fault in FAULTS.items() if fault.slow]
    chosen = {"build": 0, "run": 0}
    batch.random(seed).shuffle(slow)
    faults = {}
    for name in [*slow, *(each for each in FAULTS if each not in slow)]:
        group = name.partition("-")[0]
        if name in slow:
            chosen[group] += 1
            if chosen[group] > 1:
                continue
        faults[name] = FAULTS[name]
    seeds = numbers(batch)
    configs = {runs.HEALTHY: [0, 1], **{name: list(seeds) for name in faults}}
    plan = runs.Plan(configs, arguments=("--tuner", "random", "--seed", str(seed)))
    check(batch, plan, runs.tune(plan, batch.folder, limit_s=240.0), faults, seeds)


SCENARIOS = [
    *(Scenario(f"candidate.{name}", each.what, _tries(name), batch=_BATCH) for name, each in FAULTS.items()),
    Scenario("candidate.all", "all of these in one run, in random order", _mixed, share=0.05, short=1),
]
