"""Candidates that attack the process they run in, as configurations of one template. All compute right results otherwise.

Each value of the knob `attack` names a function below. Those in `BUILDER_ATTACKS` run in the process of a builder, before it
makes the kernel. The kernel calls those in `KERNEL_ATTACKS`, in the process of the runner.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import faulty_templates as faulty

from schedsearch.backend import CompileError
from schedsearch.config import Config
from schedsearch.launch import Grid
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource
from schedsearch.workload import Workload

GRANDCHILDREN = "HOSTILE_GRANDCHILDREN"
"""An environment variable: the file to which attacks write the ids of processes that they start."""


class _SilentError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text for you")


class _SilentCompileError(CompileError):
    def __str__(self) -> str:
        raise SystemExit(0)


class _UnpicklableError(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("stays here")


def _raise(error: BaseException) -> Callable[[], None]:
    def attack() -> None:
        raise error

    return attack


def _socket_fd() -> int:
    """The descriptor of the connection to the run."""
    for fd in range(3, 100):
        with contextlib.suppress(OSError):
            if str(Path(f"/proc/self/fd/{fd}").readlink()).startswith("socket:"):
                return fd
    raise AssertionError("this process has no socket")


def _write_to_socket(data: bytes) -> Callable[[], None]:
    def attack() -> None:
        os.write(_socket_fd(), data)

    return attack


def _return_twice() -> None:
    os.fork()


def _leave_grandchildren() -> None:
    plain = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
    apart = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL, start_new_session=True)
    with Path(os.environ[GRANDCHILDREN]).open("a") as file:
        file.write(f"{plain.pid}\n{apart.pid}\n")


def _exec() -> None:
    os.execv("/bin/sleep", ["sleep", "1000"])


def _print_much() -> None:
    for _ in range(100):
        sys.stderr.write("x" * (1 << 20))
    sys.stderr.flush()
    os.write(1, b"x" * (1 << 20))


def _lower_limits() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))


def _close_socket_and_live() -> None:
    os.close(_socket_fd())
    time.sleep(1000)


def _ignore_signals_and_hang() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(1000)


def _start_thread() -> None:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()


BUILDER_ATTACKS: dict[str, Callable[[], object]] = {
    "surrogate": _raise(ValueError("lone \udc80 and NUL \0 in a message")),
    "huge text": _raise(ValueError("y" * (52 << 20))),
    "no text": _raise(_SilentError()),
    "no compiler text": _raise(_SilentCompileError()),
    "unpicklable error": _raise(_UnpicklableError()),
    "SystemExit": _raise(SystemExit(0)),
    "KeyboardInterrupt": _raise(KeyboardInterrupt()),
    "GeneratorExit": _raise(GeneratorExit()),
    "fork": _return_twice,
    "exit": lambda: os._exit(0),
    "exec": _exec,
    "garbage": _write_to_socket(b"garbage on the wire " * 10),
    "old length": _write_to_socket(b"\x7f\xff\xff\xff" + b"\0" * 60),
    "close": lambda: os.close(_socket_fd()),
    "close everything": lambda: os.closerange(0, 256),
    "close and live": _close_socket_and_live,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "no signals": _ignore_signals_and_hang,
    "print": _print_much,
    "recursion limit": lambda: sys.setrecursionlimit(60),
    "folder": lambda: os.chdir("/"),
    "limits": _lower_limits,
    "alarm": lambda: signal.alarm(1),
    "thread": _start_thread,
    "grandchildren": _leave_grandchildren,
    "unpicklable result": lambda: None,
    "nonsense result": lambda: None,
}


# A function of libc and its arguments
KERNEL_ATTACKS: dict[str, tuple[str, tuple[int, ...]]] = {
    "kernel forks": ("fork", ()),
    "kernel exits": ("_exit", (0,)),
    "kernel rounds up": ("fesetround", (0x800,)),  # FE_UPWARD on x86
    "kernel closes": ("close_range", (3, 255, 0)),
    "kernel stops": ("raise", (int(signal.SIGSTOP),)),
    "kernel sets alarm": ("alarm", (1,)),
}


ATTACKS = ("none", *BUILDER_ATTACKS, *KERNEL_ATTACKS, "after")


class Hostile(faulty.PointwiseCpu):
    """`attack` "none" is harmless; "after" is so too, and is there to be measured last."""

    name = "hostile"

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        return ConfigSpace([Knob("attack", ATTACKS)])

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        return Config(attack="none")

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        attack = config["attack"]
        if attack in BUILDER_ATTACKS:
            BUILDER_ATTACKS[attack]()
        # Each configuration has code of its own, so that none is the duplicate of another one.
        source = self._source(workload, _function(workload, attack), {"unused": 8 * (1 + ATTACKS.index(attack))})
        if attack == "unpicklable result":
            return replace(source, workspaces=_Unpicklable(source.workspaces))
        if attack == "nonsense result":
            (step,) = source.steps
            return replace(source, steps=(replace(step, grid=Grid(str(step.grid.work_items))),))  # type: ignore[arg-type]
        return source


class _Unpicklable(dict[str, int]):
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SystemExit("stays here")


def _function(workload: Workload, attack: str) -> Any:
    right = faulty.pointwise_function(workload, 1)
    if attack not in KERNEL_ATTACKS:

        def harmless(x_at: Any, w_at: Any, y_at: Any, unused_at: Any, start: Any, stop: Any) -> None:
            right(x_at, w_at, y_at, start, stop)

        return harmless
    from numba import types

    name, arguments = KERNEL_ATTACKS[attack]
    call = types.ExternalFunction(name, types.int32(*[types.int32] * len(arguments)))

    def attacking(x_at: Any, w_at: Any, y_at: Any, unused_at: Any, start: Any, stop: Any) -> None:
        right(x_at, w_at, y_at, start, stop)
        call(*arguments)

    return attacking
