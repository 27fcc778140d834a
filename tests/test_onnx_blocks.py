"""Col2Im beside its definition and ONNX Runtime: images that are sums of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from compared_models import Array, assert_as_onnxruntime, lowered, normal, referred  # noqa: E402
from onnx_support import Net  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.errors import UsageError  # noqa: E402

CASES = [
    ((1, 16, 16), (8, 8), (2, 2), {"strides": [2, 2]}),  # side by side
    ((2, 12, 8), (6, 8), (3, 2), {"strides": [3, 2]}),
    ((1, 36, 36), (6, 6), (3, 3), {"pads": [1, 1, 1, 1]}),
    ((2, 27, 16), (8, 7), (3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),  # a row that no block reaches
    ((1, 12, 15), (7, 9), (3, 2), {"strides": [1, 2], "dilations": [2, 2], "pads": [0, 1, 0, 1]}),
    ((1, 8, 4), (5, 5), (2, 2), {"strides": [3, 3]}),  # gaps
]


def folded(x: Array, image: Sequence[int], block: Sequence[int], **given: Any) -> Array:
    """The definition: every pixel of every block is added at its place."""
    strides, dilations = given.get("strides", [1, 1]), given.get("dilations", [1, 1])
    pads = given.get("pads", [0] * 4)
    channels = x.shape[1] // math.prod(block)
    sizes = [extent + pads[axis] + pads[axis + 2] for axis, extent in enumerate(image)]
    grid = [(sizes[axis] - (block[axis] - 1) * dilations[axis] - 1) // strides[axis] + 1 for axis in (0, 1)]
    y = np.zeros((len(x), channels, *sizes))
    parts = x.astype(np.float64).reshape(len(x), channels, *block, *grid)
    for i, j, p, q in np.ndindex(*block, *grid):
        row, column = p * strides[0] + i * dilations[0], q * strides[1] + j * dilations[1]
        y[:, :, row, column] += parts[:, :, i, j, p, q]
    return y[:, :, pads[0] : pads[0] + image[0], pads[1] : pads[1] + image[1]]


def net_of(shape: Sequence[int], image: Sequence[int], block: Sequence[int], **given: Any) -> Net:
    net = Net(*shape)
    net.node("Col2Im", "x", net.row(*image), net.row(*block), name="fold", **given)
    return net


@pytest.mark.parametrize(("shape", "image", "block", "given"), CASES, ids=lambda case: str(case).replace(" ", ""))
def test_blocks_are_added_at_their_places(
    shape: Sequence[int], image: Sequence[int], block: Sequence[int], given: dict[str, Any]
) -> None:
    model, x = net_of(shape, image, block, **given).model(), normal(*shape)
    (found,) = referred(model, {"x": x})
    np.testing.assert_allclose(found, folded(x, image, block, **given), rtol=1e-5, atol=1e-6)


def test_blocks_are_added_as_by_onnxruntime() -> None:
    for shape, image, block, given in CASES:
        assert_as_onnxruntime(net_of(shape, image, block, **given).model(), {"x": normal(*shape)})


def test_blocks_side_by_side_are_one_movement() -> None:
    shape, image, block, given = CASES[0]
    assert [node.implementations[0].op for node in lowered(net_of(shape, image, block, **given).model()).nodes[-1:]] == [
        "depth_to_space"
    ]


def test_a_wrong_number_of_blocks_says_how_many_there_may_be() -> None:
    with pytest.raises(UsageError, match=r"fold .*reads 15 blocks of 16 numbers; allowed: 16 blocks"):
        lowered(net_of((1, 16, 15), (8, 8), (2, 2), strides=[2, 2]).model())


def test_a_network_that_adds_overlapping_blocks_is_that_of_the_model(tmp_path: Any) -> None:
    shape, image, block, given = CASES[3]
    path, x = net_of(shape, image, block, **given).save(tmp_path), normal(*shape)
    with schedsearch.build(path, target="cpu", db=tmp_path / "records.db") as net:
        assert "onnx" in net.checked.lower()
        found = next(iter(net.evaluate({"x": x}).values()))
    np.testing.assert_allclose(found, folded(x, image, block, **given), rtol=1e-4, atol=1e-5)
