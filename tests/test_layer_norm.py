"""layer_norm: the operator, its reference and templates, against NumPy and ONNX's node cases."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from bandwidth_support import H200, arrays_of, attributes, default, emulated, node_cases, on_cpu, verdict

from schedsearch import Workload, layer_norm
from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.ops.dtypes import decode, encode
from schedsearch.ops.layer_norm import LAYER_NORM
from schedsearch.template import load_reference, load_template
from schedsearch.templates.layer_norm import cuda_kernels
from schedsearch.templates.parts import groups, rows
from schedsearch.testing.op_contract import OpContract
from schedsearch.testing.template_contract import TemplateContract

CUDA, CPU = load_template("layer_norm_cuda"), load_template("layer_norm_cpu")
MODULES = (cuda_kernels, groups)


class TestLayerNorm(OpContract):
    op = LAYER_NORM
    examples = (
        {"x": [3, 7]},
        {"x": [2, 3, 4], "axis": 1, "epsilon": 0.5, "dtype": "float32"},
        {"x": [5], "bias": False, "centred": False, "dtype": "bfloat16"},
    )
    wrong = (
        ({"x": [3, 7], "axis": 2}, "axis"),
        ({"x": []}, "x"),
        ({"x": [3, 7], "dtype": "int8"}, "dtype"),
        ({"x": [3, 7], "epsilon": 0.0}, "epsilon"),
        ({"x": [3, 7], "bias": 1}, "bias"),
    )
    ids: ClassVar = {}

    def test_an_axis_has_one_number(self) -> None:
        assert layer_norm(x=(2, 3), axis=1).id == layer_norm(x=(2, 3)).id


SHAPES: list[dict[str, Any]] = [
    dict(x=(3, 40)),
    dict(x=(2, 1000), epsilon=0.5, dtype="float32"),
    dict(x=(5, 49), bias=False, dtype="bfloat16"),
    dict(x=(3, 4, 24), axis=1, centred=False),
    dict(x=(1, 40000), dtype="float32"),
]


def example(workload: Workload) -> tuple[dict[str, Any], Any]:
    """Random numbers far from zero, and y in float64."""
    rng = np.random.default_rng(0)
    row = workload.x[workload.axis :]
    x = rng.uniform(-6, 6, workload.x) + 20
    x = decode(encode(x, workload.dtype), workload.dtype).astype(np.float64)
    arrays = {"x": x, "scale": rng.uniform(-2, 2, row).astype(np.float32)}
    axes = tuple(range(workload.axis, 0))
    distance = x - x.mean(axis=axes, keepdims=True) if workload.centred else x
    y = distance / np.sqrt((distance**2).mean(axis=axes, keepdims=True) + workload.epsilon) * arrays["scale"]
    if workload.bias:
        arrays["bias"] = rng.uniform(-2, 2, row).astype(np.float32)
        y = y + arrays["bias"]
    return {name: array.reshape(-1) if name != "x" else array for name, array in arrays.items()}, y


def assert_close(workload: Workload, found: Any, expected: Any) -> None:
    error = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}[workload.dtype]
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=error, atol=error, err_msg=workload.label)


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_emulated_kernels_are_the_definition(monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]) -> None:
    workload = layer_norm(**shape)
    arrays, expected = example(workload)
    configs = {default(CUDA, workload, H200), *CUDA.space(workload, H200).sample(2, np.random.default_rng(1))}
    for config in [each for each in configs if each["threads"] <= 256]:
        assert_close(workload, emulated(monkeypatch, CUDA, workload, arrays, config, *MODULES), expected)


def test_a_long_row_is_read_again_for_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for long rows, on a short one."""
    monkeypatch.setattr(rows, "LONGEST_HELD", 16)
    monkeypatch.setattr(cuda_kernels, "MOST_HELD", 4)
    workload = layer_norm(x=(3, 50), dtype="float32")
    arrays, expected = example(workload)
    config = Config(vector=2, lanes=8, threads=64)
    assert_close(workload, emulated(monkeypatch, CUDA, workload, arrays, config, *MODULES), expected)


def test_a_cpu_kernel_is_the_definition(device: CpuDevice) -> None:
    for shape in (SHAPES[1], SHAPES[3]):
        workload = layer_norm(**shape)
        arrays, expected = example(workload)
        assert_close(workload, on_cpu(device, CPU, workload, arrays), expected)


def test_verification_accepts_a_kernel_and_refuses_that_of_another_workload(device: CpuDevice) -> None:
    right = layer_norm(x=(6, 40), dtype="float32")
    assert verdict(device, CPU, right) is None
    assert verdict(device, CPU, right, right.replace(centred=False)) is not None
    assert verdict(device, CPU, layer_norm(x=(6, 40), bias=False)) is None


class TestCpuContract(TemplateContract):
    template, target, compiled = CPU, detect("cpu"), 1
    accepted = (layer_norm(x=(32, 1000)), layer_norm(x=(4, 10, 30), axis=1, bias=False, dtype="float32"))


class TestCudaContract(TemplateContract):
    template, target, compiled = CUDA, H200, 1
    accepted = (layer_norm(x=(1, 56, 56, 96)), layer_norm(x=(32, 1000), bias=False), layer_norm(x=(4, 100000)))


@pytest.mark.gpu
def test_kernels_on_the_device(gpu: Any) -> None:
    for shape in SHAPES:
        workload = layer_norm(**shape)
        arrays, expected = example(workload)
        assert_close(workload, on_cpu(gpu, CUDA, workload, arrays), expected)


def test_cases_of_onnx() -> None:
    pytest.importorskip("onnx", reason="needs onnx")
    seen = set()
    for case in node_cases("layernormalization", "rmsnormalization").values():
        if len(case.model.graph.node) == 1:
            node = case.model.graph.node[0]
            (x, scale, *bias), (y, *_) = arrays_of(case)
            given = attributes(node)
            workload = layer_norm(
                x=x.shape, axis=given.get("axis", -1), epsilon=given.get("epsilon", 1e-5), bias=bool(bias),
                centred=node.op_type == "LayerNormalization", dtype="float32",
            )  # fmt: skip
            arrays = {"x": x, "scale": scale, **({"bias": bias[0]} if bias else {})}
            found = load_reference("layer_norm").points(workload, arrays, {}, np.arange(y.size), "y")
            np.testing.assert_allclose(found.reshape(y.shape), y, rtol=1e-4, atol=1e-5, err_msg=case.name)
            seen.add(node.op_type)
    assert seen == {"LayerNormalization", "RMSNormalization"}
