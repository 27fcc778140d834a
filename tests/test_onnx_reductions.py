"""Reductions of ONNX over any axes, on the CPU, beside NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def model(op: str, shape: Sequence[int], axes: Sequence[int] | None, **attributes: int) -> onnx.ModelProto:
    given = [] if axes is None else ["axes"]
    node = helper.make_node(op, ["x", *given], ["y"], "reduce", **attributes)
    weights = [] if axes is None else [numpy_helper.from_array(np.array(axes, np.int64), "axes")]
    values = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, list(shape)),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
    ]
    graph = helper.make_graph([node], "reduction", values[:1], values[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def computed(made: onnx.ModelProto, x: Array, folder: Path) -> Array:
    onnx.save(made, folder / "m.onnx")
    with schedsearch.build(folder / "m.onnx", target="cpu", db=folder / "none.db") as net:
        found: Array = net(x)
        return found


def positive(shape: Sequence[int]) -> Array:
    return np.random.default_rng(7).uniform(0.5, 2.0, shape).astype(np.float32)  # so that logarithms are ordinary numbers


@pytest.mark.parametrize("op", REDUCED)
def test_every_reduction_of_rows_agrees_with_float64(op: str, tmp_path: Path) -> None:
    x = positive(SHAPE)
    if op != "ReduceLogSum":
        x[..., ::2] *= -1
    wanted = REDUCED[op](x.astype(np.float64), axis=-1)
    found = computed(model(op, SHAPE, [-1], keepdims=0), x, tmp_path)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", [None, [0], [1], [-2], [0, 1], [1, 2], [2, 3], [0, 2], [3, 0], [1, -1], [0, 1, 3]], ids=str)
@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMin"])
def test_all_axes_agree_with_float64(op: str, axes: list[int] | None, keepdims: int) -> None:
    """Computed by the references of the operators, without kernels."""
    x = positive(SHAPE)
    wanted = REDUCED[op](
        x.astype(np.float64), axis=None if axes is None else tuple(axes), keepdims=bool(keepdims)
    )  # fmt: skip
    network = lower(simplified(onnx_ir.from_proto(model(op, SHAPE, axes, keepdims=keepdims)), "reduction"))
    (found,) = (evaluate(network, {"x": x})[name] for name in network.outputs)
    assert found.shape == (wanted.shape or (1,))  # networks have a number as a row of one
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize(("op", "wanted"), [("ReduceSum", lambda x: x), ("ReduceL2", np.abs)])
def test_axes_without_elements_to_combine_leave_the_array(op: str, wanted: Callable[[Array], Array], tmp_path: Path) -> None:
    x = -positive((3, 1, 4))
    np.testing.assert_allclose(computed(model(op, x.shape, [1]), x, tmp_path), wanted(x), rtol=1e-6)


def test_no_axes_mean_all_or_none(tmp_path: Path) -> None:
    x = positive((3, 4))
    np.testing.assert_allclose(computed(model("ReduceSum", (3, 4), []), x, tmp_path), [[np.sum(x, dtype=float)]], rtol=1e-6)
    kept = computed(model("ReduceSum", (3, 4), [], noop_with_empty_axes=1), x, tmp_path)
    np.testing.assert_array_equal(kept, x)


@pytest.mark.parametrize(("shape", "axes"), [((3, 2800), [1]), ((42000,), [0]), ((2, 60, 50, 3), [1, 2])], ids=str)
def test_sums_of_many_numbers_stay_accurate(shape: tuple[int, ...], axes: list[int], tmp_path: Path) -> None:
    x = positive(shape)
    found = computed(model("ReduceSum", shape, axes), x, tmp_path)
    np.testing.assert_allclose(found, np.sum(x.astype(np.float64), axis=tuple(axes), keepdims=True), rtol=1e-6)


def test_sums_of_exponentials_do_not_overflow(tmp_path: Path) -> None:
    x = np.array([[1000.0, 999.0, -1000.0], [-500.0, -501.0, -502.0]], np.float32)
    found = computed(model("ReduceLogSumExp", x.shape, [1], keepdims=0), x, tmp_path)
    np.testing.assert_allclose(found, np.logaddexp.reduce(x.astype(np.float64), axis=1), rtol=1e-6)


def test_an_axis_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"reduce.*axis"):
        computed(model("ReduceMax", (3, 4), [2]), positive((3, 4)), tmp_path)
