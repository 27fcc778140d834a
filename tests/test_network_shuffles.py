"""Channel shuffles are one kernel in either layout of images, and slices of channels are read where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnx_ir")

from compared_models import assert_as_onnxruntime, lowered, normal, referred
from onnx_support import Net

import schedsearch
from schedsearch.network.graph import Node, View

PIXELS = (5, 3)


def shuffled(net: Net, x: str, channels: int, groups: int, n: int = 1, perm: Any = (0, 2, 1, 3, 4)) -> str:
    five = net.node("Reshape", x, net.row(n, groups, channels // groups, *PIXELS))
    return net.node("Reshape", net.node("Transpose", five, perm=list(perm)), net.row(n, channels, *PIXELS))


def unit(net: Net, x: str, channels: int, n: int = 1) -> str:
    """A unit of ShuffleNet V2: half of the channels stay, the others pass a convolution, and both are taken in turn."""
    half = channels // 2
    first = net.node("Slice", x, net.row(0), net.row(half), net.row(1))
    second = net.node("Slice", x, net.row(half), net.row(channels), net.row(1))
    return shuffled(net, net.node("Concat", first, net.conv(second, half, half, 1), axis=1), channels, 2, n)


def two_units(n: int = 1) -> Net:
    net = Net(n, 12, *PIXELS)
    net.conv(unit(net, unit(net, net.conv("x", 12, 12, 1), 12, n), 12, n), 4, 12, 1)
    return net


def kernels(net: Net, **options: Any) -> list[str]:
    network = lowered(net.model(), **options)
    assert not any(isinstance(node, View) for node in network.nodes)
    return [node.implementations[0].op for node in network.nodes if isinstance(node, Node)]


@pytest.mark.parametrize("n", [1, 3])
def test_units_of_shufflenet_have_one_kernel_for_concatenation_and_shuffle(n: int) -> None:
    net = two_units(n)
    of_unit = ["conv2d", "elementwise"]  # both read their half where it is
    assert kernels(net) == ["conv2d", *of_unit, *of_unit, "conv2d"]
    assert_as_onnxruntime(net.model(), {"x": normal(n, 12, *PIXELS)})


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_a_shuffle_is_right_in_either_layout(layout: str) -> None:
    net = two_units(2)
    x = normal(2, 12, *PIXELS)
    (one,), (both,) = (referred(net.model(), {"x": x}, **options) for options in ({"layouts": (layout,)}, {}))
    np.testing.assert_allclose(one, both, rtol=1e-5, atol=1e-6)
    shuffles = [node for node in lowered(net.model(), layouts=(layout,)).nodes if "where" in node.implementations[0].label]
    assert {node.letters[node.implementations[0]]["y"] for node in shuffles} == {layout} and len(shuffles) == 2


@pytest.mark.parametrize("groups", [2, 3, 4, 6])
def test_a_shuffle_of_one_array_reads_slices_of_it(groups: int) -> None:
    net = Net(2, 12, *PIXELS)
    net.conv(shuffled(net, net.conv("x", 12, 4, 1, group=3), 12, groups, 2), 4, 12, 1)
    assert kernels(net) == ["conv2d", "elementwise", "conv2d"]
    assert_as_onnxruntime(net.model(), {"x": normal(2, 12, *PIXELS)})


def test_numbers_that_are_not_finite_stay_where_they_are() -> None:
    net = Net(1, 4, *PIXELS)
    shuffled(net, net.node("Concat", net.node("Relu", "x"), net.node("Neg", "x"), axis=1), 8, 2)
    x = normal(1, 4, *PIXELS)
    x[0, 1, 2, 1], x[0, 2, 0, 0] = np.inf, np.nan
    (found,) = referred(net.model(), {"x": x})
    right = np.stack([np.maximum(x, 0), -x], axis=2).reshape(1, 8, *PIXELS)
    np.testing.assert_array_equal(found, right)


def test_other_orders_and_results_that_are_read_elsewhere_keep_their_nodes() -> None:
    def operators(perm: Any = (0, 2, 1, 3, 4), *, read_twice: bool = False) -> list[str]:
        net = Net(1, 12, *PIXELS)
        joined = net.node("Concat", net.conv("x", 6, 12, 1), net.conv("x", 6, 12, 1), axis=1)
        if tuple(perm) == (0, 2, 1, 3, 4):
            net.results = [shuffled(net, joined, 12, 2)] + [net.node("Relu", joined)] * read_twice
        else:
            net.results = [net.node("Transpose", net.node("Reshape", joined, net.row(1, 2, 6, *PIXELS)), perm=list(perm))]
        return [node.implementations[0].op for node in lowered(net.model()).nodes if isinstance(node, Node)]

    assert operators() == ["conv2d", "conv2d", "elementwise"]
    assert "concat" in operators(read_twice=True)
    assert "transpose" in operators((0, 2, 1, 4, 3))


def test_convolutions_of_pixels_read_slices_that_a_copy_would_not_make_faster() -> None:
    """The last channels, or channels that fill no 16 bytes; others keep the kernels that read whole arrays."""

    def operators(first: int, channels: int, size: int = 1, of: int = 32) -> list[str]:
        net = Net(1, of, *PIXELS)
        part = net.node("Slice", "x", net.row(first), net.row(first + channels), net.row(1))
        net.conv(part, 8, channels, size)
        assert_as_onnxruntime(net.model(), {"x": normal(1, of, *PIXELS)}, atol=1e-4)
        return kernels(net)

    assert operators(16, 16) == operators(0, 12) == operators(4, 16) == ["conv2d"]
    assert operators(0, 16) == operators(16, 16, size=3) == ["strided_slice", "conv2d"]


def test_a_slice_of_rows_is_copied_before_a_shuffle() -> None:
    net = Net(1, 6, 9, 3)
    rows = [net.node("Slice", "x", net.row(first), net.row(first + 5), net.row(2)) for first in (0, 3)]
    shuffled(net, net.node("Concat", *rows, axis=1), 12, 2)
    assert kernels(net) == ["strided_slice", "strided_slice", "elementwise"]
    assert_as_onnxruntime(net.model(), {"x": normal(1, 6, 9, 3)})


@pytest.mark.long(of="networks")
def test_a_built_network_shuffles(tmp_path: Path) -> None:
    net, x = Net(1, 6, *PIXELS), normal(1, 6, *PIXELS)
    part = net.node("Slice", "x", net.row(2), net.row(4), net.row(1))
    other = net.node("Slice", "x", net.row(1), net.row(3), net.row(1))
    shuffled(net, net.node("Concat", part, net.node("Neg", other), axis=1), 4, 2)
    built = schedsearch.build(net.save(tmp_path), target="cpu", db=tmp_path / "records.db")
    right = np.stack([x[:, 2:4], -x[:, 1:3]], axis=2).reshape(1, 4, *PIXELS)
    np.testing.assert_array_equal(np.asarray(built(x)), right)
