"""Nodes of ONNX whose results have sizes that are known at run time only: the calls and views that they become."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.dynamic.dims import Unknown
from schedsearch.dynamic.graph import DynamicGraph
from schedsearch.dynamic.numbers import Row
from schedsearch.dynamic.rows import Rows
from schedsearch.network.chain import Chain
from schedsearch.network.facts import constant_input, constant_of, inputs_of, is_given, name_of
from schedsearch.network.indexing import INDEXED
from schedsearch.network.model import ModelError
from schedsearch.ops.declared_shapes import is_extents
from schedsearch.ops.nms import LOWEST
from schedsearch.workload import Workload

if TYPE_CHECKING:
    import onnx_ir as ir

_Arguments = tuple[Workload, Sequence[str]]


class Nodes:
    """Reads such nodes into a graph.

    Args:
        operand: gives the graph's value of a value of the model.
        declared: bounds that the model declares for results; None where it does not.
    """

    def __init__(
        self,
        graph: DynamicGraph,
        rows: Rows,
        operand: Callable[[ir.Value], str],
        declared: Mapping[ir.Value, Sequence[int | None]],
    ) -> None:
        self.graph, self.rows, self.operand, self.declared = graph, rows, operand, declared

    def read(self, node: ir.Node) -> list[str] | None:
        """The values of the graph that a node's results are; None if nothing here reads it."""
        if node.op_type in VIEWS and (view := self._view(node)) is not None:
            return [view]
        if node.op_type not in READERS:
            return None
        made = READERS[node.op_type](self, node)
        return made if isinstance(made, list) else self.call(node, *made)

    def call(self, node: ir.Node, workload: Workload, arrays: Sequence[str]) -> list[str]:
        """The outputs of a call, without those that are only extents."""
        name = self.graph.unused(str(node.outputs[0].name))
        self.graph.call(workload, *arrays, name=name)
        outputs = {output.name: output for output in workload.outputs}
        return [f"{name}.{output}" for output in outputs if not is_extents(output, outputs)]

    def array_of(self, row: Row) -> str:
        """A row as an array of its shape."""
        if len(row.shape) == 1 or not row.shape or not self.graph.bound(row.value).numbers:
            return self.seen(row.value, row.shape or (1,)) if not self.graph.bound(row.value).numbers else row.value
        return self.seen(self.copied(row.value), row.shape)

    def copied(self, name: str) -> str:
        """The same numbers in an array that a call makes."""
        bound = self.graph.bound(name)
        count = bound.shape[0]
        every = self.graph.constant(self.graph.unused(f"0 to {count}"), np.arange(count))
        workload = Workload("gather", {"x": bound.shape, "indices": (count,), "dtype": bound.dtype})
        return self.graph.call(workload, name, every, name=self.graph.unused(f"{name} copied"))

    def seen(self, name: str, shape: Sequence[int]) -> str:
        return name if self.graph.bound(name).shape == tuple(shape) else self.graph.view(name, shape)

    def taken(self, node: ir.Node, count: int) -> list[str]:
        """The graph's values of a node's first inputs."""
        return [self.operand(value) for value in inputs_of(node, count)]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.graph.bound(name).shape

    def dtype(self, name: str) -> str:
        return self.graph.bound(name).dtype

    def number(self, node: ir.Node, place: int, default: float) -> float:
        if not is_given(node, place):
            return default
        found = constant_input(node, place)
        if found is None:
            raise ModelError(f"{name_of(node)} has an input {place} that is computed; allowed: a constant")
        return float(found.reshape(-1)[0])

    def axes(self, node: ir.Node, place: int, rank: int) -> tuple[int, ...] | None:
        """Constant axes; None if there are none."""
        given = constant_input(node, place) if is_given(node, place) else node.attributes.get_ints("axes", None)
        if given is None and is_given(node, place):
            raise ModelError(f"{name_of(node)} has axes that are computed; allowed: constants")
        return None if given is None else tuple(int(axis) % rank for axis in given)

    # ---- views

    def _view(self, node: ir.Node) -> str | None:
        """The same elements in another shape, if they are in the same places."""
        (x,) = inputs_of(node, 1)
        name = self.operand(x)
        shape = list(self.shape(name)) if x.shape is None or len(x.shape) else []
        to: Sequence[int] | None = shape
        if node.op_type == "Squeeze":
            axes = self.axes(node, 1, len(shape)) or [n for n, extent in enumerate(shape) if extent == 1]
            if wrong := [axis for axis in axes if shape[axis] != 1]:
                raise ModelError(f"{name_of(node)} drops dimension {wrong[0]} of {shape}; allowed: of extent 1")
            to = [extent for axis, extent in enumerate(shape) if axis not in axes]
        elif node.op_type == "Unsqueeze":
            count = len(constant_input(node, 1) if is_given(node, 1) else node.attributes.get_ints("axes", ()))  # type: ignore[arg-type]
            to = list(shape)
            for axis in sorted(self.axes(node, 1, len(shape) + count) or ()):
                to.insert(axis, 1)
        elif node.op_type == "Flatten":
            axis = node.attributes.get_int("axis", 1)
            axis += len(shape) if axis < 0 else 0
            to = [math.prod(shape[:axis]), math.prod(shape[axis:])]
        elif node.op_type == "Reshape":
            to = self._reshaped(node, name, shape)
        if to is None:
            return None
        to = tuple(to) or (1,)
        if to == self.shape(name):
            return name
        unknown = {axis for axis, dim in enumerate(self.graph.dims(name)) if isinstance(dim, Unknown)}
        if (unknown and (unknown != {0} or to[0] != self.shape(name)[0])) or self.graph.bound(name).numbers:
            return None
        return self.graph.view(name, to)

    def _reshaped(self, node: ir.Node, name: str, shape: Sequence[int]) -> list[int] | None:
        """The bound after a Reshape, if all that is unknown is a first extent that stays."""
        (target,) = inputs_of(node, 2)[1:]
        row, constant = self.rows.of.get(target), constant_of(target)
        wanted: Sequence[Any]
        if constant is not None:
            wanted = [int(n) for n in constant]
        elif row is not None:
            wanted = self.graph.elements(row.value) or ()
        else:
            return None
        dims, found = self.graph.dims(name), []
        for axis, extent in enumerate(wanted):
            if isinstance(extent, Unknown):
                if axis or not len(dims) or extent is not dims[0]:
                    return None
                extent = shape[0]
            elif extent == 0 and not node.attributes.get_int("allowzero", 0):
                extent = shape[axis]
            found.append(extent)
        rest = math.prod(extent for extent in found if extent != -1)
        if -1 in found and rest:
            found[found.index(-1)] = math.prod(shape) // rest
        return found if math.prod(found) == math.prod(shape) else None


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
    params: dict[str, Any] = {"x": nodes.shape(x), "flat": axis is None, "dtype": nodes.dtype(x)}
    params["order"] = "sorted" if node.attributes.get_int("sorted", 1) else "first"
    return Workload("unique", params | ({} if axis is None else {"axis": axis})), [x]


def _slice(nodes: Nodes, node: ir.Node) -> _Arguments:
    x, begin, end = nodes.taken(node, 3)
    shape = nodes.shape(x)
    axes = nodes.axes(node, 3, len(shape)) or ()
    strides = [nodes.operand(node.inputs[4])] if is_given(node, 4) and node.inputs[4] is not None else []
    params: dict[str, Any] = {
        "x": shape, "entries": nodes.shape(begin)[0], "axes": axes, "strided": bool(strides), "dynamic": True,
        "dtype": nodes.dtype(x), "index_dtype": nodes.dtype(begin),
    }  # fmt: skip
    return Workload("dyn_strided_slice", params), [x, begin, end, *strides]


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
    if chain.op == "roi_align":
        params["layout"] = "NCHW"
    made = nodes.call(node, Workload(chain.op, params), list(values.values()))
    index = node.inputs[1] if node.op_type == "Gather" else None
    if index is not None and index.shape is not None and not len(index.shape):
        kept = list(nodes.shape(made[0]))  # the axis of a single index goes
        del kept[params["axis"]]
        made[0] = nodes.seen(made[0], kept or (1,))
    return made


READERS: Mapping[str, Callable[[Nodes, Any], _Arguments | list[str]]] = {
    "NonMaxSuppression": _nms,
    "NonZero": _nonzero,
    "Unique": _unique,
    "Slice": _slice,
    **dict.fromkeys(INDEXED, _indexed),
}
VIEWS = ("Identity", "Squeeze", "Unsqueeze", "Flatten", "Reshape")
