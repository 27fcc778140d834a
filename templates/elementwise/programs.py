"""Expressions as functions of a kernel: a tree of small functions over a tuple of the inputs' numbers. Compilers merge them.

The same tree serves kernels, whose numbers are float32, and the reference, whose numbers are pairs of a float64 and a bound
of its error. A table of functions says how each is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from schedsearch.ops.expression_types import WHOLE
from schedsearch.ops.expressions import Call, Expression, Name, Node, Number

Compute = Callable[[Any], Any]


def program(expression: Expression, inputs: Sequence[str], functions: Mapping[str, Callable[..., Any]]) -> Compute:
    """`compute(numbers)` for kernels: the result for one element, from a tuple of the inputs' numbers in the order of
    `inputs`.

    Args:
        expression: of `expression_types.typed`.
        functions: a function for each of `FUNCTIONS` and `OPERATORS`, and those that `typed` adds for integers.
            `number(value)` makes the constant of a kernel, `whole(value)` an integer one, and `power(exponent)` the
            function of a base.
    """
    slots = {name: slot for slot, name in enumerate(inputs)}
    steps = []
    for name, node in expression.steps:
        steps.append(_compute(node, slots, functions))
        slots = {**slots, name: len(slots)}
    found = _compute(expression.result, slots, functions)
    for step in reversed(steps):
        found = _after(step, found)
    return found


def _after(step: Compute, rest: Compute) -> Compute:
    def compute(numbers: Any) -> Any:
        return rest(numbers + (step(numbers),))  # noqa: RUF005 - Numba knows no *

    return compute


def _compute(node: Node, slots: Mapping[str, int], functions: Mapping[str, Callable[..., Any]]) -> Compute:
    if isinstance(node, Name):
        slot = slots[node.name]

        def number(numbers: Any) -> Any:
            return numbers[slot]

        return number
    if isinstance(node, Number):
        value = functions["whole" if isinstance(node.value, int) else "number"](node.value)

        def constant(numbers: Any) -> Any:
            return value

        return constant
    return _call(node, slots, functions)


def _call(node: Call, slots: Mapping[str, int], functions: Mapping[str, Callable[..., Any]]) -> Compute:
    function, arguments = functions[node.function], list(node.arguments)
    if node.function in ("power", f"{WHOLE}power"):
        exponent = arguments.pop()
        assert isinstance(exponent, Number)
        function = function(exponent.value)
    computed = [_compute(each, slots, functions) for each in arguments]
    first, second, third = (*computed, *[computed[0]] * 2)[:3]

    def of_one(numbers: Any) -> Any:
        return function(first(numbers))

    def of_two(numbers: Any) -> Any:
        return function(first(numbers), second(numbers))

    def of_three(numbers: Any) -> Any:
        return function(first(numbers), second(numbers), third(numbers))

    return {1: of_one, 2: of_two, 3: of_three}[len(computed)]
