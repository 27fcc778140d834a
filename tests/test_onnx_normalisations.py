"""Normalisations of ONNX as layer norms and element-wise nodes, beside NumPy in float64 and ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from compared_models import assert_as_onnxruntime, lowered, normal, referred, run_by_onnxruntime  # noqa: E402
from onnx import TensorProto, helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx_support import Net  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.dynamic.graph import Size  # noqa: E402
from schedsearch.dynamic.model import read_graph  # noqa: E402
from schedsearch.network.graph import Node  # noqa: E402
from schedsearch.network.model import ModelError  # noqa: E402
from schedsearch.network.valid import check  # noqa: E402
from schedsearch.network_check.own_operators import of_opset  # noqa: E402

Array = np.ndarray[Any, Any]
SHAPE = (2, 6, 5, 7)
FAR = 1000.0  # a mean beside which the deviation is small


def far(*shape: int, dtype: Any = np.float32) -> Array:
    return (normal(*shape) + FAR).astype(dtype)


def rows_normalised(x: Array, axes: tuple[int, ...], epsilon: float = 1e-5) -> Array:
    """By the definition, in float64."""
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axes, keepdims=True)
    found: Array = centred / np.sqrt((centred**2).mean(axes, keepdims=True) + epsilon)
    return found


def ops(net: Net, **options: Any) -> list[str]:
    network = lowered(net.model(**options), layouts=("NHWC", "NCHW"))
    return [node.implementations[0].op for node in network.nodes if isinstance(node, Node)]


# --- Rows of channels and groups ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [SHAPE, (3, 4, 9), (1, 2, 3, 4, 5)], ids=str)
def test_an_instance_norm_keeps_its_digits_far_from_zero(shape: tuple[int, ...]) -> None:
    net, x = Net(*shape), far(*shape)
    net.node("InstanceNormalization", "x", net.weight("s", shape[1]), net.weight("b", shape[1]))
    scale, bias = (onnx.numpy_helper.to_array(each).reshape(-1, *(1,) * (len(shape) - 2)) for each in net.weights)
    wanted = rows_normalised(x, tuple(range(2, len(shape)))) * scale + bias
    np.testing.assert_allclose(referred(net.model(), {"x": x})[0], wanted, rtol=1e-4, atol=1e-4)


def test_an_instance_norm_is_one_layer_norm_and_one_chain() -> None:
    net = Net(*SHAPE)
    y = net.node("InstanceNormalization", "x", net.weight("s", 6), net.weight("b", 6))
    net.node("Add", net.node("Relu", y), "x")
    assert ops(net) == ["layer_norm", "elementwise"]


@pytest.mark.parametrize("opset", [18, 21])
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_a_group_norm_has_a_factor_for_each_group_or_each_channel(groups: int, opset: int) -> None:
    net, x = Net(*SHAPE), far(*SHAPE)
    count = groups if opset == 18 else 6
    net.node("GroupNormalization", "x", net.weight("s", count), net.weight("b", count), num_groups=groups)
    scale, bias = (onnx.numpy_helper.to_array(each).repeat(6 // count).reshape(6, 1, 1) for each in net.weights)
    grouped = rows_normalised(x.reshape(2, groups, -1), (2,)).reshape(SHAPE)
    model = net.model(opset=opset)
    check(model, "the model")  # onnx's checker deprecates that of opset 18
    np.testing.assert_allclose(referred(model, {"x": x})[0], grouped * scale + bias, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("opset", [18, 21])
def test_a_group_norm_with_a_wrong_attribute_is_refused_in_both_opsets(opset: int) -> None:
    net = Net(*SHAPE)
    net.node("GroupNormalization", "x", net.weight("s", 2), net.weight("b", 2), num_groups=2, groups=2)
    with pytest.raises(ModelError, match="Unrecognized attribute: groups"):
        check(net.model(opset=opset), "the model")


# --- Layer norms --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("axis", [-1, 1, 2, -3])
def test_a_layer_norm_gives_mean_and_deviation(axis: int) -> None:
    net, x = Net(*SHAPE), far(*SHAPE)
    row = SHAPE[axis:]
    y = net.node("LayerNormalization", "x", net.weight("s", *row), net.weight("b", *row), outputs=3, axis=axis, name="norm")
    net.results = [y, "norm.out1", "norm.out2"]
    axes = tuple(range(axis % 4, 4))
    scale, bias = (onnx.numpy_helper.to_array(each) for each in net.weights)
    wide = x.astype(np.float64)
    found = referred(net.model(), {"x": x})
    np.testing.assert_allclose(found[0], rows_normalised(x, axes) * scale + bias, rtol=1e-4, atol=2e-4)
    np.testing.assert_allclose(found[1], wide.mean(axes, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(found[2], 1 / np.sqrt(wide.var(axes, keepdims=True) + 1e-5), rtol=1e-4)


@pytest.mark.parametrize("op", ["LayerNormalization", "RMSNormalization"])
def test_scales_of_layer_norms_may_be_computed(op: str) -> None:
    net = Net(4, 7)
    row = net.node("ReduceMax", "x", net.row(0), keepdims=0)
    given = [row] if op == "RMSNormalization" else [row, net.node("Neg", row)]
    net.node(op, "x", *given)
    assert_as_onnxruntime(net.model(opset=23), {"x": normal(4, 7)})


def test_the_mean_of_half_precision_is_float32() -> None:
    net = Net(3, 64, dtype=TensorProto.FLOAT16)
    scale = net.weight("s", 64, dtype=np.float16)
    y = net.node("LayerNormalization", "x", scale, outputs=2, name="norm")
    net.results = [y, "norm.out1"]
    x = far(3, 64, dtype=np.float16)
    found = referred(net.model(), {"x": x})
    assert [each.dtype for each in found] == [np.float16, np.float32]
    np.testing.assert_allclose(found[1], x.astype(np.float64).mean(1, keepdims=True), rtol=1e-6)
    wanted = rows_normalised(x, (1,)) * onnx.numpy_helper.to_array(net.weights[0])
    np.testing.assert_allclose(found[0], wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("axes", [None, [1], [0, 3], [-1, 1, 2]], ids=str)
def test_a_mean_variance_normalisation_is_that_of_onnx(axes: list[int] | None) -> None:
    net, x = Net(*SHAPE), far(*SHAPE)
    net.node("MeanVarianceNormalization", "x", **({} if axes is None else {"axes": axes}))
    wide = x.astype(np.float64)
    along = tuple(axes or (0, 2, 3))
    wanted = (wide - wide.mean(along, keepdims=True)) / (wide.std(along, keepdims=True) + 1e-9)
    np.testing.assert_allclose(referred(net.model(opset=13), {"x": x})[0], wanted, rtol=1e-4, atol=2e-4)


# --- Norms --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("factor", [1.0, 1e25, 1e-25])
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_rows_have_the_norm_1_whatever_their_magnitude(axis: int, p: int, factor: float) -> None:
    net = Net(3, 4, 5)
    net.node("LpNormalization", "x", axis=axis, p=p)
    x = (normal(3, 4, 5) * factor).astype(np.float32)
    wide = x.astype(np.float64)
    wanted = wide / np.linalg.norm(wide, ord=p, axis=axis, keepdims=True)
    np.testing.assert_allclose(referred(net.model(), {"x": x})[0], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("p", [1, 2])
def test_a_row_of_zeros_stays_zero(p: int) -> None:
    net = Net(2, 3)
    net.node("LpNormalization", "x", p=p)
    x = np.array([[0, 0, 0], [0, 2, 0]], np.float32)
    np.testing.assert_array_equal(referred(net.model(), {"x": x})[0], [[0, 0, 0], [0, 1, 0]])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_a_local_response_norm_is_that_of_the_specification(size: int) -> None:
    net, x = Net(*SHAPE), 3 * normal(*SHAPE)
    net.node("LRN", "x", size=size, alpha=0.3, beta=0.6, bias=1.5)
    before, after = (size - 1) // 2, size // 2
    squares = x.astype(np.float64) ** 2
    sums = np.stack([squares[:, max(c - before, 0) : c + after + 1].sum(1) for c in range(SHAPE[1])], 1)
    np.testing.assert_allclose(
        referred(net.model(), {"x": x})[0], x / (1.5 + 0.3 / size * sums) ** 0.6, rtol=1e-5, atol=1e-5
    )


def test_a_batch_norm_may_have_computed_parameters() -> None:
    net = Net(2, 6, 5)
    row = net.node("ReduceMax", "x", net.row(0, 2), keepdims=0)
    net.node("BatchNormalization", "x", row, net.weight("b", 6), net.node("Neg", row), net.node("Abs", row))
    assert_as_onnxruntime(net.model(), {"x": normal(2, 6, 5)})


def test_a_batch_norm_of_old_opsets_has_a_mean_for_each_pixel() -> None:
    net = Net(2, 3, 4, 5)
    parts = [net.weight(name, 3, 4, 5) for name in "sbm"]
    net.node("BatchNormalization", "x", *parts, net.weight("v", 3, 4, 5, value=0.7), spatial=0)
    scale, bias, mean, variance = (onnx.numpy_helper.to_array(each).astype(np.float64) for each in net.weights)
    x = normal(2, 3, 4, 5)
    wanted = (x - mean) / np.sqrt(variance + 1e-5) * scale + bias
    np.testing.assert_allclose(referred(net.model(opset=7), {"x": x})[0], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [SHAPE, (3, 4), (2, 4, 9), (1, 2, 3, 4, 5), (2, 2, 3, 4, 5)], ids=str)
def test_a_batch_norm_in_training_mode_keeps_its_digits_far_from_zero(shape: tuple[int, ...]) -> None:
    net, x = Net(*shape), far(*shape)
    net.node("BatchNormalization", "x", *(net.weight(name, shape[1]) for name in "sbmv"), outputs=3, training_mode=1)
    along = (-1, *(1,) * (len(shape) - 2))
    scale, bias = (onnx.numpy_helper.to_array(each).reshape(along) for each in net.weights[:2])
    wanted = rows_normalised(x, (0, *range(2, len(shape)))) * scale + bias
    np.testing.assert_allclose(referred(net.model(), {"x": x})[0], wanted, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("n", [1, 3])
def test_a_batch_norm_in_training_mode_gives_running_statistics_in_their_dtype(n: int) -> None:
    """With momentum m: m * before + (1 - m) * (mean or variance of the batch)."""
    net, x = Net(n, 6, 5, dtype=TensorProto.FLOAT16), far(n, 6, 5, dtype=np.float16)
    parts = [*(net.weight(name, 6, dtype=np.float16) for name in "sb"), *(net.weight(name, 6) for name in "mv")]
    y = net.node("BatchNormalization", "x", *parts, outputs=3, training_mode=1, momentum=0.75, name="norm")
    net.results = [y, "norm.out1", "norm.out2"]
    scale, bias, mean, variance = (onnx.numpy_helper.to_array(each).astype(np.float64) for each in net.weights)
    found, wide = referred(net.model(), {"x": x}), x.astype(np.float64)
    assert [each.dtype for each in found] == [np.float16, np.float32, np.float32]
    wanted = rows_normalised(x, (0, 2)) * scale[:, None] + bias[:, None]
    np.testing.assert_allclose(found[0], wanted, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(found[1], 0.75 * mean + 0.25 * wide.mean((0, 2)), rtol=1e-5)
    np.testing.assert_allclose(found[2], 0.75 * variance + 0.25 * wide.var((0, 2)), rtol=1e-4, atol=1e-5)


def test_a_batch_norm_of_one_image_in_training_mode_is_an_instance_norm() -> None:
    net = Net(1, 6, 5, 7)
    weights = [net.weight(name, 6) for name in "sbmv"]
    net.node("Relu", net.node("BatchNormalization", "x", *weights, outputs=3, training_mode=1))
    assert ops(net) == ["layer_norm", "elementwise"]


@pytest.mark.parametrize("n", [1, 2])
def test_a_batch_norm_without_tracked_statistics_is_that_of_pytorch(n: int, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm2d(4, track_running_stats=False)
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), norm, torch.nn.ReLU()).eval()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(n, 3, 8, 9) + 3
    torch.onnx.export(module, (x,), tmp_path / "m.onnx", dynamo=False)
    model = onnx.load(tmp_path / "m.onnx")
    (node,) = (node for node in model.graph.node if node.op_type == "BatchNormalization")
    assert onnx.helper.get_node_attr_value(node, "training_mode") == 1
    found = referred(model, {model.graph.input[0].name: x.numpy()})[0]
    np.testing.assert_allclose(found, module.double()(x.double()).detach().numpy(), rtol=1e-4, atol=1e-5)


# --- Softmax ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("opset", [9, 12, 13, 21])
@pytest.mark.parametrize("axis", [None, 0, 1, 2, -1, -3])
@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
def test_a_softmax_is_over_what_its_opset_says(op: str, axis: int | None, opset: int) -> None:
    if axis is not None and axis < 0 and opset < 11:
        pytest.skip("opset 11 introduced negative axes")
    net = Net(3, 4, 5)
    net.node(op, "x", **({} if axis is None else {"axis": axis}))
    assert_as_onnxruntime(net.model(opset=opset), {"x": 4 * normal(3, 4, 5)})


# --- On the CPU ---------------------------------------------------------------------------------------------------------
@pytest.mark.long  # builds a network
def test_normalisations_run_on_the_cpu(tmp_path: Path) -> None:
    net = Net(*SHAPE)
    y = net.node("InstanceNormalization", "x", net.weight("s", 6), net.weight("b", 6))
    y = net.conv(y, 8, 6)
    z = net.node("LRN", y, size=3, alpha=0.5)
    net.results = [
        net.node("LpNormalization", z, axis=1),
        net.node("GroupNormalization", y, net.weight("t", 8), net.weight("c", 8), num_groups=2),
        net.node("MeanVarianceNormalization", z),
    ]
    onnx.save(net.model(), tmp_path / "m.onnx")
    x = normal(*SHAPE)
    with schedsearch.build(tmp_path / "m.onnx", target="cpu", db=tmp_path / "none.db") as built:
        for found, wanted in zip(built(x), run_by_onnxruntime(net.model(), {"x": x}), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


# --- What is refused ----------------------------------------------------------------------------------------------------
def test_groups_that_do_not_divide_the_channels_are_refused() -> None:
    net = Net(*SHAPE)
    net.node("GroupNormalization", "x", net.weight("s", 6), net.weight("b", 6), num_groups=4, name="guilty")
    with pytest.raises(ModelError, match=r"guilty \(makes 4 groups of 6 channels; allowed: a number that divides them"):
        lowered(net.model())


@pytest.mark.parametrize(
    ("op", "row", "outputs", "reason"),
    [
        ("InstanceNormalization", 6, 1, "only the extent of its axis 0 may be known at run time only"),
        ("LayerNormalization", 8, 2, "it gives the mean or deviation of rows whose number is known at run time only"),
        (
            "BatchNormalization",
            6,
            3,
            "it takes mean and variance from its input, of which extents are known at run time only",
        ),
    ],
)
def test_open_heights_are_refused_with_a_reason(op: str, row: int, outputs: int, reason: str) -> None:
    net = Net(1, 6, "h", 8)
    more = {"training_mode": 1} if op == "BatchNormalization" else {}
    weights = [net.weight(name, row) for name in ("sbmv" if more else "sb")]
    net.node(op, "x", *weights, outputs=outputs, name="guilty", **more)
    net.results = ["guilty.out", "guilty.out1"][: 1 if more else outputs]
    with pytest.raises(ModelError, match=f"guilty.*{reason}"):
        read_graph(net.model(), {"h": Size("h", 3, 9)})


# --- The check without ONNX Runtime -------------------------------------------------------------------------------------
@pytest.mark.parametrize(("shape", "size"), [((2, 7, 3, 2), 3), ((1, 5, 2, 2), 4), ((3, 2, 1, 1), 5), ((1, 4, 6), 1)])
def test_the_check_normalises_every_channel(shape: tuple[int, ...], size: int) -> None:
    """By the sums of ONNX's definition, channel by channel; findings/onnx_evaluator_lrn_batch.sh says why it has its own."""
    x = normal(*shape)
    node = helper.make_node("LRN", ["x"], ["y"], size=size, alpha=0.5, beta=0.75, bias=2.0)
    info = helper.make_tensor_value_info
    graph = helper.make_graph([node], "g", [info("x", 1, shape)], [info("y", 1, shape)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    (got,) = ReferenceEvaluator(model, new_ops=of_opset(13)).run(None, {"x": x})
    wide = x.astype(np.float64)
    for c in range(shape[1]):
        first, last = max(0, c - (size - 1) // 2), min(shape[1] - 1, c + -(-(size - 1) // 2))
        sums = (wide[:, first : last + 1] ** 2).sum(1)
        np.testing.assert_allclose(got[:, c], wide[:, c] / (2 + 0.5 / size * sums) ** 0.75, rtol=1e-6)
