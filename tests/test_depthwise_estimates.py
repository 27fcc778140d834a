"""Estimated times of depthwise_conv2d, and the defaults that are chosen by them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from schedsearch import Workload, depthwise_conv2d
from schedsearch.target import PRESETS
from schedsearch.template import load_template
from schedsearch.templates.depthwise_conv2d.cuda_space import Shape
from schedsearch.templates.depthwise_conv2d.estimates import _bank_cycles, filters_us, pixels_us, together

H200 = PRESETS["h200"]
PIXELS, FILTERS = load_template("depthwise_conv2d_cuda"), load_template("depthwise_conv2d_dw_cuda")
RECORDED = Path(__file__).resolve().parents[1] / "benchmarks/results/depthwise_estimates_h200.json"


def default_of(workload: Workload) -> dict[str, Any]:
    template = FILTERS if workload.params.direction == "grad_weight" else PIXELS
    return dict(template.default(workload, H200, template.space(workload, H200)))


def test_threads_that_read_one_line_of_shared_memory_take_one_cycle() -> None:
    assert _bank_cycles(lanes=32, across=1, nbytes=4, across_bytes=0, down_bytes=128) == 1
    assert _bank_cycles(lanes=64, across=2, nbytes=2, across_bytes=128, down_bytes=0) == 1  # two halves of a word


def test_pixels_whose_channels_share_banks_take_turns() -> None:
    """16 threads read 64 bytes of a pixel, the others those of one that lies a multiple of 128 bytes further."""
    assert _bank_cycles(lanes=16, across=2, nbytes=4, across_bytes=256, down_bytes=0) == 2
    assert _bank_cycles(lanes=16, across=2, nbytes=4, across_bytes=192, down_bytes=0) == 1
    assert _bank_cycles(lanes=8, across=1, nbytes=4, across_bytes=0, down_bytes=512) == 4


def test_bounds_that_hide_a_part_of_each_other_take_at_least_the_longest() -> None:
    assert together(3.0, 0.0) == pytest.approx(3.0)
    assert 3.0 < together(3.0, 2.0) < 5.0


def test_the_estimate_ranks_recorded_configurations() -> None:
    """Of 24 layers, the configuration with the least estimate took 1.13 times the best one's time in geometric mean; the
    defaults before took 1.54 times."""
    lost = []
    for layer in json.loads(RECORDED.read_text())["layers"]:
        workload = Workload.from_json(layer["workload"])
        template, estimate = (FILTERS, filters_us) if workload.params.direction == "grad_weight" else (PIXELS, pixels_us)
        space, shape = template.space(workload, H200), Shape.of(workload)
        configs = [template.current(row["config"]) for row in layer["rows"]]
        times = [row["us"] for row in layer["rows"]]
        estimates = [estimate(shape, H200, each, int(space.derived["shared_bytes"](each))) for each in configs]
        lost.append(times[estimates.index(min(estimates))] / min(times))
    assert math.exp(sum(map(math.log, lost)) / len(lost)) < 1.2


def test_a_default_of_dw_writes_less_to_its_workspace_than_it_reads() -> None:
    """With 512 splits the workspace of this layer had 7 MB, and dy has 7.2."""
    layer = depthwise_conv2d(n=32, c=144, h=56, w=56, r=5, s=5, stride=2, padding=2, direction="grad_weight")
    assert default_of(layer)["splits"] * 25 * 144 * 4 < 32 * 28 * 28 * 144 * 2 / 2


def test_a_default_of_few_images_needs_no_second_kernel() -> None:
    assert default_of(depthwise_conv2d(n=1, c=1024, h=7, w=7, r=3, s=3, padding=1, direction="grad_weight"))["splits"] == 1


def test_threads_hold_large_filters_in_registers_by_default() -> None:
    layer = depthwise_conv2d(n=128, c=96, h=56, w=56, r=7, s=7, padding=3)
    assert default_of(layer)["filters"] == "direct"
    assert default_of(layer.replace(r=9, s=9, padding=4))["filters"] == "shared"  # two rounds of taps


def test_a_row_of_a_patch_of_nchw_is_one_store_by_default() -> None:
    layer = depthwise_conv2d(
        n=32, c=64, h=112, w=112, r=3, s=3, stride=2, padding=1, direction="grad_input", layout="NCHW"
    )  # fmt: skip
    assert default_of(layer)["tile_w"] * 2 <= 16
