"""The smooth activations of epilogues: their instructions on a GPU, their functions on a CPU, and kernels that have them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from schedsearch import Workload, depthwise_conv2d
from schedsearch.backend import compile_source
from schedsearch.device.cpu import CpuDevice
from schedsearch.ops import STAGES
from schedsearch.target import PRESETS
from schedsearch.template import load_template
from schedsearch.templates.parts.stages import STAGE_CODES
from schedsearch.verification.verify import verify_once

ACTIVATIONS = ("sigmoid", "silu", "hard_swish", "gelu")
X = np.concatenate([np.linspace(-20, 20, 4001), [-3e38, -1000, -90, 0.0, 90, 1000, 3e38]]).astype(np.float32)
ERRORS = {"sigmoid": 4e-7, "silu": 5e-7, "hard_swish": 2e-7, "gelu": 4e-7}  # relative to 1, or |x| if it is larger


def truth(name: str) -> Any:
    x = X.astype(np.float64)
    erf = np.vectorize(math.erf)
    sigmoid = 0.5 * (1 + np.tanh(x / 2))
    return {
        "sigmoid": sigmoid,
        "silu": x * sigmoid,
        "hard_swish": x * np.clip(x / 6 + 0.5, 0, 1),
        "gelu": 0.5 * x * (1 + erf(x / np.sqrt(2))),
    }[name]


def assert_near(name: str, found: Any) -> None:
    size = 1 if name == "sigmoid" else np.maximum(np.abs(X.astype(np.float64)), 1)
    error = np.abs(np.asarray(found, np.float64) - truth(name)) / size
    assert error.max() < ERRORS[name], X[error.argmax()]


def run_ptx(text: str, value: Any) -> Any:
    """Executes the instructions of a stage on an array of float32; approximations are exact, and flush small numbers."""

    def flushed(number: Any) -> Any:
        return np.where(np.abs(number) < 2.0**-126, np.float32(0), number)

    wide = np.float64
    operations: dict[str, Callable[..., Any]] = {
        "mov.f32": lambda a: a,
        "abs.f32": np.abs,
        "min.f32": np.fmin,  # the number, if the other one is NaN
        "mul.f32": np.multiply,
        "add.f32": np.add,
        "sub.f32": np.subtract,
        "fma.rn.f32": lambda a, b, c: wide(a) * wide(b) + wide(c),
        "fma.rn.sat.f32": lambda a, b, c: np.nan_to_num(np.clip(wide(a) * wide(b) + wide(c), 0, 1), nan=0.0),
        "ex2.approx.ftz.f32": lambda a: flushed(np.exp2(wide(a))),
        "rcp.approx.ftz.f32": lambda a: flushed(1 / wide(a)),
        "setp.lt.f32": np.less,
        "selp.f32": lambda a, b, q: np.where(q, a, b),
    }
    registers = {"value": value}
    names = {"value": "value", **{f"temporary{i}": f"t{i}" for i in range(4)}}
    with np.errstate(all="ignore"):
        for name, operands in re.findall(r"([a-z][\w.]+) ([^;]+);", text.format(**names)):
            to, *sources = operands.split(", ")
            given = [
                np.full(value.shape, np.array([int(each[2:], 16)], np.uint32).view(np.float32)) if each[:2] == "0f"
                else registers[each]
                for each in sources
            ]  # fmt: skip
            found = operations[name](*given)
            registers[to] = found if name.startswith("setp") else np.asarray(found).astype(np.float32)
    return registers["value"]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_instructions_for_a_gpu_are_near_the_function(name: str) -> None:
    assert_near(name, run_ptx(STAGE_CODES[name].ptx, X))
    special = run_ptx(STAGE_CODES[name].ptx, np.array([np.nan, np.inf], np.float32))
    assert np.isnan(special[0]) and special[1] == (1 if name == "sigmoid" else np.inf)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_definition_is_the_function(name: str) -> None:
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(STAGES[name].apply(X.astype(np.float64), {}, {}, {}), truth(name), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.mostly_long(4)
def test_verification_accepts_a_kernel_and_refuses_one_with_relu(device: CpuDevice, name: str) -> None:
    template = load_template("conv2d_cpu")
    workload = Workload.conv2d(n=1, h=4, w=5, c=8, k=16, r=1, s=1, dtype="float32", epilogue=["bias", name])
    for made_for, right in ((workload, True), (workload.replace(epilogue=["bias", "relu"]), False)):
        config = template.default(made_for, device.target, template.space(made_for, device.target))
        kernel = device.load(compile_source(template.kernel(made_for, device.target, config), device.target).artifact)
        assert (verify_once(device, workload, kernel) is None) is right
        kernel.close()


@pytest.mark.long
@pytest.mark.parametrize("name", ["conv2d_wgmma", "matmul_wgmma", "depthwise_conv2d_cuda"])
def test_the_stages_compile_for_hopper_without_spills(name: str) -> None:
    template, target = load_template(name), PRESETS["h200"]
    workload = {
        "conv2d_wgmma": Workload.conv2d(n=1, h=28, w=28, c=64, k=128, r=1, s=1, epilogue=["bias", "gelu"]),
        "matmul_wgmma": Workload("dense", {"m": 256, "n": 256, "k": 128, "epilogue": ["bias", "gelu"]}),
        "depthwise_conv2d_cuda": depthwise_conv2d(n=1, h=28, w=28, c=64, r=3, s=3, padding=1, epilogue=["bias", "silu"]),
    }[name]
    assert template.validate(workload, target) is None
    source = template.kernel(workload, target, template.default(workload, target, template.space(workload, target)))
    assert compile_source(source, target).resources.spill_bytes == 0
