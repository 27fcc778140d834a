"""Operators that a network is compared with where ONNX Runtime is not installed; onnx's own differ from ONNX's definitions.

`findings/onnx_evaluator_*.sh` show what onnx's own compute.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import schedsearch
from schedsearch.network_check.own_operators import of_opset


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


def model(op: str, opset: int, inputs: list[np.ndarray], outputs: int = 1, **attributes: Any) -> onnx.ModelProto:
    """One node. Its first input is given, the others are weights."""
    names = [f"i{number}" for number in range(len(inputs))]
    node = helper.make_node(op, names, [f"o{number}" for number in range(outputs)], **attributes)
    kind = helper.np_dtype_to_tensor_dtype(inputs[0].dtype)
    kinds = [kind, TensorProto.INT64][:outputs]
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("i0", kind, inputs[0].shape)],
        [helper.make_tensor_value_info(name, each, None) for name, each in zip(node.output, kinds)],
        [numpy_helper.from_array(each, name) for name, each in list(zip(names, inputs))[1:]],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return onnx.shape_inference.infer_shapes(made, strict_mode=True)


def results(op: str, opset: int, inputs: list[np.ndarray], outputs: int = 1, **attributes: Any) -> list[np.ndarray]:
    made = model(op, opset, inputs, outputs, **attributes)
    found: list[np.ndarray] = ReferenceEvaluator(made, new_ops=of_opset(opset)).run(None, {"i0": inputs[0]})
    return found


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, None])
@pytest.mark.parametrize(("op", "opset"), [("Softmax", 1), ("Softmax", 12), ("LogSoftmax", 11), ("Hardmax", 11)])
def test_before_opset_13_all_axes_from_one_on_are_a_row(op: str, opset: int, axis: int | None) -> None:
    x = normal(2, 3, 4)
    (got,) = results(op, opset, [x], **({} if axis is None else {"axis": axis}))
    first = 1 if axis is None else axis % 3
    for place in itertools.product(*map(range, x.shape[:first])):
        row = x[place].ravel().astype(np.float64)
        soft = np.exp(row) / np.exp(row).sum()
        wanted = {"Softmax": soft, "LogSoftmax": np.log(soft), "Hardmax": row == row.max()}[op]
        np.testing.assert_allclose(got[place].ravel(), wanted, rtol=1e-5)


def test_a_log_softmax_of_distant_numbers_is_finite() -> None:
    (got,) = results("LogSoftmax", 13, [np.array([[0, 200], [700, 100]], np.float32)])
    np.testing.assert_array_equal(got, [[-200, 0], [0, -600]])


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3, 4, 5), (2, 3, 4, 2, 3)])
def test_a_global_max_pool_keeps_batch_and_channels(shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    (got,) = results("GlobalMaxPool", 13, [x])
    assert got.shape == (2, 3, *[1] * (len(shape) - 2))
    np.testing.assert_array_equal(got.ravel(), [x[n, c].max() for n in range(2) for c in range(3)])


# First pixel of the first window, and windows along an axis, by ONNX's formulas: of 7 pixels, and of 8
POOLS = [
    ({"strides": [2, 2], "auto_pad": "SAME_LOWER"}, 7, -1, 4),
    ({"strides": [2, 2], "auto_pad": "SAME_LOWER"}, 8, -1, 4),
    ({"strides": [2, 2], "auto_pad": "SAME_UPPER"}, 8, 0, 4),
    ({"dilations": [2, 2], "auto_pad": "VALID"}, 8, 0, 4),
    ({"dilations": [2, 2], "strides": [2, 2], "pads": [1, 1, 0, 0]}, 8, -1, 3),
    ({"strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1}, 8, -1, 5),
    ({"strides": [3, 3], "pads": [2, 2, 2, 2], "ceil_mode": 1}, 7, -2, 3),  # a fourth one would begin behind the image
]


@pytest.mark.parametrize(("attributes", "size", "start", "count"), POOLS)
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
def test_pools_have_their_windows_and_sizes(op: str, attributes: dict[str, Any], size: int, start: int, count: int) -> None:
    x = normal(2, 2, size, size)
    got, *indices = results(op, 22, [x], 2 if op == "MaxPool" else 1, kernel_shape=[3, 3], **attributes)
    assert got.shape == (2, 2, count, count)
    stride, dilation = (attributes.get(name, [1])[0] for name in ("strides", "dilations"))
    for n, c, y0, x0 in np.ndindex(*got.shape):
        rows, columns = ([start + at * stride + k * dilation for k in range(3)] for at in (y0, x0))
        inside = [(r, s) for r in rows for s in columns if 0 <= r < size and 0 <= s < size]
        numbers = np.array([x[n, c, r, s] for r, s in inside], np.float64)
        wanted = {"MaxPool": numbers.max(), "AveragePool": numbers.mean(), "LpPool": np.sqrt((numbers**2).sum())}[op]
        np.testing.assert_allclose(got[n, c, y0, x0], wanted, rtol=1e-5, atol=1e-6)
        if indices:
            assert x.ravel()[indices[0][n, c, y0, x0]] == got[n, c, y0, x0]


def test_padding_counts_in_an_average_if_asked_but_not_what_is_behind_it() -> None:
    x = np.ones((1, 1, 4), np.float32)
    (got,) = results("AveragePool", 22, [x], kernel_shape=[3], strides=[2], pads=[1, 0], ceil_mode=1, count_include_pad=1)
    np.testing.assert_allclose(got.ravel(), [2 / 3, 1])
    (got,) = results("AveragePool", 22, [x], kernel_shape=[3], strides=[3], ceil_mode=1, count_include_pad=1)
    np.testing.assert_allclose(got.ravel(), [1, 1])  # the second window has one pixel, and nothing else that counts


def test_indices_of_a_max_pool_may_count_along_columns() -> None:
    x = np.arange(12, dtype=np.float32).reshape(1, 2, 2, 3)
    assert results("MaxPool", 22, [x], 2, kernel_shape=[1, 2])[1].ravel().tolist() == [1, 2, 4, 5, 7, 8, 10, 11]
    columns = results("MaxPool", 22, [x], 2, kernel_shape=[1, 2], storage_order=1)[1]
    assert columns.ravel().tolist() == [2, 4, 3, 5, 8, 10, 9, 11]


def test_a_nan_anywhere_in_a_window_is_the_largest_number() -> None:
    x = np.array([[[1, 2, np.nan, 3, 4]]], np.float32)
    np.testing.assert_array_equal(results("MaxPool", 12, [x], kernel_shape=[2])[0].ravel(), [2, np.nan, np.nan, 4])


@pytest.mark.parametrize(("groups", "channels"), [(2, 1), (2, 3), (4, 2)])
def test_each_group_of_a_transposed_convolution_has_its_own_bias(groups: int, channels: int) -> None:
    x, w, b = normal(2, 4, 3, 3), normal(4, channels, 2, 2), normal(groups * channels)
    (got,) = results("ConvTranspose", 13, [x, w, b], group=groups, strides=[2, 2])
    wanted = np.zeros((2, groups * channels, 6, 6)) + b[:, None, None]
    for n, c, h, v, m, r, s in np.ndindex(*x.shape, *w.shape[1:]):
        wanted[n, c // (4 // groups) * channels + m, 2 * h + r, 2 * v + s] += float(x[n, c, h, v]) * float(w[c, m, r, s])
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("op", "opset"), [("LayerNormalization", 17), ("RMSNormalization", 23)])
def test_squares_of_float16_are_not_infinite(op: str, opset: int) -> None:
    x = np.array([[-600, 600], [300, -300]], np.float16)
    got = results(op, opset, [x, np.ones(2, np.float16)])[0]
    np.testing.assert_array_equal(got, np.sign(x))
    assert got.dtype == np.float16


CASES: dict[str, tuple[Any, ...]] = {
    "Softmax of opset 11": ("Softmax", 11, [normal(2, 3, 4)], {"axis": 1}),
    "LogSoftmax of opset 11": ("LogSoftmax", 11, [normal(2, 3, 4)], {"axis": 1}),
    "Hardmax of opset 11": ("Hardmax", 11, [normal(2, 3, 4)], {"axis": 1}),
    "GlobalMaxPool of one axis": ("GlobalMaxPool", 13, [normal(2, 3, 5)], {}),
    "GlobalMaxPool of three axes": ("GlobalMaxPool", 13, [normal(2, 3, 5, 4, 3)], {}),
    "MaxPool SAME_LOWER": ("MaxPool", 13, [normal(1, 4, 7, 7)], {"kernel_shape": [3, 3], **POOLS[0][0]}),
    "AveragePool VALID": ("AveragePool", 19, [normal(1, 4, 8, 8)], {"kernel_shape": [3, 3], **POOLS[3][0]}),
    "ConvTranspose of groups": ("ConvTranspose", 13, [normal(1, 4, 5, 5), normal(4, 3, 3, 3), normal(6)], {"group": 2}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.mostly_long(8)
def test_a_right_network_is_built_without_onnx_runtime(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from schedsearch.network_check import check, evaluators

    monkeypatch.setattr(check, "evaluators", lambda: [evaluators.OnnxReference()])
    op, opset, inputs, attributes = CASES[case]
    onnx.save(model(op, opset, inputs, **attributes), tmp_path / "net.onnx")
    with schedsearch.build(tmp_path / "net.onnx", target="cpu", db=tmp_path / "none.db") as net:
        assert net.program.checked.startswith("onnx 1.")


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("p", [1, 2])
def test_a_row_is_divided_by_its_norm_whatever_its_signs(p: int, axis: int) -> None:
    x = np.array([[1, -3, 2], [0, -1, -2], [0, 4, 0]], np.float32)
    (got,) = results("LpNormalization", 13, [x], p=p, axis=axis)
    norm = (np.abs(x.astype(np.float64)) ** p).sum(axis, keepdims=True) ** (1 / p)
    np.testing.assert_allclose(got, x / norm, rtol=1e-6)


def test_a_row_of_zeros_has_no_norm_to_divide_by() -> None:
    np.testing.assert_array_equal(results("LpNormalization", 13, [np.zeros((2, 2), np.float32)], p=1)[0], np.zeros((2, 2)))


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize(("axes", "wanted"), [([1], [-np.inf, 3, np.inf]), (None, np.inf)])
def test_a_sum_of_exponentials_of_infinities_is_no_nan(axes: list[int] | None, wanted: Any, opset: int) -> None:
    x = np.array([[-np.inf, -np.inf], [-np.inf, 3], [np.inf, 3]], np.float32)
    given = [] if axes is None or opset < 18 else [np.array(axes, np.int64)]
    attributes = {"axes": axes} if axes and opset < 18 else {}
    (got,) = results("ReduceLogSumExp", opset, [x, *given], keepdims=0, **attributes)
    np.testing.assert_array_equal(got, wanted)


def test_products_of_attention_have_no_softcap() -> None:
    """Of queries and keys, by mode 0; the result itself has it."""
    q, k, v = normal(1, 2, 3, 4), normal(1, 2, 5, 4) + 1, normal(1, 2, 5, 4)
    names = ["i0", "i1", "i2"]
    node = helper.make_node("Attention", names, ["y", "", "", "products"], softcap=0.5)
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in (*names, "y", "products")]
    made = helper.make_model(helper.make_graph([node], "g", info[:3], info[3:]), opset_imports=[helper.make_opsetid("", 24)])
    y, products = ReferenceEvaluator(made, new_ops=of_opset(24)).run(None, dict(zip(names, (q, k, v))))
    wanted = q.astype(np.float64) @ k.astype(np.float64).swapaxes(2, 3) / 2
    np.testing.assert_allclose(products, wanted, rtol=1e-5, atol=1e-5)
    shares = np.exp(0.5 * np.tanh(wanted / 0.5))
    np.testing.assert_allclose(y, shares / shares.sum(-1, keepdims=True) @ v, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", ["NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"])
def test_ignored_items_do_not_count_in_the_mean_of_a_loss(op: str) -> None:
    x = normal(3, 4)
    (got,) = results(op, 13, [x, np.array([2, -1, 0])], ignore_index=-1)
    logarithms = x if op[0] == "N" else x - np.log(np.exp(x).sum(1, keepdims=True))
    np.testing.assert_allclose(got, -(logarithms[0, 2] + logarithms[2, 0]) / 2, rtol=1e-5)
