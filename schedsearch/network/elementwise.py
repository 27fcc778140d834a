"""Chains of element-wise nodes as one expression.

A chain ends at one node and grows towards its inputs: a node in front of it belongs to it if nothing outside of the chain
reads its result. A chain computes floats in float32 and rounds its result, so a Cast to a shorter dtype ends one. Others in
such a dtype are not rounded one by one, unless a comparison decides by them. Integers are exact. Nodes of smaller shapes are
computed again for every element that they are broadcast to, and integers are dequantised by every chain that reads them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.network.chain import Chain, Operand, Read
from schedsearch.network.element_texts import (
    MOST_LITERAL,
    OPERATORS,
    Element,
    Kind,
    decides,
    literal,
    problem,
    reads_of,
    rounds,
    whole_literal,
    write,
)
from schedsearch.network.epilogue import batch_norm_operands
from schedsearch.network.facts import FLOATS, INTEGERS, constant_of, dtype_of, extents_of, folded, is_given, is_onnx, name_of
from schedsearch.network.graph import Constant, axes_of
from schedsearch.network.settings import size_problem
from schedsearch.ops.expressions import ExpressionError, parse_expression
from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx_ir as ir


MOST_NODES = 32
_LETTERS = "abcdefghijklmnop"  # as many as `elementwise` has inputs


_ENDS = ("QuantizeLinear", "DequantizeLinear")  # others may read the integers between these
_CONVERSIONS = (*_ENDS, "BatchNormalization")
_SHORT = ("float16", "bfloat16")


def _read(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    """The chain that ends at a node."""
    if wrong := problem(node):
        return wrong
    nodes = _grown(node, taken)
    while True:
        expression = _Expression(node.outputs[0])
        text = expression.written(nodes)
        if text is not None and expression.inputs and len(expression.inputs) <= len(_LETTERS) and _is_possible(text):
            return expression.chain(nodes, text)
        if len(nodes) == 1:
            return f"{name_of(node)} has an input that is computed, where only a constant is possible"
        nodes = nodes[1:]  # the node in front has no text, or makes it too long; it stands alone, or is reported


def _is_possible(text: str) -> bool:
    try:
        parse_expression(text)
    except ExpressionError:  # too long or too deep
        return False
    return True


def _grown(root: ir.Node, taken: set[ir.Node]) -> list[ir.Node]:
    """The nodes of the chain that ends at `root`, in order."""
    chain = [root]
    changed = True
    while changed and len(chain) < MOST_NODES:
        changed = False
        for value in [value for node in chain for value in node.inputs if value is not None]:
            producer = value.producer()
            if producer is None or producer in chain or producer in taken or not _joins(producer, chain):
                continue
            chain.insert(0, producer)
            changed = True
            break
    return _sorted(chain)


def _joins(node: ir.Node, chain: Sequence[ir.Node]) -> bool:
    if node.op_type not in ELEMENTWISE or node.op_type in _ENDS or not is_onnx(node):
        return False
    if problem(node) or size_problem(node) or rounds(node):
        return False
    value = node.outputs[0]
    if dtype_of(value) in _SHORT and any(user in chain and decides(user) for user, _ in value.uses()):
        return False
    return not value.is_graph_output() and all(user in chain for user, _ in value.uses())


def _sorted(nodes: Iterable[ir.Node]) -> list[ir.Node]:
    """The nodes so that each comes after those whose results it reads."""
    waiting, found = list(nodes), list[Any]()
    while waiting:
        ready = [
            node
            for node in waiting
            if all(value is None or value.producer() not in waiting or value.producer() is node for value in node.inputs)
        ]
        found += ready
        waiting = [node for node in waiting if node not in ready]
    return found


@dataclass
class _Expression:
    """An expression while it is written.

    Attributes:
        y: the result.
        inputs: name in the expression -> array.
    """

    y: ir.Value
    inputs: dict[str, Operand] = field(default_factory=dict)
    texts: dict[ir.Value, Element] = field(default_factory=dict)
    steps: list[str] = field(default_factory=list)

    def written(self, nodes: Sequence[ir.Node]) -> str | None:
        """The text; None if a node cannot be written."""
        found: Element | None = None
        for node in nodes:
            found = self._node(node, last=node is nodes[-1])
            if found is None:
                return None
            value = node.outputs[0]
            if len(list(value.uses())) > 1 and node is not nodes[-1]:
                self.steps.append(f"t{len(self.steps)} = {_bare(found.text)}")
                found = Element(f"t{len(self.steps) - 1}", found.kind)
            self.texts[value] = found
        return "; ".join([*self.steps, _bare(found.text if found is not None else "")])

    def _node(self, node: ir.Node, *, last: bool) -> Element | None:
        if node.op_type in OPERATORS:
            elements = [self._element(node, value) for value in reads_of(node)]
            known = [each for each in elements if each is not None]
            return write(node, known, last=last) if len(known) == len(elements) else None
        assert node.inputs[0] is not None
        x = self._element(node, node.inputs[0])
        text = None if x is None else self._converted(node, x.text)
        return None if text is None else Element(text, "float")

    def _converted(self, node: ir.Node, x: str) -> str | None:
        """BatchNormalization, QuantizeLinear and DequantizeLinear."""
        if node.op_type == "BatchNormalization":
            operands = batch_norm_operands(node)
            if operands is None:
                return None
            scale, shift = (self._along(node, operands[name].array, 1, f".{name}") for name in ("scale", "shift"))
            return f"({x} * {scale} + {shift})"
        return self._conversion(node, x)

    def _conversion(self, node: ir.Node, x: str) -> str | None:
        """QuantizeLinear or DequantizeLinear."""
        by = self._linear(node, 1, ".scale")
        offset = self._linear(node, 2, ".zero_point") if is_given(node, 2) else "0"
        if by is None or offset is None:
            return None
        return f"{'quantise' if node.op_type == 'QuantizeLinear' else 'dequantise'}({x}, {by}, {offset})"

    def _element(self, node: ir.Node, value: ir.Value) -> Element | None:
        if value in self.texts:
            return self.texts[value]
        constant, producer = folded(value), value.producer()
        if producer is not None and producer.op_type == "DequantizeLinear" and not problem(producer):  # also of constants
            assert producer.inputs[0] is not None
            text = self._conversion(producer, self._array(node, producer.inputs[0]))
            if text is None:
                return None
            found = Element(text, "float")
        elif constant is None:
            found = Element(self._input(value), _kind_of(dtype_of(value)))
        else:
            found = self._constant(node, value, constant)
        self.texts[value] = found
        return found

    def _constant(self, node: ir.Node, value: ir.Value, constant: Array) -> Element:
        """A literal if it has one finite number that is not too large."""
        if constant.dtype.kind == "b":
            constant = constant.astype(np.uint8)
        if constant.size == 1 and constant.dtype.kind in "iu":
            return Element(whole_literal(int(constant.flat[0])), "number")
        if constant.size == 1 and abs(float(constant.flat[0])) <= MOST_LITERAL:
            return Element(literal(float(constant.flat[0])), "number")
        return Element(self._array(node, value, constant), _kind_of(_constant_dtype(constant)))

    def _array(self, node: ir.Node, value: ir.Value, constant: Array | None = None) -> str:
        """The name of an input: of a constant, these numbers or the value's own, with all axes of the result."""
        constant = constant_of(value) if constant is None else constant
        if constant is None:
            return self._input(value)
        shape = (*(1,) * (len(extents_of(node, self.y)) - constant.ndim), *constant.shape)
        return self._input(Constant(str(value.name), axes_of(len(shape)), constant.reshape(shape)))

    def _linear(self, node: ir.Node, place: int, name: str) -> str | None:
        """A scale or zero point: constants, or one number that is computed."""
        value = node.inputs[place]
        assert value is not None
        numbers = constant_of(value)
        if numbers is None:
            return self._input(value) if math.prod(extents_of(node, value)) == 1 else None
        return self._along(node, numbers.astype(np.float32), node.attributes.get_int("axis", 1), name)

    def _along(self, node: ir.Node, numbers: Array, axis: int, name: str) -> str:
        """Numbers for each index along an axis of the node's result; one number is a literal."""
        if (numbers == numbers.flat[0]).all() and np.isfinite(numbers.flat[0]):
            return literal(float(numbers.flat[0]))
        rank, own = len(extents_of(node, self.y)), len(extents_of(node, node.outputs[0]))
        shape = [1] * rank
        shape[rank - own + axis % own] = numbers.size
        return self._input(Constant(name_of(node) + name, axes_of(rank), numbers.reshape(shape)))

    def _input(self, operand: Operand) -> str:
        known = [name for name, each in self.inputs.items() if each is operand]
        name = known[0] if known else f"input{len(self.inputs)}"
        self.inputs[name] = operand
        return name

    def chain(self, nodes: Sequence[ir.Node], text: str) -> Chain:
        """The chain, with the names a, b, c for inputs in the order in which the text has them."""
        y = extents_of(nodes[-1], self.y) or [1]
        order = list(dict.fromkeys(re.findall(r"input\d+", text)))
        arguments = {_LETTERS[place]: self.inputs[name] for place, name in enumerate(order)}
        text = re.sub(r"input\d+", lambda match: _LETTERS[order.index(match[0])], text)
        inputs = []
        for name, operand in arguments.items():
            if isinstance(operand, Constant):
                inputs.append([name, _constant_dtype(operand.array), list(operand.array.shape)])
            else:
                inputs.append([name, dtype_of(operand), extents_of(nodes[-1], operand) or [1]])
        floats = [each[1] for each in inputs if each[1] in FLOATS]
        params = {
            "y": y,
            "expression": text,
            "inputs": inputs,
            "dtype": floats[0] if floats else dtype_of(self.y),
            "out_dtype": dtype_of(self.y),
        }
        return Chain("elementwise", params, list(nodes), self.y, arguments)


def _constant_dtype(array: Array) -> str:
    return array.dtype.name if array.dtype.kind in "iu" else "float32"


def _kind_of(dtype: str) -> Kind:
    return "float" if dtype in FLOATS else "byte" if dtype in INTEGERS else "whole"


def _bare(text: str) -> str:
    """The text without a pair of parentheses around the whole."""
    if not text.startswith("(") or not text.endswith(")"):
        return text
    depth = 0
    for place, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0 and place < len(text) - 1:
            return text
    return text[1:-1]


ELEMENTWISE: Mapping[str, Read] = dict.fromkeys((*OPERATORS, *_CONVERSIONS), _read)
