"""The places of arrays in one block of memory, so that arrays which are never needed together share bytes.

See docs/decisions/126-one-arena-by-size.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

ALIGNMENT = 256  # bytes; cuMemAlloc aligns to as much, and no kernel wants more


@dataclass(frozen=True)
class Block:
    """Memory that is needed from one step to another, both included.

    Attributes:
        nbytes: its size.
        first, last: numbers of the first step that writes it and of the last one that reads it.
        uses: the steps that use it, as bits; 0: all from the first to the last, in their order.
        before: the steps that are complete before any of `uses` begins, where some run at the same time.
    """

    nbytes: int
    first: int
    last: int
    uses: int = 0
    before: int = 0

    def meets(self, other: Block) -> bool:
        """Whether both are needed at the same time."""
        if self.uses and other.uses:
            return bool(self.uses & ~other.before) and bool(other.uses & ~self.before)
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Arena:
    """A memory plan.

    Attributes:
        offsets: of each block, in the order in which they were given; multiples of `ALIGNMENT`.
        nbytes: size of the whole.
        bound: no plan needs less: the most bytes that are needed in one step.
    """

    offsets: tuple[int, ...]
    nbytes: int
    bound: int


def arrange(blocks: Sequence[Block]) -> Arena:
    """Finds places for blocks: the largest first, each at the lowest offset where it meets no placed block.

    If that needs more than the bound, the order by size times duration is tried as well, and the smaller plan is taken.

    Source: Y. Pisarchyk and J. Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020, "Greedy by Size for
    Offset Calculation".
    """
    bound = _bound(blocks)
    best: Arena | None = None
    orders: tuple[Callable[[Block], int], ...] = (
        lambda block: block.nbytes,
        lambda block: block.nbytes * (block.last - block.first + 1),
    )
    for size in orders:
        offsets = _places(blocks, sorted(range(len(blocks)), key=lambda number: -size(blocks[number])))
        nbytes = max((offset + rounded_up(block.nbytes) for offset, block in zip(offsets, blocks)), default=0)
        if best is None or nbytes < best.nbytes:
            best = Arena(tuple(offsets), nbytes, bound)
        if best.nbytes == bound:
            break
    assert best is not None
    return best


def rounded_up(nbytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def stacked(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Offsets of blocks that follow one another, and the bytes of all."""
    offsets, end = [], 0
    for nbytes in sizes:
        offsets.append(end)
        end += rounded_up(nbytes)
    return offsets, end


def _bound(blocks: Sequence[Block]) -> int:
    steps = {block.first for block in blocks}  # the sum grows at first steps only
    return max(
        (sum(rounded_up(each.nbytes) for each in blocks if each.first <= step <= each.last) for step in steps), default=0
    )


def _places(blocks: Sequence[Block], order: Iterable[int]) -> list[int]:
    offsets: dict[int, int] = {}
    for number in order:
        block = blocks[number]
        taken = sorted(
            (offset, offset + rounded_up(blocks[other].nbytes))
            for other, offset in offsets.items()
            if block.meets(blocks[other])
        )
        place = 0
        for start, end in taken:
            if start - place >= rounded_up(block.nbytes):
                break
            place = max(place, end)
        offsets[number] = place
    return [offsets[number] for number in range(len(blocks))]
