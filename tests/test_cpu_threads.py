"""Threads of a CPU device: who computes, who sleeps, and what happens when workers are late or gone."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conv2d_support import run_on_cpu
from numba import types
from records_support import forked

import schedsearch
from schedsearch.backend import compile_source
from schedsearch.backend.cpu_ops import as_array
from schedsearch.device import cpu_native
from schedsearch.device.cpu import BoundCpuKernel, CpuDevice
from schedsearch.device.detect import detect
from schedsearch.errors import DeviceError
from schedsearch.launch import Artifact, Grid, Pointer
from schedsearch.template import KernelSource, KernelStep
from schedsearch.template.registry import load_templates
from schedsearch.workload import Workload

TARGET = detect("cpu")
N = 5000
I64 = types.int64


def count_up(y, start, stop):
    """Every work item that runs adds one to its own number."""
    target = as_array(y, (N,), I64)
    for i in range(start, stop):
        target[i] += 1


def raise_at_10(y, start, stop):
    target = as_array(y, (N,), I64)
    for i in range(start, stop):
        if i == 10:
            raise ValueError("no")
        target[i] = -1


def compiled(*functions: Callable[..., None]) -> Artifact:
    steps = tuple(KernelStep(function, (Pointer("y"),), Grid(N), 2) for function in functions)
    return compile_source(KernelSource("cpu", "native", steps), TARGET).artifact


@pytest.fixture(scope="module")
def counting() -> Artifact:
    return compiled(count_up)


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    with contextlib.closing(CpuDevice(TARGET)) as device:
        yield device


class Counter:
    """A kernel that counts how often each of its items ran.

    Args:
        artifact: of steps that have one argument, the numbers.
        shape: work items and threads of every step.
    """

    def __init__(self, device: CpuDevice, artifact: Artifact, *shapes: tuple[int, int]) -> None:
        self.device, self.address = device, device.allocate(8 * N)
        steps = [
            replace(step, grid=Grid(items), block_threads=threads)
            for step in artifact.plan.steps
            for items, threads in shapes
        ]
        self.kernel = device.load(replace(artifact, plan=replace(artifact.plan, steps=tuple(steps))))
        self.bound: BoundCpuKernel = self.kernel.bind({"y": self.address}, {})

    def counts(self) -> np.ndarray[Any, Any]:
        found = np.empty(N, np.int64)
        self.device.copy_out(memoryview(found).cast("B"), self.address)
        return found


def published(device: CpuDevice) -> int:
    """The number of the last step that was offered to workers; it grows by two."""
    return ctypes.c_uint64.from_address(device._pool.address + cpu_native._NUMBER).value // 2


def asleep(device: CpuDevice, thread: int) -> bool:
    at = device._pool.address + cpu_native._MAILBOXES + thread * cpu_native._MAILBOX_BYTES + cpu_native._ASLEEP
    return ctypes.c_uint64.from_address(at).value == 1


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("items", [1, 2, 7, 31, 4999, N])
def test_every_work_item_runs_once_whatever_the_number_of_threads(device, counting, items, threads):
    counter = Counter(device, counting, (items, threads))
    for _ in range(20):
        counter.bound.launch()
    assert counter.counts().tolist() == [20] * items + [0] * (N - items)


def test_a_step_for_one_thread_concerns_nobody_but_the_caller(device, counting):
    counter = Counter(device, counting, (N, 1))
    before = threading.active_count()
    counter.bound.launch()
    assert published(device) == 0 and threading.active_count() == before
    with_others = Counter(device, counting, (N, 3))
    with_others.bound.launch()
    assert published(device) == 1
    counter.bound.launch()
    assert published(device) == 1 and (counter.counts() == 2).all()


def test_a_step_with_one_work_item_needs_no_worker(device, counting):
    counter = Counter(device, counting, (1, 8))
    counter.bound.launch()
    assert published(device) == 0 and counter.counts()[0] == 1


def test_workers_that_wait_sleep_and_wake_for_the_next_step(device, counting):
    counter = Counter(device, counting, (N, 4))
    for launches in range(1, 6):
        counter.bound.launch()
        assert wait_until(lambda: all(asleep(device, thread) for thread in (1, 2, 3)))
        assert (counter.counts() == launches).all()


def test_a_launch_does_not_need_its_workers(device, counting):
    """A machine that is busy may not run them for a while; here they have ended."""
    counter = Counter(device, counting, (N, 4))
    device._pool.close()
    for _ in range(10):
        counter.bound.launch()
    assert (counter.counts() == 10).all()


def test_all_kernels_of_a_network_are_one_launch_and_see_later_pointers(device, counting):
    counters = [Counter(device, counting, (N, threads)) for threads in (1, 4, 1, 2)]
    together = device.together([counter.bound for counter in counters])
    together.launch()
    other = device.allocate(8 * N)
    counters[1].bound.set_pointer("y", other)
    together.launch()
    assert [int(counter.counts().min()) for counter in counters] == [2, 1, 2, 2]
    counters[1].address = other
    assert (counters[1].counts() == 1).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_an_exception_ends_a_launch_at_its_step(device, counting, threads):
    failing = Counter(device, compiled(count_up, raise_at_10, count_up), (N, threads))
    after = Counter(device, counting, (N, threads))
    together = device.together([failing.bound, after.bound])
    for launches in range(1, 4):
        with pytest.raises(DeviceError, match="raise_at_10 raised an exception"):
            together.launch()
        assert failing.counts()[10] == launches and not after.counts().any()
    after.bound.launch()
    assert (after.counts() == 1).all()


def test_launches_of_several_python_threads_take_turns(device, counting):
    counters = [Counter(device, counting, (N, threads)) for threads in (1, 2, 3, 4)]
    other = CpuDevice(TARGET)
    counters.append(Counter(other, counting, (N, 4)))

    def launch(counter: Counter) -> None:
        for _ in range(300):
            counter.bound.launch()

    callers = [threading.Thread(target=launch, args=(counter,)) for counter in counters]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all((counter.counts() == 300).all() for counter in counters)
    other.close()


def test_a_process_that_forks_after_its_workers_fell_asleep_has_workers_of_its_own(device, counting):
    counter = Counter(device, counting, (N, 3))
    counter.bound.launch()
    assert wait_until(lambda: asleep(device, 1) and asleep(device, 2))

    def in_the_copy() -> str:
        signal.alarm(60)
        for _ in range(5):
            counter.bound.launch()
        slept = wait_until(lambda: asleep(device, 1) and asleep(device, 2))
        return "right" if (counter.counts() == 6).all() and slept else "wrong"

    assert forked(in_the_copy) == "right"
    counter.bound.launch()
    assert (counter.counts() == 2).all()


@pytest.mark.parametrize("cores", [1, 2, 16])
def test_a_default_gives_every_thread_work_for_some_microseconds(cores):
    """A concatenation of 64 floats, or a small layer, is computed by the caller alone; a large one by all."""
    target = replace(TARGET, sms=cores)
    templates = load_templates()

    def threads(workload: Workload) -> int:
        template = next(each for each in templates.matching(workload, target) if not each.name.endswith("int8"))
        return template.default(workload, target, template.space(workload, target))["threads"]

    image = {"n": 1, "h": 1, "w": 1, "dtype": "float32"}
    few = [
        Workload.conv2d(**image, c=16, k=16, r=1, s=1),
        schedsearch.elementwise(y=(64,), expression="a + b", dtype="float32"),
        schedsearch.concat(x=((1, 32), (1, 32)), axis=1, dtype="float32"),
    ]
    many = [
        Workload.conv2d(n=8, h=112, w=112, c=64, k=64, r=3, s=3, dtype="float32"),
        schedsearch.elementwise(y=(1 << 24,), expression="a + b", dtype="float32"),
    ]
    assert [threads(workload) for workload in few] == [1] * len(few)
    assert [threads(workload) for workload in many] == [cores] * len(many)


@pytest.mark.parametrize("function", ["sigmoid", "silu"])
@pytest.mark.mostly_long(2)
def test_exponentials_of_whole_vectors_are_those_of_numpy(device, function):
    """Every float32 exponent, both signs, and what is no number: to a few units in the last place of float64's result."""
    numbers = np.concatenate(
        [sign * np.ldexp(1 + np.linspace(0, 1, 7, endpoint=False), power) for power in range(-30, 9) for sign in (1, -1)]
    )
    x = np.concatenate([numbers, [0.0, np.inf, np.nan, 88.72, -88.72, -103.5]]).astype(np.float32)
    workload = Workload.conv2d(n=1, h=len(x), w=1, c=1, k=1, r=1, s=1, dtype="float32", layout="NHWC", epilogue=[function])
    template = load_templates()["conv2d_cpu"]
    source = template.kernel(workload, TARGET, template.default(workload, TARGET, template.space(workload, TARGET)))
    arrays = {"x": x.reshape(1, -1, 1, 1), "weight": np.ones((1, 1, 1, 1), np.float32)}
    y = run_on_cpu(device, source, arrays, {"y": ((1, len(x), 1, 1), np.float32)})["y"].ravel()
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        wanted = (wide if function == "silu" else 1.0) / (1.0 + np.exp(-wide))
    np.testing.assert_allclose(y, wanted, rtol=1e-6, atol=1e-37)
