"""Which nodes have shapes that numbers decide, and what becomes of the shapes that a model declares for these.

A model may declare the shape of a Reshape whose second input is given in a call. The declaration then holds for some calls
only. Nothing may be folded from it, and no kernel may be chosen by it. It stays useful where ONNX Runtime computes the node:
there every call compares the shape with the declared one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from schedsearch.network.facts import RANDOM, is_given, is_known, is_onnx
from schedsearch.network.settings import SETTINGS

if TYPE_CHECKING:
    import onnx_ir as ir

_NAMELESS = "unk__"
_COUNTING = ("Compress", "NonMaxSuppression", "NonZero", "StringSplit", "Unique")  # results as long as data says


def forget_decided_shapes(model: ir.Model) -> dict[str, ir.Shape]:
    """Forgets the shapes of values that numbers decide, and of what is computed from these. What follows from the inputs all
    the same is inferred anew.

    Args:
        model: its nodes are in order. It is changed.

    Returns:
        Value -> the shape that it had.
    """
    found: dict[str, ir.Shape] = {}
    for value in _decided(model):
        if value.shape is not None and value.const_value is None:
            found[str(value.name)] = value.shape
            value.shape = None
    return found


def remember_shapes(model: ir.Model, shapes: Mapping[str, ir.Shape]) -> None:
    """Gives values back the shapes of `forget_decided_shapes` that do not follow from the inputs, and those behind them."""
    import onnx_ir as ir
    from onnx_ir.passes.common import ShapeInferencePass

    made = [value for node in model.graph for value in node.outputs]
    lacking = [value for value in made if value.name in shapes and not is_known(value)]
    for value in lacking:
        value.shape = shapes[str(value.name)]
    if not lacking:
        return
    ShapeInferencePass()(model)
    for value in made:  # onnx gives a name to every extent that it does not know
        if value.shape is not None and any(str(each).startswith(_NAMELESS) for each in value.shape):
            value.shape = ir.Shape([None if str(each).startswith(_NAMELESS) else each for each in value.shape])


def _decided(model: ir.Model) -> Iterator[ir.Value]:
    """The values whose shapes numbers decide, as far as operators tell: numbers that are given in a call or are random."""
    numbers: set[ir.Value | None] = set()  # values whose numbers differ from call to call
    sized: set[ir.Value | None] = set()  # whose shapes do
    for node in model.graph.all_nodes():
        read = [value for value in node.inputs if value is not None and value.const_value is None]
        changing = [value for value in read if value in numbers or value.is_graph_input()]
        settings = {node.inputs[place] for place in SETTINGS.get(node.op_type, ()) if is_given(node, place)}
        own = is_onnx(node)
        of_sizes = not sized.isdisjoint(read)
        if of_sizes or (own and (node.op_type in _COUNTING or not settings.isdisjoint(changing))):
            sized.update(node.outputs)
            yield from node.outputs
        if of_sizes or (changing and not (own and node.op_type in ("Shape", "Size"))) or node.op_type in RANDOM:
            numbers.update(node.outputs)
