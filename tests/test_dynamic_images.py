"""Images of which batch, height and width are known at run time only. Expected values are onnx.reference's."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxscript")

import onnx
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from test_dynamic_model import agrees, artifact, device

import schedsearch
from schedsearch.device import Device, open_device
from schedsearch.device.detect import detect
from schedsearch.dynamic.dims import Unknown, same
from schedsearch.dynamic.explain import explain
from schedsearch.dynamic.graph import Size
from schedsearch.dynamic.model import read_graph
from schedsearch.dynamic.net import DynamicNet
from schedsearch.network.model import ModelError
from schedsearch.ops.dependence import SizeError

__all__ = ["device"]  # a fixture

SIZES = {"n": Size("n", 1, 3), "h": Size("h", 6, 18), "w": Size("w", 6, 14)}


def random(*shape: int) -> Any:
    """Weights keep the magnitude of an image."""
    scale = np.sqrt(np.prod(shape[1:])) if max(shape[2:], default=0) < 6 else 1.0
    return (np.random.default_rng(sum(shape)).standard_normal(shape) / scale).astype(np.float32)


def network(
    nodes: Sequence[Any],
    weights: dict[str, Any] | None = None,
    *,
    inputs: dict[str, list[Any]] | None = None,
    outputs: Sequence[str] = ("y",),
) -> onnx.ModelProto:
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (inputs or {"x": ["n", 3, "h", "w"]}).items()
    ]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    constants = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    graph = helper.make_graph(list(nodes), "images", infos, made, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def images(*shapes: tuple[int, ...]) -> list[dict[str, Any]]:
    return [{"x": random(*shape)} for shape in shapes]


# the largest image first, so that what is beyond the extents of later ones is not zero
SHAPES = [(3, 3, 18, 14), (1, 3, 6, 6), (2, 3, 7, 13), (3, 3, 11, 6), (2, 3, 18, 9)]


def node(op: str, inputs: str, output: str, **attributes: Any) -> Any:
    return helper.make_node(op, inputs.split(), [output], f"make {output}", **attributes)


def resnet() -> onnx.ModelProto:
    weights = {"stem": random(8, 3, 5, 5), "a": random(8, 8, 3, 3), "b": random(8, 8, 3, 3), "wide": random(8, 1, 5, 5)}
    nodes = [
        node("Conv", "x stem", "c0", pads=[2] * 4, strides=[2, 2]),
        node("Relu", "c0", "r0"),
        node("MaxPool", "r0", "p0", kernel_shape=[3, 3], pads=[1] * 4, strides=[2, 2]),
        node("Conv", "p0 a", "c1", pads=[1] * 4),
        node("Relu", "c1", "r1"),
        node("Conv", "r1 b", "c2", pads=[2] * 4, dilations=[2, 2]),
        node("Add", "c2 p0", "s"),
        node("Conv", "s wide", "y", pads=[1, 2, 2, 0], group=8),
    ]
    return network(nodes, weights)


@pytest.mark.long
def test_windows_meet_padding_where_an_image_ends(device: Device) -> None:
    """As the beginning of a ResNet."""
    agrees(device, resnet(), SIZES, *images(*SHAPES))


@pytest.mark.long(of="networks")
def test_numbers_that_are_none_beyond_an_image_do_not_count(device: Device) -> None:
    """Roots of what another image left there."""
    nodes = [
        node("Relu", "x", "r"),
        node("Sqrt", "r", "root"),
        node("Sub", "root one", "d"),
        node("Sqrt", "d", "nan"),  # of whole images too: below 1
        node("Max", "root one", "above"),
        node("Sub", "above one", "e"),
        node("Sqrt", "e", "f"),
        node("Conv", "f a", "y", pads=[1] * 4),
    ]
    weights = {"a": random(4, 3, 3, 3), "one": np.ones(1, np.float32)}
    agrees(device, network(nodes, weights), SIZES, *images(*SHAPES))


@pytest.mark.long
def test_a_max_pool_and_a_convolution_may_read_the_same_image(device: Device) -> None:
    """One meets the lowest number beyond it, the other zeros."""
    nodes = [
        node("Relu", "x", "r"),
        node("Neg", "r", "m"),
        node("MaxPool", "m", "p", kernel_shape=[3, 3], pads=[1] * 4),
        node("Conv", "m a", "c", pads=[1] * 4),
        node("Conv", "m b", "d", pads=[2] * 4),
        node("Concat", "p c d", "y", axis=1),
    ]
    weights = {"a": random(4, 3, 3, 3), "b": random(2, 3, 5, 5)}
    agrees(device, network(nodes, weights), SIZES, *images(*SHAPES))


@pytest.mark.long
def test_pixels_become_channels_of_larger_images(device: Device) -> None:
    """As in networks for super-resolution; images of one channel have the same elements in every layout."""
    nodes = [
        node("Conv", "x a", "c", pads=[1] * 4),
        node("DepthToSpace", "c", "d", blocksize=2, mode="CRD"),
        node("Conv", "d b", "e", pads=[1] * 4),
        node("Resize", "e  scales", "y", mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
    ]
    nodes[-1].input[:] = ["e", "", "scales"]
    weights = {"a": random(8, 3, 3, 3), "b": random(1, 2, 3, 3), "scales": np.array([1, 1, 2, 3], np.float32)}
    agrees(device, network(nodes, weights), SIZES, *images(*SHAPES))


@pytest.mark.long
def test_channels_are_normalised_and_split_in_each_pixel(device: Device) -> None:
    nodes = [
        node("Conv", "x a", "c", pads=[1] * 4),
        node("Transpose", "c", "t", perm=[0, 2, 3, 1]),
        node("LayerNormalization", "t scale", "l", axis=-1),
        node("Transpose", "l", "u", perm=[0, 3, 1, 2]),
        helper.make_node("Split", ["u", "parts"], ["one", "two"], "split", axis=1),
        node("MaxPool", "two", "y", kernel_shape=[3, 3], pads=[1] * 4),
        node("Squeeze", "one axes", "z"),
    ]
    weights = {"a": random(4, 3, 3, 3), "scale": np.full(4, 1.5, np.float32)}
    weights |= {"parts": np.array([1, 3]), "axes": np.array([1])}
    agrees(device, network(nodes, weights, outputs=("y", "z")), SIZES, *images(*SHAPES))


@pytest.mark.long
def test_transposed_convolutions_of_whole_blocks(device: Device) -> None:
    """As U-Nets enlarge images."""
    weights = {"a": random(3, 4, 2, 2), "b": random(4, 2, 4, 4), "c": random(2, 2, 3, 3)}
    nodes = [
        node("ConvTranspose", "x a", "d", strides=[2, 2]),
        node("Relu", "d", "r"),
        node("ConvTranspose", "r b", "e", strides=[2, 2], pads=[1] * 4),
        node("ConvTranspose", "e c", "y", strides=[2, 2], pads=[1] * 4, output_padding=[1, 1]),
    ]
    agrees(device, network(nodes, weights), SIZES, *images(*SHAPES))


@pytest.mark.long
def test_pools_end_where_an_image_ends(device: Device) -> None:
    nodes = [
        node("MaxPool", "x", "m", kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 0], ceil_mode=1),
        node("AveragePool", "m", "a", kernel_shape=[3, 3], pads=[1] * 4, count_include_pad=1),
        node("AveragePool", "a", "y", kernel_shape=[2, 3], strides=[2, 1]),
    ]
    agrees(device, network(nodes), SIZES, *images(*SHAPES))


def pooled(op: str) -> onnx.ModelProto:
    kept = {"axes": [2, 3], "keepdims": 1} if op == "ReduceMean" else {}
    nodes = [
        node("LeakyRelu", "x", "r"),
        node(op, "r", "p", **kept),
        node("Sigmoid", "p", "g"),
        node("Mul", "r g", "scaled"),
        node(op, "scaled", "q", **({"axes": [2, 3], "keepdims": 0} if kept else {})),
        *([] if kept else [node("Flatten", "q", "f")]),
        node("Gemm", "q b" if kept else "f b", "y"),
    ]
    return network(nodes, {"b": random(3, 5)})


@pytest.mark.long
@pytest.mark.parametrize("op", ["GlobalAveragePool", "GlobalMaxPool", "ReduceMean"])
def test_global_pools_count_the_pixels_in_use(device: Device, op: str) -> None:
    """As in the end of a network for classification, and in squeeze-and-excitation."""
    agrees(device, pooled(op), SIZES, *images(*SHAPES))


def unet() -> onnx.ModelProto:
    nodes = [
        node("Conv", "x a", "c", pads=[1] * 4),
        node("MaxPool", "c", "down", kernel_shape=[2, 2], strides=[2, 2]),
        node("Conv", "down b", "d", pads=[1] * 4),
        helper.make_node("Resize", ["d", "", "scales"], ["up"], "make up", mode="nearest"),
        node("Concat", "up c", "both", axis=1),
        node("Conv", "both e", "f", pads=[1] * 4),
        node("Add", "f up", "y"),
    ]
    weights = {"a": random(4, 3, 3, 3), "b": random(4, 4, 3, 3), "e": random(4, 8, 3, 3)}
    return network(nodes, weights | {"scales": np.array([1, 1, 2, 2], np.float32)})


@pytest.mark.long
def test_sizes_decide_whether_images_fit_each_other(device: Device) -> None:
    """Of an odd height, half of it twice is less."""
    agrees(device, unet(), SIZES, *images((3, 3, 18, 14), (1, 3, 6, 8), (2, 3, 10, 6)))
    with DynamicNet(read_graph(unet(), SIZES).program(), device, artifact) as net:
        message = (
            r"both: x0 and x1: the extents do not fit one another; allowed: sizes for which they do; got a=\[2, 6, 8, 4\]"
        )
        with pytest.raises(SizeError, match=message):
            net(random(2, 3, 7, 8))
        with pytest.raises(SizeError, match="do not fit one another"):
            net.bind(random(2, 3, 7, 8))
        assert net(random(2, 3, 8, 8)).shape == (2, 4, 8, 8)


@pytest.mark.long(of="networks")
def test_an_image_of_fixed_size_meets_one_of_any_size_only_where_it_has_that_size(device: Device) -> None:
    inputs: dict[str, list[Any]] = {"x": ["n", 3, "h", "w"], "z": [2, 3, 9, "w"]}
    model = network([node("Relu", "x", "r"), node("Concat", "r z", "y", axis=1)], inputs=inputs)
    x, z = random(2, 3, 9, 8), random(2, 3, 9, 8)
    agrees(device, model, SIZES, {"x": x, "z": z})
    with (
        DynamicNet(read_graph(model, SIZES).program(), device, artifact) as net,
        pytest.raises(SizeError, match="do not fit one another"),
    ):
        net(random(2, 3, 8, 8), z)
    message = re.escape("[3, 3, 18, 14] and [2, 3, 9, 14], do not fit one another")
    with pytest.raises(ModelError, match=f"Add: make y .the largest sizes of its arguments, {message}"):
        read_graph(network([node("Relu", "x", "r"), node("Add", "r z", "y")], inputs=inputs), SIZES)


def test_an_exact_run_knows_all_sizes_beforehand() -> None:
    text = explain(read_graph(unet(), SIZES).program())
    assert "exact runs copy nothing to the host and wait for nothing" in text
    assert re.search(r"margin of .* allocates nothing", text)


def test_a_size_too_small_for_a_window_is_an_error(device: Device) -> None:
    sizes = {**SIZES, "h": Size("h", 1, 18)}
    model = network([node("Conv", "x a", "y", strides=[1, 1])], {"a": random(4, 3, 5, 5)})
    with DynamicNet(read_graph(model, sizes).program(), device, artifact) as net:
        assert net(random(2, 3, 5, 6)).shape == (2, 4, 1, 2)
        assert net(random(2, 3, 4, 6)).shape == (2, 4, 0, 2)
        with pytest.raises(SizeError, match=r"would have the extents \[.*-1.*\] for n=2, h=3, w=6"):
            net(random(2, 3, 3, 6))


REFUSED: list[tuple[Any, str]] = [
    (node("MaxPool", "x", "y", kernel_shape=[1, 1], strides=[2, 2], ceil_mode=1), "ceil_mode depends on height and width"),
    (node("AveragePool", "x", "y", kernel_shape=[3, 3], pads=[1] * 4), "set count_include_pad"),
    (node("Conv", "x a", "y", auto_pad="SAME_UPPER", strides=[2, 2]), "SAME_UPPER with these strides puts other pads"),
    (node("ConvTranspose", "x b", "y", strides=[2, 2]), "allowed: pads and output_padding that give whole blocks"),
]


@pytest.mark.parametrize(("refused", "reason"), REFUSED, ids=[each.op_type for each, _ in REFUSED])
def test_what_depends_on_height_and_width_otherwise_is_refused_with_a_reason(refused: Any, reason: str) -> None:
    with pytest.raises(ModelError, match=f"{refused.op_type}: make y .*{reason}"):
        read_graph(network([refused], {"a": random(4, 3, 3, 3), "b": random(3, 4, 3, 3)}), SIZES)


@given(st.integers(-9, 40), st.lists(st.tuples(st.sampled_from("+*/"), st.integers(1, 6), st.booleans()), max_size=6))
def test_what_whole_numbers_make_of_an_unknown_extent_is_what_they_make_of_a_number(n: int, steps: Any) -> None:
    unknown = Unknown("n")
    of_unknown, again, number = unknown, unknown, n
    for sign, operand, negative in steps:
        operand = -operand if negative and sign != "/" else operand
        if sign == "+":
            of_unknown, again, number = of_unknown + operand, operand + again, number + operand
        elif sign == "*":
            of_unknown, again, number = of_unknown * operand, operand * again, number * operand
        else:
            of_unknown, again, number = of_unknown // operand, again // operand, number // operand
    assert same(of_unknown, again)

    def value(each: Unknown) -> int:
        times, plus, over = each.line
        return n if each is unknown else (times * value(each.base) + plus) // over

    assert value(of_unknown) == number


def test_equal_formulas_are_one_extent() -> None:
    h = Unknown("h")
    assert same((h + 2 - 3) // 1 + 1, h)  # a window of three with padding
    assert same(((h - 1) // 2 + 1 - 1) // 2 + 1, (h + 3) // 4)
    assert same(2 * h // 2, h) and same(h + 2 * h, 2 * h + h)
    assert not any(same(h, other) for other in (2 * (h // 2), h + 1, Unknown("h"), 3))
    assert same(3, 3) and not same(3, 4)
    with pytest.raises(TypeError, match=r"\(h - 1\) // 2 is known at run time only"):
        assert (h - 1) // 2 == 3


@pytest.mark.gpu
@pytest.mark.parametrize("make", [resnet, unet, lambda: pooled("GlobalAveragePool")], ids=["resnet", "unet", "pooled"])
def test_images_of_any_size_on_a_gpu(make: Callable[[], onnx.ModelProto]) -> None:
    torch = pytest.importorskip("torch")
    model = make()
    reference, program = ReferenceEvaluator(model), read_graph(model, SIZES).program()
    code = functools.partial(schedsearch.compile, target="cuda", allow=("default",))
    with (
        contextlib.closing(open_device(detect("cuda"))) as gpu,
        DynamicNet(program, gpu, lambda workload: code(workload).artifact) as net,
    ):
        for each in images((3, 3, 18, 14), (1, 3, 6, 6), (2, 3, 8, 12), (3, 3, 10, 6)):
            (want,) = reference.run(None, each)
            x = torch.as_tensor(each["x"], device="cuda")
            exact, bound = net(x), net.bind(x)
            bound.step()
            for got in (exact, *bound.sliced()):
                np.testing.assert_allclose(got.cpu().numpy(), want, rtol=2e-3, atol=2e-3)  # products of TF32
            bound.close()
