"""Element-wise nodes as texts of expressions, by the dtypes of what they read.

Floats are those of `schedsearch.ops.expressions`. Integers are computed in 64 bits, and `int32(...)` cuts a result to the
bits of the node's dtype before something else reads it. Truths are the integers 0 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from schedsearch.network.epilogue import clip_limits, not_finite
from schedsearch.network.facts import FLOATS, INTEGERS, constant_input, dtype_of, is_given, name_of, optional_input
from schedsearch.ops.expressions import MAX_EXPONENT
from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx_ir as ir

WHOLES = (*INTEGERS, "int16", "uint16", "int32", "uint32", "int64")
NUMBERS = (*FLOATS, *WHOLES)
TRUTHS = ("uint8",)
MOST_LITERAL = 2.0**100
Kind = Literal["float", "byte", "whole", "number"]


class Element(NamedTuple):
    """An operand of an expression.

    Attributes:
        text: with parentheses where another operator may stand beside it.
        kind: what it is in an expression (`ops.expression_types`): a float, an input of 8 bits, an integer, or a literal.
    """

    text: str
    kind: Kind

    @property
    def whole(self) -> str:
        """The text of an integer."""
        return f"int64({self.text})" if self.kind in ("byte", "float") else self.text


_Format = Callable[["ir.Node", Sequence[str]], "str | None"]  # (node, texts of its inputs) -> text of its result


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


# --- floats
def _leaky_relu(node: ir.Node, args: Sequence[str]) -> str:
    return f"leaky_relu({args[0]}, {literal(node.attributes.get_float('alpha', 0.01))})"


def _hard_sigmoid(node: ir.Node, args: Sequence[str]) -> str:
    alpha, beta = node.attributes.get_float("alpha", 0.2), node.attributes.get_float("beta", 0.5)
    return f"hard_sigmoid({args[0]}, {literal(alpha)}, {literal(beta)})"


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
    below = f"min({x}, 0)" if op != "Celu" else f"(min({x}, 0) / {literal(alpha)})"
    text = f"(max({x}, 0) + {literal(alpha)} * (exp({below}) - 1))"
    return text if op != "Selu" else f"({literal(read.get_float('gamma', 1.05070102214813232421875))} * {text})"


def _softplus(x: str) -> str:
    """log(1 + exp(x)) without overflow."""
    return f"(max({x}, 0) + log(1 + exp(0 - abs({x}))))"


def _swish(node: ir.Node, args: Sequence[str]) -> str:
    (x,), alpha = args, node.attributes.get_float("alpha", 1.0)
    return f"silu({x})" if alpha == 1.0 else f"({x} * sigmoid({literal(alpha)} * {x}))"


def _thresholded(node: ir.Node, args: Sequence[str]) -> str:
    (x,), alpha = args, literal(node.attributes.get_float("alpha", 1.0))
    return f"where({x} > {alpha}, {x}, 0)"


def _shrink(node: ir.Node, args: Sequence[str]) -> str:
    (x,), least, bias = args, node.attributes.get_float("lambd", 0.5), literal(node.attributes.get_float("bias", 0.0))
    return f"where({x} < {literal(-least)}, {x} + {bias}, where({x} > {literal(least)}, {x} - {bias}, 0))"


def _clip(node: ir.Node, args: Sequence[str]) -> str | None:
    bounds = clip_limits(node)
    if bounds is None:
        return _clip_between(node, args)
    low, high = ("" if math.isinf(bound) else literal(bound) for bound in bounds)
    if not low:
        return f"min({args[0]}, {high})" if high else args[0]
    return f"clip({args[0]}, {low}, {high})" if high else f"max({args[0]}, {low})"


def _clip_between(node: ir.Node, args: Sequence[str]) -> str:
    """Bounds that are computed, or integers."""
    rest = list(args[1:])
    text = f"max({args[0]}, {rest.pop(0)})" if is_given(node, 1) else args[0]
    return f"min({text}, {rest.pop(0)})" if rest else text


def _power(node: ir.Node, args: Sequence[str]) -> str:
    base, exponent = args
    return f"({base} ** {exponent})" if _is_exponent(exponent) else f"pow({base}, {exponent})"


def _modulo(node: ir.Node, args: Sequence[str]) -> str:
    return f"fmod({args[0]}, {args[1]})" if node.attributes.get_int("fmod", 0) else f"({args[0]} % {args[1]})"


_LIBRARY = ("Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh")
_FLOATS: Mapping[str, _Format] = {
    "Add": _binary("+"),
    "Sub": _binary("-"),
    "Mul": _binary("*"),
    "Div": _binary("/"),
    "Sum": _binary("+"),
    "Mean": lambda node, args: f"(({' + '.join(args)}) / {len(args)})",
    "Pow": _power,
    "Mod": _modulo,
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
    "ThresholdedRelu": _thresholded,
    "Shrink": _shrink,
    "Relu": _call("relu"),
    "Sigmoid": _call("sigmoid"),
    "Tanh": _call("tanh"),
    "Erf": _call("erf"),
    "Exp": _call("exp"),
    "Log": _call("log"),
    "Sqrt": _call("sqrt"),
    "Abs": _call("abs"),
    "Round": _call("round"),
    "Sign": _call("sign"),
    "Floor": _call("floor"),
    "Ceil": _call("ceil"),
    **{op: _call(op.lower()) for op in _LIBRARY},
    "HardSwish": _call("hard_swish"),
    "LeakyRelu": _leaky_relu,
    "HardSigmoid": _hard_sigmoid,
    "Gelu": _gelu,
    "Clip": _clip,
}


# --- integers
def _shift(node: ir.Node, args: Sequence[str]) -> str:
    return f"({args[0]} {'<<' if node.attributes.get_string('direction', '') == 'LEFT' else '>>'} {args[1]})"


_WHOLES: Mapping[str, _Format] = {
    **{op: _FLOATS[op] for op in ("Add", "Sub", "Mul", "Sum", "Max", "Min", "Abs", "Sign", "Relu", "PRelu", "Mod")},
    "Div": _call("quotient"),
    "Neg": _text("(0 - {0})"),
    "Clip": _clip_between,
    "BitShift": _shift,
    "BitwiseAnd": _binary("&"),
    "BitwiseOr": _binary("|"),
    "BitwiseXor": _binary("^"),
    "BitwiseNot": _text("~{0}"),
}
_STAY = ("Max", "Min", "Sign", "Relu", "Mod", "Clip", "BitwiseAnd", "BitwiseOr", "BitwiseXor")  # within the dtype
_COMPARISONS = {"Less": "<", "LessOrEqual": "<=", "Greater": ">", "GreaterOrEqual": ">=", "Equal": "=="}
_LOGIC: Mapping[str, _Format] = {
    "And": _binary("&"),
    "Or": _binary("|"),
    "Xor": _binary("^"),
    "Not": _text("({0} == 0)"),
}


def _whole_power(node: ir.Node, elements: Sequence[Element]) -> str:
    base, exponent = elements
    if dtype_of(node.inputs[1]) in FLOATS:
        return f"pow(float32({base.text}), {exponent.text})"
    return f"pow({base.whole}, {exponent.whole})"


# --- both
def _where(node: ir.Node, elements: Sequence[Element]) -> Element:
    condition, *branches = elements
    if dtype_of(node.outputs[0]) in FLOATS:
        return Element(f"where({condition.text}, {branches[0].text}, {branches[1].text})", "float")
    first = branches[0].whole if any(each.kind != "number" for each in branches) else f"int64({branches[0].text})"
    return Element(f"where({condition.text}, {first}, {branches[1].whole})", "whole")


def _cast(node: ir.Node, elements: Sequence[Element]) -> Element:
    (x, *_), made = elements, node.outputs[0]
    if is_truth(made):
        return Element(f"({x.text} != 0)", "whole")
    to = dtype_of(made)
    if to in FLOATS:
        return x if x.kind in ("float", "byte") else Element(f"float32({x.text})", "float")
    if dtype_of(node.inputs[0]) in FLOATS:
        return Element(f"{to}({x.text})", "whole")
    return Element(x.whole if holds(to, dtype_of(node.inputs[0])) else f"{to}({x.text})", "whole")


def _is_inf(node: ir.Node, x: Element) -> str:
    read = node.attributes
    sides = read.get_int("detect_negative", 1), read.get_int("detect_positive", 1)
    side = {(1, 1): "", (0, 1): f" & ({x.text} > 0)", (1, 0): f" & ({x.text} < 0)", (0, 0): " & 0"}[sides]
    return f"(is_inf({x.text}){side})"


_OTHERS = ("Where", "Cast", "CastLike", "Expand", "IsNaN", "IsInf", "Pow")
OPERATORS = tuple(dict.fromkeys((*_FLOATS, *_WHOLES, *_COMPARISONS, *_LOGIC, *_OTHERS)))
_FIRST_ONLY = ("Cast", "CastLike", "Expand")  # what the others say is in the result's shape and dtype


def reads_of(node: ir.Node) -> list[ir.Value]:
    """The inputs of a node of `OPERATORS` that its expression reads."""
    if node.op_type in _FIRST_ONLY or (node.op_type == "Clip" and _has_bounds(node)):
        return [value for value in node.inputs[:1] if value is not None]
    return [value for value in node.inputs if value is not None]


def _has_bounds(node: ir.Node) -> bool:
    return dtype_of(node.outputs[0]) in FLOATS and clip_limits(node) is not None


def write(node: ir.Node, elements: Sequence[Element], *, last: bool) -> Element | None:
    """The expression of a node; None if there is none.

    Args:
        elements: those of `reads_of`.
        last: what the node makes is the result, of which the kernel keeps the bits that the dtype has.
    """
    op, dtype = node.op_type, dtype_of(node.outputs[0])
    texts = [each.text for each in elements]
    if op == "Expand":
        return elements[0]
    if op in ("Cast", "CastLike"):
        return _cast(node, elements)
    if op == "Where":
        return _where(node, elements)
    if op in _COMPARISONS:
        return Element(_binary(_COMPARISONS[op])(node, texts) or "", "whole")
    if op in _LOGIC:
        return Element(_LOGIC[op](node, texts) or "", "whole")
    if op == "IsNaN":
        return Element(f"is_nan({texts[0]})", "whole")
    if op == "IsInf":
        return Element(_is_inf(node, elements[0]), "whole")
    if dtype in FLOATS:
        text = _FLOATS[op](node, texts)
        return None if text is None else Element(text, "float")
    if op == "Pow":
        text = _whole_power(node, elements)
        if text.startswith("pow(float32"):  # a float, and an integer by the node's dtype
            return Element(f"{dtype}({text})", "whole")
    else:
        text = _WHOLES[op](node, [each.whole for each in elements])
    if text is None:
        return None
    return Element(text if last or dtype == "int64" or op in _STAY else f"{dtype}({text})", "whole")


# --- dtypes
_SAME = (*_WHOLES, "Where", "Expand", "Pow")
_TAKES: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    **dict.fromkeys(_SAME, (NUMBERS, NUMBERS)),
    **dict.fromkeys(("BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot"), (WHOLES, WHOLES)),
    **dict.fromkeys(_COMPARISONS, (NUMBERS, TRUTHS)),
    **dict.fromkeys(_LOGIC, (TRUTHS, TRUTHS)),
    **dict.fromkeys(("IsNaN", "IsInf"), (FLOATS, TRUTHS)),
    **dict.fromkeys(("Cast", "CastLike"), (NUMBERS, NUMBERS)),
    "DequantizeLinear": (INTEGERS, FLOATS),
    "QuantizeLinear": (FLOATS, INTEGERS),
}


def problem(node: ir.Node) -> str:
    """Why a node has no expression; empty if it may have one."""
    allowed, made = _TAKES.get(node.op_type, (FLOATS, FLOATS))
    x = optional_input(node, 1 if node.op_type == "Where" else 0)
    others = [dtype_of(value) for value in reads_of(node)] if node.op_type in OPERATORS else []
    read = "" if x is None else dtype_of(x)
    read = next((each for each in others if read in allowed and each not in NUMBERS), read)
    if read not in allowed:
        return f"{name_of(node)} reads {read or 'an unknown dtype'}; allowed: {', '.join(allowed)}"
    if node.attributes.get_int("training_mode", 0):
        return f"{name_of(node)} takes mean and variance from an array of unknown extents, or one without elements"
    if node.attributes.get_int("block_size", 0):
        return f"{name_of(node)} has scales of blocks; allowed: one scale, or one for each index along an axis"
    if strange := not_finite(node):
        return f"{name_of(node)} has {strange}; allowed: finite numbers"
    if node.op_type == "Clip" and read in FLOATS and any(_is_nan(constant_input(node, place)) for place in (1, 2)):
        return f"{name_of(node)} has a bound that is NaN; allowed: numbers"
    if node.op_type == "Clip" and read in FLOATS and len(reads_of(node)) == 1 and clip_limits(node) is None:
        return f"{name_of(node)} has a min of infinity or a max of minus infinity; allowed: bounds that numbers meet"
    if (to := dtype_of(node.outputs[0])) not in made:
        return f"{name_of(node)} makes {to or 'an unknown dtype'}; allowed: {', '.join(made)}"
    if node.outputs[0].shape is not None and 0 in node.outputs[0].shape:
        return f"{name_of(node)} makes an array without elements; allowed: at least one"
    return ""


def _is_nan(constant: Array | None) -> bool:
    return constant is not None and bool(np.isnan(constant.astype(np.float64)).any())


def rounds(node: ir.Node) -> bool:
    """Whether a node is a Cast to floats that lack some of the numbers that it reads."""
    if node.op_type not in ("Cast", "CastLike") or node.inputs[0] is None:
        return False
    to, of = dtype_of(node.outputs[0]), dtype_of(node.inputs[0])
    return to in FLOATS and to not in ("float32", of) and of not in INTEGERS


def decides(node: ir.Node) -> bool:
    """Whether a node makes integers or truths of short floats, so that it matters that these are rounded before."""
    x = optional_input(node, 0)
    return x is not None and dtype_of(x) in FLOATS[:2] and dtype_of(node.outputs[0]) in WHOLES


def is_truth(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.name == "BOOL"


def holds(dtype: str, other: str) -> bool:
    """Whether an integer dtype has all numbers of another one."""
    one, two = np.iinfo(dtype), np.iinfo(other)
    return bool(one.min <= two.min and one.max >= two.max)


# --- numbers
def literal(number: float) -> str:
    """The shortest text of a float32; a product of two if expressions take no number as large."""
    if abs(number) > MOST_LITERAL:
        return f"({MOST_LITERAL!r} * {literal(number / MOST_LITERAL)})"
    text = f"{int(number)}" if number == int(number) and abs(number) < 1e7 else str(np.float32(number))
    return f"({text})" if number < 0 else text


def whole_literal(number: int) -> str:
    return f"({number})" if number < 0 else str(number)


def _is_exponent(text: str) -> bool:
    try:
        return abs(float(text.strip("()"))) <= MAX_EXPONENT
    except ValueError:
        return False
