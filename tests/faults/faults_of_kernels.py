"""Faults of kernels on a CPU, which run in the runner."""

from __future__ import annotations

import functools
import random
import signal
from typing import Any

from faulty_templates import pointwise_function, shape_of

from schedsearch.workload import Workload

from .fault import LAUNCH_ERROR, LOST, OK, RUN_TIMEOUT, WRONG, Fault, fault, healthy

FAULTS: dict[str, Fault] = {}
_fault = functools.partial(fault, FAULTS)


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


@_fault("run-fork", "the kernel forks, and both processes go on", OK, LOST, RUN_TIMEOUT)
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


# Cheating: the kernel skips work when it thinks that nobody looks.


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
