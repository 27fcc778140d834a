"""Comparisons, choices, integers, places and running sums of ONNX on the CPU, beside ONNX Runtime and NumPy.

Many nodes are one model, so that one build compiles them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

import onnx_ir  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import ModelError, simplified  # noqa: E402

RNG = np.random.default_rng(0)
F = (RNG.normal(size=(2, 3, 5)) * 3).astype(np.float32)
G = (RNG.normal(size=(3, 1)) * 3).astype(np.float32)
WHOLE = RNG.integers(-9, 10, (2, 3, 5))
J = RNG.integers(-9, 10, (2, 3, 5)).astype(np.int32)
K = np.where(RNG.integers(-4, 5, (3, 5)) == 0, 3, RNG.integers(1, 5, (3, 5))).astype(np.int32)
B = RNG.random((2, 3, 5)) < 0.5
LONG = (RNG.normal(size=(3, 37)) * 2).astype(np.float32)
MASKED = np.where(RNG.random((4, 5)) < 0.4, np.nan, F[0, :1].repeat(4, 0)).astype(np.float32)


class Case:
    """One node: inputs are computed, or constants."""

    def __init__(self, op: str, *inputs: Any, fixed: Sequence[int] = (), opset: int = 22, **attributes: Any) -> None:
        self.op, self.inputs, self.fixed, self.attributes = op, inputs, fixed, attributes


CASES = [
    Case("Where", B, F, G),
    Case("Where", B[:, :1], WHOLE, np.int64(-7), fixed=[2]),
    Case("Where", B, np.float32(-np.inf), F, fixed=[1]),
    Case("Greater", F, G),
    Case("Equal", WHOLE, np.int64(3), fixed=[1]),
    Case("LessOrEqual", J, K),
    Case("And", B, B[::-1].copy()),
    Case("Not", B),
    Case("IsNaN", MASKED),
    Case("IsInf", np.array([1, np.inf, -np.inf, np.nan], np.float32), detect_negative=0),
    Case("Cast", F, to=TensorProto.INT32),
    Case("Cast", F, to=TensorProto.BOOL),
    Case("Cast", WHOLE, to=TensorProto.FLOAT),
    Case("Cast", WHOLE, to=TensorProto.FLOAT16),
    Case("Cast", WHOLE * 100, to=TensorProto.UINT8),
    Case("Div", J, K),
    Case("Mod", J, K),
    Case("Mod", F, G, fmod=1),
    Case("Mul", WHOLE * 2**40, WHOLE),
    Case("Pow", F, np.int64(3), fixed=[1]),
    Case("Clip", F, np.float32(-0.5), np.float32(0.75)),
    Case("Clip", J, np.int32(-3), np.int32(4), fixed=[1, 2]),
    Case("Sign", F),
    Case("ThresholdedRelu", F, alpha=0.4),
    Case("Shrink", F, lambd=0.7, bias=0.2),
    Case("Expand", G, np.array([2, 3, 5]), fixed=[1]),
    Case("Tile", F, np.array([1, 2, 3]), fixed=[1]),
    Case("Tile", WHOLE, np.array([2, 1, 1]), fixed=[1]),
    Case("OneHot", WHOLE[0], np.int64(6), np.array([-1.0, 2.0], np.float32), fixed=[1, 2], axis=1),
    Case("OneHot", WHOLE[1], np.int64(4), np.array([0, 1]), fixed=[1]),
    Case("Trilu", F, upper=0),
    Case("Trilu", WHOLE, np.int64(1), fixed=[1]),
    Case("ArgMax", F, axis=1, keepdims=0),
    Case("ArgMax", J, axis=2, select_last_index=1),
    Case("ArgMin", J, axis=-1),
    Case("Hardmax", F, axis=1),
    Case("CumSum", LONG, np.int64(1), fixed=[1]),
    Case("CumSum", WHOLE, np.int64(2), fixed=[1], exclusive=1, reverse=1),
    Case("CumSum", np.array([1, np.inf, 2, 3, -1], np.float32), np.int64(0), fixed=[1]),
    Case("ReduceSum", WHOLE, np.array([0, 2]), fixed=[1]),
    Case("ReduceMax", J, np.array([1]), fixed=[1], keepdims=0),
    Case("ReduceProd", LONG[:, :19] * 0.5, np.array([1]), fixed=[1]),
    Case("ReduceMin", RNG.integers(-500, 500, (37,)), np.array([0]), fixed=[1]),
    Case("ReverseSequence", LONG.reshape(3, 37)[:, :12].reshape(4, 3, 3).copy(), np.array([4, 2, 1])),
    Case("Compress", F, np.array([True, False, True]), fixed=[1], axis=1),
]


def model(cases: Sequence[Case], opset: int = 22) -> tuple[Any, dict[str, Any]]:
    """A model with a node of each case, and its inputs."""
    nodes, weights, inputs, outputs, fed = [], [], [], [], {}
    for number, case in enumerate(cases):
        names = [f"x{number}_{place}" for place in range(len(case.inputs))]
        for place, (name, array) in enumerate(zip(names, case.inputs)):
            if place in case.fixed:
                weights.append(numpy_helper.from_array(np.asarray(array), name))
            else:
                kind = helper.np_dtype_to_tensor_dtype(np.asarray(array).dtype)
                inputs.append(helper.make_tensor_value_info(name, kind, list(np.shape(array))))
                fed[name] = np.asarray(array)
        nodes.append(helper.make_node(case.op, names, [f"y{number}"], f"{case.op} {number}", **case.attributes))
        outputs.append(onnx.ValueInfoProto(name=f"y{number}"))
    graph = helper.make_graph(nodes, "elements", inputs, outputs, weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    inferred = onnx.shape_inference.infer_shapes(made, strict_mode=True)
    return inferred, fed


def computed(made: Any, fed: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    onnx.save(made, folder / "elements.onnx")
    with schedsearch.build(folder / "elements.onnx", target="cpu", progress=False) as net:
        return dict(
            net.evaluate({name: array.astype(np.uint8) if array.dtype == bool else array for name, array in fed.items()})
        )


def assert_equal(found: Mapping[str, Any], wanted: Mapping[str, Any], cases: Sequence[Case]) -> None:
    for number, case in enumerate(cases):
        got, right = found[f"y{number}"], wanted[f"y{number}"]
        text = f"{case.op} {number}"
        if right.dtype.kind == "f":
            np.testing.assert_allclose(got.reshape(right.shape), right, rtol=2e-5, atol=1e-5, err_msg=text)
        else:
            np.testing.assert_array_equal(got.reshape(right.shape), right.astype(got.dtype), err_msg=text)


@pytest.mark.long
def test_nodes_on_the_cpu_compute_what_onnx_runtime_computes(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    made, fed = model(CASES)
    session = runtime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    assert_equal(computed(made, fed, tmp_path), dict(zip(names, session.run(None, dict(fed)))), CASES)


@pytest.mark.long(of="networks")
def test_some_nodes_on_the_cpu_compute_what_numpy_computes(tmp_path: Path) -> None:
    chosen = [Case("Where", B, F, G), Case("CumSum", WHOLE, np.int64(2), fixed=[1]), Case("ArgMax", F, axis=1, keepdims=0)]
    made, fed = model(chosen)
    wanted = {"y0": np.where(B, F, G), "y1": np.cumsum(WHOLE, 2), "y2": np.argmax(F, 1)}
    assert_equal(computed(made, fed, tmp_path), wanted, chosen)


def test_a_mask_of_integers_is_one_kernel() -> None:
    """Embedding ids become a mask that is added to scores, as in transformers."""
    nodes = [
        helper.make_node("Equal", ["ids", "zero"], ["padding"]),
        helper.make_node("Cast", ["padding"], ["whole"], to=TensorProto.INT64),
        helper.make_node("Sub", ["one", "whole"], ["kept"]),
        helper.make_node("Cast", ["kept"], ["number"], to=TensorProto.FLOAT),
        helper.make_node("Where", ["padding", "least", "number"], ["mask"]),
        helper.make_node("Add", ["scores", "mask"], ["y"]),
    ]
    info = helper.make_tensor_value_info
    fixed = {"zero": np.int64(0), "one": np.int64(1), "least": np.float32(-np.inf)}
    graph = helper.make_graph(
        nodes, "mask", [info("ids", TensorProto.INT64, [2, 1, 7]), info("scores", TensorProto.FLOAT, [2, 3, 7])],
        [info("y", TensorProto.FLOAT, [2, 3, 7])],
        [numpy_helper.from_array(np.array(each), name) for name, each in fixed.items()],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    network = lower(simplified(onnx_ir.from_proto(made), "mask"))
    (node,) = network.nodes
    assert len(node.sources) == 6 and node.implementations[0].params["expression"].startswith("t0 = a == 0;")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case("BitwiseAnd", WHOLE.astype(np.uint64), WHOLE.astype(np.uint64)), "reads uint64; allowed: int8"),
        (Case("Div", J, np.int32(0), fixed=[1]), r"has a divisor of zero, \[0\]. Correct the model"),
        (Case("OneHot", WHOLE[0], np.int64(0), np.array([0, 1]), fixed=[1, 2]), "has depth 0; allowed: 1 or more"),
        (Case("Compress", F, np.array([True, False, True]), axis=1), "known at run time only; allowed: a constant"),
        (Case("CumSum", F, np.int64(1)), "gets an axis from the input 'x0_1'; allowed: a constant. Give x0_1 a value"),
    ],
    ids=lambda each: getattr(each, "op", None),
)
def test_what_is_refused_says_why(case: Case, message: str) -> None:
    made, _ = model([case])
    with pytest.raises(ModelError, match=message):
        lower(simplified(onnx_ir.from_proto(made), "refused"))
