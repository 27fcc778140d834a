"""Indices that are out of range, which only a kernel sees: it notes the first one in two words of memory.

A kernel that reads indices takes the address of these words as `Pointer(WRONG_INDEX, optional=True)`. It writes them only if
an index is out of range and nothing is noted yet: 1 + the place of the index in its array, then the index. Whoever launches
the kernel decides whether it notes anything: without the buffer the address is 0. `Op.wrong_index` makes a message of it.
"""

from __future__ import annotations

WRONG_INDEX = "wrong_index"  # the buffer
WRONG_INDEX_WORDS = 2  # int64; zeros: no index was out of range


def out_of_range(array: str, where: list[int], index: int, axis: int, x: str, extent: int, is_bound: bool = False) -> str:
    """What is wrong with an index, and what is allowed.

    Args:
        array, x: names of the array of indices, and of the array that is indexed.
        where: the place of the index.
        axis, extent: what it counts along.
        is_bound: the extent is known at run time only, and `extent` is its bound.
    """
    if is_bound:
        return (
            f"the index at {where} of {array!r} is {index}, but axis {axis} of {x!r} was shorter: its extent e is known at "
            f"run time only, and at most {extent}; allowed: -e to e - 1"
        )
    allowed = f"allowed: {-extent} to {extent - 1}" if extent else "it allows none"
    return f"the index at {where} of {array!r} is {index}, but axis {axis} of {x!r} has extent {extent}; {allowed}"
