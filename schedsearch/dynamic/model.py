"""ONNX models whose sizes are known at run time only, as dynamic graphs.

Nodes become one of three things. What computes with shapes becomes rows of numbers (`schedsearch.dynamic.rows`). Groups of
nodes that static operators compute become subgraphs of a network, fused and planned (`schedsearch.dynamic.static`). The
others, whose results have sizes that only the device knows, become calls (`schedsearch.dynamic.nodes`). Arrays have their
bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from schedsearch.dynamic import nodes
from schedsearch.dynamic.dims import Unknown
from schedsearch.dynamic.graph import DynamicGraph, Size
from schedsearch.dynamic.node_arrays import Nodes
from schedsearch.dynamic.program import Shown
from schedsearch.dynamic.rows import READ as OF_ROWS
from schedsearch.dynamic.rows import Rows, arithmetic
from schedsearch.dynamic.rowwise import computes_its_size, unknown_axes
from schedsearch.dynamic.static import Planner, Refused, add_network
from schedsearch.errors import WorkloadError, did_you_mean
from schedsearch.network.evaluated import computed
from schedsearch.network.facts import constant_of, dtype_of, folded, is_onnx, name_of
from schedsearch.network.indexing import check_indices
from schedsearch.network.invalid import ModelError
from schedsearch.network.lower import TAKEN as OF_NETWORKS
from schedsearch.network.model import Loaded, load, needed, prepared
from schedsearch.network.refusals import grouped, why_left
from schedsearch.network.simplify import is_foldable
from schedsearch.network.views import VIEWS
from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir


TAKEN = tuple(sorted({*nodes.READERS, *VIEWS, *OF_ROWS, *OF_NETWORKS}))
_FIXED_ONLY = "takes arrays of fixed extents only; allowed: nodes that docs/dynamic-shapes.md lists"
_SHAPED_BY = {"Slice": (1, 2, 3, 4), "Expand": (1,), "Reshape": (1,)}  # inputs whose values a result's extents depend on


def read_graph(
    model: str | Path | onnx.ModelProto | Loaded, sizes: Mapping[str, Size] | None = None, *, planner: Planner | None = None
) -> DynamicGraph:
    """The dynamic graph of an ONNX model.

    Args:
        model: a file in ONNX's binary format, a model, or what `network.model.load` read, which stays as it is.
        sizes: name of a dynamic dimension -> its bounds. Dimensions of inputs need bounds. So do those of results where no
            bound follows from the inputs, as of a Range.
        planner: how static subgraphs are planned; default: the first kernel of each node.

    Raises:
        ModelError: the file is missing or not a valid ONNX model, a dimension has no bounds or no name, bounds belong
            to no dimension, a node has no operator (all are listed), an argument that must be constant is computed, or a
            package of the extra `network` is missing.
        UsageError: a node cannot take an array whose extents are known at run time.
    """
    needed()
    if isinstance(model, Loaded):
        found, what, of_model = model, model.name, model.model.clone()
    else:
        found = load(Path(model) if isinstance(model, str) else model)
        what, of_model = found.name, found.model
    read = prepared(of_model, what, found.outline)
    missing = [node for node in read.graph if not is_onnx(node) or node.op_type not in (*TAKEN, "Constant")]
    if missing:
        raise ModelError(
            f"{_without_operator(what, {node: why_left(node, TAKEN) for node in missing})}; allowed: {', '.join(TAKEN)}"
        )
    return _Reader(read, what, sizes or {}, planner or Planner()).read()


def _without_operator(what: str, reasons: Mapping[ir.Node, str]) -> str:
    return f"dynamic graphs have no operator for these nodes of {what}: {'; '.join(grouped(reasons))}"


class _Reader:
    def __init__(self, model: ir.Model, what: str, sizes: Mapping[str, Size], planner: Planner) -> None:
        self.model, self.what, self.sizes, self.planner = model, what, sizes, planner
        self.graph = DynamicGraph()
        self.names: dict[ir.Value, str] = {}  # value of the model -> value of the graph
        self.rows = Rows(self.graph, self.names)
        self.refused: dict[ir.Node, str] = {}  # nodes without a static operator
        self.unfit: dict[ir.Node, str] = {}  # nodes whose static operator would need to know extents
        self.arithmetic = arithmetic(model.graph)  # nodes that rows may compute, and otherwise static operators
        self.used: set[str] = set()  # names of sizes
        self.declared = {value: self._declared(value) for node in model.graph for value in node.outputs}
        self.nodes = Nodes(self.graph, self.rows, self.operand, self.declared)

    def read(self) -> DynamicGraph:
        inputs = [value for value in self.model.graph.inputs if value.const_value is None]
        extents = (extent for value in inputs for extent in value.shape or () if not isinstance(extent, int))
        names = self.used | {str(extent.value) for extent in extents if extent.value}
        if unknown := [name for name in self.sizes if name not in names]:
            allowed = f"allowed: {', '.join(sorted(names)) or 'none'}"
            raise ModelError(
                f"{self.what} has no dynamic dimension {unknown[0]!r}{did_you_mean(unknown[0], names)}; {allowed}"
            )
        for value in inputs:
            shape, name = self._input_shape(value), str(value.name)
            made = self.graph.input(name, shape, dtype_of(value))
            self._put(value, made if shape else self.graph.view(made, (1,)))
        left = [node for node in self.model.graph if not self._is_constant(node)]
        while left:
            before, of_rows = len(left), len(self.arithmetic)
            left = self._read_static(left)
            left = [node for node in left if not (self._is_ready(node) and self._read(node))]
            if len(left) == before and len(self.arithmetic) == of_rows:
                stuck = {node: self._why_not(node) for node in left if self._is_ready(node)}
                raise ModelError(_without_operator(self.what, stuck or dict.fromkeys(left, "")))
        for value in self.model.graph.outputs:
            self.graph.output(self._output(value), called=value.name or "")
        return self.graph

    # ---- values

    @staticmethod
    def _is_constant(node: ir.Node) -> bool:
        """Whether it holds a result of the model that is a constant; other constants are initializers. It is known then."""
        import onnx_ir as ir

        if node.op_type != "Constant":
            return False
        (value,) = node.outputs
        value.const_value = ir.convenience.get_const_tensor(value)
        return value.const_value is not None

    def _declared(self, value: ir.Value) -> list[int | None]:
        """The bound of each extent of a result that the model or the caller names."""
        found: list[int | None] = []
        for extent in value.shape or ():
            size = None if isinstance(extent, int) else self.sizes.get(str(extent.value))
            if size is not None:
                self.used.add(size.name if size.name in self.sizes else str(extent.value))
            found.append(extent if isinstance(extent, int) else None if size is None else size.most)
        return found

    def _input_shape(self, value: ir.Value) -> list[int | Size]:
        if value.shape is None:
            raise ModelError(
                f"{self.what}: input {value.name!r} has no rank; give it a shape, with names for what is dynamic"
            )
        shape: list[int | Size] = []
        for axis, extent in enumerate(value.shape):
            name = None if isinstance(extent, int) else extent.value
            if isinstance(extent, int):
                shape.append(extent)
            elif name in self.sizes:
                shape.append(self.sizes[str(name)])
            else:
                bounds = f"give them, e.g. --dynamic {name}=1..64, in Python Size({name!r}, 1, 64)"
                what = f"is {name!r}, which has no bounds; {bounds}" if name else "has no name; give it one in the model"
                raise ModelError(f"{self.what}: dimension {axis} of input {value.name!r} {what}")
        return shape

    def _put(self, value: ir.Value, name: str) -> None:
        """Later nodes find the array by its value, and its bound as the shape."""
        import onnx_ir as ir

        self.names[value] = name
        bound = self.graph.bound(name)
        scalar = value.shape is not None and not len(value.shape) and bound.shape == (1,)
        self.graph.shows[str(value.name)] = Shown(name, tuple(range(0 if scalar else len(bound.shape))))
        value.shape = ir.Shape(() if scalar else bound.shape)
        if dtype_of(value) != bound.dtype:
            value.dtype = ir.DataType.from_numpy(np.dtype(bound.dtype))

    def operand(self, value: ir.Value) -> str:
        """The graph's value of an array, a row or a constant."""
        if value in self.rows.of:
            row = self.rows.of[value]
            if row.is_float:
                raise ModelError(
                    f"{self.what}: {value.name!r} holds floats of shape arithmetic ({row.dtype}), and is read as an array; "
                    "allowed: in shape arithmetic, e.g. Floor and Cast to int64 before a Slice; or make it an input"
                )
            return self.nodes.array_of(row)
        if value not in self.names:
            numbers = constant_of(value)
            if numbers is None:
                raise ModelError(f"{self.what}: nothing makes {value.name!r}")
            name = self.graph.unused(str(value.name))
            self.names[value] = self.graph.constant(name, _stored(numbers if numbers.ndim else numbers.reshape(1)))
        return self.names[value]

    def _output(self, value: ir.Value) -> str:
        """Constants and rows become arrays, and scalars have no axes, which kernels need."""
        name = self.operand(value)
        bound = self.graph.bound(name)
        if bound.numbers or (bound.view_of or name) in self.graph.constants:
            name = self.nodes.copied(name)
        row, numbers = self.rows.of.get(value), constant_of(value)
        shape = row.shape if row is not None else numbers.shape if numbers is not None else value.shape
        return self.graph.view(name, ()) if shape is not None and not len(shape) else name

    # ---- nodes

    def _why_not(self, node: ir.Node) -> str:
        return self.refused.get(node) or self.unfit.get(node) or self._of_floats(node) or _FIXED_ONLY

    def _of_floats(self, node: ir.Node) -> str:
        floats = [f"{value.name!r}" for value in node.inputs if value in self.rows.of and self.rows.of[value].is_float]
        if not floats:
            return ""
        return f"{floats[0]} holds floats of shape arithmetic, which cannot meet arrays: Cast them to int64 before"

    def _is_ready(self, node: ir.Node) -> bool:
        return all(self._is_known(value) for value in node.inputs if value is not None)

    def _is_known(self, value: ir.Value) -> bool:
        return value in self.names or value in self.rows.of or value.const_value is not None

    def _read_static(self, left: list[ir.Node]) -> list[ir.Node]:
        """Adds the nodes that static operators compute as one network; returns those that are left."""
        while True:
            group = self._group(left)
            if not group:
                return left
            results = [
                value
                for node in group
                for value in node.outputs
                if value.is_graph_output() or any(user not in group for user, _ in value.uses())
            ]
            try:
                opsets = dict(self.model.graph.opset_imports)
                made = add_network(self.graph, list(group), self.names, results, opsets, self.planner)
            except Refused as refused:
                self.refused |= refused.reasons
                continue
            for value, name in zip(results, made):
                self._put(value, name)
            return [node for node in left if node not in group]

    def _group(self, left: list[ir.Node]) -> dict[ir.Node, None]:
        """Nodes that static operators may compute, with what they read."""
        axes: dict[ir.Value, set[int]] = {}  # of what the group makes: those whose extents are not known
        group: dict[ir.Node, None] = {}
        for node in left:
            values = [value for value in node.inputs if value is not None]
            computed = [value for value in values if value.const_value is None]
            if (
                node in self.refused
                or node.op_type not in OF_NETWORKS
                or node in self.arithmetic
                or not computed
                or any(v in self.rows.of for v in values)
                or computes_its_size(node)
            ):
                continue
            if any(value not in axes and value not in self.names for value in computed):
                continue
            if any(node.inputs[place] in computed for place in _SHAPED_BY.get(node.op_type, ()) if place < len(node.inputs)):
                continue
            unknown = {value: axes[value] if value in axes else self._unknown(value) for value in computed}
            result = unknown_axes(node, unknown) if any(unknown.values()) else set()
            if isinstance(result, str):
                self.unfit[node] = result
            else:
                group[node] = None
                axes |= dict.fromkeys(node.outputs, result)
        return group

    def _unknown(self, value: ir.Value) -> set[int]:
        return {axis for axis, dim in enumerate(self.graph.dims(self.names[value])) if isinstance(dim, Unknown)}

    def _read(self, node: ir.Node) -> bool:
        """Reads a node of which everything is known; false if there is no way to."""
        check_indices(node)
        if self._fold(node):
            return True
        if self.rows.read(node):
            self._shape_of_row(node.outputs[0])
            return True
        self.arithmetic.discard(node)
        if node.op_type not in nodes.READERS and node.op_type not in VIEWS:
            return False
        try:
            made = nodes.read(self.nodes, node)
        except WorkloadError as error:
            raise ModelError(f"{self.what}: {name_of(node)} ({node.op_type}): {error}") from error
        if made is None:
            return False
        for value, name in zip(node.outputs, made):
            if value.name:
                self._put(value, name)
        return True

    def _shape_of_row(self, value: ir.Value) -> None:
        import onnx_ir as ir

        if value in self.rows.of:
            row = self.rows.of[value]
            value.shape = ir.Shape(row.shape)
            value.dtype = ir.DataType.from_numpy(np.dtype(row.dtype if row.is_float else np.int64))

    def _fold(self, node: ir.Node) -> bool:
        """Computes a node of constants, such as those that shapes turn out to be."""
        import onnx_ir as ir

        opsets = self.model.graph.opset_imports
        found = _dequantised(node) or (computed(node, opsets) if is_foldable(node, opsets) else None)
        if found is None:
            return False
        for value, array in zip((value for value in node.outputs if value.name), found):
            value.const_value = ir.tensor(array, name=value.name)
            value.shape, value.dtype = ir.Shape(array.shape), ir.DataType.from_numpy(array.dtype)
        return True


def _dequantised(node: ir.Node) -> list[Array]:
    """The result of a DequantizeLinear of constants, which are not folded elsewhere; [] of others."""
    if node.op_type != "DequantizeLinear" or node.attributes.get_int("block_size", 0):
        return []
    numbers, scale = folded(node.outputs[0]), constant_of(node.inputs[1])
    return [] if numbers is None or scale is None else [numbers.astype(scale.dtype)]


def _stored(array: Array) -> Array:
    """Truths as integers."""
    return array.astype(np.uint8) if array.dtype == np.bool_ else array
