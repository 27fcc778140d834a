"""Channel shuffles: the channels of several arrays taken in turn, as one element-wise kernel.

ShuffleNet writes Concat, Reshape to [n, g, m, h, w], a Transpose that exchanges g and m, and Reshape back to
[n, g * m, h, w]. As four nodes these cost two kernels, and changes of layout around them, because a Transpose of five
dimensions has one order in memory. Together they say: channel i of y is channel i // g of array i % g. A shuffle without a
Concat takes slices of one array in turn.

The kernel's y has an axis for the array that an element comes from, and a constant along that axis tells which it is. NaN
and infinity of one array stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from schedsearch.network.chain import Chain, Operand
from schedsearch.network.facts import FLOATS, dtype_of, extents_of, folded, is_onnx, name_of, only_reader
from schedsearch.network.graph import Constant
from schedsearch.typed import ParamsByName

if TYPE_CHECKING:
    import onnx_ir as ir

_ARRAYS = "abcdefgh"  # names of the arrays in the expression
_NUMBER = "i"  # and of the constant
_EXCHANGED = (0, 2, 1, 3, 4)


def concatenated(node: ir.Node, taken: set[ir.Node]) -> Chain | None:
    """The shuffle that begins with a Concat of channels; None if there is none."""
    values = [value for value in node.inputs if value is not None]
    shapes = [extents_of(node, value) for value in values]
    alike = len(shapes[0]) == 4 and all(shape == shapes[0] for shape in shapes)
    axis = node.attributes.get_int("axis", 1) % len(shapes[0])
    if not alike or axis != 1 or not 2 <= len(values) <= len(_ARRAYS) or any(folded(value) is not None for value in values):
        return None
    behind = _shuffled(node.outputs[0], len(values), taken)
    return None if behind is None else _chain([node, *behind], values, shapes[0], [])


def alone(node: ir.Node, taken: set[ir.Node]) -> Chain | None:
    """The shuffle whose Transpose this node is, of one array; None if there is none."""
    five = node.inputs[0]
    before = None if five is None else five.producer()
    x = None if before is None or before.op_type != "Reshape" or before in taken else before.inputs[0]
    if x is None or before is None or folded(x) is not None or x.shape is None:
        return None
    shape, groups = extents_of(before, x), extents_of(node, before.outputs[0])
    if len(shape) != 4 or len(groups) != 5 or not 2 <= groups[1] <= len(_ARRAYS):
        return None
    behind = _shuffled(x, groups[1], taken, before)
    if behind is None:
        return None
    n, c, h, w = shape
    part = c // groups[1]
    cuts = [[shape, [0, number * part, 0, 0], [1, 1, 1, 1]] for number in range(groups[1])]
    return _chain(behind, [x] * groups[1], [n, part, h, w], cuts)


def _shuffled(x: ir.Value, count: int, taken: set[ir.Node], first: ir.Node | None = None) -> list[ir.Node] | None:
    """The nodes that take the channels of `count` parts of x in turn, if nothing else reads what they make in between.

    Args:
        first: the Reshape that begins; default: the only reader of x.
    """
    node = first or _reader(x, taken)
    if node is None or node.op_type != "Reshape" or x.shape is None or dtype_of(x) not in FLOATS:
        return None
    n, c, h, w = shape = extents_of(node, x)
    nodes = [node]
    if extents_of(node, node.outputs[0]) != [n, count, c // count, h, w]:
        return None
    node = _reader(node.outputs[0], taken)
    if node is None or node.op_type != "Transpose" or tuple(node.attributes.get_ints("perm", ())) != _EXCHANGED:
        return None
    nodes.append(node)
    node = _reader(node.outputs[0], taken)
    if node is None or node.op_type != "Reshape" or extents_of(node, node.outputs[0]) != shape:
        return None
    return [*nodes, node]


def _reader(value: ir.Value, taken: set[ir.Node]) -> ir.Node | None:
    reader = only_reader(value)
    return reader if reader is not None and reader not in taken and is_onnx(reader) else None


def _chain(
    nodes: Sequence[ir.Node], values: Sequence[ir.Value], shape: Sequence[int], cuts: Sequence[list[list[int]]]
) -> Chain:
    """The chain of an array's parts or of several arrays, of these extents each."""
    count, y = len(values), nodes[-1].outputs[0]
    arguments: dict[str, Operand] = dict(zip(_ARRAYS, values))
    arguments[_NUMBER] = Constant(f"{name_of(nodes[0])}.arrays", "AB", np.arange(count, dtype=np.float32).reshape(count, 1))
    text = _ARRAYS[count - 1]
    for number in reversed(range(count - 1)):
        text = f"where({_NUMBER} == {number}, {_ARRAYS[number]}, {text})"
    inputs = [[name, dtype_of(value), list(shape), *cut] for name, value, cut in zip(_ARRAYS, values, cuts or [[]] * count)]
    params = {
        "y": extents_of(nodes[-1], y),
        "expression": text,
        "inputs": [*inputs, [_NUMBER, "float32", [count, 1]]],
        "dtype": dtype_of(y),
        "out_dtype": dtype_of(y),
    }
    return Chain("elementwise", params, list(nodes), y, arguments, shuffles=count)


def takes_slice(whole: Sequence[int], begin: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a shuffle can read a slice where it is: one of channels."""
    return all(first == 0 and n == of for axis, (first, n, of) in enumerate(zip(begin, shape, whole)) if axis != 1)


def candidates(chain: Chain, params: ParamsByName, layouts: Sequence[str]) -> Iterator[tuple[ParamsByName, dict[str, str]]]:
    """The parameters of a shuffle, and the layouts of its arrays: where channels are neighbours, and where pixels are."""
    for layout in layouts:
        if layout not in ("NHWC", "NCHW"):
            continue
        last = layout == "NHWC"
        n, c, h, w = params["y"]
        count = chain.shuffles
        made = [n, h * w, c // count, count, 1] if last else [1, n, c // count, count, h * w]
        inputs = []
        for name, dtype, shape, *cut in params["inputs"]:
            lists = [shape, *cut] if name != _NUMBER else []
            inputs.append([name, dtype, *(_in_memory(each, last, place == 2) for place, each in enumerate(lists))])
            if name == _NUMBER:
                inputs[-1].append(shape)
        names = {name: layout if name != _NUMBER else "AB" for name, *_ in params["inputs"]}
        yield {**params, "y": made, "inputs": inputs}, {**names, "y": layout}


def _in_memory(numbers: Sequence[int], last: bool, start: bool) -> list[int]:
    """Extents or distances along n, c, h and w in the order of memory, with an axis of one array; or first positions.

    There are five axes, unlike those of an image, so that only the number of elements is that of the image.
    """
    n, c, h, w = numbers
    pixels, one = (0, 0) if start else (h * w, 1)
    return [n, pixels, c, one, one] if last else [one, n, c, one, pixels]
