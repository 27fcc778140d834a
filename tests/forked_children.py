"""Child processes of tests are forked from one that has imported the compilers: to import them takes longer than most of
what tests ask a child to do.

A child begins as `schedsearch.processes.process` starts it: the leader of a session, with the standard streams, environment,
folder and sys.path that it would have had, and killed when the tests end. It is a child of the tests, not of the process
that it is a copy of (CLONE_PARENT in clone(2)). That process has a single thread, has opened no device, and has seen nothing
of what tests change. Of its environment /proc/PID/environ shows the mark only (`schedsearch.processes.sessions`). Tests of
how a process starts take the fixture `own_processes`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import pkgutil
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from schedsearch.processes.sessions import MARK

_CLONE_PARENT = 0x8000  # linux/sched.h
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_LARGEST_REQUEST_BYTES = 1 << 17
_PLACE, _PLACE_BYTES = "PLACE_OF_THE_MARK", 100  # a variable of the copied process, and its length with its name
# A child reads these itself when it needs them; a module may have read any other while it was imported.
_READ_LATER = (MARK, "SCHEDSEARCH_BUILD_CACHE", "SCHEDSEARCH_STATE_DIR", "SCHEDSEARCH_TUNED_DIR")
_OF_NO_MODULE = ("CUDA_VISIBLE_DEVICES", "HOME", "PYTEST_CURRENT_TEST", "TMPDIR")

Start = Callable[[int, IO[bytes], Mapping[str, str]], "subprocess.Popen[bytes]"]


class _Forked(subprocess.Popen[bytes]):
    """A child that another process has made for this one, to wait for."""

    def __init__(self, pid: int) -> None:
        self.pid, self.args, self.returncode = pid, [], None
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._waitpid_lock = True, threading.Lock()


def _imported_with(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in _READ_LATER + _OF_NO_MODULE}


class ForkedChildren:
    """Stands in for `schedsearch.processes.process._start`.

    If a test changes variables of the environment that a module may read while it is imported, its children are started.

    Args:
        start: how to start a child.
    """

    def __init__(self, start: Start) -> None:
        self._start, self._environment = start, _imported_with(os.environ)
        self._copied: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def __call__(self, fd: int, stderr: IO[bytes], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """In the thread that starts all children, because they end with it."""
        env = {**os.environ, **env}
        if _imported_with(env) != self._environment or os.uname().machine not in _SYS_CLONE:
            return self._start(fd, stderr, env)
        if self._requests is None:
            self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._copied = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, _PLACE: "_" * (_PLACE_BYTES - len(_PLACE) - 1)},
                start_new_session=True,
            )
            theirs.close()
        path = [entry or str(Path.cwd()) for entry in sys.path]
        request = pickle.dumps((env, path, str(Path.cwd()), os.getpid()))
        socket.send_fds(self._requests, [request], [fd, stderr.fileno()])
        answer = self._requests.recv(64)
        if not answer:
            raise OSError("the process that children of tests are copies of has ended")
        return _Forked(int(answer))

    def close(self) -> None:
        if self._requests is not None and self._copied is not None:
            self._requests.close()
            self._copied.wait()


# ---- the process that is copied


def _import_compilers() -> None:
    from schedsearch import templates
    from schedsearch.backend.front_ends import front_end
    from schedsearch.errors import SchedsearchError

    for name in ("numba", "schedsearch.measure.run_worker", "schedsearch.processes.build_worker"):
        importlib.import_module(name)
    with contextlib.suppress(ImportError, SchedsearchError):  # this environment is without a compiler for GPUs
        front_end()
    for found in pkgutil.walk_packages(templates.__path__, f"{templates.__name__}."):
        importlib.import_module(found.name)


def _compile_something() -> None:
    """The first kernel of a process takes a second longer than the others."""
    import schedsearch
    from schedsearch.backend import compile_source
    from schedsearch.device.detect import detect
    from schedsearch.errors import SchedsearchError
    from schedsearch.target import PRESETS
    from schedsearch.template import load_reference

    workload = schedsearch.layout_transform(n=1, c=1, h=1, w=1, layout="NCHW", to="NHWC", dtype="float32")
    for target in (detect("cpu"), PRESETS["h200"]):
        with contextlib.suppress(ImportError, SchedsearchError):
            compile_source(load_reference("layout_transform").kernel(workload, target), target)


def _fork() -> int:
    """As os.fork, but the new process is a child of this one's parent."""
    libc = ctypes.PyDLL(None)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = libc.syscall(_SYS_CLONE[os.uname().machine], _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return int(pid)


def _show_mark(mark: str) -> None:
    """Writes the mark where the kernel looks for the environment that this process began with."""
    begin = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47])  # env_start in proc_pid_stat(5)
    place = begin + Path("/proc/self/environ").read_bytes().index(f"{_PLACE}=".encode())
    ctypes.memmove(place, f"{MARK}={mark}".encode().ljust(_PLACE_BYTES, b"\0"), _PLACE_BYTES)


def _run(fd: int, stderr: int, request: tuple[dict[str, str], list[str], str, int]) -> None:
    """In the child."""
    env, path, folder, parent = request
    os.setsid()
    os.dup2(stderr, 2)
    os.close(stderr)
    _show_mark(env[MARK])
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.path[:] = path
    importlib.invalidate_caches()
    from schedsearch.processes.process import run_child

    run_child(fd, parent)


def _serve(requests: socket.socket) -> None:
    _import_compilers()
    _compile_something()
    gc.collect()
    gc.freeze()
    while True:
        request, (fd, stderr), _, _ = socket.recv_fds(requests, _LARGEST_REQUEST_BYTES, 2)
        pid = _fork()
        if pid == 0:
            try:
                requests.close()
                _run(fd, stderr, pickle.loads(request))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        os.close(fd)
        os.close(stderr)
        requests.send(str(pid).encode())


if __name__ == "__main__":
    with contextlib.suppress(ValueError):  # the tests have ended
        _serve(socket.socket(fileno=int(sys.argv[1])))
