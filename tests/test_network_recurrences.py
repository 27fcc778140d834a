"""LSTM, GRU and RNN of ONNX in networks, beside ONNX Runtime and PyTorch, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs onnx")
pytest.importorskip("onnxscript", reason="needs onnxscript")

import onnx_ir  # noqa: E402
from onnx import helper, numpy_helper  # noqa: E402
from test_onnx_nodes import array_of, cases, model_of  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.errors import IndexRangeError  # noqa: E402
from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.graph import Node  # noqa: E402
from schedsearch.network.invalid import ModelError  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import load, simplified  # noqa: E402
from schedsearch.network_check.evaluators import OnnxReference  # noqa: E402

Array = np.ndarray[Any, Any]
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
INPUTS = {"LSTM": "XWRBLHCP", "GRU": "XWRBLH", "RNN": "XWRBLH"}
RESULTS = {"LSTM": ("Y", "Y_h", "Y_c"), "GRU": ("Y", "Y_h"), "RNN": ("Y", "Y_h")}


@dataclass
class Layer:
    """A model of one node. `computed` are its inputs that the network has; others are constants."""

    op: str = "LSTM"
    t: int = 4
    n: int = 3
    i: int = 4
    h: int = 5
    lens: Sequence[int] | None = None
    given: str = "BHC"  # optional inputs besides the lengths
    computed: str = "X"
    results: Sequence[str] = ()
    opset: int = 14
    seed: int = 0
    attributes: Mapping[str, Any] = field(default_factory=dict)
    changed: Mapping[str, Array] = field(default_factory=dict)

    def arrays(self) -> dict[str, Array]:
        rng = np.random.default_rng(self.seed)
        d = 2 if self.attributes.get("direction") == "bidirectional" else 1
        first = bool(self.attributes.get("layout", 0))
        gates, state = GATES[self.op] * self.h, (self.n, d, self.h) if first else (d, self.n, self.h)
        shapes = {
            "X": (self.n, self.t, self.i) if first else (self.t, self.n, self.i), "W": (d, gates, self.i),
            "R": (d, gates, self.h), "B": (d, 2 * gates), "H": state, "C": state, "P": (d, 3 * self.h),
        }  # fmt: skip
        scale = {name: self.h**-0.5 if name in "WRBP" else 1.0 for name in shapes}
        found = {
            name: (rng.standard_normal(shape) * scale[name]).astype(np.float32)
            for name, shape in shapes.items()
            if name in "XWR" or (name in self.given and name in INPUTS[self.op])
        }
        if self.lens is not None:
            found["L"] = np.array(self.lens, np.int32)
        return found | dict(self.changed)

    def model(self) -> Any:
        arrays = self.arrays()
        results = self.results or RESULTS[self.op]
        node = helper.make_node(
            self.op, [name if name in arrays else "" for name in INPUTS[self.op]],
            [name if name in results else "" for name in RESULTS[self.op]], "layer", hidden_size=self.h,
            **self.attributes,
        )  # fmt: skip
        kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in arrays.items()}
        inputs = [helper.make_tensor_value_info(name, kinds[name], arrays[name].shape) for name in self.inputs()]
        outputs = [helper.make_tensor_value_info(name, 1, None) for name in results]
        weights = [numpy_helper.from_array(array, name) for name, array in arrays.items() if name not in self.inputs()]
        graph = helper.make_graph([node], "layer", inputs, outputs, weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)

    def inputs(self) -> dict[str, Array]:
        return {name: array for name, array in self.arrays().items() if name in self.computed}

    def evaluated(self) -> list[Array]:
        """What the lowered network computes, by the references."""
        network = lower(load(self.model()).graph())
        values = evaluate(network, self.inputs())
        return [values[name] for name in network.outputs]


def onnx_runtime(model: Any, inputs: Mapping[str, Array]) -> list[Array]:
    ort = pytest.importorskip("onnxruntime", reason="needs ONNX Runtime")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    found: list[Array] = ort.InferenceSession(model.SerializeToString(), options).run(None, dict(inputs))
    return found


def assert_close(found: Sequence[Array], right: Sequence[Array], error: float = 2e-6) -> None:
    assert len(found) == len(right)
    for one, other in zip(found, right):
        np.testing.assert_allclose(np.asarray(one).reshape(other.shape), other, rtol=error, atol=error)


def random_layer(number: int) -> Layer:
    rng = np.random.default_rng(number)
    op = str(rng.choice(["LSTM", "GRU", "RNN"]))
    t, n = int(rng.integers(1, 41)), int(rng.integers(1, 6))
    functions = {"LSTM": 3, "GRU": 2, "RNN": 1}[op]
    attributes: dict[str, Any] = {"direction": str(rng.choice(["forward", "reverse", "bidirectional"]))}
    functions *= 2 if attributes["direction"] == "bidirectional" else 1
    if rng.random() < 0.3:
        attributes["activations"] = [
            str(each) for each in rng.choice(["Sigmoid", "Tanh", "Softsign", "HardSigmoid"], functions)
        ]
    if rng.random() < 0.3:
        attributes["clip"] = 0.8
    if op == "GRU":
        attributes["linear_before_reset"] = int(rng.integers(0, 2))
    if op == "LSTM":
        attributes["input_forget"] = int(rng.integers(0, 2))
    results = [name for name in RESULTS[op] if rng.random() < 0.6] or ["Y_h"]
    return Layer(
        op, t, n, int(rng.integers(1, 9)), int(rng.choice([1, 3, 37, 129])),
        [int(each) for each in rng.integers(0, t + 1, n)] if rng.random() < 0.5 else None,
        "".join(each for each in "BHCP" if rng.random() < 0.5), "X" + "".join(each for each in "LHC" if rng.random() < 0.5),
        results, int(rng.choice([7, 13, 14, 22])), number, attributes,
    )  # fmt: skip


@pytest.mark.integrations
@pytest.mark.drawn
@pytest.mark.parametrize("number", range(30))
def test_random_nodes_are_those_of_onnx_runtime(number: int) -> None:
    layer = random_layer(number)
    assert_close(layer.evaluated(), onnx_runtime(layer.model(), layer.inputs()), 1e-5)


@pytest.mark.parametrize("number", range(12))
def test_networks_are_checked_by_the_definition_where_onnx_runtime_is_missing(number: int) -> None:
    layer = random_layer(number)
    opened = OnnxReference().open(layer.model())
    assert_close(layer.evaluated(), opened.run(layer.inputs()), 1e-5)


def test_the_product_with_the_input_is_one_call() -> None:
    network = lower(load(Layer().model()).graph())
    assert [node.implementations[0].op for node in network.nodes if isinstance(node, Node)] == ["dense", "recurrent"]
    assert {node.sources for node in network.nodes} == {("layer",)}


@pytest.mark.parametrize("op", ["LSTM", "GRU"])
def test_layout_1_has_rows_first(op: str) -> None:
    """ONNX Runtime does not run it."""
    first = Layer(op, attributes={"layout": 1, "direction": "bidirectional"}, computed="XHC")
    arrays = first.arrays()
    turned = {name: arrays[name].swapaxes(0, 1) for name in "XHC" if name in arrays}
    other = Layer(op, attributes={"direction": "bidirectional"}, computed="XHC", changed=arrays | turned)
    y, *states = other.evaluated()
    assert_close(first.evaluated(), [y.transpose(2, 0, 1, 3), *(each.swapaxes(0, 1) for each in states)], 1e-12)


def test_first_states_of_zero_and_full_lengths_are_no_arguments() -> None:
    zeros = {"H": np.zeros((1, 3, 5), np.float32), "C": np.zeros((1, 3, 5), np.float32)}
    network = lower(load(Layer(lens=[4, 4, 4], changed=zeros).model()).graph())
    assert set(network.nodes[-1].arguments) == {"gates", "r"}  # type: ignore[union-attr]


BAD: dict[str, tuple[Layer, str]] = {
    "R": (Layer(changed={"R": np.zeros((1, 20, 6), np.float32)}), r"weight R of shape \[1, 20, 6\]; allowed: \[1, 20, 5\]"),
    "W": (Layer(changed={"W": np.zeros((20, 4), np.float32)}), r"weight W of shape \[20, 4\]; allowed: \[1, 20, 4\]"),
    "B": (Layer(changed={"B": np.zeros((1, 20), np.float32)}), r"bias of shape \[1, 20\]; allowed: \[1, 40\]"),
    "H": (Layer(changed={"H": np.zeros((1, 2, 5), np.float32)}), r"first state of shape \[1, 2, 5\]; allowed: \[1, 3, 5\]"),
    "C": (Layer(computed="XC", changed={"C": np.zeros((3, 5), np.float32)}), r"first cell state of shape \[3, 5\]"),
    "P": (Layer(changed={"P": np.zeros((1, 10), np.float32)}), r"peephole weight of shape \[1, 10\]; allowed: \[1, 15\]"),
    "rows of lengths": (Layer(lens=[1, 2]), r"sequence_lens of shape \[2\]; allowed: \[3\]"),
    "a long length": (Layer(lens=[1, 2, 5]), "sequence of 5 steps in sequence_lens; allowed: 0 to 4"),
    "a negative length": (Layer(lens=[1, -2, 3]), "sequence of -2 steps in sequence_lens; allowed: 0 to 4"),
    "an activation": (
        Layer(attributes={"activations": ["Sigmoid", "Tan", "Tanh"]}), "activation 'Tan'; allowed: Sigmoid, Tanh, Relu"
    ),
    "two activations": (Layer(attributes={"activations": ["Tanh", "Tanh"]}), "has 2 activations; allowed: 3"),
    "numbers": (Layer(attributes={"activation_alpha": [1.0]}), "1 numbers in activation_alpha; allowed: up to 0"),
    "clip": (Layer(attributes={"clip": -1.0}), "has clip -1; allowed: a number above 0"),
    "direction": (Layer(attributes={"direction": "both"}), "direction 'both'; allowed: forward, reverse, bidirectional"),
    "layout": (Layer(attributes={"layout": 2}), "layout 2; allowed: 0 or 1"),
    "no steps": (Layer(t=0), r"array without elements, \[0, 3, 4\]; allowed: at least one step"),
    "a computed weight": (Layer(computed="XR"), "has a computed R; allowed: a constant"),
    "an unsettled default": (
        Layer(attributes={"activations": ["Sigmoid", "Tanh", "Affine"]}), "no activation_alpha for affine"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said_in_one_line(name: str) -> None:
    layer, message = BAD[name]
    with pytest.raises(ModelError, match=message) as caught:
        layer.evaluated()
    assert "layer" in str(caught.value) and "\n" not in str(caught.value)


# ---- built networks


def saved(model: Any, folder: Path) -> Path:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def called(net: Any, inputs: Mapping[str, Array]) -> list[Array]:
    found = net(**inputs)
    return [np.asarray(each) for each in (found if isinstance(found, tuple | list) else [found])]


def test_a_built_network_notes_a_length_that_is_wrong(tmp_path: Path) -> None:
    layer = Layer("RNN", t=3, n=2, i=2, h=2, lens=[3, 1], given="", computed="XL", results=["Y"])
    with schedsearch.build(saved(layer.model(), tmp_path), target="cpu") as net:
        assert_close(called(net, layer.inputs()), layer.evaluated())
        with pytest.raises(IndexRangeError, match=r"L\[1\] is 4, but a sequence has 3 steps; allowed: 0 to 3"):
            net(**layer.inputs() | {"L": np.array([3, 4], np.int32)})


@pytest.mark.long
@pytest.mark.parametrize("op", GATES)
def test_cases_of_onnx_on_a_cpu(op: str, tmp_path: Path) -> None:
    for case in cases(op):
        model, inputs = model_of(case)
        ((_, outputs),) = case.data_sets
        with schedsearch.build(saved(model, tmp_path), target="cpu") as net:
            found = called(net, {name: array_of(value) for name, value in inputs.items()})
        assert_close(found, [array_of(each) for each in outputs], 1e-4)


@pytest.mark.long
def test_a_layer_of_a_table_of_sizes_is_built_for_each(tmp_path: Path) -> None:
    model = Layer("GRU", t=5, n=1, i=3, h=4, given="B", results=["Y", "Y_h"]).model()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "t"
    with schedsearch.build(saved(model, tmp_path), target="cpu", dynamic={"t": (1, 6)}) as net:
        for t in (1, 4, 6):
            layer = Layer("GRU", t=5, n=1, i=3, h=4, given="B", results=["Y", "Y_h"])
            x = np.random.default_rng(t).standard_normal((t, 1, 3)).astype(np.float32)
            whole = Layer("GRU", t=t, n=1, i=3, h=4, given="B", results=["Y", "Y_h"], changed=layer.arrays() | {"X": x})
            assert_close(called(net, {"X": x}), whole.evaluated())


# ---- PyTorch


def _packed(torch: Any) -> Any:
    class Packed(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.LSTM(3, 5, batch_first=True, bidirectional=True)

        def forward(self, x: Any) -> Any:
            lengths = torch.tensor([6, 4])
            rows = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            y, (h, c) = self.layer(rows)
            return torch.nn.utils.rnn.pad_packed_sequence(y, batch_first=True, total_length=6)[0], h, c

    return Packed()


MODULES: dict[str, Callable[[Any], Any]] = {
    "lstm": lambda torch: torch.nn.LSTM(3, 5, num_layers=2, batch_first=True, bidirectional=True),
    "gru": lambda torch: torch.nn.GRU(3, 7, num_layers=2, bidirectional=True),
    "rnn": lambda torch: torch.nn.RNN(3, 4, nonlinearity="relu", batch_first=True),
    "packed": _packed,
}


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore")  # of tracing
@pytest.mark.parametrize("name", MODULES)
def test_exported_layers_are_those_of_pytorch(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    torch.manual_seed(0)
    module, x = MODULES[name](torch).eval(), torch.randn(2, 6, 3)
    path = tmp_path / "module.onnx"
    torch.onnx.export(module, (x,), str(path), dynamo=False, input_names=["x"])
    graph = simplified(onnx_ir.from_proto(onnx.load(path)), name)
    network = lower(graph)
    values = evaluate(network, {"x": x.numpy()})
    with torch.no_grad():
        y, *states = module(x)
    right = [y, *(each for state in states for each in (state if isinstance(state, tuple) else (state,)))]
    assert_close([values[output] for output in network.outputs], [each.numpy() for each in right], 1e-5)


# ---- 8-bit weights


def dynamic_quantised(channels: bool) -> tuple[Any, Any]:
    """A DynamicQuantizeLSTM, and the LSTM of its dequantised weights."""
    rng = np.random.default_rng(0)
    d, i, h = 2, 6, 16
    arrays = {name: rng.integers(-100, 101, (d, extent, 4 * h)).astype(np.int8) for name, extent in (("W", i), ("R", h))}
    scale = {name: np.float32(0.004) + rng.random((d, 4 * h) if channels else d).astype(np.float32) / 1000 for name in "WR"}
    zeros = {name: rng.integers(-3, 4, scale[name].shape).astype(np.int8) for name in "WR"}
    bias = rng.standard_normal((d, 8 * h)).astype(np.float32)
    linear = {"Ws": scale["W"], "Wz": zeros["W"], "Rs": scale["R"], "Rz": zeros["R"]}
    node = helper.make_node(
        "DynamicQuantizeLSTM", ["X", "W", "R", "B", "", "", "", "", *linear], ["Y", "Y_h", "Y_c"], "layer",
        domain="com.microsoft", hidden_size=h, direction="bidirectional",
    )  # fmt: skip
    ports = [helper.make_tensor_value_info(name, 1, shape) for name, shape in (("X", (5, 3, i)),)]
    outputs = [helper.make_tensor_value_info("Y", 1, (5, d, 3, h))]
    weights = [numpy_helper.from_array(array, name) for name, array in {**arrays, "B": bias, **linear}.items()]
    opsets = [helper.make_opsetid("", 14), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(
        helper.make_graph([node], "layer", ports, outputs, weights), opset_imports=opsets, ir_version=8
    )
    whole = {
        name: (arrays[name] - zeros[name].astype(np.float32).reshape(d, 1, -1)) * scale[name].reshape(d, 1, -1)
        for name in "WR"
    }
    changed = {name: array.transpose(0, 2, 1).copy() for name, array in whole.items()} | {"B": bias}
    layer = Layer(
        t=5, n=3, i=i, h=h, given="B", results=["Y"], attributes={"direction": "bidirectional"}, changed=changed, seed=1
    )  # fmt: skip
    return model, layer


@pytest.mark.parametrize("channels", [False, True], ids=["a scale", "scales of gates"])
def test_an_lstm_of_8_bit_weights_is_that_of_the_dequantised_ones(channels: bool) -> None:
    model, layer = dynamic_quantised(channels)
    network = lower(load(model).graph())
    found = evaluate(network, layer.inputs())["Y"]
    assert_close([found], layer.evaluated(), 1e-6)
    if not channels:
        (right,) = onnx_runtime(model, layer.inputs())
        apart = np.sqrt(np.mean((found.reshape(right.shape) - right) ** 2))
        assert 0 < apart < 0.01 * np.sqrt(np.mean(right**2))


@pytest.mark.long
def test_a_network_with_8_bit_weights_agrees_with_its_model(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs ONNX Runtime")
    model, layer = dynamic_quantised(channels=False)
    said: list[str] = []
    with schedsearch.build(saved(model, tmp_path), target="cpu", say=said.append) as net:
        assert net.checked
        assert_close(called(net, layer.inputs()), layer.evaluated())
