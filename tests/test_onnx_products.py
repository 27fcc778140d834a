"""Products of matrices in every form that ONNX has: what networks compute against NumPy in float64."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from onnx import helper, numpy_helper  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.graph import Network, Node  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import ModelError, load  # noqa: E402

Arrays = Mapping[str, np.ndarray[Any, Any]]


def model_of(nodes: Sequence[Any], inputs: Arrays, weights: Arrays, outputs: Sequence[str], opset: int = 17) -> Any:
    kind = helper.np_dtype_to_tensor_dtype
    info = [helper.make_tensor_value_info(name, kind(array.dtype), array.shape) for name, array in inputs.items()]
    made = [helper.make_empty_tensor_value_info(name) for name in outputs]
    graph = helper.make_graph(nodes, "net", info, made, [numpy_helper.from_array(a, name) for name, a in weights.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def lowered(
    nodes: Sequence[Any], inputs: Arrays, weights: Arrays, outputs: Sequence[str] = ("y",), **options: Any
) -> Network:
    return lower(load(model_of(nodes, inputs, weights, outputs, **options)).graph())


def check(nodes: Sequence[Any], inputs: Arrays, weights: Arrays, wanted: np.ndarray[Any, Any], **options: Any) -> Network:
    network = lowered(nodes, inputs, weights, **options)
    found = evaluate(network, inputs)["y"]
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=1e-5, atol=1e-5)
    return network


def numbers(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def operators(network: Network) -> list[str]:
    return [node.implementations[0].op for node in network.nodes if isinstance(node, Node)]


SHAPES = [
    ([5], [5]), ([3, 5], [5]), ([5], [5, 7]), ([5], [2, 5, 7]), ([2, 3, 5], [5]), ([3, 5], [5, 7]), ([1, 1], [1, 1]),
    ([3, 1, 3, 5], [1, 4, 5, 7]), ([2, 1, 3, 5], [2, 4, 5, 7]), ([2, 4, 3, 5], [2, 1, 5, 7]), ([2, 4, 3, 5], [4, 5, 7]),
    ([1, 3, 5], [1, 1, 5, 7]), ([3, 5], [1, 5, 7]), ([2, 3, 5], [1, 5, 7]), ([2, 2, 1, 3, 5], [3, 5, 7]),
    ([1, 2, 3, 5], [2, 2, 1, 5, 4]), ([3, 5], [2, 2, 5, 4]), ([2, 1, 3, 1, 2, 5], [1, 2, 3, 4, 5, 3]),
]  # fmt: skip


@pytest.mark.parametrize(("x", "weight"), SHAPES)
def test_matmul_multiplies_any_shapes(x: list[int], weight: list[int]) -> None:
    """Two computed arrays, a constant second one and a constant first one."""
    arrays = {"a": numbers(1, *x), "b": numbers(2, *weight)}
    wanted = np.matmul(arrays["a"].astype(np.float64), arrays["b"])
    for fixed in ("", "a", "b"):
        inputs = {name: array for name, array in arrays.items() if name != fixed}
        constant = {name: array for name, array in arrays.items() if name == fixed}
        check([helper.make_node("MatMul", ["a", "b"], ["y"])], inputs, constant, wanted)


def test_two_constant_factors_are_folded() -> None:
    arrays = {"a": numbers(1, 4, 5), "b": numbers(2, 5, 3)}
    nodes = [helper.make_node("MatMul", ["a", "b"], ["c"]), helper.make_node("Add", ["x", "c"], ["y"])]
    network = check(nodes, {"x": numbers(3, 4, 3)}, arrays, numbers(3, 4, 3) + arrays["a"].astype(np.float64) @ arrays["b"])
    assert operators(network) == ["elementwise"]


def test_rows_of_all_matrices_are_one_product_where_they_share_a_factor() -> None:
    """(2, 4) matrices of x by 2 of weight are 2 products, of 4 times as many rows."""
    nodes = [helper.make_node("MatMul", ["a", "b"], ["y"])]
    network = lowered(nodes, {"a": numbers(1, 2, 4, 3, 5), "b": numbers(2, 2, 1, 5, 7)}, {})
    (node,) = (node for node in network.nodes if isinstance(node, Node))
    assert {key: node.implementations[0].params[key] for key in "bmnk"} == {"b": 2, "m": 12, "n": 7, "k": 5}


def test_transposed_factors_are_read_as_they_are() -> None:
    arrays = {"a": numbers(1, 2, 4, 5, 3), "b": numbers(2, 2, 4, 7, 5)}
    nodes = [helper.make_node("Transpose", [name], [f"{name}t"], perm=[0, 1, 3, 2]) for name in arrays]
    nodes.append(helper.make_node("MatMul", ["at", "bt"], ["y"]))
    wanted = np.matmul(arrays["a"].astype(np.float64).swapaxes(2, 3), arrays["b"].swapaxes(2, 3))
    assert operators(check(nodes, arrays, {}, wanted)) == ["batch_matmul"]


def test_a_transposed_factor_that_something_else_reads_is_still_made() -> None:
    x = numbers(1, 2, 5, 3)
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[0, 2, 1]), helper.make_node("MatMul", ["x", "t"], ["p"]),
        helper.make_node("ReduceSum", ["t"], ["s"], keepdims=0), helper.make_node("Add", ["p", "s"], ["y"]),
    ]  # fmt: skip
    wide = x.astype(np.float64)
    check(nodes, {"x": x}, {}, wide @ wide.swapaxes(1, 2) + wide.sum())


ADDENDS = (None, (), (1,), (7,), (1, 7), (3, 1), (3, 7), (1, 1))


@pytest.mark.parametrize("transposed", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.mostly_long(6)
def test_gemm_takes_transposes_factors_and_any_addend(transposed: tuple[int, int]) -> None:
    a, b = numbers(1, *((5, 3) if transposed[0] else (3, 5))), numbers(2, *((7, 5) if transposed[1] else (5, 7)))
    product = (a.T if transposed[0] else a).astype(np.float64) @ (b.T if transposed[1] else b)
    for shape, fixed, factors in itertools.product(ADDENDS, ("", "b", "c", "bc"), ((1.0, 1.0), (0.5, 2.0), (-1.5, 0.0))):
        arrays = {"a": a, "b": b} | ({} if shape is None else {"c": numbers(3, *shape)})
        inputs = {name: array for name, array in arrays.items() if name not in fixed}
        constant = {name: array for name, array in arrays.items() if name in fixed}
        wanted = factors[0] * product + (0 if shape is None else factors[1] * arrays["c"])
        read = {"transA": transposed[0], "transB": transposed[1], "alpha": factors[0], "beta": factors[1]}
        check([helper.make_node("Gemm", list(arrays), ["y"], **read)], inputs, constant, np.asarray(wanted))


def test_an_array_without_elements_is_refused() -> None:
    nodes = [helper.make_node("MatMul", ["a", "b"], ["y"], name="empty")]
    with pytest.raises(ModelError, match="at least 1"):
        lowered(nodes, {"a": numbers(1, 3, 0)}, {"b": numbers(2, 0, 4)})


@pytest.mark.parametrize("opset", [12, 17, 21])
@pytest.mark.parametrize("constant", ["a", "b"])
@pytest.mark.parametrize("equation", ["ij,k->", "ij,k->k", "ij,k->ji"])
def test_an_einsum_sums_a_constant(equation: str, constant: str, opset: int) -> None:
    """A sum over letters that only the constant has, also in opsets in which the axes of ReduceSum are no input."""
    arrays = {"a": numbers(1, 2, 3), "b": numbers(2, 4)}
    wanted = np.asarray(np.einsum(equation, *(array.astype(np.float64) for array in arrays.values())))
    weights = {constant: arrays.pop(constant)}
    check([helper.make_node("Einsum", ["a", "b"], ["y"], equation=equation)], arrays, weights, wanted, opset=opset)


@pytest.mark.long
def test_a_cpu_computes_all_forms(tmp_path: Path) -> None:
    inputs = {"a": numbers(1, 3, 1, 3, 5), "c": numbers(2, 2, 7, 5), "v": numbers(3, 5), "g": numbers(4, 5, 3)}
    weights = {"b": numbers(5, 1, 4, 5, 7), "m": numbers(6, 6, 3), "bias": numbers(7, 3, 1)}
    node = helper.make_node
    nodes = [
        node("MatMul", ["a", "b"], ["y0"]), node("Transpose", ["c"], ["t"], perm=[0, 2, 1]),
        node("MatMul", ["t", "c"], ["y1"]), node("MatMul", ["c", "v"], ["y2"]), node("MatMul", ["m", "a"], ["y3"]),
        node("Gemm", ["g", "g", "bias"], ["y4"], transA=1, alpha=0.5, beta=3.0),
    ]  # fmt: skip
    wide = {name: array.astype(np.float64) for name, array in {**inputs, **weights}.items()}
    wanted = [
        wide["a"] @ wide["b"], wide["c"].swapaxes(1, 2) @ wide["c"], wide["c"] @ wide["v"], wide["m"] @ wide["a"],
        0.5 * wide["g"].T @ wide["g"] + 3 * wide["bias"],
    ]  # fmt: skip
    names = [f"y{number}" for number in range(len(wanted))]
    onnx.save(model_of(nodes, inputs, weights, names), tmp_path / "net.onnx")
    with schedsearch.build(tmp_path / "net.onnx", target="cpu", db=tmp_path / "none.db", progress=False) as net:
        found = net.evaluate(inputs)
    for name, array in zip(names, wanted):
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-5)
