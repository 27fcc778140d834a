"""The part of Python that shape functions are written in: what runs alike on the host, on a CPU and on a GPU.

Allowed are integers, local variables, `+ - * // % << >> & | ^`, comparisons, `and`, `or`, `not`, conditional
expressions, `if`, `for ... in range(...)`, `while`, `break`, `continue`, `return`, `x[i]` and `len(x)` of the function's
own parameters, `min`, `max` and `abs` of numbers, and calls of plain functions that are written likewise. A function may
capture integers, tuples of them, and such functions. It can therefore read nothing but what it is given. The functions of
`schedsearch.ops.float_words`, which compute with numbers of float32 and float64 as integers, may be called, too.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from schedsearch.errors import OperatorError

CALLS = ("abs", "len", "max", "min", "range")
_STATEMENTS = (
    ast.Assign,
    ast.AugAssign,
    ast.AnnAssign,
    ast.If,
    ast.For,
    ast.While,
    ast.Return,
    ast.Break,
    ast.Continue,
    ast.Pass,
)
_OPERATORS = (
    ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.LShift, ast.RShift, ast.BitAnd, ast.BitOr, ast.BitXor,
    ast.USub, ast.UAdd, ast.Not, ast.Invert, ast.And, ast.Or,
    ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq,
)  # fmt: skip
_EXPRESSIONS = (
    ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Name, ast.Constant, ast.Subscript, ast.Call, ast.Tuple,
    ast.Load, ast.Store,
)  # fmt: skip


def _is_of_floats(function: Callable[..., object]) -> bool:
    """Whether a function is one of `float_words.ALL`. Only then it is imported, because it needs NumPy."""
    if function.__module__ != "schedsearch.ops.float_words":
        return False
    from schedsearch.ops.float_words import ALL

    return function in ALL


def check_source(function: Callable[..., object], parameters: Sequence[str] | None = None) -> None:
    """Checks that a function is integer Python, with every function that it calls.

    Args:
        parameters: names that its parameters must have, in order; None: any.

    Raises:
        OperatorError: it is not; the message names the function, the line, and what is allowed.
    """
    _Check(function, parameters, ()).run()


class _Check:
    def __init__(self, function: object, parameters: Sequence[str] | None, path: tuple[object, ...]) -> None:
        if not isinstance(function, FunctionType) or function.__name__ == "<lambda>":
            raise OperatorError(f"a shape function is {function!r}; allowed: a function that is written with def")
        self.function, self.path = function, (*path, function)
        self.name = f"the shape function {function.__qualname__}"
        own = tuple(inspect.signature(function).parameters.values())
        if any(each.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD or each.default is not each.empty for each in own):
            raise OperatorError(f"{self.name} has parameters with defaults or stars; allowed: plain ones")
        self.parameters = tuple(each.name for each in own)
        if parameters is not None and self.parameters != tuple(parameters):
            raise OperatorError(
                f"{self.name} takes ({', '.join(self.parameters)}); by its declared dependences it gets "
                f"({', '.join(parameters)}): declare what it reads, and nothing else"
            )
        try:
            (self.tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        except (OSError, SyntaxError, TypeError, ValueError) as error:
            raise OperatorError(f"the source of {self.name} cannot be read: {error}; write it in a module") from error
        self.locals = set(self.parameters)

    def run(self) -> None:
        if not isinstance(self.tree, ast.FunctionDef):
            self._refuse(self.tree, "it is not written with def")
        assert isinstance(self.tree, ast.FunctionDef)
        body = self.tree.body
        if (
            isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
            and isinstance(body[0].value.value, str)
        ):
            body = body[1:]
        self.locals |= {
            each.id for each in ast.walk(self.tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
        }
        for statement in body:
            self._statement(statement)
        if not _returns(body):
            self._refuse(self.tree, "it may end without a return; return an integer at the end")

    def _refuse(self, node: object, what: str) -> Any:
        line = self.function.__code__.co_firstlineno + getattr(node, "lineno", 1) - 1
        raise OperatorError(
            f"{self.name}, line {line}: {what}; allowed: integer Python, as described in schedsearch.ops.integer_python"
        )

    def _statement(self, node: object) -> None:
        if not isinstance(node, _STATEMENTS):
            self._refuse(node, f"it has a statement {type(node).__name__}")
        if isinstance(node, ast.Return) and (node.value is None or ast.unparse(node.value) == "None"):
            self._refuse(node, "it returns nothing")
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            self._refuse(node, "it returns several values")
        if isinstance(node, ast.For):
            is_range = (
                isinstance(node.iter, ast.Call) and isinstance(node.iter.func, ast.Name) and node.iter.func.id == "range"
            )
            if not is_range or node.orelse or not isinstance(node.target, ast.Name):
                self._refuse(node, "a for loop is not one over range(...)")
        if isinstance(node, ast.While) and node.orelse:
            self._refuse(node, "a while loop has an else")
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if hasattr(node, "target") else []
        for target in targets:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            if not all(isinstance(each, ast.Name) and each.id not in self.parameters for each in names):
                self._refuse(node, "it assigns to something that is not a local variable")
        for field in ("test", "value", "iter"):
            if (expression := getattr(node, field, None)) is not None:
                self._expression(expression)
        for field in ("body", "orelse"):
            for inner in getattr(node, field, []):
                self._statement(inner)

    def _expression(self, node: object) -> None:
        """Also checks everything inside."""
        if isinstance(node, ast.Constant):
            if not isinstance(node.value, int):
                self._refuse(node, f"it has the constant {node.value!r}, which is not an integer")
        elif isinstance(node, ast.Name):
            self._name(node)
        elif isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, ast.Subscript):
            if not isinstance(node.value, ast.Name) or isinstance(node.slice, ast.Slice | ast.Tuple):
                self._refuse(node, "it has a subscript that is not name[place]")
            self._expression(node.value)
            self._expression(node.slice)
        elif isinstance(node, (*_EXPRESSIONS, *_OPERATORS)):
            for inner in ast.iter_child_nodes(node):
                self._expression(inner)
        else:
            what = "/, which is not whole; write //" if isinstance(node, ast.Div) else type(node).__name__
            self._refuse(node, f"it has {what}")

    def _name(self, node: ast.Name) -> None:
        if node.id in self.locals:
            return
        value = self._captured(node)
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(each, int) for each in numbers):
            self._refuse(node, f"it reads {node.id}, which is {type(value).__name__} and not declared")

    def _call(self, node: ast.Call) -> None:
        if not isinstance(node.func, ast.Name) or node.keywords or any(isinstance(each, ast.Starred) for each in node.args):
            self._refuse(node, "it has a call that is not name(values, ...)")
        assert isinstance(node.func, ast.Name)
        called = self._captured(node.func)
        if any(called is getattr(builtins, name) for name in CALLS):
            for argument in node.args:
                self._expression(argument)
            return
        if not isinstance(called, FunctionType):
            self._refuse(node, f"it calls {node.func.id}; allowed: {', '.join(CALLS)}, and plain functions")
        if called in self.path:
            self._refuse(node, f"{node.func.id} calls itself: write a loop instead")
        for argument in node.args:
            self._expression(argument)
        if not _is_of_floats(called):
            _Check(called, None, self.path).run()

    def _captured(self, node: ast.Name) -> Any:
        cells = dict(zip(self.function.__code__.co_freevars, self.function.__closure__ or ()))
        if node.id in cells:
            try:
                return cells[node.id].cell_contents
            except ValueError:
                self._refuse(node, f"{node.id} has no value yet")
        if node.id in self.function.__globals__:
            return self.function.__globals__[node.id]
        return getattr(builtins, node.id, None) or self._refuse(node, f"there is no {node.id}")


def _returns(body: Sequence[object]) -> bool:
    """Whether statements always end with a return."""
    last = body[-1] if body else None
    if isinstance(last, ast.If):
        return _returns(last.body) and _returns(last.orelse)
    if isinstance(last, ast.While):
        endless = isinstance(last.test, ast.Constant) and bool(last.test.value)
        return endless and not any(isinstance(each, ast.Break) for each in ast.walk(last))
    return isinstance(last, ast.Return)
