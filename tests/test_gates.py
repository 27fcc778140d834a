"""HardSwish and HardSigmoid that a model has written out as x * Clip(x + 3, 0, 6) / 6."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import read_model  # noqa: E402

SHAPE = (1, 4, 3, 5)
CONV = ("Conv", ["image", "w"], "x")
ADD, CLIP = ("Add", ["x", "three"], "sum"), ("Clip", ["sum", "zero", "six"], "clipped")
WRITTEN = {
    "quotient of the product": [ADD, CLIP, ("Mul", ["x", "clipped"], "product"), ("Div", ["product", "six"], "y")],
    "product of the quotient": [ADD, CLIP, ("Div", ["clipped", "six"], "gate"), ("Mul", ["gate", "x"], "y")],
    "the other way around": [
        ("Add", ["three", "x"], "sum"), CLIP, ("Mul", ["clipped", "x"], "product"), ("Div", ["product", "six"], "y"),
    ],
}  # fmt: skip
PRODUCT, QUOTIENT = ("Mul", ["x", "clipped"], "product"), ("Div", ["product", "six"], "y")
OTHERS = {
    "another offset": [("Add", ["x", "two"], "sum"), CLIP, PRODUCT, QUOTIENT],
    "another limit": [ADD, ("Clip", ["sum", "zero", "three"], "clipped"), PRODUCT, QUOTIENT],
    "another divisor": [ADD, CLIP, PRODUCT, ("Div", ["product", "three"], "y")],
    "another factor": [ADD, CLIP, ("Mul", ["sum", "clipped"], "product"), QUOTIENT],
    "no constant": [("Add", ["x", "image"], "sum"), CLIP, PRODUCT, QUOTIENT],
    "a quotient turned around": [ADD, CLIP, PRODUCT, ("Div", ["six", "product"], "y")],
}


def model(nodes: list[Any], outputs: tuple[str, ...] = ("y",)) -> Any:
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((4, 4, 1, 1)), "three": 3.0, "six": 6.0, "zero": 0.0, "two": 2.0}
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, SHAPE)
    graph = helper.make_graph(
        [helper.make_node(op, inputs, [name], name=name) for op, inputs, name in (CONV, *nodes)],
        "gate",
        [image],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(array, np.float32), name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def lowered(made: Any, tmp_path: Any) -> Any:
    path = tmp_path / "gate.onnx"
    onnx.save(onnx.shape_inference.infer_shapes(made), path)
    return lower(read_model(path))


def check(network: Any, made: Any, name: str = "y") -> None:
    image = (4 * np.random.default_rng(1).standard_normal(SHAPE)).astype(np.float32)
    image[0, 0, 0] = [0, -100, 100, 1e-30, 6]
    (wanted,) = ReferenceEvaluator(made).run([name], {"image": image})
    np.testing.assert_allclose(evaluate(network, {"image": image})[name], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("nodes", WRITTEN.values(), ids=WRITTEN)
def test_a_convolution_applies_a_gate_that_is_written_out(nodes: list[Any], tmp_path: Any) -> None:
    made = model(nodes)
    network = lowered(made, tmp_path)
    assert len(network.nodes) == 1 and "hard_swish" in network.nodes[0].implementations[0].label
    check(network, made)


@pytest.mark.parametrize("nodes", OTHERS.values(), ids=OTHERS)
def test_what_only_looks_like_a_gate_stays(nodes: list[Any], tmp_path: Any) -> None:
    made = model(nodes)
    network = lowered(made, tmp_path)
    assert not any("hard_swish" in workload.label for node in network.nodes for workload in node.implementations)
    check(network, made)


def test_a_gate_that_something_else_reads_stays(tmp_path: Any) -> None:
    made = model(WRITTEN["quotient of the product"], ("y", "clipped"))
    network = lowered(made, tmp_path)
    assert set(network.outputs) == {"y", "clipped"}
    for name in network.outputs:
        check(network, made, name)
