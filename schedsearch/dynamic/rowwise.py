"""Which axes of a static operator's result have unknown extents, if those of its arguments have.

An operator that computes every image, row or element by itself may work on arrays of their bounds: what lies beyond the
extents of its arguments only makes what lies beyond those of its result. Others need a dynamic operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from schedsearch.network.elementwise import ELEMENTWISE
from schedsearch.network.facts import constant_of

if TYPE_CHECKING:
    import onnx_ir as ir

_IMAGES = (
    "Conv", "ConvTranspose", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "Resize", "Upsample",
    "DepthToSpace", "SpaceToDepth", "LayerNormalization",
)  # fmt: skip


def unknown_axes(node: ir.Node, unknown: Mapping[ir.Value, set[int]]) -> set[int] | None:
    """The axes of the first result, or None if a static operator would need to know them.

    Args:
        unknown: axes of unknown extents of each computed input.
    """
    x = node.inputs[0]
    axes = unknown.get(x, set()) if x is not None else set()
    rank = None if x is None or x.shape is None else len(x.shape)
    if node.op_type in ELEMENTWISE:
        return _of_elements(unknown)
    if any(of_other for value, of_other in unknown.items() if value is not x):
        return _of_concat(node, unknown) if node.op_type == "Concat" else None
    if node.op_type in _IMAGES:
        return axes if axes <= {0} else None
    if node.op_type in ("Gemm", "MatMul"):
        weight = node.inputs[1]
        is_matrix = constant_of(weight) is not None and rank == 2 and not node.attributes.get_int("transA", 0)
        return axes if is_matrix and axes <= {0} else None
    if rank is None:
        return None
    if node.op_type == "Softmax":
        return axes if node.attributes.get_int("axis", -1) % rank not in axes else None
    if node.op_type == "Concat":
        return _of_concat(node, unknown)
    if node.op_type == "Transpose":
        order = list(node.attributes.get_ints("perm", range(rank)[::-1]))
        return {order.index(axis) for axis in axes}
    return None


def _of_elements(unknown: Mapping[ir.Value, set[int]]) -> set[int] | None:
    """Axes count from the last one."""
    ranks = {value: None if value.shape is None else len(value.shape) for value in unknown}
    if None in ranks.values():
        return None
    most = max(rank for rank in ranks.values() if rank is not None)
    return {axis + most - (ranks[value] or 0) for value, axes in unknown.items() for axis in axes}


def _of_concat(node: ir.Node, unknown: Mapping[ir.Value, set[int]]) -> set[int] | None:
    """All parts have the same unknown axes, and are not put together along one of them."""
    (first, *_) = every = [unknown.get(value, set()) for value in node.inputs if value is not None]
    axis = node.attributes.get_int("axis", 0)
    x = node.inputs[0]
    rank = len(x.shape) if x is not None and x.shape is not None else 1
    return first if axis % rank not in first and all(each == first for each in every) else None
