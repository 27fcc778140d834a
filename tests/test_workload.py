"""Workloads and configurations as values: identity, defaults, every mistake reported, arguments and work."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedsearch
from schedsearch.config import Config
from schedsearch.errors import WorkloadError
from schedsearch.workload import Workload, as_python, distance

GOLDEN = json.loads((Path(__file__).parent / "golden_ids.json").read_text())["workloads"]
SHAPE = {"n": 2, "h": 9, "w": 8, "c": 8, "k": 16, "r": 3, "s": 3}


def test_parameters_at_their_default_do_not_change_the_identity() -> None:
    short = Workload("conv2d", SHAPE)
    spelt_out = Workload.conv2d(
        **SHAPE, stride=(1, 1), padding=[0, 0], dilation=1, groups=1, dtype="float16", out_dtype="float16",
        layout="NHWC", weight_layout="OHWI", epilogue=[],
    )  # fmt: skip
    assert short == spelt_out and hash(short) == hash(spelt_out) and short.id == spelt_out.id
    assert short.json == '{"op":"conv2d","params":{"c":8,"h":9,"k":16,"n":2,"r":3,"s":3,"w":8},"v":1}'


def test_json_pickle_and_replace_round_trip() -> None:
    workload = Workload.conv2d(**SHAPE, padding=(1, 2, 0, 1), epilogue=("bias", "relu"), out_dtype="float32")
    assert Workload.from_json(workload.json) == workload
    assert pickle.loads(pickle.dumps(workload)) == workload
    assert workload.replace(n=4).replace(n=2) == workload
    assert workload.replace(n=4).id != workload.id


def test_a_workload_cannot_be_changed() -> None:
    workload = Workload("conv2d", SHAPE)
    with pytest.raises(AttributeError, match="immutable"):
        workload.n = 3
    with pytest.raises(TypeError):
        workload.params["n"] = 3  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "key", "message"),
    [
        ({"n": 0}, "n", "integer of at least 1, got 0"),
        ({"n": 1 << 40}, "n", f"must be at most {(1 << 31) - 1}, got {1 << 40}"),
        ({"h": -3}, "h", "got -3"),
        ({"h": True}, "h", "got True"),
        ({"h": 3.0}, "h", "got 3.0"),
        ({"strid": 2}, "strid", "did you mean 'stride'"),
        ({"stride": 0}, "stride", ">= 1"),
        ({"stride": [1, 2, 3]}, "stride", r"\[vertical, horizontal\]"),
        ({"padding": [1, 2, 3]}, "padding", r"\[top, left, bottom, right\]"),
        ({"padding": -1}, "padding", ">= 0"),
        ({"groups": 3}, "c", "c=8 input channels do not divide into groups=3; allowed: .* the divisors of 8"),
        ({"r": 12}, "r", "spans 12 .* only 9"),
        ({"s": 3, "dilation": [1, 5]}, "s", "spans 11"),
        ({"dtype": "float61"}, "dtype", "did you mean 'float16'"),
        ({"out_dtype": "int4"}, "out_dtype", "allowed: float16, bfloat16, float32"),
        ({"dtype": "float32", "out_dtype": "float16"}, "out_dtype", "allowed: float32"),
        ({"layout": "NHCW"}, "layout", "did you mean"),
        ({"layout": "nchw32c"}, "layout", "did you mean 'NCHW32c'"),
        ({"layout": "NCHW32C"}, "layout", "did you mean 'NCHW32c'"),
        ({"layout": "NCHW32"}, "layout", "did you mean 'NCHW32c'"),
        ({"layout": "nchw"}, "layout", "did you mean 'NCHW'"),
        ({"layout": "NCHW0c"}, "layout", "allowed: NHWC, NCHW, NCHW"),
        ({"weight_dtype": "int8"}, "weight_dtype", "int8 does not go with dtype float16; allowed: float16$"),
        ({"dtype": "int8", "weight_dtype": ["int8"]}, "weight_dtype", "allowed: int8, uint8"),
        ({"dtype": "int8", "zero_points": ["y"]}, "zero_points", "a list of some of x, weight, got"),
        ({"weight_layout": "HWIO"}, "weight_layout", "allowed: OHWI, OIHW"),
        ({"epilogue": ["relu", "biass"]}, "epilogue", "did you mean 'bias'"),
        ({"epilogue": "relu"}, "epilogue", "must be a list"),
        ({"epilogue": None}, "epilogue", "must be a list"),
        ({"epilogue": ["bias", "bias"]}, "epilogue", "more than once"),
    ],
)
def test_each_mistake_is_named_with_what_is_allowed(change: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message) as caught:
        Workload("conv2d", {**SHAPE, **change})
    assert key in {problem.key for problem in caught.value.problems}


def test_numbers_of_numpy_are_numbers() -> None:
    size, pair = np.int64(8), (np.int32(1), np.int32(2))
    workload = Workload.conv2d(n=1, h=size, w=size, c=size, k=size, r=3, s=3, stride=pair, padding=list(pair), groups=size)
    assert workload == Workload.conv2d(n=1, h=8, w=8, c=8, k=8, r=3, s=3, stride=(1, 2), padding=[1, 2], groups=8)
    assert Workload.from_json(workload.json) == workload and type(workload.h) is int


def test_a_single_stage_is_not_a_list_of_stages() -> None:
    with pytest.raises(WorkloadError, match="must be a list of stages, got 'relu'"):
        Workload.conv2d(n=1, h=8, w=8, c=8, k=8, r=1, s=1, epilogue="relu")


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(WorkloadError) as caught:
        Workload("conv2d", {"n": 0, "hh": 3, "dtype": "x"})
    assert {problem.key for problem in caught.value.problems} == {"hh", "h", "w", "c", "k", "r", "s", "n", "dtype"}


def test_unknown_operators_and_newer_schemas_are_refused() -> None:
    with pytest.raises(WorkloadError, match="did you mean 'conv2d'"):
        Workload("conv2", SHAPE)
    with pytest.raises(WorkloadError, match="version 9"):
        Workload.from_json('{"op":"conv2d","params":{},"v":9}')


@given(
    size=st.integers(1, 40), kernel=st.integers(1, 5), stride=st.integers(1, 4), dilation=st.integers(1, 3),
    padding=st.tuples(*[st.integers(0, 4)] * 4),
)  # fmt: skip
def test_output_size_counts_the_positions_of_the_kernel(
    size: int, kernel: int, stride: int, dilation: int, padding: tuple[int, int, int, int]
) -> None:
    def positions(before: int, after: int) -> int:
        last = size + after - ((kernel - 1) * dilation + 1)
        return len(range(-before, last + 1, stride))

    expected = positions(padding[0], padding[2]), positions(padding[1], padding[3])
    params = {
        **SHAPE,
        "h": size,
        "w": size,
        "r": kernel,
        "s": kernel,
        "stride": stride,
        "dilation": dilation,
        "padding": padding,
    }
    if min(expected) == 0:
        with pytest.raises(WorkloadError, match="padded input"):
            Workload("conv2d", params)
    else:
        assert Workload("conv2d", params).output.shape == (2, *expected, 16)


def test_arguments_follow_the_layouts_and_the_epilogue() -> None:
    nhwc = Workload.conv2d(
        **SHAPE, groups=4, epilogue=("bias", "residual", "scale_shift", "leaky_relu"), out_dtype="float32"
    )
    assert [(a.name, a.axes, a.shape, a.dtype) for a in nhwc.signature] == [
        ("x", "NHWC", (2, 9, 8, 8), "float16"),
        ("weight", "OHWI", (16, 3, 3, 2), "float16"),
        ("bias", "K", (16,), "float16"),
        ("residual", "NHWC", (2, 7, 6, 16), "float32"),
        ("scale", "K", (16,), "float16"),
        ("shift", "K", (16,), "float16"),
    ]
    assert [scalar.name for scalar in nhwc.scalars] == ["leaky_relu_slope"]
    nchw = Workload.conv2d(**SHAPE, dtype="float32", layout="NCHW")
    assert [a.shape for a in (*nchw.signature, nchw.output)] == [(2, 8, 9, 8), (16, 8, 3, 3), (2, 16, 7, 6)]
    assert nchw.weight_layout == "OIHW"


def test_work_counts_two_per_multiply_add_and_every_byte_once() -> None:
    workload = Workload.conv2d(**SHAPE, groups=2)
    assert workload.flops == 2 * (2 * 7 * 6 * 16) * (3 * 3 * 4)
    assert workload.min_bytes == 2 * (2 * 9 * 8 * 8 + 16 * 3 * 3 * 4 + 2 * 7 * 6 * 16)


@pytest.mark.parametrize("entry", GOLDEN, ids=lambda entry: entry["id"][:8])
def test_the_python_of_a_workload_makes_it_again(entry: dict[str, Any]) -> None:
    workload = Workload("conv2d", entry["params"])
    module, text = as_python(workload)
    assert module == "schedsearch" and text.startswith("schedsearch.conv2d(n=")
    assert eval(text, {"schedsearch": schedsearch}) == workload


def test_the_old_name_of_the_constructor_makes_the_same_workload() -> None:
    assert Workload.conv2d(**SHAPE, epilogue=["relu"]) == schedsearch.conv2d(**SHAPE, epilogue=["relu"])
    with pytest.raises(WorkloadError, match=r"strid: conv2d has no parameter 'strid' .did you mean 'stride'"):
        Workload.conv2d(**SHAPE, strid=2)


def test_configs_do_not_depend_on_the_order_of_knobs() -> None:
    one, other = Config(bm=64, grid="split", swizzle=True), Config({"swizzle": True, "bm": 64}, grid="split")
    assert one == other and hash(one) == hash(other) and one.json == other.json and one.id == other.id
    assert Config.from_json(one.json) == one and pickle.loads(pickle.dumps(one)) == one
    assert one == {"bm": 64, "grid": "split", "swizzle": True}
    assert one != Config(bm=128, grid="split", swizzle=True)


def test_distance_is_zero_for_the_same_and_grows_with_every_difference() -> None:
    one = Workload.conv2d(**SHAPE)
    assert distance(one, one) == 0
    assert (
        0
        < distance(one, one.replace(n=4))
        < distance(one, one.replace(n=4, h=18))
        < distance(one, one.replace(dtype="bfloat16", n=4, h=18))
    )
    assert distance(one, one.replace(n=4)) == distance(one.replace(n=4), one)


def test_distances_count_steps_of_two_through_zero() -> None:
    def padded(before: int) -> Workload:
        return Workload("pad", {"x": [64], "before": [before], "after": [0]})

    assert distance(padded(0), padded(7)) == distance(padded(0), padded(-7)) == distance(padded(-1), padded(-15)) == 3.0
    assert distance(padded(-3), padded(3)) == 4.0
    softmax = [Workload("softmax", {"x": [rows, 100], "axis": -1}) for rows in (3, 7)]
    assert distance(*softmax) == 1.0
