"""Scalars have no axes, and outputs may be constants or inputs: built networks give what ONNX's own evaluator gives.

Expected values, shapes and dtypes are those of `onnx.reference`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import schedsearch

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import load  # noqa: E402

FLOAT = TensorProto.FLOAT
Port = tuple[str, int, Sequence[int]]


def model_of(
    nodes: Sequence[Any], inputs: Sequence[Port], outputs: Sequence[str], constants: Mapping[str, Any] | None = None
) -> Any:
    given = [helper.make_tensor_value_info(*each) for each in inputs]
    weights = [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    known = {each.name: each for each in given}
    known |= {each.name: helper.make_tensor_value_info(each.name, each.data_type, each.dims) for each in weights}
    made = [known.get(name) or helper.make_empty_tensor_value_info(name) for name in outputs]
    graph = helper.make_graph(nodes, "net", given, made, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model)


def check(model: Any, folder: Path) -> None:
    """Builds a model, loads it from its file, and compares every output of both with onnx's evaluator."""
    random, feeds = np.random.default_rng(0), {}
    for each in model.graph.input:
        kind = each.type.tensor_type
        shape, dtype = [dim.dim_value for dim in kind.shape.dim], helper.tensor_dtype_to_np_dtype(kind.elem_type)
        feeds[each.name] = np.asarray(random.integers(-3, 4, shape) + (0.25 if dtype == np.float32 else 0)).astype(dtype)
    wanted = ReferenceEvaluator(model).run(None, feeds)
    onnx.save(model, folder / "net.onnx")
    built = schedsearch.build(folder / "net.onnx", target="cpu", db=folder / "none.db", out=folder / "net.ssx")
    with built, schedsearch.load(folder / "net.ssx") as loaded:
        for net in (built, loaded):
            assert [port.name for port in net.inputs] == [each.name for each in model.graph.input]
            assert [port.name for port in net.outputs] == [each.name for each in model.graph.output]
            found = net(**feeds)
            for got, want in zip(found if isinstance(found, tuple) else (found,), wanted, strict=True):
                assert isinstance(got, np.ndarray) and (got.shape, got.dtype) == (np.shape(want), np.asarray(want).dtype)
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("op", "shape"),
    [(op, shape) for op in ("ReduceMean", "ReduceMax", "ReduceL2") for shape in ((2, 3, 4), (5,), ())]
    + [("ReduceLogSumExp", (3, 4))],
)
@pytest.mark.mostly_long(15)
def test_a_reduction_of_every_axis_is_a_scalar(op: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    check(model_of([helper.make_node(op, ["x"], ["y"], keepdims=0)], [("x", FLOAT, shape)], ["y"]), tmp_path)


SCALARS: dict[str, Any] = {
    "of scalars": model_of([helper.make_node("Add", ["x", "s"], ["y"])], [("x", FLOAT, ()), ("s", FLOAT, ())], ["y"]),
    "of a scalar and an array": model_of(
        [helper.make_node("Mul", ["x", "s"], ["y"])], [("x", FLOAT, (2, 3)), ("s", FLOAT, ())], ["y"]
    ),
    "of a scalar and a constant row": model_of(
        [helper.make_node("Add", ["x", "s"], ["y"])], [("x", FLOAT, ())], ["y"], {"s": np.ones(1, np.float32)}
    ),
    "chain": model_of(
        [
            helper.make_node("Sigmoid", ["x"], ["a"]),
            helper.make_node("Mul", ["a", "x"], ["b"]),
            helper.make_node("Exp", ["b"], ["y"]),
        ],
        [("x", FLOAT, ())],
        ["y", "a"],
    ),
    "squeezed": model_of(
        [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Squeeze", ["a"], ["y"])], [("x", FLOAT, (1, 1))], ["y"]
    ),
    "reshaped": model_of(
        [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Reshape", ["a", "none"], ["y"])],
        [("x", FLOAT, (1, 1, 1))],
        ["y"],
        {"none": np.zeros(0, np.int64)},
    ),
    "made an image": model_of(
        [helper.make_node("Reshape", ["x", "ones"], ["a"]), helper.make_node("Relu", ["a"], ["y"])],
        [("x", FLOAT, ())],
        ["y"],
        {"ones": np.ones(4, np.int64)},
    ),
    "gathered by a constant": model_of(
        [helper.make_node("Gather", ["x", "i"], ["y"])], [("x", FLOAT, (4,))], ["y"], {"i": np.array(2)}
    ),
    "gathered by an input": model_of(
        [helper.make_node("Gather", ["x", "i"], ["y"])], [("x", FLOAT, (7, 3)), ("i", TensorProto.INT64, ())], ["y"]
    ),
    "quantised": model_of(
        [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"])],
        [("x", FLOAT, ())],
        ["y"],
        {"s": np.float32(0.02), "z": np.int8(3)},
    ),
    "and the array that it scales": model_of(
        [helper.make_node("ReduceMean", ["x"], ["s"], keepdims=0), helper.make_node("Sub", ["x", "s"], ["y"])],
        [("x", FLOAT, (3, 4))],
        ["s", "y"],
    ),
}


@pytest.mark.parametrize("name", SCALARS)
@pytest.mark.mostly_long(8)
def test_a_scalar_stays_one(name: str, tmp_path: Path) -> None:
    check(SCALARS[name], tmp_path)


RELU = helper.make_node("Relu", ["x"], ["y"])
X = ("x", FLOAT, (3,))
KINDS = (np.float32, np.float16, np.float64, np.int8, np.uint8, np.int32, np.int64)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", [(), (2, 3), (1, 2, 3, 4), (0, 3)], ids=str)
@pytest.mark.mostly_long(4)
def test_an_output_may_be_a_weight(dtype: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    array = np.asarray(np.random.default_rng(0).integers(0, 9, shape)).astype(dtype)
    check(model_of([RELU], [X], ["y", "k"], {"k": array}), tmp_path)


@pytest.mark.parametrize("shape", [(4,), (2, 3), (0,)], ids=str)
def test_an_output_that_is_a_weight_has_its_shape_if_the_file_says_none(shape: tuple[int, ...]) -> None:
    model = model_of([RELU], [X], ["y", "k"], {"k": np.ones(shape, np.int64)})
    model.graph.output[1].type.tensor_type.elem_type = TensorProto.INT64
    model.graph.output[1].type.tensor_type.ClearField("shape")
    assert lower(load(model).graph()).values["k"].shape == shape


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
@pytest.mark.parametrize("shape", [(), (1, 2, 3, 4)], ids=str)
def test_an_output_may_be_an_input(dtype: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    given = ("k", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
    check(model_of([RELU, helper.make_node("Identity", ["k"], ["z"])], [X, given], ["y", "k", "z"]), tmp_path)


CONVOLUTION = helper.make_node("Conv", ["x", "w"], ["y"])
OUTPUTS: dict[str, Any] = {
    "a Constant": model_of(
        [RELU, helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(np.arange(3.0)))], [X], ["k", "y"]
    ),
    "a folded sum": model_of(
        [RELU, helper.make_node("Add", ["k", "k"], ["z"])], [X], ["y", "z"], {"k": np.ones(2, np.float32)}
    ),
    "an Identity of a weight": model_of([helper.make_node("Identity", ["k"], ["y"])], [X], ["y"], {"k": np.arange(4)}),
    "the weight of a convolution": model_of(
        [CONVOLUTION], [("x", FLOAT, (1, 3, 5, 5))], ["w", "y"], {"w": np.eye(3, dtype=np.float32).reshape(3, 3, 1, 1)}
    ),
    "its size": model_of([RELU, helper.make_node("Size", ["x"], ["k"])], [X], ["y", "k"]),
    "nothing but the input": model_of([helper.make_node("Identity", ["x"], ["y"])], [X], ["y"]),
    "the input twice": model_of(
        [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("Identity", ["x"], ["z"])], [X], ["y", "z"]
    ),
    "a result twice": model_of([RELU, helper.make_node("Identity", ["y"], ["z"])], [X], ["y", "z"]),
    "an input that nothing else reads": model_of([RELU], [("unused", TensorProto.INT64, ()), X], ["y"]),
}


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.mostly_long(9)
def test_outputs_need_not_be_computed(name: str, tmp_path: Path) -> None:
    check(OUTPUTS[name], tmp_path)


def test_a_weight_that_is_an_output_may_stay_in_the_models_file(tmp_path: Path) -> None:
    model = model_of([RELU], [X], ["y", "k"], {"k": np.arange(1024, dtype=np.float32)})
    onnx.save(model, tmp_path / "net.onnx")
    options: dict[str, Any] = {"target": "cpu", "db": tmp_path / "none.db", "weights": "reference"}
    schedsearch.build(tmp_path / "net.onnx", out=tmp_path / "net.ssx", **options).close()
    with schedsearch.load(tmp_path / "net.ssx") as net:
        assert list(net.program.references) == [net.program.weights[0]]
        np.testing.assert_array_equal(net(np.ones(3, np.float32))[1], np.arange(1024))


# --- Roundings ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("to", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
@pytest.mark.mostly_long(2)
def test_a_cast_to_a_shorter_format_rounds_also_inside_of_a_chain(to: int, tmp_path: Path) -> None:
    """d is x * 1.2345 in the shorter format, minus the same in float32: what rounding takes away, or nothing without it."""
    nodes = [
        helper.make_node("Mul", ["x", "c"], ["a"]),
        helper.make_node("Cast", ["a"], ["short"], to=to),
        helper.make_node("Relu", ["short"], ["positive"]),
        helper.make_node("Cast", ["positive"], ["wide"], to=FLOAT),
        helper.make_node("Sub", ["wide", "a"], ["d"]),
    ]
    model = model_of(nodes, [("x", FLOAT, [4, 9])], ["d"], {"c": np.float32(1.2345)})
    onnx.save(model, tmp_path / "net.onnx")
    x = np.linspace(1, 3, 36, dtype=np.float32).reshape(4, 9)
    product = x * np.float32(1.2345)
    short = np.float16 if to == TensorProto.FLOAT16 else pytest.importorskip("ml_dtypes").bfloat16
    with schedsearch.build(tmp_path / "net.onnx", target="cpu", db=tmp_path / "none.db") as net:
        np.testing.assert_array_equal(net(x), product.astype(short).astype(np.float32) - product)


@pytest.mark.parametrize("to", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
@pytest.mark.mostly_long(2)
def test_a_cast_to_a_shorter_format_may_be_an_output_that_is_read_as_well(to: int, tmp_path: Path) -> None:
    nodes = [helper.make_node("Cast", ["x"], ["short"], to=to), helper.make_node("Cast", ["short"], ["wide"], to=FLOAT)]
    graph = helper.make_graph(
        [*nodes, helper.make_node("Neg", ["wide"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", FLOAT, [4, 9])],
        [helper.make_tensor_value_info("short", to, [4, 9]), helper.make_tensor_value_info("y", FLOAT, [4, 9])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), tmp_path / "net.onnx")
    x = np.linspace(1, 3, 36, dtype=np.float32).reshape(4, 9)
    kind = np.float16 if to == TensorProto.FLOAT16 else pytest.importorskip("ml_dtypes").bfloat16
    with schedsearch.build(tmp_path / "net.onnx", target="cpu", db=tmp_path / "none.db") as net:
        short, y = net(x)
    np.testing.assert_array_equal(np.asarray(short).view(np.uint16), x.astype(kind).view(np.uint16))
    np.testing.assert_array_equal(y, -x.astype(kind).astype(np.float32))


def test_an_input_of_float16_may_be_an_output(tmp_path: Path) -> None:
    half = TensorProto.FLOAT16
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", half, [4, 9])],
        [helper.make_tensor_value_info("x", half, [4, 9]), helper.make_tensor_value_info("y", half, [4, 9])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), tmp_path / "net.onnx")
    x = np.linspace(1, 3, 36, dtype=np.float16).reshape(4, 9)
    with schedsearch.build(tmp_path / "net.onnx", target="cpu", db=tmp_path / "none.db") as net:
        for got, want in zip(net(x), (x, -x), strict=True):
            np.testing.assert_array_equal(got, want)


def test_an_output_may_be_a_constant_that_float32_does_not_hold(tmp_path: Path) -> None:
    check(model_of([RELU], [X], ["y", "k"], {"k": np.array([0.1, 1e-3, np.pi])}), tmp_path)
