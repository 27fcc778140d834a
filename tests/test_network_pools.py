"""Pools with `ceil_mode`: shapes and numbers are those of ONNX Runtime, whatever shape the file records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from onnx import TensorProto, helper  # noqa: E402

from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import ModelError, read_model  # noqa: E402

SHAPE = (1, 2, 7, 8)


def save(folder: Path, op: str, attributes: dict[str, Any], *, recorded: bool) -> Path:
    """A pool and what inherits its shape. `recorded`: the file has the shapes of onnx's inference."""
    nodes = [helper.make_node(op, ["x"], ["y"], **attributes), helper.make_node("Flatten", ["y"], ["row"])]
    outputs = [helper.make_empty_tensor_value_info(name) for name in ("y", "row")]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE)
    model = helper.make_model(
        helper.make_graph(nodes, "net", [x], outputs), opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    path = folder / "net.onnx"
    onnx.save(onnx.shape_inference.infer_shapes(model) if recorded else model, path)
    return path


@st.composite
def pools(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    op = draw(st.sampled_from(["MaxPool", "AveragePool"]))
    pairs = {
        name: draw(st.lists(st.integers(1, most), min_size=2, max_size=2))
        for name, most in (("kernel_shape", 3), ("strides", 4), ("dilations", 2))
    }
    attributes = {**pairs, "ceil_mode": 1}
    auto_pad = draw(st.sampled_from(["NOTSET", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    if auto_pad == "NOTSET":
        attributes["pads"] = [draw(st.integers(0, taps - 1)) for taps in 2 * pairs["kernel_shape"]]
    else:
        attributes["auto_pad"] = auto_pad
    if op == "AveragePool":
        attributes["count_include_pad"] = draw(st.integers(0, 1))
    return op, attributes


@pytest.mark.integrations
@settings(max_examples=60)
@given(pools(), st.booleans())
def test_a_pool_has_the_windows_that_begin_before_the_images_end(
    tmp_path_factory: pytest.TempPathFactory, pool: tuple[str, dict[str, Any]], recorded: bool
) -> None:
    runtime = pytest.importorskip("onnxruntime")
    path = save(tmp_path_factory.mktemp("pool"), *pool, recorded=recorded)
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # it warns of the shape that onnx recorded
    try:
        wanted = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    except Exception:  # a padding that it refuses
        return
    try:
        network = lower(read_model(path), layouts=("NHWC",))
    except ModelError as error:
        assert "runtimes pad in different ways" in str(error) or "strides are larger than its windows" in str(error)
        return
    found = evaluate(network, {"x": x})
    for name, want in zip(("y", "row"), wanted):
        np.testing.assert_allclose(found[name], want, atol=1e-6)


@pytest.mark.parametrize("recorded", [False, True])
def test_a_window_that_would_begin_in_the_padding_does_not_count(recorded: bool, tmp_path: Path) -> None:
    """Windows begin at rows -1, 2 and 5 of 7, and not at row 8; at columns -1, 3 and 7 of 8."""
    attributes = {"kernel_shape": [2, 2], "strides": [3, 4], "pads": [1, 1, 1, 1], "ceil_mode": 1}
    path = save(tmp_path, "MaxPool", attributes, recorded=recorded)
    x = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    found = evaluate(lower(read_model(path)), {"x": x})
    np.testing.assert_array_equal(found["y"], x[:, :, [0, 3, 6]][:, :, :, [0, 4, 7]])
    assert found["row"].shape == (1, 18)


@pytest.mark.parametrize("recorded", [False, True])
def test_a_shape_that_follows_from_folded_constants_has_the_same_windows(recorded: bool, tmp_path: Path) -> None:
    """The bounds of the Slice are computed, and the size of the second image by the shape of the first pool's result."""
    node, constant = helper.make_node, onnx.numpy_helper.from_array
    window = {"kernel_shape": [1, 3], "strides": [2, 3], "pads": [0, 1, 0, 1], "ceil_mode": 1}
    nodes = [
        node("Identity", ["given"], ["begin"]),
        node("Slice", ["x", "begin", "end", "axes"], ["image"]),
        node("MaxPool", ["image"], ["first"], **window),
        node("Shape", ["first"], ["extents"]),
        node("Expand", ["one", "extents"], ["ones"]),
        node("Add", ["first", "ones"], ["sum"]),
        node("MaxPool", ["sum"], ["y"], **window),
    ]
    weights = {"given": [0, 1], "end": [7, 8], "axes": [2, 3]}
    tensors = [constant(np.array(numbers), name) for name, numbers in weights.items()]
    tensors.append(constant(np.ones((1, 1, 1, 1), np.float32), "one"))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE)
    outputs = [helper.make_empty_tensor_value_info("y")]
    graph = helper.make_graph(nodes, "net", [x], outputs, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(onnx.shape_inference.infer_shapes(model) if recorded else model, tmp_path / "net.onnx")
    image = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    network = lower(read_model(tmp_path / "net.onnx"))

    def pooled(image: Any) -> Any:  # every second row; columns 0 and 1, 2 to 4, 5 and 6: no window begins behind the image
        return np.stack([image[:, :, ::2, max(at, 0) : at + 3].max(-1) for at in range(-1, image.shape[3], 3)], -1)

    np.testing.assert_allclose(evaluate(network, {"x": image})["y"], pooled(pooled(image[..., 1:]) + 1))
