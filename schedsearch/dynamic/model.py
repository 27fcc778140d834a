"""ONNX models whose sizes are known at run time only, as dynamic graphs.

Every node becomes a call on arrays of their bounds, or a view. What the nodes of static networks become is read by
`schedsearch.network`; here are those whose results have sizes that only the device knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.dynamic.graph import DynamicGraph, Size
from schedsearch.errors import did_you_mean
from schedsearch.network.chain import Chain
from schedsearch.network.facts import constant_input, constant_of, dtype_of, inputs_of, is_given, is_onnx, name_of
from schedsearch.network.indexing import INDEXED
from schedsearch.network.model import ModelError, listed, needed
from schedsearch.ops.nms import LOWEST
from schedsearch.workload import Workload

if TYPE_CHECKING:
    import onnx_ir as ir

_VIEWS = ("Identity", "Squeeze", "Unsqueeze", "Flatten")
_EXPRESSIONS = {
    "Add": "a + b", "Sub": "a - b", "Mul": "a * b", "Div": "a / b", "Relu": "relu(a)", "Sigmoid": "sigmoid(a)", "Neg": "-a",
    "Tanh": "tanh(a)", "Exp": "exp(a)", "Sqrt": "sqrt(a)", "Abs": "abs(a)",
}  # fmt: skip


def read_graph(path: str | Path, sizes: Mapping[str, Size] | None = None) -> DynamicGraph:
    """The dynamic graph of an ONNX file.

    Args:
        path: a file in ONNX's binary format.
        sizes: name of a dynamic dimension of inputs -> its bounds.

    Raises:
        ModelError: the file is missing or damaged, a dimension has no bounds or no name, bounds belong to no dimension,
            a node has no operator (all are listed), an argument that must be constant is computed, or a package of the
            extra `network` is missing.
        UsageError: a node cannot take an array whose extents are known at run time only.
    """
    needed()
    import onnx_ir as ir
    from onnx_ir.passes.common import LiftConstantsToInitializersPass

    path = Path(path)
    if not path.is_file():
        raise ModelError(f"{path} is not a file; give an ONNX model, e.g. model.onnx")
    try:
        model = LiftConstantsToInitializersPass(size_limit=0)(ir.load(path)).model
        model.graph.sort()
    except Exception as error:  # as in `schedsearch.network.model`: damaged graphs can break any rule
        raise ModelError(f"{path} is not an ONNX model, or it is damaged: {error}") from error
    missing: dict[str, list[str]] = {}
    for node in model.graph:
        if not is_onnx(node) or node.op_type not in TAKEN:
            missing.setdefault(node.op_type, []).append(name_of(node))
    if missing:
        lines = "; ".join(f"{op}: {listed(names)}" for op, names in missing.items())
        raise ModelError(f"dynamic graphs have no operator for these nodes of {path}: {lines}; allowed: {', '.join(TAKEN)}")
    return _Reader(model, str(path), sizes or {}).read()


class _Reader:
    def __init__(self, model: ir.Model, path: str, sizes: Mapping[str, Size]) -> None:
        self.model, self.path, self.sizes = model, path, sizes
        self.graph = DynamicGraph()
        self.names: dict[ir.Value, str] = {}  # value of the model -> value of the graph

    def read(self) -> DynamicGraph:
        used: set[str] = set()
        for value in self.model.graph.inputs:
            if value.const_value is None:
                shape = self._input_shape(value, used)
                self.names[value] = self.graph.input(str(value.name), shape, dtype_of(value))
                self._put(value, self.names[value])
        if unknown := [name for name in self.sizes if name not in used]:
            allowed = f"allowed: {', '.join(sorted(used)) or 'none'}"
            raise ModelError(
                f"{self.path} has no dynamic dimension {unknown[0]!r}{did_you_mean(unknown[0], used)}; {allowed}"
            )
        for node in self.model.graph:
            self._read(node)
        for value in self.model.graph.outputs:
            self.graph.output(self.names[value])
        return self.graph

    def _input_shape(self, value: ir.Value, used: set[str]) -> list[int | Size]:
        if value.shape is None:
            raise ModelError(
                f"{self.path}: input {value.name!r} has no rank; give it a shape, with names for what is dynamic"
            )
        shape: list[int | Size] = []
        for axis, extent in enumerate(value.shape):
            name = None if isinstance(extent, int) else extent.value
            if isinstance(extent, int):
                shape.append(extent)
            elif name in self.sizes:
                used.add(str(name))
                shape.append(self.sizes[str(name)])
            else:
                what = f"is {name!r}, which has no bounds; give them, e.g. Size({name!r}, 1, 64)" if name else "has no name"
                raise ModelError(f"{self.path}: dimension {axis} of input {value.name!r} {what}")
        return shape

    def _put(self, value: ir.Value, name: str) -> None:
        """Later nodes find the array by its value, and its bound as the shape."""
        import onnx_ir as ir

        self.names[value] = name
        value.shape = ir.Shape(self.graph.bound(name).shape)
        value.dtype = ir.DataType.from_numpy(np.dtype(self.graph.bound(name).dtype))

    def _operand(self, value: ir.Value) -> str:
        if value not in self.names:
            numbers = constant_of(value)
            if numbers is None:
                raise ModelError(f"{self.path}: nothing makes {value.name!r}")
            self.names[value] = self.graph.constant(str(value.name), numbers if numbers.ndim else numbers.reshape(1))
        return self.names[value]

    def _read(self, node: ir.Node) -> None:
        if node.op_type in _VIEWS:
            return self._view(node)
        workload, values = self._workload(node)
        call = str(node.outputs[0].name)
        self.graph.call(workload, *(self._operand(value) for value in values), name=call)
        made = [output.name for output in workload.outputs if not output.name.endswith("_extents")]
        for value, output in zip(node.outputs, made):
            self._put(value, f"{call}.{output}")
        if (
            node.op_type == "Gather"
            and (index := node.inputs[1]) is not None
            and index.shape is not None
            and not len(index.shape)
        ):
            kept = list(self.graph.bound(f"{call}.y").shape)  # the axis of a single index goes
            del kept[workload.params["axis"]]
            self._put(node.outputs[0], self.graph.view(f"{call}.y", kept, name=f"{call}.at"))
        return None

    def _workload(self, node: ir.Node) -> tuple[Workload, list[ir.Value]]:
        if node.op_type in INDEXED:
            return self._indexed(node)
        if node.op_type in _EXPRESSIONS:
            return self._elementwise(node)
        return _READERS[node.op_type](node)

    def _indexed(self, node: ir.Node) -> tuple[Workload, list[ir.Value]]:
        chain = INDEXED[node.op_type](node, set())
        if not isinstance(chain, Chain):
            raise ModelError(f"{self.path}: {chain}")
        params = dict(chain.params)
        names = {"gather": ("x", "indices"), "scatter": ("x", "indices", "updates"), "topk": ("x",)}
        arguments = names.get(chain.op, ("x", "rois", "batch_indices"))
        values = dict(zip(arguments, inputs_of(node, len(arguments))))
        counted = {"gather": "indices", "scatter": "indices", "topk": "x", "roi_align": "rois"}[chain.op]
        params["dynamic"] = constant_of(values[counted]) is None and self.graph.is_dynamic(self._operand(values[counted]))
        if chain.op == "roi_align":
            params["layout"] = "NCHW"
        return Workload(chain.op, params), list(values.values())

    def _elementwise(self, node: ir.Node) -> tuple[Workload, list[ir.Value]]:
        values = [value for value in node.inputs if value is not None]
        arrays = [self.graph.bound(self._operand(value)) for value in values]
        shape = np.broadcast_shapes(*(array.shape for array in arrays))
        inputs = [(name, array.dtype, array.shape) for name, array in zip("ab", arrays)]
        params = {"y": shape, "expression": _EXPRESSIONS[node.op_type], "inputs": inputs, "dtype": arrays[0].dtype}
        return Workload("elementwise", params), values

    def _view(self, node: ir.Node) -> None:
        (x,) = inputs_of(node, 1)
        array = self._operand(x)
        shape = list(self.graph.bound(array).shape)
        if node.op_type in ("Squeeze", "Unsqueeze"):
            given = constant_input(node, 1) if is_given(node, 1) else node.attributes.get_ints("axes", ())
            if given is None:
                raise ModelError(f"{self.path}: {name_of(node)} has axes that are computed; allowed: constants")
            if node.op_type == "Squeeze":
                axes = {int(axis) % len(shape) for axis in given} or {n for n, extent in enumerate(shape) if extent == 1}
                if wrong := [axis for axis in axes if shape[axis] != 1]:
                    raise ModelError(
                        f"{self.path}: {name_of(node)} drops dimension {wrong[0]} of {shape}; allowed: of extent 1"
                    )
                shape = [extent for axis, extent in enumerate(shape) if axis not in axes]
            else:
                for axis in sorted(int(axis) % (len(shape) + len(given)) for axis in given):
                    shape.insert(axis, 1)
        elif node.op_type == "Flatten":
            axis = node.attributes.get_int("axis", 1)
            axis += len(shape) if axis < 0 else 0
            shape = [int(np.prod(shape[:axis], dtype=np.int64)), int(np.prod(shape[axis:], dtype=np.int64))]
        same = shape == list(self.graph.bound(array).shape)
        self._put(node.outputs[0], array if same else self.graph.view(array, shape, name=str(node.outputs[0].name)))


def _number(node: ir.Node, place: int, default: float) -> float:
    if not is_given(node, place):
        return default
    found = constant_input(node, place)
    if found is None:
        raise ModelError(f"{name_of(node)} has an input {place} that is computed; allowed: a constant")
    return float(found.reshape(-1)[0])


def _nms(node: ir.Node) -> tuple[Workload, list[ir.Value]]:
    boxes, scores = inputs_of(node, 2)
    n, classes, count = map(int, scores.shape or ())
    most = int(_number(node, 2, 0))
    if most < 1:
        raise ModelError(f"{name_of(node)} keeps {most} boxes; allowed: a max_output_boxes_per_class of 1 or more")
    params = {
        "n": n, "classes": classes, "boxes": count, "max_output": most, "iou_threshold": _number(node, 3, 0.0),
        "score_threshold": _number(node, 4, LOWEST),
        "center_point_box": bool(node.attributes.get_int("center_point_box", 0)),
    }  # fmt: skip
    return Workload("nms", params), [boxes, scores]


def _nonzero(node: ir.Node) -> tuple[Workload, list[ir.Value]]:
    (x,) = inputs_of(node, 1)
    return Workload("nonzero", {"x": tuple(map(int, x.shape or ())), "dtype": dtype_of(x)}), [x]


def _slice(node: ir.Node) -> tuple[Workload, list[ir.Value]]:
    x, begin, end = inputs_of(node, 3)
    axes = constant_input(node, 3)
    if axes is None and is_given(node, 3):
        raise ModelError(f"{name_of(node)} has axes that are computed; allowed: constants")
    strides = node.inputs[4] if is_given(node, 4) else None
    shape, entries = tuple(map(int, x.shape or ())), int(begin.shape[0]) if begin.shape is not None else 0
    params: dict[str, Any] = {
        "x": shape, "entries": entries, "axes": () if axes is None else tuple(int(axis) % len(shape) for axis in axes),
        "strided": strides is not None, "dynamic": True, "dtype": dtype_of(x), "index_dtype": dtype_of(begin),
    }  # fmt: skip
    return Workload("dyn_strided_slice", params), [x, begin, end, *([] if strides is None else [strides])]


_READERS: Mapping[str, Callable[[Any], tuple[Workload, list[Any]]]] = {
    "NonMaxSuppression": _nms,
    "NonZero": _nonzero,
    "Slice": _slice,
}
TAKEN = (*_READERS, *INDEXED, *_EXPRESSIONS, *_VIEWS)
