"""Faults of the template's code on a CPU target, which runs in a builder."""

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
from pathlib import Path
from typing import Any

from faulty_templates import pointwise_function

from schedsearch.measurement import Outcome
from schedsearch.workload import Workload

from .fault import COMPILE_ERROR, COMPILE_TIMEOUT, LOST, OK, Fault, fault, healthy

FAULTS: dict[str, Fault] = {}
_fault = functools.partial(fault, FAULTS)


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
        os.kill(
            os.getpid(), rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1])
        )  # Python ignores SIGPIPE
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
