"""Indices that are given or computed at run time: what ONNX allows is computed, anything else is an error."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from computed_indices_support import X, graph, model, updates_of
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from test_dynamic_net import artifact

import schedsearch
from schedsearch.device.cpu import CpuDevice
from schedsearch.dynamic.graph import Size
from schedsearch.dynamic.model import read_graph
from schedsearch.dynamic.net import DynamicNet
from schedsearch.errors import IndexRangeError, UsageError

# operator, attributes, indices that reach both ends of what is allowed, place of an end, its axis
CASES: list[tuple[str, dict[str, Any], Any, tuple[int, ...], int]] = [
    ("Gather", {"axis": 1}, [[2], [-3]], (0, 0), 1),
    ("GatherElements", {"axis": 1}, [[[0, -3, 2, 1, 2]]] * 4, (3, 0, 2), 1),
    ("GatherND", {"batch_dims": 1}, [[[2, 0]], [[-3, 4]], [[0, -5]], [[1, 1]]], (2, 0, 1), 2),
    ("ScatterElements", {"axis": 2}, [[[-5, 4, 1]]], (0, 0, 1), 2),
    ("ScatterND", {}, [[3, -3], [-4, 2]], (1, 1), 1),
]
IDS = [op for op, *_ in CASES]


def arrays(op: str, indices: Any) -> dict[str, Any]:
    x = np.arange(np.prod(X), dtype=np.float32).reshape(X)
    return dict(zip(("x", "places", "updates"), (x, np.array(indices), *updates_of(op, indices))))


def message(place: tuple[int, ...], index: int, axis: int) -> str:
    text = f"the index at {list(place)} of 'places' is {index}, but axis {axis} of 'x' has extent {X[axis]}"
    return re.escape(f"{text}; allowed: {-X[axis]} to {X[axis] - 1}")


@pytest.mark.parametrize(("op", "attributes", "indices", "place", "axis"), CASES, ids=IDS)
@pytest.mark.mostly_long(3)
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


def test_an_index_that_a_node_computes(tmp_path: Path) -> None:
    """TopK finds the places of the largest of 8 numbers, and Gather takes these rows of 4."""
    info = helper.make_tensor_value_info
    nodes = [
        helper.make_node("TopK", ["scores", "k"], ["largest", "places"], "best"),
        helper.make_node("Gather", ["x", "places"], ["y"], "pick"),
    ]
    inputs = [info("scores", TensorProto.FLOAT, [8]), info("x", TensorProto.FLOAT, [4, 3])]
    k = numpy_helper.from_array(np.array([2]), "k")
    graph = helper.make_graph(nodes, "best rows", inputs, [info("y", TensorProto.FLOAT, None)], [k])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "m.onnx")
    x, scores = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([0, 1, 5, 7, 0, 0, 0, 0], np.float32)
    with schedsearch.build(tmp_path / "m.onnx", target="cpu", db=tmp_path / "none.db") as net:
        np.testing.assert_array_equal(net(scores, x), x[[3, 2]])
        scores[6] = 6
        with pytest.raises(IndexRangeError, match=r"^node pick: the index at \[1\] of 'places' is 6, .*; allowed: -4 to 3"):
            net(scores, x)


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "attributes", "indices", "place", "axis"), CASES, ids=IDS)
def test_networks_on_a_gpu_say_so_when_they_are_asked(
    op: str, attributes: dict[str, Any], indices: Any, place: tuple[int, ...], axis: int, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    made, given = model(op, attributes, indices), arrays(op, indices)
    onnx.save(made, tmp_path / "m.onnx")
    (expected,) = ReferenceEvaluator(made).run(None, given)
    on_gpu = {name: torch.from_numpy(array).cuda() for name, array in given.items()}
    with schedsearch.build(tmp_path / "m.onnx", target="cuda", db=tmp_path / "none.db") as net:
        step = net.bind(**on_gpu)
        np.testing.assert_array_equal(net(**on_gpu).cpu().numpy(), expected)
        for run in (lambda: net(**on_gpu), step):
            for index in (X[axis], -X[axis] - 1):
                before = int(on_gpu["places"][place])
                on_gpu["places"][place] = index
                for _ in range(3):
                    run()
                on_gpu["places"][place] = before
                run()  # what was noted stays until it is asked for
                with pytest.raises(IndexRangeError, match="node pick: " + message(place, index, axis)):
                    net.check()
                np.testing.assert_array_equal(run().cpu().numpy(), expected)
                net.check()


# What a dynamic graph gathers has as many rows as the caller gives; x is fixed.
GRAPHS = [
    ("Gather", {"axis": 0}, [[2, -4], [3, 0], [1, 1]], (1, 0), 0),
    ("GatherND", {}, [[3, 0, -5], [-4, 2, 4]], (1, 2), 2),
    ("ScatterND", {}, [[3, -3], [-4, 2]], (1, 1), 1),
]


def reference(op: str, attributes: dict[str, Any], indices: Any) -> Any:
    return ReferenceEvaluator(model(op, attributes, indices)).run(None, arrays(op, indices))[0]


@pytest.mark.parametrize(("op", "attributes", "indices", "place", "axis"), GRAPHS, ids=[op for op, *_ in GRAPHS])
@pytest.mark.mostly_long(3)
def test_dynamic_graphs_name_node_and_index(
    op: str, attributes: dict[str, Any], indices: Any, place: tuple[int, ...], axis: int, device: CpuDevice
) -> None:
    given = arrays(op, indices)
    with graph(op, attributes, indices, device) as net:
        expected = reference(op, attributes, indices)
        np.testing.assert_array_equal(net(*given.values()), expected)
        none = {name: array[:0] if name != "x" else array for name, array in given.items()}
        np.testing.assert_array_equal(net(*none.values()), reference(op, attributes, np.array(indices)[:0]))
        bound = net.bind(*given.values())
        for index in (X[axis], -X[axis] - 1):
            good = int(given["places"][place])
            given["places"][place] = index
            with pytest.raises(IndexRangeError, match=rf"node pick \({op}\): " + message(place, index, axis)):
                net(*given.values())
            bound.step()
            given["places"][place] = good
            bound.step()
            with pytest.raises(IndexRangeError, match="node pick"):
                bound.sliced()
            np.testing.assert_array_equal(bound.sliced()[0], expected)
            np.testing.assert_array_equal(net(*given.values()), expected)
            net.check()
        bound.close()


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "attributes", "indices", "place", "axis"), GRAPHS, ids=[op for op, *_ in GRAPHS])
def test_dynamic_graphs_on_a_gpu_say_so_when_they_are_asked(
    op: str, attributes: dict[str, Any], indices: Any, place: tuple[int, ...], axis: int, gpu: Any
) -> None:
    torch = pytest.importorskip("torch")
    given = {name: torch.from_numpy(array).cuda() for name, array in arrays(op, indices).items()}
    expected = reference(op, attributes, indices)
    with graph(op, attributes, indices, gpu) as net:
        bound = net.bind(*given.values())
        for run, check in ((lambda: net(*given.values()), net.check), (bound.step, bound.check)):
            for index in (X[axis], -X[axis] - 1):
                good = int(given["places"][place])
                given["places"][place] = index
                run()
                given["places"][place] = good
                run()
                with pytest.raises(IndexRangeError, match=f"node pick.*index at .* is {index}, but axis {axis} of"):
                    check()
                run()
                check()
        np.testing.assert_array_equal(net(*given.values()).cpu().numpy(), expected)
        np.testing.assert_array_equal(bound.sliced()[0].cpu().numpy(), expected)
        bound.close()


def constant_rows(path: Path) -> Path:
    """y is rows 0 and 40 of x, which has n."""
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Gather", ["x", "places"], ["y"], "pick")], "constant",
        [info("x", TensorProto.FLOAT, ["n", 2])], [info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.array([0, 40]), "places")],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path / "m.onnx")
    return path / "m.onnx"


def test_constant_indices_must_be_legal_at_every_size_of_a_table(tmp_path: Path) -> None:
    """41 rows or more have a row 40; a range that begins at 1 is refused."""
    text = (
        r"at n = 1: node pick \(Gather\): the index at \[1\] of 'places' is 40, but axis 0 of 'x' has extent 1; allowed: "
        "-1 to 0. Correct the model, or give n a range of larger sizes"
    )
    with pytest.raises(UsageError, match=text):
        schedsearch.build_dynamic(constant_rows(tmp_path), {"n": (1, 64)}, target="cpu", db=tmp_path / "none.db")


@pytest.mark.long(of="networks")
def test_constant_indices_of_a_dynamic_graph_must_be_legal_in_each_run(tmp_path: Path) -> None:
    x = np.arange(128, dtype=np.float32).reshape(64, 2)
    model = constant_rows(tmp_path)
    with schedsearch.build_dynamic(model, {"n": (1, 64)}, target="cpu", run_mode="exact", db=tmp_path / "none.db") as net:
        np.testing.assert_array_equal(net(x), x[[0, 40]])
        np.testing.assert_array_equal(net(x[:41]), x[[0, 40]])
        text = r"node pick \(Gather\): the index at \[1\] of 'places' is 40, but axis 0 of 'x' was shorter: .* at most 64"
        with pytest.raises(IndexRangeError, match=text):
            net(x[:40])
    with pytest.raises(UsageError, match=r"the index at .* is 40, but axis 0 of 'x' has extent 40"):
        schedsearch.build_dynamic(model, {"n": (1, 40)}, target="cpu", run_mode="exact", db=tmp_path / "none.db")


def test_given_indices_into_a_shape_are_looked_at(device: CpuDevice) -> None:
    """An index that may be out of range makes a call of what would be a row of numbers."""
    info = helper.make_tensor_value_info
    nodes = [helper.make_node("Shape", ["x"], ["extents"]), helper.make_node("Gather", ["extents", "places"], ["y"], "pick")]
    inputs = [info("x", TensorProto.FLOAT, ["n", 3]), info("places", TensorProto.INT64, [2])]
    graph = helper.make_graph(nodes, "shapes", inputs, [info("y", TensorProto.INT64, None)])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    x, places = np.zeros((4, 3), np.float32), np.array([1, -2])
    program = read_graph(made, {"n": Size("n", 1, 6)}).program()
    with DynamicNet(program, device, functools.partial(artifact, device.target)) as net:
        np.testing.assert_array_equal(net(x, places), [3, 4])
        places[1] = 2
        with pytest.raises(IndexRangeError, match=r"node pick \(Gather\): the index at \[1\] of 'places' is 2, .*: -2 to 1"):
            net(x, places)
