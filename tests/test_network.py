"""ONNX models as workloads: what is fused, what is left out, and what is said about broken files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from schedsearch.cli.main import main  # noqa: E402
from schedsearch.network.layers import Extraction, extract  # noqa: E402
from schedsearch.network.model import ModelError, read_model  # noqa: E402
from schedsearch.workload import Workload  # noqa: E402
from schedsearch.workload_file import parse  # noqa: E402


class Net:
    """Builds a model node by node; the last node's result is the network's."""

    def __init__(self, *shape: int | str, dtype: int = TensorProto.FLOAT) -> None:
        self.shape, self.dtype = shape, dtype
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def weight(self, name: str, *shape: int, dtype: Any = np.float32, value: float | None = None) -> str:
        values = (
            np.random.default_rng(len(self.weights)).uniform(0.5, 1.5, shape) if value is None else np.full(shape, value)
        )
        self.weights.append(numpy_helper.from_array(values.astype(dtype), name))
        return name

    def node(self, op: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        name = name or f"{op.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [f"{name}.out"], name=name, **attributes))
        return f"{name}.out"

    def conv(self, x: str, k: int, c: int, size: int = 3, *, name: str, bias: bool = False, **attributes: Any) -> str:
        weight = self.weight(f"{name}.weight", k, c, size, size)
        extra = [self.weight(f"{name}.bias", k)] if bias else []
        return self.node("Conv", x, weight, *extra, name=name, **{"pads": [size // 2] * 4, **attributes})

    def batch_norm(self, x: str, channels: int, name: str) -> str:
        return self.node("BatchNormalization", x, *(self.weight(f"{name}.{i}", channels) for i in range(4)), name=name)

    def model(self, results: Sequence[str] = (), *, opset: int = 17) -> Any:
        info = helper.make_tensor_value_info
        outputs = [helper.make_empty_tensor_value_info(name) for name in results or [self.nodes[-1].output[0]]]
        graph = helper.make_graph(self.nodes, "net", [info("x", self.dtype, self.shape)], outputs, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])

    def save(self, folder: Path, results: Sequence[str] = (), **options: Any) -> Path:
        path = folder / "net.onnx"
        onnx.save(self.model(results, **options), path)
        return path


def read(net: Net, folder: Path, results: Sequence[str] = (), **options: Any) -> Extraction:
    return extract(read_model(net.save(folder, results)), **options)


def conv2d(**params: Any) -> Workload:
    return Workload.conv2d(
        **{"n": 2, "h": 16, "w": 16, "c": 8, "k": 8, "r": 3, "s": 3, "padding": 1, "dtype": "float32", **params}
    )


def residual_block() -> Net:
    """ResNet's: two convolutions with batch norm, the input added, and relu at the end; then the pooled result."""
    net = Net(2, 8, 16, 16)
    first = net.node("Relu", net.batch_norm(net.conv("x", 8, 8, name="first"), 8, "norm1"))
    second = net.batch_norm(net.conv(first, 8, 8, name="second"), 8, "norm2")
    net.node("GlobalAveragePool", net.node("Relu", net.node("Add", second, "x")), name="pool")
    return net


def test_batch_norm_addition_and_relu_belong_to_the_convolution_before_them(tmp_path: Path) -> None:
    found = read(residual_block(), tmp_path)
    assert [layer.workloads for layer in found.layers] == [
        (conv2d(epilogue=["bias", "relu"]),),
        (conv2d(epilogue=["bias", "residual", "relu"]),),
        (Workload("pool2d", {"n": 2, "c": 8, "h": 16, "w": 16, "r": 16, "s": 16, "mode": "average", "dtype": "float32"}),),
    ]
    assert [layer.nodes for layer in found.layers] == [("first", "relu2"), ("second", "add5", "relu6"), ("pool",)]
    assert not found.others


def test_a_value_that_others_read_or_that_leaves_the_network_ends_a_layer(tmp_path: Path) -> None:
    net = Net(2, 8, 16, 16)
    value = net.conv("x", 8, 8, name="read twice")
    net.node("Add", net.node("Relu", value), net.node("Sigmoid", value))
    leaving = net.conv("x", 8, 8, name="leaving")
    relu = net.node("Relu", leaving)
    found = read(net, tmp_path, ["add3.out", leaving, relu])
    assert [layer.nodes for layer in found.layers] == [
        ("read twice",), ("relu1", "sigmoid2", "add3"), ("leaving",), ("relu5",),
    ]  # fmt: skip
    assert not found.others


def test_of_two_added_convolutions_one_takes_the_addition(tmp_path: Path) -> None:
    net = Net(2, 8, 16, 16)
    net.node("Add", net.conv("x", 8, 8, name="a"), net.conv("x", 8, 8, 1, name="b"))
    found = read(net, tmp_path)
    added = conv2d(r=1, s=1, padding=0, epilogue=["residual"])
    assert [layer.workloads for layer in found.layers] == [(conv2d(),), (added,)]
    assert not found.others


def test_every_attribute_of_a_convolution_counts(tmp_path: Path) -> None:
    net = Net(2, 8, 16, 16)
    net.conv("x", 4, 4, 3, name="a", group=2, strides=[2, 1], dilations=[1, 2], pads=[1, 2, 3, 4])
    found = read(net, tmp_path)
    assert found.layers[0].workloads == (
        conv2d(k=4, groups=2, stride=[2, 1], dilation=[1, 2], padding=[1, 2, 3, 4]),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("auto_pad", "expected"), [("SAME_UPPER", [0, 1, 1, 2]), ("SAME_LOWER", [1, 2, 0, 1]), ("VALID", [0, 0, 0, 0])]
)
def test_padding_by_name_is_that_of_onnx(auto_pad: str, expected: list[int], tmp_path: Path) -> None:
    net = Net(2, 8, 16, 16)  # 8 rows of 3 taps need 17 inputs, 16 columns of 4 taps need 19
    net.node("Conv", "x", net.weight("w", 8, 8, 3, 4), name="a", strides=[2, 1], auto_pad=auto_pad)
    assert read(net, tmp_path).layers[0].workloads == (conv2d(s=4, stride=[2, 1], padding=expected),)
    ours = read(net, tmp_path).layers[0].workloads[0]
    inferred = onnx.shape_inference.infer_shapes(net.model()).graph.output[0].type.tensor_type.shape.dim
    n, h, w, k = ours.output.shape
    assert [dim.dim_value for dim in inferred] == [n, k, h, w]


def test_one_filter_for_each_channel_is_a_depthwise_convolution(tmp_path: Path) -> None:
    net = Net(2, 8, 16, 16)
    net.node(
        "Clip", net.conv("x", 16, 1, name="a", group=8, bias=True), net.weight("low", value=0), net.weight("high", value=6)
    )
    workload = read(net, tmp_path).layers[0].workloads[0]
    expected = {"n": 2, "h": 16, "w": 16, "c": 8, "multiplier": 2, "r": 3, "s": 3, "padding": 1, "dtype": "float32"}
    assert workload == Workload("depthwise_conv2d", {**expected, "epilogue": ["bias", "clip"]})


def test_the_format_and_the_layout_can_be_chosen(tmp_path: Path) -> None:
    found = read(residual_block(), tmp_path, dtype="float16", layouts=("NCHW", "NHWC"))
    assert found.layers[0].workloads == tuple(
        conv2d(dtype="float16", layout=layout, epilogue=["bias", "relu"]) for layout in ("NCHW", "NHWC")
    )
    with pytest.raises(ModelError, match=r"node second is not possible in NCHW5c: .*5"):
        read(residual_block(), tmp_path, layouts=("NCHW5c",))


def test_blocks_and_transposes_are_layers(tmp_path: Path) -> None:
    net = Net(2, 8, 16, 16)
    deep = net.node("DepthToSpace", "x", blocksize=2, mode="CRD")
    net.node("Transpose", deep, perm=[0, 2, 3, 1])
    d2s, transpose = (layer.workloads[0] for layer in read(net, tmp_path, layouts=("NCHW",)).layers)
    assert (d2s.op, d2s.c, d2s.block, d2s.mode, d2s.layout) == ("depth_to_space", 8, 2, "CRD", "NCHW")
    assert transpose.output.shape == (2, 32, 32, 2)


def test_a_convolution_stores_through_depth_to_space(tmp_path: Path) -> None:
    net = Net(2, 8, 16, 16)
    net.node("DepthToSpace", net.node("LeakyRelu", net.conv("x", 8, 8, name="a")), blocksize=2, mode="CRD")
    (layer,) = read(net, tmp_path).layers
    assert layer.workloads == (conv2d(epilogue=["leaky_relu", {"depth_to_space": {"block": 2, "mode": "CRD"}}]),)
    net = Net(2, 8, 16, 16)
    net.node("LeakyRelu", net.node("DepthToSpace", net.conv("x", 8, 8, name="a"), blocksize=2, mode="CRD"))
    (layer,) = read(net, tmp_path).layers
    assert layer.workloads == (conv2d(epilogue=["leaky_relu", {"depth_to_space": {"block": 2, "mode": "CRD"}}]),)


# --- Quantised graphs ---------------------------------------------------------------------------------------------------
def quantised(*behind: str, zero: int = 3, quantise: bool = True) -> Net:
    """uint8 activations and int8 weights around a convolution in floating point, as tools for quantisation write it."""
    net = Net(2, 8, 16, 16)
    x = (net.weight("x.scale", value=0.1), net.weight("x.zero", dtype=np.uint8, value=zero))
    weight = (net.weight("w.scale", 8), net.weight("w.zero", 8, dtype=np.int8, value=0))
    image = net.node("DequantizeLinear", net.node("QuantizeLinear", "x", *x), *x)
    filters = net.node("DequantizeLinear", net.weight("w", 8, 8, 3, 3, dtype=np.int8), *weight, axis=0)
    value = net.node("Conv", image, filters, net.weight("bias", 8), name="conv", pads=[1] * 4)
    for op in behind:
        value = net.node(op, value, *(["x"] if op == "Add" else []))
    if quantise:
        y = (net.weight("y.scale", value=0.2), net.weight("y.zero", dtype=np.uint8, value=5))
        net.node("DequantizeLinear", net.node("QuantizeLinear", value, *y, name="to 8 bits"), *y)
    return net


@pytest.mark.parametrize(
    ("net", "expected"),
    [
        (quantised("Relu"), {"zero_points": ["x"], "epilogue": ["bias", "relu", {"requantise": {"to": "uint8"}}]}),
        (quantised(zero=0), {"epilogue": ["bias", {"requantise": {"to": "uint8"}}]}),
        (
            quantised("Add", "Relu", zero=0),
            {"epilogue": ["bias", "dequantise", "residual", "relu", {"quantise": {"to": "uint8"}}]},
        ),
        (quantised("Relu", zero=0, quantise=False), {"epilogue": ["bias", "relu", "dequantise"], "out_dtype": "float32"}),
    ],
    ids=["asymmetric", "symmetric", "a residual in floating point", "a result in floating point"],
)
def test_a_convolution_between_conversions_computes_in_integers(net: Net, expected: dict[str, Any], tmp_path: Path) -> None:
    (layer,) = [each for each in read(net, tmp_path).layers if each.workloads[0].op == "conv2d"]
    assert layer.workloads == (conv2d(dtype="uint8", weight_dtype="int8", **expected),)


def test_operators_of_integers_are_convolutions_too(tmp_path: Path) -> None:
    net = Net(2, 8, 16, 16, dtype=TensorProto.UINT8)
    weight = net.weight("w", 8, 8, 3, 3, dtype=np.int8)
    scales = [net.weight(f"{name}.scale", value=0.1) for name in "xwy"]
    zeros = [net.weight(f"{name}.zero", dtype=kind, value=at) for name, kind, at in (("x", np.uint8, 7), ("w", np.int8, 0))]
    y_zero = net.weight("y.zero", dtype=np.uint8, value=5)
    y = net.node("QLinearConv", "x", scales[0], zeros[0], weight, scales[1], zeros[1], scales[2], y_zero, pads=[1] * 4)
    net.node("ConvInteger", y, weight, zeros[0], pads=[1] * 4)
    first, second = (layer.workloads[0] for layer in read(net, tmp_path).layers)
    both = {"dtype": "uint8", "weight_dtype": "int8", "zero_points": ["x"]}
    assert (first, second) == (conv2d(**both, epilogue=[{"requantise": {"to": "uint8"}}]), conv2d(**both))


# --- Files --------------------------------------------------------------------------------------------------------------
def test_a_workload_file_has_every_distinct_layer_once(tmp_path: Path) -> None:
    net = Net("batch", 8, 16, 16)
    value = "x"
    for i in range(3):
        value = net.node("Relu", net.conv(value, 8, 8, name=f"conv{i}", bias=True))
    net.conv(value, 16, 8, name="last")
    path, out = net.save(tmp_path), tmp_path / "layers.yaml"
    words = ["extract", str(path), "-o", str(out), "--dtype", "float16", "--shape", "x=2,8,16,16"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    tasks = parse(out.read_text()).tasks
    assert [(task.name, task.weight, task.workload) for task in tasks] == [
        ("conv0", 3, conv2d(dtype="float16", epilogue=["bias", "relu"])),
        ("last", 1, conv2d(dtype="float16", k=16)),
    ]


def test_tasks_of_a_node_that_several_kernels_compute_have_names_of_their_own(tmp_path: Path) -> None:
    net, out = Net(2, 8, 16, 16), tmp_path / "layers.yaml"
    net.node("ReduceL2", "x", name="norm", axes=[3])
    words = ["extract", str(net.save(tmp_path)), "-o", str(out), "--dtype", "float16"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    names = [task.name for task in parse(out.read_text()).tasks]
    assert names == ["norm", *(f"norm ({number})" for number in range(2, len(names) + 1))] and len(names) > 1


@pytest.mark.parametrize("shape", [(2, 8, 16), (2, 8, 16, 16)])
def test_a_convolution_of_float64_is_a_layer_of_float32(shape: tuple[int, ...], tmp_path: Path) -> None:
    net = Net(*shape, dtype=TensorProto.DOUBLE)
    kernel = (4, 8, *(3 for _ in shape[2:]))
    net.node("Conv", "x", net.weight("w", *kernel, dtype=np.dtype(np.float64)), name="a")
    result = CliRunner().invoke(main, ["extract", str(net.save(tmp_path)), "-o", str(tmp_path / "layers.yaml")])
    assert result.exit_code == 0, result.output
    (task,) = parse((tmp_path / "layers.yaml").read_text()).tasks
    assert " f32 " in task.workload.label


def test_convolutions_inside_a_branch_are_no_layers_and_the_branch_has_a_reason(tmp_path: Path) -> None:
    branches = {}
    for pad, name in enumerate(("then_branch", "else_branch")):
        out = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        node = helper.make_node("Conv", ["x", "w"], [name], pads=[pad] * 4)
        branches[name] = helper.make_graph([node], name, [], [out])
    net = Net(2, 8, 16, 16)
    net.weight("w", 8, 8, 3, 3)
    last = net.conv("x", 8, 8, name="a")
    total = net.node("ReduceProd", last, keepdims=0, name="product")
    net.node("If", net.node("Cast", total, to=TensorProto.BOOL), name="if", **branches)
    found = extract(read_model(net.save(tmp_path)))
    assert [layer.nodes for layer in found.layers if layer.workloads[0].op == "conv2d"] == [("a",)]
    assert found.reasons["If"].startswith("its condition 'cast2.out' is computed; allowed: a constant, or two branches that")
    assert found.reasons["If"].endswith("its branches give 'if.out' as float32 [2,8,14,14] and float32 [2,8,16,16]")


def test_an_input_that_the_weight_does_not_fit_is_refused(tmp_path: Path) -> None:
    net = Net(2, 5, 16, 16)
    net.conv("x", 8, 4, name="a")
    with pytest.raises(ModelError, match=r"node a \(Conv\) has a weight that takes 4 input channels, but its input has 5"):
        extract(read_model(net.save(tmp_path)))


def test_weights_that_are_inputs_too_leave_no_warnings_of_other_packages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net(2, 8, 16, 16)
    net.conv("x", 8, 8, name="a")
    model = net.model()
    model.ir_version = 3  # where every initialiser had to be an input
    model.graph.input.append(helper.make_tensor_value_info("a.weight", TensorProto.FLOAT, [8, 8, 3, 3]))
    path = tmp_path / "old.onnx"
    path.write_bytes(model.SerializeToString())
    assert [layer.nodes for layer in extract(read_model(path)).layers] == [("a",)]
    assert not caplog.records


def test_dynamic_dimensions_are_named_with_what_to_give(tmp_path: Path) -> None:
    net = Net("batch", 8, "height", 16)
    net.conv("x", 8, 8, name="a")
    path = net.save(tmp_path)
    with pytest.raises(ModelError, match=r"dynamic dimensions: x \[batch,8,height,16\].*--shape x=1,8,224,16"):
        read_model(path)
    with pytest.raises(ModelError, match=r"is \[batch,8,height,16\], but the shape given for it is \[1, 3, 16, 16\]"):
        read_model(path, {"x": [1, 3, 16, 16]})
    with pytest.raises(ModelError, match=r"no input 'y'.*it has x"):
        read_model(path, {"y": [1]})


def _damaged(folder: Path, case: str) -> Path:
    net = Net(2, 8, 16, 16)
    net.conv("x", 8, 8, name="a")
    path = net.save(folder)
    if case == "missing":
        return folder / "other.onnx"
    if case == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif case == "text":
        path.write_text("tasks: []\n")
    elif case == "no bytes":
        path.write_bytes(b"")
    elif case == "huge":
        with path.open("wb") as file:
            file.truncate(3 << 30)  # takes no space
    elif case in ("a weight of other bytes", "a value from nowhere"):
        model = net.model()
        if case == "a value from nowhere":
            model.graph.node[0].input[0] = "nowhere"
        else:
            weight = model.graph.initializer[0]
            weight.raw_data = weight.raw_data[:-8]
        path.write_bytes(model.SerializeToString())
    elif case == "new opset":
        onnx.save(net.model(opset=99), path)
    elif case == "empty":
        onnx.save(helper.make_model(helper.make_graph([], "net", [], [])), path)
    elif case == "no outputs":
        model = net.model()
        del model.graph.output[:]
        onnx.save(model, path)
    elif case == "cycle":
        loop = [helper.make_node("Relu", ["b"], ["a"]), helper.make_node("Relu", ["a"], ["b"])]
        onnx.save(helper.make_model(helper.make_graph(loop, "net", [], [])), path)
    else:
        onnx.save(net.model(), path, save_as_external_data=True, location="weights", size_threshold=0)
        model = onnx.load(path, load_external_data=False)
        place = {"outside": "../weights", "no weights": "nothing"}.get(case)
        for entry in model.graph.initializer[0].external_data:
            if entry.key == "location" and place:
                entry.value = place
        path.write_bytes(model.SerializeToString())
        if case == "short weights":
            (folder / "weights").write_bytes(b"1234")
    return path


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("missing", "is not a file"),
        ("truncated", "is not an ONNX model, or it is damaged"),
        ("text", "is not an ONNX model, or it is damaged"),
        ("no bytes", "net.onnx has 0 bytes; an ONNX file has at least 1 and less than 2,147,483,648"),
        ("huge", "net.onnx has 3,221,225,472 bytes; an ONNX file has at least 1 and less than 2,147,483,648"),
        (
            "a weight of other bytes",
            r"weight 'a.weight' of shape \[8, 8, 3, 3\] and dtype FLOAT is damaged: it has 2,296 bytes and needs 2,304",
        ),
        (
            "a value from nowhere",
            "node a reads 'nowhere', which no node makes and which is not an input or a weight",
        ),
        ("new opset", "needs opset 99; allowed: 7 to .*or upgrade onnx"),
        ("empty", "has no nodes"),
        ("no outputs", "has no outputs; there is nothing to compute"),
        ("cycle", "cycle"),
        ("outside", "outside of the model's folder"),
        ("no weights", "'nothing', which does not exist"),
        ("short weights", "which has 4 bytes"),
    ],
)
def test_a_broken_model_is_refused_with_the_reason(case: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read_model(_damaged(tmp_path, case))
