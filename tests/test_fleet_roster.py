"""What a run asks of a fleet before it begins: an address it may trust, workers of one version, devices, and compilers."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from schedsearch.errors import DeviceBusyError, DeviceError, UsageError
from schedsearch.fleet import Connection, host, runner
from schedsearch.fleet.roster import Roster
from schedsearch.fleet.start import command, parse_cores
from schedsearch.target import PRESETS, Target

LOCAL = "tcp://127.0.0.1:8786"
COMPILERS = {"numba-cuda": "0.30.4", "nvidia-nvvm": "13.3"}


@pytest.mark.parametrize(
    ("address", "options", "text"),
    [
        ("127.0.0.1:8786", {}, "is not the address of a scheduler"),
        ("tcp://127.0.0.1", {}, "is not the address of a scheduler"),
        ("tcp://127.0.0.1:99999", {}, "is not the address of a scheduler"),
        ("ucx://127.0.0.1:1", {}, "is not the address of a scheduler"),
        ("tcp://10.1.2.3:8786", {}, "whoever reaches it can run code on all workers"),
        ("tls://10.1.2.3:8786", {}, "needs certificates; give --tls FOLDER"),
        (LOCAL, {"tls": "folder"}, "is not encrypted, so --tls has no use"),
        (LOCAL, {"patience_s": 0}, "patience_s 0 is not possible"),
    ],
)
def test_an_address_that_is_none_or_not_to_be_trusted_is_refused(address: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        Connection(address, **options)
    assert "\n" not in str(caught.value)


def test_the_addresses_that_are_taken(tmp_path: Path) -> None:
    assert Connection(LOCAL).endpoint == ("127.0.0.1", 8786)
    assert Connection("tcp://[::1]:1").endpoint == ("::1", 1)
    assert Connection("tcp://10.1.2.3:8786", trust_network=True).certificates is None
    with pytest.raises(UsageError, match=r"has no ca.pem and no cert.pem and no key.pem"):
        Connection("tls://10.1.2.3:8786", tmp_path)
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (tmp_path / name).touch()
    found = Connection("tls://10.1.2.3:8786", tmp_path)
    assert found.certificates == tuple(str(tmp_path / name) for name in ("ca.pem", "cert.pem", "key.pem"))
    arguments = command(found, builds=3, gpus=2)
    assert "CPU=3,GPU=2" in arguments and str(tmp_path / "key.pem") in arguments and "127.0.0.1" not in arguments
    assert "127.0.0.1" in command(Connection(LOCAL), builds=1, gpus=0), "loopback unless configured"


def test_how_to_start_a_worker_of_a_scheduler(tmp_path: Path) -> None:
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (tmp_path / name).touch()
    far = "10.1.2.3:8786"
    assert Connection(LOCAL).worker_command == f"schedsearch worker {LOCAL}"
    assert Connection(f"tls://{far}", tmp_path).worker_command == f"schedsearch worker tls://{far} --tls {tmp_path}"
    trusting = Connection(f"tcp://{far}", trust_network=True)
    assert trusting.worker_command == f"schedsearch worker tcp://{far} --trust-network"
    with pytest.raises(DeviceError, match=f"has no worker that can be used; start one: schedsearch worker tcp://{far} --tr"):
        Roster(trusting).chosen("cpu")


def a_worker(*devices: Target, **facts: Any) -> dict[str, Any]:
    return {
        "host": "node1", "pid": 1, "schedsearch": host.version(), "python": "3.12.1", "toolchains": {"cuda": COMPILERS},
        "devices": [device.facts() for device in devices], "clocks": [{}] * len(devices), "time": 1000.0, **facts,
    }  # fmt: skip


def card(name: str, uuid: str, node: str = "node1") -> Target:
    from dataclasses import replace

    return replace(PRESETS[name], uuid=uuid, host=node)


def roster(*workers: dict[str, Any], **options: Any) -> Roster:
    found = Roster(Connection(LOCAL, **options))
    for number, facts in enumerate(workers):
        found.take(f"tcp://w{number}", facts, {"CPU": 4.0, "GPU": 1.0}, asked_s=999.9, answered_s=1000.1)
    return found


def test_devices_are_chosen_by_kind_or_by_the_name_of_a_card() -> None:
    cpu = Target("cpu", "a CPU", uuid="cpu-node1-0-3", host="node1")
    found = roster(a_worker(cpu, card("h200", "GPU-a")), a_worker(cpu, card("h100", "GPU-b", "node2")))
    assert [device.uuid for device in found.chosen("cuda")] == ["GPU-a", "GPU-b"]
    assert [device.uuid for device in found.chosen("h100")] == ["GPU-b"]
    assert [device.uuid for device in found.chosen("auto")] == ["GPU-a", "GPU-b"]
    assert found.chosen("cpu") == [cpu], "two workers of a host have one CPU"
    assert found.devices()["cpu-node1-0-3"][1] == ["tcp://w0", "tcp://w1"]
    with pytest.raises(
        DeviceError, match=r"no worker of .* has what --target b200 names: they have 1 NVIDIA H200, 1 NVIDIA"
    ):
        found.chosen("b200")
    with pytest.raises(UsageError, match="'cuda:7' names no device of a fleet; allowed: auto, cpu, cuda, a100"):
        found.chosen("cuda:7")


def test_a_fleet_without_a_gpu_or_without_workers() -> None:
    cpu = Target("cpu", "a CPU", uuid="cpu-node1-0-3", host="node1")
    with pytest.raises(DeviceError, match="names: they have no GPU; start a worker on a host with one"):
        roster(a_worker(cpu)).chosen("cuda")
    assert roster(a_worker(cpu)).chosen("auto") == [cpu]
    with pytest.raises(DeviceError, match="has no worker that can be used; start one: schedsearch worker tcp://"):
        roster().chosen("auto")


def test_a_worker_of_another_version_is_not_used_and_the_reason_is_said() -> None:
    found = roster(a_worker(card("h200", "GPU-a"), schedsearch="0.0.1"))
    assert not found.members
    with pytest.raises(
        DeviceError, match=r"tcp://w0 is not used: it has schedsearch 0.0.1, and this is .*; install the same"
    ):
        found.chosen("cuda")
    found.take("tcp://w1", a_worker(), {}, 0.0, 0.0)
    assert "start it with `schedsearch worker`" in found.refused["tcp://w1"]
    found.refuse("tcp://w2", "No module named 'schedsearch'")
    assert "No module named" in found.refused["tcp://w2"] and len(found.problems) == 3
    found.keep({"tcp://w1": None})
    assert list(found.refused) == ["tcp://w1"], "a worker that is gone is no problem"


def test_compilers_that_differ_are_refused_or_do_not_build() -> None:
    other = {**COMPILERS, "nvidia-nvvm": "13.0"}
    workers = (a_worker(), a_worker(), a_worker(toolchains={"cuda": other}))
    assert roster(*workers[:2]).builders("cuda") == (COMPILERS, ["tcp://w0", "tcp://w1"])
    with pytest.raises(DeviceError, match=r"node1 \(tcp://w2\) differ.*: nvidia-nvvm 13.0 instead of 13.3; .*--allow-mixed"):
        roster(*workers).builders("cuda")
    assert roster(*workers, allow_mixed=True).builders("cuda") == (COMPILERS, ["tcp://w0", "tcp://w1"])
    assert roster(*workers, allow_mixed=True).builders("cuda", other) == (other, ["tcp://w2"])
    with pytest.raises(
        DeviceError, match=r"builds for a cuda target with these compilers; they have nvidia-nvvm 13.3 instead"
    ):
        roster(*workers[:2]).builders("cuda", other)
    with pytest.raises(DeviceError, match=r"no worker of .* builds for a cpu target; start one with --builds 1 or more"):
        roster(*workers).builders("cpu")
    only_measures = roster()
    only_measures.take("tcp://w0", a_worker(), {"GPU": 1.0}, 999.9, 1000.1)
    with pytest.raises(DeviceError, match=r"no worker of .* builds for a cuda target; start one with --builds 1 or more"):
        only_measures.builders("cuda")


@pytest.mark.parametrize(
    ("time_s", "words"), [(1000.0, None), (1002.0, None), (1400.0, "400 s ahead of"), (900.0, "100 s behind")]
)
def test_a_clock_that_is_wrong_is_named(time_s: float, words: str | None) -> None:
    problems = roster(a_worker(time=time_s)).problems
    assert [words in problem and "set it, e.g. by NTP" in problem for problem in problems] == ([True] if words else [])


def test_cores_of_a_worker() -> None:
    mine = sorted(os.sched_getaffinity(0))
    assert parse_cores(str(mine[0])) == {mine[0]}
    assert host.ranges([0, 1, 2, 3, 8]) == "0-3_8"
    with pytest.raises(UsageError, match="names no cores"):
        parse_cores("a-b")
    with pytest.raises(UsageError, match=r"cores 100000 cannot be used; allowed: "):
        parse_cores("100000")


# ---- a device serves one run at a time


class Idle:
    """A runner that only says that it is closed."""

    prepare_s = 0.0
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> list[Idle]:
    made: list[Idle] = []
    monkeypatch.setattr(host, "_opened", lambda setup: made.append(Idle()) or made[-1])
    return made


def a_setup(run: str) -> host.Setup:
    return host.Setup(run, Target("cpu", "a CPU", uuid="cpu-here"), "cold-graph-v1", 10.0, 30.0)


def test_another_run_is_refused_until_the_first_has_released_its_devices(
    runners: list[Idle], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = host.Host()
    nothing = host.Measure(())
    there.serve(a_setup("one"), nothing, ())
    there.serve(a_setup("one"), nothing, ())
    assert len(runners) == 1, "a run keeps its runner"
    with pytest.raises(DeviceBusyError, match="in use by another run on this fleet"):
        there.serve(a_setup("two"), nothing, ())
    monkeypatch.setattr(host, "the_host", lambda: there)
    answer = asyncio.run(host.serve(a_setup("two"), nothing, ()))
    assert isinstance(answer, DeviceBusyError) and answer.holder == "another run on this fleet"
    assert pickle.loads(pickle.dumps(answer)).holder == answer.holder, "it travels"
    there.release("two")
    assert not runners[0].closed
    there.release("one")
    assert runners[0].closed
    there.serve(a_setup("two"), nothing, ())
    there.close()
    assert runners[1].closed


def test_a_run_that_waits_says_once_which_device_it_is_and_who_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = DeviceBusyError("a CPU of there is in use by process 7; wait for it", holder="process 7")
    answers, told = [busy, busy, None], []

    def ask(*_: Any) -> None:
        if answer := answers.pop(0):
            raise answer

    monkeypatch.setattr(runner.FleetRunner, "_ask", ask)
    monkeypatch.setattr(runner, "_BUSY_POLL_S", 0.001)
    fleet: Any = SimpleNamespace(run="two", connection=Connection(LOCAL))
    target = Target("cpu", "a CPU", host="there", uuid="cpu-there")
    runner.FleetRunner(fleet, target, "cold-graph-v1", 10.0, 30.0, on_wait=told.append)
    assert not answers and told == ["waiting for a CPU of there: in use by process 7"]


def test_a_cpu_is_timed_only_while_its_worker_builds_nothing() -> None:
    noise, done = host._Noise(), []
    building, measuring = threading.Event(), threading.Event()

    def measure() -> None:
        with noise.silent():
            done.append("measured")
            measuring.set()
            building.wait(10)

    with noise.made():
        measurer = threading.Thread(target=measure)
        measurer.start()
        assert not measuring.wait(0.05)
        done.append("built")
    assert measuring.wait(10)
    builder = threading.Thread(target=lambda: noise.made().__enter__() or done.append("built again"))
    builder.start()
    builder.join(0.05)
    assert done == ["built", "measured"]
    building.set()
    builder.join(10)
    measurer.join(10)
    assert done == ["built", "measured", "built again"]


def test_a_run_that_says_nothing_for_long_loses_its_devices(runners: list[Idle], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "LEASE_S", 0.3)
    monkeypatch.setattr(host, "_SWEEP_S", 0.02)
    there = host.Host()
    there.serve(a_setup("one"), host.Measure(()), ())
    for _ in range(20):
        there.renew("one")
        time.sleep(0.02)
    assert not runners[0].closed, "it is alive"
    ended = threading.Event()
    ends_s = time.monotonic() + 30
    while not runners[0].closed and time.monotonic() < ends_s:
        ended.wait(0.02)
    assert runners[0].closed
    there.close()
