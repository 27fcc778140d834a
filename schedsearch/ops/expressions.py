"""Expressions over arrays, such as `relu(a + b)`, as data: parsed, checked, written in one form, and computed in NumPy.

A string has named steps and a result, separated by semicolons::

    t = a * scale + shift; t * sigmoid(t)

It is Python's syntax for + - * / and ** with a constant exponent, numbers, names and calls of `FUNCTIONS`. Nothing is
evaluated as Python: `ast` parses the text, and everything else is refused.

See docs/decisions/117-expressions-are-text.md.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schedsearch.errors import did_you_mean

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

    def evaluate(self, inputs: Mapping[str, object]) -> Any:
        """The definition, in NumPy and float64. `inputs` are arrays that broadcast together."""
        import numpy as np

        values = {name: np.asarray(value, np.float64) for name, value in inputs.items()}
        with np.errstate(all="ignore"):
            for name, node in self.steps:
                values[name] = _evaluate(node, values)
            return _evaluate(self.result, values)

    def without_last_rounding(self) -> Expression:
        """The same without a rounding that only a limit follows, for outputs that are rounded anyway."""
        return Expression(self.steps, _unrounded(self.result))


# ---- functions


def _erf(x: object) -> Any:
    import numpy as np

    return np.vectorize(math.erf, otypes=[float])(x)


def _sigmoid(x: Any) -> Any:
    import numpy as np

    with np.errstate(over="ignore"):  # to infinity, whose reciprocal is right
        return 1.0 / (1.0 + np.exp(-x))


def _hard_sigmoid(x: Any, alpha: Any, beta: Any) -> Any:
    return _clip(alpha * x + beta, 0.0, 1.0)


def _clip(x: Any, low: Any, high: Any) -> Any:
    import numpy as np

    return np.minimum(np.maximum(x, low), high)


def _numpy(name: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        import numpy as np

        return getattr(np, name)(*arguments)

    return call


@dataclass(frozen=True)
class Function:
    """A function of expressions.

    Attributes:
        apply: in NumPy.
        arity: number of arguments.
        defaults: of the last arguments.
    """

    apply: Callable[..., Any]
    arity: int = 1
    defaults: tuple[float, ...] = ()


_SIXTH = 1 / 6
FUNCTIONS: Mapping[str, Function] = {
    "relu": Function(lambda x: _numpy("maximum")(x, 0.0)),
    "leaky_relu": Function(lambda x, slope: _numpy("where")(x < 0, x * slope, x), 2),
    "clip": Function(_clip, 3),
    "sigmoid": Function(_sigmoid),
    "silu": Function(lambda x: x * _sigmoid(x)),
    "hard_sigmoid": Function(_hard_sigmoid, 3, (0.2, 0.5)),
    "hard_swish": Function(lambda x: x * _hard_sigmoid(x, _SIXTH, 0.5)),
    "tanh": Function(_numpy("tanh")),
    "gelu": Function(lambda x: 0.5 * x * (1.0 + _erf(x * math.sqrt(0.5)))),
    "erf": Function(_erf),
    "exp": Function(_numpy("exp")),
    "log": Function(_numpy("log")),
    "sqrt": Function(_numpy("sqrt")),
    "abs": Function(_numpy("abs")),
    "min": Function(_numpy("minimum"), 2),
    "max": Function(_numpy("maximum"), 2),
    "round": Function(_numpy("rint")),
    "quantise": Function(lambda x, scale, zero_point: _numpy("rint")(x / scale) + zero_point, 3),
    "dequantise": Function(lambda q, scale, zero_point: (q - zero_point) * scale, 3),
}
OPERATORS: Mapping[str, Function] = {
    "add": Function(lambda a, b: a + b, 2),
    "subtract": Function(lambda a, b: a - b, 2),
    "multiply": Function(lambda a, b: a * b, 2),
    "divide": Function(lambda a, b: a / b, 2),
    "negate": Function(lambda a: -a),
    "power": Function(lambda a, b: a**b, 2),
}
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


# ---- text

_SIGNS = {"add": ("+", 1), "subtract": ("-", 1), "multiply": ("*", 2), "divide": ("/", 2), "power": ("**", 4)}
_OF_AST: Mapping[type, str] = {
    ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.Div: "divide", ast.Pow: "power",
}  # fmt: skip


def _text(node: Node, least: int = 0) -> str:
    """A node in parentheses if its operator binds less than `least`."""
    if isinstance(node, Name):
        return node.name
    if isinstance(node, Number):
        text = str(int(node.value)) if node.value.is_integer() and abs(node.value) < 1e15 else repr(node.value)
        return f"({text})" if node.value < 0 and least > 1 else text
    if node.function in _SIGNS:
        sign, binds = _SIGNS[node.function]
        left, right = node.arguments
        text = f"{_text(left, binds + (binds == 4))} {sign} {_text(right, binds + (binds < 4))}"
    elif node.function == "negate":
        binds, text = 3, f"-{_text(node.arguments[0], 3)}"
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
    operations = [node for part in statements for node in ast.walk(part) if isinstance(node, ast.BinOp | ast.Call)]
    if len(operations) > MAX_OPERATIONS:
        raise ExpressionError(f"has {len(operations)} operations; at most {MAX_OPERATIONS} are possible")
    steps: dict[str, Node] = {}
    for statement in statements[:-1]:
        if not isinstance(statement, ast.Assign) or not _is_name(statement.targets) or len(statement.targets) != 1:
            raise ExpressionError(f"must have steps of the form 'name = ...', got {ast.unparse(statement)!r}")
        name = statement.targets[0].id  # type: ignore[attr-defined]
        value = _node(statement.value)
        if name in steps or name in FUNCTIONS or any(name in _names(node) for node in [*steps.values(), value]):
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
        if tree.id in FUNCTIONS or tree.id.startswith("_") or not tree.id.isascii():
            raise ExpressionError(f"has the name {tree.id!r}; give letters, digits and _, and no name of a function")
        return Name(tree.id)
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int | float) and not isinstance(tree.value, bool):
        if not (abs(tree.value) <= 2.0**100):  # also refuses NaN
            raise ExpressionError(f"has the number {ast.unparse(tree)}; allowed: up to 2**100")
        return Number(float(tree.value))
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        inside = _node(tree.operand, depth + 1)
        return Number(-inside.value) if isinstance(inside, Number) else Call("negate", (inside,))
    if isinstance(tree, ast.BinOp) and type(tree.op) in _OF_AST:
        return _operation(_OF_AST[type(tree.op)], _node(tree.left, depth + 1), _node(tree.right, depth + 1))
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.keywords:
        return _call(tree.func.id, tuple(_node(each, depth + 1) for each in tree.args))
    raise ExpressionError(
        f"has {ast.unparse(tree)!r}; allowed: + - * / **, numbers, names, and calls of {', '.join(FUNCTIONS)}"
    )


def _operation(name: str, left: Node, right: Node) -> Node:
    if name == "power" and not (isinstance(right, Number) and abs(right.value) <= MAX_EXPONENT):
        raise ExpressionError(f"has the exponent {_text(right)}; allowed: numbers from -{MAX_EXPONENT} to {MAX_EXPONENT}")
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
