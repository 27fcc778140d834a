"""Chains of element-wise nodes as one expression.

A chain ends at one node and grows towards its inputs: a node in front of it belongs to it if nothing outside of the chain
reads its result. A chain computes in float32 and rounds its result, so a Cast to a shorter dtype ends one; other nodes in
such a dtype are not rounded one by one. Nodes of a smaller shape are computed again for every element that they are
broadcast to, and integers are dequantised by every chain that reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.network.chain import Chain, Operand, Read
from schedsearch.network.epilogue import LARGEST, batch_norm_operands, clip_bounds, not_finite
from schedsearch.network.facts import FLOATS, INTEGERS, constant_of, dtype_of, extents_of, folded, is_given, is_onnx, name_of
from schedsearch.network.graph import Constant, axes_of
from schedsearch.ops.expressions import MAX_CHARACTERS
from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx_ir as ir


MOST_NODES = 32
_LETTERS = "abcdefghijklmnop"  # as many as `elementwise` has inputs


_Format = Callable[["ir.Node", Sequence[str]], "str | None"]  # (node, strings of its inputs) -> text of its result


def _binary(operator: str) -> _Format:
    return lambda node, args: f"({f' {operator} '.join(args)})"


def _call(function: str) -> _Format:
    return lambda node, args: f"{function}({', '.join(args)})"


def _folded_call(function: str) -> _Format:
    """A function of two numbers, of a list of them."""

    def write(node: ir.Node, args: Sequence[str]) -> str:
        text = args[0]
        for each in args[1:]:
            text = f"{function}({text}, {each})"
        return text

    return write


def _text(template: str) -> _Format:
    return lambda node, args: template.format(*args)


def _leaky_relu(node: ir.Node, args: Sequence[str]) -> str:
    return f"leaky_relu({args[0]}, {_literal(node.attributes.get_float('alpha', 0.01))})"


def _hard_sigmoid(node: ir.Node, args: Sequence[str]) -> str:
    alpha, beta = node.attributes.get_float("alpha", 0.2), node.attributes.get_float("beta", 0.5)
    return f"hard_sigmoid({args[0]}, {_literal(alpha)}, {_literal(beta)})"


def _gelu(node: ir.Node, args: Sequence[str]) -> str:
    """The exact function, or ONNX's approximation by tanh: the factor is sqrt(2 / pi)."""
    (x,) = args
    if node.attributes.get_string("approximate", "none") == "none":
        return f"gelu({x})"
    return f"(0.5 * {x} * (1 + tanh(0.7978845608 * ({x} + 0.044715 * {x} * {x} * {x}))))"


def _exponential(node: ir.Node, args: Sequence[str]) -> str:
    """Elu, Selu and Celu: x above 0, and below it an exponential function that meets it there."""
    (x,), read, op = args, node.attributes, node.op_type
    alpha = read.get_float("alpha", 1.67326319217681884765625 if op == "Selu" else 1.0)  # defaults of ONNX
    below = f"min({x}, 0)" if op != "Celu" else f"(min({x}, 0) / {_literal(alpha)})"
    text = f"(max({x}, 0) + {_literal(alpha)} * (exp({below}) - 1))"
    return text if op != "Selu" else f"({_literal(read.get_float('gamma', 1.05070102214813232421875))} * {text})"


def _softplus(x: str) -> str:
    """log(1 + exp(x)) without overflow."""
    return f"(max({x}, 0) + log(1 + exp(0 - abs({x}))))"


def _swish(node: ir.Node, args: Sequence[str]) -> str:
    (x,), alpha = args, node.attributes.get_float("alpha", 1.0)
    return f"silu({x})" if alpha == 1.0 else f"({x} * sigmoid({_literal(alpha)} * {x}))"


def _clip(node: ir.Node, args: Sequence[str]) -> str | None:
    bounds = clip_bounds(node)
    if bounds is None:
        return None
    low, high = (_literal(bound) for bound in bounds)
    if bounds[0] <= -LARGEST:
        return f"min({args[0]}, {high})" if bounds[1] < LARGEST else args[0]
    return f"clip({args[0]}, {low}, {high})" if bounds[1] < LARGEST else f"max({args[0]}, {low})"


def _power(node: ir.Node, args: Sequence[str]) -> str | None:
    return f"({args[0]} ** {args[1]})" if _is_number(args[1]) else None


_FORMATS: Mapping[str, _Format] = {
    "Add": _binary("+"),
    "Sub": _binary("-"),
    "Mul": _binary("*"),
    "Div": _binary("/"),
    "Sum": _binary("+"),
    "Pow": _power,
    "Max": _folded_call("max"),
    "Min": _folded_call("min"),
    "Neg": _text("(0 - {0})"),
    "Reciprocal": _text("(1 / {0})"),
    "Softsign": _text("({0} / (1 + abs({0})))"),
    "PRelu": _text("(max({0}, 0) + {1} * min({0}, 0))"),
    "Swish": _swish,
    "Softplus": lambda node, args: _softplus(args[0]),
    "Mish": lambda node, args: f"({args[0]} * tanh({_softplus(args[0])}))",
    **dict.fromkeys(("Elu", "Selu", "Celu"), _exponential),
    "Relu": _call("relu"),
    "Sigmoid": _call("sigmoid"),
    "Tanh": _call("tanh"),
    "Erf": _call("erf"),
    "Exp": _call("exp"),
    "Log": _call("log"),
    "Sqrt": _call("sqrt"),
    "Abs": _call("abs"),
    "Round": _call("round"),
    "HardSwish": _call("hard_swish"),
    "LeakyRelu": _leaky_relu,
    "HardSigmoid": _hard_sigmoid,
    "Gelu": _gelu,
    "Clip": _clip,
}
_ENDS = ("QuantizeLinear", "DequantizeLinear")  # others may read the integers between these
_CONVERSIONS = (*_ENDS, "Cast", "BatchNormalization")


def _read(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    """The chain that ends at a node."""
    if problem := _problem(node):
        return problem
    nodes = _grown(node, taken)
    while True:
        expression = _Expression(node.outputs[0])
        text = expression.written(nodes)
        if (
            text is not None
            and expression.inputs
            and len(expression.inputs) <= len(_LETTERS)
            and len(text) <= MAX_CHARACTERS
        ):
            return expression.chain(nodes, text)
        if len(nodes) == 1:
            return f"{name_of(node)} has an input that is computed, where only a constant is possible"
        nodes = nodes[-1:]  # a node in front has no text; it stands alone, or is reported


def _problem(node: ir.Node) -> str:
    """Why a node's dtypes have no expression; empty if they have."""
    allowed = {"DequantizeLinear": INTEGERS, "Cast": (*FLOATS, *INTEGERS)}.get(node.op_type, FLOATS)
    made = {"QuantizeLinear": INTEGERS}.get(node.op_type, FLOATS)
    read = dtype_of(node.inputs[0]) if node.inputs and node.inputs[0] is not None else ""
    if read not in allowed:
        return f"{name_of(node)} reads {read or 'an unknown dtype'}; allowed: {', '.join(allowed)}"
    if node.attributes.get_int("training_mode", 0):
        return f"{name_of(node)} is in training mode; export the model for inference"
    if node.attributes.get_int("block_size", 0):
        return f"{name_of(node)} has scales of blocks; allowed: one scale, or one for each index along an axis"
    if strange := not_finite(node):
        return f"{name_of(node)} has {strange}; allowed: finite numbers"
    if node.op_type == "Clip" and clip_bounds(node) is None:
        return f"{name_of(node)} has a bound that is computed, NaN, or beyond all numbers; allowed: other constants"
    if (to := dtype_of(node.outputs[0])) not in made:
        return f"{name_of(node)} makes {to or 'an unknown dtype'}; allowed: {', '.join(made)}"
    return ""


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
    if node.op_type not in ELEMENTWISE or node.op_type in _ENDS or not is_onnx(node) or _problem(node) or _rounds(node):
        return False
    value = node.outputs[0]
    return not value.is_graph_output() and all(user in chain for user, _ in value.uses())


def _rounds(node: ir.Node) -> bool:
    """Whether a node is a Cast to a dtype that lacks some of the numbers that it reads."""
    if node.op_type != "Cast" or node.inputs[0] is None:
        return False
    return (
        dtype_of(node.outputs[0]) not in ("float32", dtype_of(node.inputs[0])) and dtype_of(node.inputs[0]) not in INTEGERS
    )


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
    texts: dict[ir.Value, str] = field(default_factory=dict)
    steps: list[str] = field(default_factory=list)

    def written(self, nodes: Sequence[ir.Node]) -> str | None:
        """The text; None if a node cannot be written."""
        text: str | None = ""
        for node in nodes:
            text = self._node(node)
            if text is None:
                return None
            value = node.outputs[0]
            if len(list(value.uses())) > 1 and node is not nodes[-1]:
                self.steps.append(f"t{len(self.steps)} = {_bare(text)}")
                text = f"t{len(self.steps) - 1}"
            self.texts[value] = text
        return "; ".join([*self.steps, _bare(text or "")])

    def _node(self, node: ir.Node) -> str | None:
        if node.op_type in _FORMATS:
            reading = node.inputs[:1] if node.op_type == "Clip" else node.inputs
            texts = [self._text(node, value) for value in reading if value is not None]
            return None if None in texts else _FORMATS[node.op_type](node, [text for text in texts if text is not None])
        assert node.inputs[0] is not None
        x = self._text(node, node.inputs[0])
        if x is None:
            return None
        if node.op_type == "Cast":
            return x
        if node.op_type == "BatchNormalization":
            operands = batch_norm_operands(node)
            if operands is None:
                return None
            scale, shift = (self._along(node, operands[name].array, 1, f".{name}") for name in ("scale", "shift"))
            return f"({x} * {scale} + {shift})"
        return self._conversion(node, x)

    def _conversion(self, node: ir.Node, x: str) -> str | None:
        """QuantizeLinear or DequantizeLinear."""
        scale, zero = (constant_of(value) for value in (*node.inputs[1:3], None)[:2])
        if scale is None or (zero is None and is_given(node, 2)):
            return None
        axis = node.attributes.get_int("axis", 1)
        by = self._along(node, scale, axis, ".scale")
        offset = "0" if zero is None else self._along(node, zero.astype(np.float32), axis, ".zero_point")
        return f"{'quantise' if node.op_type == 'QuantizeLinear' else 'dequantise'}({x}, {by}, {offset})"

    def _text(self, node: ir.Node, value: ir.Value) -> str | None:
        if value in self.texts:
            return self.texts[value]
        constant, producer = folded(value), value.producer()
        text: str | None
        if producer is not None and producer.op_type == "DequantizeLinear" and not _problem(producer):  # also of constants
            assert producer.inputs[0] is not None
            text = self._conversion(producer, self._input(producer.inputs[0]))
            if text is None:
                return None
        elif constant is None:
            text = self._input(value)
        elif constant.size == 1 and np.isfinite(constant).all():
            text = _literal(float(constant.flat[0]))
        else:
            shape = (*(1,) * (len(extents_of(node, self.y)) - constant.ndim), *constant.shape)
            text = self._input(Constant(str(value.name), axes_of(len(shape)), constant.reshape(shape)))
        self.texts[value] = text
        return text

    def _along(self, node: ir.Node, numbers: Array, axis: int, name: str) -> str:
        """Numbers for each index along an axis of the node's result; one number is a literal."""
        if (numbers == numbers.flat[0]).all() and np.isfinite(numbers.flat[0]):
            return _literal(float(numbers.flat[0]))
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
                inputs.append([name, "float32", list(operand.array.shape)])
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


def _literal(number: float) -> str:
    """The shortest text of a float32."""
    text = f"{int(number)}" if number == int(number) and abs(number) < 1e7 else str(np.float32(number))
    return f"({text})" if number < 0 else text


def _is_number(text: str) -> bool:
    try:
        float(text.strip("()"))
    except ValueError:
        return False
    return True


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


ELEMENTWISE: Mapping[str, Read] = dict.fromkeys((*_FORMATS, *_CONVERSIONS), _read)
