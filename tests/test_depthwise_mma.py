"""depthwise_conv2d_mma: bands of filters on tensor cores, emulated against the definition, and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from depthwise_cuda_support import H200, emulate, run_on_device
from test_conv2d_wgmma import instructions

from schedsearch import Workload, depthwise_conv2d
from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.device.detect import detect
from schedsearch.target import PRESETS, Target
from schedsearch.template import load_template, load_templates
from schedsearch.templates.depthwise_conv2d.cuda_mma_strips import Reach, StripBlocks
from schedsearch.templates.depthwise_conv2d.patches import Axis
from schedsearch.testing.template_contract import TemplateContract

MMA = load_template("depthwise_conv2d_mma")
DW = load_template("depthwise_conv2d_dw_mma")
HMMA, LDSM = 0x23C, 0x83B  # the low 12 bits of instructions, as nvdisasm names them; the same from sm_80 to sm_120


def layer(c: int, size: int, kernel: int = 7, dilation: int = 1, **more: Any) -> Workload:
    """A layer with the padding that keeps the size."""
    given: dict[str, Any] = dict(
        n=32, c=c, h=size, w=size, r=kernel, s=kernel, dilation=dilation, padding=(kernel - 1) * dilation // 2
    )
    return depthwise_conv2d(**{**given, **more})


class TestMma(TemplateContract):
    template, target, compiled, samples = MMA, H200, 1, 2
    accepted = (
        layer(96, 56, epilogue=("bias", "residual", "relu")),
        layer(384, 14, layout="NCHW", dtype="bfloat16", direction="grad_input", accumulate=True),
        layer(3, 33, kernel=5, layout="NCHW", dilation=3),
        layer(10, 9, kernel=9, n=1, epilogue=("scale_shift",)),
    )
    refused = (
        (layer(64, 56, dtype="float32"), "dtype"),
        (layer(64, 56, direction="grad_weight"), "direction"),
        (layer(64, 56, stride=2), "stride"),
        (layer(64, 56, multiplier=2), "multiplier"),
        (layer(64, 56, kernel=3), "taps"),
        (layer(64, 56, kernel=7, dilation=5), "columns"),
        (layer(64, 200, r=131, s=3, padding=(65, 1)), "rows"),
        (layer(64, 2000, kernel=16, s=1, dilation=130, padding=0), "shared memory"),
    )


class TestDwMma(TemplateContract):
    template, target, compiled, samples = DW, H200, 1, 2
    accepted = (
        layer(96, 56, direction="grad_weight"),
        layer(20, 14, n=9, layout="NCHW", dtype="bfloat16", direction="grad_weight", accumulate=True, deterministic=True),
        layer(3, 33, kernel=5, layout="NCHW", dilation=3, direction="grad_weight"),
    )
    refused = (
        (layer(64, 56), "direction"),
        (layer(64, 56, kernel=3, direction="grad_weight"), "taps"),
        (layer(64, 56, dtype="float32", direction="grad_weight"), "dtype"),
        (layer(64, 2000, kernel=16, s=1, dilation=130, padding=0, direction="grad_weight"), "shared memory"),
    )


SMALL = {"channels": [4], "height": [2, 4, 7], "down": [1, 2]}
SHAPES: dict[str, dict[str, Any]] = {
    "7x7": dict(n=1, c=8, h=9, w=11, r=7, s=7, padding=3),
    "5x5 with an epilogue": dict(
        n=1, c=4, h=6, w=18, r=5, s=5, padding=2, dtype="bfloat16", epilogue=["bias", "residual", "relu"]
    ),
    "odd channels, dx added": dict(
        n=3, c=5, h=7, w=7, r=4, s=4, padding=(1, 2, 3, 0), direction="grad_input", accumulate=True
    ),
    "dilation, weights by tap": dict(n=1, c=2, h=8, w=20, r=4, s=4, padding=3, dilation=(2, 3), weight_layout="HWIO"),
    "two products": dict(n=1, c=4, h=5, w=24, r=2, s=13, padding=(0, 6), epilogue=["scale_shift", "clip"]),
    "dx with dilation": dict(n=2, c=4, h=8, w=9, r=7, s=3, padding=(3, 1), dilation=(1, 2), direction="grad_input"),
}


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.mostly_long(3)
def test_strips_give_the_definition(monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], layout: str) -> None:
    workload = depthwise_conv2d(**shape, layout=layout)
    few = MMA.space(workload, H200).restrict({**SMALL, "tiles": [1, 2], "each": [1 if layout == "NCHW" else 2]})
    emulate(monkeypatch, MMA, workload, few.sample(1, np.random.default_rng(1))[0])


FILTERS: dict[str, dict[str, Any]] = {
    "7x7": dict(n=2, c=8, h=9, w=11, r=7, s=7, padding=3),
    "4x4, odd channels": dict(n=3, c=5, h=7, w=7, r=4, s=4, padding=(1, 2, 3, 0), accumulate=True),
    "dilation": dict(n=1, c=2, h=8, w=20, r=4, s=4, padding=3, dilation=(2, 3), weight_layout="HWIO", dtype="bfloat16"),
    "two products": dict(n=2, c=4, h=5, w=24, r=2, s=13, padding=(0, 6)),
}


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("shape", FILTERS.values(), ids=FILTERS)
@pytest.mark.mostly_long(3)
def test_gradients_of_bands_give_those_of_filters(
    monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], layout: str
) -> None:
    workload = depthwise_conv2d(**shape, layout=layout, direction="grad_weight")
    few = DW.space(workload, H200).restrict({**SMALL, "splits": [1, 2] if layout == "NCHW" else [2, 4]})
    emulate(monkeypatch, DW, workload, few.sample(1, np.random.default_rng(1))[0])


@pytest.mark.long
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_any_configuration_gives_the_definition(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Also tiles of 32 channels, and of several images."""
    workload = depthwise_conv2d(n=3, c=12, h=7, w=9, r=5, s=5, padding=2, layout=layout)
    space = MMA.space(workload, H200)
    for config in [*space.sample(1, np.random.default_rng(0)), MMA.default(workload, H200, space)]:
        emulate(monkeypatch, MMA, workload, config)


def test_the_sources_of_a_target() -> None:
    """A gradient meets its sources from the filter's last tap on."""
    forward = Reach.of(Axis(sources=20, targets=20, taps=5, up=1, down=1, tap_step=2, shift=-4))
    assert (forward.first, forward.extent, [forward.tap(i) for i in range(5)]) == (-4, 9, [0, 1, 2, 3, 4])
    gradient = Reach.of(Axis(sources=20, targets=20, taps=5, up=1, down=1, tap_step=-2, shift=4))
    assert (gradient.first, gradient.extent, [gradient.tap(i) for i in range(5)]) == (-4, 9, [4, 3, 2, 1, 0])


def blocks_of(workload: Workload, channels: int = 16, height: int = 8, across: int = 4, down: int = 4) -> StripBlocks:
    return StripBlocks.of(workload, channels, 1, height, across, down, 1, 1)


def test_a_window_of_16_columns_has_what_8_targets_read() -> None:
    """8 targets of a 7x7 filter read 14 columns. In NCHW copies of 4 columns begin one before them; those of 8 would begin
    5 before, and take two products."""
    assert [blocks_of(layer(96, 56, kernel)).steps for kernel in (5, 7, 9, 11, 25)] == [1, 1, 1, 2, 2]
    of_channels, of_columns = blocks_of(layer(96, 56)), blocks_of(layer(96, 56, layout="NCHW"))
    assert (of_channels.of_copy, of_channels.slack, of_channels.sources.first[1], of_channels.steps) == (8, 0, -3, 1)
    assert (of_columns.of_copy, of_columns.slack, of_columns.sources.first[1], of_columns.steps) == (4, 1, -4, 1)
    assert blocks_of(layer(96, 33, layout="NCHW")).of_copy == 1
    assert blocks_of(layer(96, 56, kernel=8, padding=8, layout="NCHW")).of_copy == 8


@pytest.mark.parametrize(("across", "down", "height"), [(8, 2, 8), (4, 4, 4), (4, 4, 14), (2, 8, 7), (7, 2, 7)])
def test_eight_windows_are_in_different_banks(across: int, down: int, height: int) -> None:
    """ldmatrix reads 16 bytes of eight strips at once. Not so of strips with 8 rows, one below the other: their rows are
    multiples of 4 words, so the strips are multiples of 32 apart."""
    blocks = blocks_of(layer(96, 56), height=height, across=across, down=down)
    row, image, plane = blocks.sources.pitches
    words = [
        strip // across * height * row + strip % across * 4 + word for strip in range(8) for word in range(4)
    ]  # fmt: skip
    assert row % 4 == image % 4 == plane % 4 == 0
    assert sorted(word % 32 for word in words) == list(range(32))
    assert blocks.sources.group_words % 32 == 16  # a warp writes 16 pairs of pixels to a plane of each half of the channels


def test_it_comes_behind_templates_that_cards_have_measured() -> None:
    """Of several templates, the first one's default serves a workload that has no record."""
    for test in (TestMma, TestDwMma):
        for workload in test.accepted:
            names = [template.name for template in load_templates().matching(workload, H200)]
            assert names[-1] == test.template.name and len(names) > 1


@pytest.mark.long
@pytest.mark.parametrize("card", ["a100", "h200", "rtx5090"])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_machine_code(layout: str, card: str) -> None:
    """A product for each row of the filter and of the strip, a load for each row of sources, and no spills."""
    workload, target = layer(96, 56, layout=layout), PRESETS[card]
    config = Config(channels=16, each=1, height=8, across=7, down=2, images=1, tiles=2, registers=128)
    assert not MMA.space(workload, target).check(config)
    built = compile_source(MMA.kernel(workload, target, config), target)
    assert built.resources.spill_bytes == built.resources.local_bytes == 0
    opcodes = [each & 0xFFF for each in instructions(built.artifact.code)]
    assert opcodes.count(HMMA) == 7 * 8 and opcodes.count(LDSM) == 8 + 6


@pytest.mark.long
@pytest.mark.parametrize("card", ["a100", "h200", "rtx5090"])
def test_machine_code_of_dw(card: str) -> None:
    """Besides, a load for each row of targets."""
    workload, target = layer(96, 56, direction="grad_weight"), PRESETS[card]
    config = Config(channels=16, height=4, across=7, down=2, images=1, splits=64, registers=128)
    assert not DW.space(workload, target).check(config)
    built = compile_source(DW.kernel(workload, target, config), target)
    assert built.resources.spill_bytes == built.resources.local_bytes == 0
    opcodes = [each & 0xFFF for each in instructions(built.artifact.code)]
    assert opcodes.count(HMMA) == 7 * 4 and opcodes.count(LDSM) == 4 + 6 + 4


@pytest.mark.long
def test_samples_compile_without_spills() -> None:
    rng = np.random.default_rng(5)
    for test in (TestMma, TestDwMma):
        for workload in test.accepted:
            (config,) = test.template.space(workload, H200).sample(1, rng)
            resources = compile_source(test.template.kernel(workload, H200, config), H200).resources
            assert resources.spill_bytes == resources.local_bytes == 0, (workload.label, dict(config), resources)


def test_older_cards_are_refused() -> None:
    turing = Target("cuda", "Tesla T4", (7, 5), 40, 65536, 65536, 65536, 1024)
    assert "8.0" in str(MMA.validate(layer(64, 56), turing))


DEVICE_SHAPES = [*SHAPES, "56x56", "14x14", "dw 56x56", "dw 14x14"]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("number", range(len(DEVICE_SHAPES)), ids=DEVICE_SHAPES.__getitem__)
def test_results_on_a_device(some_of: Callable[..., Any], number: int, layout: str) -> None:
    from schedsearch.device import open_device

    larger = {
        "56x56": layer(40, 56, n=3, layout=layout, epilogue=("bias", "relu")),
        "14x14": layer(72, 14, n=9, layout=layout, direction="grad_input", dtype="bfloat16"),
        "dw 56x56": layer(40, 56, n=3, layout=layout, direction="grad_weight"),
        "dw 14x14": layer(72, 14, n=9, layout=layout, direction="grad_weight", dtype="bfloat16", accumulate=True),
    }
    shape = DEVICE_SHAPES[number]
    workload = larger[shape] if shape in larger else depthwise_conv2d(**SHAPES[shape], layout=layout)
    device = open_device(detect("cuda"))
    try:
        template = DW if workload.direction == "grad_weight" else MMA
        space = template.space(workload, device.target)
        configs = [template.default(workload, device.target, space), *space.sample(3, np.random.default_rng(0))]
        for config in some_of(configs, number):
            run_on_device(device, template, workload, config)
    finally:
        device.close()
