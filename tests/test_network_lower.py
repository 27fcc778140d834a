"""Networks of kernel calls compute what ONNX's own evaluator computes, value by value and in every layout."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

import onnx_ir  # noqa: E402
from onnx import TensorProto  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx_support import Net  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import onnx_models  # noqa: E402

from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.graph import Network, Node, View  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import ModelError, read_model  # noqa: E402


def residual() -> Net:
    """ResNet's: the shortcut is a convolution too, and the batch norms fold into the weights."""
    net = Net(2, 32, 9, 9)
    first = net.node("Relu", net.batch_norm(net.conv("x", 32, 32, 1, bias=False), 32))
    second = net.batch_norm(net.conv(first, 64, 32, bias=False, strides=[2, 2]), 64)
    shortcut = net.batch_norm(net.conv("x", 64, 32, 1, bias=False, strides=[2, 2]), 64)
    net.node("Relu", net.node("Add", second, shortcut))
    return net


def inception() -> Net:
    net = Net(1, 32, 7, 7)
    ones = net.node("Relu", net.conv("x", 32, 32, 1))
    rows = net.node("Conv", "x", net.weight("w", 64, 32, 1, 3), pads=[0, 1, 0, 1])
    net.node("Concat", ones, net.node("Relu", rows), "x", axis=1)
    return net


def depthwise() -> Net:
    """MobileNetV2's inverted residual."""
    net = Net(1, 8, 10, 10)
    low, high = net.numbers(0), net.numbers(6)
    wide = net.node("Clip", net.batch_norm(net.conv("x", 16, 8, 1, bias=False), 16), low, high)
    deep = net.node("Clip", net.batch_norm(net.conv(wide, 16, 1, group=16, bias=False), 16), low, high)
    net.node("Add", "x", net.batch_norm(net.conv(deep, 8, 16, 1, bias=False), 8))
    return net


def super_resolution() -> Net:
    net = Net(1, 1, 8, 8)
    value = net.node("LeakyRelu", net.conv("x", 8, 1, 5), alpha=0.2)
    net.node("DepthToSpace", net.conv(value, 9, 8), blocksize=3, mode="CRD")
    return net


def upsampling() -> Net:
    """Transposed convolutions: blocks of pixels, overlapping filters, groups, a step of 1, and a result that is cut."""
    net = Net(2, 8, 5, 6)
    value = net.node("ConvTranspose", "x", net.weight("w0", 8, 6, 2, 2), net.weight("b0", 6), strides=[2, 2])
    value = net.node("Relu", value)
    value = net.node("ConvTranspose", value, net.weight("w1", 6, 1, 4, 4), strides=[2, 2], pads=[1] * 4, group=6)
    value = net.node("ConvTranspose", value, net.weight("w2", 6, 4, 3, 3), net.weight("b2", 4), dilations=[2, 1])
    net.node("ConvTranspose", value, net.weight("w3", 4, 3, 3, 3), strides=[3, 3], pads=[0, 1, 1, 0], output_padding=[1, 0])
    return net


def channels_last() -> Net:
    """A dense layer over channels between transposes, and a gather that only changes the shape."""
    net = Net(2, 8, 5, 6)
    last = net.node("Transpose", net.conv("x", 8, 8), perm=[0, 2, 3, 1])
    dense = net.node("Add", net.node("MatMul", last, net.weight("w", 8, 8)), net.weight("b", 8))
    dense = net.node("LayerNormalization", dense, net.weight("gamma", 8), net.weight("beta", 8), axis=3, epsilon=0.1)
    first = net.node("Transpose", dense, perm=[0, 3, 1, 2])
    flat = net.node("Reshape", net.node("Mul", first, net.node("HardSigmoid", first, alpha=1 / 6)), net.row(-1))
    everywhere = net.weight("everywhere", 16, 30, dtype=np.int64, value=np.arange(480).reshape(16, 30))
    net.results = [net.node("Relu", net.node("Gather", flat, everywhere))]
    return net


def moves() -> Net:
    net = Net(1, 32, 6, 6)
    cut = net.node("Slice", "x", net.row(1, -2), net.row(6, -7), net.row(3, 2), net.row(2, -1))
    padded = net.node("Pad", cut, net.row(0, 0, 0, 1, 0, 0, 2, 3), net.numbers(2.5))
    turned = net.node("Transpose", padded, perm=[0, 3, 2, 1])
    net.node("Reshape", turned, net.row(-1, 32))
    return net


def unfolded() -> Net:
    """A batch norm that leaves the network before it ends, a constant that is added, and a view of the sums."""
    net = Net(2, 8, 5, 5)
    value = net.conv("x", 8, 8, bias=False)
    added = net.node("Add", value, net.weight("channels", 8, 1, 1))
    net.node("Flatten", net.node("SpaceToDepth", net.node("Relu", net.conv(added, 8, 8, 2, pads=[0] * 4)), blocksize=2))
    return net


def pools() -> Net:
    """Every kind of pool; the mean of the last loses two dimensions."""
    net = Net(1, 32, 11, 11)
    value = net.node("MaxPool", "x", kernel_shape=[3, 3], strides=[2, 2], pads=[0, 0, 1, 1], ceil_mode=1)
    value = net.node("AveragePool", value, kernel_shape=[3, 2], pads=[1, 0, 1, 1], count_include_pad=1)
    value = net.node("AveragePool", value, kernel_shape=[2, 2], auto_pad="SAME_UPPER")
    both = net.node("Concat", net.node("GlobalAveragePool", value), net.node("GlobalMaxPool", value), axis=1)
    net.results = [both, net.node("ReduceMean", value, net.row(-1, 2), keepdims=0)]
    return net


def head() -> Net:
    """The end of a classifier, with a hidden layer."""
    net = Net(2, 32, 4, 4)
    flat = net.node("Flatten", net.node("GlobalAveragePool", "x"))
    hidden = net.node("Gemm", flat, net.weight("w0", 16, 32), net.weight("b0", 16), transB=1)
    net.node("Gemm", net.node("Relu", hidden), net.weight("w1", 16, 10), net.weight("b1", 10))
    return net


def products() -> Net:
    """MatMul with a constant, with a bias and an addition behind it, and of two computed arrays."""
    net = Net(2, 3, 8)
    one = net.node("Add", net.node("MatMul", "x", net.weight("w0", 8, 8)), net.weight("b0", 8))
    two = net.node("Relu", net.node("Add", net.node("MatMul", "x", net.weight("w1", 8, 8)), "x"))
    net.node("MatMul", one, net.node("Transpose", two, perm=[0, 2, 1]))
    return net


def gates() -> Net:
    """SiLU and squeeze-excite, as EfficientNet and MobileNetV3 have them."""
    net = Net(2, 8, 6, 6)
    value = net.conv("x", 32, 8, name="wide")
    value = net.node("Mul", value, net.node("Sigmoid", value, name="sigmoid"), name="silu")
    small = net.node("Relu", net.conv(net.node("GlobalAveragePool", value, name="pool"), 8, 32, 1, name="squeeze"))
    gate = net.node("HardSigmoid", net.conv(small, 32, 8, 1, name="excite"), name="gate", alpha=0.25)
    net.node("Mul", value, gate, name="gated")
    return net


def functions() -> Net:
    """One chain of many functions, constants of every shape that broadcasts, and a value that two nodes read."""
    net = Net(2, 4, 5, 5)
    value = net.node("Sub", net.weight("channels", 4, 1, 1), net.node("Abs", "x"))
    value = net.node("PRelu", value, net.weight("slopes", 1, 4, 1, 1))
    positive = net.node("Add", net.node("Pow", value, net.numbers(2)), net.numbers(0.5))
    one = net.node("Div", net.node("Log", positive), net.node("Sqrt", positive))
    two = net.node("Tanh", net.node("Exp", net.node("Neg", positive)))
    value = net.node("Max", one, two, net.node("Erf", "x"))
    value = net.node("Clip", value, "", net.numbers(0.9))
    value = net.node("Gelu", net.node("HardSwish", net.node("Mul", value, net.weight("column", 5, 1))))
    net.node("LeakyRelu", net.batch_norm(value, 4), alpha=0.125)
    return net


def attention() -> Net:
    """Softmax of a scaled product of parts, of images too, and LogSoftmax."""
    net = Net(2, 6, 8)
    queries = net.node(
        "Split", net.node("MatMul", "x", net.weight("k", 8, 16)), axis=-1, num_outputs=2, outputs=2, name="qk"
    )
    keys = net.node("Transpose", net.node("Mul", "qk.out1", net.weight("widths", 8)), perm=[0, 2, 1])
    scores = net.node("Div", net.node("MatMul", queries, keys), net.numbers(2.8))
    mixed = net.node("MatMul", net.node("Softmax", scores), "x")
    image = net.node("Reshape", mixed, net.row(2, 4, 4, 3))
    net.results = [net.node("Softmax", image, axis=1), net.node("LogSoftmax", mixed, axis=1)]
    return net


def resizes() -> Net:
    net = Net(1, 32, 5, 7)
    double = net.node("Resize", "x", "", net.weight("double", 4, value=[1, 1, 2, 2]), mode="linear")
    half = {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
    net.results = [net.node("Resize", double, "", net.weight("thrice", 2, value=[3, 2]), mode="nearest", axes=[3, 2])]
    net.node("Resize", double, "", net.weight("half", 4, value=[1, 1, 0.7, 0.5]), **half)
    net.results.append(net.nodes[-1].output[0])
    return net


@pytest.mark.parametrize("scales, rounding", [([1, 1, 2, 3], "floor"), ([1, 1, 0.5, 0.4], "ceil")])
def test_a_resize_of_opset_10_counts_from_the_corner(tmp_path: Path, scales: list[float], rounding: str) -> None:
    """As ONNX Runtime computes it, and as opset 11 says it."""
    old, new = Net(1, 2, 5, 7), Net(1, 2, 5, 7)
    words = {"mode": "nearest", "nearest_mode": rounding, "coordinate_transformation_mode": "asymmetric"}
    old.node("Resize", "x", old.weight("scales", 4, value=scales), mode="nearest")
    new.node("Resize", "x", "", new.weight("scales", 4, value=scales), **words)
    x = np.arange(70, dtype=np.float32).reshape(1, 2, 5, 7)
    (wanted,) = ReferenceEvaluator(new.model(opset=13)).run(None, {"x": x})
    network = lower(read_model(old.save(tmp_path, opset=10)))
    np.testing.assert_array_equal(evaluate(network, {"x": x})[network.outputs[0]], wanted)


FLOATS = [
    attention,
    resizes,
    gates,
    upsampling,
    channels_last,
    functions,
    pools,
    head,
    products,
    residual,
    inception,
    depthwise,
    super_resolution,
    moves,
    unfolded,
]


def expected(model: Any, x: Any) -> dict[str, Any]:
    """Every value of the simplified graph, by ONNX's evaluator."""
    found: dict[str, Any] = ReferenceEvaluator(onnx_ir.to_proto(model)).run(None, {"x": x}, intermediate=True)
    return found


def numbers(net: Net) -> Any:
    random = np.random.default_rng(7)
    if net.dtype == TensorProto.FLOAT:
        return random.uniform(-1, 1, net.shape).astype(np.float32)
    return random.integers(0, 100, net.shape).astype(onnx.helper.tensor_dtype_to_np_dtype(net.dtype))


def implementation(number: int) -> Callable[[Node], Any]:
    return lambda node: node.implementations[number % len(node.implementations)]


def check(network: Network, truth: dict[str, Any], found: dict[str, Any], tolerance: float) -> None:
    assert set(network.outputs) <= set(found)
    for name, array in found.items():
        assert array.shape == network.values[name].shape, name
        error = np.abs(array.astype(np.float64) - truth[name].astype(np.float64)).max()
        assert error <= tolerance * max(1.0, np.abs(truth[name]).max()), (name, error)


@pytest.mark.parametrize("build", FLOATS, ids=lambda build: build.__name__)
@pytest.mark.mostly_long(2)
def test_every_way_computes_every_value_of_the_model(build: Callable[[], Net], tmp_path: Path) -> None:
    net = build()
    model = read_model(net.save(tmp_path))
    network = lower(model)
    x = numbers(net)
    truth = expected(model, x)
    workloads = max(len(node.implementations) for node in network.nodes if isinstance(node, Node))
    for number in range(workloads):
        check(network, truth, evaluate(network, {"x": x}, implementation=implementation(number)), 1e-5)
    for name, whole in zip(network.outputs, ReferenceEvaluator(net.model()).run(None, {"x": x})):
        assert np.allclose(truth[name], whole, atol=1e-4)  # simplification changed nothing


def test_a_shorter_format_is_that_of_all_numbers(tmp_path: Path) -> None:
    model = read_model(residual().save(tmp_path))
    network = lower(model, dtype="float16")
    assert {value.dtype for value in network.values.values()} == {"float16"}
    x = numbers(residual())
    check(network, expected(model, x), evaluate(network, {"x": x}), 5e-3)


def test_layouts_of_a_convolution_and_a_concatenation(tmp_path: Path) -> None:
    network = lower(read_model(inception().save(tmp_path)), layouts=("NHWC", "NCHW", "NCHW32c"))
    conv, _, concat = network.nodes
    assert isinstance(conv, Node) and isinstance(concat, Node)
    pairs = [
        tuple(spec.axes for name, spec in conv.layouts(each) if name in network.values) for each in conv.implementations
    ]
    assert pairs == [("NHWC", "NHWC"), ("NCHW", "NCHW"), ("NCHW32c", "NCHW32c"), ("NHWC", "NCHW"), ("NCHW", "NHWC")]
    assert [[spec.axes for _, spec in concat.layouts(each)] for each in concat.implementations] == [
        ["NHWC"] * 2, ["NCHW"] * 2, ["NCHW32c"] * 2,
    ]  # fmt: skip
    assert [each.output.shape for each in concat.implementations] == [(1, 7, 7, 32), (1, 32, 7, 7), (1, 1, 7, 7, 32)]
    assert [each.output.slice_of for each in concat.implementations] == [(1, 7, 7, 128), (1, 128, 7, 7), (1, 4, 7, 7, 32)]


def test_elementwise_nodes_are_one_kernel(tmp_path: Path) -> None:
    network = lower(read_model(gates().save(tmp_path)))
    nodes = [node for node in network.nodes if isinstance(node, Node) and node.implementations[0].op == "elementwise"]
    assert [node.sources for node in nodes] == [("gate", "gated")]
    assert [node.implementations[0].expression for node in nodes] == ["a * hard_sigmoid(b, 0.25, 0.5)"]
    assert [[each[2] for each in workload.inputs] for workload in nodes[0].implementations] == [
        [(2, 6, 6, 32), (2, 1, 1, 32)], [(2, 32, 6, 6), (2, 32, 1, 1)], [(2, 1, 6, 6, 32), (2, 1, 1, 1, 32)],
    ]  # fmt: skip
    (node,) = lower(read_model(functions().save(tmp_path))).nodes
    assert isinstance(node, Node) and len(node.sources) == 19


def test_a_product_is_scaled_by_the_kernel_that_makes_it(tmp_path: Path) -> None:
    network = lower(read_model(attention().save(tmp_path)))
    nodes = [node for node in network.nodes if isinstance(node, Node)]
    assert [node.implementations[0].op for node in nodes] == [
        "dense", "strided_slice", "elementwise", "batch_matmul", "softmax", "batch_matmul", "softmax", "softmax",
    ]  # fmt: skip
    assert [len(node.sources) for node in nodes if node.implementations[0].op == "batch_matmul"] == [2, 1]


def test_convolutions_store_into_slices_of_what_they_are_concatenated_to(tmp_path: Path) -> None:
    net = Net(1, 32, 7, 7)
    inner = net.node("Concat", net.conv("x", 16, 32, 1, name="a"), net.conv("x", 32, 32, name="b"), axis=1, name="inner")
    net.node("Relu", net.node("Concat", net.conv("x", 48, 32, 1, name="c"), inner, axis=1, name="outer"), name="end")
    model = read_model(net.save(tmp_path))
    network = lower(model)
    assert [(node.sources, getattr(node, "offsets", None)) for node in network.nodes] == [
        (("a",), {"y": 48}), (("c",), {"y": 0}), (("b", "inner", "outer"), {"y": 64}), (("end",), {}),
    ]  # fmt: skip
    x = numbers(net)
    truth = expected(model, x)
    for number in range(5):
        check(network, truth, evaluate(network, {"x": x}, implementation=implementation(number)), 1e-5)
    apart = lower(read_model(net.save(tmp_path)), slices=())
    assert [node.sources for node in apart.nodes] == [("a",), ("b",), ("c",), ("inner", "outer"), ("end",)]


# --- Quantised graphs ---------------------------------------------------------------------------------------------------
def quantised(*, filters_apart: bool = False, join: bool = False) -> Net:
    """Two int8 convolutions, as tools for quantisation write them; the second in floating point from its sums on."""
    net = Net(1, 8, 6, 6, dtype=TensorProto.UINT8)
    value, scale, zero = "x", net.numbers(0.02), net.numbers(3, dtype=np.uint8)
    for number in range(2):
        shape = (8,) if filters_apart else ()
        scales = net.weight(f"w{number}.scale", *shape, value=np.linspace(0.01, 0.03, 8) if filters_apart else 0.02)
        zeros = net.weight(f"w{number}.zero", *shape, dtype=np.int8, value=0 if filters_apart else 2)
        filters = net.node("DequantizeLinear", net.weight(f"w{number}", 8, 8, 3, 3, dtype=np.int8), scales, zeros, axis=0)
        image = net.node("DequantizeLinear", value, scale, zero)
        made = net.node("Conv", image, filters, net.weight(f"b{number}", 8), name=f"conv{number}", pads=[1] * 4)
        if number or join:
            made = net.node("LeakyRelu", made, alpha=0.25)
        else:
            made = net.node("Relu", made)
        scale, zero = net.numbers(0.013), net.numbers(100, dtype=np.uint8)
        value = net.node("QuantizeLinear", made, scale, zero)
    return net


@pytest.mark.parametrize("filters_apart", [False, True])
def test_integers_between_conversions_are_those_of_the_model(filters_apart: bool, tmp_path: Path) -> None:
    net = quantised(filters_apart=filters_apart)
    model = read_model(net.save(tmp_path))
    network = lower(model)
    assert [len(node.sources) for node in network.nodes] == [3, 3]
    x = numbers(net)
    truth = expected(model, x)
    for number in range(2):
        found = evaluate(network, {"x": x}, implementation=implementation(number))
        for name in network.values:
            differing = found[name].astype(int) - truth[name]
            assert np.abs(differing).max() <= 1  # the model adds its bias before it is rounded to integers
            assert (differing != 0).mean() < 0.1
            assert len(np.unique(truth[name])) > 10


def test_quantised_additions_belong_to_convolutions(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(onnx_models.build("resnet18_depthwise", size=(32, 32), width=1 / 8, int8=True), path)
    model = read_model(path)
    network = lower(model, dtype="float16")
    kernels = [node.implementations[0] for node in network.nodes if isinstance(node, Node)]
    expressions = [kernel.expression for kernel in kernels if kernel.op == "elementwise"]
    assert expressions == ["quantise(a, 0.031496063, 0)", "dequantise(a, 0.015686275, 0)"]
    stages = [kernel.epilogue[-1] for kernel in kernels if kernel.op == "conv2d"]
    assert [stage.params["relu"] for stage in stages if stage.name == "requantise_add"] == [True] * 8
    formats = [value.dtype for value in network.values.values() if "int8" not in value.dtype]
    assert formats == ["float16"] * 5  # the input, what the pool reads and makes, a view of it, and the output
    x = np.random.default_rng(1).uniform(-1, 1, (1, 3, 32, 32)).astype(np.float32)
    truth, found = expected(model, x), evaluate(network, {"x": x})
    (output,) = network.outputs
    assert np.abs(found[output] - truth[output]).max() < 0.05 * np.abs(truth[output]).max()  # a rounding may differ by one


def test_operators_of_integers_are_exact(tmp_path: Path) -> None:
    net = Net(1, 8, 6, 6, dtype=TensorProto.UINT8)
    zero, weight = net.numbers(7, dtype=np.uint8), net.weight("w", 8, 8, 3, 3, dtype=np.int8)
    scales = [net.numbers(scale) for scale in (0.11, 0.023, 0.31)]  # no sum is a tie
    bias = net.weight("bias", 8, dtype=np.int32)
    of_weight, of_y = net.numbers(-2, dtype=np.int8), net.numbers(60, dtype=np.uint8)
    y = net.node("QLinearConv", "x", scales[0], zero, weight, scales[1], of_weight, scales[2], of_y, bias, pads=[1] * 4)
    net.node("ConvInteger", y, weight, of_y, pads=[1] * 4)
    model = read_model(net.save(tmp_path))
    network = lower(model)
    x = numbers(net)
    truth, found = expected(model, x), evaluate(network, {"x": x})
    for name in network.values:
        assert np.array_equal(found[name], truth[name])
        assert len(np.unique(truth[name])) > 20


# --- What cannot be lowered ---------------------------------------------------------------------------------------------
def test_all_nodes_without_an_operator_are_listed(tmp_path: Path) -> None:
    net = Net(1, 8, 6, 6)
    value = net.conv("x", 8, 8, name="a")
    for name in ("one", "two"):
        value = net.node("CenterCropPad", value, net.row(1, 8, 6, 6), name=name)
    net.node("Det", value, name="of large matrices")
    with pytest.raises(ModelError, match=r"CenterCropPad: one, two; Det: of large matrices \(.*allowed"):
        lower(read_model(net.save(tmp_path)))


def test_a_bias_for_each_row_is_added_by_a_kernel_of_its_own(tmp_path: Path) -> None:
    net = Net(4, 3)
    net.node("Gemm", "x", net.weight("w", 3, 4), net.weight("b", 4, 1), name="rows")  # as many numbers as channels
    nodes = lower(read_model(net.save(tmp_path))).nodes
    assert [node.implementations[0].op for node in nodes if isinstance(node, Node)] == ["dense", "elementwise"]


def test_names_in_the_network_are_those_of_the_model(tmp_path: Path) -> None:
    network = lower(read_model(unfolded().save(tmp_path)))
    assert network.inputs == ("x",)
    assert [type(node) for node in network.nodes] == [Node, Node, Node, View]
    sources: Sequence[Sequence[str]] = [node.sources for node in network.nodes]
    assert sources[0] == ("conv0", "add1")
    assert network.outputs == (network.nodes[-1].y,)  # type: ignore[union-attr]


# --- Well-known networks ------------------------------------------------------------------------------------------------
def test_a_small_model_of_a_well_known_network(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(onnx_models.build("resnet18_depthwise", size=(32, 32), width=1 / 8), path)
    model = read_model(path)
    network = lower(model)
    assert Counter(node.implementations[0].op for node in network.nodes if isinstance(node, Node)) == {
        "conv2d": 20, "depthwise_conv2d": 16, "pool2d": 2, "dense": 1,
    }  # fmt: skip
    x = np.random.default_rng(1).uniform(-1, 1, (1, 3, 32, 32)).astype(np.float32)
    check(network, expected(model, x), evaluate(network, {"x": x}), 1e-4)


def test_a_weight_with_another_number_of_dimensions_than_the_input_is_a_mistake_of_the_model(tmp_path: Path) -> None:
    net = Net(1, 3, 8, 8)
    net.node("Conv", "x", net.weight("w", 8, 3, 3), name="conv")
    path = tmp_path / "net.onnx"
    onnx.save(net.model(), path)
    with pytest.raises(ModelError, match=r"node conv \(Conv\): Number of spatial dimensions in the weight tensor"):
        lower(read_model(path))
