"""What computes the sizes of a segment of a network: steps over a block of int64 words, and the codes of mistakes.

This is data. `schedsearch.templates.parts.sizes` makes kernels of it, and `schedsearch.dynamic` launches them.
"""

from __future__ import annotations

from dataclasses import dataclass

from schedsearch.ops.dependence import ShapeFunction

SIZES = "sizes"  # the buffer of the block
NEGATIVE, EXCEEDS, FIRST_PROBLEM = 1, 2, 3  # kinds of mistakes; a shape function's own problems follow
KINDS = 256  # status = step * KINDS + kind, and steps count from 1


@dataclass(frozen=True)
class Words:
    """Extents in the block: `count` words from `first` on."""

    first: int
    count: int


@dataclass(frozen=True)
class Values:
    """Integers in a buffer of their own."""

    buffer: str
    dtype: str
    count: int


@dataclass(frozen=True)
class SizeStep:
    """One output whose extents are computed.

    Attributes:
        inputs: what the function gets, in its order.
        to: where its extents go.
        bound: what they may be at most; None: they are no extents, and may be any numbers.
    """

    function: ShapeFunction
    inputs: tuple[Words | Values, ...]
    to: Words
    bound: tuple[int, ...] | None
