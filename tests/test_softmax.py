"""softmax: the operator, its reference and templates, against NumPy and ONNX's node cases."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from bandwidth_support import H200, arrays_of, attributes, default, emulated, node_cases, on_cpu, verdict

from schedsearch import Workload, softmax
from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.ops.dtypes import decode, encode
from schedsearch.ops.softmax import SOFTMAX
from schedsearch.template import load_reference, load_template
from schedsearch.templates.parts import groups, rows
from schedsearch.templates.softmax import cuda_kernels
from schedsearch.testing.op_contract import OpContract
from schedsearch.testing.template_contract import TemplateContract

CUDA, CPU = load_template("softmax_cuda"), load_template("softmax_cpu")
MODULES = (cuda_kernels, groups)


class TestSoftmax(OpContract):
    op = SOFTMAX
    examples = ({"x": [3, 7]}, {"x": [2, 3, 4], "axis": 1, "log": True, "dtype": "float32"}, {"x": [5], "dtype": "bfloat16"})
    wrong = (
        ({"x": [3, 7], "axis": 2}, "axis"),
        ({"x": [3, 7], "axis": -3}, "axis"),
        ({"x": []}, "x"),
        ({"x": [3, 7], "dtype": "int8"}, "dtype"),
        ({"x": [3, 7], "log": 1}, "log"),
    )
    ids: ClassVar = {
        "879d337450aab9cf7567495843d1b64ecebb549512187fbe0fef788586ea706a": {"x": [3, 7]},
        "c67938ed04b200e0da18fa7ed866c77685d42776f9136dcc99810c77c667c1b2": {"x": [2, 3, 4], "axis": 1, "log": True},
    }

    def test_an_axis_has_one_number(self) -> None:
        assert softmax(x=(2, 3), axis=1).id == softmax(x=(2, 3)).id


SHAPES: list[dict[str, Any]] = [
    dict(x=(3, 40)),
    dict(x=(2, 1000), log=True, dtype="float32"),
    dict(x=(5, 49), dtype="bfloat16"),
    dict(x=(2, 7, 24), axis=1),
    dict(x=(30, 5), axis=0, log=True, dtype="float32"),
    dict(x=(1, 40000), dtype="float32"),
]


def example(workload: Workload, largest: float = 6.0) -> tuple[dict[str, Any], Any]:
    """Random numbers, some of them -inf as masks have, and y in float64."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-largest, largest, workload.x)
    x.reshape(-1)[1::7] = -np.inf
    x = decode(encode(x, workload.dtype), workload.dtype).astype(np.float64)
    powers = np.exp(x - x.max(axis=workload.axis, keepdims=True))
    with np.errstate(divide="ignore"):
        y = powers / powers.sum(axis=workload.axis, keepdims=True)
        return {"x": x}, np.log(y) if workload.log else y


def assert_close(workload: Workload, found: Any, expected: Any) -> None:
    relative = {"float32": 3e-6, "float16": 1.5e-3, "bfloat16": 1e-2}[workload.dtype]
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=relative, atol=1e-6, err_msg=workload.label)


@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_emulated_kernels_are_the_definition(monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]) -> None:
    workload = softmax(**shape)
    arrays, expected = example(workload)
    configs = {default(CUDA, workload, H200), *CUDA.space(workload, H200).sample(2, np.random.default_rng(1))}
    for config in [each for each in configs if each["threads"] <= 256]:
        assert_close(workload, emulated(monkeypatch, CUDA, workload, arrays, config, *MODULES), expected)


def test_a_long_row_is_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for long rows, on a short one: it scales its sums when it meets a larger number."""
    monkeypatch.setattr(rows, "LONGEST_HELD", 16)
    workload = softmax(x=(3, 50), dtype="float32")
    arrays, expected = example(workload)
    config = Config(vector=1, lanes=8, threads=64)
    assert_close(workload, emulated(monkeypatch, CUDA, workload, arrays, config, *MODULES), expected)


def test_a_cpu_kernel_is_the_definition(device: CpuDevice) -> None:
    for shape in (SHAPES[1], SHAPES[3]):
        workload = softmax(**shape)
        arrays, expected = example(workload)
        assert_close(workload, on_cpu(device, CPU, workload, arrays), expected)


@pytest.mark.long
def test_verification_accepts_a_cpu_kernel(device: CpuDevice) -> None:
    for shape in (SHAPES[0], SHAPES[4]):
        workload = softmax(**shape)
        assert verdict(device, CPU, workload) is None, workload.label


class TestCpuContract(TemplateContract):
    template, target, compiled = CPU, detect("cpu"), 1
    accepted = (softmax(x=(32, 1000)), softmax(x=(4, 10, 300), axis=1, dtype="float32"))


class TestCudaContract(TemplateContract):
    template, target, compiled = CUDA, H200, 1
    accepted = (softmax(x=(8192, 4096)), softmax(x=(32, 1000)), softmax(x=(8, 80, 4096), axis=1), softmax(x=(4, 100000)))


def test_defaults_keep_rows_in_registers() -> None:
    chosen = {shape: dict(default(CUDA, softmax(x=shape), H200)) for shape in ((8192, 4096), (32, 1000), (100000, 49))}
    assert chosen == {
        (8192, 4096): {"vector": 8, "lanes": 256, "threads": 256},
        (32, 1000): {"vector": 8, "lanes": 128, "threads": 128},
        (100000, 49): {"vector": 1, "lanes": 32, "threads": 256},
    }


@pytest.mark.gpu
def test_kernels_on_the_device(gpu: Any) -> None:
    for shape in SHAPES:
        workload = softmax(**shape)
        arrays, expected = example(workload)
        assert_close(workload, on_cpu(gpu, CUDA, workload, arrays), expected)


def test_cases_of_onnx() -> None:
    pytest.importorskip("onnx", reason="needs onnx")
    seen = set()
    for case in node_cases("softmax", "logsoftmax").values():
        if len(case.model.graph.node) == 1:
            node = case.model.graph.node[0]
            (x,), (y,) = arrays_of(case)
            log = node.op_type == "LogSoftmax"
            workload = softmax(x=x.shape, axis=attributes(node).get("axis", -1), log=log, dtype="float32")
            found = load_reference("softmax").points(workload, {"x": x}, {}, np.arange(y.size), "y")
            np.testing.assert_allclose(found.reshape(y.shape), y, rtol=1e-5, atol=1e-6, err_msg=case.name)
            seen.add(node.op_type)
    assert seen == {"Softmax", "LogSoftmax"}
