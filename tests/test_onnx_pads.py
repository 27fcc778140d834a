"""Pads of ONNX of every mode, beside NumPy and ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from compared_models import assert_as_onnxruntime, lowered, normal, referred, run_by_onnxruntime  # noqa: E402
from onnx_support import Net  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.network.graph import Node  # noqa: E402
from schedsearch.network.model import ModelError  # noqa: E402

SHAPE = (2, 3, 5, 7)


def padded(shape: tuple[int, ...], mode: str, pads: list[int], axes: list[int] | None = None) -> Net:
    net = Net(*shape)
    net.node("Pad", "x", net.row(*pads), "", *([] if axes is None else [net.row(*axes)]), mode=mode, name="pad")
    return net


@settings(max_examples=40)
@given(st.sampled_from(["reflect", "edge", "wrap", "constant"]), st.data())
def test_every_mode_is_that_of_numpy(mode: str, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(2, 5), min_size=1, max_size=4)))
    each = [st.integers(0, extent - 1) for extent in shape]
    before, after = ([data.draw(number) for number in each] for _ in range(2))
    x = normal(*shape)
    (found,) = referred(padded(shape, mode, [*before, *after]).model(), {"x": x})
    wanted: Any = np.pad(x, list(zip(before, after)), mode=mode)  # type: ignore[call-overload]
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap", "constant"])
@pytest.mark.parametrize("pads", [[-1, 2, 0, -2], [2, -1, -1, 0], [-1, -1, -2, -2]], ids=str)
def test_negative_pads_cut_off_first(mode: str, pads: list[int]) -> None:
    """Of two axes, the first and the last one."""
    assert_as_onnxruntime(padded(SHAPE, mode, pads, [-1, 2]).model(), {"x": normal(*SHAPE)}, rtol=0, atol=0)


def test_a_computed_number_is_written_around_numbers_that_are_not_finite() -> None:
    net = Net(3, 4)
    net.node("Pad", "x", net.row(1, -1, 0, 2), net.node("ReduceMin", "x", keepdims=0))
    x = normal(3, 4)
    x[0, 2] = np.inf
    assert_as_onnxruntime(net.model(), {"x": x}, rtol=0, atol=0)


@pytest.mark.parametrize("opset", [9, 13, 18])
def test_old_opsets_have_the_pads_in_an_attribute(opset: int) -> None:
    net = Net(*SHAPE)
    pads = [0, 0, 2, 3, 0, 0, 4, 1]
    net.node("Pad", "x", *([] if opset < 11 else [net.row(*pads)]), mode="reflect", **({"pads": pads} if opset < 11 else {}))
    assert_as_onnxruntime(net.model(opset=opset), {"x": normal(*SHAPE)}, rtol=0, atol=0)


def test_of_a_long_row_only_the_margins_are_gathered() -> None:
    net = padded((1, 1, 5000), "reflect", [9, 6], [2])
    labels = [node.implementations[0].label for node in lowered(net.model()).nodes if isinstance(node, Node)]
    assert [label.partition(" ")[0] for label in labels] == ["gather", "gather", "concat"]
    x = normal(1, 1, 5000)
    np.testing.assert_array_equal(referred(net.model(), {"x": x})[0], np.pad(x, [(0, 0), (0, 0), (9, 6)], mode="reflect"))


def test_images_are_padded_in_any_layout() -> None:
    """So that convolutions around a pad need no other one."""
    net = padded((1, 8, 6, 6), "reflect", [1, 1, 1, 1], [2, 3])
    net.conv("pad.out", 4, 8, pads=[0, 0, 0, 0])
    network = lowered(net.model(), layouts=("NHWC", "NCHW"))
    gathers = [node for node in network.nodes if isinstance(node, Node) and node.implementations[0].op == "gather"]
    assert [len(node.implementations) for node in gathers] == [2, 2]
    assert_as_onnxruntime(net.model(), {"x": normal(1, 8, 6, 6)})


@pytest.mark.long  # builds a network
def test_pads_run_on_the_cpu(tmp_path: Path) -> None:
    net = Net(*SHAPE)
    y = net.node("Pad", "x", net.row(0, 0, 2, 3, 0, 0, 4, 1), mode="reflect")
    y = net.node("Pad", net.conv(y, 8, 3), net.row(0, 1, 2, 0, 2, 1, 0, 0), mode="wrap")
    net.node("Pad", y, net.row(0, 0, -1, 2, 0, 0, 3, -2), mode="edge")
    onnx.save(net.model(), tmp_path / "m.onnx")
    x = normal(*SHAPE)
    with schedsearch.build(tmp_path / "m.onnx", target="cpu", db=tmp_path / "none.db") as built:
        np.testing.assert_allclose(built(x), run_by_onnxruntime(net.model(), {"x": x})[0], rtol=1e-5, atol=1e-5)


# --- What is refused ----------------------------------------------------------------------------------------------------
def test_a_reflection_wider_than_the_image_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"pad \(reflects 5 pixels along axis 2, which has 5; allowed: up to 4\. Use mode edge"
    ):
        lowered(padded(SHAPE, "reflect", [5, 0], [2]).model())


def test_pads_that_are_computed_are_refused() -> None:
    net = Net(3, 4)
    net.node("Pad", "x", net.node("Cast", net.node("ReduceMax", "x", keepdims=0), to=7), name="pad")
    with pytest.raises(ModelError, match="pad"):
        lowered(net.model())
