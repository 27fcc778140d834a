"""Rules over knobs, written as Python expressions, for whole columns of configurations."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from schedsearch.errors import UsageError, did_you_mean

_FUNCTIONS = {"min": np.minimum, "max": np.maximum, "abs": np.abs}


def predicate(rule: str, knobs: Collection[str]) -> Callable[[Mapping[str, Any]], Any]:
    """The rule as a function of columns of knob values.

    Raises:
        UsageError: the rule is not an expression, or names something that is not a knob.

    Examples:
        >>> predicate("tile * tile <= 1024", ["tile"])({"tile": np.array([16, 64])})
        array([ True, False])
    """
    try:
        tree = ast.parse(rule, mode="eval")
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"rule {rule!r} is not an expression: {error}; write, e.g., 'tile * tile <= 1024'") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in knobs and node.id not in _FUNCTIONS:
            hint = did_you_mean(node.id, list(knobs))
            raise UsageError(f"rule {rule!r} names {node.id!r}{hint}; allowed: the knobs {', '.join(knobs)}")
        if isinstance(node, ast.Attribute | ast.Lambda | ast.Subscript | ast.NamedExpr):
            raise UsageError(f"rule {rule!r} is not plain arithmetic; allowed: knobs, numbers, operators, min, max, abs")
    code = compile(ast.fix_missing_locations(_Columnwise().visit(tree)), f"<rule {rule}>", "eval")
    names = {**_FUNCTIONS, "_all": _all, "_any": _any, "_not": np.logical_not, "_where": np.where, "__builtins__": {}}
    return lambda columns: eval(code, names, _Wanted(columns, knobs))


class _Wanted(dict[str, Any]):
    """Looks a name up when the rule reads it, so that the space knows which columns a rule reads."""

    def __init__(self, columns: Mapping[str, Any], knobs: Collection[str]) -> None:
        super().__init__()
        self._columns, self._knobs = columns, knobs

    def __missing__(self, name: str) -> Any:
        if name not in self._knobs:
            raise KeyError(name)  # then it is a function
        return self._columns[name]


def _all(*parts: Any) -> Any:
    return np.logical_and.reduce(np.broadcast_arrays(*parts))


def _any(*parts: Any) -> Any:
    return np.logical_or.reduce(np.broadcast_arrays(*parts))


class _Columnwise(ast.NodeTransformer):
    """`and`, `or`, `not`, chains of comparisons and conditional expressions, as functions of whole columns."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        return _call("_all" if isinstance(node.op, ast.And) else "_any", node.values)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return _call("_not", [node.operand]) if isinstance(node.op, ast.Not) else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        terms = [node.left, *node.comparators]
        pairs: list[ast.expr] = [
            ast.Compare(left, [operator], [right]) for left, operator, right in zip(terms, node.ops, terms[1:])
        ]
        return pairs[0] if len(pairs) == 1 else _call("_all", pairs)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        return _call("_where", [node.test, node.body, node.orelse])


def _call(name: str, arguments: list[ast.expr]) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), arguments, [])
