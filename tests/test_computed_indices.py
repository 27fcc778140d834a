"""Indices that are given or computed at run time: what ONNX allows is computed, anything else is an error."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from test_dynamic_net import artifact

import schedsearch
from schedsearch import dyn_strided_slice, expand, gather, scatter
from schedsearch.device import Device
from schedsearch.device.cpu import CpuDevice
from schedsearch.dynamic.graph import DynamicGraph, Size
from schedsearch.dynamic.model import read_graph
from schedsearch.dynamic.net import DynamicNet
from schedsearch.errors import IndexRangeError, UsageError
from schedsearch.ops.dependence import SizeError

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


def model(op: str, attributes: dict[str, Any], indices: Any, *, rows: str | None = None) -> onnx.ModelProto:
    """y of a node that is called pick. Its indices are an input; `rows` is the name of their first extent."""
    given = [np.zeros(X, np.float32), np.array(indices), *updates_of(op, indices)]
    types = [TensorProto.FLOAT, TensorProto.INT64, TensorProto.FLOAT]
    shapes = [list(each.shape) for each in given]
    for shape in shapes[1:] if rows is not None else ():
        shape[0] = rows
    names = ["x", "places", "updates"][: len(given)]
    inputs = [helper.make_tensor_value_info(*each) for each in zip(names, types, shapes)]
    nodes = [helper.make_node(op, names, ["y"], "pick", **attributes)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "indices", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def arrays(op: str, indices: Any) -> dict[str, Any]:
    x = np.arange(np.prod(X), dtype=np.float32).reshape(X)
    return dict(zip(("x", "places", "updates"), (x, np.array(indices), *updates_of(op, indices))))


def message(place: tuple[int, ...], index: int, axis: int) -> str:
    text = f"the index at {list(place)} of 'places' is {index}, but axis {axis} of 'x' has extent {X[axis]}"
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


def graph(op: str, attributes: dict[str, Any], indices: Any, device: Device) -> DynamicNet:
    """With r = 0 to 5 rows of indices."""
    read = read_graph(model(op, attributes, indices, rows="r"), {"r": Size("r", 0, 5)})
    return DynamicNet(read.program(), device, functools.partial(artifact, device.target))


def reference(op: str, attributes: dict[str, Any], indices: Any) -> Any:
    return ReferenceEvaluator(model(op, attributes, indices)).run(None, arrays(op, indices))[0]


@pytest.mark.parametrize(("op", "attributes", "indices", "place", "axis"), GRAPHS, ids=[op for op, *_ in GRAPHS])
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


# ---- extents of x that are known at run time only


# operator, attributes, indices, the axis that the index at the first place counts along
ALIKE: list[tuple[str, dict[str, Any], Any, int]] = [
    ("Gather", {"axis": 0}, [0, -1, 1], 0),
    ("GatherElements", {"axis": 0}, [[0, -1, 1, 2]] * 3, 0),
    ("GatherElements", {"axis": 1}, [[0, -1]] * 3, 1),
    ("GatherND", {}, [[0], [-1], [2]], 0),
    ("GatherND", {"batch_dims": 1}, [[0], [-1], [2]], 1),
    ("ScatterElements", {"axis": 0}, [[0], [-1], [-2]], 0),
    ("ScatterElements", {"axis": 1}, [[0, -1]] * 3, 1),
    ("ScatterND", {}, [[0], [-1], [1]], 0),
]


QUICK_ALIKE = {
    "Gather {'axis': 0}",
    "GatherElements {'axis': 1}",
    "GatherND {'batch_dims': 1}",
    "ScatterElements {'axis': 0}",
}


@pytest.mark.parametrize(
    ("op", "attributes", "indices", "axis"),
    [
        pytest.param(*each, id=f"{each[0]} {each[1]}", marks=() if (each[0], each[-1]) in QUICK_ALIKE else pytest.mark.long)
        for each in ALIKE
    ],
)
def test_indices_count_the_rows_in_use(
    op: str, attributes: dict[str, Any], indices: Any, axis: int, device: CpuDevice
) -> None:
    """x and indices have n = 1 to 6 rows. -1 is the last of those, not of the memory for 6."""
    places = np.array(indices)
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    shape = (*places.shape[:-1], 4) if op == "ScatterND" else places.shape
    given = [x, places, *([np.ones(shape, np.float32)] if op.startswith("Scatter") else [])]
    names = ["x", "places", "updates"][: len(given)]
    types = [TensorProto.FLOAT, TensorProto.INT64, TensorProto.FLOAT]
    info = helper.make_tensor_value_info
    inputs = [info(name, kind, ["n", *each.shape[1:]]) for name, kind, each in zip(names, types, given)]
    nodes, outputs = [helper.make_node(op, names, ["y"], "pick", **attributes)], [info("y", TensorProto.FLOAT, None)]
    made = helper.make_model(
        helper.make_graph(nodes, "alike", inputs, outputs), opset_imports=[helper.make_opsetid("", 18)], ir_version=9
    )
    (expected,) = ReferenceEvaluator(made).run(None, dict(zip(names, given)))
    program = read_graph(made, {"n": Size("n", 1, 6)}).program()
    with DynamicNet(program, device, functools.partial(artifact, device.target)) as net:
        np.testing.assert_array_equal(net(*given), expected)
        bound = net.bind(*given)
        bound.step()
        np.testing.assert_array_equal(bound.sliced()[0], expected)
        places[(0,) * places.ndim] = x.shape[axis]  # within the bound, if the axis is the first
        where = r"the index at \[0(, 0)?\] of 'places'"
        with pytest.raises(
            IndexRangeError, match=rf"node pick \({op}\): {where} is {x.shape[axis]}, but axis {axis} of 'x'"
        ):
            net(*given)
        bound.step()
        with pytest.raises(IndexRangeError, match=rf"node pick \({op}\): {where}"):
            bound.sliced()
        bound.close()


@functools.cache
def compiled(workload: schedsearch.Workload) -> Any:
    return schedsearch.compile(workload, target="cpu", allow=("default",)).artifact


def cut_graph(op: str, attributes: dict[str, Any], x: Any, indices: Any) -> onnx.ModelProto:
    """A node called pick on the beginnings of arrays, so that all extents of x and indices are known at run time only:
    Slices end where the inputs `x_end` and `places_end` say. Updates are the negatives of what they replace."""
    node, info = helper.make_node, helper.make_tensor_value_info
    nodes = [
        node("Slice", ["x", "begin_x", "x_end"], ["some_x"], "cut x"),
        node("Slice", ["places", "begin_places", "places_end"], ["some_places"], "cut places"),
    ]
    given = ["some_x", "some_places"]
    if op.startswith("Scatter"):
        same = {name: value for name, value in attributes.items() if name == "axis"}
        nodes.append(node(op.replace("Scatter", "Gather"), given, ["chosen"], "chosen", **same))
        nodes.append(node("Neg", ["chosen"], ["updates"], "negatives"))
    given += ["updates"] if op.startswith("Scatter") else []
    nodes.append(node(op, given, ["y"], "pick", **attributes))
    inputs = [info("x", TensorProto.FLOAT, x.shape), info("places", TensorProto.INT64, indices.shape)]
    ends = {"x_end": x.ndim, "places_end": indices.ndim - (1 if op.endswith("ND") else 0)}
    inputs += [info(name, TensorProto.INT64, [count]) for name, count in ends.items()]
    constants = [
        numpy_helper.from_array(np.zeros(count, np.int64), f"begin_{name.removesuffix('_end')}")
        for name, count in ends.items()
    ]
    graph = helper.make_graph(nodes, "cut", inputs, [info("y", TensorProto.FLOAT, None)], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


X_BOUND = (8, 4)
# operator, attributes, bounds of indices, ends of x and indices, axis that indices count along
CUTS: list[tuple[str, dict[str, Any], Any, list[tuple[Any, Any]], int]] = [
    ("Gather", {"axis": 0}, (5, 4), [((8, 4), (5, 4)), ((6, 4), (2, 3)), ((2, 3), (5, 1)), ((3, 0), (0, 2))], 0),
    ("Gather", {"axis": 1}, (5, 4), [((8, 4), (5, 4)), ((5, 2), (3, 3)), ((0, 3), (1, 2))], 1),
    ("GatherElements", {"axis": 0}, (5, 4), [((8, 4), (5, 4)), ((4, 3), (5, 3)), ((1, 4), (2, 4))], 0),
    ("GatherElements", {"axis": 1}, (5, 4), [((5, 4), (5, 4)), ((4, 3), (4, 2)), ((3, 1), (3, 4))], 1),
    ("GatherND", {}, (5, 4, 1), [((8, 4), (5, 4)), ((2, 4), (3, 2)), ((5, 3), (0, 1))], 0),
    ("ScatterElements", {"axis": 0}, (5, 4), [((8, 4), (5, 4)), ((4, 3), (2, 3))], 0),
    ("ScatterElements", {"axis": 1, "reduction": "add"}, (5, 4), [((5, 4), (5, 4)), ((3, 3), (3, 2))], 1),
    ("ScatterND", {}, (4, 1), [((8, 4), (4,)), ((5, 2), (3,)), ((3, 3), (0,))], 0),
]


QUICK = {("GatherElements", 0), ("ScatterElements", 0)}


@pytest.mark.parametrize(
    ("op", "attributes", "bound", "ends", "axis"),
    [
        pytest.param(*cut, id=f"{cut[0]} {cut[1]}", marks=() if (cut[0], cut[-1]) in QUICK else pytest.mark.long)
        for cut in CUTS
    ],
)
def test_no_extent_need_be_known(
    op: str, attributes: dict[str, Any], bound: Any, ends: list[tuple[Any, Any]], axis: int, device: CpuDevice
) -> None:
    x = np.arange(np.prod(X_BOUND), dtype=np.float32).reshape(X_BOUND)
    rng = np.random.default_rng(0)
    places = np.zeros(bound, np.int64)
    made = cut_graph(op, attributes, x, places)
    with DynamicNet(read_graph(made).program(), device, functools.partial(artifact, device.target)) as net:
        x_end, places_end = (np.array(each) for each in ends[0])
        given = [x, places, x_end, places_end]
        bounded = net.bind(*given)
        for x_end[:], places_end[:] in ends:
            extent = int(x_end[axis])
            every = rng.permutation(np.arange(-(extent // 2), extent - extent // 2))  # each target once
            along_first = op.endswith("Elements") and axis == 0
            places[...] = np.resize(every, bound[0])[:, None] if along_first else np.resize(every, bound)
            if op == "ScatterElements" and not along_first:
                places[...] = np.resize(every, bound[-1])
            (expected,) = ReferenceEvaluator(made).run(None, dict(zip(("x", "places", "x_end", "places_end"), given)))
            np.testing.assert_array_equal(net(*given), expected)
            bounded.step()
            np.testing.assert_array_equal(bounded.sliced()[0], expected)
            np.testing.assert_array_equal(net(*given), expected)
        x_end[:], places_end[:] = ends[1]
        places[...] = -int(x_end[axis])  # the first one
        net(*given)
        bounded.step()
        bounded.check()
        places[(0,) * places.ndim] = x_end[axis]  # within the bound
        first = "chosen" if op.startswith("Scatter") else "pick"
        text = rf"node {first} \(.*\): the index at \[0.*\] of .* is {x_end[axis]}, but axis {axis} of .* was shorter"
        with pytest.raises(IndexRangeError, match=text):
            net(*given)
        bounded.step()
        with pytest.raises(IndexRangeError, match=text):
            bounded.check()
        bounded.close()


def test_an_embedding_of_words_of_which_no_extent_is_known(device: CpuDevice) -> None:
    """The kernel reads the extents of the words, and not those of the table."""
    table, words = np.arange(32, dtype=np.float32).reshape(X_BOUND), np.arange(-8, 12).reshape(5, 4) % 8
    info = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Slice", ["words", "begin", "end"], ["some"], "cut"),
        helper.make_node("Gather", ["table", "some"], ["y"], "pick"),
    ]
    inputs = [info("words", TensorProto.INT64, [5, 4]), info("end", TensorProto.INT64, [2])]
    constants = [numpy_helper.from_array(np.array([0, 0]), "begin"), numpy_helper.from_array(table, "table")]
    graph = helper.make_graph(nodes, "embedding", inputs, [info("y", TensorProto.FLOAT, None)], constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    program = read_graph(made).program()
    with DynamicNet(program, device, functools.partial(artifact, device.target)) as net:
        for n, s in ((5, 4), (2, 3), (0, 2), (4, 1)):
            np.testing.assert_array_equal(net(words, np.array([n, s])), table[words[:n, :s]])
    assert [dynamic_of(call.workload) for segment in program.segments for call in segment.calls][-1] == (True, False)


def dynamic_of(workload: schedsearch.Workload) -> tuple[bool, bool]:
    """Whether a gather or scatter reads the extents of indices and of x."""
    return workload.dynamic, workload.params.get("dynamic_x", False)


@pytest.mark.parametrize(
    ("op", "attributes", "rows_of_places", "read"),
    [
        ("Gather", {"axis": 1}, 3, (False, False)),
        ("Gather", {"axis": 1}, "n", (True, True)),
        ("Gather", {"axis": 0}, 3, (False, True)),
        ("GatherElements", {"axis": 1}, "n", (True, False)),
        ("GatherElements", {"axis": 1}, "m", (True, True)),
        ("GatherElements", {"axis": 0}, "n", (True, True)),
        ("ScatterElements", {"axis": 1}, "n", (True, False)),
        ("ScatterElements", {"axis": 1}, 3, (False, True)),
    ],
)
def test_extents_of_x_are_read_where_an_index_may_count_along_them(
    op: str, attributes: dict[str, Any], rows_of_places: Any, read: tuple[bool, bool]
) -> None:
    """x is [n, 4], and the indices have two columns."""
    names = ["x", "places", "updates"][: 3 if op == "ScatterElements" else 2]
    info = helper.make_tensor_value_info
    shapes = {"x": ["n", 4], "places": [rows_of_places, 2], "updates": [rows_of_places, 2]}
    types = {"x": TensorProto.FLOAT, "places": TensorProto.INT64, "updates": TensorProto.FLOAT}
    inputs = [info(name, types[name], shapes[name]) for name in names]
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], "pick", **attributes)], "one", inputs, [info("y", TensorProto.FLOAT, None)]
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    sizes = {name: Size(name, 1, 6) for name in "nm" if name in ("n", rows_of_places)}
    (segment,) = read_graph(made, sizes).program().segments
    assert [dynamic_of(call.workload) for call in segment.calls] == [read]


@pytest.mark.parametrize("axis", [0, 1])
def test_a_row_of_an_array_of_which_nothing_is_known(axis: int, device: CpuDevice) -> None:
    """The axis of a single index goes."""
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    info = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Slice", ["x", "begin", "end"], ["some"], "cut"),
        helper.make_node("Gather", ["some", "last"], ["y"], "pick", axis=axis),
    ]
    inputs = [info("x", TensorProto.FLOAT, [8, 4]), info("end", TensorProto.INT64, [2])]
    constants = [numpy_helper.from_array(np.array([0, 0]), "begin"), numpy_helper.from_array(np.array(-1), "last")]
    graph = helper.make_graph(nodes, "last row", inputs, [info("y", TensorProto.FLOAT, None)], constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    with DynamicNet(read_graph(made).program(), device, functools.partial(artifact, device.target)) as net:
        for end in ((8, 4), (2, 3), (1, 1)):
            np.testing.assert_array_equal(net(x, np.array(end)), x[: end[0], : end[1]].take(-1, axis))
        with pytest.raises(IndexRangeError, match=r"node pick \(Gather\): the index at \[0\] of 'last' is -1"):
            net(x, np.array([0, 4][:: 1 - 2 * axis]))


def test_impossible_sizes_come_before_the_indices_that_they_make_wrong(device: CpuDevice) -> None:
    """Of an array that is larger than its bound nothing counts, so no index is legal."""
    graph = DynamicGraph()
    x, count = graph.input("x", (1, 4), "float32"), graph.input("count", (2,), "int64")
    wide = graph.call(expand(x=(1, 4), bound=(3, 4), dtype="float32"), x, count, name="wide")
    looked_up = gather(x=(3, 4), indices=(2,), dtype="float32", dynamic_x=True)
    graph.output(graph.call(looked_up, wide, graph.constant("places", np.array([0, -1])), name="pick"))
    x, count = np.arange(4, dtype=np.float32).reshape(1, 4), np.array([3, 4])
    with DynamicNet(graph.program(), device, compiled) as net:
        bound = net.bind(x, count)
        bound.step()
        np.testing.assert_array_equal(bound.sliced()[0], x[[0, 0]])
        count[0] = 4
        bound.step()
        with pytest.raises(SizeError, match="exceeds its declared bound"):
            bound.check()
        count[0] = 2
        bound.step()
        bound.check()
        bound.close()


def test_extents_that_may_differ_are_refused() -> None:
    graph = DynamicGraph()
    every = graph.input("every", (6, 4), "int64")
    begin, ends = graph.constant("begin", np.array([0])), [graph.input(name, (1,), "int64") for name in "nm"]
    window = dyn_strided_slice(x=(6, 4), entries=1, strided=False, dtype="int64")
    some, others = (graph.call(window, every, begin, end, name=f"{end} rows") for end in ends)
    scatters = scatter(x=(6, 4), indices=(6, 4), dtype="int64", dynamic=True)
    with pytest.raises(
        UsageError, match=r"pick reads updates of \[m rows\.y:0, 4\] with .* indices of \[n rows\.y:0, 4\]; "
    ):
        graph.call(scatters, every, some, others, name="pick")
    with pytest.raises(UsageError, match=r"takes indices of fixed extents; .*give them one size, or set dynamic"):
        graph.call(scatters.replace(dynamic=False), every, some, some, name="pick")
    with pytest.raises(UsageError, match=r"takes x of fixed extents; .*give them one size, or set dynamic_x"):
        graph.call(scatters, some, others, others, name="pick")
    in_batches = gather(x=(6, 4), indices=(6, 1), by="tuples", batch_dims=1, dtype="int64", dynamic=True, dynamic_x=True)
    column = dyn_strided_slice(x=(6, 1), entries=1, strided=False, dtype="int64", dynamic=False)
    one = graph.call(column, graph.input("column", (6, 1), "int64"), begin, ends[1], name="column")
    with pytest.raises(UsageError, match=r"pick reads indices of .* with x of .*; their extents may differ"):
        graph.call(in_batches, some, one, name="pick")
    tuples = gather(x=(6, 4), indices=(6, 2), by="tuples", dtype="int64", dynamic=True)
    lengths = dyn_strided_slice(x=(6, 2), axes=(1,), entries=1, strided=False, dtype="int64")
    pairs = graph.call(lengths, graph.input("pairs", (6, 2), "int64"), begin, ends[0], name="pairs")
    with pytest.raises(UsageError, match=r"the tuples in indices of .* have a length that is known at run time only"):
        graph.call(tuples, every, pairs, name="pick")


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


@pytest.mark.parametrize(
    ("op", "attributes", "table", "ids", "legal"),
    [
        ("Gather", {"axis": 0}, [8, 3], ["n", "s"], 8),
        ("Gather", {"axis": 1}, ["b", "m"], ["s"], None),
        ("GatherElements", {"axis": 1}, ["n", "m"], ["n", "s"], None),
        ("GatherND", {"batch_dims": 1}, ["n", "m"], ["n", "s", 1], None),
    ],
)
def test_inputs_may_be_open_in_all_axes(
    op: str, attributes: dict[str, Any], table: list[Any], ids: list[Any], legal: int | None, device: CpuDevice
) -> None:
    """An index counts along m, unless `legal` is its extent."""
    info = helper.make_tensor_value_info
    inputs = [info("x", TensorProto.FLOAT, table), info("places", TensorProto.INT64, ids)]
    graph = helper.make_graph(
        [helper.make_node(op, ["x", "places"], ["y"], "pick", **attributes)], "one", inputs,
        [info("y", TensorProto.FLOAT, None)],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    named = {name: Size(name, 1, 6) for name in {*table, *ids} if isinstance(name, str)}
    rng = np.random.default_rng(0)
    with DynamicNet(read_graph(made, named).program(), device, functools.partial(artifact, device.target)) as net:
        for chosen in ({"n": 6, "s": 6, "m": 6, "b": 6}, {"n": 2, "s": 3, "m": 4, "b": 5}, {"n": 3, "s": 1, "m": 1, "b": 1}):
            of_x, of_places = ([chosen.get(each, each) for each in shape] for shape in (table, ids))
            extent = legal or chosen["m"]
            x = rng.standard_normal(of_x).astype(np.float32)
            places = rng.integers(-extent, extent, of_places)
            (expected,) = ReferenceEvaluator(made).run(None, {"x": x, "places": places})
            np.testing.assert_array_equal(net(x, places), expected)
            bound = net.bind(x, places)
            bound.step()
            np.testing.assert_array_equal(bound.sliced()[0], expected)
            places[(0,) * places.ndim] = extent
            bound.step()
            with pytest.raises(IndexRangeError, match=rf"is {extent}, but axis"):
                bound.check()
            bound.close()
