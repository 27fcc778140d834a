"""Extents that a model leaves open: how they are named, and what callers give for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from onnx import helper  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.errors import ArgumentError  # noqa: E402
from schedsearch.network.model import ModelError, load  # noqa: E402

Extents = Sequence[int | str | None]


def model(nodes: Sequence[Any], inputs: dict[str, Extents], outputs: Sequence[str] = ("y",)) -> Any:
    """Float32 inputs; an extent None has neither a number nor a name, and -1 is written as that number."""

    def port(name: str, shape: Extents) -> Any:
        made = helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [each if each != -1 else 1 for each in shape])
        for extent, given in zip(made.type.tensor_type.shape.dim, shape):
            if given == -1:
                extent.dim_value = -1
        return made

    results = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph(nodes, "open", [port(*each) for each in inputs.items()], results)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def relu(shape: Extents) -> Any:
    return model([helper.make_node("Relu", ["x"], ["y"])], {"x": shape})


def shapes_of(loaded: Any, shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    return {value.name: [int(each) for each in value.shape] for value in loaded.graph(shapes).graph.inputs}


# --- Names ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("extent", [-1, None, "?"])
def test_an_open_extent_without_a_name_is_called_by_its_place(extent: Any) -> None:
    loaded = load(relu([extent, 3, extent]))
    with pytest.raises(ModelError, match=r"x \[x\.0,3,x\.2\]"):
        loaded.graph()
    assert shapes_of(loaded, {"x": [2, 3, 5]}) == {"x": [2, 3, 5]}


def test_a_name_that_the_model_has_already_is_not_given_again() -> None:
    loaded = load(model([helper.make_node("Add", ["x", "w"], ["y"])], {"x": [None, 3], "w": ["x.0", 3]}))
    with pytest.raises(ModelError, match=r"x \[x\.0_,3\]; w \[x\.0,3\]"):
        loaded.graph()


def test_two_extents_written_as_a_question_mark_are_two_sizes(tmp_path: Path) -> None:
    onnx.save(relu(["?", 3, "?"]), tmp_path / "net.onnx")
    sizes = {"x.0": (1, 4), "x.2": (2, 6)}
    with schedsearch.build_dynamic(tmp_path / "net.onnx", sizes, target="cpu", db=tmp_path / "r.db", progress=False) as net:
        for shape in ((1, 3, 6), (4, 3, 2), (3, 3, 3)):
            x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
            np.testing.assert_array_equal(net(x), np.maximum(x, 0))


# --- Shapes for some of the inputs ------------------------------------------------------------------------------------
ADDED = {"x": ["n", 3], "w": ["n", "m"], "b": [1, "m"]}


def added() -> Any:
    nodes = [helper.make_node("MatMul", ["x", "c"], ["t"]), helper.make_node("Sum", ["t", "w", "b"], ["y"])]
    made = model(nodes, ADDED)
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((3, 4), np.float32), "c"))
    return made


def test_a_dimension_of_several_inputs_is_given_once() -> None:
    assert shapes_of(load(added()), {"w": [2, 4]}) == {"x": [2, 3], "w": [2, 4], "b": [1, 4]}
    with pytest.raises(ModelError, match=r"w \[2,m\]; b \[1,m\]\. Shapes must be fixed; give them, e\.g\. --shape w=2,"):
        load(added()).graph({"x": [2, 3]})


def test_a_dimension_with_two_extents_says_nothing_of_other_inputs() -> None:
    nodes = [helper.make_node("Relu", [name], [f"{name}.y"]) for name in "abc"]
    loaded = load(model(nodes, {name: ["n", 2] for name in "abc"}, [f"{name}.y" for name in "abc"]))
    with pytest.raises(ModelError, match=r"dynamic dimensions: c \[n,2\]"):
        loaded.graph({"a": [1, 2], "b": [5, 2]})


# --- Sizes that cannot change -----------------------------------------------------------------------------------------
def test_a_range_of_one_size_is_a_fixed_extent(tmp_path: Path) -> None:
    onnx.save(relu(["n", 3, "w"]), tmp_path / "net.onnx")
    sizes = {"n": (1, 3), "w": (7, 7)}
    with schedsearch.build_dynamic(tmp_path / "net.onnx", sizes, target="cpu", db=tmp_path / "r.db", progress=False) as net:
        assert set(net.dimensions) == {"n"} and net.inputs[0].shape[1:] == (3, 7)
        x = np.random.default_rng(0).standard_normal((2, 3, 7)).astype(np.float32)
        np.testing.assert_array_equal(net(x), np.maximum(x, 0))
        with pytest.raises(ArgumentError):
            net(x[:, :, :6].copy())


def test_a_fixed_size_of_no_dimension_is_refused(tmp_path: Path) -> None:
    onnx.save(relu(["n", 3, "w"]), tmp_path / "net.onnx")
    with pytest.raises(ModelError, match="has no dynamic dimension 'v'; allowed: n, w"):
        schedsearch.build_dynamic(tmp_path / "net.onnx", {"n": (1, 3), "v": (7, 7)}, target="cpu", progress=False)


# --- Names of nodes ---------------------------------------------------------------------------------------------------
def test_constants_may_share_a_name_as_they_may_in_onnx_runtime() -> None:
    constants = [helper.make_node("Constant", [], [each], name="same", value_float=1.0) for each in "ab"]
    load(model([*constants, helper.make_node("Sum", ["x", "a", "b"], ["y"])], {"x": [2]})).graph()
