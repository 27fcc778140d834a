"""Reductions of ONNX over any axes, on the CPU, beside NumPy in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import schedsearch
from schedsearch.network.evaluate import evaluate
from schedsearch.network.lower import lower
from schedsearch.network.model import ModelError, simplified

Array = np.ndarray[Any, Any]
SHAPE = (2, 3, 5, 4)
REDUCED: dict[str, Callable[..., Array]] = {
    "ReduceMean": np.mean,
    "ReduceSum": np.sum,
    "ReduceMax": np.max,
    "ReduceMin": np.min,
    "ReduceL1": lambda x, **where: np.sum(np.abs(x), **where),
    "ReduceL2": lambda x, **where: np.sqrt(np.sum(x * x, **where)),
    "ReduceSumSquare": lambda x, **where: np.sum(x * x, **where),
    "ReduceLogSum": lambda x, **where: np.log(np.sum(x, **where)),
    "ReduceLogSumExp": lambda x, **where: np.logaddexp.reduce(x, **where),
}


@dataclass(frozen=True)
class Reduction:
    """One node and its input; axes None: it has no input for them."""

    op: str
    x: Array
    axes: Sequence[int] | None
    attributes: Mapping[str, int] = field(default_factory=dict)


def model(*reductions: Reduction) -> onnx.ModelProto:
    """Each reduces an input of its own: x0 to y0, x1 to y1 ..."""
    nodes, weights, inputs, outputs = [], [], [], []
    for number, each in enumerate(reductions):
        given = [] if each.axes is None else [f"axes{number}"]
        name = f"reduce{number}"
        nodes.append(helper.make_node(each.op, [f"x{number}", *given], [f"y{number}"], name, **each.attributes))
        inputs.append(helper.make_tensor_value_info(f"x{number}", TensorProto.FLOAT, list(each.x.shape)))
        outputs.append(helper.make_tensor_value_info(f"y{number}", TensorProto.FLOAT, None))
        weights += [numpy_helper.from_array(np.array(each.axes, np.int64), axes) for axes in given]
    graph = helper.make_graph(nodes, "reductions", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def computed(reductions: Mapping[Any, Reduction], folder: Path) -> dict[Any, Array]:
    """What one network computes. Networks of their own would start compiler processes for each reduction."""
    onnx.save(model(*reductions.values()), folder / "m.onnx")
    with schedsearch.build(folder / "m.onnx", target="cpu", db=folder / "none.db") as net:
        found = net(*(each.x for each in reductions.values()))
    return dict(zip(reductions, found, strict=True))


def positive(shape: Sequence[int]) -> Array:
    return np.random.default_rng(7).uniform(0.5, 2.0, shape).astype(np.float32)  # so that logarithms are ordinary numbers


def of_rows(op: str) -> Reduction:
    x = positive(SHAPE)
    if op != "ReduceLogSum":
        x[..., ::2] *= -1
    return Reduction(op, x, [-1], {"keepdims": 0})


LONG_SUMS: dict[str, tuple[tuple[int, ...], list[int]]] = {
    "one axis": ((3, 2800), [1]),
    "all": ((42000,), [0]),
    "two axes": ((2, 60, 50, 3), [1, 2]),
}
LARGE = np.array([[1000.0, 999.0, -1000.0], [-500.0, -501.0, -502.0]], np.float32)
ENDLESS = np.array([[-np.inf, -np.inf], [-np.inf, 3], [np.inf, 3], [np.inf, np.inf], [-np.inf, np.inf]], np.float32)
NETWORK: dict[Any, Reduction] = {
    **{op: of_rows(op) for op in REDUCED},
    **{name: Reduction("ReduceSum", positive(shape), axes) for name, (shape, axes) in LONG_SUMS.items()},
    "large exponents": Reduction("ReduceLogSumExp", LARGE, [1], {"keepdims": 0}),
    "infinite exponents": Reduction("ReduceLogSumExp", ENDLESS, [1], {"keepdims": 0}),
    "an axis of one": Reduction("ReduceSum", -positive((3, 1, 4)), [1]),
    "an axis of one, L2": Reduction("ReduceL2", -positive((3, 1, 4)), [1]),
    "no axes": Reduction("ReduceSum", positive((3, 4)), []),
    "no axes, none": Reduction("ReduceSum", positive((3, 4)), [], {"noop_with_empty_axes": 1}),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Array]:
    return computed(NETWORK, tmp_path_factory.mktemp("reductions"))


@pytest.mark.long  # builds a network
@pytest.mark.parametrize("op", REDUCED)
def test_every_reduction_of_rows_agrees_with_float64(op: str, results: dict[Any, Array]) -> None:
    wanted = REDUCED[op](NETWORK[op].x.astype(np.float64), axis=-1)
    assert results[op].shape == wanted.shape
    np.testing.assert_allclose(results[op], wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", [None, [0], [1], [-2], [0, 1], [1, 2], [2, 3], [0, 2], [3, 0], [1, -1], [0, 1, 3]], ids=str)
@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMin"])
def test_all_axes_agree_with_float64(op: str, axes: list[int] | None, keepdims: int) -> None:
    """Computed by the references of the operators, without kernels."""
    x = positive(SHAPE)
    wanted = REDUCED[op](
        x.astype(np.float64), axis=None if axes is None else tuple(axes), keepdims=bool(keepdims)
    )  # fmt: skip
    made = model(Reduction(op, x, axes, {"keepdims": keepdims}))
    network = lower(simplified(onnx_ir.from_proto(made), "reductions"))
    (found,) = (evaluate(network, {"x0": x})[name] for name in network.outputs)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.long  # builds a network
@pytest.mark.parametrize(("name", "wanted"), [("an axis of one", lambda x: x), ("an axis of one, L2", np.abs)])
def test_axes_without_elements_to_combine_leave_the_array(
    name: str, wanted: Callable[[Array], Array], results: dict[Any, Array]
) -> None:
    np.testing.assert_allclose(results[name], wanted(NETWORK[name].x), rtol=1e-6)


@pytest.mark.long  # builds a network
def test_no_axes_mean_all_or_none(results: dict[Any, Array]) -> None:
    x = NETWORK["no axes"].x
    np.testing.assert_allclose(results["no axes"], [[np.sum(x, dtype=float)]], rtol=1e-6)
    np.testing.assert_array_equal(results["no axes, none"], NETWORK["no axes, none"].x)


@pytest.mark.long  # builds a network
@pytest.mark.parametrize("name", LONG_SUMS)
def test_sums_of_many_numbers_stay_accurate(name: str, results: dict[Any, Array]) -> None:
    wanted = np.sum(NETWORK[name].x.astype(np.float64), axis=tuple(LONG_SUMS[name][1]), keepdims=True)
    np.testing.assert_allclose(results[name], wanted, rtol=1e-6)


@pytest.mark.long  # builds a network
def test_sums_of_exponentials_do_not_overflow(results: dict[Any, Array]) -> None:
    wanted = np.logaddexp.reduce(LARGE.astype(np.float64), axis=1)
    np.testing.assert_allclose(results["large exponents"], wanted, rtol=1e-6)


@pytest.mark.long  # builds a network
def test_a_sum_of_exponentials_of_minus_infinity_is_minus_infinity(results: dict[Any, Array]) -> None:
    """As of a row that is masked throughout; findings/onnx_evaluator_log_sum_exp.sh shows who gives NaN."""
    wanted = np.logaddexp.reduce(ENDLESS.astype(np.float64), axis=1)
    np.testing.assert_array_equal(wanted, [-np.inf, 3, np.inf, np.inf, np.inf])
    np.testing.assert_array_equal(results["infinite exponents"], wanted)


def test_an_axis_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"reduce.*axis"):
        computed({"wrong": Reduction("ReduceMax", positive((3, 4)), [2])}, tmp_path)


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_a_mean_of_integers_whose_sum_is_beyond_their_format(dtype: str) -> None:
    """The fraction is left out, as where the sum fits."""
    limits = np.iinfo(dtype)
    x = np.array([[limits.max, limits.max, limits.max - 4], [limits.min, limits.min, limits.min + 4], [7, 8, 9]], dtype)
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    whole, mean = (helper.make_tensor_value_info(name, kind, shape) for name, shape in (("x", [3, 3]), ("y", [3])))
    axes = numpy_helper.from_array(np.array([1], np.int64), "axes")
    nodes = [helper.make_node("ReduceMean", ["x", "axes"], ["y"], keepdims=0)]
    graph = helper.make_graph(nodes, "g", [whole], [mean], [axes])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    network = lower(simplified(onnx_ir.from_proto(made), "means"))
    wanted = [math.trunc(sum(map(int, row)) / 3) for row in x]
    assert evaluate(network, {"x": x})["y"].tolist() == wanted
