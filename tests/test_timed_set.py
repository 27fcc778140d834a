"""What timed launches computed is judged on the timing's own numbers: right kernels pass in whatever order they add."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import faulty_templates as faulty
import numpy as np
import pytest

from schedsearch.backend import compile_source
from schedsearch.backend.code_cache import CodeCache
from schedsearch.config import Config
from schedsearch.device import Device, open_device
from schedsearch.device.detect import detect
from schedsearch.measure.run_worker import Prepare, Run, _RunWorker
from schedsearch.measure.timed_set import _EXCUSED, TimedSet, likely_roundoffs
from schedsearch.measure.timing import Arena, open_timer
from schedsearch.measurement import COLD_GRAPH, MODES, Outcome
from schedsearch.ops import decode, encode
from schedsearch.template import load_template
from schedsearch.verification.compare import CpuComparer, Tolerance, Truth
from schedsearch.verification.inputs import timing_pattern
from schedsearch.workload import Workload

CPU = replace(detect("cpu"), l2_bytes=200_000)
STAGES = ((), ("bias", "relu"), ("scale_shift", "residual", "leaky_relu"), ("clip",))


@pytest.fixture
def device() -> Iterator[Device]:
    with contextlib.closing(open_device(CPU)) as device:
        yield device


def truncated(values: np.ndarray) -> np.ndarray:
    """float64 cut to 24 bits of significand, as tensor cores cut their sums."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.trunc(mantissa * 2**24) / 2**24, exponent)


def in_blocks(products: np.ndarray, block: int) -> np.ndarray:
    total = np.zeros(products.shape[0])
    for start in range(0, products.shape[1], block):
        total = truncated(total + products[:, start : start + block].sum(axis=1))
    return total


def split(products: np.ndarray, parts: int) -> np.ndarray:
    return truncated(sum(in_blocks(part, 16).astype(np.float32) for part in np.array_split(products, parts, axis=1)))


@pytest.mark.parametrize("out", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("k", [16, 147, 576, 4608, 65536])
@pytest.mark.mostly_long(8)
def test_every_order_of_float32_sums_is_within_the_tolerance(dtype: str, out: str, k: int) -> None:
    """One after the other, in the blocks of tensor cores that truncate, and split over k; then rounded once."""
    workload = Workload.conv2d(n=1, h=16, w=16, c=k, k=8, r=1, s=1, dtype=dtype, out_dtype=out)
    x_spec, w_spec = workload.signature
    rows = 128
    x = decode(timing_pattern(workload, x_spec).elements(rows * k), dtype).astype(float).reshape(rows, k)
    w = decode(timing_pattern(workload, w_spec).elements(rows * k + 77)[77:], dtype).astype(float).reshape(rows, k)
    products = x * w
    truth, magnitude = products.sum(axis=1), np.abs(products).sum(axis=1)
    tolerance = Tolerance.rounded(out, likely_roundoffs(workload), exact_sums=False)
    expected = Truth(out, rows, truth.ctypes.data, magnitude.ctypes.data, tolerance)

    def violations(sums: np.ndarray) -> int:
        y = encode(sums.astype(np.float32), out)
        return CpuComparer().output(y.ctypes.data, expected).violations

    assert 0.3 < truth.std() < 3
    for sums in (
        np.cumsum(products.astype(np.float32), axis=1, dtype=np.float32)[:, -1],
        in_blocks(products, 16),
        split(products, 7),
    ):
        assert violations(sums) == 0
    assert violations(products[:, : 3 * k // 4].sum(axis=1)) > 0.8 * rows


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("epilogue", STAGES)
@pytest.mark.mostly_long(42)
def test_a_right_kernel_passes_with_every_stage(device: Device, epilogue: tuple[str, ...], mode: str) -> None:
    workload = Workload.conv2d(n=1, h=9, w=8, c=16, k=16, r=3, s=3, padding=1, dtype="float32", epilogue=epilogue)
    template = load_template("conv2d_cpu")
    config = template.default(workload, CPU, template.space(workload, CPU))
    kernel = device.load(compile_source(template.kernel(workload, CPU, config), CPU).artifact)
    arena = Arena(device, workload, mode)
    timed_set = TimedSet.make(device, CpuComparer(), CodeCache(), workload, arena)
    assert timed_set is not None
    timed_set.soil()
    timed = open_timer(device).prepare(kernel, arena)
    timed.launch(8)
    assert timed.has_launched(timed_set.number)
    assert timed_set.judge(timed) == ""
    for number in range(timed_set._truths["y"].size // 1000 + 2):  # more than are excused
        device.fill(arena.buffers[timed_set.number]["y"] + 40 * number, 0x42, 4)
    assert "elements of y are wrong" in timed_set._differences()


def test_few_elements_are_excused_and_none_of_a_small_output(device: Device) -> None:
    assert _EXCUSED == 1e-3
    workload = Workload.conv2d(n=1, h=9, w=8, c=16, k=13, r=1, s=1, dtype="float32")
    arena = Arena(device, workload, COLD_GRAPH)
    made = TimedSet.make(device, CpuComparer(), CodeCache(), workload, arena)
    assert made is not None and made._truths["y"].excused == 0


class _Quick:
    """A worker in this process, without candidates that may crash it."""

    def __init__(self) -> None:
        self.worker = _RunWorker(CPU, COLD_GRAPH)
        self.workload = Workload.conv2d(n=1, h=6, w=6, c=8, k=8, r=1, s=1, dtype="float32")
        self.artifact = compile_source(faulty.PointwiseCpu().kernel(self.workload, CPU, Config(step=1)), CPU).artifact

    def run(self) -> Any:
        self.worker.answer(Prepare(self.workload, 0, {}))
        return self.worker.answer(Run(self.workload, self.artifact))


def test_a_time_that_physics_forbids_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedsearch.measure.run_worker.least_time_ns", lambda *_: 1e12)
    ran = _Quick().run()
    assert ran.outcome is Outcome.WRONG_ANSWER and not ran.times_ns
    assert "no kernel for this workload takes less than 1000000000.000 us on cpu:" in ran.message
    assert ran.message.startswith("measured ") and "profile it" in ran.message


def test_a_suspect_time_is_verified_again_with_other_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedsearch.measure.run_worker.suspect_time_ns", lambda *_: 1e12)
    quick = _Quick()
    assert quick.run().outcome is Outcome.OK
    state = quick.worker._states[quick.workload]
    assert state.verification.seed > 0  # drawn anew, from the system's entropy
    assert quick.run().outcome is Outcome.OK
