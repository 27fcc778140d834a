"""Shape arithmetic in floats and at the limits of int32 and int64: what NumPy and onnx.reference compute, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("onnxscript")

from onnx import TensorProto, helper, numpy_helper
from test_dynamic_model import agrees, device  # noqa: F401

from schedsearch.dynamic import floats
from schedsearch.dynamic.graph import Size
from schedsearch.dynamic.model import read_graph
from schedsearch.network.model import ModelError
from schedsearch.ops.integer_python import check_source

SIZES = {"n": Size("n", 1, 40)}
NUMPY = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide}
ROUNDED = {"Floor": np.floor, "Ceil": np.ceil, "Round": np.round}
plain = st.integers(-70, 70) | st.integers(-(2**62), 2**62) | st.floats(-1e9, 1e9) | st.floats(allow_nan=False)


@given(plain, plain)
def test_words_compute_what_numpy_computes(a: float, b: float) -> None:
    with np.errstate(all="ignore"):
        for dtype in (np.float32, np.float64):
            x, y = dtype(a), dtype(b)
            if not (np.isfinite(x) and np.isfinite(y)):
                continue
            words = floats.word_of(float(x)), floats.word_of(float(y))
            for op, function in NUMPY.items():
                if np.isfinite(wanted := function(x, y)):
                    found = floats.number_of(floats.BINARY[f"{op} {dtype.__name__}"](*words))
                    assert found == float(wanted), (op, x, y)
            for op, rounding in ROUNDED.items():
                assert floats.number_of(floats.UNARY[op](words[0])) == float(rounding(x)), (op, x)


@given(st.integers(-(2**63), 2**63 - 1))
def test_whole_numbers_are_rounded_as_numpy_does(n: int) -> None:
    for dtype in (np.float32, np.float64):
        assert floats.number_of(floats.UNARY[f"{dtype.__name__} of whole"](n)) == float(dtype(np.int64(n)))


def test_the_arithmetic_is_integer_python() -> None:
    for function in (*floats.BINARY.values(), *floats.UNARY.values()):
        check_source(function)


def model(*nodes: tuple[Any, ...], **constants: Any) -> Any:
    """Nodes (operator, inputs, format of a Cast) in order; t is the result before, x has n elements and p 2."""
    made, last = [], ""
    for number, (op, names, *to) in enumerate(nodes):
        last, before = f"t{number}", last
        given_names = [before if name == "t" else name for name in names.split()]
        made.append(helper.make_node(op, given_names, [last], name=f"{op} {number}", **({"to": to[0]} if to else {})))
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"]),
        helper.make_tensor_value_info("p", TensorProto.INT64, [2]),
    ]
    weights = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    results = [helper.make_tensor_value_info(last, TensorProto.INT64, None)]
    graph = helper.make_graph(made, "floats", inputs, results, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


FORMATS = {TensorProto.FLOAT: np.float32, TensorProto.DOUBLE: np.float64}
FIRST = {(TensorProto.FLOAT, "Floor")}  # each case compiles for seconds


@pytest.mark.parametrize(
    ("to", "rounding"),
    [
        pytest.param(to, rounding, marks=() if (to, rounding) in FIRST else pytest.mark.long, id=f"{to}-{rounding}")
        for to, rounding in itertools.product(FORMATS, ROUNDED)
    ],
)
def test_scaled_sizes_are_those_of_onnx(device: Any, rounding: str, to: int) -> None:  # noqa: F811
    """As PyTorch exports the sizes of interpolate and of crops: 0.7 * 30 differs between the formats."""
    dtype = FORMATS[to]
    scaled = model(
        ("Shape", "x"), ("Cast", "t", to), ("Mul", "t scale"), ("Div", "t three"), (rounding, "t"),
        ("Cast", "t", TensorProto.INT64), scale=np.array([0.7], dtype), three=np.array([0.3], dtype),
    )  # fmt: skip
    arrays = [{"x": np.zeros(n, np.float32), "p": np.zeros(2, np.int64)} for n in (1, 3, 15, 30, 40)]
    agrees(device, scaled, SIZES, *arrays)


def test_whole_numbers_beyond_their_format_wrap(device: Any) -> None:  # noqa: F811
    arrays = [{"x": np.zeros(2, np.float32), "p": np.array(p)} for p in ((2**31, -(2**31) - 1), (2**62, 2**63 - 1), (5, -5))]
    for nodes in (
        [("Neg", "p"), ("Cast", "t", TensorProto.INT32), ("Cast", "t", TensorProto.INT64)],
        [("Neg", "p"), ("Mul", "t four")],
        [("Add", "p four"), ("Cast", "t", TensorProto.INT32), ("Mul", "t small"), ("Cast", "t", TensorProto.INT64)],
        [("Neg", "p"), ("Cast", "t", TensorProto.BOOL), ("Cast", "t", TensorProto.INT64)],
    ):
        agrees(device, model(*nodes, four=np.array([4]), small=np.array([2**30], np.int32)), SIZES, *arrays)


def test_what_cannot_be_exact_is_refused_with_the_node_and_a_remedy() -> None:
    one = np.array([1.0], np.float32)
    zero = model(
        ("Shape", "x"), ("Cast", "t", TensorProto.FLOAT), ("Div", "one t"), ("Cast", "t", TensorProto.INT64), one=one
    )
    with pytest.raises(ModelError, match=r"Div 2 \(Div\) may give an infinite number .* Size\('n', 1, 64\)"):
        read_graph(zero, {"n": Size("n", 0, 9)})
    large = model(("Neg", "p"), ("Cast", "t", TensorProto.FLOAT), ("Cast", "t", TensorProto.INT64))
    with pytest.raises(ModelError, match=r"Cast 2 \(Cast to int64\): the numbers are between .*; limit them"):
        read_graph(large, SIZES)
    array = model(("Shape", "x"), ("Cast", "t", TensorProto.FLOAT), ("Mul", "t x"), ("Cast", "t", TensorProto.INT64))
    with pytest.raises(ModelError, match="floats of shape arithmetic, which cannot meet arrays"):
        read_graph(array, SIZES)
