"""What the shape of an output depends on, and the function that computes it.

An operator whose output shapes are not known before it is called declares two things for each such output: what the shape
needs of every argument (nothing, its shape, or its values), and a shape function over exactly these. The function is plain
integer Python. The same function runs on the host and, compiled, on the device, where neither values nor sizes need to leave
the device's memory.

A dependence belongs to an argument, not to the operator: a slice needs the *values* of begin, end and strides, 8 bytes each,
but only the *shape* of the array to be sliced.

See docs/decisions/141-a-shape-needs-arguments-not-operators.md.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schedsearch.errors import OperatorError, UsageError
from schedsearch.ops.integer_python import check_source
from schedsearch.typed import GivenParams

EXTENTS = "_extents"  # the int64 array x_extents holds the extents of x, where these are known on the device only
STRIDE = "_stride_"  # the scalar x_stride_0 is the distance in elements between neighbours along dimension 0 of x


class Dependence(enum.StrEnum):
    """What an output's shape needs of an argument."""

    NOTHING = "nothing"
    SHAPE = "shape"
    VALUE = "value"


class SizeError(UsageError):
    """A shape function got impossible inputs, or gave an impossible size, while a kernel or network ran."""


@dataclass(frozen=True)
class ShapeFunction:
    """The extents of one output.

    Attributes:
        needs: argument -> what the extents need of it. All arguments of the operator are named, in their order.
        extent: `extent(axis, *needed)` returns the extent of the output along an axis, an integer that is not negative.
            There is one parameter for each argument whose dependence is not NOTHING, named like the argument: the sequence
            of its extents (SHAPE), or the flat sequence of its values (VALUE, for integer arguments). It may use
            integers, `if`, `for ... in range(...)`, `while`, `min`, `max`, `abs`, `len`, and plain functions like itself;
            see `schedsearch.ops.integer_python`. Numbers are those of int64.
        problem: `problem(*needed)` returns 0 if the inputs are possible, otherwise the number of an entry of `messages`,
            counted from 1. `extent` is only called for inputs that are possible.
        messages: what is wrong with the inputs, and what is allowed.
        counted: `extent` gives upper limits only. The operator's kernel counts the true extents while it computes, and
            writes them to its output `NAME_extents`, as for nonzero or unique.
        made_by: rule and parameters that a graph made the function of, as data; None of an operator's own function.

    Raises:
        OperatorError: a function is not integer Python, or its parameters are not those that `needs` declares.

    Examples:
        >>> def extent(axis, x, repeats):
        ...     return x[axis] * repeats[0] if axis == 0 else x[axis]
        >>> tile = ShapeFunction({"x": Dependence.SHAPE, "repeats": Dependence.VALUE}, extent)
        >>> evaluate(tile, 2, {"x": (3, 5), "repeats": (2,)})
        (6, 5)
    """

    needs: Mapping[str, Dependence]
    extent: Callable[..., int]
    problem: Callable[..., int] | None = None
    messages: tuple[str, ...] = ()
    counted: bool = False
    made_by: tuple[str, GivenParams] | None = None

    def __post_init__(self) -> None:
        wrong = [name for name, need in self.needs.items() if not isinstance(need, Dependence)]
        if wrong:
            allowed = ", ".join(f"Dependence.{each.name}" for each in Dependence)
            raise OperatorError(f"the dependence on {wrong[0]} is {self.needs[wrong[0]]!r}; allowed: {allowed}")
        check_source(self.extent, ("axis", *self.inputs))
        if self.problem is not None:
            check_source(self.problem, self.inputs)
            if not self.messages:
                raise OperatorError(f"{self.problem.__name__} has no messages; give one for each problem")

    @property
    def inputs(self) -> tuple[str, ...]:
        """The arguments that the function gets."""
        return tuple(name for name, need in self.needs.items() if need is not Dependence.NOTHING)

    @property
    def values(self) -> tuple[str, ...]:
        """The arguments whose values the function gets."""
        return tuple(name for name, need in self.needs.items() if need is Dependence.VALUE)


def evaluate(
    function: ShapeFunction, rank: int, inputs: Mapping[str, Sequence[int]], what: str = "output"
) -> tuple[int, ...]:
    """The extents on the host.

    Args:
        rank: of the output.
        inputs: argument -> its extents or its flat values, for each of `function.inputs`.
        what: names operator and output in messages.

    Raises:
        SizeError: the inputs are impossible, or an extent is negative, not an integer, or beyond int64. The message
            names `what` and the inputs.
    """
    given = [_Numbers(map(_Int64, inputs[name])) for name in function.inputs]
    shown = ", ".join(f"{name}={_shown(inputs[name])}" for name in function.inputs)
    try:
        if function.problem is not None and (number := function.problem(*given)):
            raise SizeError(f"{what}: {function.messages[number - 1]}; got {shown}")
        found = [function.extent(axis, *given) for axis in range(rank)]
    except (ArithmeticError, IndexError, ValueError, TypeError) as error:
        if isinstance(error, SizeError):
            raise
        raise SizeError(f"{what}: the shape function fails for {shown}: {type(error).__name__}: {error}") from error
    for axis, extent in enumerate(found):
        if not isinstance(extent, int) or isinstance(extent, bool) or extent < 0:
            kind = "is negative" if isinstance(extent, int) and extent < 0 else "is not an integer"
            raise SizeError(f"{what}: extent {extent!r} of dimension {axis} {kind}, for {shown}; correct the shape function")
    return tuple(map(int, found))


def check_bound(extents: Sequence[int], bound: Sequence[int], what: str) -> None:
    """Raises SizeError if extents exceed the declared bound; the message names `what` and both."""
    if any(extent > most for extent, most in zip(extents, bound)):
        raise SizeError(
            f"{what} would be {_shape(extents)}, which exceeds its declared bound {_shape(bound)}; declare larger bounds"
        )


def _shown(numbers: Sequence[int]) -> str:
    text = ", ".join(str(int(number)) for number in numbers[:8])
    return f"[{text}{', ...' if len(numbers) > 8 else ''}]"


def _shape(extents: Sequence[int]) -> str:
    return "x".join(map(str, extents)) or "a number"


class _Numbers(tuple[Any, ...]):
    """A sequence without negative places: those mean something else on the device."""

    __slots__ = ()

    def __getitem__(self, place: Any) -> Any:
        if not 0 <= place < len(self):
            raise IndexError(f"place {int(place)} of {len(self)} numbers; allowed: 0 to {len(self) - 1}")
        return super().__getitem__(place)


class _Int64(int):
    """An integer whose arithmetic fails where int64 overflows, so that the host never differs from the device."""

    __slots__ = ()

    def __new__(cls, value: int) -> _Int64:
        if not -(2**63) <= value < 2**63:
            raise OverflowError(f"{int(value)} is beyond int64")
        return super().__new__(cls, value)


def _checked(name: str) -> Callable[..., Any]:
    operation = getattr(int, name)

    def apply(*numbers: Any) -> Any:
        result = operation(*numbers)
        return result if result is NotImplemented else _Int64(result)

    return apply


for _name in ("add", "sub", "mul", "floordiv", "mod", "lshift", "rshift", "and", "or", "xor"):
    setattr(_Int64, f"__{_name}__", _checked(f"__{_name}__"))
    setattr(_Int64, f"__r{_name}__", _checked(f"__r{_name}__"))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(_Int64, f"__{_name}__", _checked(f"__{_name}__"))
