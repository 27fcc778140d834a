"""Dynamic graphs of slices and concatenations of one value, and of constants that onnx's evaluator does not compute.

Expected values are those of `onnx.reference`, or of NumPy in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import schedsearch

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from schedsearch.network.model import ModelError  # noqa: E402

IMAGES = (1, 16, "h", "w")
SPLIT = helper.make_node("Split", ["x", "sizes"], ["a", "b"], axis=1)
CONCATENATIONS: dict[str, list[Any]] = {
    "both halves and a third array": [
        SPLIT,
        helper.make_node("Sigmoid", ["b"], ["c"]),
        helper.make_node("Add", ["b", "c"], ["d"]),
        helper.make_node("Concat", ["a", "b", "d"], ["y"], axis=1),
    ],
    "the same array twice": [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Concat", ["a", "x", "a"], ["y"], axis=1),
    ],
    "halves that are exchanged, and half of that": [
        SPLIT,
        helper.make_node("Concat", ["b", "a"], ["c"], axis=1),
        helper.make_node("Split", ["c", "sizes"], ["d", "e"], axis=1),
        helper.make_node("Sigmoid", ["d"], ["f"]),
        helper.make_node("Concat", ["e", "f"], ["y"], axis=1),
    ],
}


def save(folder: Path, nodes: list[Any], x: Any, constants: Mapping[str, Any], opset: int = 17) -> Path:
    weights = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)]
    graph = helper.make_graph(nodes, "net", inputs, [helper.make_empty_tensor_value_info("y")], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), folder / "net.onnx")
    return folder / "net.onnx"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name == "both halves and a third array")) for name in CONCATENATIONS],
)
@pytest.mark.mostly_long(2)
def test_a_concatenation_keeps_every_argument(name: str, tmp_path: Path) -> None:
    path = save(tmp_path, CONCATENATIONS[name], IMAGES, {"sizes": np.array([8, 8])})
    x = np.random.default_rng(0).standard_normal((1, 16, 5, 6)).astype(np.float32)
    (wanted,) = ReferenceEvaluator(onnx.load(path)).run(None, {"x": x})
    sizes = {"h": (4, 8), "w": (4, 8)}
    with schedsearch.build_dynamic(path, sizes, target="cpu", db=tmp_path / "none.db", run_mode="exact") as net:
        np.testing.assert_allclose(net(x), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.long
def test_weights_that_are_dequantised_are_constants_in_every_opset(opset: int, tmp_path: Path) -> None:
    """onnx 1.23.2's evaluator has no DequantizeLinear of opsets 10 to 18."""
    rng = np.random.default_rng(0)
    numbers, scales, bias = (
        rng.integers(-100, 100, (8, 4)).astype(np.int8),
        np.float32([0.02, 0.5, 1, 3]),
        np.int32([1, 2, 3, -4]),
    )
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["wf"], axis=1),
        helper.make_node("MatMul", ["x", "wf"], ["m"]),
        helper.make_node("DequantizeLinear", ["b", "bs"], ["bf"]),
        helper.make_node("Add", ["m", "bf"], ["y"]),
    ]
    zero_points = np.int8([0, 1, -7, 100])
    constants = {"w": numbers, "s": scales, "z": zero_points, "b": bias, "bs": np.float32(0.1)}
    path = save(tmp_path, nodes, ("n", 8), constants, opset)
    x = rng.standard_normal((3, 8)).astype(np.float32)
    weight = (numbers.astype(np.float64) - zero_points) * scales
    wanted = x.astype(np.float64) @ weight + bias * np.float64(np.float32(0.1))
    with schedsearch.build_dynamic(path, {"n": (1, 4)}, target="cpu", db=tmp_path / "none.db", run_mode="exact") as net:
        np.testing.assert_allclose(net(x), wanted, rtol=1e-5, atol=1e-4)


def test_a_node_of_constants_that_onnx_cannot_compute_is_named(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["k", "s", "z"], ["q"], name="odd"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["kf"]),
        helper.make_node("Add", ["x", "kf"], ["y"]),
    ]
    constants = {"k": np.ones(3, np.float32), "s": np.float32(0.5), "z": np.int8(0)}
    path = save(tmp_path, nodes, ("n", 3), constants, opset=13)
    try:
        net = schedsearch.build_dynamic(path, {"n": (1, 4)}, target="cpu", db=tmp_path / "none.db", run_mode="exact")
    except ModelError as error:
        assert "odd (QuantizeLinear) reads only constants, and onnx's evaluator cannot compute it" in str(error)
    else:
        with net:
            np.testing.assert_array_equal(net(np.zeros((2, 3), np.float32)), np.ones((2, 3)))
