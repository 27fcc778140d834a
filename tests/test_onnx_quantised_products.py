"""Products of quantised numbers: every integer is that of whole numbers in NumPy, or of ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from onnx import helper  # noqa: E402
from test_onnx_contributed import check as check_contributed  # noqa: E402
from test_onnx_contributed import integers  # noqa: E402
from test_onnx_products import Arrays, load, lower, lowered, model_of, numbers, operators  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.network.evaluate import evaluate  # noqa: E402

Array = np.ndarray[Any, Any]
LINEAR: dict[str, Array] = {
    "as": np.array(0.03, np.float32), "az": np.array(7, np.uint8), "bs": np.array(0.02, np.float32),
    "bz": np.array(3, np.int8), "ys": np.array(3.7, np.float32), "yz": np.array(5, np.uint8),
}  # fmt: skip


def node(op: str, names: str, result: str = "y", **read: Any) -> Any:
    return helper.make_node(op, ["" if name == "-" else name for name in names.split()], [result], **read)


def computed(nodes: list[Any], inputs: Arrays, weights: Arrays, **options: Any) -> tuple[Array, list[str]]:
    network = lowered(nodes, inputs, weights, **options)
    return evaluate(network, inputs)["y"], operators(network)


def by_runtime(nodes: list[Any], inputs: Arrays, weights: Arrays, outputs: list[str], opset: int = 17) -> list[Array]:
    runtime = pytest.importorskip("onnxruntime")
    model = model_of(nodes, inputs, weights, outputs, opset).SerializeToString()
    session = runtime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(inputs)))


def requantised(a: Array, b: Array) -> Array:
    """In whole numbers up to one product with a float32 scale and one rounding, as docs/workload-file.md has it."""
    sums = np.matmul(a.astype(np.int64) - int(LINEAR["az"]), b.astype(np.int64) - int(LINEAR["bz"]))
    scale = np.float32(np.float32(LINEAR["as"] * LINEAR["bs"]) / LINEAR["ys"])
    return np.clip(np.rint(sums.astype(np.float32) * scale) + int(LINEAR["yz"]), 0, 255).astype(np.uint8)


@pytest.mark.parametrize(
    ("x", "weight"), [((3, 5), (5, 7)), ((2, 3, 5), (2, 5, 7)), ((2, 2, 3, 5), (2, 2, 5, 7)), ((2, 3, 5), (1, 5, 7))]
)
def test_products_of_computed_integers_have_no_float_between(x: tuple[int, ...], weight: tuple[int, ...]) -> None:
    arrays = {"a": integers(1, np.uint8, *x), "b": integers(2, np.int8, *weight)}
    found, ops = computed([node("QLinearMatMul", "a as az b bs bz ys yz")], arrays, LINEAR)
    np.testing.assert_array_equal(found, requantised(arrays["a"], arrays["b"]))
    assert ops == ["batch_matmul"]
    nodes = [
        node("DequantizeLinear", "a as az", "af"), node("DequantizeLinear", "b bs bz", "bf"),
        node("MatMul", "af bf", "yf"), node("QuantizeLinear", "yf ys yz"),
    ]  # fmt: skip
    found, ops = computed(nodes, arrays, LINEAR)
    np.testing.assert_array_equal(found, requantised(arrays["a"], arrays["b"]))
    assert ops == ["batch_matmul"]


def test_dequantised_factors_may_be_transposed() -> None:
    arrays = {"a": integers(1, np.uint8, 2, 3, 5), "b": integers(2, np.int8, 2, 7, 5)}
    nodes = [
        node("DequantizeLinear", "a as az", "af"), node("DequantizeLinear", "b bs bz", "bf"),
        node("Transpose", "bf", "bt", perm=[0, 2, 1]), node("MatMul", "af bt", "yf"), node("QuantizeLinear", "yf ys yz"),
    ]  # fmt: skip
    found, ops = computed(nodes, arrays, LINEAR)
    np.testing.assert_array_equal(found, requantised(arrays["a"], arrays["b"].swapaxes(1, 2)))
    assert ops == ["batch_matmul"]


@pytest.mark.parametrize("op", ["MatMul", "Conv"])
def test_zero_points_that_differ_between_columns_lead_to_a_product_of_floats(op: str) -> None:
    if op == "MatMul":
        x, weight, axis, read = integers(1, np.uint8, 4, 5), integers(2, np.int8, 5, 7), 1, {}
    else:
        x, weight = integers(1, np.uint8, 1, 3, 8, 9), integers(2, np.int8, 7, 3, 3, 3)
        axis, read = 0, {"pads": [1] * 4}
    weights = {**LINEAR, "w": weight, "ws": np.linspace(0.01, 0.02, 7).astype(np.float32), "wz": integers(3, np.int8, 7)}
    nodes = [
        node("DequantizeLinear", "a as az", "af"), node("DequantizeLinear", "w ws wz", "wf", axis=axis),
        node(op, "af wf", **read),
    ]  # fmt: skip
    weights = {name: each for name, each in weights.items() if name in ("as", "az", "w", "ws", "wz")}
    found, _ = computed(nodes, {"a": x}, weights)
    (wanted,) = by_runtime(nodes, {"a": x}, weights, ["y"])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 6])
@pytest.mark.parametrize("computed_scale", [False, True])
def test_a_convolution_of_filters_with_zero_points_of_their_own(groups: int, computed_scale: bool) -> None:
    """As `quantize_static` of ONNX Runtime writes it with per_channel and weights that are not symmetric."""
    x, weight = integers(1, np.uint8, 2, 6, 8, 9), integers(2, np.uint8, 12, 6 // groups, 3, 3)
    zeros, scales = integers(3, np.uint8, 12), np.linspace(0.01, 0.02, 12).astype(np.float32)
    bias, read = integers(4, np.int8, 12).astype(np.int32) * 50, {"pads": [1, 0, 2, 1], "strides": [2, 1], "group": groups}
    step = np.array(3.7 / groups, np.float32)
    weights = {**LINEAR, "ys": step, "w": weight, "ws": scales, "wz": zeros, "b": bias}
    inputs = {"a": x} | ({"as": weights.pop("as")} if computed_scale else {})
    nodes = [node("QLinearConv", "a as az w ws wz ys yz b", **read)]
    found, _ = computed(nodes, inputs, weights)
    torch = pytest.importorskip("torch")
    sums = torch.nn.functional.conv2d(
        torch.nn.functional.pad(torch.tensor(x.astype(np.float64) - 7), (0, 1, 1, 2)),
        torch.tensor(weight.astype(np.float64) - zeros.reshape(-1, 1, 1, 1)), torch.tensor(bias.astype(np.float64)),
        stride=(2, 1), groups=groups,
    ).numpy()  # fmt: skip
    wanted = np.clip(np.rint(sums * scales.reshape(-1, 1, 1).astype(np.float64) * 0.03 / step) + 5, 0, 255)
    assert wanted.std() > 20
    steps = np.abs(found.astype(int) - wanted)
    assert steps.max() <= 1 and np.mean(steps > 0) < 0.01


ZEROS: list[tuple[Any, Any]] = [
    (None, None), (np.uint8(9), None), (np.uint8(9), np.int8(-4)), (integers(5, np.uint8, 3), None),
    (None, integers(6, np.int8, 7)), (integers(5, np.uint8, 3), integers(6, np.int8, 7)),
    (np.uint8(0), integers(6, np.int8, 7)),
]  # fmt: skip


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("given", ["", "b", "zeros", "b zeros"])
def test_sums_of_integers_less_any_zero_points(zeros: tuple[Any, Any], given: str) -> None:
    """Of rows and columns, constants and computed ones."""
    arrays = {"a": integers(1, np.uint8, 3, 5), "b": integers(2, np.int8, 5, 7)}
    arrays |= {name: np.asarray(each) for name, each in zip(("za", "zb"), zeros) if each is not None}
    za, zb = (np.int64(0) if each is None else np.asarray(each).astype(np.int64) for each in zeros)
    wanted = (arrays["a"] - (za[:, None] if za.ndim else za)) @ (arrays["b"] - zb)
    constant = {name for name in arrays if (name == "b" and "b" in given) or (name[0] == "z" and "zeros" not in given)}
    names = "a b" + (" za" if "za" in arrays else " -") + (" zb" if "zb" in arrays else "")
    inputs = {name: each for name, each in arrays.items() if name not in constant}
    found, _ = computed(
        [node("MatMulInteger", names.removesuffix(" -"))], inputs, {name: arrays[name] for name in sorted(constant)}
    )
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    "read", [{}, {"pads": [1, 2, 0, 1]}, {"strides": [2, 3], "pads": [2, 2, 2, 2], "dilations": [2, 1]}, {"group": 2}]
)
@pytest.mark.parametrize("zero", [None, np.int8(5), np.arange(6, dtype=np.int8), np.arange(6, dtype=np.int8) * 20])
def test_a_convolution_of_integers_less_a_computed_zero_point(read: dict[str, Any], zero: Any) -> None:
    """Filters less their zero points have 8 bits in groups, and more without, if there are several."""
    from onnx.reference import ReferenceEvaluator

    groups = read.get("group", 1)
    inputs = {"x": integers(1, np.uint8, 2, 4, 9, 8), "z": np.array(131, np.uint8)}
    filters = integers(2, np.int8, 6, 4 // groups, 3, 3) // (8 if groups > 1 else 1)
    weights = {"w": filters} | ({} if zero is None else {"zw": np.asarray(zero)})
    nodes = [node("ConvInteger", "x w z" + " zw" * (zero is not None), **read)]
    wide = {"x": inputs["x"].astype(np.float64) - 131, "w": filters.astype(np.float64)}
    wide["w"] -= np.reshape(0 if zero is None else zero, (-1, 1, 1, 1))
    model = model_of([node("Conv", "x w", **read)], {"x": wide["x"]}, {"w": wide["w"]}, ["y"])
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": wide["x"]})
    found, _ = computed(nodes, inputs, weights)
    np.testing.assert_array_equal(found, np.asarray(wanted).astype(np.int64))


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 9, 17)])
@pytest.mark.parametrize("kind", ["both", "positive", "negative", "zeros"])
def test_numbers_are_quantised_by_their_range_as_in_onnx_runtime(shape: tuple[int, ...], kind: str) -> None:
    x = numbers(1, *shape) * np.float32(3)
    x = {"both": x, "positive": abs(x), "negative": -abs(x), "zeros": 0 * x}[kind]
    nodes = [helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "s", "z"])]
    network = lowered(nodes, {"x": x}, {}, ("y", "s", "z"))
    found = evaluate(network, {"x": x})  # which rounds a scale once, where ONNX Runtime rounds the range as well
    y, scale, zero = by_runtime(nodes, {"x": x}, {}, ["y", "s", "z"])
    assert found["z"].reshape(()) == zero and (abs(found["y"].astype(int) - y) <= 1).all()
    np.testing.assert_allclose(found["s"].reshape(()), scale, rtol=2e-7)


def test_numbers_behind_a_relu_have_the_zero_point_0_so_that_products_need_no_correction() -> None:
    nodes = [
        node("Relu", "x", "r"), node("MaxPool", "r", "m", kernel_shape=[2, 2]),
        helper.make_node("DynamicQuantizeLinear", ["m"], ["q", "s", "z"]), node("ConvInteger", "q w z", "c"),
        node("Cast", "c", "f", to=1), node("Mul", "f s"),
    ]  # fmt: skip
    x, weights = numbers(1, 1, 4, 9, 9), {"w": integers(2, np.int8, 6, 4, 3, 3)}
    network = lowered(nodes, {"x": x}, weights)
    (convolution,) = (each for each in network.nodes if getattr(each, "name", "").startswith("ConvInteger"))
    assert convolution.implementations[0].params["zero_points"] == ()
    (wanted,) = by_runtime(nodes, {"x": x}, weights, ["y"])
    np.testing.assert_allclose(evaluate(network, {"x": x})["y"], wanted, rtol=1e-6)


@pytest.mark.parametrize("kinds", [np.int8, np.uint8])
def test_products_in_onnx_runtime_quantise_their_input(kinds: Any) -> None:
    weights = {
        "w": integers(1, kinds, 12, 7), "s": np.linspace(0.01, 0.02, 7).astype(np.float32), "z": integers(2, kinds, 7),
        "b": numbers(3, 7),
    }  # fmt: skip
    check_contributed("DynamicQuantizeMatMul", "x w s z b", {"x": numbers(4, 2, 5, 12)}, weights)
    weights |= {"t": np.array(0.03, np.float32), "u": np.array(9, np.uint8)}
    check_contributed("MatMulIntegerToFloat", "x w t s u z b", {"x": integers(5, np.uint8, 2, 5, 12)}, weights)


def test_integers_of_32_bits_and_of_blocks_are_dequantised() -> None:
    q, scale = integers(1, np.int32, 4, 6), np.array(0.0003, np.float32)
    found, _ = computed([node("DequantizeLinear", "q s")], {"q": q}, {"s": scale})
    np.testing.assert_allclose(found, q.astype(np.float32) * scale, rtol=1e-6)
    q8, scales, zeros = integers(2, np.uint8, 4, 7), numbers(3, 4, 3), integers(4, np.uint8, 4, 3)
    blocks = np.arange(7) // 3
    wanted = (q8.astype(np.float32) - zeros[:, blocks]) * scales[:, blocks]
    found, _ = computed(
        [node("DequantizeLinear", "q s z", axis=1, block_size=3)], {"q": q8}, {"s": scales, "z": zeros}, opset=21
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize(("kinds", "whole"), [(np.int32, 70000), (np.int16, -30001), (np.uint16, 60001)])
def test_integers_that_float16_lacks_keep_their_digits(kinds: Any, whole: int) -> None:
    q, scale = np.array([whole, 2049, 3], kinds), np.array(0.001, np.float16)
    found, kernels = computed([node("DequantizeLinear", "q s")], {"q": q}, {"s": scale}, opset=21)
    np.testing.assert_allclose(found, q.astype(np.float64) * np.float64(scale), rtol=2**-11)
    assert kernels == ["elementwise"]


@pytest.mark.parametrize(("kinds", "zero"), [(np.int16, 20001), (np.uint16, 40003)])
def test_zero_points_that_float16_lacks_keep_their_digits(kinds: Any, zero: int) -> None:
    x = np.array([64, -3, 2.125, 0], np.float16)
    weights = {"s": np.array(0.0078125, np.float16), "z": np.array(zero, kinds)}
    found, _ = computed([node("QuantizeLinear", "x s z")], {"x": x}, weights, opset=21)
    np.testing.assert_array_equal(found, x.astype(np.float64) * 128 + zero)


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_in_blocks_are_read_as_floats(bits: int) -> None:
    """Of 4 bits, or of 8."""
    kind = onnx.TensorProto.INT4 if bits == 4 else onnx.TensorProto.INT8
    whole = np.random.default_rng(1).integers(-8, 8, (6, 5))
    scales = abs(numbers(2, 3, 5)) + np.float32(0.1)
    nodes = [node("DequantizeLinear", "w s", "wf", axis=0, block_size=2), node("MatMul", "x wf")]
    model = model_of(nodes, {"x": numbers(3, 4, 6)}, {"s": scales}, ["y"], 21)
    model.graph.initializer.append(helper.make_tensor("w", kind, whole.shape, whole.ravel().tolist()))
    from schedsearch.network.lower import lower
    from schedsearch.network.model import load

    network = lower(load(model).graph())
    found = evaluate(network, {"x": numbers(3, 4, 6)})["y"]
    np.testing.assert_allclose(
        found, numbers(3, 4, 6).astype(np.float64) @ (whole * scales[np.arange(6) // 2]), rtol=1e-5, atol=1e-5
    )
    assert operators(network) == ["dense"]


@pytest.mark.parametrize("outputs", [(), ("w",), ("d",), ("w", "d")])
def test_quantised_weights_of_a_product_can_have_other_readers_and_leave_the_network(outputs: tuple[str, ...]) -> None:
    """The product reads integers; an Add reads the numbers that they stand for, and a Gather the integers."""
    inputs = {"x": numbers(1, 4, 3), "u": numbers(2, 2, 3, 4), "rows": np.array([2, 0])}
    weights: dict[str, Array] = {
        "w": integers(3, np.int8, 3, 4), "s": np.array([0.5, 0.25, 1, 2], np.float32), "z": np.zeros(4, np.int8),
        "xs": np.array(0.1, np.float32), "xz": np.array(4, np.uint8),
    }  # fmt: skip
    nodes = [
        node("QuantizeLinear", "x xs xz", "xq"), node("DequantizeLinear", "xq xs xz", "xd"),
        node("DequantizeLinear", "w s z", "d", axis=1), node("MatMul", "xd d", "m"), node("QuantizeLinear", "m xs xz", "y"),
        node("Add", "u d", "sum"), node("Gather", "w rows", "chosen"),
    ]  # fmt: skip
    model = model_of(nodes, inputs, weights, ["y", "sum", "chosen", *outputs])
    for port in model.graph.output:
        if port.name == "w":  # nothing makes it, so nothing tells its dtype
            port.CopyFrom(helper.make_tensor_value_info("w", onnx.TensorProto.INT8, [3, 4]))
    found = evaluate(lower(load(model).graph()), inputs)
    w = weights["w"].astype(np.float64) * weights["s"]
    rounded = np.clip(np.rint(inputs["x"] / weights["xs"]) + 4, 0, 255) - 4
    y = np.clip(np.rint(rounded @ w) + 4, 0, 255)
    wanted = {"y": y, "sum": inputs["u"] + w, "chosen": weights["w"][[2, 0]], "w": weights["w"], "d": w}
    for name in ("y", "sum", "chosen", *outputs):
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-6)


@pytest.mark.long
def test_a_cpu_quantises_by_the_range_and_convolves_as_onnx_runtime_in_every_bit(tmp_path: Path) -> None:
    """As dynamic quantisation writes networks."""
    x = numbers(1, 1, 4, 12, 17)
    weights = {"w": integers(2, np.int8, 8, 4, 3, 3), "m": integers(3, np.int8, 17, 6), "mz": integers(4, np.int8, 6)}
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]), node("ConvInteger", "q w z", "c", pads=[1] * 4),
        node("MatMulInteger", "q m z mz", "p"),
    ]  # fmt: skip
    names = ["q", "s", "z", "c", "p"]
    wanted = by_runtime(nodes, {"x": x}, weights, names)
    onnx.save(model_of(nodes, {"x": x}, weights, names), tmp_path / "net.onnx")
    with schedsearch.build(tmp_path / "net.onnx", target="cpu", db=tmp_path / "none.db", progress=False) as net:
        found = net.evaluate({"x": x})
    for name, array in zip(names, wanted, strict=True):
        np.testing.assert_array_equal(found[name].reshape(array.shape), array)


@pytest.mark.long
def test_a_cpu_computes_the_same_integers(tmp_path: Path) -> None:
    arrays = {"a": integers(1, np.uint8, 2, 3, 5), "b": integers(2, np.int8, 2, 5, 7)}
    onnx.save(model_of([node("QLinearMatMul", "a as az b bs bz ys yz")], arrays, LINEAR, ["y"]), tmp_path / "net.onnx")
    with schedsearch.build(tmp_path / "net.onnx", target="cpu", db=tmp_path / "none.db", progress=False) as net:
        np.testing.assert_array_equal(net.evaluate(arrays)["y"], requantised(arrays["a"], arrays["b"]))
