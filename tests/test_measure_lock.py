"""One run per device: a second run waits and names the first. Nothing outlives a killed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from child_environment import child_environment

from schedsearch.device.detect import detect
from schedsearch.errors import DeviceBusyError, DeviceError
from schedsearch.measure import DeviceLock
from schedsearch.processes.process import ChildDiedError, ChildProcess, call_in_children
from schedsearch.target import PRESETS

CPU = detect("cpu")
TESTS = Path(__file__).parent

HOLDER = """
import sys, time
from pathlib import Path
from schedsearch.measure import DeviceLock
from schedsearch.device.detect import detect
lock = DeviceLock(detect("cpu"), folder=Path(sys.argv[1]))
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


def hold(folder: Path, seconds: float) -> subprocess.Popen[str]:
    """A process that holds the lock for a while."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder), str(seconds)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_run_names_the_holder_of_the_device(tmp_path: Path) -> None:
    with hold(tmp_path, 60) as holder:
        with pytest.raises(DeviceBusyError) as caught:
            DeviceLock(CPU, wait=False, folder=tmp_path)
        holder.kill()
    assert f"process {holder.pid}" in str(caught.value) and CPU.name in str(caught.value)
    assert f"process {holder.pid}" in caught.value.holder and CPU.name not in caught.value.holder
    assert caught.value.exit_code == 3


def test_a_second_run_waits_and_says_for_whom_once(tmp_path: Path) -> None:
    said: list[str] = []
    with hold(tmp_path, 1.0) as holder:
        began = time.monotonic()
        DeviceLock(CPU, on_wait=said.append, folder=tmp_path).close()
        assert time.monotonic() - began > 0.3
    assert len(said) == 1 and f"process {holder.pid}" in said[0]


def test_a_killed_holder_frees_the_device(tmp_path: Path) -> None:
    with hold(tmp_path, 60) as holder:
        holder.send_signal(signal.SIGKILL)
    DeviceLock(CPU, wait=False, folder=tmp_path).close()


def test_a_refused_run_leaves_the_holders_name(tmp_path: Path) -> None:
    with hold(tmp_path, 60) as holder:
        for _ in range(2):
            with pytest.raises(DeviceBusyError, match=f"process {holder.pid}"):
                DeviceLock(CPU, wait=False, folder=tmp_path)
        holder.kill()


def test_devices_are_told_apart_by_uuid(tmp_path: Path) -> None:
    from dataclasses import replace

    first, second = (replace(PRESETS["h200"], uuid=f"GPU-{n}") for n in (1, 2))
    locks = [DeviceLock(target, wait=False, folder=tmp_path) for target in (CPU, first, second)]
    for lock in locks:
        lock.close()


def put_link(path: Path) -> None:
    victim = path.with_name("victim")
    victim.touch(0o600)
    path.hardlink_to(victim)


def put_symlink(path: Path) -> None:
    victim = path.with_name("victim")
    victim.touch(0o600)
    path.symlink_to(victim)


@pytest.mark.parametrize(
    ("put", "said"),
    [
        (put_link, "another name, too"),
        (put_symlink, "cannot be opened"),
        (os.mkfifo, "not a regular file"),
        (os.mkdir, "not a regular file"),
        (lambda path: path.write_text("a letter\n"), "something else"),
        (lambda path: path.write_text("1\n" + "x" * 10_000), "something else"),
        (lambda path: path.write_text("\u00b2\n"), "something else"),
    ],
    ids=["hard link", "symbolic link", "fifo", "folder", "letter", "long", "digit"],
)
def test_something_else_at_the_place_of_the_lock_is_left_alone(
    put: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "schedsearch-cpu.lock"
    put(path)
    before = [(each.name, each.lstat().st_mode, each.lstat().st_size) for each in sorted(tmp_path.iterdir())]
    with pytest.raises(DeviceError, match=said):
        DeviceLock(CPU, wait=False, folder=tmp_path)
    assert [(each.name, each.lstat().st_mode, each.lstat().st_size) for each in sorted(tmp_path.iterdir())] == before


def test_the_holders_command_cannot_write_to_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "schedsearch-cpu.lock"
    with hold(tmp_path, 60) as holder:
        path.write_text("7\n\x1b[2Jall is well\n\u202e" + 1000 * "y" + "\n")
        with pytest.raises(DeviceBusyError) as caught:
            DeviceLock(CPU, wait=False, folder=tmp_path)
        holder.kill()
    text = str(caught.value)
    assert text.isprintable() and len(text) < 400
    assert r"process 7 (\x1b[2Jall is well\n\u202eyyy" in text


def test_a_lock_file_that_is_removed_while_a_run_waits_is_made_again(tmp_path: Path) -> None:
    """Otherwise the waiting run would lock a file that no other run can find."""
    path = tmp_path / "schedsearch-cpu.lock"
    with hold(tmp_path, 60) as holder:

        def replace_holder(told: str) -> None:
            path.unlink()
            holder.kill()

        lock = DeviceLock(CPU, on_wait=replace_holder, folder=tmp_path)
    with pytest.raises(DeviceBusyError, match="this process"):
        DeviceLock(CPU, wait=False, folder=tmp_path)
    lock.close()


def test_the_command_of_a_run_may_have_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tune", "\udcff\0\n"])
    DeviceLock(CPU, folder=tmp_path).close()


def alive(pid: int) -> bool:
    """Whether a process still runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int], within_s: float = 30.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(map(alive, pids)):
            return True
        time.sleep(0.05)
    return False


PARENT = """
import sys, threading, time
import faulty_templates as faulty
from schedsearch.backend import compile_source
from schedsearch.measure import Builder, Built, Candidate, Runner
from schedsearch.device.detect import detect
from schedsearch.config import Config
from schedsearch.workload import Workload

CPU = detect("cpu")
workload = Workload.conv2d(n=1, h=4, w=4, c=8, k=8, r=1, s=1, dtype="float32")
result = compile_source(faulty.EndlessKernel().kernel(workload, CPU, Config(step=1)), CPU)
builder = Builder(CPU, workers=1)
builder.submit(Candidate(workload, faulty.EndlessCompile(), Config(step=1)))
runner = Runner(CPU, timeout_s=1000)
builder.poll(3.0)
print(runner.pid, *(worker.process.pid for worker in builder._pool), flush=True)
runner.measure(workload, Built(result.artifact, result.resources, "", 0.0))
"""


def test_killing_the_parent_ends_a_hanging_runner_and_a_hanging_compiler(tmp_path: Path) -> None:
    environment = child_environment(TMPDIR=str(tmp_path))
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(map(alive, pids))
    time.sleep(2.0)  # the candidate has begun to run
    parent.kill()
    parent.wait()
    assert gone(pids)
    parent.stdout.close()


def test_a_script_without_a_main_guard_may_start_children(tmp_path: Path) -> None:
    """Children do not import the caller's main module."""
    script = tmp_path / "script.py"
    script.write_text(
        "print('start')\n"
        "from schedsearch.processes.process import ChildProcess\n"
        "child = ChildProcess('test_measure_lock:echo')\n"
        "child.send('hello')\n"
        "print(child.receive(30))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=child_environment(), timeout=240)
    assert done.stdout == "start\nhello\n", done.stderr


def echo(conn, *_):  # type: ignore[no-untyped-def]
    while True:
        conn.send(conn.recv())


def speak_and_die(conn, *_):  # type: ignore[no-untyped-def]
    print("these were my last words", file=sys.stderr)
    os._exit(7)


def test_a_dead_child_says_how_it_died() -> None:
    child = ChildProcess("test_measure_lock:speak_and_die")
    with pytest.raises(ChildDiedError, match=r"(?s)status 7.*these were my last words"):
        child.receive(30)
    child.kill()
    child.kill()  # a second release is not an error


@pytest.mark.parametrize("jobs", [1, 2, 9])
def test_calls_in_children_come_back_with_their_numbers(jobs: int) -> None:
    assert dict(call_in_children("operator:sub", [(3 * i, i) for i in range(5)], jobs)) == {i: 2 * i for i in range(5)}


def test_a_call_that_raises_in_a_child_is_an_error_here() -> None:
    with pytest.raises(ChildDiedError, match="ZeroDivisionError"):
        list(call_in_children("operator:truediv", [(1, 1), (1, 0)], 2))


def test_a_silent_child_is_a_timeout_and_stays_alive() -> None:
    child = ChildProcess("test_measure_lock:echo")
    with pytest.raises(TimeoutError):
        child.receive(0.2)
    child.send(1)
    assert child.receive(30) == 1
    child.kill()
    assert gone([child.pid])
