"""depthwise_conv2d_planes_cuda: small planes in shared memory, emulated against the definition and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from depthwise_cuda_support import H200, assert_compiles, emulate, run_on_device

from schedsearch import Workload, depthwise_conv2d
from schedsearch.device.detect import detect
from schedsearch.target import PRESETS
from schedsearch.template import load_template
from schedsearch.templates.depthwise_conv2d.cuda_planes import strip_of
from schedsearch.testing.template_contract import TemplateContract

PLANES = load_template("depthwise_conv2d_planes_cuda")


def layer(c: int, size: int, kernel: int = 3, stride: int = 1, dilation: int = 1, **more: Any) -> Workload:
    """A layer in NCHW with the padding that keeps the size at stride 1."""
    given: dict[str, Any] = dict(
        n=32, c=c, h=size, w=size, r=kernel, s=kernel, stride=stride, dilation=dilation,
        padding=(kernel - 1) * dilation // 2, layout="NCHW",
    )  # fmt: skip
    return depthwise_conv2d(**{**given, **more})


class TestPlanes(TemplateContract):
    template, target, compiled = PLANES, H200, 1
    accepted = (
        layer(1024, 7, epilogue=("scale_shift", "relu")),
        layer(512, 14, stride=2, direction="grad_input", dtype="float32", accumulate=True),
    )
    refused = (
        (layer(64, 7, layout="NHWC"), "layout"),
        (layer(64, 56), "columns"),
        (layer(64, 14, kernel=9), "taps"),
        (layer(64, 7, multiplier=2), "multiplier"),
        (layer(64, 7, direction="grad_weight"), "direction"),
        (layer(64, 24, h=9000), "shared memory"),
        (layer(1222, 22, s=2, h=192, stride=(2, 1), padding=(3, 2, 1, 2), direction="grad_input"), "registers"),
    )


SHAPES: dict[str, dict[str, Any]] = {
    "odd planes, the last block is not full": dict(n=3, c=5, h=7, w=7, r=3, s=3, padding=1),
    "epilogue": dict(n=2, c=4, h=6, w=5, r=3, s=3, padding=(0, 1), epilogue=["bias", "residual", "relu"], dtype="float32"),
    "stride 2": dict(n=2, c=3, h=9, w=8, r=3, s=3, padding=1, stride=2, dtype="bfloat16"),
    "dilation, a filter larger than the image": dict(n=1, c=3, h=4, w=6, r=5, s=5, padding=4, dilation=2),
    "dx, stride 2": dict(n=2, c=3, h=9, w=8, r=5, s=3, padding=(2, 1), stride=2, direction="grad_input"),
    "dx, strides 1 and 3, added": dict(
        n=1, c=4, h=6, w=7, r=3, s=3, padding=2, stride=(1, 3), dilation=(2, 1), direction="grad_input", accumulate=True
    ),
    "weights by tap": dict(n=1, c=9, h=5, w=4, r=2, s=3, padding=1, weight_layout="HWIO", dtype="float32"),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.mostly_long(3)
def test_strips_of_planes_give_the_definition(monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]) -> None:
    workload = depthwise_conv2d(**shape, layout="NCHW")
    space = PLANES.space(workload, H200)
    for order, config in zip(("planes", "strips"), space.sample(2, np.random.default_rng(1))):
        small = space.restrict({"order": [order], "planes": [n for n in (2, 4, 8, 16) if n <= 2 * config["planes"]]})
        emulate(monkeypatch, PLANES, workload, small.sample(1, np.random.default_rng(2))[0])
    emulate(monkeypatch, PLANES, workload, PLANES.default(workload, H200, space))


def test_an_infinite_number_reaches_only_the_results_that_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = layer(3, 5, n=1, dtype="float32")

    def infinite(arrays: dict[str, Any]) -> None:
        arrays["x"][0, 1, 0, 4] = np.inf

    emulate(monkeypatch, PLANES, workload, PLANES.default(workload, H200, PLANES.space(workload, H200)), change=infinite)


def test_a_strip_computes_only_products_that_exist() -> None:
    """A whole 7 x 7 plane has 19 * 19 pairs of a pixel and a tap of a 3 x 3 filter, along each axis 7 + 6 + 6."""
    strip = strip_of(layer(1024, 7), 7)
    assert strip.alone and strip.products == 19 * 19
    assert strip_of(layer(512, 14), 2).products == 2 * 3 * (14 + 13 + 13)
    assert strip_of(layer(512, 14, stride=2, direction="grad_input"), 14).products == (7 + 7 + 6) ** 2


@pytest.mark.long
@pytest.mark.parametrize("capability", ["h200", "a100"])
def test_defaults_compile_without_spills(capability: str) -> None:
    for workload in (layer(1024, 7), layer(512, 14, dtype="float32", direction="grad_input")):
        assert_compiles(PLANES, workload, PRESETS[capability])


# --- dw -----------------------------------------------------------------------------------------------------------------
FILTERS = load_template("depthwise_conv2d_dw_planes_cuda")
FILTER_SHAPES: dict[str, dict[str, Any]] = {
    "odd planes, the last block is not full": dict(n=3, c=8, h=7, w=7, r=3, s=3, padding=1),
    "stride 2, added": dict(n=2, c=4, h=9, w=8, r=3, s=3, padding=1, stride=2, accumulate=True, dtype="float32"),
    "dilation, weights by tap": dict(n=4, c=8, h=4, w=6, r=5, s=2, padding=4, dilation=(2, 1), weight_layout="HWIO"),
}


class TestFilters(TemplateContract):
    template, target, compiled = FILTERS, H200, 1
    accepted = (
        layer(1024, 7, direction="grad_weight"),
        layer(512, 14, stride=2, direction="grad_weight", dtype="float32", accumulate=True, deterministic=True),
    )
    refused = (
        (layer(64, 7), "direction"),
        (layer(3, 7, direction="grad_weight"), "an image of x has 294 bytes"),
        (layer(64, 56, direction="grad_weight"), "columns"),
    )


@pytest.mark.parametrize("shape", FILTER_SHAPES.values(), ids=FILTER_SHAPES)
def test_sums_of_strips_and_splits_give_the_definition(monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]) -> None:
    workload = depthwise_conv2d(**shape, layout="NCHW", direction="grad_weight")
    space = FILTERS.space(workload, H200)
    for splits, buffers in ((1, 2), (2, 1)):
        few = space.restrict({"splits": [splits], "buffers": [buffers], "planes": [2, 4, 8]})
        emulate(monkeypatch, FILTERS, workload, few.sample(1, np.random.default_rng(3))[0])
    emulate(monkeypatch, FILTERS, workload, FILTERS.default(workload, H200, space))


@pytest.mark.long
def test_defaults_of_dw_compile_without_spills() -> None:
    for workload in (layer(1024, 7), layer(512, 14, dtype="float32")):
        assert_compiles(FILTERS, workload.replace(direction="grad_weight"), H200)


# --- Both gradients by one plan -----------------------------------------------------------------------------------------
BOTH = load_template("depthwise_conv2d_both_cuda")


class TestBoth(TemplateContract):
    template, target, compiled = BOTH, H200, 1
    accepted = (
        layer(512, 14, direction="grad_both", accumulate=True, deterministic=True),
        layer(64, 56, direction="grad_both", layout="NHWC", dtype="float32"),
    )
    refused = ((layer(64, 7), "grad_both"), (layer(64, 300, stride=12, direction="grad_both"), "dx_: a gradient's patch"))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.mostly_long(3)
def test_both_gradients_are_those_of_the_definition(monkeypatch: pytest.MonkeyPatch, layout: str, accumulate: bool) -> None:
    workload = depthwise_conv2d(
        n=2, c=4, h=6, w=5, r=3, s=2, padding=1, stride=2, direction="grad_both", layout=layout, accumulate=accumulate
    )
    space = BOTH.space(workload, H200)
    emulate(monkeypatch, BOTH, workload, BOTH.default(workload, H200, space))
    emulate(monkeypatch, BOTH, workload, space.sample(1, np.random.default_rng(0))[0])


DEVICE_SHAPES = [*SHAPES, "7x7", "14x14", "both", "dw"]


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(DEVICE_SHAPES)), ids=DEVICE_SHAPES.__getitem__)
def test_results_on_a_device(some_of: Callable[..., Any], number: int) -> None:
    from schedsearch.device import open_device

    both = layer(96, 14, n=3, direction="grad_both")
    larger = {
        "dw": layer(72, 7, n=9, direction="grad_weight"),
        "7x7": layer(96, 7),
        "both": both,
        "14x14": layer(40, 14, kernel=5, n=5, direction="grad_input", dtype="float32"),
    }
    shape = DEVICE_SHAPES[number]
    workload = larger[shape] if shape in larger else depthwise_conv2d(**SHAPES[shape], layout="NCHW")
    device = open_device(detect("cuda"))
    try:
        template = {"grad_both": BOTH, "grad_weight": FILTERS}.get(workload.direction, PLANES)
        space = template.space(workload, device.target)
        configs = [template.default(workload, device.target, space), *space.sample(1, np.random.default_rng(0))]
        for config in some_of(configs, number):
            run_on_device(device, template, workload, config)
    finally:
        device.close()
