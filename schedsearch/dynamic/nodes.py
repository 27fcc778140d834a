"""Nodes of ONNX whose results have sizes that are known at run time only: the calls and views that they become."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.dynamic.dims import Unknown, must_read_x, same
from schedsearch.dynamic.image_nodes import MEANS, global_pool, resize
from schedsearch.dynamic.node_arrays import Nodes
from schedsearch.dynamic.numbers import Range, Row
from schedsearch.network.chain import Chain
from schedsearch.network.facts import constant_of, inputs_of, is_given, name_of
from schedsearch.network.indexing import INDEXED
from schedsearch.network.invalid import ModelError
from schedsearch.network.others import RESIZES
from schedsearch.network.views import VIEWS
from schedsearch.ops.dyn_concat import MOST_PARTS
from schedsearch.ops.nms import LOWEST
from schedsearch.typed import ParamsByName
from schedsearch.workload import Workload

if TYPE_CHECKING:
    import onnx_ir as ir

_Arguments = tuple[Workload, Sequence[str]]


def read(nodes: Nodes, node: ir.Node) -> list[str] | None:
    """The values of the graph that a node's results are; None if nothing here reads it."""
    if node.op_type in VIEWS and (view := nodes.view(node)) is not None:
        return [view]
    if node.op_type not in READERS:
        return None
    made = READERS[node.op_type](nodes, node)
    return nodes.call(node, *made) if isinstance(made, tuple) else made


# ---- calls


def _nms(nodes: Nodes, node: ir.Node) -> _Arguments:
    boxes, scores = nodes.taken(node, 2)
    n, classes, count = nodes.shape(scores)
    most = int(nodes.number(node, 2, 0))
    if most < 1:
        raise ModelError(f"{name_of(node)} keeps {most} boxes; allowed: a max_output_boxes_per_class of 1 or more")
    params = {
        "n": n, "classes": classes, "boxes": count, "max_output": most, "iou_threshold": nodes.number(node, 3, 0.0),
        "score_threshold": nodes.number(node, 4, LOWEST),
        "center_point_box": bool(node.attributes.get_int("center_point_box", 0)),
    }  # fmt: skip
    return Workload("nms", params), [boxes, scores]


def _nonzero(nodes: Nodes, node: ir.Node) -> _Arguments:
    (x,) = nodes.taken(node, 1)
    return Workload("nonzero", {"x": nodes.shape(x), "dtype": nodes.dtype(x)}), [x]


def _unique(nodes: Nodes, node: ir.Node) -> _Arguments:
    (x,) = nodes.taken(node, 1)
    axis = node.attributes.get_int("axis", None)
    params: ParamsByName = {"x": nodes.shape(x), "flat": axis is None, "dtype": nodes.dtype(x)}
    params["order"] = "sorted" if node.attributes.get_int("sorted", 1) else "first"
    return Workload("unique", params | ({} if axis is None else {"axis": axis})), [x]


def _slice(nodes: Nodes, node: ir.Node) -> _Arguments:
    x, begin, end = nodes.taken(node, 3)
    shape = nodes.shape(x)
    axes = nodes.axes(node, 3, len(shape)) or ()
    strides = [nodes.operand(node.inputs[4])] if is_given(node, 4) and node.inputs[4] is not None else []
    params: ParamsByName = {
        "x": shape, "entries": nodes.shape(begin)[0], "axes": axes, "strided": bool(strides),
        "dynamic": nodes.graph.is_dynamic(x), "dtype": nodes.dtype(x), "index_dtype": nodes.dtype(begin),
    }  # fmt: skip
    workload, arrays = Workload("dyn_strided_slice", params), [x, begin, end, *strides]
    return workload.replace(bound=nodes.traced_bound(workload, arrays)), arrays


def _range(nodes: Nodes, node: ir.Node) -> _Arguments | list[str]:
    rows = [nodes.rows.row(value) for value in inputs_of(node, 3)]
    if any(row is not None and row.is_float for row in rows):
        return _range_of_floats(nodes, node)
    names = nodes.taken(node, 3)
    return _counted(nodes, node, rows, nodes.dtype(names[0])), names


def _counted(nodes: Nodes, node: ir.Node, rows: Sequence[Row | None], dtype: str) -> Workload:
    most: int | None = None
    if all(row is not None for row in rows):
        start, limit, delta = (row.ranges[0] for row in rows if row is not None)
        if None not in (*start, *limit) and delta[0] is not None and delta[0] == delta[1] != 0:
            far = (limit[1] - start[0]) if delta[0] > 0 else (start[1] - limit[0])  # type: ignore[operator]
            most = max(0, -(-far // abs(delta[0])))
    (bound,) = nodes.bounds(node, [(0, most)])
    return Workload("arange", {"bound": bound, "dtype": dtype})


def _range_of_floats(nodes: Nodes, node: ir.Node) -> list[str]:
    """Of sizes in float32, such as the pixels of a map that an export counts: the same numbers as integers, converted. The
    host then knows how many there are."""
    rows = [_as_integer(nodes, value) for value in inputs_of(node, 3)]
    if None in rows:
        raise ModelError(
            f"{name_of(node)} (Range) counts by floats that are computed from sizes; allowed: integers below {_EXACT:,}, "
            "which a Cast may have made floats. Count by integers and Cast the result"
        )
    workload = _counted(nodes, node, rows, "int64")
    (counted,) = nodes.call(node, workload, [nodes.array_of(row) for row in rows if row is not None])
    shape = nodes.shape(counted)
    params = {"y": shape, "expression": "a", "inputs": [["a", "int64", shape]], "dtype": "float32"}
    return nodes.call(node, Workload("elementwise", params), [counted])


_EXACT = 1 << 24  # up to here every integer is a number of float32


def _as_integer(nodes: Nodes, value: ir.Value) -> Row | None:
    """The integer that a float is: a constant, or what a Cast made it of."""
    numbers, maker = constant_of(value), value.producer()
    if numbers is not None:
        number = float(numbers.reshape(-1)[0])
        if numbers.size != 1 or number != int(number) or abs(number) > _EXACT:
            return None
        name = nodes.graph.constant(nodes.graph.unused(f"{value.name} as an integer"), np.array([int(number)]))
        return Row(name, (), ((int(number), int(number)),))
    row = None
    if maker is not None and maker.op_type == "Cast" and maker.inputs[0] is not None:
        row = nodes.rows.row(maker.inputs[0])
    if row is None or row.is_float or row.count != 1:
        return None
    return row if all(end is not None and abs(end) <= _EXACT for end in row.ranges[0]) else None


def _expand(nodes: Nodes, node: ir.Node) -> _Arguments | list[str]:
    x, shape = nodes.taken(node, 2)
    ranges, wanted = nodes.rows.ranges(x), nodes.wanted(node, shape)
    rank = max(len(ranges), len(wanted))
    ranges, wanted = ([(1, 1)] * (rank - len(each)) + list(each) for each in (ranges, wanted))
    bound = nodes.bounds(
        node, [b if a[1] == 1 else (a if a[0] != 1 and a[0] == a[1] else _larger(a, b)) for a, b in zip(ranges, wanted)]
    )
    params = {"x": nodes.shape(x), "bound": bound, "entries": nodes.shape(shape)[0], "dtype": nodes.dtype(x)}
    return Workload("expand", params | nodes.dynamic({"x": x})), [x, shape]


def _constant_of_shape(nodes: Nodes, node: ir.Node) -> _Arguments:
    (shape,) = nodes.taken(node, 1)
    value = node.attributes.get_tensor("value") if "value" in node.attributes else None
    number = np.zeros(1, np.float32) if value is None else np.asarray(value.numpy()).reshape(1)
    x = nodes.graph.constant(
        nodes.graph.unused(f"{name_of(node)} value"), number.astype(np.uint8) if number.dtype == np.bool_ else number
    )
    bound = nodes.bounds(node, nodes.wanted(node, shape))
    params = {"x": (1,), "bound": bound, "entries": nodes.shape(shape)[0], "dtype": nodes.dtype(x)}
    return Workload("expand", params), [x, shape]


def _reshape(nodes: Nodes, node: ir.Node) -> _Arguments:
    x, shape = nodes.taken(node, 2)
    of_x = nodes.rows.ranges(x)
    size = _size_left(nodes, x, node.inputs[1])
    allowzero = bool(node.attributes.get_int("allowzero", 0))
    wanted: list[Range] = []
    for axis, (low, high) in enumerate(nodes.wanted(node, shape)):
        if low == high == 0 and not allowzero:
            wanted.append(of_x[axis])
        elif low is None or low < 0 or high is None:  # it may be all that is left
            wanted.append((0, None))
        else:
            wanted.append((low, high))
    known = math.prod(low for low, high in wanted if high is not None and low == high and low)
    wanted = [(low, size // max(known, 1) if high is None else high) for low, high in wanted]
    params = {"x": nodes.shape(x), "bound": nodes.bounds(node, wanted), "allowzero": allowzero, "dtype": nodes.dtype(x)}
    return Workload("reshape", params | nodes.dynamic({"x": x})), [x, shape]


def _size_left(nodes: Nodes, x: str, shape: ir.Value | None) -> int:
    """The most elements that an array has, without its extents that are known at run time only and stay extents: a batch
    that stays leaves the others no more than there are of one image."""
    row = None if shape is None else nodes.rows.of.get(shape)
    wanted = [each for each in (() if row is None else nodes.graph.elements(row.value) or ()) if isinstance(each, Unknown)]
    size = 1
    for dim, most in zip(nodes.graph.dims(x), nodes.shape(x)):
        stays = next((place for place, each in enumerate(wanted) if same(each, dim)), None)
        if stays is None:
            size *= most
        else:
            del wanted[stays]
    return size


def _where(nodes: Nodes, node: ir.Node) -> _Arguments:
    names = dict(zip("cab", nodes.taken(node, 3)))
    shapes = {name: nodes.shape(value) for name, value in names.items()}
    return Workload("where", shapes | {"dtype": nodes.dtype(names["a"])} | nodes.dynamic(names)), list(names.values())


def _concat(nodes: Nodes, node: ir.Node) -> list[str]:
    """A few at a time."""
    names = nodes.taken(node, len(node.inputs))
    axis = node.attributes.get_int("axis", 0) % len(nodes.shape(names[0]))
    while len(names) > 1:
        some, names = names[:MOST_PARTS], names[MOST_PARTS:]
        parts = {f"x{number}": name for number, name in enumerate(some)}
        params = {"x": [nodes.shape(name) for name in some], "axis": axis, "dtype": nodes.dtype(some[0])}
        names = [*nodes.call(node, Workload("dyn_concat", params | nodes.dynamic(parts)), some), *names]
    return names


def _larger(a: Range, b: Range) -> Range:
    """Of two extents one of which may be 1."""
    return 0, None if a[1] is None or b[1] is None else max(a[1], b[1])


_ARGUMENTS = {"gather": ("x", "indices"), "scatter": ("x", "indices", "updates"), "topk": ("x",)}
_COUNTED = {
    "gather": "indices",
    "scatter": "indices",
    "topk": "x",
    "roi_align": "rois",
}  # with the extents that may be unknown


def _indexed(nodes: Nodes, node: ir.Node) -> list[str]:
    chain = INDEXED[node.op_type](node, set())
    if not isinstance(chain, Chain):
        raise ModelError(chain)
    params = dict(chain.params)
    arguments = _ARGUMENTS.get(chain.op, ("x", "rois", "batch_indices"))
    values = dict(zip(arguments, nodes.taken(node, len(arguments))))
    params["dynamic"] = nodes.graph.is_dynamic(values[_COUNTED[chain.op]])
    if chain.op in ("gather", "scatter"):
        dims = {argument: nodes.graph.dims(value) for argument, value in values.items()}
        params["dynamic_x"] = must_read_x(Workload(chain.op, params), dims)
    if chain.op == "roi_align":
        params["layout"] = "NCHW"
    made = nodes.call(node, Workload(chain.op, params), list(values.values()))
    index = node.inputs[1] if node.op_type == "Gather" else None
    if index is not None and index.shape is not None and not len(index.shape):
        kept = list(nodes.shape(made[0]))  # the axis of a single index goes
        del kept[params["axis"]]
        made[0] = nodes.seen(made[0], kept or (1,))
    return made


READERS: Mapping[str, Callable[[Nodes, Any], _Arguments | list[str] | None]] = {
    "NonMaxSuppression": _nms,
    "NonZero": _nonzero,
    "Unique": _unique,
    "Slice": _slice,
    "Range": _range,
    "Expand": _expand,
    "ConstantOfShape": _constant_of_shape,
    "Reshape": _reshape,
    "Where": _where,
    "Concat": _concat,
    **dict.fromkeys(MEANS, global_pool),
    **dict.fromkeys(INDEXED, _indexed),
    **dict.fromkeys(RESIZES, resize),
}
