"""Numba's analysis of which variables live where, in time that is linear in the number of blocks for most kernels.

Numba goes over all blocks until nothing changes, in an order in which that may take as many rounds as there are blocks one
after the other. Kernels of many small functions have hundreds. The result is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any


def live_map(
    cfg: Any, blocks: Mapping[int, Any], uses: Mapping[int, Set[str]], defs: Mapping[int, Set[str]]
) -> dict[int, set[str]]:
    """The variables that must live at the entry of each block; see `compute_live_map` of `numba.core.analysis`.

    Args:
        cfg: the control flow of `blocks`.
        uses: block -> variables that it uses and does not define before.
        defs: block -> variables that it defines.
    """
    names = sorted({name for sets in (uses, defs) for each in sets.values() for name in each})
    bits = {name: 1 << place for place, name in enumerate(names)}
    used = {block: sum(bits[name] for name in uses[block]) for block in blocks}
    defined = {block: sum(bits[name] for name in defs[block]) for block in blocks}
    after = {block: [each for each, _ in cfg.successors(block)] for block in blocks}
    before = {block: [each for each, _ in cfg.predecessors(block)] for block in blocks}

    reached = {block: used[block] | defined[block] for block in blocks}  # defined or used on the way to the block's end
    work = list(blocks)
    while work:
        block = work.pop()
        for each in after[block]:
            if reached[block] & ~reached[each]:
                reached[each] |= reached[block]
                work.append(each)

    live = dict(used)
    work = list(blocks)
    while work:
        block = work.pop()
        for each in before[block]:
            new = live[block] & reached[each] & ~defined[each] & ~live[each]
            if new:
                live[each] |= new
                work.append(each)
    return {block: _named(mask, names) for block, mask in live.items()}


def _named(mask: int, names: list[str]) -> set[str]:
    found = set()
    while mask:
        lowest = mask & -mask
        found.add(names[lowest.bit_length() - 1])
        mask ^= lowest
    return found
