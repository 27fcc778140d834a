"""Indices that are given or computed at run time: what ONNX allows is computed, anything else is an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import schedsearch
from schedsearch.errors import IndexRangeError

X = (4, 3, 5)
# operator, attributes, indices that reach both ends of what is allowed, place of an end, its axis
CASES: list[tuple[str, dict[str, Any], Any, tuple[int, ...], int]] = [
    ("Gather", {"axis": 1}, [[2], [-3]], (0, 0), 1),
    ("GatherElements", {"axis": 1}, [[[0, -3, 2, 1, 2]]] * 4, (3, 0, 2), 1),
    ("GatherND", {"batch_dims": 1}, [[[2, 0]], [[-3, 4]], [[0, -5]], [[1, 1]]], (2, 0, 1), 2),
    ("ScatterElements", {"axis": 2}, [[[-5, 4, 1]]], (0, 0, 1), 2),
    ("ScatterND", {}, [[3, -3], [-4, 2]], (1, 1), 1),
]
IDS = [op for op, *_ in CASES]


def updates_of(op: str, indices: Any) -> list[Any]:
    """The updates of a scatter, if it is one."""
    shape = np.shape(indices)
    shape = (*shape[:-1], *X[shape[-1] :]) if op == "ScatterND" else shape
    return [np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)] if op.startswith("Scatter") else []


def model(
    op: str, attributes: dict[str, Any], indices: Any, *, computed: bool = False, rows: str | None = None
) -> onnx.ModelProto:
    """y of a node that is called pick.

    Args:
        computed: its indices are not the input `places`, but this plus 1.
        rows: name of the first extent of indices and updates.
    """
    given = [np.zeros(X, np.float32), np.array(indices), *updates_of(op, indices)]
    types = [TensorProto.FLOAT, TensorProto.INT64, TensorProto.FLOAT]
    shapes = [list(each.shape) for each in given]
    for shape in shapes[1:] if rows is not None else ():
        shape[0] = rows
    names = ["x", "places", "updates"][: len(given)]
    inputs = [helper.make_tensor_value_info(*each) for each in zip(names, types, shapes)]
    nodes = [helper.make_node("Add", ["places", "one"], ["sums"], "sum")] if computed else []
    nodes.append(helper.make_node(op, ["x", "sums" if computed else "places", *names[2:]], ["y"], "pick", **attributes))
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    weights = [numpy_helper.from_array(np.array(1), "one")] if computed else []
    graph = helper.make_graph(nodes, "indices", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def arrays(op: str, indices: Any) -> dict[str, Any]:
    x = np.arange(np.prod(X), dtype=np.float32).reshape(X)
    return dict(zip(("x", "places", "updates"), (x, np.array(indices), *updates_of(op, indices))))


def message(place: tuple[int, ...], index: int, axis: int, array: str = "places") -> str:
    text = f"the index at {list(place)} of {array!r} is {index}, but axis {axis} of 'x' has extent {X[axis]}"
    return re.escape(f"{text}; allowed: {-X[axis]} to {X[axis] - 1}")


@pytest.mark.parametrize(("op", "attributes", "indices", "place", "axis"), CASES, ids=IDS)
def test_networks_on_a_cpu_raise(
    op: str, attributes: dict[str, Any], indices: Any, place: tuple[int, ...], axis: int, tmp_path: Path
) -> None:
    made, given = model(op, attributes, indices), arrays(op, indices)
    onnx.save(made, tmp_path / "m.onnx")
    (expected,) = ReferenceEvaluator(made).run(None, given)
    with schedsearch.build(tmp_path / "m.onnx", target="cpu", db=tmp_path / "none.db") as net:
        step = net.bind(**given)
        np.testing.assert_array_equal(net(**given), expected)
        for index in (X[axis], -X[axis] - 1):
            wrong = given | {"places": np.array(indices)}
            wrong["places"][place] = index
            with pytest.raises(IndexRangeError, match="node pick: " + message(place, index, axis)):
                net(**wrong)
            np.testing.assert_array_equal(net(**given), expected)
            net.check()
        given["places"][place] = X[axis] + 7
        with pytest.raises(IndexRangeError, match="node pick: "):
            step()


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "attributes", "indices", "place", "axis"), CASES, ids=IDS)
def test_networks_on_a_gpu_say_so_when_they_are_asked(
    op: str, attributes: dict[str, Any], indices: Any, place: tuple[int, ...], axis: int, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    made, given = model(op, attributes, indices, computed=True), arrays(op, np.array(indices) - 1)
    onnx.save(made, tmp_path / "m.onnx")
    (expected,) = ReferenceEvaluator(made).run(None, given)
    on_gpu = {name: torch.from_numpy(array).cuda() for name, array in given.items()}
    with schedsearch.build(tmp_path / "m.onnx", target="cuda", db=tmp_path / "none.db") as net:
        step = net.bind(**on_gpu)
        np.testing.assert_array_equal(net(**on_gpu).cpu().numpy(), expected)
        for run in (lambda: net(**on_gpu), step):
            for index in (X[axis], -X[axis] - 1):
                before = int(on_gpu["places"][place])
                on_gpu["places"][place] = index - 1
                for _ in range(3):
                    run()
                on_gpu["places"][place] = before
                run()  # what was noted stays until it is asked for
                with pytest.raises(IndexRangeError, match="node pick: " + message(place, index, axis, "sums")):
                    net.check()
                np.testing.assert_array_equal(run().cpu().numpy(), expected)
                net.check()
