"""Names of what Numba passes to functions that generate code; for type checkers only.

Their own types come from Numba and llvmlite, which are only partly annotated. A checker that does not read those packages
sees the names, and what a function takes still stands in its signature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite.ir import IRBuilder, Value
from numba.core.base import BaseContext
from numba.core.typing import Context as TypingContext
from numba.core.typing.templates import Signature

Values = Sequence[Value]
Typed = tuple[Signature, Callable[[BaseContext, IRBuilder, Signature, Values], Value | None]] | None
"""What an intrinsic returns: its signature and the function that generates its code; None if it does not take the types."""

__all__ = ["BaseContext", "IRBuilder", "Signature", "Typed", "TypingContext", "Value", "Values"]
