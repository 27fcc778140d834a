"""unique: the operator, its reference and templates, against NumPy and ONNX's node cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bandwidth_support import H200, arrays_of, attributes, node_cases, verdict
from dynamic_support import assert_equal, emulated, expected, on_device

from schedsearch import Workload, unique
from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.ops.dtypes import decode, encode
from schedsearch.ops.unique import UNIQUE
from schedsearch.template import load_template
from schedsearch.templates.selection import block, keys, unique_cuda, unique_kernels
from schedsearch.testing.op_contract import OpContract
from schedsearch.testing.template_contract import TemplateContract

CUDA, CPU = load_template("unique_cuda"), load_template("unique_cpu")
MODULES = block, keys, unique_kernels


class TestUnique(OpContract):
    op = UNIQUE
    examples = (
        {"x": [7]},
        {"x": [3, 4, 5], "flat": False, "axis": 1, "dtype": "int64"},
        {"x": [3, 7], "order": "first", "dtype": "uint8"},
    )
    wrong = (
        ({"x": [3, 4], "axis": 1}, "axis"),
        ({"x": [3, 4], "flat": False, "axis": 2}, "axis"),
        ({"x": [3, 4], "dtype": "float64"}, "dtype"),
        ({"x": [2**20, 2**12]}, "x"),
    )


SHAPES: list[dict[str, Any]] = [
    dict(x=(40, 9)),
    dict(x=(300,), order="first", dtype="float16"),
    dict(x=(3, 20, 2), flat=False, axis=1, dtype="int32"),
    dict(x=(50, 3), flat=False, order="first", dtype="uint8"),
    dict(x=(33,), dtype="int64"),
    dict(x=(70, 2), flat=False),
]


def example(workload: Workload, seed: int = 0) -> dict[str, Any]:
    """Integers, of which many are equal, and zeros of both signs, infinities and NaNs where the format has them."""
    rng, (x,) = np.random.default_rng(seed), workload.signature
    most = 30 if workload.flat else 1
    values = rng.integers(0 if x.dtype == "uint8" else -most, most + 1, x.shape)
    if "int" not in x.dtype:
        values = values.astype(np.float64)
        values.reshape(-1)[::11], values.reshape(-1)[1::29], values.reshape(-1)[2::31] = -0.0, np.inf, np.nan
    if x.dtype == "int64":
        values.reshape(-1)[::7] = 2**63 - 1
    return {"x": values if x.dtype == "int64" else decode(encode(values, x.dtype), x.dtype)}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.mostly_long(6)
def test_emulated_kernels_are_the_definition(monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]) -> None:
    """Also with tiles so small that the runs of the sorting network are longer."""
    workload = unique(**shape)
    arrays = example(workload)
    for module in (unique_kernels, unique_cuda):
        monkeypatch.setattr(module, "TILE", 64)
    found = emulated(monkeypatch, CUDA, workload, arrays, Config(parts=64), *MODULES)
    assert_equal(workload, found, expected(workload, arrays))


@pytest.mark.long
def test_a_cpu_kernel_is_the_definition(device: CpuDevice) -> None:
    for shape in SHAPES:
        workload = unique(**shape)
        arrays = example(workload)
        assert_equal(workload, on_device(device, CPU, workload, arrays, Config(run=8)), expected(workload, arrays))


@pytest.mark.long
def test_verification_accepts_a_cpu_kernel(device: CpuDevice) -> None:
    for workload in (unique(x=(90,), order="first"), unique(x=(30, 4), flat=False)):
        assert verdict(device, CPU, workload) is None, workload.label


class TestUniqueCuda(TemplateContract):
    template, target = CUDA, H200
    accepted = (unique(x=(1000,)), unique(x=(20, 5, 3), flat=False, axis=1, order="first", dtype="bfloat16"))
    refused = ((unique(x=(2**21,)), "2097152"),)

    def test_the_largest_array_has_as_many_steps_as_a_plan(self) -> None:
        largest = unique(x=(2**19,), order="first")
        assert len(CUDA.kernel(largest, H200, Config(parts=256)).steps) <= 64


class TestUniqueCpu(TemplateContract):
    template, target, compiled = CPU, detect("cpu"), 1
    accepted = (unique(x=(1000,)),)


@pytest.mark.gpu
def test_kernels_on_the_device(gpu: Any) -> None:
    for workload in (
        *(unique(**shape) for shape in SHAPES),
        unique(x=(70000,)),
        unique(x=(9000, 2), flat=False, order="first"),
    ):
        arrays = example(workload)
        assert_equal(workload, on_device(gpu, CUDA, workload, arrays), expected(workload, arrays))
        assert verdict(gpu, CUDA, workload) is None, workload.label


@pytest.mark.long
def test_cases_of_onnx(device: CpuDevice) -> None:
    pytest.importorskip("onnx", reason="needs onnx")
    seen = []
    for name, case in node_cases("unique").items():
        if (x := arrays_of(case)[0][0]).dtype.itemsize * (x.dtype.kind == "f") > 4:
            continue  # of 64 bits
        (x,), outputs = arrays_of(case)
        given = attributes(case.model.graph.node[0])
        order = "sorted" if given.get("sorted", 1) else "first"
        workload = unique(x=x.shape, flat="axis" not in given, axis=given.get("axis", 0), order=order, dtype=str(x.dtype))
        found = on_device(device, CPU, workload, {"x": x})
        for wanted, output in zip(outputs, ("y", "indices", "inverse", "counts")):
            np.testing.assert_array_equal(found[output], wanted, err_msg=name)
        seen.append(name)
    assert len(seen) >= 4, seen
