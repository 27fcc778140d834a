"""Shape arithmetic in floats and at the limits of int32 and int64: what NumPy and onnx.reference compute, bit for bit."""

from __future__ import annotations

import contextlib
import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("onnxscript")

from conv2d_support import run_on_cpu
from onnx import TensorProto, helper, numpy_helper
from test_dynamic_model import agrees, device  # noqa: F401

from schedsearch.backend.cpu import _optimised_ir
from schedsearch.backend.cuda import ptx_of
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.dynamic import numbers
from schedsearch.dynamic.graph import Size
from schedsearch.dynamic.model import read_graph
from schedsearch.launch import Grid, NumbaArray
from schedsearch.network.model import ModelError
from schedsearch.ops import float_words
from schedsearch.ops.size_steps import SizeStep, Values, Words
from schedsearch.target import PRESETS
from schedsearch.template import KernelSource, KernelStep
from schedsearch.templates.parts.sizes import sizes_source

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
            words = float_words.word_of(float(x)), float_words.word_of(float(y))
            for op, function in NUMPY.items():
                if np.isfinite(wanted := function(x, y)):
                    found = float_words.number_of(float_words.BINARY[f"{op} {dtype.__name__}"](*words))
                    assert found == float(wanted), (op, x, y)
            for op, rounding in ROUNDED.items():
                assert float_words.number_of(float_words.UNARY[op](words[0])) == float(rounding(x)), (op, x)


@given(st.integers(-(2**63), 2**63 - 1))
def test_whole_numbers_are_rounded_as_numpy_does(n: int) -> None:
    for dtype in (np.float32, np.float64):
        assert float_words.number_of(float_words.UNARY[f"{dtype.__name__} of whole"](n)) == float(dtype(np.int64(n)))


EDGES = [
    0.0, 5e-324, 2.0**-1022, 2.0**-149, 3 * 2.0**-149, 2.0**-126, 2.0**-100, 0.1, 0.3, 0.5, 0.7, 1 - 2.0**-53, 1.0, 1.5, 2.5,
    1 + 2.0**-23, 1 + 2.0**-24, 1 + 2.0**-52, 3.0, 7.0, 2.0**24 + 1, 2.0**31, 2.0**52 - 0.5, 2.0**52 + 1, 2.0**53 + 2, 1e30,
    2.0**100,
]  # fmt: skip
INTEGERS = [0, 1, -1, 2**24 + 1, 2**53 + 1, 2**60 + 2**36 + 1, 2**62 + 2**38, 2**63 - 1, -(2**63), -(2**63) + 1]


def compiled(compute: Any, *columns: list[int]) -> list[int]:
    """What a function of words gives, compiled for this processor as kernels of sizes are."""
    count = len(columns[0])

    def of_one(y: Any, a: Any, start: Any, stop: Any) -> None:
        for i in range(count):
            y[i] = compute(a[i])

    def of_two(y: Any, a: Any, b: Any, start: Any, stop: Any) -> None:
        for i in range(count):
            y[i] = compute(a[i], b[i])

    arrays = dict(zip("ab", map(np.array, columns)))
    params = tuple(NumbaArray(name, "int64", (count,), (8,)) for name in ("y", *arrays))
    step = KernelStep(of_two if len(columns) == 2 else of_one, params, Grid(1), 1, contract=False)
    source = KernelSource("cpu", "native", (step,))
    with contextlib.closing(CpuDevice(detect("cpu"))) as cpu:
        found = run_on_cpu(cpu, source, arrays, {"y": ((count,), np.int64)})["y"]
    return [int(n) for n in found]


def words_of(array: Any) -> list[int]:
    return [float_words.word_of(float(n)) for n in array]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.mostly_long(2)
def test_compiled_arithmetic_gives_what_numpy_gives_at_the_edges(dtype: Any) -> None:
    edges = np.array([sign * each for each in EDGES for sign in (1, -1)]).astype(dtype)
    a, b = np.repeat(edges, len(edges)), np.tile(edges, len(edges))
    for op, compute in NUMPY.items():
        with np.errstate(all="ignore"):
            wanted = compute(a, b)
        sure = np.isfinite(wanted)
        found = compiled(float_words.BINARY[f"{op} {dtype.__name__}"], words_of(a[sure]), words_of(b[sure]))
        assert found == words_of(wanted[sure]), op


def test_compiled_conversions_give_what_numpy_gives_at_the_edges() -> None:
    edges = np.array([sign * each for each in EDGES for sign in (1, -1)])
    for op, compute in ROUNDED.items():
        assert compiled(float_words.UNARY[op], words_of(edges)) == words_of(compute(edges)), op
    assert compiled(float_words.UNARY["float32 of float64"], words_of(edges)) == words_of(edges.astype(np.float32))
    for dtype in (np.float32, np.float64):
        found = compiled(float_words.UNARY[f"{dtype.__name__} of whole"], INTEGERS)
        assert found == words_of(np.array(INTEGERS).astype(dtype))
    within = edges[np.abs(edges) < 2.0**63]
    assert compiled(float_words.cut, words_of(within)) == within.astype(np.int64).tolist()


def test_kernels_of_sizes_contract_no_product_into_a_sum() -> None:
    """x * x + y in float64, by PTX: the roundings are in the names of instructions, so that ptxas keeps both."""
    target = PRESETS["h200"]
    product = numbers.function("two", {"op": "Mul float64", "of_a": (0,), "of_b": (0,)})
    total = numbers.function("two", {"op": "Add float64", "of_a": (0,), "of_b": (0,)})
    steps = [
        SizeStep(product, (Values("x", "int64", 1), Values("x", "int64", 1)), Words(1, 1), None),
        SizeStep(total, (Words(1, 1), Values("y", "int64", 1)), Words(2, 1), None),
    ]
    (text,) = ptx_of(sizes_source(steps, 3, target), target)
    assert "mul.rn.f64" in text
    assert "add.rn.f64" in text
    assert "fma" not in text

    def fused(x: Any, y: Any) -> None:
        x[0] = x[0] * x[0] + y[0]

    params = tuple(NumbaArray(name, "float64", (1,), (8,)) for name in "xy")
    for contract in (True, False):
        step = KernelStep(fused, params, Grid(1), 32, contract=contract)
        (text,) = ptx_of(KernelSource("cuda", "native", (step,)), target)
        assert ("fma.rn.f64" in text) == contract


def test_products_of_float32_are_rounded_once_on_a_gpu_and_nothing_small_becomes_zero() -> None:
    target = PRESETS["h200"]
    product = numbers.function("two", {"op": "Mul float32", "of_a": (0,), "of_b": (0,)})
    step = SizeStep(product, (Values("x", "int64", 1), Values("y", "int64", 1)), Words(1, 1), None)
    (text,) = ptx_of(sizes_source([step], 2, target), target)
    assert "mul.rn.f64" in text and "cvt.rn.f32.f64" in text
    assert ".ftz" not in text and "mul.f32" not in text


def test_rules_and_words_are_those_that_files_hold() -> None:
    words = [float_words.word_of(n) for n in (0.0, -0.0, 0.7, -1.5, 5e-324)]
    assert words == [0, 0, 0x3FE6666666666666, -0x3FF8000000000000, 1]
    both = {f"{op} {dtype}" for op in NUMPY for dtype in ("float32", "float64")}
    assert float_words.BINARY.keys() == both
    assert float_words.UNARY.keys() == {*ROUNDED, "cut", "float32 of float64", "float32 of whole", "float64 of whole"}


def test_processors_contract_by_the_same_word() -> None:
    def fused(x: Any, y: Any, start: Any, stop: Any) -> None:
        x[0] = x[0] * x[0] + y[0]

    params = tuple(NumbaArray(name, "float64", (1,), (8,)) for name in "xy")
    for contract in (True, False):
        text = _optimised_ir(KernelStep(fused, params, Grid(1), 1, contract=contract), "fused")
        assert bool(re.search(r"f(?:mul|add) .*contract", text)) == contract


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
def test_scaled_sizes_are_those_of_onnx(device: Any, rounding: str, to: int) -> None:
    """As PyTorch exports the sizes of interpolate and of crops: 0.7 * 30 differs between the formats."""
    dtype = FORMATS[to]
    scaled = model(
        ("Shape", "x"), ("Cast", "t", to), ("Mul", "t scale"), ("Div", "t three"), (rounding, "t"),
        ("Cast", "t", TensorProto.INT64), scale=np.array([0.7], dtype), three=np.array([0.3], dtype),
    )  # fmt: skip
    arrays = [{"x": np.zeros(n, np.float32), "p": np.zeros(2, np.int64)} for n in (1, 3, 15, 30, 40)]
    agrees(device, scaled, SIZES, *arrays)


@pytest.mark.long(of="networks")
def test_whole_numbers_beyond_their_format_wrap(device: Any) -> None:
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


@pytest.mark.long
def test_integers_that_become_floats_for_an_array_are_arrays(device: Any) -> None:
    nodes = [("Neg", "p"), ("Cast", "t", TensorProto.FLOAT), ("Gather", "t second"), ("Mul", "t x")]
    made = model(*nodes, ("Cast", "t", TensorProto.INT64), second=np.array([1]))
    p = np.array([3, -2])
    agrees(device, made, SIZES, *({"x": np.arange(n, dtype=np.float32), "p": p} for n in (1, 7, 40)))
