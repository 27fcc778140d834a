"""Nothing outlives a run: no process that a candidate started, and no folder of a run that was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from child_environment import child_environment
from test_measure_lock import gone

from schedsearch.processes.process import ChildDiedError, ChildProcess
from schedsearch.processes.scratch import ScratchFolder

SLEEP = ["sleep", "1000"]


def leave_processes(conn, *how):  # type: ignore[no-untyped-def]
    """A child that starts a process in its group, one in its session, one in a session of its own, and then does `how`."""
    pids = [subprocess.Popen(SLEEP).pid, subprocess.Popen(SLEEP, process_group=0).pid]
    conn.send([*pids, subprocess.Popen(SLEEP, start_new_session=True).pid])
    if "exit" in how:
        os._exit(0)
    conn.recv()


@pytest.mark.parametrize("how", ["exit", "wait"])
def test_what_a_child_started_ends_with_it(how: str) -> None:
    child = ChildProcess("test_measure_leftovers:leave_processes", (how,))
    pids = child.receive(30)
    assert len(pids) == 3
    if how == "exit":
        with pytest.raises(ChildDiedError, match="exited with status 0"):
            child.receive(30)
    child.kill()
    assert gone([child.pid, *pids], within_s=5)


def test_closing_a_childs_connection_is_a_normal_end_for_it_and_ends_what_it_started() -> None:
    child = ChildProcess("test_measure_leftovers:leave_processes")
    pids = child.receive(30)
    child.send("go on")
    with pytest.raises(ChildDiedError, match="exited with status 0"):
        child.receive(30)
    child.kill()
    assert gone(pids, within_s=5)


PARENT = """
import time
from schedsearch.processes.process import ChildProcess
child = ChildProcess("test_measure_leftovers:leave_processes")
print(child.pid, *child.receive(60), flush=True)
time.sleep(1000)
"""


def test_what_candidates_started_ends_with_a_run_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=child_environment()) as run:
        assert run.stdout is not None
        pids = [int(word) for word in run.stdout.readline().split()]
        others = [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
        run.kill()
    assert len(pids) == 4
    assert gone([*pids, *others], within_s=30)


def test_a_run_keeps_no_process_after_its_last_child() -> None:
    child = ChildProcess("test_measure_lock:echo")
    child.kill()
    assert "-S" not in [word for pid in _children() for word in Path(f"/proc/{pid}/cmdline").read_text().split("\0")]


def _children() -> list[str]:
    return [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


FOLDER = """
import time
from schedsearch.processes.scratch import ScratchFolder
print(ScratchFolder("builds").path, flush=True)
time.sleep(1000)
"""


def test_folders_of_killed_runs_are_removed_and_those_of_living_ones_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = child_environment(TMPDIR=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", FOLDER], stdout=subprocess.PIPE, text=True, env=environment) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        (theirs / "piece").write_text("x")
        mine = ScratchFolder("builds")
        assert theirs.is_dir() and mine.path.is_dir()
        other.kill()
    again = ScratchFolder("builds")
    assert not theirs.exists(), "its owner was killed"
    assert mine.path.is_dir(), "its owner is this process"
    mine.close()
    again.close()
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_abandoned_folder_of_this_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "owner.lock").touch()
    (tmp_path / "schedsearch-builds-the_link").symlink_to(precious)
    (tmp_path / "schedsearch-builds-the_file").write_text("a file")
    (tmp_path / "schedsearch-builds-the_newf").mkdir()  # its owner may be just about to lock it
    os.mkfifo(tmp_path / "schedsearch-builds-the_pipe")
    (tmp_path / "schedsearch-other").mkdir()
    for name, lock in (("settings", "owner.lock"), ("my_thesi", "thesis.tar"), ("my_notes", "owner.lock.new")):
        folder = tmp_path / f"schedsearch-builds-{name}"
        folder.mkdir()
        (folder / lock).write_text("a file of the user")
        os.utime(folder, (time.time() - 7200, time.time() - 7200))
    (tmp_path / "schedsearch-builds-2026-11-28").mkdir()
    old = tmp_path / "schedsearch-builds-abcdefgh"
    old.mkdir()
    (old / "owner.lock.new").touch()  # its process was killed while it made the folder
    for path in (old, tmp_path / "schedsearch-builds-2026-11-28"):
        os.utime(path, (time.time() - 7200, time.time() - 7200))
    before = {path.name for path in tmp_path.iterdir()} - {old.name}
    ScratchFolder("builds").close()
    assert {path.name for path in tmp_path.iterdir()} == before
    assert (precious / "owner.lock").exists()
    assert sorted(path.name for path in tmp_path.glob("schedsearch-builds-*/*")) == [
        "owner.lock", "owner.lock", "owner.lock.new", "thesis.tar"
    ]  # fmt: skip


def test_a_folder_that_cannot_be_owned_is_not_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process may have no more descriptors than it takes to make a folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(OSError(24, "Too many open files")))
    with pytest.raises(OSError, match="Too many open files"):
        ScratchFolder("builds")
    assert list(tmp_path.iterdir()) == []
