"""What is folded and fused computes what the model computes, by onnx's reference evaluator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
ir = pytest.importorskip("onnx_ir")

from drawn_graphs import Array, Graph, graphs  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import ModelError, quiet, read_model  # noqa: E402
from schedsearch.network.simplify import simplify  # noqa: E402


def check_equal(graph: Graph) -> None:
    outputs = list(dict.fromkeys([*graph.kept, graph.value]))
    model = graph.model(outputs)
    before = ReferenceEvaluator(model).run(None, {"x": graph.x()})
    simple = ir.from_proto(model)
    with quiet():
        simplify(simple, "simple")
    after = ReferenceEvaluator(ir.to_proto(simple)).run(None, {"x": graph.x()})
    for name, right, got in zip(outputs, before, after):
        scale = np.abs(right[np.isfinite(right)]).max(initial=1.0)
        np.testing.assert_allclose(got, right, rtol=2e-5, atol=2e-5 * scale, err_msg=name)
        assert got.shape == right.shape


_SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=100, **_SETTINGS)
@given(graphs())
@pytest.mark.long(of="networks")
def test_a_simplified_graph_computes_what_the_graph_does(graph: Graph) -> None:
    with np.errstate(all="ignore"):
        check_equal(graph)


@pytest.mark.long
@settings(max_examples=1000, **_SETTINGS)
@given(graphs())
def test_many_simplified_graphs_compute_what_the_graphs_do(graph: Graph) -> None:
    with np.errstate(all="ignore"):
        check_equal(graph)


@pytest.mark.long
@settings(max_examples=300, **_SETTINGS)
@given(graph=graphs())
def test_networks_compute_what_the_graphs_do_or_name_what_they_lack(
    graph: Graph, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """By the references of our operators, of what is folded, fused, rewritten and lowered."""
    path = tmp_path_factory.getbasetemp() / "random.onnx"
    outputs = list(dict.fromkeys([*graph.kept, graph.value]))
    onnx.save(graph.model(outputs), path)
    with np.errstate(all="ignore"):
        before = ReferenceEvaluator(graph.model(outputs)).run(None, {"x": graph.x()})
        try:
            after = evaluate(lower(read_model(path)), {"x": graph.x()})
        except ModelError as error:
            assert "n" in str(error)
            return
    for name, right in zip(outputs, before):
        if not np.isfinite(right).all():
            continue
        scale, error = np.abs(right).max(initial=1.0), 2e-3 if graph.is_rounded else 2e-5
        np.testing.assert_allclose(after[name].reshape(right.shape), right, rtol=error, atol=error * scale, err_msg=name)


# --- Rules that others get wrong ----------------------------------------------------------------------------------------
def simple(nodes: list[Any], shape: Sequence[int], opset: int, dtype: int = TensorProto.FLOAT, **weights: Array) -> Any:
    """The simplified model of these nodes, from x to y."""
    info = helper.make_tensor_value_info
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()]
    result = TensorProto.INT32 if dtype == TensorProto.UINT8 else dtype
    graph = helper.make_graph(nodes, "net", [info("x", dtype, shape)], [info("y", result, None)], tensors)
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8))
    with quiet():
        simplify(model, "model")
    return ir.to_proto(model)


def value_of(model: Any, x: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(ReferenceEvaluator(model).run(None, {"x": x})[0])


def operators(model: Any) -> list[str]:
    return [node.op_type for node in model.graph.node]


X = np.linspace(-8, 8, 24, dtype=np.float32).reshape(1, 2, 3, 4)


def test_bounds_that_do_not_meet_leave_one_number() -> None:
    bounds = {name: np.float32(each) for name, each in (("a", -2), ("b", -0.5), ("c", 1), ("d", 3))}
    first, second = helper.make_node("Clip", ["x", "a", "b"], ["v"]), helper.make_node("Clip", ["v", "c", "d"], ["y"])
    for last, right in ((second, 1), (helper.make_node("Relu", ["v"], ["y"]), 0)):
        made = simple([first, last], X.shape, 17, **bounds)
        assert operators(made) == ["Clip"]
        np.testing.assert_array_equal(value_of(made, X), np.full_like(X, right))


def test_bounds_that_are_attributes_count() -> None:
    nodes = [helper.make_node("Clip", ["x"], ["v"], min=-3.0, max=2.0), helper.make_node("Clip", ["v"], ["y"], max=1.0)]
    made = simple(nodes, X.shape, 9)
    assert operators(made) == ["Clip"]
    np.testing.assert_array_equal(value_of(made, X), np.clip(X, -3, 1))


@pytest.mark.parametrize(
    ("bound", "then"), [({"max": -math.inf}, np.finfo(np.float32).min), ({"min": math.inf}, np.finfo(np.float32).max)]
)
def test_a_bound_that_no_number_meets_is_refused(bound: dict[str, float], then: Any, tmp_path: Path) -> None:
    """Behind it a Clip of opset 9, whose bounds are the least and the largest number, leaves one of these."""
    first, path = helper.make_node("Clip", ["x"], ["v"], **bound), tmp_path / "net.onnx"
    onnx.save(simple([first, helper.make_node("Clip", ["v"], ["y"])], X.shape, 9), path)
    got = evaluate(lower(read_model(path)), {"x": X})["y"]
    np.testing.assert_allclose(got, np.full_like(X, then), rtol=1e-6)
    onnx.save(simple([helper.make_node("Clip", ["x"], ["y"], **bound)], X.shape, 9), path)
    with pytest.raises(ModelError, match="has a min of infinity or a max of minus infinity"):
        lower(read_model(path))


@pytest.mark.parametrize(
    ("opset", "nodes", "bound"),
    [
        (13, [("Clip", ["x", "low"], {})], np.finfo(np.float32).min),
        (13, [("Max", ["x", "low"], {})], np.finfo(np.float32).min),
        (13, [("Clip", ["x", "low"], {})], np.float32(-2e38)),
        (9, [("Clip", ["x"], {"min": -2e38})], np.float32(-2e38)),
    ],
    ids=["clip", "max", "clip of less", "attribute"],
)
def test_the_least_number_bounds_minus_infinity(opset: int, nodes: list[Any], bound: Any, tmp_path: Path) -> None:
    """As in masks of attention, where a row of minus infinity would make NaN of a Softmax."""
    x = np.array([[-np.inf, 1, -3e38, np.inf]], np.float32)
    made = [helper.make_node(op, inputs, ["y"], **attributes) for op, inputs, attributes in nodes]
    onnx.save(simple(made, x.shape, opset, low=bound), tmp_path / "net.onnx")
    got = evaluate(lower(read_model(tmp_path / "net.onnx")), {"x": x})["y"]
    most = np.inf if opset > 9 else np.finfo(np.float32).max  # the bound that an old Clip has where it names none
    np.testing.assert_allclose(got, np.clip(x, bound, most), rtol=1e-6)


def test_a_batch_norm_that_takes_its_means_from_x_stays() -> None:
    parts = {name: np.array([0.5, 2], np.float32) for name in ("gamma", "beta", "mean", "variance")}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["v"]),
        helper.make_node("BatchNormalization", ["v", *parts], ["y", "", ""][:1], training_mode=1),
    ]
    assert "BatchNormalization" in operators(simple(nodes, X.shape, 15, w=np.ones((2, 2, 1, 1), np.float32), **parts))


def test_zeros_around_integers_are_part_of_a_convolution_only_if_they_stand_for_zero() -> None:
    nodes = [
        helper.make_node("Pad", ["x", "pads"], ["v"]),
        helper.make_node("ConvInteger", ["v", "w", "zero"], ["y"]),
    ]
    weights = {"pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "w": np.full((1, 2, 3, 3), 2, np.uint8)}
    for zero, left in ((0, ["ConvInteger"]), (7, ["Pad", "ConvInteger"])):
        made = simple(nodes, X.shape, 13, TensorProto.UINT8, zero=np.uint8(zero), **weights)
        assert operators(made) == left


def test_a_number_in_two_roundings_keeps_both() -> None:
    """2049.0001 in float64 is 2049 in float32, a tie that float16 rounds to 2048; at once it would be 2050."""
    x = np.array([2049.0001 - 1e-5 * each for each in range(4)])
    nodes = [
        helper.make_node("Cast", ["x"], ["v"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["v"], ["w"], to=TensorProto.FLOAT16),
    ]
    nodes.append(helper.make_node("Cast", ["w"], ["y"], to=TensorProto.DOUBLE))
    made = simple(nodes, x.shape, 17, TensorProto.DOUBLE)
    np.testing.assert_array_equal(value_of(made, x), x.astype(np.float32).astype(np.float16).astype(np.float64))


# --- Constants ----------------------------------------------------------------------------------------------------------
def test_constants_are_folded_whatever_their_number_of_elements_and_results() -> None:
    large = np.arange(20_000, dtype=np.float16).reshape(100, 200)
    nodes = [
        helper.make_node("Cast", ["large"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Split", ["wide"], ["left", "right"], axis=1),
        helper.make_node("Transpose", ["right"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "turned"], ["y"]),
    ]
    made = simple(nodes, (2, 100), 13, large=large)
    assert operators(made) == ["MatMul"]
    x = np.eye(2, 100, dtype=np.float32)
    np.testing.assert_array_equal(value_of(made, x), large.astype(np.float32)[:, 100:].T[:2])


def test_dequantised_constants_are_folded_where_no_product_reads_them() -> None:
    codes = np.array([1, 2, 3, -4], np.int8)
    nodes = [helper.make_node("DequantizeLinear", ["codes", "scale"], ["gamma"])]
    nodes += [helper.make_node("LayerNormalization", ["x", "gamma"], ["y"])]
    made = simple(nodes, (2, 4), 17, codes=codes, scale=np.float32(0.1))
    assert operators(made) == ["LayerNormalization"]
    (weight,) = made.graph.initializer
    np.testing.assert_allclose(numpy_helper.to_array(weight), codes * np.float32(0.1))


def test_a_constant_beyond_the_bound_in_bytes_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from schedsearch.network import simplify as module

    nodes = [helper.make_node("ConstantOfShape", ["extents"], ["zeros"]), helper.make_node("Add", ["x", "zeros"], ["y"])]
    extents = np.array([3, 64])
    assert "ConstantOfShape" not in operators(simple(nodes, (3, 64), 13, extents=extents))
    monkeypatch.setattr(module, "_MOST_BYTES", 3 * 64 * 4 - 1)
    assert "ConstantOfShape" in operators(simple(nodes, (3, 64), 13, extents=extents))


def test_a_weight_that_is_listed_among_the_inputs_is_a_constant() -> None:
    info = helper.make_tensor_value_info
    nodes = [helper.make_node("Neg", ["w"], ["v"]), helper.make_node("Add", ["x", "v"], ["y"])]
    inputs = [info(name, TensorProto.FLOAT, [2]) for name in "xw"]
    weight = numpy_helper.from_array(np.ones(2, np.float32), "w")
    graph = helper.make_graph(nodes, "net", inputs, [info("y", TensorProto.FLOAT, [2])], [weight])
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 9)], ir_version=3))
    simplify(model, "model")
    assert [node.op_type for node in model.graph] == ["Add"]
    assert [value.name for value in model.graph.inputs] == ["x"]


@pytest.mark.parametrize(("rows", "opset"), [(4, 11), (4, 13), (5, 13), (5, 18)])
def test_a_sequence_of_parts_is_a_split_in_every_opset(rows: int, opset: int) -> None:
    """onnxscript writes its parts as an attribute that opsets before 18 lack."""
    nodes = [
        helper.make_node("SplitToSequence", ["x", "two"], ["parts"], axis=0),
        helper.make_node("SequenceAt", ["parts", "one"], ["v"]),
        helper.make_node("Relu", ["v"], ["y"]),
    ]
    made = simple(nodes, (rows, 3), opset, two=np.int64(2), one=np.int64(1))
    assert operators(made) == ["Split", "Relu"]
    x = np.random.default_rng(0).standard_normal((rows, 3)).astype(np.float32)
    np.testing.assert_array_equal(value_of(made, x), np.maximum(x[2:4], 0))


def test_the_mask_of_a_dropout_may_have_no_name() -> None:
    """onnxscript folds the mask to a constant, which needs a name."""
    nodes = [
        helper.make_node("Dropout", ["x", "", ""], ["v", ""]),
        helper.make_node("Clip", ["v", "", ""], ["w"]),
        helper.make_node("Relu", ["w"], ["y"]),
    ]
    np.testing.assert_array_equal(value_of(simple(nodes, X.shape, 13), X), np.maximum(X, 0))


def test_a_split_into_parts_without_names_keeps_their_number() -> None:
    nodes = [helper.make_node("Split", ["x"], ["v", ""], axis=1), helper.make_node("Relu", ["v"], ["y"])]
    np.testing.assert_array_equal(value_of(simple(nodes, X.shape, 13), X), np.maximum(X[:, :1], 0))


def test_two_constants_of_one_name_stay_two() -> None:
    """onnxscript calls the shape of a Reshape after its result, and the shape that a Flatten becomes after its input."""
    nodes = [
        helper.make_node("Reshape", ["x", "row"], ["v0"]),
        helper.make_node("Reshape", ["v0", "row"], ["v1"]),
        helper.make_node("Flatten", ["v1"], ["v2"], axis=0),
        helper.make_node("Add", ["v1", "v2"], ["y"]),
    ]
    made = simple(nodes, X.shape, 13, row=np.array([-1]))
    np.testing.assert_array_equal(value_of(made, X), 2 * X.reshape(1, -1))
