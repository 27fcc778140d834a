"""Convolutions whose filters are computed, beside PyTorch in float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from compared_models import Array, assert_as_onnxruntime, lowered, normal, referred  # noqa: E402
from onnx import TensorProto, helper  # noqa: E402
from onnx_support import Net  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.dynamic.graph import Size  # noqa: E402
from schedsearch.dynamic.model import read_graph  # noqa: E402
from schedsearch.network.graph import Node  # noqa: E402
from schedsearch.network.model import ModelError  # noqa: E402


def model_of(
    shape: Sequence[Any],
    filters: Sequence[int],
    *,
    bias: bool = False,
    dtype: int = 1,
    op: str = "Conv",
    constant: str = "",
    **given: Any,
) -> Any:
    """Conv(x, w, b), or another operator, of which all are inputs of the network but for those of `constant`."""
    info = helper.make_tensor_value_info
    channels = filters[0] if op == "Conv" else filters[1] * given.get("group", 1)
    inputs = [info("x", dtype, shape), info("w", dtype, filters), *([info("b", dtype, [channels])] if bias else [])]
    node = helper.make_node(op, [each.name for each in inputs], ["y"], name="conv", **given)
    weights = [onnx.numpy_helper.from_array(normal(*filters, seed=1), "w")] if constant == "w" else []
    inputs = [each for each in inputs if each.name != constant]
    graph = helper.make_graph([node], "net", inputs, [helper.make_empty_tensor_value_info("y")], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model)


CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "of single pixels": ((2, 3, 4, 5), (6, 3, 1, 1), {}),
    "with padding": ((2, 3, 7, 6), (4, 3, 3, 3), {"pads": [1, 1, 1, 1], "bias": True}),
    "with strides and dilations": (
        (1, 4, 9, 8),
        (2, 4, 3, 2),
        {"pads": [2, 1, 2, 1], "strides": [2, 1], "dilations": [2, 3]},
    ),
    "of groups": ((2, 6, 5, 5), (4, 3, 3, 3), {"group": 2, "pads": [1, 1, 1, 1], "bias": True}),
    "of each channel": ((2, 5, 6, 6), (5, 1, 3, 3), {"group": 5, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "of one axis": ((2, 3, 9), (4, 3, 3), {"pads": [2, 2], "dilations": [2], "bias": True}),
    "of three axes": ((1, 4, 4, 5, 6), (6, 2, 2, 3, 2), {"group": 2, "strides": [1, 2, 2], "pads": [1, 1, 0, 1, 1, 0]}),
}


def arrays_of(model: Any, dtype: Any = np.float32) -> dict[str, Array]:
    shapes = {each.name: [dim.dim_value for dim in each.type.tensor_type.shape.dim] for each in model.graph.input}
    return {name: normal(*shape, seed=seed).astype(dtype) for seed, (name, shape) in enumerate(shapes.items())}


@pytest.mark.parametrize("name", CASES)
def test_filters_may_be_inputs(name: str) -> None:
    torch = pytest.importorskip("torch")
    shape, filters, given = CASES[name]
    model, rank = model_of(shape, filters, **given), len(shape) - 2
    inputs = arrays_of(model)
    pads = given.get("pads", [0] * 2 * rank)
    assert pads[:rank] == pads[rank:]  # as PyTorch has them
    function = (torch.conv1d, torch.conv2d, torch.conv3d)[rank - 1]
    wanted = function(
        *(torch.from_numpy(each).double() for each in inputs.values()),
        padding=pads[:rank],
        stride=given.get("strides", 1),
        dilation=given.get("dilations", 1),
        groups=given.get("group", 1),
    )
    np.testing.assert_allclose(referred(model, inputs)[0], wanted.numpy(), rtol=1e-5, atol=1e-5)


TRANSPOSED: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "of single pixels": ((2, 3, 4, 5), (3, 6, 1, 1), {"bias": True}),
    "with padding": ((2, 3, 5, 6), (3, 4, 3, 3), {"pads": [1, 1, 1, 1], "bias": True}),
    "with strides": ((1, 4, 3, 4), (4, 2, 4, 3), {"pads": [1, 0, 1, 0], "strides": [2, 3], "output_padding": [1, 2]}),
    "with dilations of groups": (
        (2, 6, 4, 4),
        (6, 2, 3, 2),
        {"group": 3, "dilations": [2, 3], "strides": [2, 1], "bias": True},
    ),
    "of one axis": ((2, 3, 5), (3, 4, 3), {"strides": [2], "pads": [1, 1]}),
    "of three axes": ((1, 4, 2, 3, 2), (4, 1, 2, 3, 2), {"group": 2, "strides": [2, 1, 2], "bias": True}),
}


@pytest.mark.parametrize("constant", ["", "w"])
@pytest.mark.parametrize("name", TRANSPOSED)
def test_filters_and_bias_of_transposed_convolutions_may_be_inputs(name: str, constant: str) -> None:
    torch = pytest.importorskip("torch")
    shape, filters, given = TRANSPOSED[name]
    given = {**given, "bias": given.get("bias", False) or bool(constant)}
    model, rank = model_of(shape, filters, op="ConvTranspose", constant=constant, **given), len(shape) - 2
    inputs = arrays_of(model)
    every = {**inputs, **({"w": normal(*filters, seed=1)} if constant else {})}
    function = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)[rank - 1]
    wanted = function(
        *(torch.from_numpy(every[each]).double() for each in ("x", "w", "b") if each in every),
        padding=given.get("pads", [0] * rank)[:rank],
        stride=given.get("strides", 1),
        dilation=given.get("dilations", 1),
        groups=given.get("group", 1),
        output_padding=given.get("output_padding", 0),
    )
    np.testing.assert_allclose(referred(model, inputs)[0], wanted.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_the_bias_of_constant_filters_may_be_an_input(name: str) -> None:
    shape, filters, given = CASES[name]
    assert_as_onnxruntime(model := model_of(shape, filters, constant="w", **{**given, "bias": True}), arrays_of(model))


@pytest.mark.parametrize("given", [{"auto_pad": "SAME_UPPER"}, {"auto_pad": "SAME_LOWER"}, {"output_shape": [8, 7]}])
def test_padding_by_rule_of_transposed_convolutions_is_that_of_onnxruntime(given: dict[str, Any]) -> None:
    model = model_of((1, 2, 4, 3), (2, 3, 4, 3), op="ConvTranspose", strides=[2, 2], **given)
    assert_as_onnxruntime(model, arrays_of(model))


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER", "VALID"])
def test_padding_by_rule_and_of_one_side_are_those_of_onnxruntime(auto_pad: str) -> None:
    model = model_of((2, 3, 7, 6), (4, 3, 2, 3), auto_pad=auto_pad, strides=[2, 1])
    assert_as_onnxruntime(model, arrays_of(model))
    model = model_of((2, 3, 7, 6), (4, 3, 2, 3), pads=[0, 2, 1, 0])
    assert_as_onnxruntime(model, arrays_of(model))


def test_half_precision_sums_in_float32() -> None:
    model = model_of((1, 64, 4, 4), (2, 64, 3, 3), dtype=TensorProto.FLOAT16, pads=[1] * 4)
    inputs = arrays_of(model, np.float16)
    wide = model_of((1, 64, 4, 4), (2, 64, 3, 3), pads=[1] * 4)
    (wanted,) = onnx.reference.ReferenceEvaluator(wide).run(None, {k: v.astype(np.float32) for k, v in inputs.items()})
    np.testing.assert_allclose(referred(model, inputs)[0], wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("n", [1, 2])
def test_the_image_may_be_constant(n: int) -> None:
    """As the first one of StyleGAN."""
    net = Net(6, 4, 3, 3)
    net.node("Conv", net.weight("image", n, 4, 5, 5), net.node("Neg", "x"), pads=[1] * 4)
    assert_as_onnxruntime(net.model(), {"x": normal(6, 4, 3, 3)})


def test_constant_filters_stay_convolutions() -> None:
    net = Net(1, 3, 8, 8)
    net.conv("x", 4, 3)
    assert [each.implementations[0].op for each in lowered(net.model()).nodes if isinstance(each, Node)] == ["conv2d"]


@pytest.mark.long  # builds a network
def test_a_modulated_convolution_that_pytorch_exports_runs_on_the_cpu(tmp_path: Path) -> None:
    """Filters for each image, scaled by a style and of norm 1: groups of one image, as StyleGAN 2 has them."""
    torch = pytest.importorskip("torch")

    class Modulated(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.style, self.weight = torch.nn.Linear(5, 4), torch.nn.Parameter(torch.randn(6, 4, 3, 3))

        def forward(self, x: Any, w: Any) -> Any:
            n, c, height, width = x.shape
            filters = self.weight[None] * (self.style(w) + 1)[:, None, :, None, None]
            filters = filters * torch.rsqrt(filters.square().sum((2, 3, 4), keepdim=True) + 1e-8)
            y = torch.conv2d(x.reshape(1, n * c, height, width), filters.reshape(n * 6, c, 3, 3), padding=1, groups=n)
            return torch.relu(y.reshape(n, 6, height, width))

    torch.manual_seed(0)
    module, inputs = Modulated().eval(), (torch.randn(2, 4, 6, 8), torch.randn(2, 5))
    torch.onnx.export(module, inputs, tmp_path / "m.onnx", dynamo=True, verbose=False)
    with schedsearch.build(tmp_path / "m.onnx", target="cpu", db=tmp_path / "none.db") as built:
        found = built(*(each.numpy() for each in inputs))
    np.testing.assert_allclose(found, module(*inputs).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_computed_filters_over_open_sizes_are_refused_with_a_reason() -> None:
    with pytest.raises(
        ModelError, match=r"conv .*filters are computed, and extents of its images are known at run time only"
    ):
        read_graph(model_of(("n", 3, 7, 6), (4, 3, 3, 3)), {"n": Size("n", 1, 4)})
