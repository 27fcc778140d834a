"""Results of dynamic graphs that are scalars, constants, inputs or views; and scalars as inputs.

Expected values, shapes and dtypes are those of `onnx.reference`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import schedsearch

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

Array = np.ndarray[Any, Any]
X = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
node = helper.make_node
RESULTS: dict[str, tuple[list[Any], list[str]]] = {  # nodes, and results; x is [n, 3], s, i, three and zero are scalars
    "of scalars": ([node("Mul", ["x", "s"], ["y"]), node("Exp", ["s"], ["z"])], ["y", "z"]),
    "extents": (
        [node("Size", ["x"], ["size"]), node("Shape", ["x"], ["shape"]), node("Gather", ["shape", "zero"], ["n"])],
        ["size", "shape", "n"],
    ),
    "chosen elements": (
        [node("Gather", ["x", "i"], ["row"]), node("Gather", ["row", "zero"], ["first"]), node("Relu", ["x"], ["y"])],
        ["row", "first", "y"],
    ),
    "constants": ([node("Relu", ["x"], ["y"])], ["three", "y", "pair"]),
    "inputs": ([node("Relu", ["x"], ["y"])], ["x", "s", "y"]),
    "one array twice, and views of it": (
        [node("Relu", ["x"], ["y"]), node("Identity", ["y"], ["same"]), node("Unsqueeze", ["y", "pair"], ["wide"])],
        ["y", "same", "wide"],
    ),
}


def model_of(name: str) -> Any:
    nodes, results = RESULTS[name]
    info = helper.make_tensor_value_info
    inputs = [info("x", TensorProto.FLOAT, ["n", 3]), info("s", TensorProto.FLOAT, []), info("i", TensorProto.INT64, [])]
    read = {each for one in nodes for each in one.input}.union(results)
    constants = {"three": np.float32(3), "zero": np.int64(0), "pair": np.array([0, 1])}
    weights = [numpy_helper.from_array(np.asarray(each), name) for name, each in constants.items() if name in read]
    kinds = {each.name: each for each in (*inputs, *(info(each.name, each.data_type, each.dims) for each in weights))}
    graph = helper.make_graph(
        nodes, "net", [each for each in inputs if each.name in read],
        [kinds.get(each) or helper.make_empty_tensor_value_info(each) for each in results], weights,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model)


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.mostly_long(12)
def test_results_have_the_values_and_shapes_of_onnx(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    given = {"x": X, "s": np.array(2.5, np.float32), "i": np.array(-2)}
    feeds = {each.name: given[each.name] for each in model.graph.input}
    wanted = [np.asarray(each) for each in ReferenceEvaluator(model).run(None, feeds)]
    onnx.save(model, tmp_path / "net.onnx")
    path = tmp_path / "net.ssx"
    built = schedsearch.build_dynamic(
        tmp_path / "net.onnx", {"n": (1, 8)}, way="exact", target="cpu", db=tmp_path / "none.db", out=path
    )
    with built, schedsearch.load(path) as loaded:
        for net in (built, loaded):
            assert [port.name for port in net.outputs] == RESULTS[name][1]
            for got, right in zip(net(**feeds), wanted, strict=True):
                assert isinstance(got, np.ndarray) and (got.shape, got.dtype) == (right.shape, right.dtype)
                np.testing.assert_allclose(got, right, rtol=1e-6)
        bound = built.bind(**feeds)
        bound.step()
        for got, right in zip(bound.sliced(), wanted, strict=True):
            assert got.shape == right.shape
            np.testing.assert_allclose(got, right, rtol=1e-6)
        bound.close()
