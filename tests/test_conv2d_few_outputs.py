"""conv2d_few_outputs: what it supports, its kernel in the emulator, its machine code, and results on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conv2d_numpy import integers, numpy_conv2d, to_bits
from row_emulator import RowEmulator

import schedsearch.templates.conv2d.few_outputs as module
from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.target import PRESETS, Target
from schedsearch.templates.conv2d import placement
from schedsearch.testing.emulator import Memory
from schedsearch.workload import Workload

H200, A100 = PRESETS["h200"], PRESETS["a100"]
TEMPLATE = module.Conv2dFewOutputs()
SMALL = {"pixels": 16, "rows": 8, "warps": 1, "prefetch": 2, "blocks_per_sm": 1}
SHAPE: dict[str, Any] = {"n": 1, "h": 9, "w": 19, "c": 16, "k": 3, "r": 3, "s": 3, "padding": 1}
SHUFFLE = [{"depth_to_space": {"block": 2, "mode": "CRD"}}]
LAYER = Workload.conv2d(**{**SHAPE, "h": 2880, "w": 5120}, epilogue=["bias"])
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two tiles each way": (SHAPE, SMALL),
    "y in NCHW, two images, bfloat16": ({**SHAPE, "n": 2, "h": 3, "output_layout": "NCHW", "dtype": "bfloat16"}, SMALL),
    "32 pixels, 2 warps, no padding, float32 out": (
        {**SHAPE, "w": 70, "padding": 0, "out_dtype": "float32"},
        {**SMALL, "pixels": 32, "warps": 2, "prefetch": 0},
    ),
    "32 channels, 12 outputs through depth_to_space": (
        {**SHAPE, "c": 32, "k": 12, "w": 11, "h": 5, "epilogue": SHUFFLE},
        {**SMALL, "pixels": 16},
    ),
    "5 x 1 taps, uneven padding, a single output": (
        {**SHAPE, "k": 1, "r": 5, "s": 1, "padding": (3, 0, 1, 2)},
        {**SMALL, "prefetch": 4},
    ),
    "2 x 4 taps, an even number of rows": ({**SHAPE, "h": 7, "r": 2, "s": 4, "padding": (0, 3, 1, 0)}, SMALL),
    "1 x 1": ({**SHAPE, "h": 3, "r": 1, "s": 1, "padding": 0}, SMALL),
}


@pytest.mark.parametrize(("shape", "config"), CASES.values(), ids=CASES)
@pytest.mark.mostly_long(3)
def test_the_kernel_computes_the_convolution(
    monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], config: dict[str, Any]
) -> None:
    workload = Workload.conv2d(**shape)
    assert TEMPLATE.validate(workload, H200) is None
    assert TEMPLATE.space(workload, H200).check(Config(config)) == []
    emulator = RowEmulator(Memory(), lambda value, *_: value, False)
    emulator.stand_in(monkeypatch, module, placement)
    arrays = integers(workload, np.random.default_rng(0))
    y = np.full(workload.output.shape, np.nan, np.float32)
    y = y if workload.out_dtype == "float32" else y.view(np.uint16).reshape(-1)[: y.size].reshape(y.shape).copy()
    bias = np.arange(workload.k, dtype=np.float32) - 1

    def single(value: Any, valid: int, k: int, offset: int, *_: Any) -> Any:
        assert valid and 0 <= offset < y.size
        return np.float32(value + bias[k])

    monkeypatch.setattr(module, "Epilogue", lambda _: SimpleNamespace(params=(), alignments={}, single=single))
    (step,) = TEMPLATE.kernel(workload, H200, Config(config)).steps
    data = {name: to_bits(array, workload.dtype) for name, array in arrays.items()}
    emulator.run(step, {name: emulator.memory.add(array) for name, array in {**data, "y": y}.items()}, 2)

    biased = workload.replace(epilogue=["bias", *workload.epilogue])
    right = numpy_conv2d(biased, {**arrays, "bias": bias})
    np.testing.assert_array_equal(y, to_bits(right, workload.out_dtype))


@pytest.mark.parametrize("target", [H200, A100], ids=["sm_90", "sm_80"])
@pytest.mark.parametrize("change", [{}, {"pixels": 16, "blocks_per_sm": 2}], ids=str)
@pytest.mark.mostly_long(4)
def test_all_of_a_warps_data_stay_in_registers(target: Target, change: dict[str, Any]) -> None:
    space = TEMPLATE.space(LAYER, target)
    default = TEMPLATE.default(LAYER, target, space)
    assert space.check(default) == []
    config = Config({**default, "warps": 4, **change})
    if space.check(config):
        pytest.skip("the space has no such configuration")
    resources = compile_source(TEMPLATE.kernel(LAYER, target, config), target).resources
    assert (resources.local_bytes, resources.spill_bytes, resources.shared_bytes) == (0, 0, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": 24}, "k is 24; allowed: up to 16"),
        ({"c": 24}, "c is 24; allowed: multiples of 16"),
        ({"stride": 2}, "stride and dilation are (2, 2) and (1, 1); allowed: 1"),
        ({"dtype": "float32"}, "dtype is float32; allowed: float16, bfloat16"),
        ({"layout": "NCHW"}, "NCHW and OIHW; allowed: NHWC and OHWI"),
        ({"groups": 3, "c": 48}, "groups is 3; allowed: 1"),
        ({"c": 512}, "3 x 3 taps of 512 channels need"),
        ({"r": 1, "s": 17, "w": 40}, "kernels up to 16 wide"),
        ({"k": 4, "epilogue": ["residual", *SHUFFLE]}, "depth_to_space after residual"),
    ],
    ids=str,
)
def test_a_workload_that_it_cannot_compute_is_refused(change: dict[str, Any], words: str) -> None:
    assert words in str(TEMPLATE.validate(Workload.conv2d(**{**SHAPE, **change}), H200))


def test_old_gpus_are_refused() -> None:
    assert "8.0 or later" in str(TEMPLATE.validate(LAYER, dataclasses.replace(A100, compute_capability=(7, 5))))


def test_the_default_has_the_least_predicted_time() -> None:
    """Of all legal configurations with 1 or 4 warps that fetch 4 rows ahead."""
    for change in ({}, {"h": 720, "w": 1280}, {"n": 8, "h": 224, "w": 224, "c": 32, "k": 12}, {"h": 33, "w": 1000, "s": 5}):
        workload = Workload.conv2d(**{**SHAPE, **change})
        space = TEMPLATE.space(workload, H200)

        def cycles(config: Mapping[str, Any], derived: Any = space.derived) -> float:
            q = dict(config)
            for name, formula in derived.items():
                q[name] = formula(q)
            return float(q["predicted_cycles"])

        default = TEMPLATE.default(workload, H200, space)
        legal = space.restrict({"warps": [1, 4], "prefetch": [4]})
        assert cycles(default) == min(map(cycles, legal.configs(np.concatenate(list(legal.walk())))))
