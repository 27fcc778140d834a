"""A small kernel of `schedsearch.tunable`, declared as a test likes."""

from __future__ import annotations

from typing import Any

from numba import cuda

import schedsearch

FACTOR = 2


def declared(function: Any = None, **changes: Any) -> Any:
    """A tunable that multiplies by FACTOR, or that `function` computes, with other arguments of the decorator."""

    def times(x, y, *, per):  # type: ignore[no-untyped-def]
        first = cuda.grid(1) * per
        for j in range(per):
            if first + j < x.size:
                y[first + j] = FACTOR * x[first + j]

    given: dict[str, Any] = {
        "knobs": {"threads": (64, 128), "per": (1, 2, 4)},
        "block": lambda k: k.threads,
        "grid": lambda x, k: -(-x.size // (k.threads * k.per)),
        "outputs": ["y"],
        "reference": lambda x: FACTOR * x,
    }
    return schedsearch.tunable(**{**given, **changes})(function or times)
