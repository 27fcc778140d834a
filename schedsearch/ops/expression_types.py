"""Which numbers of an expression are floats and which are integers, as an expression that says so at every operation.

Inputs of int16 and more bits are integers of 64 bits. Those of int8 and uint8 are read as floats, which hold them exactly:
`a + b` of two uint8 is a float. `int64(a)` makes an integer of one, and operators that take integers only, such as `a & b`,
do that themselves. Comparisons make the integers 0 and 1. A number without a fraction is what stands beside it. An integer
beside a float becomes a float.

`typed` returns the same expression with conversions, and with names of its own for operations on integers: `whole_add`. An
expression over floats stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.expression_functions import CASTS, FUNCTIONS, OPERATORS, Function, saturated, truncated, wrap
from schedsearch.ops.expressions import Call, Expression, ExpressionError, Name, Node, Number

WHOLE = "whole_"  # before the name of an operation on integers
BYTES = ("int8", "uint8")
_INT64 = 2**63
_Kind = Literal["float", "byte", "whole", "number"]


def is_whole(dtype: str) -> bool:
    """Whether an input of this dtype is an integer in expressions."""
    return not dtype_of(dtype).is_float and dtype not in BYTES


@dataclass(frozen=True)
class Typed:
    """An expression of known inputs.

    Attributes:
        expression: with conversions; numbers that are integers are ints.
        whole: whether the result is an integer.
        decided: whether no float32 that may be rounded decides about an integer.
        whole_inputs: inputs that are integers.
    """

    expression: Expression
    whole: bool
    decided: bool
    whole_inputs: frozenset[str]

    def evaluate(self, inputs: Mapping[str, object]) -> Any:
        """The definition, in NumPy: float64, or int64 if `whole`. `inputs` are arrays that broadcast together."""
        import numpy as np

        values = {
            name: np.asarray(inputs[name]).astype(np.int64 if name in self.whole_inputs else np.float64)
            for name in self.expression.inputs
        }
        with np.errstate(all="ignore"):
            for name, node in self.expression.steps:
                values[name] = _evaluate(node, values)
            return _evaluate(self.expression.result, values)


@functools.lru_cache(maxsize=1024)
def typed(expression: Expression, dtypes: tuple[tuple[str, str], ...]) -> Typed:
    """The expression for inputs of these dtypes: pairs of name and dtype.

    Raises:
        ExpressionError: an operator that takes integers gets a float.
    """
    kinds: dict[str, _Kind] = {}
    for name, dtype in dtypes:
        kinds[name] = "whole" if is_whole(dtype) else "byte" if dtype in BYTES else "float"
    whole_inputs = frozenset(name for name, kind in kinds.items() if kind == "whole")
    state = _State(kinds)
    steps = []
    for name, node in expression.steps:
        value, kind = state.read(node)
        steps.append((name, value))
        kinds[name] = "float" if kind == "number" else kind
    result, kind = state.read(expression.result)
    return Typed(Expression(tuple(steps), result), kind == "whole", state.decided, whole_inputs)


def stored(found: Typed, out_dtype: str) -> Expression:
    """The expression whose result a kernel stores as it is: an integer for outputs of int16 and more bits."""
    steps, result = found.expression.steps, found.expression.result
    row = dtype_of(out_dtype)
    if found.whole and row.is_float:
        result = Call("float_of_whole", (result,))
    elif not found.whole and is_whole(out_dtype):
        result = Call(f"saturate_{out_dtype}", (result,))
    return Expression(steps, result)


class _State:
    """Attributes: kinds: of inputs and steps so far."""

    def __init__(self, kinds: dict[str, _Kind]) -> None:
        self.kinds = kinds
        self.decided = True

    def read(self, node: Node) -> tuple[Node, _Kind]:
        if isinstance(node, Name):
            return node, self.kinds[node.name]
        if isinstance(node, Number):
            return node, ("number" if _is_integer(node.value) else "float")
        function = FUNCTIONS.get(node.function) or OPERATORS[node.function]
        read = [self.read(each) for each in node.arguments]
        return _RULES[function.rule](self, node.function, function, read)

    def float(self, argument: tuple[Node, _Kind]) -> Node:
        node, kind = argument
        if kind == "whole":
            return Call("float_of_whole", (node,))
        return Number(float(node.value)) if isinstance(node, Number) else node

    def integer(self, argument: tuple[Node, _Kind], function: str) -> Node:
        node, kind = argument
        if kind == "number":
            assert isinstance(node, Number)
            return Number(int(node.value))
        if kind == "float":
            raise ExpressionError(f"gives {function} a float; allowed: integers, such as int64(...) of it")
        return node if kind == "whole" else Call("whole_of_byte", (node,))

    def alike(self, arguments: Sequence[tuple[Node, _Kind]], function: str) -> tuple[list[Node], bool]:
        """The arguments as integers if one is and all can be, otherwise as floats."""
        kinds = [kind for _, kind in arguments]
        whole = "whole" in kinds and "float" not in kinds
        return [self.integer(each, function) if whole else self.float(each) for each in arguments], whole


_Read = list[tuple[Node, _Kind]]


def _float(state: _State, name: str, function: Function, read: _Read) -> tuple[Node, _Kind]:
    return Call(name, tuple(map(state.float, read))), "float"


def _test(state: _State, name: str, function: Function, read: _Read) -> tuple[Node, _Kind]:
    state.decided = False
    return Call(name, tuple(map(state.float, read))), "whole"


def _alike(state: _State, name: str, function: Function, read: _Read) -> tuple[Node, _Kind]:
    if name == "power" and read[0][1] == "whole":
        exponent = read[1][0]
        assert isinstance(exponent, Number)
        if not (_is_integer(exponent.value) and exponent.value >= 0):
            return Call(name, (state.float(read[0]), exponent)), "float"
    arguments, whole = state.alike(read, name)
    return Call(f"{WHOLE}{name}" if whole else name, tuple(arguments)), "whole" if whole else "float"


def _compare(state: _State, name: str, function: Function, read: _Read) -> tuple[Node, _Kind]:
    arguments, whole = state.alike(read, name)
    state.decided &= whole or all(kind in ("byte", "number") for _, kind in read)
    return Call(f"{WHOLE}{name}" if whole else name, tuple(arguments)), "whole"


def _choice(state: _State, name: str, function: Function, read: _Read) -> tuple[Node, _Kind]:
    condition, kind = read[0]
    if kind != "whole":
        state.decided &= kind == "byte"
        condition = Call("not_equal", (state.float(read[0]), Number(0.0)))
    branches, whole = state.alike(read[1:], name)
    return Call(f"{WHOLE}{name}" if whole else name, (condition, *branches)), "whole" if whole else "float"


def _whole(state: _State, name: str, function: Function, read: _Read) -> tuple[Node, _Kind]:
    return Call(f"{WHOLE}{name}", tuple(state.integer(each, _shown(name)) for each in read)), "whole"


def _cast(state: _State, name: str, function: Function, read: _Read) -> tuple[Node, _Kind]:
    (argument,) = read
    if name == "float32":
        return state.float(argument), "float"
    node, kind = argument
    if kind != "float":
        node = state.integer(argument, name)
        return node if name == "int64" else Call(f"wrap_{name}", (node,)), "whole"
    state.decided = False
    return Call(f"truncate_{name}", (node,)), "whole"


_RULES: Mapping[str, Callable[..., tuple[Node, _Kind]]] = {
    "float": _float, "test": _test, "alike": _alike, "compare": _compare, "choice": _choice, "whole": _whole, "cast": _cast,
}  # fmt: skip


def _is_integer(value: float) -> bool:
    return -_INT64 <= value < _INT64 and int(value) == value


def _shown(name: str) -> str:
    return {"bit_and": "&", "bit_or": "|", "bit_xor": "^", "invert": "~", "shift_left": "<<", "shift_right": ">>"}.get(
        name, name
    )


# ---- NumPy

_OF_WHOLE: Mapping[str, Callable[..., Any]] = {
    **{
        f"{WHOLE}{name}": function.whole
        for name, function in {**FUNCTIONS, **OPERATORS}.items()
        if function.whole is not None and function.rule != "cast"
    },
    **{f"wrap_{dtype}": wrap(dtype) for dtype in CASTS},
    **{f"truncate_{dtype}": truncated(dtype) for dtype in CASTS},
    **{f"saturate_{dtype}": saturated(dtype) for dtype in CASTS},
    "whole_of_byte": wrap("int64"),
    "float_of_whole": FUNCTIONS["float32"].whole or abs,
}


def _evaluate(node: Node, values: Mapping[str, Any]) -> Any:
    if isinstance(node, Name):
        return values[node.name]
    if isinstance(node, Number):
        return node.value
    found = _OF_WHOLE.get(node.function)
    function = found or (FUNCTIONS.get(node.function) or OPERATORS[node.function]).apply
    return function(*(_evaluate(each, values) for each in node.arguments))
