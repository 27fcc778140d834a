"""Operators that only move data: their movements, definitions and mistakes, compared with NumPy's own functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schedsearch import Workload, concat, depth_to_space, pad, space_to_depth, strided_slice, transpose
from schedsearch.errors import WorkloadError
from schedsearch.ops.concat import CONCAT
from schedsearch.ops.depth_to_space import DEPTH_TO_SPACE, SPACE_TO_DEPTH
from schedsearch.ops.movement import Box, Factor, Movement, Ragged
from schedsearch.ops.pad import PAD
from schedsearch.ops.strided_slice import STRIDED_SLICE
from schedsearch.ops.transpose import TRANSPOSE
from schedsearch.testing.op_contract import OpContract

FEW = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
DTYPES = st.sampled_from(["uint8", "int8", "float16", "bfloat16", "float32", "int32", "int64"])
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def random_bits(workload: Workload) -> dict[str, Any]:
    """Arguments of a workload with any bits, NaNs among them, in their shapes."""
    rng, bits = (
        np.random.default_rng(workload.work.nbytes),
        BITS[workload.definition.movement(workload.params).element_bytes],
    )
    return {
        spec.name: rng.integers(0, 2 ** (8 * bits().itemsize) - 1, spec.shape, bits, endpoint=True)
        for spec in workload.signature
    }


def moved(workload: Workload, arrays: dict[str, Any]) -> Any:
    """y by the workload's movement."""
    movement = workload.definition.movement(workload.params)
    flat = {name: array.reshape(-1) for name, array in arrays.items()}
    return movement.apply(flat, workload.output.size).reshape(workload.output.shape)


def defined(workload: Workload, arrays: dict[str, Any]) -> Any:
    """y by the operator's definition of single elements."""
    numbers, positions = workload.definition.sources(workload.params, np.arange(workload.output.size))
    y = np.full(workload.output.size, workload.definition.movement(workload.params).fill, next(iter(arrays.values())).dtype)
    for number, array in enumerate(arrays.values()):
        y[numbers == number] = array.reshape(-1)[positions[numbers == number]]
    return y.reshape(workload.output.shape)


def check(workload: Workload, expected: Callable[..., Any]) -> None:
    """Movement and definition agree with `expected(*arrays)`."""
    arrays = random_bits(workload)
    wanted = expected(*arrays.values())
    assert workload.output.shape == wanted.shape
    np.testing.assert_array_equal(moved(workload, arrays), wanted)
    np.testing.assert_array_equal(defined(workload, arrays), wanted)


# --- Movements equal NumPy ------------------------------------------------------------------------------------------------


@FEW
@given(st.data(), DTYPES)
def test_transpose_is_that_of_numpy(data: st.DataObject, dtype: str) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    order = data.draw(st.permutations(range(len(shape))))
    signed = [axis - len(shape) if data.draw(st.booleans()) else axis for axis in order]
    check(transpose(x=shape, permutation=signed, dtype=dtype), lambda x: x.transpose(order))


def tensorflow_depth_to_space(x: Any, block: int) -> Any:
    """NHWC, DCR, as TensorFlow's documentation of tf.nn.depth_to_space says: rows of y from rows of x, pixel by pixel."""
    n, h, w, c = x.shape
    y = np.empty((n, h * block, w * block, c // block**2), x.dtype)
    for i in range(h * block):
        for j in range(w * block):
            first = ((i % block) * block + j % block) * y.shape[3]
            y[:, i, j] = x[:, i // block, j // block, first : first + y.shape[3]]
    return y


def pixel_shuffle(x: Any, block: int) -> Any:
    """NCHW, CRD: the formula in the documentation of torch.nn.PixelShuffle, channel by channel."""
    n, c, h, w = x.shape
    y = np.empty((n, c // block**2, h * block, w * block), x.dtype)
    for channel in range(c):
        image, place = divmod(channel, block**2)
        y[:, image, place // block :: block, place % block :: block] = x[:, channel]
    return y


def expected_image(depth: Any, block: int, mode: str, layout: str) -> Any:
    """depth_to_space in any layout from the two definitions."""
    if mode == "DCR":
        nhwc = depth if layout == "NHWC" else depth.transpose(0, 2, 3, 1)
        y = tensorflow_depth_to_space(nhwc, block)
        return y if layout == "NHWC" else y.transpose(0, 3, 1, 2)
    nchw = depth if layout == "NCHW" else depth.transpose(0, 3, 1, 2)
    y = pixel_shuffle(nchw, block)
    return y if layout == "NCHW" else y.transpose(0, 2, 3, 1)


@FEW
@given(
    st.tuples(*[st.integers(1, 4)] * 4), st.integers(1, 4), st.sampled_from(["DCR", "CRD"]),
    st.sampled_from(["NCHW", "NHWC"]), DTYPES,
)  # fmt: skip
def test_depth_to_space_and_back(sizes: tuple[int, ...], block: int, mode: str, layout: str, dtype: str) -> None:
    n, c, h, w = sizes
    how: Any = dict(block=block, mode=mode, layout=layout, dtype=dtype)
    there = depth_to_space(n=n, c=c * block**2, h=h, w=w, **how)
    check(there, lambda x: expected_image(x, block, mode, layout))
    back = space_to_depth(n=n, c=c, h=h * block, w=w * block, **how)
    depth = random_bits(there)["x"]
    image = expected_image(depth, block, mode, layout)
    np.testing.assert_array_equal(moved(back, {"x": image}), depth)
    np.testing.assert_array_equal(defined(back, {"x": image}), depth)


SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=5)
POSITIONS = st.integers(-8, 8) | st.none() | st.sampled_from([2**63 - 1, -(2**63)])


@FEW
@given(st.data(), SHAPES, DTYPES)
def test_strided_slice_is_that_of_numpy(data: st.DataObject, shape: list[int], dtype: str) -> None:
    axes = data.draw(st.permutations(range(len(shape))))[: data.draw(st.integers(0, len(shape)))]
    count = len(axes)
    begin, end = (data.draw(st.lists(POSITIONS, min_size=count, max_size=count)) for _ in range(2))
    strides = data.draw(st.lists(st.integers(-3, 3).filter(bool), min_size=count, max_size=count))
    parts = [slice(None)] * len(shape)
    for axis, *part in zip(axes, begin, end, strides):
        parts[axis] = slice(*part)
    signed = [axis - len(shape) if data.draw(st.booleans()) else axis for axis in axes]
    workload = strided_slice(x=shape, begin=begin, end=end, strides=strides, axes=signed, dtype=dtype)
    check(workload, lambda x: x[tuple(parts)])
    assert workload.replace() == workload == Workload("strided_slice", workload.params)


def tvm_cases() -> list[tuple[Any, ...]]:
    """(extents, begin, end, strides, axes, mode, extents of y) of TVM v0.19.0's tests of strided_slice (Apache-2.0)."""
    end, size, x = "end", "size", (3, 4, 3)
    return [
        ((1, 224, 224, 3), [0, 20, 20, 0], [1, 140, 140, 3], [1, 1, 1, 1], [], end, (1, 120, 120, 3)),
        (x, [1, 1, 0], [4, 1000, 3], [], [], end, (2, 3, 3)),
        (x, [1, 1, 0], [4, 4], [], [], end, (2, 3, 3)),
        (x, [1, 1], [4, 4, 3], [], [], end, (2, 3, 3)),
        (x, [1, -1, 0], [4, -5, 3], [2, -1, 1], [], end, (1, 4, 3)),
        (x, [-1, -1, -1], [-5, -5, -5], [-1, -1, -1], [], end, (3, 4, 3)),
        (x, [1, 0, 0], [3, -1, 3], [1, 1, 1], [], size, (2, 4, 3)),
        (x, [1, 0, 0], [-1, 2, 3], [1, 1, 1], [], size, (2, 2, 3)),
        (x, [1], [4], [], [1], end, (3, 3, 3)),
        (x, [0, 0, 0], [4, -5, 4], [1, -1, 2], [], end, (3, 1, 2)),
        (x, [1, 0], [4, 2], [2, 1], [], end, (1, 2, 3)),
        (x, [0, 0, 0], [None, None, None], [], [], end, (3, 4, 3)),
        ((20, 10, 5), [20, 10, 4], [0, 0, 1], [-1, -3, -2], [], end, (19, 3, 2)),
        ((15, 21), [0, 1000000], [1000000, -1000000], [1, -1], [], end, (15, 21)),
        ((15, 17, 21), [0, 1000000], [1000000, -1000000], [1, -1], [0, 2], end, (15, 17, 21)),
    ]


@pytest.mark.parametrize("case", tvm_cases(), ids=str)
def test_strided_slice_has_the_shapes_of_tvm(case: tuple[Any, ...]) -> None:
    x, begin, end, strides, axes, mode, y = case
    assert strided_slice(x=x, begin=begin, end=end, strides=strides, axes=axes, mode=mode).output.shape == y


def test_equal_slices_have_equal_ids_and_a_short_label() -> None:
    plain = strided_slice(x=(8, 6), begin=(2, 5), end=(8, -7), strides=(1, -2))
    assert plain == strided_slice(x=(8, 6), begin=(-1, -6), end=(None, 99), strides=(-2, 1), axes=(1, 0))
    assert plain.label == "strided_slice 8x6 [2:8,5:0:-2] f16"
    assert strided_slice(x=(8, 6), begin=(3,), end=(2,)).id == strided_slice(x=(8, 6), begin=(9,)).id


@FEW
@given(st.data(), SHAPES, DTYPES)
def test_concat_is_that_of_numpy(data: st.DataObject, shape: list[int], dtype: str) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    shapes = []
    for extent in data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)):
        each = list(shape)
        each[axis] = extent
        shapes.append(each)
    check(concat(x=shapes, axis=axis, dtype=dtype), lambda *arrays: np.concatenate(arrays, axis))


@FEW
@given(st.data(), SHAPES, DTYPES)
def test_pad_is_that_of_numpy(data: st.DataObject, shape: list[int], dtype: str) -> None:
    """Negative numbers cut x first."""
    axes = data.draw(st.permutations(range(len(shape))))[: data.draw(st.integers(1, len(shape)))]
    pads = []
    for axis in axes:
        low = data.draw(st.integers(-shape[axis] - 1, 4))
        pads.append((low, data.draw(st.integers(-low - shape[axis], 4))))
    fill = np.array([5], np.float32 if dtype == "bfloat16" else dtype)
    bits = fill.view(np.uint32) >> 16 if dtype == "bfloat16" else fill.view(f"u{fill.itemsize}")

    def expected(x: Any) -> Any:
        for axis, (low, high) in zip(axes, pads):
            wide = [(0, 0)] * x.ndim
            wide[axis] = (8, 8)
            x = np.pad(x, wide, constant_values=bits[0]).take(range(8 - low, 8 + x.shape[axis] + high), axis)
        return x

    before, after = zip(*pads)
    check(pad(x=shape, before=before, after=after, axes=axes, value=5, dtype=dtype), expected)


# --- Canonical form -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workload", "factors"),
    [
        (transpose(x=(2, 3, 4, 5), permutation=(0, 2, 3, 1)), [(2, 60, 60), (20, 1, 3), (3, 20, 1)]),
        (transpose(x=(1, 7, 1, 9), permutation=(2, 1, 0, 3)), [(63, 1, 1)]),
        (transpose(x=(1, 1), permutation=(1, 0)), []),
        (concat(x=[(2, 3, 5), (2, 4, 5)], axis=1), [(2, 15, 35), (15, 1, 1)]),
        (strided_slice(x=(4, 6, 5), begin=(0, 5), end=(4, 0), strides=(2, -2)), [(2, 60, 15), (3, -10, 5), (5, 1, 1)]),
        (pad(x=(2, 3, 5), before=(0, 1)), [(2, 15, 20), (20, 1, 1)]),
        (depth_to_space(n=2, c=8, h=3, w=5, block=2, layout="NHWC"), [(6, 40, 40), (2, 4, 20), (5, 8, 4), (4, 1, 1)]),
    ],
)
def test_factors_that_follow_one_another_are_merged(workload: Workload, factors: list[tuple[int, int, int]]) -> None:
    box = workload.definition.movement(workload.params).boxes[0]
    assert [(factor.extent, factor.x, factor.y) for factor in box.factors] == factors


def test_a_ragged_axis_absorbs_what_follows_it() -> None:
    """Two rows of three elements, between one row of fill above and one below: a run of 12 of which 3 to 9 are in x."""
    box = Box.of("x", [Factor(4, 3, 3, axis=0), Factor(3, 1, 1)], x_start=-3, ragged=[Ragged(3, 4, first=1)])
    assert box == Box("x", (Factor(12, 1, 1, axis=0),), -3, 0, (Ragged(9, 12, first=3),))
    y = Movement(1, (box,), fill=7).apply({"x": np.arange(6, dtype=np.uint8)}, 12)
    assert y.tolist() == [7, 7, 7, 0, 1, 2, 3, 4, 5, 7, 7, 7]


def test_no_factor_is_longer_than_31_bits() -> None:
    workload = transpose(x=(2**20, 2**20, 3), permutation=(0, 1, 2), dtype="int8")
    (box,) = workload.definition.movement(workload.params).boxes
    assert box.size == 3 * 2**40 and all(factor.extent < 2**31 for factor in box.factors)
    assert workload.work.nbytes == 2 * 3 * 2**40


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: transpose(x=[1] * 9, permutation=list(range(9))), "x must be a list of 1 to 8 values, each an integer"),
        (lambda: concat(x=[[1, 8]] * 300, axis=0), r"x must be a list of .*, got \[\[1, 8\], .* \.\.\.$"),
        (lambda: concat(x=[], axis=0), "x must be a list of .* values, each a list of 1 to 8 values, .*, got \\[\\]"),
    ],
)
def test_a_list_of_a_wrong_length_is_refused_with_the_limits(make: Callable[[], Workload], message: str) -> None:
    with pytest.raises(WorkloadError, match=message) as caught:
        make()
    assert len(str(caught.value)) < 700


# --- The contract of operators --------------------------------------------------------------------------------------------


class TestTranspose(OpContract):
    op = TRANSPOSE
    examples = (
        {"x": [2, 3, 4], "permutation": [2, 0, 1]},
        {"x": [5], "permutation": [-1], "dtype": "float8_e4m3"},
        {"x": [2, 1, 3, 2, 4], "permutation": [4, 3, 2, 1, 0], "dtype": "int32"},
        {"x": [2, 3, 4], "permutation": [2, 0, 1], "slice_of": [4, 5, 3]},
    )
    wrong = (
        ({"x": [2, 3], "permutation": [0, 0]}, "permutation"),
        ({"x": [2, 3], "permutation": [0, -2]}, "permutation"),
        ({"x": [2, 3], "permutation": [0, 2]}, "permutation"),
        ({"x": [2, 3], "permutation": [0]}, "permutation"),
        ({"x": [2, 0], "permutation": [0, 1]}, "x"),
        ({"x": [], "permutation": []}, "x"),
        ({"x": [2**31 - 1] * 3, "permutation": [0, 1, 2]}, "x"),
        ({"x": [2, 3], "permutation": [0, 1], "dtype": "float64"}, "dtype"),
    )
    ids: ClassVar = {
        "4a48445e3839dfab423e30789fbe231d6672106a2f3e20cd576d41ddd66fe5e8": {
            "x": [32, 56, 56, 64],
            "permutation": [0, 3, 1, 2],
        },
    }


class TestDepthToSpace(OpContract):
    op = DEPTH_TO_SPACE
    examples = (
        {"n": 2, "c": 8, "h": 3, "w": 5, "block": 2},
        {"n": 1, "c": 9, "h": 2, "w": 2, "block": 3, "mode": "CRD", "layout": "NHWC", "dtype": "uint8"},
        {"n": 2, "c": 8, "h": 3, "w": 5, "block": 2, "slice_of": [2, 5, 6, 10]},
    )
    wrong = (
        ({"n": 1, "c": 8, "h": 3, "w": 5, "block": 3}, "c"),
        ({"n": 1, "c": 8, "h": 3, "w": 5, "block": 0}, "block"),
        ({"n": 1, "c": 8, "h": 3, "w": 5, "block": 2, "mode": "CDR"}, "mode"),
        ({"n": 1, "c": 8, "h": 3, "w": 5, "block": 2, "layout": "NCHW4c"}, "layout"),
    )
    ids: ClassVar = {
        "a515aedb5b8c5348f196427147036a59cd7a912a3a39b3b9bdd0ee7fd3143d67": {
            "n": 1,
            "c": 48,
            "h": 720,
            "w": 1280,
            "block": 4,
        },
    }


class TestSpaceToDepth(OpContract):
    op = SPACE_TO_DEPTH
    examples = (
        {"n": 2, "c": 3, "h": 4, "w": 6, "block": 2},
        {"n": 1, "c": 2, "h": 3, "w": 6, "block": 3, "mode": "CRD", "layout": "NHWC", "dtype": "float32"},
        {"n": 2, "c": 3, "h": 4, "w": 6, "block": 2, "slice_of": [2, 20, 2, 3]},
    )
    wrong = (
        ({"n": 1, "c": 3, "h": 5, "w": 6, "block": 2}, "h"),
        ({"n": 1, "c": 3, "h": 4, "w": 7, "block": 2}, "w"),
    )
    ids: ClassVar = {
        "435e22ce2e1df564e87e80c36f0b8c6afaf85375f149a5b8e57ab79f5cc3edee": {
            "n": 1,
            "c": 3,
            "h": 720,
            "w": 1280,
            "block": 4,
        },
    }


class TestStridedSlice(OpContract):
    op = STRIDED_SLICE
    examples = (
        {"x": [3, 4, 3], "begin": [1, 0], "end": [3, 2]},
        {"x": [5], "begin": [4], "end": [-6], "strides": [-2], "axes": [-1], "dtype": "int32"},
        {"x": [5, 6], "begin": [1, 2], "end": [2, -1], "mode": "size", "dtype": "uint8"},
        {"x": [3, 4, 3], "begin": [1, 0], "end": [3, 2], "slice_of": [2, 5, 3]},
    )
    wrong = (
        ({"x": [3, 4], "begin": [0], "end": [1], "strides": [0]}, "strides"),
        ({"x": [3, 4], "begin": [0, 0, 0], "end": [1]}, "begin"),
        ({"x": [3, 4], "begin": [0, 0], "end": [1], "axes": [1]}, "begin"),
        ({"x": [3, 4], "begin": [0, 0], "end": [1, 1], "axes": [1, -1]}, "axes"),
        ({"x": [3, 4], "begin": [0], "end": [1], "axes": [2]}, "axes"),
        ({"x": [3, 4], "begin": [0], "end": [-2], "mode": "size"}, "end"),
        ({"x": [3, 4], "begin": [0], "end": [1], "strides": [2], "mode": "size"}, "strides"),
    )
    ids: ClassVar = {
        "65106bd6533c54cb58b9c1e6705bed4a9e0d1d5396881066dcbfa425ab95bc1a": {
            "x": [1, 224, 224, 3],
            "begin": [0, 20, 20, 0],
            "end": [1, 140, 140, 3],
        },
    }


class TestConcat(OpContract):
    op = CONCAT
    examples = (
        {"x": [[2, 3, 4], [2, 1, 4]], "axis": 1},
        {"x": [[3], [5], [1]], "axis": -1, "dtype": "bfloat16"},
        {"x": [[2, 3, 4], [2, 1, 4]], "axis": 1, "slice_of": [2, 9, 4]},
    )
    wrong = (
        ({"x": [[2, 3], [2, 3]], "axis": 2}, "axis"),
        ({"x": [[2, 3], [3, 3]], "axis": 1}, "x"),
        ({"x": [[2, 3], [2, 3, 1]], "axis": 1}, "x"),
        ({"x": [], "axis": 0}, "x"),
        ({"x": [[2, 0]], "axis": 0}, "x"),
        ({"x": [[2**30], [2**30]], "axis": 0}, "x"),
    )
    ids: ClassVar = {
        "2418773b8d9b9abe4186bbf0f5687abcec89366cd09e2c751c30d71f97a0eba6": {
            "x": [[1, 64, 28, 28], [1, 32, 28, 28]],
            "axis": 1,
        },
    }


class TestPad(OpContract):
    op = PAD
    examples = (
        {"x": [2, 3, 4], "before": [0, 1], "after": [1]},
        {"x": [5, 6], "before": [-2], "after": [3], "axes": [-1], "value": -1.5, "dtype": "float8_e5m2"},
        {"x": [5, 6], "before": [1, 1], "after": [1, 1], "value": 255, "dtype": "uint8"},
        {"x": [5, 6], "before": [1, 1], "after": [1, 1], "slice_of": [7, 9]},
    )
    wrong = (
        ({"x": [3, 4], "before": [1, 1, 1]}, "before"),
        ({"x": [3, 4], "after": [1, 1], "axes": [0]}, "after"),
        ({"x": [3, 4], "after": [1, 1], "axes": [0, 0]}, "axes"),
        ({"x": [3, 4], "after": [1], "axes": [2]}, "axes"),
        ({"x": [3, 4], "before": [-4]}, "before"),
        ({"x": [3, 4], "value": 256, "dtype": "uint8"}, "value"),
        ({"x": [3, 4], "value": 0.5, "dtype": "int32"}, "value"),
        ({"x": [3, 4], "value": 1e5}, "value"),
    )
    ids: ClassVar = {
        "f3fad8953f80b2754fb3e0d6c5bd9a52c22d33d3d27d4b5ad4496cfa7836778c": {
            "x": [1, 56, 56, 64],
            "before": [0, 1, 1, 0],
            "after": [0, 1, 1, 0],
        },
    }


def test_labels_say_what_is_moved() -> None:
    assert transpose(x=(2, 3, 4), permutation=(2, 0, 1)).label == "transpose 2x3x4 by 2,0,1 f16"
    label = depth_to_space(n=1, c=8, h=3, w=5, block=2, layout="NHWC", dtype="int8").label
    assert label == "depth_to_space 1x3x5x8 b2 DCR i8 NHWC"
    assert concat(x=[(2, 3), (2, 4)], axis=-1).label == "concat 2x3 + 2x4 along 1 f16"
    assert concat(x=[(2, 3)] * 3, axis=0).label == "concat 3 of 2x3 along 0 f16"
    assert pad(x=(2, 3), before=(1,), value=-7, dtype="int8").label == "pad 2x3 by 1+0,0+0 with -7 i8"


def test_work_is_bytes_only() -> None:
    workload = space_to_depth(n=2, c=3, h=4, w=6, block=2, dtype="float32")
    assert workload.flops == 0 and workload.work.nbytes == 2 * 4 * math.prod((2, 3, 4, 6))
    assert strided_slice(x=(10, 10), begin=(2,), end=(5,), dtype="int8").work.least_bytes == 2 * 30
    assert pad(x=(10, 10), before=(-4, 1), after=(1, 0), dtype="int8").work.least_bytes == 6 * 10 + 7 * 11


def test_an_empty_result_is_legal() -> None:
    for workload in (strided_slice(x=(3, 4), begin=(2,), end=(2,)), pad(x=(3, 4), before=(-3,))):
        assert workload.output.shape == (0, 4) and workload.work.least_bytes == 0
        assert workload.definition.movement(workload.params).boxes == ()


def test_blocks_that_do_not_divide_are_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"c is 8, which block \* block = 9 does not divide; give a multiple of 9"):
        depth_to_space(n=1, c=8, h=3, w=5, block=3)
    with pytest.raises(ValueError, match=r"w is 7, which block = 2 does not divide; give a multiple of 2"):
        space_to_depth(n=1, c=3, h=4, w=7, block=2)
