"""benchmarks/dynamic_network.py: which sizes it times, and what it makes of times that are there only in part."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnx")


@pytest.fixture(scope="module")
def benchmark(request: Any) -> Any:
    folder = str(Path(__file__).resolve().parents[1] / "benchmarks")
    sys.path.insert(0, folder)
    request.addfinalizer(lambda: sys.path.remove(folder))
    import dynamic_network

    return dynamic_network


def test_sizes_are_timed_for_which_nothing_was_tuned(benchmark: Any) -> None:
    searched = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64}
    chosen = benchmark.untried(64, 16)
    assert set(benchmark.samples(64)) == searched
    assert len(chosen) == 16 and not searched & set(chosen) and chosen[0] < 8 and chosen[-1] > 56


def test_ratios_are_of_sizes_that_both_were_timed_for(benchmark: Any) -> None:
    row = {
        "case": "resnet50:64", "searched": [64], "table_5_us": 9.0, "table_7_us": 30.0, "table_again_7_us": 20.0,
        "alone_7_us": 10.0, "table_again_64_us": 5.0, "alone_64_us": 10.0,
    }  # fmt: skip
    assert benchmark.ratios(row) == {7: 2.0, 64: 0.5}
    assert benchmark.summary([row]) == {"resnet50:64": {"sizes": 1, "geometric_mean": pytest.approx(2.0), "most": 2.0}}
