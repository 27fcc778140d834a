"""arange, expand, reshape, where and dyn_concat on a CPU, and on GPUs thread by thread. Expected values are NumPy's."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from dynamic_support import emulated

import schedsearch
from schedsearch import Workload, WorkloadError, arange, dyn_concat, expand, reshape, where
from schedsearch.device.detect import detect
from schedsearch.ops.bounded import in_use
from schedsearch.target import PRESETS
from schedsearch.template import load_template
from schedsearch.templates.arrange import cuda as arrange_cuda
from schedsearch.templates.arrange import kernels as arrange_kernels
from schedsearch.testing.template_contract import TemplateContract

FLOATS = np.arange(24, dtype=np.float32)


def whole(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


def part(array: Any, *extents: int) -> Any:
    return array[tuple(map(slice, extents))]


X = FLOATS.reshape(4, 6)
CASES: dict[str, tuple[Workload, Mapping[str, Any], Any]] = {
    "arange": (arange(bound=10), {"start": whole(3), "limit": whole(12), "delta": whole(4)}, whole(3, 7, 11)),
    "backwards": (arange(bound=10), {"start": whole(5), "limit": whole(-1), "delta": whole(-3)}, whole(5, 2)),
    "no numbers": (arange(bound=10), {"start": whole(5), "limit": whole(5), "delta": whole(1)}, whole()),
    "no step": (arange(bound=10), {"start": whole(5), "limit": whole(9), "delta": whole(0)}, whole()),
    "too many": (arange(bound=10), {"start": whole(0), "limit": whole(11), "delta": whole(1)}, whole()),
    "floats": (
        arange(bound=9, dtype="float32"),
        {name: np.array([n], np.float32) for name, n in (("start", 1), ("limit", 2.1), ("delta", 0.5))},
        np.array([1, 1.5, 2], np.float32),
    ),
    "rows": (
        expand(x=(4, 1), bound=(5, 4, 6), dynamic=("x",), dtype="float32"),
        {"x": FLOATS[:4].reshape(4, 1), "x_extents": whole(3, 1), "shape": whole(2, 1, 5)},
        np.broadcast_to(FLOATS[:3].reshape(3, 1), (2, 3, 5)),
    ),
    "misfit": (
        expand(x=(4, 6), bound=(4, 6), dtype="float32"), {"x": X, "shape": whole(3, 6)}, np.zeros((0, 0)),
    ),
    "negative": (
        expand(x=(1, 6), bound=(4, 6), dtype="float32"), {"x": X[:1], "shape": whole(-2, 6)}, np.zeros((0, 0)),
    ),
    "all that is left": (
        reshape(x=(4, 6), bound=(8, 24), dynamic=("x",), dtype="float32"),
        {"x": X, "x_extents": whole(3, 4), "shape": whole(2, -1)}, X[:3, :4].reshape(2, 6),
    ),
    "the same extent": (
        reshape(x=(4, 6), bound=(4, 2, 3), dtype="float32"), {"x": X, "shape": whole(0, 2, 3)}, X.reshape(4, 2, 3),
    ),
    "an extent of zero": (
        reshape(x=(4, 6), bound=(4, 6), allowzero=True, dynamic=("x",), dtype="float32"),
        {"x": X, "x_extents": whole(0, 6), "shape": whole(4, 0)}, np.zeros((4, 0)),
    ),
    "two left": (reshape(x=(4, 6), bound=(24, 24), dtype="float32"), {"x": X, "shape": whole(-1, -1)}, np.zeros((0, 0))),
    "beyond the bound": (
        reshape(x=(4, 6), bound=(4, 8), dtype="float32"), {"x": X, "shape": whole(1, -1)}, np.zeros((0, 0)),
    ),
    "chosen": (
        where(c=(4, 1), a=(4, 6), b=(6,), dynamic=("c", "a"), dtype="float32"),
        {
            "c": np.array([[1], [0], [1], [1]], np.uint8), "a": X, "b": -FLOATS[:6],
            "c_extents": whole(3, 1), "a_extents": whole(3, 6),
        },
        np.where(np.array([[1], [0], [1]]), X[:3], -FLOATS[:6]),
    ),
    "integers": (
        where(c=(3,), a=(3,), b=(1,), dtype="int64"),
        {"c": np.array([1, 0, 7], np.uint8), "a": whole(2**40, 1, -(2**50)), "b": whole(5)}, whole(2**40, 5, -(2**50)),
    ),
    "one after the other": (
        dyn_concat(x=[(4, 6), (2, 6), (4, 6)], dynamic=("x0", "x2"), dtype="float32"),
        {"x0": X, "x1": -X[:2], "x2": 2 * X, "x0_extents": whole(3, 6), "x2_extents": whole(1, 6)},
        np.concatenate([X[:3], -X[:2], 2 * X[:1]]),
    ),
    "side by side": (
        dyn_concat(x=[(4, 6), (4, 6)], axis=-1, dynamic=("x0", "x1"), dtype="float32"),
        {"x0": X, "x1": -X, "x0_extents": whole(4, 0), "x1_extents": whole(4, 5)}, -X[:, :5],
    ),
    "that do not fit": (
        dyn_concat(x=[(4, 6), (4, 6)], dynamic=("x0", "x1"), dtype="float32"),
        {"x0": X, "x1": X, "x0_extents": whole(4, 5), "x1_extents": whole(4, 6)}, np.zeros((0, 0)),
    ),
}  # fmt: skip


@functools.cache
def compiled(workload: Workload) -> Any:
    return schedsearch.compile(workload, target="cpu", allow=("default",))


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_cpu_computes_what_numpy_does(name: str) -> None:
    workload, arrays, wanted = CASES[name]
    y, extents = compiled(workload)(*(np.ascontiguousarray(arrays[spec.name]) for spec in workload.signature))
    np.testing.assert_array_equal(y[in_use(workload.outputs[0].shape, extents)], wanted)
    assert tuple(extents) == np.shape(wanted)


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_for_gpus_compute_the_same(name: str, monkeypatch: Any) -> None:
    workload, arrays, wanted = CASES[name]
    template = load_template("arrange_cuda")
    found = emulated(monkeypatch, template, workload, arrays, None, arrange_cuda, arrange_kernels)
    np.testing.assert_array_equal(found["y"], wanted)


class TestArrangeCuda(TemplateContract):
    template, target = load_template("arrange_cuda"), PRESETS["h200"]
    accepted = tuple(CASES[name][0] for name in ("floats", "rows", "all that is left", "chosen", "side by side"))


class TestArrangeCpu(TemplateContract):
    template, target, compiled = load_template("arrange_cpu"), detect("cpu"), 1
    accepted = TestArrangeCuda.accepted


def test_impossible_parameters_are_refused() -> None:
    with pytest.raises(WorkloadError, match="c, a and b have the extents 3, 4, 1"):
        where(c=(3,), a=(4,), b=(1,))
    with pytest.raises(WorkloadError, match="bound has 1 extents; y has 2"):
        expand(x=(3, 4), bound=(3,))
    with pytest.raises(WorkloadError, match="dynamic names 'y', which is no array of this operator; allowed: x0, x1"):
        dyn_concat(x=[(3,), (4,)], dynamic=("y",))
    with pytest.raises(WorkloadError, match="y has up to 4294967296 elements; allowed: up to 2147483647"):
        expand(x=(1,), bound=(2**16, 2**16))
