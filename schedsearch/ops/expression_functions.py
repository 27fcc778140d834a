"""The functions and operators of expressions: their arguments, which numbers they take, and their definitions in NumPy.

Numbers are floats or integers of 64 bits. Functions that `Function.rule` calls "alike" exist for both: `a + b` of two
integers is an integer, and wraps at 64 bits. See `schedsearch.ops.expression_types`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from schedsearch.ops.dtypes import dtype as dtype_of

Rule = Literal["float", "test", "alike", "compare", "choice", "whole", "cast"]
_MOST_SHIFT = 63


@dataclass(frozen=True)
class Function:
    """A function of expressions.

    Attributes:
        apply: in NumPy: of floats, unless the rule is "whole".
        arity: number of arguments.
        defaults: of the last arguments.
        rule: what it takes and makes. "float": floats. "test": floats, and makes an integer. "alike": integers if all
            arguments are, otherwise floats. "compare": the same, and makes 0 or 1. "choice": a condition and two "alike".
            "whole": integers. "cast": either, and makes the dtype that it is named after.
        whole: as `apply`, of integers: arrays of int64.
    """

    apply: Callable[..., Any]
    arity: int = 1
    defaults: tuple[float, ...] = ()
    rule: Rule = "float"
    whole: Callable[..., Any] | None = None


def _numpy(name: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        import numpy as np

        return getattr(np, name)(*arguments)

    return call


# ---- floats


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


# ---- integers


def quotient(a: Any, b: Any) -> Any:
    """Truncated; 0 where b is 0, and a wrapped -a where b is -1."""
    import numpy as np

    safe = np.where((b == 0) | (b == -1), 1, b)
    floor = np.floor_divide(a, safe)
    truncated = floor + ((floor < 0) & (floor * safe != a))
    return np.where(b == 0, 0, np.where(b == -1, np.negative(a), truncated))


def _remainder(name: str) -> Callable[..., Any]:
    def remainder(a: Any, b: Any) -> Any:
        import numpy as np

        return np.where((b == 0) | (b == -1), 0, getattr(np, name)(a, np.where((b == 0) | (b == -1), 1, b)))

    return remainder


def _whole_power(base: Any, exponent: Any) -> Any:
    """By squaring, so that it wraps. A negative exponent gives the truncated reciprocal."""
    import numpy as np

    base, exponent = np.broadcast_arrays(np.asarray(base, np.int64), np.asarray(exponent, np.int64))
    left = np.abs(exponent)
    factor, found = base.copy(), np.ones_like(base)
    for _ in range(_MOST_SHIFT):
        found = np.where(left & 1, found * factor, found)
        left, factor = left >> 1, factor * factor
        if not left.any():
            break
    return np.where((exponent < 0) & (np.abs(base) != 1), 0, found)


def _shift_left(a: Any, b: Any) -> Any:
    """0 beyond the 64 bits."""
    import numpy as np

    inside = (b >= 0) & (b <= _MOST_SHIFT)
    return np.where(inside, np.left_shift(a, np.where(inside, b, 0)), 0)


def _shift_right(a: Any, b: Any) -> Any:
    """The sign beyond the 64 bits."""
    import numpy as np

    return np.right_shift(a, np.where((b >= 0) & (b <= _MOST_SHIFT), b, _MOST_SHIFT))


def wrap(dtype: str) -> Callable[[Any], Any]:
    """Integers of 64 bits as their last bits, those of a shorter dtype."""

    def wrapped(x: Any) -> Any:
        import numpy as np

        return np.asarray(x, np.int64).astype(dtype).astype(np.int64)

    return wrapped


def truncated(dtype: str) -> Callable[[Any], Any]:
    """Floats without their fractions, limited to an integer dtype; NaN is 0."""
    row = dtype_of(dtype)

    def cut(x: Any) -> Any:
        import numpy as np

        return _limited(np.trunc(np.asarray(x, np.float64)), int(row.lowest), int(row.largest))

    return cut


def saturated(dtype: str) -> Callable[[Any], Any]:
    """Floats rounded to integers, half to even, limited to an integer dtype; NaN is 0."""
    row = dtype_of(dtype)

    def rounded(x: Any) -> Any:
        import numpy as np

        return _limited(np.rint(np.asarray(x, np.float64)), int(row.lowest), int(row.largest))

    return rounded


def _limited(x: Any, lowest: int, largest: int) -> Any:
    import numpy as np

    inside = (x > float(lowest)) & (x < float(largest))
    whole = np.where(inside, x, 0.0).astype(np.int64)
    return np.where(inside | np.isnan(x), whole, np.where(x > 0, np.int64(largest), np.int64(lowest)))


def _truth(function: Callable[..., Any]) -> Callable[..., Any]:
    def truth(*arguments: Any) -> Any:
        import numpy as np

        return np.asarray(function(*arguments)).astype(np.int64)

    return truth


def _compare(name: str) -> Function:
    return Function(_truth(_numpy(name)), 2, rule="compare", whole=_truth(_numpy(name)))


def _whole(function: Callable[..., Any], arity: int = 2) -> Function:
    return Function(function, arity, rule="whole", whole=function)


def _alike(of_floats: Callable[..., Any], arity: int, of_integers: Callable[..., Any] | None = None) -> Function:
    return Function(of_floats, arity, rule="alike", whole=of_integers or of_floats)


def _where(c: Any, a: Any, b: Any) -> Any:
    import numpy as np

    return np.where(np.asarray(c) != 0, a, b)


CASTS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")
_SIXTH = 1 / 6
_FIRST: Mapping[str, Function] = {
    "relu": _alike(lambda x: _numpy("maximum")(x, 0), 1),
    "leaky_relu": Function(lambda x, slope: _numpy("where")(x < 0, x * slope, x), 2),
    "clip": _alike(_clip, 3),
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
    "abs": _alike(_numpy("abs"), 1),
    "min": _alike(_numpy("minimum"), 2),
    "max": _alike(_numpy("maximum"), 2),
    "round": Function(_numpy("rint")),
    "quantise": Function(lambda x, scale, zero_point: _numpy("rint")(x / scale) + zero_point, 3),
    "dequantise": Function(lambda q, scale, zero_point: (q - zero_point) * scale, 3),
}
FUNCTIONS: Mapping[str, Function] = {
    **_FIRST,
    "where": Function(_where, 3, rule="choice", whole=_where),
    "sign": _alike(_numpy("sign"), 1),
    "floor": Function(_numpy("floor")),
    "ceil": Function(_numpy("ceil")),
    "fmod": _alike(_numpy("fmod"), 2, _remainder("fmod")),
    "pow": _alike(_numpy("power"), 2, _whole_power),
    "quotient": _whole(quotient),
    "is_nan": Function(_truth(_numpy("isnan")), rule="test"),
    "is_inf": Function(_truth(_numpy("isinf")), rule="test"),
    **{
        name: Function(_numpy(of_numpy))
        for name, of_numpy in (
            *((name, name) for name in ("sin", "cos", "tan", "sinh", "cosh")),
            *((f"a{name}", f"arc{name}") for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")),
        )
    },
    **{dtype: Function(truncated(dtype), rule="cast", whole=wrap(dtype)) for dtype in CASTS},
    "float32": Function(lambda x: x, rule="cast", whole=lambda x: _numpy("asarray")(x, "float64")),
}
OPERATORS: Mapping[str, Function] = {
    "add": _alike(lambda a, b: a + b, 2),
    "subtract": _alike(lambda a, b: a - b, 2),
    "multiply": _alike(lambda a, b: a * b, 2),
    "divide": Function(lambda a, b: a / b, 2),
    "modulo": _alike(_numpy("mod"), 2, _remainder("mod")),
    "negate": _alike(lambda a: -a, 1),
    "power": _alike(lambda a, b: a**b, 2, _whole_power),
    **{name: _compare(name) for name in ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")},
    "bit_and": _whole(_numpy("bitwise_and")),
    "bit_or": _whole(_numpy("bitwise_or")),
    "bit_xor": _whole(_numpy("bitwise_xor")),
    "invert": _whole(_numpy("invert"), 1),
    "shift_left": _whole(_shift_left),
    "shift_right": _whole(_shift_right),
}
RESERVED = frozenset(_FIRST)
"""Functions whose names inputs and steps cannot have. Later ones may be names, too: `a * cos + b * sin` stays possible."""
