"""Processes that fork: the kernels and threads of the CPU work in both of them."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from cpu_kernels import TARGET, N, two_steps
from records_support import forked

from schedsearch.backend import compile_source
from schedsearch.device.cpu import CpuDevice


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(TARGET)
    yield device
    device.close()


def test_a_forked_process_has_memory_of_its_own(device):
    """A program may load kernels and then fork: workspaces, prepared weights and arenas of networks lie in this memory."""
    address, found = device.allocate(8), bytearray(8)
    device.copy_in(address, memoryview(b"original"))

    def overwrite() -> str:
        device.fill(address, 0, 8)
        return "overwritten"

    assert forked(overwrite) == "overwritten"
    device.copy_out(memoryview(found), address)
    assert found == b"original"


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.mostly_long(2)
def test_kernels_that_were_loaded_before_a_fork_compute_in_both_processes(device, threads):
    """Also those that another thread launches at the moment of the fork: it waits for the end of a launch."""
    kernel = device.load(compile_source(two_steps(threads), TARGET).artifact)
    numbers = np.arange(N, dtype=np.float32)
    x, y, other_y = (device.allocate(4 * N) for _ in range(3))
    device.copy_in(x, numbers.data)
    bound = kernel.bind({"x": x, "y": y, "between": device.allocate(4 * N)}, {"factor": 3.0})
    busy = kernel.bind({"x": x, "y": other_y}, {"factor": 5.0})

    def right(launches: int = 20) -> bool:
        for _ in range(launches):
            bound.launch()
        return bool((_numbers_at(device, y) == 3 * numbers[::-1]).all())

    def right_in_a_copy() -> str:
        signal.alarm(30)  # for a launch that waits for workers that are not there
        for _ in range(20):
            device.fill(other_y, 0, 4 * N)
            busy.launch()
            if not (_numbers_at(device, other_y) == 5 * numbers[::-1]).all():
                return "wrong"
        return "right" if right() else "wrong"

    stop = threading.Event()
    launching = threading.Thread(target=lambda: [busy.launch() for _ in iter(stop.is_set, True)])
    launching.start()
    try:
        assert [forked(right_in_a_copy) for _ in range(5)] == ["right"] * 5
    finally:
        stop.set()
        launching.join()
    assert right()


def reversed_in_a_copy(device: CpuDevice, threads: int = 2) -> Callable[[], str]:
    """Something for a forked process to do with kernels that were loaded before."""
    kernel = device.load(compile_source(two_steps(threads), TARGET).artifact)
    numbers = np.arange(N, dtype=np.float32)
    x, y = device.allocate(4 * N), device.allocate(4 * N)
    device.copy_in(x, numbers.data)
    bound = kernel.bind({"x": x, "y": y}, {"factor": 3.0})

    def compute() -> str:
        signal.setitimer(signal.ITIMER_REAL, 30)
        bound.launch()
        return "right" if (_numbers_at(device, y) == 3 * numbers[::-1]).all() else "wrong"

    return compute


def test_the_handler_of_a_signal_may_fork_while_its_thread_begins_a_launch(device):
    compute = reversed_in_a_copy(device)
    with device._pool.lock:  # as a launch does
        assert forked(compute) == "right"
    assert compute() == "right"
    signal.setitimer(signal.ITIMER_REAL, 0)


def test_a_fork_does_not_end_a_launch_for_which_it_stopped_waiting(device, monkeypatch):
    """A kernel that never returns, and Ctrl-C: the launch goes on in the original, and the copy knows nothing of it."""
    compute = reversed_in_a_copy(device)
    begun, end, printed = threading.Event(), threading.Event(), []

    def launch() -> None:
        with device._pool.lock:
            begun.set()
            end.wait()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: printed.append(unraisable.exc_type))
    launching = threading.Thread(target=launch)
    launching.start()
    begun.wait()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        assert forked(compute) == "right"
        assert not device._pool.lock.acquire(timeout=0.01)
    finally:
        signal.signal(signal.SIGALRM, before)
        end.set()
        launching.join()
    assert printed == [KeyboardInterrupt]
    assert forked(compute) == "right"


def _numbers_at(device: CpuDevice, address: int) -> np.ndarray:
    found = np.empty(N, np.float32)
    device.copy_out(found.data, address)
    return found
