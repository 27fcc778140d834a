"""conv2d_cpu_int8 is right in every bit: for every layout, sign, zero point, group size, stage and configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import integer_model
import numpy as np
import pytest
from conv2d_support import run_on_cpu

from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.ops.conv2d import conv2d
from schedsearch.target import Target
from schedsearch.templates.conv2d.cpu_int8 import Conv2dCpuInt8
from schedsearch.workload import Workload

TEMPLATE, HOST = Conv2dCpuInt8(), detect("cpu")
STORAGE = {"bfloat16": "uint16"}


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(HOST)
    yield device
    device.close()


def check(device: CpuDevice, w: Workload, config: Config) -> None:
    assert TEMPLATE.validate(w, HOST) is None
    assert TEMPLATE.space(w, HOST).check(config) == []
    arrays = integer_model.arguments(w)
    scalars = {scalar.name: integer_model.SCALARS[scalar.name] for scalar in w.scalars}
    outputs = {"y": (w.output.shape, STORAGE.get(w.output.dtype, w.output.dtype))}
    y = run_on_cpu(device, TEMPLATE.kernel(w, HOST, config), arrays, outputs, scalars)["y"]
    np.testing.assert_array_equal(y, integer_model.expected(w, arrays), err_msg=f"{w.label} with {config}")


def default(w: Workload, target: Target = HOST) -> Config:
    return TEMPLATE.default(w, target, TEMPLATE.space(w, target))


def drawn(w: Workload, seed: int = 0, **restricted: Any) -> Config:
    space = TEMPLATE.space(w, HOST).restrict({name: [value] for name, value in restricted.items()})
    return space.sample(1, np.random.default_rng(seed))[0]


SMALL: dict[str, Any] = {"n": 2, "h": 8, "w": 9, "c": 24, "k": 20, "r": 3, "s": 2}
CASES: dict[str, dict[str, Any]] = {  # each has several properties, because a case takes two seconds of compiling
    "int8 by int8, zero points, channels that fill no word": {
        **SMALL, "dtype": "int8", "c": 7, "padding": (2, 0, 1, 3), "stride": (2, 1), "zero_points": ["x", "weight"],
    },
    "uint8 by uint8, NCHW, dilation, unsigned sums": {
        **SMALL, "dtype": "uint8", "layout": "NCHW", "dilation": (2, 3), "padding": 2,
        "epilogue": ["residual", "clip", "bias", "relu"],
    },
    "int8 by uint8, in place, other layout of weights, float32": {
        **SMALL, "dtype": "int8", "weight_dtype": "uint8", "weight_layout": "OIHW",
        "epilogue": ["bias", "dequantise", "residual", "relu"],
    },
    "uint8 by int8, NCHW6c, groups": {
        **SMALL, "dtype": "uint8", "weight_dtype": "int8", "layout": "NCHW6c", "k": 36, "groups": 2,
        "zero_points": ["weight"], "padding": 1,
    },
    "NCHW32c in place, requantised": {
        **SMALL, "dtype": "int8", "layout": "NCHW32c", "c": 64, "k": 64, "r": 1, "s": 1,
        "epilogue": ["bias", "residual", "relu", "requantise"],
    },
    "groups of three, with a multiplier, requantised to uint8": {
        **SMALL, "dtype": "uint8", "weight_dtype": "int8", "c": 9, "k": 18, "groups": 3, "zero_points": ["x"],
        "layout": "NCHW", "epilogue": ["bias", "clip", {"requantise": {"to": "uint8"}}],
    },
    "depthwise, zero points, float16": {
        **SMALL, "dtype": "uint8", "k": 24, "groups": 24, "padding": 1, "stride": 2, "zero_points": ["x", "weight"],
        "epilogue": [{"dequantise": {"to": "float16"}}, "scale_shift", "residual", "leaky_relu"],
    },
    "a batch norm, quantised": {
        **SMALL, "dtype": "int8", "c": 8, "layout": "NCHW4c", "padding": 1,
        "epilogue": ["bias", "dequantise", "scale_shift", "relu", {"quantise": {"to": "uint8"}}],
    },
    "depthwise, in place, bfloat16": {
        **SMALL, "dtype": "int8", "c": 32, "k": 32, "groups": 32, "epilogue": [{"dequantise": {"to": "bfloat16"}}, "clip"],
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_default_is_exact(device: CpuDevice, case: str) -> None:
    w = conv2d(**CASES[case])
    check(device, w, default(w))
