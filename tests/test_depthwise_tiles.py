"""Tiles of NHWC images in shared memory, for y, dx and dw: emulated against the definition, and compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from depthwise_cuda_support import H200, emulate
from depthwise_support import random_workload

from schedsearch import Workload, depthwise_conv2d
from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.target import Target
from schedsearch.template import load_template
from schedsearch.templates.depthwise_conv2d.cuda_pixels import Blocks
from schedsearch.templates.depthwise_conv2d.patches import Patch
from schedsearch.templates.depthwise_conv2d.tiles import Tile, copied_bytes

TEMPLATES = {
    "forward": load_template("depthwise_conv2d_cuda"),
    "grad_input": load_template("depthwise_conv2d_cuda"),
    "grad_weight": load_template("depthwise_conv2d_dw_cuda"),
}
STAGED = {"buffers": [1, 2, 3]}
DTYPES = ("float16", "float32", "bfloat16")


def values_of(workload: Workload, target: Target = H200) -> tuple[int, ...]:
    """Those of the knob `buffers`."""
    space = TEMPLATES[workload.params.direction].space(workload, target)
    return next(knob.values for knob in space.knobs if knob.name == "buffers")


def test_a_tile_has_the_pixels_that_the_windows_of_its_threads_cover() -> None:
    """8 x 12 results of a 3x3 layer with stride 2 read 17 x 25 pixels, from the one before the first on; a gradient of it
    reads 5 x 7 of dy."""
    layer = depthwise_conv2d(n=1, c=64, h=56, w=56, r=3, s=3, stride=2, padding=1)
    tile = Tile.of_sources(Blocks(Patch.of(layer, 2, 4, 3, 3, 2), 1, 64, lanes=32, across=3, down=4, strip=1))
    assert (tile.first, tile.extents, tile.steps) == ((-1, -1), (17, 25), (4, 8))
    assert tile.pixel_bytes == 128 and tile.row_bytes == 25 * 128
    gradient = layer.replace(direction="grad_input")
    tile = Tile.of_sources(Blocks(Patch.of(gradient, 2, 4, 3, 3, 2), 1, 64, lanes=32, across=3, down=4, strip=1))
    assert (tile.first, tile.extents, tile.steps) == ((0, 0), (5, 7), (1, 2))


def test_a_copy_divides_the_channels_of_a_pixel_and_of_a_block() -> None:
    assert copied_bytes(channels=144, block_channels=64, nbytes=2) == 16
    assert copied_bytes(channels=58, block_channels=64, nbytes=2) == 4
    assert copied_bytes(channels=64, block_channels=2, nbytes=4) == 8
    assert copied_bytes(channels=7, block_channels=4, nbytes=2) == 2


def test_tiles_are_staged_where_pixels_have_their_channels_side_by_side() -> None:
    layer = depthwise_conv2d(n=2, c=32, h=14, w=14, r=3, s=3, padding=1)
    for direction in TEMPLATES:
        assert values_of(layer.replace(direction=direction)) == (0, 1, 2, 3)
        assert values_of(layer.replace(direction=direction, layout="NCHW")) == (0,)
        assert values_of(layer.replace(direction=direction, multiplier=2)) == (0,)
    assert values_of(depthwise_conv2d(n=2, c=32, h=14, w=14, r=9, s=3)) == (0,)  # several rounds of taps
    turing = Target("cuda", "Tesla T4", (7, 5), 40, 65536, 65536, 65536, 1024)
    assert values_of(layer.replace(dtype="float32"), turing) == (0,)


def test_configurations_without_the_knob_load_patches() -> None:
    """As records of earlier versions have them. Gradients of small planes have no such knob."""
    assert TEMPLATES["forward"].current({"vector": 1})["buffers"] == 0
    assert TEMPLATES["grad_weight"].current({"vector": 1})["buffers"] == 0
    both = load_template("depthwise_conv2d_both_cuda")
    assert both.current({"dx_vector": 1, "dw_planes": 4, "dw_buffers": 2}) == {
        "dx_vector": 1, "dx_buffers": 0, "dw_planes": 4, "dw_buffers": 2,
    }  # fmt: skip
    assert both.current({"dx_planes": 4, "dw_vector": 1}) == {"dx_planes": 4, "dw_vector": 1, "dw_buffers": 0}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("direction", TEMPLATES)
@pytest.mark.mostly_long(8)
def test_random_tiles_give_the_definition(monkeypatch: pytest.MonkeyPatch, direction: str, seed: int) -> None:
    rng, template = np.random.default_rng(seed), TEMPLATES[direction]
    workload = random_workload(rng, direction=direction, dtype=DTYPES[seed % 3], layout="NHWC", multiplier=1)
    space = template.space(workload, H200).restrict(STAGED)
    emulate(monkeypatch, template, workload, space.sample(1, rng)[0], seed)


@pytest.mark.filterwarnings("ignore:invalid value")  # of the gradients that the definition computes besides
@pytest.mark.parametrize("direction", ["forward", "grad_weight"])
def test_an_infinite_number_reaches_only_the_products_that_exist(monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    """The last pixel of x is infinite. Patches reach beyond y, which is 3 x 3."""
    workload = depthwise_conv2d(n=1, c=1, h=3, w=5, r=1, s=3, direction=direction, dtype="float32")
    template, tile = TEMPLATES[direction], {"tile_h": [2], "tile_w": [2], "columns": [2], "rows": [1, 2]}
    config = template.space(workload, H200).restrict({**tile, **STAGED}).sample(1, np.random.default_rng(0))[0]

    def infinite(arrays: dict[str, Any]) -> None:
        arrays["x"].reshape(-1)[-1] = np.inf
        for name in ("weight", "dy"):
            if name in arrays:
                arrays[name][...] = 1  # infinity times zero would be NaN for the definition too

    emulate(monkeypatch, template, workload, config, change=infinite)


@pytest.mark.long
@pytest.mark.parametrize("direction", TEMPLATES)
def test_tiles_compile_without_spills(direction: str) -> None:
    workload = depthwise_conv2d(n=32, c=96, h=56, w=56, r=7, s=7, padding=3, direction=direction)
    config = dict(vector=1, tile_h=4, tile_w=4, channels=64, columns=2, rows=2, registers=168, buffers=1)
    config |= {"splits": 64, "combine": "workspace"} if direction == "grad_weight" else {}
    config |= {"strip": 1, "filters": "shared", "border": "test"} if direction != "grad_weight" else {}
    template = TEMPLATES[direction]
    assert not template.space(workload, H200).check(Config(config))
    resources = compile_source(template.kernel(workload, H200, Config(config)), H200).resources
    assert resources.local_bytes == resources.spill_bytes == 0, resources
