"""Facts about nodes and values of an ONNX graph, by our names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from schedsearch.network.invalid import ModelError, UnknownShapeError
from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx_ir as ir

    from schedsearch.network.graph import Impossible

FLOATS = ("float16", "bfloat16", "float32")
INTEGERS = ("int8", "uint8")
OF_RUNTIME = ("SimplifiedLayerNormalization",)  # ONNX Runtime's own operators which it has in ONNX's domain
RANDOM = ("Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
"""Operators whose results may differ from run to run."""
CONTROL = "schedsearch.control"  # the domain of nodes whose bodies are models of their own: `control.isolated` makes them
BODIES = "schedsearch.bodies"  # these models, in the meta data of such a node
_DECLARED = "schedsearch.declared_shape"  # in the meta data of a value: what the model declares and its inputs contradict
_MOST_DECIDING = 8  # elements of an input that is a setting rather than data
_DTYPES = {"FLOAT": "float32", "DOUBLE": "float64", "BOOL": "uint8"}  # where a dtype has another name than ONNX's


def is_onnx(node: ir.Node) -> bool:
    """Whether the node is of ONNX's own operators."""
    return node.domain in ("", "ai.onnx")


def has_bodies(node: ir.Node) -> bool:
    """Whether a node has graphs inside of it, such as the branches of an If."""
    return any(each.type.name in ("GRAPH", "GRAPHS") for each in node.attributes.values())


def isolated(model: ir.Model) -> Iterator[tuple[ir.Node, tuple[ir.Model | Impossible, ...]]]:
    """The nodes of a graph whose bodies are models, with these: of an If, for a true and for a false condition."""
    for node in model.graph:
        if node.domain == CONTROL:
            yield node, node.meta[BODIES]


def name_of(node: ir.Node) -> str:
    """The name of a node; of a node without one, its operator and its first result."""
    return node.name or f"{node.op_type} -> {node.outputs[0].name}"


def inputs_of(node: ir.Node, count: int) -> list[ir.Value]:
    """The first inputs of a node.

    Raises:
        ModelError: one is missing.
    """
    values = node.inputs[:count]
    if len(values) < count or any(value is None for value in values):
        raise ModelError(f"node {name_of(node)} ({node.op_type}) has fewer than {count} inputs")
    return [value for value in values if value is not None]


def optional_input(node: ir.Node, place: int) -> ir.Value | None:
    """An input that may be missing."""
    return node.inputs[place] if place < len(node.inputs) else None


def extents_of(node: ir.Node, value: ir.Value) -> list[int]:
    """The shape of a value that a node reads or writes.

    Raises:
        UnknownShapeError: it is not known.
    """
    if value.shape is None or not value.shape.is_static():
        got = "is unknown" if value.shape is None else f"is {value.shape}"
        if (declared := value.meta.get(_DECLARED)) is not None:
            got += f", which contradicts the {declared} that the model declares"
        raise UnknownShapeError(
            f"the shape of {value.name!r} at node {name_of(node)} ({node.op_type}) {got}: {why_unknown(value)}"
        )
    return [int(extent) for extent in value.shape]


def note_wrong_shape(value: ir.Value) -> None:
    """Keeps a declared shape that contradicts the inputs, for the message of `extents_of`."""
    value.meta[_DECLARED] = str(value.shape)


def partial_extents(node: ir.Node, place: int) -> list[int | None] | None:
    """The shape of an input that may be missing, as far as it is known: None for an extent, or for all."""
    value = optional_input(node, place)
    return None if value is None else partial_shape(value)


def partial_shape(value: ir.Value) -> list[int | None] | None:
    """The shape of a value, as far as it is known."""
    return None if value.shape is None else [each if isinstance(each, int) else None for each in value.shape]


def differ(one: int | None, other: int | None) -> bool:
    """Whether two extents are known and not the same."""
    return one is not None and other is not None and one != other


def is_known(value: ir.Value) -> bool:
    """Whether the shape of a value is known."""
    return value.const_value is not None or (value.shape is not None and value.shape.is_static())


def deciding(value: ir.Value) -> set[str]:
    """The inputs that a value depends on, if all of them are a few integers or truths; none if one is data."""
    found: set[str] = set()
    left, seen = [value], {value}
    while left:
        each = left.pop()
        maker = each.producer()
        if each.is_graph_input():
            if not is_known(each) or dtype_of(each) in FLOATS or _count(each) > _MOST_DECIDING:
                return set()
            found.add(str(each.name))
        elif maker is not None:
            if has_bodies(maker):
                return set()
            left += [other for other in maker.inputs if other is not None and other not in seen]
            seen.update(other for other in maker.inputs if other is not None)
    return found


def _count(value: ir.Value) -> int:
    assert value.shape is not None
    return math.prod(int(extent) for extent in value.shape)


def _first_unknown(value: ir.Value) -> ir.Value:
    """The first of the values before one of unknown shape, and of that one, whose shape is not known."""
    while (maker := value.producer()) is not None:
        before = next((each for each in maker.inputs if each is not None and not is_known(each)), None)
        if before is None:
            break
        value = before
    return value


def is_decided_in_calls(value: ir.Value) -> bool:
    """Whether numbers that a call computes or gives decide the shape of a value."""
    maker = None if is_known(value) else _first_unknown(value).producer()
    return maker is not None and is_onnx(maker) and not has_bodies(maker)


def why_unknown(value: ir.Value) -> str:
    """Where it comes from that the shape of a value is not known, and what to do."""
    value = _first_unknown(value)
    maker = value.producer()
    if maker is None:
        return f"the input {value.name!r} has open extents; give its shape, e.g. with --shape"
    node = f"node {name_of(maker)} ({maker.op_type})"
    if not is_onnx(maker):
        return f"{node} is of the domain {maker.domain!r}, of which ONNX knows no shapes; add it to the model's value_info"
    if has_bodies(maker):
        several = f"{node} has branches or turns, which may give several shapes"
        return f"{several}; where an input of the model decides that, give it a value: --input NAME=VALUE"
    return f"{node} makes {value.name!r}, whose extents depend on numbers that are computed or given in a call"


def dtype_of(value: ir.Value) -> str:
    """The dtype of a value by our names; empty if unknown."""
    return "" if value.dtype is None else _DTYPES.get(value.dtype.name, value.dtype.name.lower())


def constant_of(value: ir.Value | None) -> Array | None:
    """The numbers of a constant; None for an input that is missing or computed. bfloat16 comes as float32."""
    if value is None or value.const_value is None:
        return None
    array: Array = value.const_value.numpy()
    return array.astype("float32") if array.dtype.name == "bfloat16" else array


def constant_input(node: ir.Node, place: int) -> Array | None:
    """The numbers of an input that is a constant; None for one that is missing or computed."""
    return constant_of(optional_input(node, place))


def is_given(node: ir.Node, place: int) -> bool:
    """Whether a node has an input at this place."""
    return optional_input(node, place) is not None


def only_reader(value: ir.Value) -> ir.Node | None:
    """The only node that reads a value; None if there are several or none, or if the value leaves the network."""
    uses = list(value.uses())
    return uses[0][0] if len(uses) == 1 and not value.is_graph_output() else None


def folded(value: ir.Value | None) -> Array | None:
    """As `constant_of`, also of constants that a DequantizeLinear converts."""
    found = constant_of(value)
    producer = None if value is None else value.producer()
    if found is not None or producer is None or producer.op_type != "DequantizeLinear":
        return found
    if producer.attributes.get_int("block_size", 0):
        return None
    whole, scale, zero_point = (constant_input(producer, place) for place in range(3))
    if whole is None or scale is None or (is_given(producer, 2) and zero_point is None):
        return None
    if scale.size > 1:
        axis = producer.attributes.get_int("axis", 1) % whole.ndim
        along = [-1 if place == axis else 1 for place in range(whole.ndim)]
        scale = scale.reshape(along)
        zero_point = None if zero_point is None else zero_point.reshape(along)
    numbers: Array = (
        whole.astype("float32") if zero_point is None else whole.astype("float32") - zero_point.astype("float32")
    )
    numbers *= scale.astype("float32")
    return numbers


def number_of(array: Array | None) -> float | None:
    """The number that all elements of a constant have; None if they differ or the constant is missing."""
    if array is None or not array.size or (array != array.flat[0]).any():
        return None
    return float(array.flat[0])
