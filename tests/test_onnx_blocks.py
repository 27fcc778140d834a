"""Col2Im beside its definition and ONNX Runtime: images that are sums of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from compared_models import Array, assert_as_onnxruntime, lowered, normal, referred, run_by_onnxruntime  # noqa: E402
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
    ((2, 6, 4), (12,), (3,), {"strides": [3]}),  # side by side
    ((2, 6, 6), (9,), (3,), {"strides": [2], "pads": [2, 2]}),
    ((1, 24, 8), (2, 6, 8), (1, 3, 4), {"strides": [1, 3, 4]}),  # 2 channels, of which blocks lie side by side
    ((2, 24, 8), (3, 4, 5), (2, 2, 3), {"strides": [1, 2, 2], "pads": [0, 1, 1, 0, 0, 0]}),
    ((1, 8, 24), (4, 3, 5), (2, 2, 2), {}),
]


def folded(x: Array, image: Sequence[int], block: Sequence[int], **given: Any) -> Array:
    """The definition: every pixel of every block is added at its place."""
    rank, ends = len(image), x.shape[:1]
    strides, dilations = given.get("strides", [1] * rank), given.get("dilations", [1] * rank)
    pads = given.get("pads", [0] * 2 * rank)
    channels = x.shape[1] // math.prod(block)
    sizes = [extent + pads[axis] + pads[axis + rank] for axis, extent in enumerate(image)]
    grid = [(sizes[axis] - (block[axis] - 1) * dilations[axis] - 1) // strides[axis] + 1 for axis in range(rank)]
    y = np.zeros((*ends, channels, *sizes))
    parts = x.astype(np.float64).reshape(*ends, channels, *block, *grid)
    for at in np.ndindex(*block, *grid):
        pixel = [at[rank + axis] * strides[axis] + at[axis] * dilations[axis] for axis in range(rank)]
        y[:, :, *pixel] += parts[:, :, *at]
    inside = tuple(slice(pads[axis], pads[axis] + image[axis]) for axis in range(rank))
    return y[:, :, *inside]


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


def test_blocks_of_other_axes_than_the_image_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"fold .*has blocks of 1 dimensions in images of 2; allowed: 1 to 3, as many in both"
    ):
        lowered(net_of((1, 16, 16), (8, 8), (16,)).model())


@pytest.mark.parametrize(
    ("shape", "image", "block", "dilations"),
    [((1, 8, 18), (4, 3, 5), (2, 2, 2), [1, 1, 2]), ((2, 6, 5), (9,), (3,), [2])],
)
def test_dilations_but_of_images_are_refused_as_onnxruntime_misreads_them(
    shape: Sequence[int], image: Sequence[int], block: Sequence[int], dilations: list[int]
) -> None:
    model, x = net_of(shape, image, block, dilations=dilations).model(), normal(*shape)
    with pytest.raises(
        UsageError, match=r"fold .*has dilations .*, with which runtimes add pixels .*allowed but in images: 1"
    ):
        lowered(model)
    wrong = run_by_onnxruntime(model, {"x": x})[0] - folded(x, image, block, dilations=dilations)
    assert abs(wrong).max() > 0.1, "ONNX Runtime was mended: take them"


@pytest.mark.long(of="networks")
def test_a_network_that_adds_overlapping_blocks_is_that_of_the_model(tmp_path: Any) -> None:
    shape, image, block, given = CASES[3]
    path, x = net_of(shape, image, block, **given).save(tmp_path), normal(*shape)
    with schedsearch.build(path, target="cpu", db=tmp_path / "records.db") as net:
        assert "onnx" in net.checked.lower()
        found = next(iter(net.evaluate({"x": x}).values()))
    np.testing.assert_allclose(found, folded(x, image, block, **given), rtol=1e-4, atol=1e-5)
