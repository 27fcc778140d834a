"""Expressions over arrays, such as `relu(a + b)`, as data: parsed, checked, written in one form, and computed in NumPy.

A string has named steps and a result, separated by semicolons::

    t = a * scale + shift; t * sigmoid(t)

It is Python's syntax for + - * / %, ** with a constant exponent, comparisons, & | ^ ~ << >> of bits, numbers, names, and
calls of `FUNCTIONS`. Nothing is evaluated as Python: `ast` parses the text, and everything else is refused. What is an
integer, and what operators do with integers, is in `schedsearch.ops.expression_types`.

See docs/decisions/117-expressions-are-text.md.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schedsearch.errors import did_you_mean
from schedsearch.ops.expression_functions import FUNCTIONS, OPERATORS, RESERVED

MAX_CHARACTERS = 1000
MAX_OPERATIONS = 64
MAX_EXPONENT = 64.0
MAX_DEPTH = 48


class ExpressionError(ValueError):
    """What is wrong with a string, in one sentence."""


@dataclass(frozen=True)
class Name:
    """An input, or an earlier step."""

    name: str


@dataclass(frozen=True)
class Number:
    """Its value is an int only where no float64 is equal to it."""

    value: float


@dataclass(frozen=True)
class Call:
    """A function of `FUNCTIONS` or an operator of `OPERATORS`, or `power`, whose last argument is a Number."""

    function: str
    arguments: tuple[Node, ...]


Node = Name | Number | Call


@dataclass(frozen=True)
class Expression:
    """Attributes:
    steps: name and value of each step, in order.
    result: what y gets.
    """

    steps: tuple[tuple[str, Node], ...]
    result: Node

    @property
    def text(self) -> str:
        """The one form in which equal expressions are equal strings."""
        return "; ".join([*(f"{name} = {_text(node)}" for name, node in self.steps), _text(self.result)])

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names that are not steps, in the order in which they appear."""
        steps = {name for name, _ in self.steps}
        nodes = [*(node for _, node in self.steps), self.result]
        return tuple(dict.fromkeys(name for node in nodes for name in _names(node) if name not in steps))

    @property
    def zero_points(self) -> frozenset[str]:
        """Inputs that are zero points of quantise or dequantise, and therefore integers."""
        nodes = [*(node for _, node in self.steps), self.result]
        return frozenset(name for node in nodes for name in _zero_points(node))

    @property
    def middles(self) -> Mapping[str, int]:
        """Inputs that are dequantised with a constant zero point -> the zero point, which stands for 0."""
        nodes = [*(node for _, node in self.steps), self.result]
        return dict(found for node in nodes for found in _middles(node))

    def evaluate(self, inputs: Mapping[str, object]) -> Any:
        """The definition for floats, in NumPy and float64. `inputs` are arrays that broadcast together. See `Typed` for
        integers."""
        import numpy as np

        values = {name: np.asarray(value, np.float64) for name, value in inputs.items()}
        with np.errstate(all="ignore"):
            for name, node in self.steps:
                values[name] = _evaluate(node, values)
            return _evaluate(self.result, values)

    def without_last_rounding(self) -> Expression:
        """The same without a rounding that only a limit follows, for outputs that are rounded anyway."""
        return Expression(self.steps, _unrounded(self.result))


_ROUNDED_LAST = {"round": 1, "clip": 1, "relu": 1, "min": 2, "max": 2}  # how many arguments take over the rounding


def _evaluate(node: Node, values: Mapping[str, object]) -> Any:
    if isinstance(node, Name):
        return values[node.name]
    if isinstance(node, Number):
        return node.value
    function = FUNCTIONS.get(node.function) or OPERATORS[node.function]
    return function.apply(*(_evaluate(each, values) for each in node.arguments))


def _unrounded(node: Node) -> Node:
    if not isinstance(node, Call):
        return node
    if node.function == "round":
        return _unrounded(node.arguments[0])
    if node.function == "quantise":
        x, scale, zero_point = node.arguments
        return Call("add", (Call("divide", (x, scale)), zero_point))
    taken = _ROUNDED_LAST.get(node.function, 0)
    arguments = tuple(_unrounded(each) if place < taken else each for place, each in enumerate(node.arguments))
    return Call(node.function, arguments)


def _names(node: Node) -> Iterator[str]:
    if isinstance(node, Name):
        yield node.name
    elif isinstance(node, Call):
        for each in node.arguments:
            yield from _names(each)


def _zero_points(node: Node) -> Iterator[str]:
    if not isinstance(node, Call):
        return
    if node.function in ("quantise", "dequantise"):
        yield from _names(node.arguments[2])
    for each in node.arguments:
        yield from _zero_points(each)


def _middles(node: Node) -> Iterator[tuple[str, int]]:
    if not isinstance(node, Call):
        return
    if node.function == "dequantise":
        x, _, zero_point = node.arguments
        if isinstance(x, Name) and isinstance(zero_point, Number):
            yield x.name, int(zero_point.value)
    for each in node.arguments:
        yield from _middles(each)


# ---- text

_COMPARISON, _NEGATION, _POWER = -4, 3, 4  # how strongly operators bind
_SIGNS = {
    "less": ("<", _COMPARISON), "less_equal": ("<=", _COMPARISON), "greater": (">", _COMPARISON),
    "greater_equal": (">=", _COMPARISON), "equal": ("==", _COMPARISON), "not_equal": ("!=", _COMPARISON),
    "bit_or": ("|", -3), "bit_xor": ("^", -2), "bit_and": ("&", -1), "shift_left": ("<<", 0), "shift_right": (">>", 0),
    "add": ("+", 1), "subtract": ("-", 1), "multiply": ("*", 2), "divide": ("/", 2), "modulo": ("%", 2),
    "power": ("**", _POWER),
}  # fmt: skip
_OF_AST: Mapping[type, str] = {
    ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.Div: "divide", ast.Mod: "modulo", ast.Pow: "power",
    ast.BitOr: "bit_or", ast.BitXor: "bit_xor", ast.BitAnd: "bit_and", ast.LShift: "shift_left", ast.RShift: "shift_right",
    ast.Lt: "less", ast.LtE: "less_equal", ast.Gt: "greater", ast.GtE: "greater_equal", ast.Eq: "equal",
    ast.NotEq: "not_equal",
}  # fmt: skip
_ALLOWED = "+ - * / % **, comparisons, & | ^ ~ << >>, numbers, names, and calls of"


def _text(node: Node, least: int = _COMPARISON) -> str:
    """A node in parentheses if its operator binds less than `least`."""
    if isinstance(node, Name):
        return node.name
    if isinstance(node, Number):
        short = isinstance(node.value, int) or (node.value.is_integer() and abs(node.value) < 1e15)
        text = str(int(node.value)) if short else repr(node.value)
        return f"({text})" if node.value < 0 and least > 1 else text
    if node.function in _SIGNS:
        sign, binds = _SIGNS[node.function]
        left, right = node.arguments
        text = f"{_text(left, binds + (binds in (_COMPARISON, _POWER)))} {sign} {_text(right, binds + (binds < _POWER))}"
    elif node.function in ("negate", "invert"):
        binds, text = _NEGATION, f"{'-' if node.function == 'negate' else '~'}{_text(node.arguments[0], _NEGATION)}"
    else:
        return f"{node.function}({', '.join(_text(each) for each in node.arguments)})"
    return f"({text})" if binds < least else text


@functools.lru_cache(maxsize=1024)
def parse_expression(text: str) -> Expression:
    """The expression that a string stands for.

    Raises:
        ExpressionError: it is too long or too deep, not an expression, or calls something that is not known.

    Examples:
        >>> parse_expression("relu( (a+b) )*2").text
        'relu(a + b) * 2'
    """
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError(f"has {len(text)} characters; at most {MAX_CHARACTERS} are possible")
    try:
        statements = ast.parse(text.strip()).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ExpressionError(f"must be steps and a result such as 't = a + b; relu(t)', got {text!r}") from None
    if not statements or not isinstance(statements[-1], ast.Expr):
        raise ExpressionError(f"must end with the result, as in 't = a + b; relu(t)', got {text!r}")
    operations = [
        node for part in statements for node in ast.walk(part) if isinstance(node, ast.BinOp | ast.Call | ast.Compare)
    ]
    if len(operations) > MAX_OPERATIONS:
        raise ExpressionError(f"has {len(operations)} operations; at most {MAX_OPERATIONS} are possible")
    steps: dict[str, Node] = {}
    for statement in statements[:-1]:
        if not isinstance(statement, ast.Assign) or not _is_name(statement.targets) or len(statement.targets) != 1:
            raise ExpressionError(f"must have steps of the form 'name = ...', got {ast.unparse(statement)!r}")
        name = statement.targets[0].id  # type: ignore[attr-defined]
        value = _node(statement.value)
        if name in steps or name in RESERVED or any(name in _names(node) for node in [*steps.values(), value]):
            raise ExpressionError(f"names the step {name!r} twice, or after an input or function; give it another name")
        steps[name] = value
    result = Expression(tuple(steps.items()), _node(statements[-1].value))
    if not result.inputs:
        raise ExpressionError(f"must have an input, got {text!r}")
    return result


def _is_name(targets: Sequence[ast.expr]) -> bool:
    return all(isinstance(target, ast.Name) for target in targets)


def _node(tree: ast.expr, depth: int = 0) -> Node:
    if depth > MAX_DEPTH:
        raise ExpressionError(f"is nested more than {MAX_DEPTH} deep; use steps, as in 't = a + b; relu(t)'")
    if isinstance(tree, ast.Name):
        if tree.id in RESERVED or tree.id.startswith("_") or not tree.id.isascii():
            raise ExpressionError(f"has the name {tree.id!r}; give letters, digits and _, and no name of a function")
        return Name(tree.id)
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int | float) and not isinstance(tree.value, bool):
        if not (abs(tree.value) <= 2.0**100):  # also refuses NaN
            raise ExpressionError(f"has the number {ast.unparse(tree)}; allowed: up to 2**100")
        return Number(tree.value if isinstance(tree.value, int) and float(tree.value) != tree.value else float(tree.value))
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        inside = _node(tree.operand, depth + 1)
        return Number(-inside.value) if isinstance(inside, Number) else Call("negate", (inside,))
    if isinstance(tree, ast.BinOp) and type(tree.op) in _OF_AST:
        return _operation(_OF_AST[type(tree.op)], _node(tree.left, depth + 1), _node(tree.right, depth + 1))
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.Invert):
        return Call("invert", (_node(tree.operand, depth + 1),))
    if isinstance(tree, ast.Compare) and len(tree.ops) == 1 and type(tree.ops[0]) in _OF_AST:
        return Call(_OF_AST[type(tree.ops[0])], (_node(tree.left, depth + 1), _node(tree.comparators[0], depth + 1)))
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.keywords:
        return _call(tree.func.id, tuple(_node(each, depth + 1) for each in tree.args))
    raise ExpressionError(f"has {ast.unparse(tree)!r}; allowed: {_ALLOWED} {', '.join(FUNCTIONS)}")


def _operation(name: str, left: Node, right: Node) -> Node:
    if name == "power" and not (isinstance(right, Number) and abs(right.value) <= MAX_EXPONENT):
        raise ExpressionError(
            f"has the exponent {_text(right)}; allowed: numbers from -{MAX_EXPONENT} to {MAX_EXPONENT}, or pow(...)"
        )
    return Call(name, (left, right))


def _call(name: str, arguments: tuple[Node, ...]) -> Node:
    function = FUNCTIONS.get(name)
    if function is None:
        raise ExpressionError(f"calls {name!r}{did_you_mean(name, FUNCTIONS)}; allowed: {', '.join(FUNCTIONS)}")
    least = function.arity - len(function.defaults)
    if not least <= len(arguments) <= function.arity:
        many = str(function.arity) if least == function.arity else f"{least} to {function.arity}"
        raise ExpressionError(f"gives {name} {len(arguments)} arguments; it takes {many}")
    missing = function.arity - len(arguments)
    return Call(name, arguments + tuple(map(Number, function.defaults[len(function.defaults) - missing :])))
