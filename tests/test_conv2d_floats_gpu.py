"""TF32, float8 and three TF32 products on a GPU: verification accepts the kernels, and hardware is what the tests assume."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.template import load_template
from schedsearch.verification.verify import verify_once
from schedsearch.workload import Workload

LAYER: dict[str, Any] = {"n": 3, "h": 15, "w": 13, "c": 80, "k": 72, "r": 3, "s": 3, "padding": (1, 2, 0, 1)}
FLOAT8: dict[str, Any] = {**LAYER, "dtype": "float8_e4m3"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "TF32": ("conv2d_wgmma", {**LAYER, "dtype": "float32", "precision": "tf32", "epilogue": ["bias", "relu"]}),
    "TF32, strided": ("conv2d_wgmma", {**LAYER, "c": 20, "stride": 2, "dtype": "float32", "precision": "tf32"}),
    "E4M3": ("conv2d_wgmma", FLOAT8),
    "E4M3 x E5M2, scaled": (
        "conv2d_wgmma",
        {**FLOAT8, "weight_dtype": "float8_e5m2", "epilogue": [{"dequantise": {"to": "bfloat16"}}, "residual", "relu"]},
    ),
    "E5M2, float32 out": ("conv2d_wgmma", {**FLOAT8, "dtype": "float8_e5m2", "out_dtype": "float32", "c": 512}),
    "TF32, each pixel once": (
        "conv2d_halo",
        {**LAYER, "dtype": "float32", "precision": "tf32", "epilogue": ["bias", "residual"]},
    ),
    "TF32, merged groups": ("conv2d_halo", {**LAYER, "k": 80, "dtype": "float32", "precision": "tf32", "groups": 20}),
    "E4M3 x E5M2, each pixel once": (
        "conv2d_halo",
        {**FLOAT8, "weight_dtype": "float8_e5m2", "epilogue": [{"dequantise": {"to": "bfloat16"}}, "residual", "relu"]},
    ),
    "three products": ("conv2d_tf32x3", {**LAYER, "dtype": "float32", "epilogue": ["scale_shift", "leaky_relu"]}),
    "three products, 1x1": ("conv2d_tf32x3", {**LAYER, "dtype": "float32", "c": 12, "r": 1, "s": 1, "padding": 0}),
}


def configurations(template: Any, workload: Workload, target: Any, count: int) -> list[Config]:
    space = template.space(workload, target)
    return [template.default(workload, target, space), *space.sample(count, np.random.default_rng(0))]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_verification_accepts_the_kernels(case: str) -> None:
    name, params = CASES[case]
    target, template, workload = detect("cuda"), load_template(name), Workload.conv2d(**params)
    if reason := template.validate(workload, target):
        pytest.skip(reason)
    with contextlib.closing(open_device(target)) as device:
        for config in configurations(template, workload, target, 1):
            kernel = device.load(compile_source(template.kernel(workload, target, config), target).artifact)
            assert verify_once(device, workload, kernel) is None, config
            kernel.close()


def run(params: dict[str, Any], values: dict[str, Any]) -> Any:
    """y of the default configuration of conv2d_wgmma; each argument is filled with a row of bits along its channels."""
    target, template = detect("cuda"), load_template("conv2d_wgmma")
    workload = Workload.conv2d(**params)
    if reason := template.validate(workload, target):
        pytest.skip(reason)
    config = template.default(workload, target, template.space(workload, target))
    with contextlib.closing(open_device(target)) as device:
        kernel = device.load(compile_source(template.kernel(workload, target, config), target).artifact)
        addresses, arrays = {}, {}
        for spec in workload.signature:
            arrays[spec.name] = np.ascontiguousarray(np.broadcast_to(values[spec.name], spec.shape))
            addresses[spec.name] = device.allocate(spec.nbytes)
            device.copy_in(addresses[spec.name], arrays[spec.name].reshape(-1).view(np.uint8).data)
        y = np.empty(workload.output.shape, np.float32)
        addresses["y"] = device.allocate(y.nbytes)
        kernel.bind(addresses, {}).launch()
        device.synchronize()
        device.copy_out(y.data, addresses["y"])
        kernel.close()
    return y


@pytest.mark.gpu
def test_tensor_cores_ignore_the_low_13_bits_of_float32() -> None:
    """1 + 2^-10 - 2^-23 is cut to 1, not rounded to 1 + 2^-10."""
    row = np.zeros(32, np.float32)
    row[0] = 1 + 2.0**-10 - 2.0**-23
    weight = np.zeros(32, np.float32)
    weight[0] = 1.0
    params = dict(n=1, h=8, w=8, c=32, k=32, r=1, s=1, dtype="float32", precision="tf32")
    np.testing.assert_array_equal(run(params, {"x": row, "weight": weight}), 1.0)


@pytest.mark.gpu
def test_tensor_cores_keep_14_bits_of_sums_of_float8() -> None:
    """256 + 2^-5 keeps its last bit, 256 + 2^-6 does not: 13 stored bits below 2^8 end at 2^-5."""
    params = dict(n=1, h=8, w=8, c=32, k=32, r=1, s=1, dtype="float8_e4m3", out_dtype="float32")
    weight = np.zeros(32, np.uint8)
    weight[:2] = 0x38  # 1
    for small, expected in ((0x10, 256 + 2.0**-5), (0x08, 256.0)):  # 2^-5, 2^-6
        row = np.zeros(32, np.uint8)
        row[:2] = 0x78, small  # 256
        np.testing.assert_array_equal(run(params, {"x": row, "weight": weight}), expected)
