"""fill_margin: the operator, its reference and templates, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bandwidth_support import H200, verdict
from dynamic_support import assert_equal, emulated, expected, on_device
from hypothesis import given, settings
from hypothesis import strategies as st

import schedsearch
from schedsearch import Workload, fill_margin
from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.ops.fill_margin import FILL_MARGIN
from schedsearch.template import load_template
from schedsearch.templates.arrange import margin
from schedsearch.testing.op_contract import OpContract
from schedsearch.testing.template_contract import TemplateContract

CUDA, CPU = load_template("fill_margin_cuda"), load_template("fill_margin_cpu")


class TestFillMargin(OpContract):
    op = FILL_MARGIN
    examples = (
        {"x": [5, 7], "margin": [0, 2]},
        {"x": [2, 9, 8, 3], "margin": [0, 1, 3, 0], "value": "lowest", "dtype": "int8"},
        {"x": [4], "margin": [4], "value": "lowest", "dtype": "bfloat16"},
    )
    wrong = (
        ({"x": [5, 7], "margin": [1]}, "margin"),
        ({"x": [5, 7], "margin": [0, 0]}, "margin"),
        ({"x": [5, 7], "margin": [6, 0]}, "margin"),
        ({"x": [5, 7], "margin": [1, 0], "value": "one"}, "value"),
        ({"x": [2**31 - 1] * 3, "margin": [1, 0, 0]}, "x"),
    )


WORKLOADS = [
    fill_margin(x=(2, 9, 8, 3), margin=(0, 1, 3, 0)),
    fill_margin(x=(2, 3, 9, 8), margin=(0, 0, 2, 2), value="lowest"),
    fill_margin(x=(7,), margin=(7,), dtype="int64", value="lowest"),
    fill_margin(x=(5, 6), margin=(2, 1), dtype="uint8", value="lowest"),
    fill_margin(x=(5, 6), margin=(2, 0), dtype="bfloat16", value="lowest"),
    fill_margin(x=(4, 5, 6), margin=(1, 2, 3), dtype="float32"),
    fill_margin(x=(4, 5), margin=(1, 2), dtype="float8_e4m3", value="lowest"),
]
LOWEST = {
    "float16": -65504.0,
    "bfloat16": -(2.0**128 - 2.0**120),
    "float8_e4m3": -448.0,
    "int64": -(2**63),
    "uint8": 0,
}


def example(workload: Workload, *extents: int) -> dict[str, Any]:
    x = np.random.default_rng(0).integers(1, 100 if "8" not in workload.dtype else 8, workload.x)
    return {"x": x, "x_extents": np.array(extents or [max(n - 2, 0) for n in workload.x])}


def definition(workload: Workload, arrays: dict[str, Any]) -> Any:
    """Element by element."""
    y = arrays["x"].astype(np.float64 if "float" in workload.dtype else np.int64)
    number = 0 if workload.value == "zero" else LOWEST[workload.dtype]
    for place in np.ndindex(*y.shape):
        for at, extent, width in zip(place, arrays["x_extents"], workload.margin):
            if max(extent, 0) <= at < max(extent, 0) + width:
                y[place] = number
    return y


def examples(workload: Workload) -> list[dict[str, Any]]:
    """Extents within the bound, none, all, and impossible ones."""
    rank = len(workload.x)
    every = ((), (0,) * rank, workload.x, tuple(n + 5 for n in workload.x), (-3,) * rank)
    return [example(workload, *extents) for extents in every]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each.label)
def test_emulated_kernels_are_the_definition(monkeypatch: pytest.MonkeyPatch, workload: Workload) -> None:
    for arrays in examples(workload):
        found = emulated(monkeypatch, CUDA, workload, arrays, Config(threads=128), margin)
        assert_equal(workload, found, {"y": definition(workload, arrays)})


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each.label)
@pytest.mark.mostly_long(9)
def test_a_cpu_kernel_is_the_definition(device: CpuDevice, workload: Workload) -> None:
    for arrays in examples(workload):
        assert_equal(workload, on_device(device, CPU, workload, arrays), {"y": definition(workload, arrays)})


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_reference_is_the_definition(data: st.DataObject) -> None:
    x = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4), "x")
    width = data.draw(st.tuples(*(st.integers(0, n) for n in x)).filter(any), "margin")
    workload = fill_margin(x=x, margin=width, dtype="int64", value=data.draw(st.sampled_from(("zero", "lowest"))))
    arrays = example(workload, *data.draw(st.tuples(*(st.integers(-1, n + 1) for n in x)), "extents"))
    np.testing.assert_array_equal(expected(workload, arrays)["y"], definition(workload, arrays))


def test_x_may_be_updated_in_place() -> None:
    workload = fill_margin(x=(6, 8), margin=(1, 2), dtype="float32")
    kernel = schedsearch.compile(workload, target="cpu", allow=("default",))
    x = np.arange(48, dtype=np.float32).reshape(6, 8)
    before = x.copy()
    extents = np.array([4, 5])
    y = kernel(x, extents)
    np.testing.assert_array_equal(x, before)
    assert kernel(x, extents, out=x) is x
    np.testing.assert_array_equal(x, y)
    assert (x[4] == 0).all() and (x[:, 5:7] == 0).all() and (x[5, :5] == before[5, :5]).all()


class TestFillMarginCuda(TemplateContract):
    template, target = CUDA, H200
    accepted = (
        fill_margin(x=(4, 80, 60, 32), margin=(0, 1, 1, 0)),
        fill_margin(x=(4, 3, 80, 60), margin=(0, 0, 3, 2), value="lowest", dtype="float32"),
    )
    refused = ()


class TestFillMarginCpu(TemplateContract):
    template, target, compiled = CPU, detect("cpu"), 1
    accepted = (fill_margin(x=(2, 20, 20, 8), margin=(0, 1, 1, 0), dtype="float32"),)


@pytest.mark.gpu
def test_kernels_on_the_device(gpu: Any) -> None:
    for workload in WORKLOADS:
        arrays = example(workload)
        assert_equal(workload, on_device(gpu, CUDA, workload, arrays), {"y": definition(workload, arrays)})
        assert verdict(gpu, CUDA, workload) is None, workload.label
