"""When a median counts as known, how operands rotate, and the length of a chain of launches."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace

import faulty_templates as faulty
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedsearch import dense
from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.device import Device, open_device
from schedsearch.device.detect import detect
from schedsearch.measure import Built, Runner
from schedsearch.measure.timing import Arena, Patience, chain_length, median_half_width, open_timer, repeat, set_count
from schedsearch.measurement import COLD_GRAPH, COLD_GRAPH_PREPARED, HOT_GRAPH, Outcome
from schedsearch.target import PRESETS, Target
from schedsearch.template import Template, load_templates
from schedsearch.workload import Workload

H200 = PRESETS["h200"]
PATIENCE = Patience(half_width=0.01, hopeless=2.0, few=3, enough=5, most=30, budget_s=10.0)


def source(times: list[float]) -> tuple[Callable[[int], list[float]], list[int]]:
    """A sampler that returns the given times, and the list of numbers of samples that it was asked for."""
    stream, asked = iter(times), []

    def sample(count: int) -> list[float]:
        asked.append(count)
        return [next(stream) for _ in range(count)]

    return sample, asked


def test_a_steady_kernel_is_timed_five_times() -> None:
    sample, _ = source([100.0] * 99)
    assert repeat(sample, None, PATIENCE) == (100.0,) * 5


def test_a_noisy_kernel_is_timed_until_the_limit() -> None:
    sample, _ = source([100.0, 200.0] * 99)
    assert 30 <= len(repeat(sample, None, PATIENCE)) <= 31


def test_a_hopeless_kernel_is_timed_once() -> None:
    sample, _ = source([100.0, 200.0] * 99)
    assert repeat(sample, 40.0, PATIENCE) == (100.0,)


def test_a_kernel_near_the_best_is_not_hopeless() -> None:
    sample, _ = source([100.0] * 99)
    assert len(repeat(sample, 51.0, PATIENCE)) == 5


def test_an_exhausted_budget_leaves_three_samples() -> None:
    sample, _ = source([100.0, 200.0] * 99)
    assert len(repeat(sample, None, replace(PATIENCE, budget_s=0.0))) == 3


def test_the_confidence_interval_covers_the_median_as_often_as_it_says() -> None:
    """Order statistics give a 95 % interval. The simulation uses a skewed distribution with a known median."""
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(2000):
        times = np.sort(rng.lognormal(0.0, 0.3, 15))
        width = median_half_width(list(times))
        low = int(np.floor(15 / 2 - 0.98 * np.sqrt(15)))
        assert width == pytest.approx((times[14 - low] - times[low]) / 2 / times[7])
        covered += times[low] <= 1.0 <= times[14 - low]
    assert covered / 2000 > 0.93


@given(set_bytes=st.integers(1, 1 << 34), l2=st.integers(1 << 20, 1 << 29))
def test_sets_exceed_two_and_a_half_caches_or_are_capped(set_bytes: int, l2: int) -> None:
    target = replace(H200, l2_bytes=l2)
    sets, capped = set_count(set_bytes, target, COLD_GRAPH)
    assert sets >= 1
    assert capped or sets * set_bytes > 2.5 * l2
    assert sets == 1 or (sets - 1) * set_bytes <= 2.5 * l2  # and no more than needed


def test_a_cpu_arena_is_bounded_whatever_the_cache_is_said_to_be() -> None:
    target = Target("cpu", "virtual", l2_bytes=2 << 30, memory_bytes=64 << 30)
    sets, capped = set_count(10_000_000, target, COLD_GRAPH)
    assert capped and sets * 10_000_000 <= 1.25e9


def test_hot_mode_has_one_set() -> None:
    assert set_count(1000, H200, HOT_GRAPH) == (1, False)


@given(launch_ns=st.floats(500, 1e7), sets=st.integers(1, 1024))
def test_a_chain_rotates_whole_and_is_long_enough(launch_ns: float, sets: int) -> None:
    launches = chain_length(launch_ns, sets, "cuda")
    if launches * launch_ns <= 1.9e8:
        assert launches % sets == 0
        assert launches * launch_ns >= 1e6 or launches >= 640
    assert launches * launch_ns <= max(2e8, launch_ns)


def test_sets_hold_different_finite_data_and_do_not_overlap() -> None:
    cpu = replace(detect("cpu"), l2_bytes=100_000)
    workload = Workload.conv2d(n=1, h=8, w=8, c=16, k=16, r=1, s=1, dtype="float32", epilogue=("bias",))
    with contextlib.closing(open_device(cpu)) as device:
        arena = Arena(device, workload, COLD_GRAPH)
        assert arena.sets * (4 * (1024 + 256 + 16 + 1024)) > 200_000
        seen: list[bytes] = []
        spans = []
        for number in range(arena.sets):
            buffers = arena.buffers[number]
            assert list(buffers) == ["x", "weight", "bias", "y"]
            for spec in (*workload.signature, workload.output):
                spans.append((buffers[spec.name], buffers[spec.name] + spec.nbytes))
                assert buffers[spec.name] % 256 == 0
            data = np.empty(1024, np.float32)
            device.copy_out(data.data, buffers["x"])
            assert np.isfinite(data).all() and 0.8 < data.std() < 1.2
            seen.append(data.tobytes())
        assert len(set(seen)) == arena.sets
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        arena.close()


def read(device: Device, address: int, shape: tuple[int, ...]) -> np.ndarray:
    array = np.empty(shape, np.float32)
    device.copy_out(array.reshape(-1).data, address)
    return array


@pytest.mark.parametrize("mode", [COLD_GRAPH, COLD_GRAPH_PREPARED])
def test_a_chain_of_launches_computes_into_every_set(mode: str) -> None:
    """The timed launches are real: the output of each set follows from its own inputs."""
    cpu = replace(detect("cpu"), l2_bytes=50_000)
    workload = Workload.conv2d(n=1, h=4, w=4, c=16, k=8, r=1, s=1, dtype="float32")
    artifact = compile_source(faulty.PackedCpu().kernel(workload, cpu, Config(step=1)), cpu).artifact
    with contextlib.closing(open_device(cpu)) as device:
        arena = Arena(device, workload, mode)
        timed = open_timer(device).prepare(device.load(artifact), arena)
        assert all(time_ns > 0 for time_ns in timed.sample(3))
        timed.launch(arena.sets)
        facts = timed.rotation.facts()
        if mode == COLD_GRAPH_PREPARED:
            assert facts["prepared_bytes"] == arena.sets * 4 * 16 * 8
            assert facts["rotated_bytes"] == arena.nbytes  # the packed weight is as large as the weight
            for buffers in arena.buffers:
                device.fill(buffers["y"], 0xFF, 4 * 16 * 8)
            weights = [read(device, buffers["weight"], (8, 16)) for buffers in arena.buffers]
            for buffers in arena.buffers:
                device.fill(buffers["weight"], 0xFF, 4 * 16 * 8)  # NaN: no launch reads it any more
            timed.launch(arena.sets)
            for buffers, weight in zip(arena.buffers, weights):
                device.copy_in(buffers["weight"], weight.reshape(-1).data)
        for number in range(arena.sets):
            specs = (*workload.signature, *workload.outputs)
            arrays = {spec.name: read(device, arena.buffers[number][spec.name], spec.shape) for spec in specs}
            expected = arrays["x"].reshape(16, 16).astype(float) @ arrays["weight"].reshape(8, 16).astype(float).T
            np.testing.assert_allclose(arrays["y"].reshape(16, 8), expected, rtol=1e-4, atol=1e-5)


INT8 = {"dtype": "int8", "epilogue": ("bias", {"requantise": {"to": "int8"}})}


@pytest.mark.parametrize(
    "workload",
    [
        Workload.conv2d(n=1, h=8, w=8, c=16, k=16, r=1, s=1, dtype="float32", epilogue=("bias",)),
        Workload.conv2d(n=1, h=8, w=8, c=16, k=16, r=1, s=1, **INT8),
        dense(m=4, n=16, k=16, dtype="float32", epilogue=("bias",)),
    ],
    ids=str,
)
def test_constants_that_are_not_prepared_may_change_between_calls(workload: Workload) -> None:
    """Weights are packed once, and a bias is read in each call: its change must be seen, and that of the weights not."""
    cpu = detect("cpu")
    template = next(each for each in load_templates().values() if each.kind == "cpu" and not _refusal(each, workload, cpu))
    result = compile_source(
        template.kernel(workload, cpu, template.default(workload, cpu, template.space(workload, cpu))), cpu
    )
    assert result.artifact.plan.constants == ("weight",)
    with Runner(cpu, mode=COLD_GRAPH_PREPARED, timeout_s=30.0) as runner:
        measurement = runner.measure(workload, Built(result.artifact, result.resources, result.canonical_hash, 0.0))
    assert measurement.outcome == Outcome.OK, measurement.message


def _refusal(template: Template, workload: Workload, target: Target) -> str | None:
    return template.validate(workload, target) if workload.op in template.ops else "another operator"


def test_the_runner_times_prepared_constants_in_a_mode_of_its_own() -> None:
    cpu = detect("cpu")
    workload = Workload.conv2d(n=1, h=14, w=14, c=64, k=64, r=1, s=1, dtype="float32")
    result = compile_source(faulty.PackedCpu().kernel(workload, cpu, Config(step=1)), cpu)
    built = Built(result.artifact, result.resources, result.canonical_hash, result.compile_s)
    with Runner(cpu, mode=COLD_GRAPH_PREPARED, timeout_s=10.0) as runner:
        measurement = runner.measure(workload, built)
        (finalist,) = runner.race(workload, [built])
    assert (measurement.outcome, measurement.max_error) == (Outcome.OK, 0.0), measurement.message
    assert measurement.clocks["prepared_bytes"] == measurement.clocks["sets"] * 4 * 64 * 64
    assert finalist.ok and {measurement.mode, finalist.mode} == {COLD_GRAPH_PREPARED}
