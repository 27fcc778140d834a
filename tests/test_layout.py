"""Layouts of arrays: shapes and strides by hand, packing against brute force over every logical index."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedsearch.errors import UsageError
from schedsearch.ops import Layout

IMAGE = {"N": 2, "C": 48, "H": 5, "W": 7}
FILTER = {"O": 6, "I": 10, "H": 3, "W": 3}


@pytest.mark.parametrize(
    ("text", "sizes", "shape", "strides"),
    [
        ("NHWC", IMAGE, (2, 5, 7, 48), (1680, 336, 48, 1)),
        ("NCHW", IMAGE, (2, 48, 5, 7), (1680, 35, 7, 1)),
        ("NCHW32c", IMAGE, (2, 2, 5, 7, 32), (2240, 1120, 224, 32, 1)),
        ("OIHW4o4i", FILTER, (2, 3, 3, 3, 4, 4), (432, 144, 48, 16, 4, 1)),
        ("K", {"K": 9}, (9,), (1,)),
    ],
)
def test_shape_and_strides_of_known_layouts(
    text: str, sizes: dict[str, int], shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    layout = Layout.parse(text)
    assert layout.shape(sizes) == shape
    assert layout.strides(sizes) == strides
    assert str(layout) == text and len(layout.dimensions) == len(shape)


def test_the_dimensions_have_a_letter_each() -> None:
    assert Layout.parse("NCHW32c").dimensions == ("N", "C", "H", "W", "c")
    assert Layout.parse("OIHW4o4i").dimensions == ("O", "I", "H", "W", "o", "i")


def test_the_last_block_is_filled_up_and_cut_off_again() -> None:
    layout, x = Layout.parse("NC4c"), np.arange(1.0, 13.0).reshape(2, 6)
    packed = layout.pack(x)
    assert packed.tolist() == [[[1, 2, 3, 4], [5, 6, 0, 0]], [[7, 8, 9, 10], [11, 12, 0, 0]]]
    assert layout.pack(x, fill=-1)[:, 1].tolist() == [[5, 6, -1, -1], [11, 12, -1, -1]]
    assert (layout.unpack(packed, {"N": 2, "C": 6}) == x).all()


@st.composite
def layouts(draw: Any) -> tuple[Layout, dict[str, int], str]:
    """A layout of up to four axes with up to three blocks, sizes, and an order of the logical axes."""
    axes = draw(st.permutations("NCHW"))[: draw(st.integers(1, 4))]
    blocks = [f"{draw(st.integers(1, 4))}{draw(st.sampled_from(axes)).lower()}" for _ in range(draw(st.integers(0, 3)))]
    sizes = {axis: draw(st.integers(1, 7)) for axis in axes}
    return Layout.parse("".join([*axes, *blocks])), sizes, "".join(draw(st.permutations(axes)))


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_packing_puts_every_element_where_its_offset_says(case: tuple[Layout, dict[str, int], str]) -> None:
    layout, sizes, order = case
    array = np.arange(1, 1 + np.prod([sizes[axis] for axis in order])).reshape([sizes[axis] for axis in order])
    packed = layout.pack(array, order)
    assert packed.shape == layout.shape(sizes)
    assert layout.strides(sizes) == tuple(
        stride // packed.itemsize for stride in np.empty(packed.shape, packed.dtype).strides
    )
    flat, used = packed.reshape(-1), set()
    for index in itertools.product(*(range(sizes[axis]) for axis in order)):
        at = dict(zip(order, index))
        # The definition, digit by digit: blocks split an axis, and the last block is the fastest.
        digits = []
        for axis in layout.axes:
            digits.append(at[axis] // layout.block(axis))
        for place, (axis, length) in enumerate(layout.blocks):
            inner = int(np.prod([other for name, other in layout.blocks[place + 1 :] if name == axis]))
            digits.append(at[axis] // inner % length)
        assert packed[tuple(digits)] == array[index]
        offset = int(layout.offset(sizes, at))
        assert flat[offset] == array[index]
        used.add(offset)
    padding = np.delete(flat, sorted(used))
    assert (padding == 0).all()
    assert (layout.unpack(packed, sizes, order) == array).all()


def test_offsets_of_many_indices_at_once() -> None:
    layout, x = Layout.parse("NCHW32c"), np.arange(2 * 48 * 5 * 7).reshape(2, 48, 5, 7)
    n, c, h, w = np.unravel_index(np.arange(x.size), x.shape)
    offsets = layout.offset(IMAGE, {"N": n, "C": c, "H": h, "W": w})
    assert (layout.pack(x).reshape(-1)[offsets] == x.reshape(-1)).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nhwc", "is not a layout"),
        ("NCHWc", "is not a layout"),
        ("NCHW0c", "is not a layout"),
        ("NCHW32", "is not a layout"),
        ("NNHW", "names axis N twice"),
        ("NHW4c", "has a block 4c but no axis C"),
    ],
)
def test_a_text_that_is_not_a_layout_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Layout.parse(text)


def test_arrays_that_do_not_fit_are_refused() -> None:
    layout = Layout.parse("NHWC")
    with pytest.raises(UsageError, match="needs a size for C"):
        layout.shape({"N": 1, "H": 1, "W": 1})
    with pytest.raises(UsageError, match="has the axes NHWC; got an array of 3 dimensions"):
        layout.pack(np.zeros((1, 2, 3)))
    with pytest.raises(UsageError, match=r"has the axes NHWC; got .* axes NCHD"):
        layout.pack(np.zeros((1, 2, 3, 4)), "NCHD")
    with pytest.raises(UsageError, match=r"shape \(1, 2, 3, 4\), got \(1, 2, 3\)"):
        layout.unpack(np.zeros((1, 2, 3)), {"N": 1, "H": 2, "W": 3, "C": 4})


def test_a_single_number_has_the_empty_word_as_its_layout() -> None:
    layout = Layout.parse("")
    assert layout.shape({}) == layout.strides({}) == () and layout.offset({}, {}) == 0
    packed = layout.pack(np.float32(2.5))
    assert packed.shape == () == layout.unpack(packed, {}).shape and packed == layout.unpack(packed, {}) == 2.5
