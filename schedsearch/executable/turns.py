"""How many turns a loop may take that ends when numbers say so.

Calls have no limit. A comparison on numbers that nobody gave has one, because for these a loop might never end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from schedsearch.errors import ArgumentError

_MOST: ContextVar[int | None] = ContextVar("most turns", default=None)


class TurnsError(ArgumentError):
    """A loop takes more turns than are allowed."""


@contextlib.contextmanager
def limited_turns(most: int) -> Iterator[None]:
    """Inside of it, a loop that begins turn number `most`, counted from 0, raises TurnsError."""
    token = _MOST.set(most)
    try:
        yield
    finally:
        _MOST.reset(token)


def is_limited() -> bool:
    """Whether `limited_turns` holds."""
    return _MOST.get() is not None


def check_turn(turn: int, loop: str) -> None:
    """Raises TurnsError if a loop may not begin a turn, counted from 0."""
    most = _MOST.get()
    if most is not None and turn >= most:
        raise TurnsError(f"the inputs take more than {most:,} turns of {loop} (Loop), and perhaps it never ends for them")
