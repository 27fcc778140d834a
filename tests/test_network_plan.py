"""Plans of networks: the ways of nodes, the layouts of values and the conversions between them."""

from __future__ import annotations

import numpy as np
import pytest

from schedsearch import concat, conv2d, layout_transform, transpose
from schedsearch.errors import UnsupportedError
from schedsearch.network.graph import Constant, Network, Node, Value, View
from schedsearch.network.layouts import conversion, same_bytes
from schedsearch.network.plan import first_plan


def image(name: str, c: int, extent: int = 8, n: int = 2, dtype: str = "float16") -> Value:
    return Value(name, "NCHW", (n, c, extent, extent), dtype)


def convolution(name: str, x: Value, y: Value, *layouts: str) -> Node:
    """A 1x1 convolution with a way for each layout; NCHW->NHWC writes another layout than it reads."""
    n, c, h, w = x.shape
    ways = []
    for of_x, _, of_y in (layout.partition("->") for layout in layouts):
        sizes = {"n": n, "h": h, "w": w, "c": c, "k": y.shape[1], "r": 1, "s": 1}
        ways.append(conv2d(**sizes, dtype=x.dtype, layout=of_x, output_layout=of_y or of_x))
    return Node(name, (name,), {"x": x.name, "weight": f"{name}.weight"}, {"y": y.name}, tuple(ways))


def network(inputs: list[Value], outputs: list[Value], inner: list[Value], nodes: list[Node | View]) -> Network:
    values = {value.name: value for value in [*inputs, *inner, *outputs]}
    weights = {}
    for node in nodes:
        if isinstance(node, Node) and "weight" in node.arguments:
            o, i = values[node.outputs["y"]].shape[1], values[node.arguments["x"]].shape[1]
            weights[node.arguments["weight"]] = Constant(node.arguments["weight"], "OIHW", np.zeros((o, i, 1, 1)))
    return Network(tuple(v.name for v in inputs), tuple(v.name for v in outputs), values, weights, tuple(nodes))


def steps(plan) -> list[tuple[str, str, str]]:
    return [(each.value, each.x, each.y) for each in plan.conversions]


def test_layouts_that_differ_in_axes_of_extent_1_only_hold_the_same_bytes() -> None:
    assert same_bytes(image("grey", 1), "NCHW", "NHWC")
    assert same_bytes(image("pooled", 64, extent=1), "NCHW", "NHWC")
    assert same_bytes(image("one block", 32), "NCHW32c", "NHWC")
    assert not same_bytes(image("padded block", 16), "NCHW32c", "NHWC")
    assert not same_bytes(image("colour", 3), "NCHW", "NHWC")


def test_images_change_their_layout_by_layout_transform_and_matrices_by_transpose() -> None:
    assert conversion(image("x", 64), "NCHW", "NCHW32c") == layout_transform(
        n=2, c=64, h=8, w=8, layout="NCHW", to="NCHW32c"
    )
    matrix = Value("m", "ABC", (2, 3, 5), "float32")
    assert conversion(matrix, "ABC", "CAB") == transpose(x=(2, 3, 5), permutation=(2, 0, 1), dtype="float32")
    assert conversion(image("x", 64), "NCHW4c", "NCHW6c") is None  # blocks that do not nest
    assert conversion(Value("index", "AB", (2, 3), "int64"), "AB", "BA") is None


def test_the_first_plan_converts_a_value_once_for_all_who_read_it_in_a_layout() -> None:
    x, a, b, c = image("x", 16), image("a", 32), image("b", 32), image("c", 32)
    one = convolution("one", x, a, "NHWC", "NCHW")
    two = convolution("two", a, b, "NCHW")
    three = convolution("three", a, c, "NCHW->NHWC")
    plan = first_plan(network([x], [b, c], [a], [one, two, three]))
    assert plan.ways == {"one": one.ways[0], "two": two.ways[0], "three": three.ways[0]}
    assert steps(plan) == [("x", "NCHW", "NHWC"), ("a", "NHWC", "NCHW"), ("c", "NHWC", "NCHW")]
    assert plan.conversions[1].workload == layout_transform(n=2, c=32, h=8, w=8, layout="NHWC", to="NCHW")


def test_words_say_the_layout_of_arguments_whose_axes_have_other_letters() -> None:
    x, a, y = image("x", 16), image("a", 32), image("y", 48)
    way = concat(x=[(2, 8, 8, 16), (2, 8, 8, 32)], axis=3)
    words = {way: {"x0": "NHWC", "x1": "NHWC", "y": "NHWC"}}
    join = Node("join", ("join",), {"x0": "x", "x1": "a"}, {"y": "y"}, (way,), words=words)
    plan = first_plan(network([x], [y], [a], [convolution("one", x, a, "NHWC"), join]))
    assert steps(plan) == [("x", "NCHW", "NHWC"), ("y", "NHWC", "NCHW")]
    unnamed = Node("join", ("join",), {"x0": "x", "x1": "a"}, {"y": "y"}, (way,))
    with pytest.raises(ValueError, match=r"x NCHW \(2, 16, 8, 8\) is not \(2, 8, 8, 16\) in layout NCHW, as x0 has it"):
        first_plan(network([x], [y], [a], [convolution("one", x, a, "NHWC"), unnamed]))


def test_a_view_needs_a_layout_in_which_the_bytes_are_the_same() -> None:
    x, a, flat = image("x", 16), image("a", 32), Value("flat", "AB", (2, 2048), "float16")
    plan = first_plan(
        network([x], [flat], [a], [convolution("one", x, a, "NHWC"), View("v", ("v",), "a", "flat", (("NCHW", "AB"),))])
    )
    assert plan.views == {"v": ("NCHW", "AB")}
    assert steps(plan) == [("x", "NCHW", "NHWC"), ("a", "NHWC", "NCHW")]


def test_a_conversion_that_no_kernel_does_is_refused() -> None:
    x, a, b = image("x", 24), image("a", 24), image("b", 24)
    one, two = convolution("one", x, a, "NCHW4c"), convolution("two", a, b, "NCHW6c")
    with pytest.raises(UnsupportedError, match=r"a \(float16 NCHW .* is made in layout NCHW4c, and two reads it in NCHW6c"):
        first_plan(network([x], [b], [a], [one, two]))
