"""Every change of the process that could harm the next candidate is noticed."""

from __future__ import annotations

import platform
import subprocess
import sys

from child_environment import child_environment

SCRIPT = """
import ctypes, gc, os, resource, signal, subprocess, sys, threading, time
from schedsearch.processes.canary import changes, process_state

libm = ctypes.CDLL("libm.so.6")
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
attempts = {
    "nothing": lambda: sum(range(1000)),
    "the working folder": lambda: os.chdir("/"),
    "environment variables": lambda: os.environ.update(ANYTHING="1"),
    "the umask": lambda: os.umask(0o123),
    "the cores it may use": lambda: os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]),
    "its priority": lambda: os.nice(1),
    "its resource limits": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard)),
    "signal handlers": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "the mask of signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]),
    "timers": lambda: signal.alarm(1000),
    "how floats are rounded": lambda: libm.fesetround(0x400),  # downwards on x86
    "the recursion limit": lambda: sys.setrecursionlimit(777),
    "garbage collection": gc.disable,
    "functions of Python's modules": lambda: setattr(time, "perf_counter", lambda: 0.0),
    "trace functions": lambda: sys.setprofile(lambda *args: None),
    "its threads": lambda: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start(),
    "its child processes": lambda: subprocess.Popen(["sleep", "30"]),
    "the standard files": lambda: os.dup2(1, 0),
}
for name, attempt in attempts.items():
    before = process_state()
    attempt()
    print(name, changes(before), sep=" -> ", flush=True)
    sys.setprofile(None)
os.killpg(0, signal.SIGKILL)
"""


def test_every_change_is_noticed_and_named() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=child_environment(), start_new_session=True
    )
    noticed = dict(line.split(" -> ") for line in done.stdout.splitlines())
    assert len(noticed) == 18, done.stderr
    assert noticed.pop("nothing") == ""
    for name, changed in noticed.items():
        if name == "the cores it may use" and not changed:
            continue  # it had only one
        if name == "how floats are rounded" and platform.machine() != "x86_64":
            continue  # the number means something else there
        assert changed == name
