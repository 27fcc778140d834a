"""Nodes that give the same elements another shape, and which: of fixed extents, of bounds, and of rows of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from schedsearch.network.facts import constant_input, is_given, name_of, number_of
from schedsearch.network.invalid import ModelError

if TYPE_CHECKING:
    import onnx_ir as ir

VIEWS = ("Identity", "Flatten", "Reshape", "Squeeze", "Unsqueeze", "Dropout")  # they compute nothing


def viewed(node: ir.Node, shape: Sequence[int], target: Sequence[int] | None = None) -> list[int] | None:
    """The shape that a view gives to an array; None if a Reshape to it is not possible, or is computed.

    Args:
        node: one of `VIEWS`.
        shape: of its input.
        target: what the second input of a Reshape holds; default: the constant that it is.

    Raises:
        ModelError: axes are computed, or one of them cannot be dropped.
    """
    op = node.op_type
    if op == "Squeeze":
        dropped = _axes(node, len(shape)) or [axis for axis, extent in enumerate(shape) if extent == 1]
        if wrong := [axis for axis in dropped if shape[axis] != 1]:
            raise ModelError(f"{name_of(node)} drops dimension {wrong[0]} of {list(shape)}; allowed: of extent 1")
        return [extent for axis, extent in enumerate(shape) if axis not in dropped]
    if op == "Unsqueeze":
        found, added = list(shape), _axes(node, 0)
        for axis in sorted(axis % (len(shape) + len(added)) for axis in added):
            found.insert(axis, 1)
        return found
    if op == "Flatten":
        axis = node.attributes.get_int("axis", 1)
        axis += len(shape) if axis < 0 else 0
        return [math.prod(shape[:axis]), math.prod(shape[axis:])]
    if op == "Reshape":
        constant = constant_input(node, 1)
        target = [int(extent) for extent in constant] if target is None and constant is not None else target
        return None if target is None else _reshaped(node, shape, target)
    return list(shape)


def random_problem(node: ir.Node) -> str:
    """Why a Dropout is no view: it is in training mode, or something reads its mask; empty if it is one."""
    if node.op_type != "Dropout":
        return ""
    trains = is_given(node, 2) and number_of(constant_input(node, 2)) != 0.0
    masks = any(list(mask.uses()) or mask.is_graph_output() for mask in node.outputs[1:])
    if not (trains or masks):
        return ""
    return f"{name_of(node)} is in training mode or gives its mask; export the model for inference"


def _axes(node: ir.Node, rank: int) -> list[int]:
    """Constant axes, from the front if the rank is known; none if the node has none."""
    given = constant_input(node, 1) if is_given(node, 1) else node.attributes.get_ints("axes", ())
    if given is None:
        raise ModelError(f"{name_of(node)} has axes that are computed; allowed: constants")
    return [int(axis) % rank if rank else int(axis) for axis in given]


def _reshaped(node: ir.Node, shape: Sequence[int], target: Sequence[int]) -> list[int] | None:
    """0 is the extent of the same axis, and -1 what is left."""
    keeps = not node.attributes.get_int("allowzero", 0)
    if keeps and any(not extent and axis >= len(shape) for axis, extent in enumerate(target)):
        return None
    found = [shape[axis] if not extent and keeps else extent for axis, extent in enumerate(target)]
    size, rest = math.prod(shape), math.prod(extent for extent in found if extent != -1)
    if -1 in found and rest:
        found[found.index(-1)] = size // rest
    return found if math.prod(found) == size else None
