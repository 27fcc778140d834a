"""benchmarks/detector.py: the detector runs on a CPU, in every way, and computes what onnx.reference does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxscript")

from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.dynamic.code import machine_code


@pytest.fixture(scope="module")
def benchmark(request: Any) -> Any:
    folder = str(Path(__file__).resolve().parents[1] / "benchmarks")
    sys.path.insert(0, folder)
    request.addfinalizer(lambda: sys.path.remove(folder))
    import detector

    return detector


def code(program: Any) -> Any:
    kernels, (sizes,) = machine_code([program], "none.db", detect("cpu"), allow=("default",))
    return kernels, sizes


@pytest.mark.long(of="detectors")
def test_a_detector_runs_in_every_way_with_one_wait_for_each_data_dependent_segment(benchmark: Any) -> None:
    shape, device = benchmark.SHAPES["tiny"], open_device(detect("cpu"))
    ways = benchmark.Ways(shape, device, code, lambda array: array)
    segments = ways.net.program.segments
    assert [segment.fetched is not None for segment in segments] == [False, True, True]
    assert all(count > 0 for count in ways.counts)
    for seed in (1, 2):  # other numbers in the same arrays
        for name, array in benchmark.example(shape, seed).items():
            ways.given[name][...] = array
        _, wanted = benchmark.expected(ways.model, ways.given)
        ways.bound.step()
        exact = [np.asarray(each) for each in ways.exact()]
        benchmark.compare({"exact": exact, "bounded": ways.bound.sliced()}, wanted)
    allocations = ways.net.allocations
    ways.exact()
    assert ways.net.allocations == allocations
    ways.close()
    device.close()


def test_a_run_of_known_sizes_has_no_dynamic_extents(benchmark: Any) -> None:
    from schedsearch.dynamic.model import read_graph

    program = read_graph(benchmark.detector(benchmark.SHAPES["tiny"], (3, 2, 1))).program()
    dynamic = [program.values[name].words is not None for name in program.outputs]
    assert dynamic == [False, False, True, True, True, True]  # the slice of the masks, and what is suppressed beside


def test_detections_have_partners_in_any_order(benchmark: Any) -> None:
    rng = np.random.default_rng(0)
    boxes, labels, masks = rng.uniform(0, 500, (10, 4)), rng.integers(0, 3, (10, 1)), rng.uniform(0, 1, (10, 1, 5, 6))
    order = rng.permutation(10)
    found = [boxes[order] + 0.01, labels[order], masks[order] - 0.001, "what suppression kept"]
    assert benchmark.share_with_partners(found, [boxes, labels, masks]) == 1.0
    found[0][3] += 1.0  # another box, label and mask
    found[1][4] += 1
    found[2][5, 0, 2, 2] += 0.5
    assert benchmark.share_with_partners(found, [boxes, labels, masks]) == 0.7
    nothing = [boxes[:0], labels[:0], masks[:0]]
    assert benchmark.share_with_partners(nothing, [boxes, labels, masks]) == 0.0
