"""From what a caller passes to the arguments of a workload: shapes, strides, number formats and scalars."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schedsearch.errors import ArgumentError, UsageError
from schedsearch.ops.dtypes import DTYPES
from schedsearch.ops.own_kernel import Argument, Role, contiguous
from schedsearch.runtime import arrays
from schedsearch.text import shortened, type_text

_SHAPE = re.compile(r"([0-9]+(?:x[0-9]+)*):([a-z0-9_]+)")


@dataclass(frozen=True)
class Given:
    """One argument of a call.

    Attributes:
        view: of an array; None for scalars and for shapes given as text.
        value: of a scalar.
    """

    argument: Argument
    view: arrays.ArrayView | None = None
    value: int | float | bool = 0


def read(name: str, given: Any, role: Role) -> Given:
    """Looks at an argument.

    Args:
        given: an array, a number, or the shape of an array as text, like "4096x4096:float32".
        role: of an array: in, out or inout; of a scalar: fixed or scalar.

    Raises:
        ArgumentError: it is something else, or its number format is not possible.
    """
    if isinstance(given, str):
        return Given(_from_text(name, given, role))
    scalar = _scalar(given)
    if role in ("fixed", "scalar") or scalar is not None:
        if scalar is None or role not in ("fixed", "scalar"):
            wanted = "an array" if scalar is not None else "a number"
            raise ArgumentError(f"{name} is {type_text(given)}; allowed: {wanted}, as in the first call")
        dtype, value = scalar
        if role == "fixed" and dtype.startswith("float"):
            raise ArgumentError(f"{name} is {given!r}, and grid, block or shared reads it; allowed: an array, or an integer")
        return Given(Argument(name, dtype, role, value=int(value) if role == "fixed" else 0), value=value)
    if isinstance(given, list):
        raise ArgumentError(f"{name} is a list; allowed: arrays and numbers; write numpy.asarray({name}, numpy.float32)")
    if given is None and role in ("out", "inout"):
        raise ArgumentError(
            f"{name} is None, and the kernel writes it; give it an array, which numpy.empty or torch.empty makes"
        )
    if isinstance(given, tuple | list | dict) or getattr(getattr(given, "dtype", None), "fields", None):
        raise ArgumentError(
            f"{name} is a {'record array' if hasattr(given, 'dtype') else type(given).__name__}; allowed: arrays of "
            "numbers, and numbers; pass its parts as arguments of their own"
        )
    seen = arrays.view(given, name)
    if seen.dtype not in DTYPES:
        how = f"{name}.view('uint8')" if seen.dtype == "bool" else "convert it"
        raise ArgumentError(f"{name} has dtype {seen.dtype}; allowed: {', '.join(DTYPES)}; {how}")
    if not seen.shape or 0 in seen.shape:
        raise ArgumentError(f"{name} has shape {seen.shape}; allowed: one axis or more, with elements")
    if any(stride < 0 for stride in seen.strides):
        raise ArgumentError(f"{name} has strides {seen.strides}; allowed: none below zero; copy it")
    strides = tuple(own if extent == 1 else stride
                    for extent, stride, own in zip(seen.shape, seen.strides, contiguous(seen.shape)))  # fmt: skip
    made = Argument(name, seen.dtype, role, seen.shape, strides)
    if role != "in" and made.memory_order is None:
        raise ArgumentError(
            f"{name} has strides {seen.strides} for shape {seen.shape}; an output must have no gaps: copy it"
        )
    return Given(made, seen)


def format_of(number: int) -> str:
    """The format of an integer of Python, as Numba types it.

    Raises:
        ArgumentError: it has no format.
    """
    if not -(2**63) <= number < 2**64:
        raise ArgumentError(f"the number {shortened(str(number), 40)} is too large; allowed: -2**63 to 2**64 - 1")
    return "int64" if number < 2**63 else "uint64"


def is_array(given: object) -> bool:
    """Whether an argument counts as an array, from its type."""
    return isinstance(given, str) or _scalar(given) is None


def _scalar(given: Any) -> tuple[str, int | float | bool] | None:
    """Number format and value of a scalar, typed as Numba types it; None if it is not one."""
    if isinstance(given, bool):
        return "bool", given
    if isinstance(given, int):
        return format_of(given), int(given)
    if isinstance(given, float):
        return ("float64", given) if type(given) is float else (str(getattr(given, "dtype", "float64")), float(given))
    dtype = getattr(given, "dtype", None)
    if dtype is not None and getattr(given, "shape", None) == () and type(given).__module__ == "numpy":
        kind = str(dtype)
        if kind in ("complex64", "complex128", "float16"):
            raise ArgumentError(f"a scalar of {kind} is not possible; pass float32 or float64, complex parts one by one")
        return kind, given.item()
    if isinstance(given, complex):
        raise ArgumentError("a complex scalar is not possible; pass its real and imaginary part")
    return None


def _from_text(name: str, text: str, role: Role) -> Argument:
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise UsageError(
            f"{name}={text!r} is not a shape; write an array like 4096x4096:float32, and a scalar as a number: 5 or 0.5"
        )
    if match[2] not in DTYPES:
        raise UsageError(f"{name} has dtype {match[2]!r}; allowed: {', '.join(DTYPES)}")
    shape = tuple(map(int, match[1].split("x")))
    return Argument(name, match[2], role, shape, contiguous(shape))


def check_overlaps(given: Sequence[Given]) -> None:
    """Raises ArgumentError if an output shares memory with another argument, or cannot be written."""
    views = [(each.argument, each.view) for each in given if each.view is not None]
    for argument, seen in views:
        if argument.role == "in":
            continue
        if seen.readonly:
            raise ArgumentError(f"{argument.name} is read-only; give a writable array")
        for other, beside in views:
            if other is not argument and arrays.overlap(seen, _nbytes(argument), beside, _nbytes(other)):
                raise ArgumentError(f"{argument.name} overlaps {other.name}; give each array memory of its own")


def _nbytes(argument: Argument) -> int:
    return argument.span * DTYPES[argument.dtype].nbytes


def device_of(given: Sequence[Given]) -> tuple[str, int]:
    """The device of all arrays.

    Raises:
        ArgumentError: they are on several devices, or there is none.
    """
    devices = {each.view.device: each.argument.name for each in given if each.view is not None}
    if len(devices) != 1:
        places = ", ".join(f"{name} on {kind}:{ordinal}" for (kind, ordinal), name in devices.items())
        raise ArgumentError(
            f"the arrays are on several devices ({places}); move them to one" if places else "no arrays given"
        )
    return next(iter(devices))


def integer_range(given: Any) -> tuple[float, float] | None:
    """(lowest, highest) number of an array of integers; None if its library cannot say."""
    try:
        return int(given.min()), int(given.max())
    except (AttributeError, TypeError, ValueError):
        return None


def addresses(given: Sequence[Given]) -> dict[str, int]:
    """Buffer -> address. An in-place argument and its output are the same memory."""
    found = {}
    for each in given:
        if each.view is not None:
            found[each.argument.name] = found[each.argument.buffer] = each.view.address
    return found


def scalar_values(given: Sequence[Given]) -> Mapping[str, float]:
    return {each.argument.name: each.value for each in given if each.argument.role == "scalar"}
