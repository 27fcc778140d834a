"""Offsets in memory by axis: they must be those of an array that NumPy packs."""

from __future__ import annotations

import numpy as np
import pytest

from schedsearch.ops.layout import Layout
from schedsearch.templates.parts.addressing import AxisStrides, offsets_along

SIZES = {"N": 2, "C": 12, "H": 3, "W": 5, "O": 8, "I": 6}


@pytest.mark.parametrize("word", ["NHWC", "NCHW", "NCHW4c", "NCHW1c", "NCHW12c", "OHWI", "OIHW", "OIHW4o2i"])
def test_offsets_are_those_of_the_packed_array(word: str) -> None:
    layout = Layout.parse(word)
    extents = [SIZES[axis] for axis in layout.axes]
    logical = np.arange(np.prod(extents)).reshape(extents)
    memory = layout.pack(logical).ravel()
    offsets = offsets_along(layout, SIZES)
    for index in np.ndindex(*extents):
        at = sum(int(offsets[axis](i)) for axis, i in zip(layout.axes, index))
        assert memory[at] == logical[index], index


def test_runs_of_neighbouring_channels() -> None:
    def run(word: str) -> int:
        return AxisStrides.of(Layout.parse(word), SIZES)["C"].run(12)

    assert [run(word) for word in ("NHWC", "NCHW", "NCHW4c", "NCHW1c")] == [12, 1, 4, 1]


def test_nested_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="nested"):
        AxisStrides.of(Layout.parse("OIHW4i2o2i"), SIZES)
