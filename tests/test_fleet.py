"""Runs on a fleet of real Dask processes: they share the work, may be killed, and cost no result."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fleet_support import Cluster, cluster, free_port, make_certificates

from schedsearch.errors import AwayError, DatabaseError, DeviceBusyError, DeviceError, Interrupted, LostError
from schedsearch.measurement import COLD_GRAPH, Measurement, Outcome, Record
from schedsearch.progress import shown
from schedsearch.records.store import Store
from schedsearch.session import tune
from schedsearch.session.observer import Observer, Trial
from schedsearch.target import PRESETS
from schedsearch.workload import Workload

pytest.importorskip("distributed", reason="needs Dask, which `make test-fleet` installs")

pytestmark = [pytest.mark.fleet, pytest.mark.xdist_group("device"), pytest.mark.timeout(1800)]

SMALL = Workload.conv2d(n=1, h=7, w=7, c=16, k=16, r=1, s=1, dtype="float32")
OTHER = Workload.conv2d(n=1, h=7, w=7, c=16, k=32, r=1, s=1, dtype="float32")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A worker that has the whole CPU, and one that only builds."""
    with cluster(tmp_path_factory.mktemp("fleet"), ("--builds", "2"), ("--builds", "1", "--only-build")) as made:
        wait_for_workers(made, 2)
        yield made


def doctor(made: Cluster, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "schedsearch", "doctor", "--scheduler", made.address, "--json", *options]
    if made.tls:
        command += ["--tls", str(made.tls)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    return {"rc": done.returncode, "stderr": done.stderr, **json.loads(done.stdout or "{}")}


def wait_for_workers(made: Cluster, count: int) -> None:
    ends_s = time.monotonic() + 600
    while len((found := doctor(made)).get("workers", ())) < count:
        assert time.monotonic() < ends_s, found


def records_of(db: Path) -> list[Record]:
    with Store.open(db, readonly=True) as store:
        return [row.record() for row in store.rows()]


def count_of(db: Path) -> int:
    """Records in a database that another process may just be making."""
    try:
        return len(records_of(db))
    except DatabaseError:
        return 0


def once(records: list[Record]) -> bool:
    """Whether no configuration was counted twice."""
    counts = Counter((record.workload, record.template, record.config) for record in records if not record.final_race)
    return set(counts.values()) == {1}


class Told(Observer):
    def __init__(self) -> None:
        self.trials: list[Trial] = []

    def on_trial(self, event: Trial) -> None:
        self.trials.append(event)


def test_the_doctor_shows_workers_devices_and_compilers(fleet: Cluster) -> None:
    found = doctor(fleet)
    assert found["rc"] == 0 and found["problems"] == []
    assert sorted(worker["builds"] for worker in found["workers"]) == [1, 2]
    (device,) = [device for worker in found["workers"] for device in worker["devices"]]
    assert device["uuid"].startswith(f"cpu-{platform.node()}-") and device["sms"] == len(os.sched_getaffinity(0))
    from numba import __version__

    assert {worker["toolchains"]["cpu"]["numba"] for worker in found["workers"]} == {__version__}


def test_a_run_builds_and_measures_on_workers_and_the_records_name_them(fleet: Cluster, tmp_path: Path) -> None:
    summary = tune([SMALL, OTHER], tmp_path / "r.db", scheduler=fleet.address, target="cpu", trials=6, tuner="random")
    records = records_of(tmp_path / "r.db")
    assert summary.new_trials == 12 and summary.complete and once(records)
    measured = [record for record in records if record.measurement.ok]
    assert {record.measurement.host for record in measured} == {platform.node()}
    (uuid,) = {record.measurement.device_uuid for record in measured}
    assert uuid.startswith(f"cpu-{platform.node()}-") and [device.uuid for device in summary.devices] == [uuid]
    assert all(task.race is not None for task in summary.tasks)
    again = tune([SMALL], tmp_path / "r.db", target="cpu", trials=6)  # the device is free, and records count here
    assert again.new_trials == 0


def test_builds_elsewhere_and_measurements_here(fleet: Cluster, tmp_path: Path) -> None:
    summary = tune([SMALL], tmp_path / "r.db", build_on=fleet.address, target="cpu", trials=4, tuner="random")
    assert summary.complete and summary.new_trials == 4 and once(records_of(tmp_path / "r.db"))


def test_what_is_not_there_is_said_in_a_line(fleet: Cluster, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"they have no GPU; start a worker on a host with one"):
        tune([SMALL], tmp_path / "r.db", scheduler=fleet.address, target="cuda", trials=2)
    with pytest.raises(DeviceError, match=r"scheduler tcp://127.0.0.1:9 cannot be reached: .*; start one: .* --port 9"):
        tune([SMALL], tmp_path / "r.db", scheduler="tcp://127.0.0.1:9", target="cpu", trials=2)
    worker = [sys.executable, "-m", "schedsearch", "worker", "tcp://127.0.0.1:9"]
    done = subprocess.run(worker, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 3 and "cannot be reached" in done.stderr and done.stderr.count("\n") == 1


def test_workers_that_a_run_cannot_use_and_clocks_that_are_wrong_are_named(fleet: Cluster, tmp_path: Path) -> None:
    other, late = tmp_path / "other", tmp_path / "late"
    (other / "schedsearch-9.9.9.dist-info").mkdir(parents=True)
    (other / "schedsearch-9.9.9.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: schedsearch\nVersion: 9.9.9\n"
    )
    late.mkdir()
    (late / "sitecustomize.py").write_text("import time\n_now = time.time\ntime.time = lambda: _now() - 3600\n")
    before = len(fleet.workers)
    try:
        for folder in (other, late):
            fleet.start_worker("--builds", "1", "--only-build", environment={"PYTHONPATH": str(folder)})
        fleet.start_stranger()
        ends_s = time.monotonic() + 600
        while len(problems := doctor(fleet)["problems"]) < 3:
            assert time.monotonic() < ends_s, problems
        told = "\n".join(problems)
        assert re.search(r"is not used: it has schedsearch 9\.9\.9, and this is .*; install the same version there", told)
        assert re.search(r"is not used: it was started without resources; start it with `schedsearch worker`", told)
        behind = re.search(r"the clock of .* is (\d+) s behind the one here; set it, e\.g\. by NTP", told)
        assert behind and 3000 < int(behind[1]) <= 3600, "it is named less what the answer took, which may be a while"
        with pytest.raises(
            DeviceError, match=r"--target h200 names: they have no GPU; .*9\.9\.9.*; start a worker on a host with"
        ):
            tune([SMALL], tmp_path / "r.db", scheduler=fleet.address, target="h200", trials=1)
    finally:
        fleet.end_workers(before)


def test_a_worker_that_is_told_to_end_says_so_in_a_line(fleet: Cluster) -> None:
    command = [sys.executable, "-m", "schedsearch", "worker", fleet.address, "--only-build", "--builds", "1"]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert worker.stdout is not None and worker.stdout.readline().startswith("a worker of")
    worker.terminate()
    _, said = worker.communicate(timeout=800)
    assert worker.returncode == 130 and said.splitlines()[-1].startswith("schedsearch: interrupted"), said


def test_two_runs_share_the_builders_but_not_the_device(fleet: Cluster, tmp_path: Path) -> None:
    from schedsearch.fleet import Connection

    command = (
        "from test_fleet import *; tune([OTHER], sys.argv[1], scheduler=sys.argv[2], target='cpu', trials=10**4, time_s=600)"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", command, str(tmp_path / "first.db"), fleet.address], cwd=Path(__file__).parent
    )
    try:
        ends_s = time.monotonic() + 600
        while count_of(tmp_path / "first.db") < 2:
            assert first.poll() is None and time.monotonic() < ends_s
            time.sleep(0.2)
        with pytest.raises(DeviceBusyError, match="in use by another run on this fleet"):
            tune(
                [SMALL],
                tmp_path / "r.db",
                scheduler=Connection(fleet.address, wait_for_device=False),
                target="cpu",
                trials=2,
            )
    finally:
        first.kill()
        first.wait()
    waits: list[str] = []
    began_s = time.monotonic()
    summary = tune([SMALL], tmp_path / "r.db", scheduler=fleet.address, target="cpu", trials=2, on_wait=waits.append)
    assert summary.complete and time.monotonic() - began_s < 600, "a run that was killed keeps its device for a minute only"
    assert len(waits) <= 1


def test_workers_that_are_killed_cost_no_result(fleet: Cluster, tmp_path: Path) -> None:
    """Now and then the process that measures, or the one that only builds, is killed with whatever it does."""

    class Kills(Told):
        kills = 0

        def on_trial(self, event: Trial) -> None:
            super().on_trial(event)
            if len(self.trials) % 5 == 0:
                self.kills += fleet.kill_a_worker(self.kills % 2)

    told = Kills()
    summary = tune(
        [SMALL, OTHER], tmp_path / "r.db", scheduler=fleet.address, target="cpu", trials=12, tuner="random",
        observers=[told],
    )  # fmt: skip
    records = records_of(tmp_path / "r.db")
    assert told.kills >= 3 and once(records)
    wait_for_workers(fleet, 2)  # the last ones that were killed come again for the next test
    assert summary.new_trials == 24 == sum(event.counted for event in told.trials)
    trials = [record for record in records if not record.final_race and record.measurement.outcome.is_trial]
    reported = {(event.workload, event.config) for event in told.trials if event.counted}
    assert {(record.workload, record.config) for record in trials} == reported, "what was reported is in the store"
    assert summary.complete and all(device.problem == "" for device in summary.devices)


def test_a_scheduler_that_goes_away_ends_the_run_cleanly_and_it_goes_on_later(tmp_path: Path) -> None:
    from schedsearch.fleet import Connection

    said: list[str] = []

    class Cuts(Observer):
        def on_trial(self, event: Trial) -> None:
            if event.done == 4:
                made.stop_scheduler()

    with cluster(tmp_path / "fleet", ("--builds", "2")) as made:
        wait_for_workers(made, 1)
        there = Connection(made.address, patience_s=3)
        with shown(say=said.append), pytest.raises(LostError, match=r"has not answered|no worker|for \d+ s"):
            tune([SMALL], tmp_path / "r.db", scheduler=there, target="cpu", trials=16, tuner="random", observers=[Cuts()])
        assert said.count(f"the scheduler {made.address} does not answer; the run waits for it, at most 3 s") == 1
        before = records_of(tmp_path / "r.db")
        assert 4 <= len(before) < 16
        assert Outcome.WORKER_LOST not in {each.measurement.outcome for each in before}, (
            "no worker was lost, and no candidate"
        )
        with Store.open(tmp_path / "r.db", readonly=True) as store:
            (run,) = store.runs()
            assert run["summary"]["stopped"] == "lost"
        made.start_scheduler()
        wait_for_workers(made, 1)  # nannies keep trying for a minute
        summary = tune([SMALL], tmp_path / "r.db", scheduler=there, target="cpu", trials=16, tuner="random")
        assert summary.new_trials == 16 - len(before) and once(records_of(tmp_path / "r.db"))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command, which makes certificates")
def test_members_of_a_fleet_have_certificates_and_others_are_refused(tmp_path: Path) -> None:
    make_certificates(tmp_path / "ours")
    make_certificates(tmp_path / "theirs")
    with cluster(tmp_path / "fleet", ("--builds", "1", "--only-build"), tls=tmp_path / "ours") as made:
        wait_for_workers(made, 1)
        made.tls = tmp_path / "theirs"
        stranger = doctor(made)
        assert stranger["rc"] == 3 and "certificates" in stranger["stderr"] and stranger["stderr"].count("\n") == 1
        made.tls = None
        made.address = made.address.replace("tls", "tcp")
        plain = doctor(made)
        assert plain["rc"] == 3 and plain["stderr"].count("\n") == 1


def test_an_interrupted_run_frees_its_device(fleet: Cluster, tmp_path: Path) -> None:
    class Stops(Observer):
        def on_trial(self, event: Trial) -> None:
            if event.done == 3:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        tune([SMALL], tmp_path / "r.db", scheduler=fleet.address, target="cpu", trials=40, observers=[Stops()])
    assert tune([SMALL], tmp_path / "r.db", scheduler=fleet.address, target="cpu", trials=5).complete


class Answered:
    """A future of Dask in some state. Dask itself raises UnboundLocalError when a call is cancelled as it waits for it."""

    def __init__(self, status: str, value: Any = None, error: BaseException | None = None) -> None:
        self.status, self._value, self._error, self.cancelled = status, value, error, False

    def add_done_callback(self, call: Any) -> None:
        if self.done():
            call(self)

    def done(self) -> bool:
        return self.status != "pending"

    def exception(self, timeout: float) -> BaseException | None:
        return self._error

    def result(self, timeout: float) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def cancel(self) -> None:
        self.cancelled = True


def test_a_call_that_dask_lost_in_any_way_is_away_and_what_it_raised_itself_is_raised() -> None:
    from schedsearch.fleet import Connection
    from schedsearch.fleet.client import Fleet
    from schedsearch.fleet.roster import Roster

    scheduler = socket.create_server(("127.0.0.1", 0))  # it is there
    fleet = object.__new__(Fleet)
    fleet.connection = Connection(f"tcp://127.0.0.1:{scheduler.getsockname()[1]}")
    fleet.roster = Roster(fleet.connection)
    assert fleet.result(Answered("finished", 7), "tcp://w", 10.0) == 7
    with pytest.raises(DeviceBusyError, match="in use"):
        fleet.result(Answered("error", error=DeviceBusyError("in use")), "tcp://w", 10.0)

    class KilledWorker(Exception):  # as Dask calls it
        pass

    lost = [
        Answered("error", error=KilledWorker("attempted to run")), Answered("cancelled"), Answered("lost"),
        Answered("pending"), Answered("finished", error=UnboundLocalError("result")),
        Answered("finished", error=OSError("closed")), Answered("finished", error=TimeoutError()),
    ]  # fmt: skip
    for future in lost:
        with pytest.raises(AwayError, match="the worker tcp://w was lost") as caught:
            fleet.result(future, "tcp://w", 10.0)
        assert caught.value.begun
    fleet.roster.members = {"tcp://w": None}  # type: ignore[dict-item]
    with pytest.raises(AwayError, match=r"did not answer within 0\.1 s"):
        fleet.result(Answered("pending"), "tcp://w", 0.1)
    assert fleet.lost("tcp://w").begun
    scheduler.close()  # all calls are lost with it, whatever they compute
    assert not fleet.lost("tcp://w").begun
    for future in (Answered("cancelled"), Answered("error", error=KilledWorker("closed"))):
        with pytest.raises(AwayError, match=r"was lost: the scheduler .* cannot be reached") as caught:
            fleet.result(future, "tcp://w", 10.0)
        assert not caught.value.begun


def builds_after(losses: list[AwayError]) -> tuple[int, list[Measurement]]:
    """How many candidates a builder still has, and how they failed, when the workers of its only one are gone in turn."""
    from schedsearch.fleet.builder import FleetBuilder, _Batch, _Queued

    fleet: Any = SimpleNamespace(has=lambda address: False)
    builder = FleetBuilder(fleet, PRESETS["h200"], {}, 1.0, COLD_GRAPH)
    task: Any = SimpleNamespace(token=0)
    builder._queue.append(_Queued(task))
    for error in losses:
        fleet.lost = lambda address, error=error: error
        batch = _Batch("tcp://gone", [builder._queue.popleft()], Answered("pending"), time.monotonic() + 60)
        builder._batches.add(batch)
        builder._expire()
    failed = [result for _, result in builder._done if isinstance(result, Measurement)]
    return builder.pending - len(failed), failed


def test_a_candidate_that_loses_two_workers_has_failed_unless_the_scheduler_was_gone() -> None:
    gone, away = AwayError("it was lost"), AwayError("it was lost: the scheduler cannot be reached", begun=False)
    for losses in ([gone], [gone, away], [away, away, away]):
        assert builds_after(losses) == (1, [])
    left, (failed,) = builds_after([gone, away, gone])
    assert (left, failed.outcome) == (0, Outcome.WORKER_LOST) and "for the second time" in failed.message


def test_the_example_of_two_terminals(tmp_path: Path) -> None:
    """Both scripts as they are, at another port; the first is ended as Ctrl-C does."""
    scripts = Path(__file__).resolve().parents[1] / "examples" / "fleet"
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "PORT": str(free_port())}
    command = ["sh", scripts / "terminal1.sh", "--builds", "2"]
    with (tmp_path / "terminal1.log").open("wb") as log:
        first = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        command = ["sh", scripts / "terminal2.sh", "--trials", "2", "--db", tmp_path / "r.db"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr + (tmp_path / "terminal1.log").read_text()
        assert "compilers for cpu" in done.stdout and "new trials" in done.stdout
        assert {record.measurement.host for record in records_of(tmp_path / "r.db")} <= {platform.node(), ""}
    finally:
        os.killpg(first.pid, signal.SIGINT)
        try:
            first.wait(30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(first.pid, signal.SIGKILL)


def test_the_manifest_for_kubernetes_starts_commands_that_exist() -> None:
    from ruamel.yaml import YAML

    path = Path(__file__).resolve().parents[1] / "examples" / "fleet" / "kubernetes.yaml"
    parts = list(YAML(typ="safe").load_all(path))
    assert [part["kind"] for part in parts] == ["Service", "Deployment", "Deployment", "PersistentVolumeClaim", "Job"]
    for part in parts:
        for container in part["spec"].get("template", {}).get("spec", {}).get("containers", ()):
            words = container["command"]
            options = [word for word in words if word.startswith("--")]
            helped = subprocess.run(
                [Path(sys.executable).parent / words[0], words[1], "--help"], capture_output=True, text=True, check=True
            )
            assert [option for option in options if option not in helped.stdout] == []
