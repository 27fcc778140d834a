"""What callers give `build` and `build_dynamic`, checked before anything is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from schedsearch.errors import UsageError
from schedsearch.text import quoted

LAYOUT_CHOICES = ("auto", "NHWC", "NCHW")
IO_LAYOUTS = ("NCHW", "NHWC")
WEIGHTS = ("inside", "reference")


def check_choice(name: str, value: object, allowed: Sequence[str], *, optional: bool = False) -> None:
    """Raises UsageError if an option has none of the allowed values; with `optional`, None is one of them."""
    if (optional and value is None) or (isinstance(value, str) and value in allowed):
        return
    choices = f"{', '.join(allowed)}{', or None' if optional else ''}"
    raise UsageError(f"{name} {quoted(value)} is not possible; allowed: {choices}")


def check_tune_s(value: Any) -> None:
    """Raises UsageError if a time to tune is neither None nor a finite number of seconds above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < math.inf):
        raise UsageError(f"tune_s is {quoted(value)}; allowed: a number of seconds above 0, or None")
