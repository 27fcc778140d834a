"""The outputs of a kernel: one or several, by name, in given or new memory, and the overlaps that are allowed."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import schedsearch
from schedsearch.config import Config
from schedsearch.errors import ArgumentError
from schedsearch.launch import Artifact, LaunchPlan
from schedsearch.ops import ArgSpec
from schedsearch.runtime import Kernel, OutputLike, Provenance, output_like

SHAPE = (2, 3, 4, 8)
SIZE = 2 * 3 * 4 * 8


class SumAndDifference:
    """Stands for machine code: it computes total = a + b and difference = a - b at the bound addresses."""

    artifact = Artifact(b"", LaunchPlan("cpu", "native", ()))
    device = None  # no kernel that notes indices asks it for memory

    def bind(self, buffers: Mapping[str, int], scalars: Mapping[str, float], prepared: Any = None) -> SumAndDifference:
        bound = SumAndDifference()
        bound.addresses = dict(buffers)
        return bound

    def set_pointer(self, buffer: str, address: int) -> None:
        self.addresses[buffer] = address

    def launch(self, stream: int = 0) -> None:
        a, b, total, difference = (
            np.frombuffer((ctypes.c_float * SIZE).from_address(self.addresses[name]), np.float32)
            for name in ("a", "b", "total", "difference")
        )
        total[...], difference[...] = a + b, a - b


def spec(name: str, **more: Any) -> ArgSpec:
    return ArgSpec(name, "NHWC", SHAPE, "float32", **more)


def make_kernel() -> Kernel:
    """`total` may update `b` in place."""
    workload: Any = SimpleNamespace(
        signature=(spec("a"), spec("b", aliases="total")),
        outputs=(spec("total"), spec("difference")),
        scalars=(),
        label="sum and difference",
    )
    return Kernel(workload, SumAndDifference(), ("cpu", 0), Provenance("exact", "t", Config()), True)  # type: ignore[arg-type]


@pytest.fixture
def arrays() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return tuple(rng.integers(-9, 9, SHAPE).astype(np.float32) for _ in range(2))  # type: ignore[return-value]


def test_several_outputs_come_as_a_tuple_in_the_order_of_the_workload(arrays: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = arrays
    kernel = make_kernel()
    for total, difference in (kernel(a, b), kernel.bind(a, b)(), kernel.bind(a, b).outputs):
        assert total.shape == difference.shape == SHAPE
    total, difference = kernel(a, b)
    np.testing.assert_array_equal(total, a + b)
    np.testing.assert_array_equal(difference, a - b)


def test_outputs_are_held_as_the_first_argument_is(arrays: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = arrays
    for output in make_kernel()(a.transpose(0, 3, 1, 2), b):
        assert output.shape == (2, 8, 3, 4) and output.transpose(0, 2, 3, 1).flags.c_contiguous


def test_outputs_are_given_in_order_or_by_name(arrays: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = arrays
    kernel = make_kernel()
    one, other = np.empty(SHAPE, np.float32), np.empty(SHAPE, np.float32)
    for out in ((one, other), [one, other], {"difference": other, "total": one}):
        one[...] = other[...] = np.nan
        total, difference = kernel(a, b, out=out)
        assert total is one and difference is other
        np.testing.assert_array_equal(one, a + b)
        np.testing.assert_array_equal(other, a - b)
    total, difference = kernel(a, b, out={"difference": other})
    assert difference is other and total is not one
    np.testing.assert_array_equal(total, a + b)


def test_an_argument_is_updated_in_place_where_its_spec_allows_it(arrays: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = arrays
    expected = a + b
    make_kernel()(a, b, out={"total": b})
    np.testing.assert_array_equal(b, expected)


def test_wrong_outputs_are_refused(arrays: tuple[np.ndarray, np.ndarray]) -> None:
    a, b = arrays
    kernel = make_kernel()
    new = np.empty(SHAPE, np.float32)
    memory = np.empty(SIZE + 4, np.float32)
    shifted = memory[:SIZE].reshape(SHAPE), memory[4:].reshape(SHAPE)
    for out, message in (
        (new, "out holds 1 arrays; the kernel has 2 outputs: total, difference"),
        ({"sum": new}, "out names 'sum'; the outputs are total, difference"),
        ({"totel": new}, r"out names 'totel' \(did you mean 'total'\?\)"),
        ({"total": a}, r"out\['total'\] overlaps a, which the kernel reads"),
        ({"difference": b}, r"out\['difference'\] overlaps b, which the kernel reads"),
        (shifted, r"out\['difference'\] overlaps out\['total'\]; give each output memory of its own"),
        ({"total": new.astype(np.float64)}, r"out\['total'\] has dtype float64, the kernel takes float32"),
        ({"total": new[:1]}, r"out\['total'\] has shape \(1, 3, 4, 8\); allowed"),
    ):
        with pytest.raises(ArgumentError, match=message):
            kernel(a, b, out=out)


def test_the_form_of_outputs_is_known_without_a_device() -> None:
    workload = schedsearch.Workload("conv2d", {"n": 1, "h": 8, "w": 9, "c": 16, "k": 32, "r": 1, "s": 1})
    assert output_like(workload) == (OutputLike("y", (1, 8, 9, 32), (2304, 288, 32, 1), "float16"),)
    assert output_like(workload, "channels_last") == (OutputLike("y", (1, 32, 8, 9), (2304, 1, 288, 32), "float16"),)
    with pytest.raises(ArgumentError, match=r"there is no form 'channel_last' \(did you mean 'channels_last'\?\)"):
        output_like(workload, "channel_last")
