"""Mode chain-graph-v1: kernels are timed as a network launches them. A GPU runs it in test_measure_gpu.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import schedsearch
from schedsearch.deadline import NEVER
from schedsearch.device import Device, open_device
from schedsearch.device.detect import detect
from schedsearch.errors import UsageError
from schedsearch.executable.build_options import BuildOptions
from schedsearch.launch import Artifact, Grid, LaunchPlan, Pointer, Step
from schedsearch.measure import Runner
from schedsearch.measure.timing import JUDGED_SETS, Arena, CudaTimed, set_count
from schedsearch.measurement import CHAIN_GRAPH, COLD_GRAPH, COLD_GRAPH_PREPARED, GPU_MODES, MODES, check_mode
from schedsearch.target import PRESETS
from schedsearch.workload import Workload

H200 = PRESETS["h200"]
LAYER = Workload.conv2d(n=1, h=8, w=8, c=16, k=16, r=1, s=1, dtype="float32", epilogue=("bias",))
POOL = schedsearch.pool2d(n=1, c=16, h=8, w=8, r=2, s=2, mode="max", stride=2, dtype="float32")


@pytest.fixture
def device() -> Iterator[Device]:
    with contextlib.closing(open_device(replace(detect("cpu"), l2_bytes=20_000))) as device:
        yield device


# ---- operands


def test_weights_rotate_and_activations_stay(device: Device) -> None:
    """As in a network: its layers have weights of their own, and read what has just been written."""
    with contextlib.closing(Arena(device, LAYER, CHAIN_GRAPH)) as arena:
        weight_bytes = 16 * 16 * 4 + 256  # with the bias, which is aligned to 256 bytes
        assert arena.sets * weight_bytes > 2 * 20_000 >= (arena.sets - 1) * weight_bytes and not arena.capped
        different = {name: len({buffers[name] for buffers in arena.buffers}) for name in ("x", "weight", "bias", "y")}
        assert different == {"x": 1, "weight": arena.sets, "bias": arena.sets, "y": JUDGED_SETS + 1}
        assert arena.nbytes == arena.sets * weight_bytes + 4096 * (1 + JUDGED_SETS + 1)
        assert arena.prepared and arena.chained


def test_outputs_that_are_judged_belong_to_one_set(device: Device) -> None:
    """Launches on other sets must not write over what is compared."""
    with contextlib.closing(Arena(device, LAYER, CHAIN_GRAPH)) as arena:
        for number in range(JUDGED_SETS):
            assert all(
                each["y"] != arena.buffers[number]["y"] for place, each in enumerate(arena.buffers) if place != number
            )


def test_a_kernel_without_constants_has_one_set(device: Device) -> None:
    with contextlib.closing(Arena(device, POOL, CHAIN_GRAPH)) as arena:
        assert (arena.sets, arena.capped, arena.flush) == (1, False, None)


def test_few_small_weights_take_one_pass_over_a_flushed_cache() -> None:
    assert set_count(256, H200, CHAIN_GRAPH) == (320, True)
    assert set_count(4_000_000, H200, CHAIN_GRAPH) == (int(2.5 * H200.l2_bytes / 4_000_000) + 1, False)
    assert set_count(1 << 30, H200, CHAIN_GRAPH) == (1, False)


# ---- launches, on a device that takes notes


class Noting:
    """A timer, its device, and a kernel: they write down what happens on the stream."""

    def __init__(self, launch_ms: float = 0.003, code_bytes: int = 100_000) -> None:
        self.noted: list[Any] = []
        self.stream = 5
        self.events = [
            SimpleNamespace(record=self._record, synchronize=lambda: None, elapsed_ms=self._elapsed) for _ in range(60)
        ]
        self.launch_ms = launch_ms
        self.device = self
        step = Step("kernel", (Pointer("x"), Pointer("weight"), Pointer("bias"), Pointer("y")), Grid(1), 32)
        self.artifact = Artifact(bytes(code_bytes), LaunchPlan("cuda", "sm_90a", (step,)))
        self.bound = 0
        self.spaces: list[int | None] = []
        self.workspaces = SimpleNamespace(addresses={"space": 7})  # as the first binding has them

    def _record(self, stream: int) -> None:
        self.noted.append("event")

    def _elapsed(self, later: object) -> float:
        return 2 * self.launch_ms  # of the two launches of the estimate

    def fill_later(self, address: int, nbytes: int, stream: int) -> None:
        self.noted.append("flush")

    def capture(self, stream: int, enqueue: Callable[[int], None]) -> Any:
        self.noted.clear()
        enqueue(stream)
        captured, self.noted = self.noted, []
        return SimpleNamespace(launch=lambda stream: self.noted.append(captured), close=lambda: None)

    def prepare(self, operands: object, stream: int) -> Any:
        return SimpleNamespace(addresses={}, nbytes=0, close=lambda: None)

    def bind(self, buffers: dict[str, int], scalars: object, prepared: object, *, early: bool) -> Any:
        self.early, at, number = early, {name: address for name, address in buffers.items() if name != "space"}, self.bound
        self.bound += 1
        self.spaces.append(buffers.get("space"))
        return SimpleNamespace(set_pointer=at.__setitem__, launch=lambda stream: self.noted.append({**at, "load": number}))

    def load(self, artifact: Artifact) -> Any:
        return self

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


def test_a_chain_is_one_graph_of_kernels_that_may_begin_early(device: Device) -> None:
    noting = Noting()
    with contextlib.closing(Arena(device, LAYER, CHAIN_GRAPH)) as arena:
        timed = CudaTimed(noting, noting, arena)  # type: ignore[arg-type]
        times = timed.sample(2)
        assert noting.early
        flush, begin, chain, end = noting.noted[:4]
        assert (flush, begin, end) == ("flush", "event", "event") and len(noting.noted) == 8
        assert len(chain) % arena.sets == 0 and len(chain) * noting.launch_ms >= 1.0
        assert chain == [{**arena.buffers[number % arena.sets], "load": number % 4} for number in range(len(chain))]
        assert times == pytest.approx([2 * noting.launch_ms * 1e6 / len(chain)] * 2)


def test_other_modes_do_not_begin_early(device: Device) -> None:
    noting = Noting()
    with contextlib.closing(Arena(device, LAYER, COLD_GRAPH_PREPARED)) as arena:
        CudaTimed(noting, noting, arena).sample(2)  # type: ignore[arg-type]
    assert not noting.early and "flush" not in noting.noted and noting.noted.count("event") == 3


def test_weights_that_do_not_fill_the_cache_are_read_once_after_each_flush(device: Device) -> None:
    noting = Noting()
    with contextlib.closing(Arena(device, LAYER, CHAIN_GRAPH)) as arena:
        arena.capped = True
        CudaTimed(noting, noting, arena).sample(1)  # type: ignore[arg-type]
        _, _, chain, _ = noting.noted
        assert [{name: address for name, address in each.items() if name != "load"} for each in chain] == arena.buffers


@pytest.mark.parametrize(("code_bytes", "loads"), [(5_000, 16), (40_000, 10), (300_000, 4)])
def test_code_is_loaded_so_often_that_caches_do_not_keep_it(device: Device, code_bytes: int, loads: int) -> None:
    for mode, expected in ((CHAIN_GRAPH, loads), (COLD_GRAPH_PREPARED, 1)):
        noting = Noting(code_bytes=code_bytes)
        with contextlib.closing(Arena(device, LAYER, mode)) as arena:
            CudaTimed(noting, noting, arena)  # type: ignore[arg-type]
        assert noting.bound == expected
        assert noting.spaces == [None] + [7] * (expected - 1)  # all loads compute in the workspaces of the first


# ---- devices without it


def test_every_mode_is_one_of_a_gpu() -> None:
    for mode in MODES:
        check_mode(mode, "cuda")
    with pytest.raises(UsageError, match="mode 'warm' is not known; allowed: cold-graph-v1"):
        check_mode("warm", "cuda")


@pytest.mark.parametrize("mode", GPU_MODES)
def test_a_cpu_refuses_a_mode_of_gpus(mode: str, tmp_path: Path) -> None:
    cpu = detect("cpu")
    expected = "is for GPUs, .*; allowed on a cpu target: cold-graph-v1, cold-graph-prepared-v1, hot-graph-v1$"
    with pytest.raises(UsageError, match=expected):
        Runner(cpu, mode=mode)
    with pytest.raises(UsageError, match=expected):
        schedsearch.tune([LAYER], tmp_path / "records.db", target="cpu", mode=mode, trials=1)
    with pytest.raises(UsageError, match=expected):
        BuildOptions.of(NEVER, target="cpu", mode=mode)
    assert not (tmp_path / "records.db").exists()


@pytest.mark.parametrize(
    ("target", "given", "expected"),
    [
        ("h200", None, CHAIN_GRAPH),
        ("a100", None, COLD_GRAPH),  # no kernel of it begins early
        ("h200", COLD_GRAPH, COLD_GRAPH),
    ],
)
def test_a_network_asks_for_times_in_a_chain_where_kernels_begin_early(
    target: str, given: str | None, expected: str
) -> None:
    assert BuildOptions.of(NEVER, target=PRESETS[target], mode=given).mode == expected
    assert BuildOptions.of(NEVER, target="cpu").mode == COLD_GRAPH
