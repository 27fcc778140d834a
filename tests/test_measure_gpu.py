"""On a GPU: whole outputs are compared on the device, and after faults of candidates it measures as before."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import faulty_templates as faulty
import numpy as np
import pytest
from child_environment import child_environment

from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.device.detect import detect
from schedsearch.device.memory import bytes_at
from schedsearch.measure import Builder, Built, Candidate, Runner
from schedsearch.measurement import CHAIN_GRAPH, COLD_GRAPH, HOT_GRAPH, Measurement, Outcome
from schedsearch.ops import DTYPES, decode, encode
from schedsearch.target import PRESETS, Target
from schedsearch.template import Template
from schedsearch.verification.compare import (
    CodeCache,
    CpuComparer,
    CudaComparer,
    Tolerance,
    Truth,
    _exact_source,
    _output_source,
    _words_source,
)
from schedsearch.verification.verify import verify_once
from schedsearch.workload import Workload

TESTS = Path(__file__).parent
WORKLOAD = Workload.conv2d(n=8, h=28, w=28, c=64, k=64, r=1, s=1, dtype="float32")
FLOATS = [name for name, row in DTYPES.items() if row.is_float]
INTEGERS = [name for name, row in DTYPES.items() if not row.is_float]


@pytest.mark.long
@pytest.mark.parametrize("preset", ["a100", "h200"])
def test_comparison_kernels_of_all_dtypes_compile_without_a_gpu(preset: str) -> None:
    target = PRESETS[preset]
    rounded = [_output_source(dtype, partial) for dtype in FLOATS for partial in (False, True)]
    exact = [_exact_source(dtype, partial) for dtype in DTYPES for partial in (False, True)]
    for source in (*rounded, *exact, _words_source()):
        assert compile_source(source, target).resources.local_bytes == 0


@pytest.fixture(scope="module")
def target() -> Target:
    return detect("cuda")


@pytest.fixture
def runner(target: Target) -> Iterator[Runner]:
    with Runner(target, timeout_s=5.0) as runner:
        yield runner


def build(template: Template, target: Target, workload: Workload = WORKLOAD) -> Built:
    result = compile_source(template.kernel(workload, target, Config(step=1)), target)
    return Built(result.artifact, result.resources, result.canonical_hash, result.compile_s)


def measure(runner: Runner, target: Target, template: Template) -> Measurement:
    return runner.measure(WORKLOAD, build(template, target))


def truths(dtype: str, size: int, reference: np.ndarray) -> list[Truth]:
    """Compares exactly and, if the format rounds, with rounding allowed."""
    wide = np.float64 if DTYPES[dtype].is_float else np.int64
    reference, magnitude = np.ascontiguousarray(reference, wide), np.abs(reference) * 3.0
    exact = Truth(dtype, size, reference.ctypes.data)
    exact_and_owner = [replace(exact)]
    if DTYPES[dtype].is_float:
        tolerance = Tolerance.rounded(dtype, 64, exact_sums=True)
        exact_and_owner.append(replace(exact, magnitude=magnitude.ctypes.data, tolerance=tolerance))
    KEPT.extend((reference, magnitude))
    return exact_and_owner


KEPT: list[np.ndarray] = []  # keeps the memory of a test's truths alive


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gpu_finds_the_same_differences_as_numpy(target: Target, dtype: str) -> None:
    from schedsearch.device.cuda import CudaDevice

    rng = np.random.default_rng(0)
    size = 1_000_003
    low = -100 if DTYPES[dtype].lowest < 0 else 0
    reference = decode(encode(rng.integers(low, 100, size), dtype), dtype).astype(np.float64)
    y = reference.copy()
    changed = rng.integers(0, size, 50)
    y[changed] = rng.integers(low, 100, 50)
    y = encode(y, dtype)
    if DTYPES[dtype].is_float:
        y[700] = encode(np.array([np.nan]), dtype)[0]
    with contextlib.closing(CudaDevice(target)) as device:
        comparer = CudaComparer(device, CodeCache())
        for truth in truths(dtype, size, reference):
            expected = CpuComparer().output(y.ctypes.data, truth)
            assert expected.violations > 10
            addresses = []
            for address, nbytes in ((y.ctypes.data, y.nbytes), (truth.address, 8 * size), (truth.magnitude, 8 * size)):
                addresses.append(device.allocate(nbytes))
                if address:
                    device.copy_in(addresses[-1], bytes_at(address, nbytes))
            there = replace(truth, address=addresses[1], magnitude=addresses[2])
            assert comparer.output(addresses[0], there) == expected
            assert comparer.words(addresses[1], addresses[1], 4 * size) == (0, None)
            assert comparer.words(addresses[0], addresses[1], 4 * (size // 8))[0] > 0
            for address in addresses:
                device.free(address)
        comparer.close()


@pytest.mark.gpu
def test_verify_once_on_the_gpu(target: Target) -> None:
    from schedsearch.device.cuda import CudaDevice

    with contextlib.closing(CudaDevice(target)) as device:
        assert verify_once(device, WORKLOAD, device.load(build(faulty.PointwiseCuda(), target).artifact)) is None
        problem = verify_once(device, WORKLOAD, device.load(build(faulty.MissingProductCuda(), target).artifact))
        assert problem is not None and "elements are wrong" in problem


def is_right_and_timed_cold(measurement: Measurement, target: Target) -> bool:
    """Times are not compared: tests beside this one use the GPU, too."""
    right = measurement.outcome is Outcome.OK and measurement.max_error == 0.0
    rotated = measurement.clocks["rotated_bytes"] > 2.5 * target.l2_bytes
    return right and rotated and measurement.mode == COLD_GRAPH and min(measurement.times_ns) > 0


@pytest.mark.gpu
@pytest.mark.xdist_group("device")
def test_right_candidates_are_verified_and_timed_cold(runner: Runner, target: Target) -> None:
    for _ in range(2):
        measurement = measure(runner, target, faulty.PointwiseCuda())
        assert is_right_and_timed_cold(measurement, target), measurement


@pytest.mark.gpu
@pytest.mark.xdist_group("device")
@pytest.mark.parametrize(
    ("template", "outcome", "text"),
    [
        (faulty.MissingProductCuda(), Outcome.WRONG_ANSWER, "elements are wrong"),
        (faulty.WriteAfterEndCuda(), Outcome.WRONG_ANSWER, "wrote outside y"),
        (faulty.WriteBeforeStartCuda(), Outcome.WRONG_ANSWER, "wrote outside y"),
        (faulty.IllegalAddressCuda(), Outcome.LAUNCH_ERROR, "ILLEGAL_ADDRESS"),
        (faulty.EndlessCuda(), Outcome.RUN_TIMEOUT, "within 5 s"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_after_a_fault_it_measures_as_before(
    runner: Runner, target: Target, template: Template, outcome: Outcome, text: str
) -> None:
    assert is_right_and_timed_cold(measure(runner, target, faulty.PointwiseCuda()), target)
    measurement = measure(runner, target, template)
    assert measurement.outcome is outcome and text in measurement.message
    assert measurement.times_ns == ()
    after = measure(runner, target, faulty.PointwiseCuda())
    assert is_right_and_timed_cold(after, target), after


@pytest.mark.gpu
@pytest.mark.xdist_group("device")
def test_a_race_with_a_culprit(runner: Runner, target: Target) -> None:
    good, bad = build(faulty.PointwiseCuda(), target), build(faulty.IllegalAddressCuda(), target)
    results = runner.race(WORKLOAD, [good, bad, good])
    assert [result.outcome for result in results] == [Outcome.OK, Outcome.LAUNCH_ERROR, Outcome.OK]
    assert [bool(result.times_ns) for result in results] == [True, False, True]


@pytest.mark.gpu
def test_builders_never_make_a_context(target: Target) -> None:
    with Builder(target, workers=1) as builder:
        builder.submit(Candidate(WORKLOAD, faulty.PointwiseCuda(), Config(step=1)))
        ((_, built),) = builder.drain()
        assert isinstance(built, Built), built
        (worker,) = builder._pool
        maps = Path(f"/proc/{worker.process.pid}/maps").read_text()
    assert "/dev/nvidia0" not in maps


PARENT = """
import sys
import faulty_templates as faulty
from schedsearch.backend import compile_source
from schedsearch.measure import Built, Runner
from schedsearch.device.detect import detect
from schedsearch.config import Config
from schedsearch.workload import Workload

target = detect("cuda")
workload = Workload.conv2d(n=1, h=4, w=4, c=8, k=8, r=1, s=1, dtype="float32")
result = compile_source(faulty.EndlessCuda().kernel(workload, target, Config(step=1)), target)
runner = Runner(target, timeout_s=1000)
print(runner.pid, flush=True)
runner.measure(workload, Built(result.artifact, result.resources, "", 0.0))
"""


@pytest.mark.gpu
def test_killing_the_parent_frees_a_hanging_gpu(target: Target, tmp_path: Path) -> None:
    from test_measure_lock import alive, gone

    environment = child_environment(TMPDIR=str(tmp_path))  # its own lock: it waits for nobody
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    time.sleep(10.0)  # the reference is compiled and the candidate hangs
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone([pid], within_s=30.0)


@pytest.mark.gpu
@pytest.mark.xdist_group("device")
def test_hot_mode_uses_one_set(target: Target) -> None:
    with Runner(target, mode=HOT_GRAPH) as hot:
        measurement = hot.measure(WORKLOAD, build(faulty.PointwiseCuda(), target))
    assert measurement.ok and measurement.mode == HOT_GRAPH
    assert measurement.clocks["sets"] == 1


@pytest.mark.gpu
@pytest.mark.xdist_group("device")
def test_a_chain_rotates_weights_and_a_right_kernel_passes(target: Target) -> None:
    """One pass over small weights, rotations over large ones."""
    layers = [WORKLOAD, Workload.conv2d(n=1, h=7, w=7, c=1024, k=1024, r=1, s=1, dtype="float32")]
    with Runner(target, mode=CHAIN_GRAPH) as runner:
        found = [runner.measure(layer, build(faulty.PointwiseCuda(), target, layer)) for layer in layers]
        (raced,) = runner.race(layers[0], [build(faulty.PointwiseCuda(), target)])
    for measurement in (*found, raced):
        assert measurement.ok and measurement.mode == CHAIN_GRAPH, measurement.message
    few, many = (measurement.clocks for measurement in found)
    assert few["sets"] == 320 and few["rotation_capped"]
    assert many["sets"] == 2.5 * target.l2_bytes // (4 << 20) + 1 and "rotation_capped" not in many
