"""Conditions of a T1 description: Python-like expressions over parameters, parsed by a whitelist and never run as code.

An expression may contain names of parameters, numbers, strings, True and False; + - * / // %; comparisons, also chained and
`in` a list; and, or, not; parentheses; min and max. It becomes a tree of NumPy operations over columns of values. Everything
else is refused: attributes, subscripts, powers (9**9**9 can stop a machine), and calls other than min and max. The number of
operations is known before the first one runs, so the reader of a file can limit its work.
"""

from __future__ import annotations

import ast
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedsearch.errors import UsageError, did_you_mean
from schedsearch.records.formats.recording import Place
from schedsearch.typed import Array, JsonObject

Columns = Mapping[str, Array]
Node = Callable[[Columns], Any]

MAX_LENGTH = 10_000  # characters; longer ones are attacks on the parser
_SHOWN = 200  # characters of an expression in a message
MAX_DEPTH = 100  # nested operations; deeper ones are attacks on the stack
_ARITHMETIC: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.AST], Callable[[Any], Any]] = {
    ast.Not: lambda value: np.logical_not(_truth(value)),
    ast.USub: lambda value: -_number(value),
    ast.UAdd: lambda value: +_number(value),
}
_COMPARISONS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_CALLS: JsonObject = {"min": np.minimum, "max": np.maximum}


class Condition:
    """A parsed condition; call `holds` with columns of values.

    Args:
        text: the expression.
        names: the parameters it may read.
        place: its position in a file, for messages.

    Attributes:
        operations: how many operations it takes for each configuration.

    Raises:
        UsageError: it is not an expression, reads an unknown name, or uses an operation that is not allowed.
    """

    def __init__(self, text: str, names: Collection[str], place: Place) -> None:
        self.text = text
        if len(text) > MAX_LENGTH:
            place.fail(f"a condition of {len(text):,} characters; at most {MAX_LENGTH:,} are allowed")
        try:
            tree = ast.parse(text.strip(), mode="eval")
            compiler = _Compiler(text, names, place)
            self._node = compiler.node(tree.body)
            self.operations = compiler.operations
        except SyntaxError as error:
            place.fail(f"{text[:_SHOWN]!r} is not an expression: {error.msg} at column {error.offset}")
        except UsageError:
            raise
        except (ValueError, RecursionError, MemoryError) as error:
            place.fail(f"{text[:80]!r} is not an expression that can be read: {error or type(error).__name__}")
        self._place = place

    def holds(self, columns: Columns, n: int) -> NDArray[np.bool_]:
        """Whether the condition is true for each of n configurations. `columns` has (n,) values of every parameter.

        Raises:
            UsageError: it calculates with strings.
        """
        try:
            with np.errstate(all="ignore"):  # a division by zero is harmless if an `or` covers it
                return np.broadcast_to(np.asarray(_truth(self._node(columns))).astype(np.bool_), (n,))
        except (TypeError, ValueError, np.exceptions.DTypePromotionError):
            self._place.fail(
                f"{self.text[:_SHOWN]!r} cannot be computed: strings can be compared with strings, not calculated with"
            )


class _Compiler:
    def __init__(self, text: str, names: Collection[str], place: Place) -> None:
        self._text, self._names, self._place = text, names, place
        self._depth = 0
        self.operations = 0

    def node(self, tree: ast.AST) -> Node:
        """The function that computes an expression. Raises UsageError if anything in it is not allowed."""
        if self._depth == MAX_DEPTH:
            raise UsageError(
                f"{self._place}: {self._text[:80]!r}... has more than {MAX_DEPTH} nested operations; simplify it"
            )
        self._depth += 1
        self.operations += 1
        compute = self._node(tree)
        self._depth -= 1
        return compute

    def _node(self, tree: ast.AST) -> Node:
        if isinstance(tree, ast.Constant):
            return self._constant(tree)
        if isinstance(tree, ast.Name):
            if tree.id not in self._names:
                known = ", ".join(itertools.islice(self._names, 100))
                hint = did_you_mean(tree.id, self._names)
                raise self._error(tree, f"unknown name {tree.id[:_SHOWN]!r}{hint}; parameters are {known}")
            return functools.partial(_read, tree.id)
        if isinstance(tree, ast.BoolOp):
            parts = [self.node(part) for part in tree.values]
            join = np.logical_and if isinstance(tree.op, ast.And) else np.logical_or
            return lambda k: functools.reduce(join, (_truth(part(k)) for part in parts))
        if isinstance(tree, ast.UnaryOp) and type(tree.op) in _UNARY:
            inner = self.node(tree.operand)
            apply = _UNARY[type(tree.op)]
            return lambda k: apply(inner(k))
        if isinstance(tree, ast.BinOp) and type(tree.op) in _ARITHMETIC:
            left, right, compute = self.node(tree.left), self.node(tree.right), _ARITHMETIC[type(tree.op)]
            return lambda k: compute(_number(left(k)), _number(right(k)))
        if isinstance(tree, ast.Compare):
            return self._comparison(tree)
        if isinstance(tree, ast.Call):
            return self._call(tree)
        what = type(getattr(tree, "op", tree)).__name__  # Pow and not BinOp for `a ** b`
        raise self._error(tree, f"{what} is not allowed")

    def _constant(self, tree: ast.Constant) -> Node:
        value = tree.value
        if not isinstance(value, bool | int | float | str) or (isinstance(value, int) and abs(value) >= 2**63):
            raise self._error(tree, f"the constant {str(value)[:40]!r} is not allowed")
        # Numbers of NumPy: no product of constants can explode, and 1.5 % 0 is nan as it is in a column, not an error.
        fixed: dict[type, type] = {int: np.int64, float: np.float64}
        constant = fixed.get(type(value), type(value))(value)
        return lambda _: constant

    def _comparison(self, tree: ast.Compare) -> Node:
        links = []
        left = self.node(tree.left)
        for op, right_tree in zip(tree.ops, tree.comparators):
            if isinstance(op, ast.In | ast.NotIn) and isinstance(right_tree, ast.List | ast.Tuple | ast.Set):
                choices = [self.node(choice) for choice in right_tree.elts]
                links.append(functools.partial(_among, left, choices, isinstance(op, ast.NotIn)))
                continue
            if type(op) not in _COMPARISONS:
                raise self._error(tree, f"the comparison {type(op).__name__} is not allowed here")
            right = self.node(right_tree)
            links.append(functools.partial(_compare, _COMPARISONS[type(op)], left, right))
            left = right
        return lambda k: functools.reduce(np.logical_and, (link(k) for link in links))

    def _call(self, tree: ast.Call) -> Node:
        name = tree.func.id if isinstance(tree.func, ast.Name) else ""
        if name not in _CALLS or tree.keywords or len(tree.args) < 2:
            called = ast.get_source_segment(self._text.strip(), tree) or "?"
            raise self._error(tree, f"calls a function: {called[:80]}; only min and max of two or more values may be called")
        arguments = [self.node(argument) for argument in tree.args]
        return lambda k: functools.reduce(_CALLS[name], (argument(k) for argument in arguments))

    def _error(self, tree: ast.AST, message: str) -> UsageError:
        column = getattr(tree, "col_offset", 0) + 1
        return UsageError(
            f"{self._place}: {self._text[:_SHOWN]!r}, column {column}: {message}; conditions have names, constants, "
            "+ - * / // %, comparisons, and, or, not, min and max, and are never run as code"
        )


def _read(name: str, columns: Columns) -> Any:
    return columns[name]


def _number(value: object) -> Any:
    """A bool counts as 0 or 1. Refuses strings: one times 10**9, or formatted to that width, could fill the memory."""
    kind = np.asarray(value).dtype.kind
    if kind not in "bif":
        raise TypeError("a string")
    return np.asarray(value, dtype=np.int64) if kind == "b" else value


def _truth(value: object) -> Any:
    """Refuses strings, which have no truth here; a column of strings may be an array of objects."""
    if np.asarray(value).dtype.kind not in "bif":
        raise TypeError("a string")
    return value


def _compare(compute: Callable[[Any, Any], Any], left: Node, right: Node, columns: Columns) -> Any:
    return compute(left(columns), right(columns))


def _among(left: Node, choices: list[Node], inverted: bool, columns: Columns) -> Any:
    value = left(columns)
    found: Any = functools.reduce(np.logical_or, (value == choice(columns) for choice in choices), np.False_)
    return np.logical_not(found) if inverted else found
