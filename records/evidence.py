"""The results that one search passes on to another. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def thinned(ranked: Sequence[T], limit: int) -> list[T]:
    """At most `limit` results of a search, chosen so that a model learns what is fast and also what is slow.

    Args:
        ranked: the fastest first, failures last.
        limit: at least 2.

    Returns:
        All of them if there are at most `limit`. Otherwise the fastest `limit // 4`, and every n-th of the others.
    """
    if len(ranked) <= limit:
        return list(ranked)
    fastest, others = ranked[: limit // 4], ranked[limit // 4 :]
    return [*fastest, *others[:: -(-len(others) // (limit - len(fastest)))]]
