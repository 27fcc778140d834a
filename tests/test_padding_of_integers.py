"""Quantised convolutions pad with what stands for zero, by int64 in NumPy and by onnx's evaluator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
ir = pytest.importorskip("onnx_ir")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import simplified  # noqa: E402

Array = np.ndarray[Any, Any]
DTYPES = {"int8": TensorProto.INT8, "uint8": TensorProto.UINT8}
SCALES = {"sx": 0.05, "sw": 0.02, "sy": 0.9}


def sums(x: Array, w: Array, zx: int, zw: int, pads: list[int], strides: list[int], dilations: list[int]) -> Array:
    """Of products of (x - zx) and (w - zw): an element of padding is zx, so that it adds nothing."""
    top, left, bottom, right = pads
    padded = np.pad(x.astype(np.int64), ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=zx) - zx
    taps = [(np.arange(n) * gap) for n, gap in zip(w.shape[2:], dilations)]
    extents = [(n - place[-1] - 1) // step + 1 for n, place, step in zip(padded.shape[2:], taps, strides)]
    found = np.zeros((x.shape[0], w.shape[0], *extents), np.int64)
    for i in range(extents[0]):
        for j in range(extents[1]):
            window = padded[:, :, i * strides[0] + taps[0][:, None], j * strides[1] + taps[1][None, :]]
            found[:, :, i, j] = np.einsum("ncrs,kcrs->nk", window, w.astype(np.int64) - zw)
    return found


def model_of(op: str, x: Array, w: Array, zx: int, zw: int, **attributes: Any) -> Any:
    numbers = {"w": w, "zx": np.array(zx, x.dtype), "zw": np.array(zw, w.dtype)}
    inputs, y = ["x", "w", "zx", "zw"], TensorProto.INT32
    if op == "QLinearConv":
        inputs, y = ["x", "sx", "zx", "w", "sw", "zw", "sy", "zx"], DTYPES[x.dtype.name]
        numbers |= {name: np.float32(scale) for name, scale in SCALES.items()}
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node(op, inputs, ["y"], **attributes)], "net", [info("x", DTYPES[x.dtype.name], x.shape)],
        [info("y", y, None)], [numpy_helper.from_array(np.asarray(each), name) for name, each in numbers.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def drawn(data: st.DataObject) -> tuple[Array, Array, int, int, dict[str, list[int]]]:
    """An image, filters, zero points and a window."""
    random = np.random.default_rng(data.draw(st.integers(0, 99), "seed"))
    arrays, zeros = [], []
    for name, shape in (("x", (1, 2, 5, 4)), ("w", (3, 2, 3, 2))):
        dtype = np.dtype(data.draw(st.sampled_from(sorted(DTYPES)), f"dtype of {name}"))
        limits = np.iinfo(dtype)
        arrays.append(random.integers(limits.min, limits.max + 1, shape).astype(dtype))
        zeros.append(data.draw(st.sampled_from([0, 1, limits.min, limits.max, 7]), f"zero point of {name}"))
    window = {
        "pads": data.draw(st.lists(st.integers(0, 2), min_size=4, max_size=4), "pads"),
        "strides": data.draw(st.lists(st.integers(1, 2), min_size=2, max_size=2), "strides"),
        "dilations": data.draw(st.lists(st.integers(1, 2), min_size=2, max_size=2), "dilations"),
    }
    return arrays[0], arrays[1], zeros[0], zeros[1], window


def quantised(found: Array, zero: int, dtype: Any) -> Array:
    """QLinearConv's result, and where it is not certain because it lies in the middle of two."""
    scale = np.float32(SCALES["sx"]) * np.float32(SCALES["sw"]) / np.float32(SCALES["sy"])
    limits = np.iinfo(dtype)
    return np.clip(np.rint(found.astype(np.float64) * scale) + zero, limits.min, limits.max)


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_padding_is_the_zero_point(data: st.DataObject) -> None:
    x, w, zx, zw, window = drawn(data)
    right = sums(x, w, zx, zw, **window)
    for op in ("ConvInteger", "QLinearConv"):
        model = model_of(op, x, w, zx, zw, **window)
        network = lower(simplified(ir.from_proto(model), op))
        got = evaluate(network, {"x": x})["y"].astype(np.int64)
        if op == "ConvInteger":
            np.testing.assert_array_equal(got, right)
            continue
        assert np.abs(got - quantised(right, zx, x.dtype)).max(initial=0) <= 1  # a product that is rounded once or twice


@pytest.mark.parametrize(("dtype", "zero"), [("int8", -128), ("uint8", 128)])
@pytest.mark.parametrize("op", ["ConvInteger", "QLinearConv"])
@pytest.mark.mostly_long(4)
def test_kernels_pad_with_the_zero_point(op: str, dtype: str, zero: int, tmp_path: Path) -> None:
    random, limits = np.random.default_rng(1), np.iinfo(dtype)
    x = random.integers(limits.min, limits.max + 1, (1, 4, 6, 6)).astype(dtype)
    w = random.integers(-20, 20, (8, 4, 3, 3)).astype(np.int8)
    model = model_of(op, x, w, zero, 0, pads=[1, 2, 1, 0])
    onnx.save(model, tmp_path / "net.onnx")
    wanted: Any = ReferenceEvaluator(model).run(None, {"x": x})[0]
    with schedsearch.build(tmp_path / "net.onnx", target="cpu", db=tmp_path / "none.db", check=False) as net:
        y = net(x)
    assert (y.shape, y.dtype) == (wanted.shape, wanted.dtype)
    assert np.abs(y.astype(int) - wanted).max() <= (0 if op == "ConvInteger" else 1)
