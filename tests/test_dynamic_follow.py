"""What nodes make of open extents: the tables by node and by workload agree, and their formulas give the shapes of onnx."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from hypothesis import HealthCheck, given, note, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from schedsearch.dynamic.graph import Size  # noqa: E402
from schedsearch.dynamic.model import read_graph  # noqa: E402
from schedsearch.network.model import ModelError  # noqa: E402

LARGEST = {"image": (3, 4, 12, 10), "matrix": (7, 8), "array": (5, 6, 4)}


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Any, dict[int, str]]:
    """A node with an input some of whose extents are open, and the names of these."""
    kind = draw(st.sampled_from(["image", "image", "matrix", "array"]))
    shape = LARGEST[kind]
    names = {axis: f"e{axis}" for axis in range(len(shape)) if draw(st.booleans())}
    weights: dict[str, Any] = {}

    def weight(name: str, *extents: int) -> str:
        weights[name] = np.random.default_rng(0).standard_normal(extents).astype(np.float32)
        return name

    def window(*more: str) -> dict[str, Any]:
        pads = draw(st.lists(st.integers(0, 1), min_size=4, max_size=4))
        strides = draw(st.lists(st.integers(1, 2), min_size=2, max_size=2))
        found: dict[str, Any] = {"strides": strides} | ({"pads": pads} if any(pads) else {})
        if not any(pads) and draw(st.booleans()):
            found["auto_pad"] = draw(st.sampled_from(["SAME_UPPER", "SAME_LOWER", "VALID"]))
        return found | {name: draw(st.integers(0, 1)) for name in more}

    if kind == "image":
        op = draw(
            st.sampled_from(
                ["Conv", "ConvTranspose", "MaxPool", "AveragePool", "DepthToSpace", "Resize", "SpaceToDepth", "Pad"]
            )
        )
    else:
        op = draw(st.sampled_from(["Softmax", "LayerNormalization", "Transpose", "Relu", "Split", "Concat", "Pad"]))
        op = draw(st.sampled_from([op, "Gemm", "MatMul"])) if kind == "matrix" else op
    inputs, outputs, read = ["x"], ["y"], {}
    if op == "Conv":
        inputs, read = ["x", weight("w", 5, shape[1], 3, 2)], window()
    elif op == "ConvTranspose":
        stride = draw(st.integers(1, 2))
        inputs = ["x", weight("w", shape[1], 2, 3, 2)]
        read = {"strides": [stride] * 2} | draw(st.sampled_from([{}, {"auto_pad": "SAME_UPPER"}, {"pads": [1, 0, 0, 0]}]))
    elif op in ("MaxPool", "AveragePool"):
        read = {"kernel_shape": [3, 2], **window(*(["count_include_pad"] if op == "AveragePool" else []))}
    elif op in ("DepthToSpace", "SpaceToDepth"):
        read = {"blocksize": 2}
    elif op == "Resize":
        weights["scales"] = np.array([1, 1, 2, draw(st.integers(1, 3))], np.float32)
        inputs, read = ["x", "", "scales"], {"mode": "nearest", "coordinate_transformation_mode": "asymmetric"}
    elif op in ("Softmax", "LayerNormalization", "Split", "Concat"):
        read = {"axis": draw(st.integers(-len(shape), len(shape) - 1))}
        if op == "LayerNormalization":
            inputs = ["x", weight("w", *shape[read["axis"] :])]
        elif op == "Split":
            extent = shape[read["axis"]]
            weights["parts"] = np.array([1, extent - 1])
            inputs, outputs = ["x", "parts"], ["y", "z"]
        elif op == "Concat":
            inputs = ["x", "x"]
    elif op == "Pad":
        weights["pads"] = np.array(draw(st.lists(st.integers(0, 2), min_size=2 * len(shape), max_size=2 * len(shape))))
        inputs, read = ["x", "pads"], {"mode": draw(st.sampled_from(["constant", "edge", "reflect"]))}
    elif op == "Transpose":
        read = {"perm": list(draw(st.permutations(range(len(shape)))))}
    elif op in ("Gemm", "MatMul"):
        inputs = ["x", weight("w", shape[1], 5)]
    extents = [names.get(axis, extent) for axis, extent in enumerate(shape)]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node(op, inputs, outputs, name=op, **read)], "net", [info("x", TensorProto.FLOAT, extents)],
        [info("y", TensorProto.FLOAT, None)], [numpy_helper.from_array(each, name) for name, each in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), names


def of_windows(model: Any) -> Any:
    """With convolutions in place of pools: their windows are the same, and onnx's evaluator takes pads of pools in another
    order."""
    (node,) = model.graph.node
    if node.op_type in ("MaxPool", "AveragePool"):
        kept = {each.name: helper.get_attribute_value(each) for each in node.attribute if each.name != "count_include_pad"}
        node = helper.make_node("Conv", ["x", "ones"], ["y"], **kept)
        model.graph.node[0].CopyFrom(node)
        model.graph.initializer.append(numpy_helper.from_array(np.ones((4, 4, 3, 2), np.float32), "ones"))
    return model


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(graphs(), st.data())
def test_open_extents_of_results_are_those_of_onnx(graph: tuple[Any, dict[int, str]], data: st.DataObject) -> None:
    model, names = graph
    note(onnx.printer.to_text(model.graph))
    bounds = [dim.dim_value or 0 for dim in model.graph.input[0].type.tensor_type.shape.dim]
    largest = next(shape for shape in LARGEST.values() if len(shape) == len(bounds))
    sizes = {name: Size(name, min(4, largest[axis]), largest[axis]) for axis, name in names.items()}
    try:
        read = read_graph(model, sizes)
    except ModelError:  # it says that the node needs these extents; any other error would mean that two tables differ
        assert names
        return
    program = read.program()
    value = program.values[program.outputs[0]]
    chosen = {name: data.draw(st.integers(size.least, size.most), name) for name, size in sizes.items()}
    x = np.zeros([chosen.get(names.get(axis, ""), extent) for axis, extent in enumerate(largest)], np.float32)
    wanted: Any = ReferenceEvaluator(of_windows(model)).run(None, {"x": x})[0]
    extents = value.shape if value.words is None else value.known
    if extents is not None:  # others, as of a Concat along an open axis, are computed on the device
        assert [n if isinstance(n, int) else n.at(chosen) for n in extents] == list(wanted.shape)
