"""Resize nodes of models whose images have any size. Expected values are onnx.reference's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxscript")

import onnx
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from test_dynamic_images import SHAPES, SIZES, images, network, node, random
from test_dynamic_model import agrees, artifact, device

import schedsearch
from schedsearch.device import Device
from schedsearch.dynamic.explain import explain
from schedsearch.dynamic.graph import Size
from schedsearch.dynamic.model import read_graph
from schedsearch.dynamic.net import DynamicNet
from schedsearch.dynamic.program import DynamicProgram
from schedsearch.network.model import ModelError
from schedsearch.ops.dependence import SizeError

__all__ = ["device"]  # a fixture

NUMBERS = {
    "zero": np.array([0]), "two": np.array([2]), "four": np.array([4]), "twice": np.array([1, 1, 2, 2], np.float32)
}  # fmt: skip


def resize(x: str, y: str, sizes: str = "", scales: str = "", op: str = "Resize", **attributes: Any) -> Any:
    inputs = [x, scales] if op == "Upsample" else [x, "", scales, sizes] if sizes else [x, "", scales]
    return helper.make_node(op, inputs, [y], f"make {y}", **attributes)


def model(nodes: Sequence[Any], weights: dict[str, Any] | None = None, *, opset: int = 18, **named: Any) -> onnx.ModelProto:
    every = NUMBERS | (weights or {})
    read = {name for each in nodes for name in each.input}
    made = network(nodes, {name: array for name, array in every.items() if name in read}, **named)
    made.opset_import[0].version = opset
    return made


def calls(program: DynamicProgram) -> list[str]:
    return [call.workload.op for segment in program.segments for call in segment.calls]


def sizes_of(of: str, x: str) -> list[Any]:
    """`sizes`: batch and channels of x, height and width of another image; as exporters write it."""
    return [
        node("Shape", of, "shape_of"),
        node("Shape", x, "shape_x"),
        node("Slice", "shape_x zero two", "outer"),
        node("Slice", "shape_of two four", "inner"),
        node("Concat", "outer inner", "sizes", axis=0),
    ]


def pyramid() -> onnx.ModelProto:
    """A level goes to the size of a shallower one, and is added to it."""
    return model(
        [
            node("MaxPool", "x", "deep", kernel_shape=[3, 3], pads=[1] * 4, strides=[2, 2]),
            *sizes_of("x", "deep"),
            resize("deep", "up", "sizes", coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
            node("Add", "up x", "y"),
        ]
    )


@pytest.mark.long
def test_an_image_gets_the_size_of_another(device: Device) -> None:
    nodes = [
        *sizes_of("x", "deep"),
        resize("deep", "up", "sizes", coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
        node("Add", "up x", "y"),
    ]
    inputs: dict[str, list[Any]] = {"deep": ["n", 3, "dh", "dw"], "x": ["n", 3, "h", "w"]}
    sizes = SIZES | {"dh": Size("dh", 1, 9), "dw": Size("dw", 1, 7)}
    given = [{"deep": random(n, 3, h // 2, w // 2), "x": random(n, 3, h, w)} for n, _, h, w in SHAPES]
    agrees(device, model(nodes, inputs=inputs), sizes, *given)


@pytest.mark.long
def test_a_deeper_level_goes_to_the_size_of_a_shallower_one(device: Device) -> None:
    agrees(device, pyramid(), SIZES, *images(*SHAPES))


def test_the_size_of_another_image_is_its_size_without_a_comparison() -> None:
    program = read_graph(pyramid(), SIZES).program()
    assert "dyn_resize" in calls(program)
    made = [name for segment in program.segments for name in segment.values]
    assert [name for name in made if "x0 and x1" in name] == []
    assert "exact runs copy nothing to the host and wait for nothing" in explain(program)


@pytest.mark.long
def test_an_image_of_any_size_is_doubled_between_pixels(device: Device) -> None:
    doubled = model([resize("x", "up", scales="twice", mode="linear"), node("Relu", "up", "y")])
    agrees(device, doubled, SIZES, *images(*SHAPES))


@pytest.mark.long
def test_a_segmentation_has_the_size_of_the_image(device: Device) -> None:
    nodes = [
        node("MaxPool", "x", "features", kernel_shape=[4, 4], strides=[4, 4]),
        *sizes_of("x", "features"),
        resize("features", "y", "sizes", mode="linear", coordinate_transformation_mode="align_corners"),
    ]
    agrees(device, model(nodes), SIZES, *images(*SHAPES))


@pytest.mark.long
@pytest.mark.parametrize(
    "attributes",
    [
        dict(mode="linear"),
        dict(mode="linear", coordinate_transformation_mode="pytorch_half_pixel"),
        dict(nearest_mode="floor", coordinate_transformation_mode="asymmetric"),
        dict(nearest_mode="ceil"),
        dict(nearest_mode="round_prefer_ceil", coordinate_transformation_mode="asymmetric"),
    ],
    ids=str,
)
def test_scales_may_be_fractions(device: Device, attributes: dict[str, Any]) -> None:
    """Sizes are rounded down. Scales are such that floats hold the coordinates exactly."""
    scales = {"scales": np.array([1, 1, 0.5, 4], np.float32)}
    agrees(device, model([resize("x", "y", scales="scales", **attributes)], scales), SIZES, *images(*SHAPES))


@pytest.mark.long
def test_scales_of_any_float_give_the_size_that_the_definition_gives(device: Device) -> None:
    scales = {"scales": np.array([1, 1, 0.7, 1.3], np.float32)}
    scaled = model([resize("x", "y", scales="scales", mode="linear")], scales)
    agrees(device, scaled, SIZES, *images(*SHAPES))


@pytest.mark.long
def test_sizes_may_be_constants_of_some_axes(device: Device) -> None:
    nodes = [resize("x", "y", "to", mode="linear", axes=[3, 2])]
    agrees(device, model(nodes, {"to": np.array([9, 5])}), SIZES, *images(*SHAPES))


@pytest.mark.long
def test_an_image_of_one_size_may_get_that_of_another(device: Device) -> None:
    nodes = [*sizes_of("x", "mask"), resize("mask", "y", "sizes", mode="linear")]
    inputs: dict[str, list[Any]] = {"x": ["n", 3, "h", "w"], "mask": [1, 1, 7, 5]}
    given = [{"x": random(*shape), "mask": random(1, 1, 7, 5)} for shape in SHAPES]
    agrees(device, model(nodes, inputs=inputs), SIZES, *given)


@pytest.mark.long
def test_upsample_is_a_resize_of_old(device: Device) -> None:
    old = model([resize("x", "y", scales="twice", op="Upsample", mode="linear")], opset=9)
    new = model([resize("x", "y", scales="twice", mode="linear", coordinate_transformation_mode="asymmetric")])
    x = random(2, 3, 7, 9)
    with (
        DynamicNet(read_graph(old, SIZES).program(), device, artifact) as one,
        DynamicNet(read_graph(new, SIZES).program(), device, artifact) as other,
    ):
        np.testing.assert_array_equal(one(x), other(x))
    agrees(device, new, SIZES, {"x": x})


@pytest.mark.long
def test_a_level_of_features_is_resized_between_convolutions(device: Device) -> None:
    nodes = [
        node("Conv", "x a", "c", pads=[1] * 4),
        node("Conv", "c b", "deep", pads=[1] * 4, strides=[2, 2]),
        *sizes_of("c", "deep"),
        resize("deep", "up", "sizes", mode="linear"),
        node("Concat", "up c", "both", axis=1),
        node("Conv", "both e", "y", pads=[1] * 4),
    ]
    weights = {"a": random(4, 3, 3, 3), "b": random(4, 4, 3, 3), "e": random(2, 8, 3, 3)}
    agrees(device, model(nodes, weights), SIZES, *images(*SHAPES))


@pytest.mark.long
def test_an_executable_resizes(tmp_path: Path) -> None:
    path, limits = tmp_path / "pyramid.ssx", {name: (size.least, size.most) for name, size in SIZES.items()}
    onnx.save(pyramid(), tmp_path / "pyramid.onnx")
    schedsearch.build_dynamic(tmp_path / "pyramid.onnx", limits, run_mode="exact", out=path, target="cpu")
    x = random(2, 3, 7, 13)
    (wanted,) = ReferenceEvaluator(pyramid()).run(None, {"x": x})
    with schedsearch.load(path) as net:
        np.testing.assert_allclose(net(x), wanted, rtol=1e-6)


# ---- which operator a node gets

WHOLE = [
    dict(mode="nearest"),
    dict(mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
]


@pytest.mark.parametrize("attributes", WHOLE, ids=str)
def test_whole_multiples_of_nearest_pixels_have_the_kernels_of_the_bound(attributes: dict[str, Any]) -> None:
    program = read_graph(model([resize("x", "y", scales="twice", **attributes)]), SIZES).program()
    assert "resize" in calls(program) and "dyn_resize" not in calls(program)


@pytest.mark.parametrize(
    "attributes", [dict(mode="linear"), dict(coordinate_transformation_mode="asymmetric", nearest_mode="ceil")], ids=str
)
def test_other_resizes_of_open_images_read_the_sizes(attributes: dict[str, Any]) -> None:
    assert calls(read_graph(model([resize("x", "y", scales="twice", **attributes)]), SIZES).program()) == ["dyn_resize"]


def test_images_of_which_the_batch_alone_is_open_have_the_kernels_of_their_size() -> None:
    inputs: dict[str, list[Any]] = {"x": ["n", 3, 8, 8]}
    nodes = [resize("x", "y", "to", mode="linear", axes=[2, 3])]
    program = read_graph(model(nodes, {"to": np.array([9, 5])}, inputs=inputs), {"n": Size("n", 1, 4)}).program()
    assert "resize" in calls(program) and "dyn_resize" not in calls(program)


def bound_of(read: onnx.ModelProto, **sizes: Size) -> tuple[int, ...]:
    program = read_graph(read, SIZES | sizes).program()
    return program.values[program.outputs[0]].shape


def test_bounds_follow_from_scales_and_from_the_bounds_of_sizes() -> None:
    scales = {"scales": np.array([1, 1, 0.7, 2.5], np.float32)}
    assert bound_of(model([resize("x", "y", scales="scales")], scales)) == (3, 3, 12, 35)  # 18 * 0.7 is 12.6
    assert bound_of(pyramid()) == (3, 3, 18, 14)


def of_given_sizes() -> onnx.ModelProto:
    """The caller says what the sizes are, and the model has a name for them."""
    made = model([resize("x", "y", "to", axes=[2, 3])])
    made.graph.input.append(helper.make_tensor_value_info("to", TensorProto.INT64, [2]))
    del made.graph.output[:]
    made.graph.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3, "oh", "ow"]))
    return made


def test_sizes_that_a_caller_gives_need_bounds(device: Device) -> None:
    with pytest.raises(ModelError, match=r"dimension 2 of 'y' \(Resize\) has no bound"):
        read_graph(of_given_sizes(), SIZES)
    sizes = SIZES | {"oh": Size("oh", 1, 20), "ow": Size("ow", 1, 9)}
    x, to = random(2, 3, 6, 8), np.array([12, 4])
    agrees(device, of_given_sizes(), sizes, {"x": x, "to": to})
    with DynamicNet(read_graph(of_given_sizes(), sizes).program(), device, artifact) as net:
        with pytest.raises(SizeError, match=r"would be 2x3x21x4, which exceeds its declared bound 3x3x20x9"):
            net(x, np.array([21, 4]))
        with pytest.raises(SizeError, match=r"sizes has a negative number; allowed: 0 or more"):
            net(x, np.array([-1, 4]))
        bound = net.bind(x, np.array([21, 4]))
        bound.step()
        with pytest.raises(SizeError, match="exceeds its declared bound"):
            bound.check()
        bound.close()
        assert net(x, np.array([0, 4])).shape == (2, 3, 0, 4)


SCALED = {"scales": np.array([1, 1, 1.5, 1.5], np.float32), "deep": np.array([1, 2, 2, 2], np.float32)}
REFUSED: list[tuple[list[Any], str]] = [
    ([resize("x", "y", scales="twice", mode="cubic")], r"cubic, half_pixel; allowed: nearest or linear"),
    (
        [resize("x", "y", scales="twice", coordinate_transformation_mode="half_pixel_symmetric")],
        "half_pixel_symmetric; allowed: nearest or linear",
    ),
    ([resize("x", "y", scales="twice", mode="linear", antialias=1)], "antialias; allowed: nearest or linear"),
    ([resize("x", "y", scales="deep", mode="linear")], r"scales the batch or the channels .* got \[1.0, 2.0\]"),
    (
        [resize("x", "y", scales="scales", mode="linear", coordinate_transformation_mode="align_corners")],
        r"align_corners and the scales \[1.5, 1.5\]; give integers, or sizes",
    ),
    (
        [
            node("Shape", "x", "shape"),
            node("Cast", "shape", "floats", to=TensorProto.FLOAT),
            node("Div", "floats floats", "ones"),
            node("Add", "ones ones", "twos"),
            resize("x", "y", scales="twos", mode="linear"),
        ],
        "has scales that are computed; allowed: constants",
    ),
    (
        [node("Shape", "x", "shape"), node("Mul", "shape two", "sizes"), resize("x", "y", "sizes")],
        r"may change the batch or the channels: axis 0 is n before and .* allowed: the same extent, .* or axes=\[2, 3\]",
    ),
]


@pytest.mark.parametrize(("nodes", "reason"), REFUSED, ids=[reason[:24] for _, reason in REFUSED])
def test_what_no_operator_computes_is_refused_with_a_reason(nodes: list[Any], reason: str) -> None:
    with pytest.raises(ModelError, match=f"make y .*{reason}"):
        read_graph(model(nodes, SCALED, opset=19), SIZES)
