"""The memory plan: blocks that are needed together never overlap, and the whole is no larger than it has to be."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from schedsearch.executable.memory import ALIGNMENT, Block, arrange, stacked

blocks = st.builds(
    lambda nbytes, first, length: Block(nbytes, first, first + length),
    st.integers(0, 5 * ALIGNMENT), st.integers(0, 6), st.integers(0, 4),
)  # fmt: skip


@given(st.lists(blocks, max_size=12))
@settings(max_examples=60)
def test_blocks_of_one_step_never_share_bytes_and_the_arena_holds_them_all(given_blocks: list[Block]) -> None:
    arena = arrange(given_blocks)
    ends = [offset + block.nbytes for offset, block in zip(arena.offsets, given_blocks)]
    assert all(offset % ALIGNMENT == 0 for offset in arena.offsets)
    assert max(ends, default=0) <= arena.nbytes
    for one, other in itertools.combinations(range(len(given_blocks)), 2):
        a, b = given_blocks[one], given_blocks[other]
        steps = set(range(a.first, a.last + 1)) & set(range(b.first, b.last + 1))
        apart = ends[one] <= arena.offsets[other] or ends[other] <= arena.offsets[one]
        assert apart or not steps


@given(st.lists(blocks, max_size=12))
@settings(max_examples=60)
def test_the_bound_is_what_the_fullest_step_needs(given_blocks: list[Block]) -> None:
    needed = [
        sum(-(-block.nbytes // 256) * 256 for block in given_blocks if block.first <= step <= block.last)
        for step in range(12)
    ]
    arena = arrange(given_blocks)
    assert arena.bound == max(needed)
    assert arena.bound <= arena.nbytes <= sum(-(-block.nbytes // 256) * 256 for block in given_blocks)


@given(st.lists(st.builds(Block, st.just(ALIGNMENT), st.integers(0, 3), st.integers(3, 6)), max_size=10))
@settings(max_examples=30)
def test_blocks_of_one_size_that_are_all_needed_in_one_step_take_the_bound(given_blocks: list[Block]) -> None:
    assert arrange(given_blocks).nbytes == arrange(given_blocks).bound == ALIGNMENT * len(given_blocks)


def test_a_chain_takes_the_memory_of_its_largest_pair() -> None:
    sizes = [4, 1, 3, 2, 5]
    chain = [Block(size * ALIGNMENT, number, number + 1) for number, size in enumerate(sizes)]
    assert arrange(chain).nbytes == (2 + 5) * ALIGNMENT


def test_residual_blocks_of_resnet_take_no_more_than_the_fullest_step() -> None:
    """The values of ResNet-50's first stage: 0.2 MiB each, 0.8 MiB between the blocks, one kept for the addition."""
    middle, wide = 64 * 56 * 56 * 2, 256 * 56 * 56 * 2
    values, step = [Block(middle, 0, 4)], 1
    for _ in range(3):
        values += [Block(middle, step, step + 1), Block(middle, step + 1, step + 2), Block(wide, step + 2, step + 5)]
        step += 3
    arena = arrange(values)
    assert arena.nbytes == arena.bound


def test_long_lived_blocks_are_placed_first_where_that_takes_less_than_largest_first() -> None:
    """Largest first, the block of steps 1 to 4 lies above that of steps 4 to 6, and leaves a hole too small for the last."""
    values = [Block(size * ALIGNMENT, *steps) for size, *steps in ((3, 0, 1), (2, 1, 2), (4, 4, 6), (4, 1, 4))]
    assert arrange(values).nbytes == arrange(values).bound == (3 + 2 + 4) * ALIGNMENT


def test_stacked_blocks_follow_one_another_at_aligned_offsets() -> None:
    assert stacked([1, 256, 257, 0]) == ([0, 256, 512, 1024], 1024)
    assert stacked([]) == ([], 0)
