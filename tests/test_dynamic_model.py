"""ONNX models with dynamic dimensions: static parts, arithmetic of shapes, views. Expected values are onnx.reference's."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxscript")

from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx_support import Net

import schedsearch
from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.dynamic.explain import explain
from schedsearch.dynamic.graph import Size
from schedsearch.dynamic.model import read_graph
from schedsearch.dynamic.net import DynamicNet
from schedsearch.dynamic.run import Run
from schedsearch.network.model import ModelError
from schedsearch.ops.dependence import SizeError


@functools.cache
def artifact(workload: Any) -> Any:
    return schedsearch.compile(workload, target="cpu", allow=("default",)).artifact


@pytest.fixture(scope="module")
def device() -> Any:
    opened = open_device(detect("cpu"))
    yield opened
    opened.close()


def agrees(device: Any, model: Any, sizes: Any, *inputs: dict[str, Any]) -> None:
    """Both ways to run give what the reference computes."""
    reference, program = ReferenceEvaluator(model), read_graph(model, sizes).program()
    with DynamicNet(program, device, artifact) as net:
        for arrays in inputs:
            wanted = reference.run(None, arrays)
            given = [arrays[name] for name in program.inputs]
            exact, bound = net(*given), net.bind(*given)
            bound.step()
            for found in (exact if isinstance(exact, tuple) else (exact,), bound.sliced()):
                for got, want in zip(found, wanted, strict=True):
                    assert got.dtype == want.dtype and got.shape == want.shape
                    np.testing.assert_allclose(got, np.reshape(want, got.shape), rtol=1e-4, atol=1e-5)
            bound.close()


def images(n: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(n).standard_normal((n, 3, 8, 8)).astype(np.float32)}


def classifier() -> Any:
    """Convolutions, a pool and a matrix product on n images; the batch goes through Shape and Reshape as exporters do it."""
    net = Net("n", 3, 8, 8)
    x = first = net.node("Relu", net.conv("x", 8, 3))
    x = net.node("MaxPool", net.node("Relu", net.node("Add", net.conv(x, 8, 8), first)), kernel_shape=[2, 2], strides=[2, 2])
    x = net.node("GlobalAveragePool", x)
    batch = net.node("Gather", net.node("Shape", x), net.numbers(0, dtype=np.int64))
    to = net.node("Concat", net.node("Unsqueeze", batch, net.row(0)), net.row(-1), axis=0)
    x = net.node("Softmax", net.node("Gemm", net.node("Reshape", x, to), net.weight("fc", 8, 5)), axis=1)
    net.results = [x]
    return net.model(opset=18)


@pytest.mark.long
def test_a_network_with_a_dynamic_batch_is_fused_and_waits_for_nothing(device: Any) -> None:
    sizes = {"n": Size("n", 1, 6)}
    lines = explain(read_graph(classifier(), sizes).program()).splitlines()
    assert lines[0] == "segment 0: exact runs copy nothing to the host and wait for nothing"
    calls = ["conv0", "conv2", "maxpool5", "globalaveragepool6", "gemm12", "softmax13"]
    assert [line.split()[0] for line in lines[2:-1]] == calls
    agrees(device, classifier(), sizes, *(images(n) for n in (1, 4, 6)))


ARITHMETIC = {
    "size": [("Size", "x")],
    "sum": [("Shape", "x"), ("Add", "t t")],
    "difference with a broadcast": [("Shape", "x"), ("Sub", "t three")],
    "product and quotient": [("Shape", "x"), ("Mul", "t minus"), ("Div", "t two")],
    "rest": [("Shape", "x"), ("Mod", "t three")],
    "smaller and larger": [("Shape", "x"), ("Min", "t three"), ("Max", "t two")],
    "gathered": [("Shape", "x"), ("Gather", "t some")],
    "gathered by computed places": [("Shape", "x"), ("Mod", "p three"), ("Gather", "u t")],
    "cut": [("Shape", "x"), ("Slice", "t minus zero zero minus")],
    "put together": [("Shape", "x"), ("Concat", "t minus p")],
    "product of all": [("Shape", "x"), ("ReduceProd", "t")],
    "largest": [("Shape", "x"), ("ReduceMax", "t")],
    "chosen": [("Shape", "x"), ("Equal", "t three"), ("Where", "t minus u")],
    "positions": [("Neg", "p"), ("Add", "t one"), ("Abs", "t")],
}
"""Operator and inputs of each node: t is the result before it, and u the one before that."""


def arithmetic() -> Any:
    """The results of all of these of x (n, 4, m) and the positions p (2)."""
    nodes, results = [], []
    for number, name in enumerate(ARITHMETIC):
        made = ["", ""]
        for op, inputs in ARITHMETIC[name]:
            given = [{"t": made[-1], "u": made[-2]}.get(each, each) for each in inputs.split()]
            made.append(f"{op}{number}.{len(made)}")
            nodes.append(helper.make_node(op, given, made[-1:], **({"axis": 0} if op == "Concat" else {})))
        results.append(helper.make_tensor_value_info(made[-1], TensorProto.INT64, None))
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4, "m"]),
        helper.make_tensor_value_info("p", TensorProto.INT64, [2]),
    ]
    constants = {"zero": [0], "one": [1], "two": [2], "three": [3], "minus": [-1], "some": [2, 0, -1]}
    weights = [helper.make_tensor(name, TensorProto.INT64, [len(v)], v) for name, v in constants.items()]
    graph = helper.make_graph(nodes, "rows", inputs, results, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.long
def test_arithmetic_of_shapes_costs_no_calls(device: Any) -> None:
    sizes = {"n": Size("n", 1, 6), "m": Size("m", 0, 5)}
    calls = [call for segment in read_graph(arithmetic(), sizes).program().segments for call in segment.calls]
    assert len(calls) == len(ARITHMETIC) and all("copied" in call.name for call in calls)
    arrays = [{"x": np.zeros((n, 4, m), np.float32), "p": np.array(p)} for n, m, p in ((1, 0, (0, -1)), (6, 5, (2, 1)))]
    agrees(device, arithmetic(), sizes, *arrays)


@pytest.mark.long
def test_a_bounded_run_keeps_all_memory_that_it_writes(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the sizes that it computes, if no result shows them. Otherwise another array would get their memory."""
    new, made = Run.new, list[Any]()

    def noted(*given: Any) -> Any:
        array, address = new(*given)
        made.append(weakref.ref(array))
        return array, address

    monkeypatch.setattr(Run, "new", noted)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
    nodes = [helper.make_node("Shape", ["x"], ["s"]), helper.make_node("Add", ["s", "s"], ["y"])]
    graph = helper.make_graph(nodes, "twice", [x], [helper.make_tensor_value_info("y", TensorProto.INT64, [2])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    with DynamicNet(read_graph(model, {"n": Size("n", 1, 6)}).program(), device, artifact) as net:
        bound = net.bind(np.zeros((3, 4), np.float32))
        gc.collect()
        assert len(made) == 2 and all(each() is not None for each in made)
        (result,) = bound.step()
        assert result.array.tolist() == [6, 8] and result.extents is None
        bound.close()


def test_models_without_an_operator_say_which_nodes_and_why() -> None:
    net = Net("n", 4)
    net.node("Tile", "x", net.row(1, 2))
    with pytest.raises(
        ModelError, match=r"no operator for these nodes of the model: Tile: tile0 \(takes arrays of fixed extents"
    ):
        read_graph(net.model(), {"n": Size("n", 1, 6)})


def counted(op: str, *names: str, dtype: int = TensorProto.INT64, shape: Any = ("len",)) -> Any:
    """A node of integers, one of each name."""
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, [1]) for name in names]
    graph = helper.make_graph(
        [helper.make_node(op, list(names), ["y"], name="the node")], "counted", inputs,
        [helper.make_tensor_value_info("y", dtype, shape)],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((0, 5, 0), r"y\.y of node the node \(Range\): delta is 0; allowed: .*; got start=\[0\], limit=\[5\], delta=\[0\]"),
        (
            (0, 12, 1),
            r"y\.y of node the node \(Range\) would be 12, which exceeds its declared bound 9; declare larger bounds",
        ),
    ],
)
def test_impossible_counts_are_errors_in_both_ways(device: Any, given: Any, message: str) -> None:
    program = read_graph(counted("Range", "start", "limit", "delta"), {"len": Size("len", 0, 9)}).program()
    with DynamicNet(program, device, artifact) as net:
        arrays = [np.array([n]) for n in given]
        with pytest.raises(SizeError, match=message):
            net(*arrays)
        bound = net.bind(*arrays)
        bound.results[0].array[:] = 7
        bound.step()
        assert list(bound.results[0].extents) == [0] and (bound.results[0].array == 7).all()
        with pytest.raises(SizeError, match=message):
            bound.check()
        for array, right in zip(arrays, (4, -5, -3)):
            array[:] = right
        np.testing.assert_array_equal(net(*arrays), [4, 1, -2])
        bound.close()


@pytest.mark.long
def test_a_negative_extent_is_an_error_that_names_it(device: Any) -> None:
    model = counted("ConstantOfShape", "shape", dtype=TensorProto.FLOAT)
    with DynamicNet(read_graph(model, {"len": Size("len", 0, 9)}).program(), device, artifact) as net:
        assert net(np.array([4])).tolist() == [0.0] * 4 and net(np.array([0])).shape == (0,)
        with pytest.raises(SizeError, match=r"\(ConstantOfShape\): shape has a negative .* got x=\[1\], shape=\[-2\]"):
            net(np.array([-2]))


def test_results_without_a_bound_are_refused() -> None:
    with pytest.raises(ModelError, match=r"dimension 0 of 'y' \(Range\) has no bound: its inputs do not limit it"):
        read_graph(counted("Range", "start", "limit", "delta"))
    with pytest.raises(ModelError, match=r"the node \(Range\): bound: bound must be at most 2147483647, got 4294967296"):
        read_graph(counted("Range", "start", "limit", "delta"), {"len": Size("len", 0, 2**32)})
