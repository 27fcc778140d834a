"""Constant indices of ONNX models: what ONNX allows is computed as onnx.reference does, anything else is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import schedsearch
from schedsearch.dynamic.graph import Size
from schedsearch.dynamic.model import read_graph
from schedsearch.network.lower import lower
from schedsearch.network.model import ModelError, read_model

X = (4, 3, 5)
# operator, attributes, indices that reach both ends of what is allowed, place of an end, its axis
CASES: list[tuple[str, dict[str, Any], Any, tuple[int, ...], int]] = [
    ("Gather", {}, [0, -4, 3], (2,), 0),
    ("Gather", {"axis": -1}, [[4], [-5]], (0, 0), -1),
    ("GatherElements", {"axis": 1}, [[[0, -3, 2, 1, 2]]] * 4, (0, 0, 2), 1),
    ("GatherND", {}, [[3, 0, -5], [-4, 2, 4]], (1, 2), 2),
    ("GatherND", {"batch_dims": 1}, [[[2]], [[-3]], [[0]], [[1]]], (0, 0, 0), 1),
    ("ScatterElements", {"axis": 2}, [[[-5, 4, 1]]], (0, 0, 1), 2),
    ("ScatterND", {}, [[3, -3], [-4, 2]], (1, 1), 1),
]
IDS = [f"{op} {attributes}" for op, attributes, *_ in CASES]


def model(op: str, attributes: dict[str, Any], indices: np.ndarray[Any, Any], *, batch: int | str = X[0]) -> onnx.ModelProto:
    """A model with one node that takes constant indices."""
    inputs = ["x", "places", "updates"] if op.startswith("Scatter") else ["x", "places"]
    nodes = [helper.make_node(op, inputs, ["y"], "pick", **attributes)]
    updates = np.arange(1, 1 + int(np.prod(indices.shape)), dtype=np.float32).reshape(indices.shape)
    if op == "ScatterND":
        shape = (*indices.shape[:-1], *X[indices.shape[-1] :])
        updates = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    weights = [numpy_helper.from_array(indices, "places"), numpy_helper.from_array(updates, "updates")]
    graph = helper.make_graph(
        nodes, "indices",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, *X[1:]])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        weights[: len(inputs) - 1],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize(("op", "attributes", "indices", "place", "axis"), CASES, ids=IDS)
@pytest.mark.mostly_long(3)
def test_both_ends_of_what_is_allowed_are_computed(
    op: str, attributes: dict[str, Any], indices: Any, place: tuple[int, ...], axis: int, tmp_path: Path
) -> None:
    made = model(op, attributes, np.array(indices))
    onnx.save(made, tmp_path / "m.onnx")
    x = np.arange(np.prod(X), dtype=np.float32).reshape(X)
    (expected,) = ReferenceEvaluator(made).run(None, {"x": x})
    with schedsearch.build(tmp_path / "m.onnx", target="cpu", db=tmp_path / "none.db") as net:
        np.testing.assert_array_equal(net(x), expected)


@pytest.mark.parametrize("below", [True, False])
@pytest.mark.parametrize(("op", "attributes", "indices", "place", "axis"), CASES, ids=IDS)
def test_what_is_out_of_range_is_named(
    op: str, attributes: dict[str, Any], indices: Any, place: tuple[int, ...], axis: int, below: bool, tmp_path: Path
) -> None:
    extent = X[axis]
    wrong = np.array(indices)
    wrong[place] = -extent - 1 if below else extent
    onnx.save(model(op, attributes, wrong), tmp_path / "m.onnx")
    with pytest.raises(ModelError) as refused:
        schedsearch.build(tmp_path / "m.onnx", target="cpu", db=tmp_path / "none.db")
    text = str(refused.value)
    assert f"node pick ({op}): the index at {list(place)} of 'places' is {wrong[place]}" in text
    assert f"has extent {extent}; allowed: {-extent} to {extent - 1}" in text


@pytest.mark.parametrize(("indices", "problem"), [([2, -3], ""), ([0, 3], "axis 1 of 'x' has extent 3")])
def test_dynamic_graphs_check_axes_of_known_extent(indices: list[int], problem: str, tmp_path: Path) -> None:
    made = model("Gather", {"axis": 1}, np.array(indices), batch="n")
    onnx.save(made, tmp_path / "m.onnx")

    def build() -> Any:
        return schedsearch.build_dynamic(
            tmp_path / "m.onnx", {"n": (1, 4)}, target="cpu", run_mode="exact", db=tmp_path / "none.db"
        )

    if problem:
        with pytest.raises(ModelError, match=problem):
            build()
        return
    x = np.arange(np.prod(X), dtype=np.float32).reshape(X)[:2]
    with build() as net:
        np.testing.assert_array_equal(net(x), x[:, indices])


def test_indices_that_other_constants_give_are_checked(tmp_path: Path) -> None:
    """4 = 3 + 1 is known only after constants were folded."""
    made = model("Gather", {}, np.array([3]))
    made.graph.node[0].input[1] = "sum"
    made.graph.node.insert(0, helper.make_node("Add", ["places", "one"], ["sum"]))
    made.graph.initializer.append(numpy_helper.from_array(np.array([1]), "one"))
    onnx.save(made, tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=r"is 4, but axis 0 of 'x' has extent 4; allowed: -4 to 3"):
        schedsearch.build(tmp_path / "m.onnx", target="cpu", db=tmp_path / "none.db")


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("op", "indices", "wrong"), [
    ("Gather", [3, -4], [3, 4]), ("GatherElements", [3, -4], [3, 4]), ("GatherND", [[3], [-4]], [[3], [4]]),
    ("ScatterElements", [3, -4], [3, 4]), ("ScatterND", [[3], [0]], [[3], [4]]),
])  # fmt: skip
@pytest.mark.parametrize("computed", [False, True])
def test_nodes_of_constants_are_checked_before_they_are_folded(
    op: str, indices: Any, wrong: Any, computed: bool, dynamic: bool, tmp_path: Path
) -> None:
    """ONNX's reference, which folds, wraps wrong indices of GatherElements. Indices are a weight, or a sum of weights."""

    def read(places: Any) -> None:
        weights = {"table": np.arange(4, dtype=np.float32), "places": np.array(places), "one": np.array(1)}
        nodes = []
        if computed:
            weights["places"] -= 1
            nodes.append(helper.make_node("Add", ["places", "one"], ["sum"]))
        inputs = ["table", "sum" if computed else "places"]
        if op.startswith("Scatter"):
            weights["updates"] = np.ones(2, np.float32)
            inputs.append("updates")
        nodes += [helper.make_node(op, inputs, ["picked"], "pick"), helper.make_node("Add", ["x", "picked"], ["y"])]
        info = helper.make_tensor_value_info
        graph = helper.make_graph(
            nodes, "constants", [info("x", TensorProto.FLOAT, [1])], [info("y", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(array, name) for name, array in weights.items()],
        )  # fmt: skip
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "m.onnx")
        if dynamic:
            read_graph(tmp_path / "m.onnx")
        else:
            lower(read_model(tmp_path / "m.onnx"))

    read(indices)
    with pytest.raises(ModelError, match=rf"^node pick \({op}\): the index at \[1.* is 4, .* extent 4; allowed: -4 to 3"):
        read(wrong)


@pytest.mark.parametrize(("index", "wrong"), [(1, 2), (-2, -3)])
def test_indices_into_shapes_are_checked(index: int, wrong: int, tmp_path: Path) -> None:
    """They become rows of numbers, not calls."""

    def read(place: int) -> None:
        nodes = [
            helper.make_node("Shape", ["x"], ["extents"]), helper.make_node("Gather", ["extents", "place"], ["n"], "pick"),
            helper.make_node("ConstantOfShape", ["n"], ["y"]),
        ]  # fmt: skip
        graph = helper.make_graph(
            nodes, "shapes", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(np.array([place]), "place")],
        )  # fmt: skip
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "m.onnx")
        read_graph(tmp_path / "m.onnx", {"n": Size("n", 1, 4)})

    read(index)
    with pytest.raises(ModelError, match=r"node pick \(Gather\): indices must be in \[-rank, rank-1\]"):
        read(wrong)
