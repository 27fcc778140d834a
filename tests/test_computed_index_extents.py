"""Indices along axes whose extents are known at run time only: they count the rows in use."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from test_dynamic_net import artifact

import schedsearch
from schedsearch import dyn_strided_slice, expand, gather, scatter
from schedsearch.device.cpu import CpuDevice
from schedsearch.dynamic.graph import DynamicGraph, Size
from schedsearch.dynamic.model import read_graph
from schedsearch.dynamic.net import DynamicNet
from schedsearch.errors import IndexRangeError, UsageError
from schedsearch.ops.dependence import SizeError

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


QUICK_ALIKE = {("Gather", 0), ("GatherElements", 1), ("ScatterElements", 0)}  # operators with the axis


@pytest.mark.parametrize(
    ("op", "attributes", "indices", "axis"),
    [
        pytest.param(*each, id=f"{each[0]} {each[1]}", marks=() if (each[0], each[-1]) in QUICK_ALIKE else pytest.mark.long)
        for each in ALIKE
    ],
)
@pytest.mark.mostly_long(3)
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


QUICK = {("GatherND", 0)}


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
@pytest.mark.mostly_long(2)
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


@pytest.mark.long(of="networks")
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


@pytest.mark.parametrize(
    ("op", "attributes", "table", "ids", "legal"),
    [
        ("Gather", {"axis": 0}, [8, 3], ["n", "s"], 8),
        ("Gather", {"axis": 1}, ["b", "m"], ["s"], None),
        ("GatherElements", {"axis": 1}, ["n", "m"], ["n", "s"], None),
        ("GatherND", {"batch_dims": 1}, ["n", "m"], ["n", "s", 1], None),
    ],
)
@pytest.mark.mostly_long(6)
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
