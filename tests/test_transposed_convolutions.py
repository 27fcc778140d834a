"""Transposed convolutions whose padding follows from `auto_pad` or `output_shape`, by ONNX's reference evaluator."""

from __future__ import annotations

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

from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import ModelError, simplified  # noqa: E402

Array = np.ndarray[Any, Any]
IMAGE = (1, 2, 4, 5)


def model_of(weight: Array, **attributes: Any) -> Any:
    """A transposed convolution and a node that reads its result."""
    info = helper.make_tensor_value_info
    nodes = [
        helper.make_node("ConvTranspose", ["x", "w"], ["v"], name="up", **attributes),
        helper.make_node("Relu", ["v"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "net", [info("x", 1, IMAGE)], [info("y", 1, None)], [numpy_helper.from_array(weight, "w")]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def lowered(model: Any) -> Array:
    network = lower(simplified(ir.from_proto(model), "up"))
    (name,) = network.outputs
    return evaluate(network, {"x": image()})[name]


def image() -> Array:
    return np.random.default_rng(0).standard_normal(IMAGE).astype(np.float32)


def evaluated(weight: Array, **attributes: Any) -> Array:
    found: Any = ReferenceEvaluator(model_of(weight, **attributes)).run(None, {"x": image()})[0]
    return np.asarray(found)


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=60)
@given(st.data())
def test_pads_follow_from_auto_pad_and_output_shape_by_the_formula_of_onnx(data: st.DataObject) -> None:
    stride, extra = data.draw(st.integers(1, 3), "stride"), (0, 0)
    kernel = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)), "kernel")
    dilations = data.draw(st.tuples(st.integers(1, 2), st.integers(1, 2)), "dilations")
    if stride > 1:
        extra = data.draw(st.tuples(st.integers(0, stride - 1), st.integers(0, stride - 1)), "output_padding")
    auto_pad = data.draw(st.sampled_from(["SAME_UPPER", "SAME_LOWER", "NOTSET"]), "auto_pad")
    full = [
        (n - 1) * stride + (taps - 1) * gap + 1 + more for n, taps, gap, more in zip(IMAGE[2:], kernel, dilations, extra)
    ]
    wanted = [n * stride for n in IMAGE[2:]]
    attributes: dict[str, Any] = {"strides": [stride] * 2, "dilations": dilations, "output_padding": extra}
    if auto_pad == "NOTSET" or data.draw(st.booleans(), "output_shape"):
        reaches = [(taps - 1) * gap for taps, gap in zip(kernel, dilations)]  # pads are smaller than the filter
        wanted = [data.draw(st.integers(max(n - 2 * reach, 1), n)) for n, reach in zip(full, reaches)]
        attributes["output_shape"] = wanted
    weight = np.random.default_rng(1).standard_normal((2, 3, *kernel)).astype(np.float32)
    total = [most - extent for most, extent in zip(full, wanted)]
    # ONNX's evaluator lacks output_shape without auto_pad: "else" in the formula, the larger half in front.
    front = [n // 2 if auto_pad == "SAME_UPPER" else n - n // 2 for n in total]
    explicit = {**attributes, "pads": [*front, *(n - half for n, half in zip(total, front))]}
    explicit.pop("output_shape", None)
    given_ = {**attributes, "auto_pad": auto_pad}
    if min(total) < 0:
        with pytest.raises(ModelError, match="more pixels than there are"):
            lowered(model_of(weight, **given_))
        return
    right = evaluated(weight, **explicit)
    if auto_pad != "NOTSET":
        np.testing.assert_allclose(evaluated(weight, **given_), right, rtol=1e-5, atol=1e-5)
    got = lowered(model_of(weight, **given_))
    assert got.shape == (1, 3, *wanted)
    np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-5)


def test_shapes_behind_do_not_count_output_padding_twice() -> None:
    """onnx infers 9 x 11 for SAME with output_padding; the result has 8 x 10, and another array of that size is added."""
    weight = np.ones((2, 3, 3, 3), np.float32)
    model = model_of(weight, auto_pad="SAME_UPPER", strides=[2, 2], output_padding=[1, 1])
    model.graph.node.append(helper.make_node("Add", ["y", "other"], ["z"]))
    model.graph.initializer.append(numpy_helper.from_array(np.ones((1, 3, 8, 10), np.float32), "other"))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    right: Any = ReferenceEvaluator(model).run(None, {"x": image()})[0]
    np.testing.assert_allclose(lowered(model), right, rtol=1e-5, atol=1e-5)
