"""Exact runs that follow one another: what is kept of earlier ones, and what is not. Expected values are NumPy's."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from schedsearch import compile as compiled
from schedsearch import dyn_strided_slice
from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.dynamic.graph import DynamicGraph, Size
from schedsearch.dynamic.net import DynamicNet
from schedsearch.errors import ArgumentError
from schedsearch.ops.dependence import SizeError

MOST = 300


@pytest.fixture(scope="module")
def net() -> Any:
    """A slice of up to 300 rows of 6 columns."""
    graph = DynamicGraph()
    x = graph.input("x", (Size("n", 0, MOST), 6), "float32")
    positions = [graph.input(name, (2,), "int64") for name in ("begin", "end", "strides")]
    graph.output(graph.call(dyn_strided_slice(x=(MOST, 6), dynamic=True, dtype="float32"), x, *positions, name="slice"))
    device = open_device(detect("cpu"))
    with DynamicNet(graph.program(), device, lambda each: compiled(each, target="cpu", allow=("default",)).artifact) as net:
        yield net
    device.close()


def rows(n: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).random((n, 6), np.float32)


def positions(begin: int = 0, end: int = MOST, strides: int = 1) -> tuple[Any, ...]:
    return np.array([begin, 1]), np.array([end, 5]), np.array([strides, 1])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.mostly_long(3)
def test_runs_follow_arrays_shapes_and_sizes_in_any_order(net: DynamicNet, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for number in range(60):
        n, begin, end = (int(each) for each in (rng.choice([0, 1, 7, 40]), rng.integers(-9, 9), rng.integers(-9, 50)))
        strides, x = int(rng.choice([1, 2, -1])), rows(n, number)
        np.testing.assert_array_equal(net(x, *positions(begin, end, strides)), x[begin:end:strides, 1:5])


def test_a_run_of_a_size_that_was_run_long_ago_is_like_the_first_one(net: DynamicNet) -> None:
    for n in (*range(MOST + 1), 3, MOST):
        x = rows(n)
        np.testing.assert_array_equal(net(x, *positions(2)), x[2:, 1:5])


def test_a_bounded_run_in_between_does_not_change_the_size(net: DynamicNet) -> None:
    small, large = rows(3), rows(8)
    for _ in range(2):
        np.testing.assert_array_equal(net(small, *positions()), small[:, 1:5])
        bound = net.bind(large, *positions())
        bound.step()
        np.testing.assert_array_equal(bound.sliced()[0], large[:, 1:5])
        np.testing.assert_array_equal(net(small, *positions()), small[:, 1:5])
        bound.close()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (rows(5).astype(np.float64), "dtype float64"),
        (rows(10)[::2], "strides"),
        (rows(5).T.copy(), r"shape \[6, 5\]"),
        (rows(MOST + 1), "n=0..300"),
        (rows(5)[0], "2 dimensions"),
        ([[1.0] * 6] * 5, "list"),
    ],
)
def test_arrays_are_checked_after_right_ones_as_well(net: DynamicNet, wrong: Any, says: str) -> None:
    net(rows(5), *positions())
    for _ in range(2):
        with pytest.raises(ArgumentError, match=says):
            net(wrong, *positions())
    with pytest.raises(ArgumentError, match="3 arrays"):
        net(rows(5), *positions()[:2])
    np.testing.assert_array_equal(net(rows(5), *positions()), rows(5)[:, 1:5])


def test_a_mistake_is_reported_and_later_runs_go_on(net: DynamicNet) -> None:
    for _ in range(2):
        with pytest.raises(SizeError, match="strides has 0"):
            net(rows(5), *positions(strides=0))
        np.testing.assert_array_equal(net(rows(5), *positions()), rows(5)[:, 1:5])


@pytest.mark.parametrize("strides", [1, 0])
@pytest.mark.mostly_long(2)
def test_no_array_is_held_after_its_run(net: DynamicNet, strides: int) -> None:
    """Not even if the run fails, as that with a stride of 0 does."""
    held = []
    for _ in range(2):
        x = rows(5)
        held.append(weakref.ref(x))
        try:
            y = net(x, *positions(strides=strides))
            held.append(weakref.ref(y))
            del y
        except SizeError:
            pass
        del x
    gc.collect()
    assert [each() for each in held] == [None] * len(held)
