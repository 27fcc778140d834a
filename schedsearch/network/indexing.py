"""Nodes that choose elements: gathers and scatters by indices, the largest or smallest numbers, parts of images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from schedsearch.errors import WorkloadError
from schedsearch.network.chain import Chain, Operand, Read
from schedsearch.network.facts import (
    constant_input,
    constant_of,
    dtype_of,
    extents_of,
    inputs_of,
    is_onnx,
    name_of,
)
from schedsearch.network.graph import Constant, axes_of
from schedsearch.network.invalid import ModelError
from schedsearch.ops.wrong_index import out_of_range
from schedsearch.typed import ParamsByName
from schedsearch.workload import Workload

if TYPE_CHECKING:
    import onnx_ir as ir

_SHIFTED_OPSET = 16  # before it, regions of RoiAlign were not shifted
_BY = {
    "Gather": "slices",
    "GatherElements": "elements",
    "GatherND": "tuples",
    "ScatterElements": "elements",
    "ScatterND": "tuples",
}


class ConstantIndexError(ModelError):
    """A constant index of a model is out of range."""


def check_indices(node: ir.Node) -> None:
    """Looks at indices that are constants, as far as the extents of the axes that they belong to are known.

    Raises:
        ConstantIndexError: one is not in -extent to extent - 1, which is what ONNX allows.
    """
    if not is_onnx(node) or node.op_type not in _BY:
        return
    x, places = inputs_of(node, 2)
    indices = constant_of(places)
    if indices is None or not indices.size or x.shape is None:
        return
    first = node.attributes.get_int("batch_dims", 0) if node.op_type == "GatherND" else 0
    if _BY[node.op_type] == "tuples":  # a number of each for axes that follow one another
        axes = [*range(first, first + indices.shape[-1])]
        columns = [indices[..., place : place + 1] for place in range(len(axes))]
    else:
        axes, columns = [node.attributes.get_int("axis", 0)], [indices]
    for place, (axis, column) in enumerate(zip(axes, columns)):
        if not -len(x.shape) <= axis < len(x.shape) or not isinstance(extent := x.shape[axis], int):
            continue
        wrong = np.argwhere((column < -extent) | (column >= extent))
        if len(wrong):
            where = [int(each) for each in wrong[0]]
            got = int(column[tuple(where)])
            if len(axes) > 1:
                where[-1] = place
            text = out_of_range(str(places.name), where, got, axis, str(x.name), extent)
            raise ConstantIndexError(f"node {name_of(node)} ({node.op_type}): {text}. Correct the model")


def _indexed(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    check_indices(node)
    names = ("x", "indices") if node.op_type.startswith("Gather") else ("x", "indices", "updates")
    op, by, read = "gather" if len(names) == 2 else "scatter", _BY[node.op_type], node.attributes
    x, indices, *_ = values = inputs_of(node, len(names))
    params: ParamsByName = {
        "x": extents_of(node, x), "indices": extents_of(node, indices) or [1], "by": by, "dtype": dtype_of(x),
        "index_dtype": dtype_of(indices),
    }  # fmt: skip
    if by != "tuples":
        params["axis"] = read.get_int("axis", 0)
    elif op == "gather":
        params["batch_dims"] = read.get_int("batch_dims", 0)
    if op == "scatter":
        params["reduction"] = read.get_string("reduction", "none")
    return chain_of(node, op, params, dict(zip(names, values)))


def chain_of(node: ir.Node, op: str, params: ParamsByName, arguments: Mapping[str, ir.Value]) -> Chain | str:
    """The chain of one node, or why the operator does not do it."""
    try:
        Workload(op, params)
    except WorkloadError as error:
        return f"{name_of(node)}: {error}"
    return Chain(op, params, [node], node.outputs[0], {name: operand(value) for name, value in arguments.items()})


def operand(value: ir.Value) -> Operand:
    """A value of the model, or the constant that it is."""
    constant = constant_of(value)
    if constant is None:
        return value
    constant = constant if constant.ndim else constant.reshape(1)  # kernels take a number as a row of one
    return Constant(str(value.name), axes_of(constant.ndim), constant)


def _topk(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    (x,) = inputs_of(node, 1)
    count = constant_input(node, 1)
    if count is None:
        return f"{name_of(node)} has a k that is computed; allowed: a constant"
    if len(node.outputs) < 2 or not all(value.name for value in node.outputs):
        return f"{name_of(node)} gives only one of values and indices; allowed: both"
    read = node.attributes
    params: ParamsByName = {
        "x": extents_of(node, x), "k": int(count.reshape(-1)[0]), "axis": read.get_int("axis", -1),
        "largest": bool(read.get_int("largest", 1)), "dtype": dtype_of(x),
    }  # fmt: skip
    chain = chain_of(node, "topk", params, {"x": x})
    if isinstance(chain, Chain):
        chain.others = {"indices": node.outputs[1]}
    return chain


def _roi_align(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    x, rois, batch = inputs_of(node, 3)
    read = node.attributes
    old = node.graph is not None and node.graph.opset_imports.get("", _SHIFTED_OPSET) < _SHIFTED_OPSET
    params: ParamsByName = dict(zip("nchw", extents_of(node, x)))
    params |= {
        "rois": extents_of(node, rois)[0], "oh": read.get_int("output_height", 1), "ow": read.get_int("output_width", 1),
        "mode": {"avg": "average"}.get(mode := read.get_string("mode", "avg"), mode),
        "sampling_ratio": read.get_int("sampling_ratio", 0), "spatial_scale": read.get_float("spatial_scale", 1.0),
        "coordinates": read.get_string("coordinate_transformation_mode", "output_half_pixel" if old else "half_pixel"),
        "dtype": dtype_of(x), "rois_dtype": dtype_of(rois),
    }  # fmt: skip
    return chain_of(node, "roi_align", params, {"x": x, "rois": rois, "batch_indices": batch})


INDEXED: Mapping[str, Read] = {**dict.fromkeys(_BY, _indexed), "TopK": _topk, "RoiAlign": _roi_align}
