"""The benchmark of the operators that only move data: its cases, what PyTorch does instead, and its tables."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from data_movement_support import OPERATORS, of_operator


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    return importlib.import_module("data_movement")


def test_the_benchmark_times_each_layout_image_and_dtype(benchmark: ModuleType) -> None:
    workloads = benchmark.chosen(benchmark.arguments(["--what", "layouts", "--batch", "2"]))
    assert len(workloads) == len(set(workloads)) == 5 * 5 * 3
    assert {workload.n for workload in workloads} == {2}
    with pytest.raises(SystemExit):
        benchmark.arguments(["--batch", "0"])


def test_random_shapes_follow_from_the_seed(benchmark: ModuleType) -> None:
    first, again, other = (
        benchmark.chosen(benchmark.arguments(["--what", "random", "--seed", seed])) for seed in ("1", "1", "2")
    )
    assert first == again and len(first) == 20 and not set(first) & set(other)
    assert all(16e6 <= workload.signature[0].nbytes <= 256e6 for workload in first)


def test_what_pytorch_does_instead_is_the_same(benchmark: ModuleType) -> None:
    torch = pytest.importorskip("torch")
    for name in (
        "five axes",
        "rows",
        "blocks of 3 in odd images",
        *(name for name in OPERATORS if "CRD" in name or "DCR" in name),
    ):
        workload = OPERATORS[name]
        arrays, y = of_operator(workload, np.random.default_rng(4))
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[y.itemsize]
        x = torch.frombuffer(bytearray(arrays["x"].tobytes()), dtype=bits).view(arrays["x"].shape)
        found = benchmark.torch_way(workload)(x).numpy().ravel()
        np.testing.assert_array_equal(found.view(y.dtype), y, err_msg=name)


def test_the_benchmark_shows_the_share_of_a_copy(benchmark: ModuleType) -> None:
    first, second = benchmark.chosen(benchmark.arguments(["--what", "layouts", "--batch", "1"]))[:2]
    rows = [benchmark.row_of(first, 2.0, 1.0, 4.0), benchmark.row_of(second, 1.0, 2.0, None)]
    lines = [line.split() for line in benchmark.table(rows).splitlines()]
    assert lines[2][-5:] == ["2.0", "1.0", "50%", "4.0", str(round(2 * 64 * 56 * 56 / 2e3))]
    assert lines[3][-4:] == ["1.0", "2.0", "200%", str(round(2 * 100 * 56 * 56 / 1e3))]
    assert lines[4] == ["geometric", "mean", "100%"] and lines[5] == ["least", "50%"]


def test_the_benchmark_shows_what_values_of_knobs_are_worth(benchmark: ModuleType) -> None:
    trials = [
        {"us": us, "config": {"tile": tile, "across": across}}
        for us, tile, across in ((3, "a", 1), (1, "a", 2), (2, "b", 1))
    ]
    assert benchmark.by_knob(trials) == {"tile": {"a": 1, "b": 2}, "across": {2: 1, 1: 2}}
    assert benchmark.restrictions(["across=1,8", "along=x"]) == {"across": [1, 8], "along": ["x"]}
    with pytest.raises(SystemExit, match="KNOB=VALUE"):
        benchmark.restrictions(["across"])
