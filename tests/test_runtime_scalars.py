"""What a call of quantised numbers refuses before it touches a device: zero points, scales and packed arrays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from schedsearch.config import Config
from schedsearch.errors import ArgumentError
from schedsearch.runtime.arrays import ArrayView, check_numbers
from schedsearch.runtime.kernel import Kernel, Provenance
from schedsearch.workload import Workload

WORKLOAD = Workload.conv2d(
    n=1, h=4, w=4, c=16, k=16, r=1, s=1, dtype="uint8", weight_dtype="int8", zero_points=["x", "weight"],
    epilogue=["clip", {"requantise": {"to": "int8"}}],
)  # fmt: skip


class Bound(Exception):
    """The arguments were accepted."""


def kernel(workload: Workload = WORKLOAD, device: tuple[str, int] = ("cpu", 0)) -> Kernel:
    def refuse(*_: Any) -> None:
        raise Bound

    plan = SimpleNamespace(constants=(), steps=())
    loaded = SimpleNamespace(artifact=SimpleNamespace(plan=plan), bind=refuse, device=None)
    return Kernel(workload, loaded, device, Provenance("default", "none", Config({})), verified=False)  # type: ignore[arg-type]


def bind(*args: Any, **named: Any) -> None:
    kernel().bind(*args, **named)


def arrays(workload: Workload = WORKLOAD) -> dict[str, Any]:
    return {spec.name: np.ones(spec.shape, spec.dtype) for spec in workload.signature}


@pytest.mark.parametrize(
    ("name", "least", "most"), [("x_zero_point", 0, 255), ("weight_zero_point", -128, 127), ("y_zero_point", -128, 127)]
)
def test_a_zero_point_is_a_whole_number_of_its_format(name: str, least: int, most: int) -> None:
    for value in (least, most, np.int64(most), float(least)):
        with pytest.raises(Bound):
            bind(**arrays(), **{name: value})
    for value in (least - 1, most + 1, least + 0.5, float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match=f"{name} is .*; allowed: an integer from {least} to {most}"):
            bind(**arrays(), **{name: value})


def test_other_scalars_may_be_any_number() -> None:
    with pytest.raises(Bound):
        bind(**arrays(), clip_min=-0.5, clip_max=float("inf"))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones(15, np.float32), r"requantise_scale has shape \(15,\); allowed: shape \(16,\)"),
        (np.ones((), np.float32), r"requantise_scale has shape \(\); allowed: shape \(16,\)"),
        (np.ones(16, np.float64), "requantise_scale has dtype float64, the kernel takes float32"),
        (np.ones(32, np.float32)[::2], "make it contiguous"),
    ],
)
def test_a_scale_has_one_number_for_each_output_channel(array: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        bind(**{**arrays(), "requantise_scale": array})


QUANTISED = Workload.conv2d(
    n=1, h=4, w=4, c=16, k=16, r=1, s=1, dtype="int8", epilogue=["dequantise", "scale_shift", {"quantise": {"to": "uint8"}}]
)
SCALES = [(WORKLOAD, "requantise_scale"), (QUANTISED, "dequantise_scale"), (QUANTISED, "quantise_scale")]


@pytest.mark.parametrize(("workload", "name"), SCALES)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 0.0, -0.5])
def test_scales_of_quantised_numbers_are_finite_and_above_zero(workload: Workload, name: str, wrong: float) -> None:
    given = arrays(workload)
    given[name][[3, 5]] = wrong
    message = rf"{name}\[3\] is {wrong:g}, and 1 more are wrong; allowed: finite numbers above zero; "
    for refused in (lambda: kernel(workload).bind(**given), lambda: kernel(workload)(**given)):
        with pytest.raises(ArgumentError, match=message):
            refused()
    with pytest.raises(ArgumentError, match=message):
        kernel(workload).prepare(**{name: given[name]})


def test_other_factors_may_be_zero_or_negative() -> None:
    given = arrays(QUANTISED)
    given["scale"][:] = [0.0, -1.0] * 8
    with pytest.raises(Bound):
        kernel(QUANTISED).bind(**given)


def test_the_zero_point_of_quantise_belongs_to_its_format() -> None:
    with pytest.raises(Bound):
        kernel(QUANTISED).bind(**arrays(QUANTISED), y_zero_point=255)
    with pytest.raises(ArgumentError, match="y_zero_point is -1; allowed: an integer from 0 to 255"):
        kernel(QUANTISED).bind(**arrays(QUANTISED), y_zero_point=-1)


ADDED = Workload.conv2d(
    n=1, h=4, w=4, c=16, k=16, r=1, s=1, dtype="int8", epilogue=[{"requantise_add": {"residual": "uint8"}}]
)


@pytest.mark.parametrize(("name", "wrong", "allowed"), [
    ("middle_scale", 0.0, "a finite number above zero"),
    ("residual_scale", float("nan"), "a finite number above zero"),
    ("y_scale", float("inf"), "a finite number above zero"),
    ("y_scale", 1e-60, "a finite number above zero"),  # 0 in float32
    ("middle_zero_point", 128, "an integer from -128 to 127"),
    ("residual_zero_point", -1, "an integer from 0 to 255"),
    ("y_zero_point", 0.5, "an integer from -128 to 127"),
])  # fmt: skip
def test_scales_and_zero_points_of_a_quantised_residual(name: str, wrong: float, allowed: str) -> None:
    with pytest.raises(Bound):
        kernel(ADDED).bind(**arrays(ADDED), y_scale=0.5, residual_zero_point=255)
    with pytest.raises(ArgumentError, match=f"{name} is {wrong}; allowed: {allowed}"):
        kernel(ADDED).bind(**arrays(ADDED), **{name: wrong})


def test_numbers_in_the_memory_of_a_gpu_are_not_read() -> None:
    """The address is not one that this process could read."""
    spec = next(spec for spec in WORKLOAD.signature if spec.name == "requantise_scale")
    check_numbers(spec, ArrayView(8, (16,), (1,), "float32", ("cuda", 0), "torch"))


PACKED = Workload.conv2d(n=1, h=4, w=4, c=64, k=64, r=1, s=1, dtype="int8", layout="NCHW32c")


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        (
            "x",
            np.ones((1, 64, 4, 4), np.int8),
            r"x has shape \(1, 64, 4, 4\); allowed: shape \(1, 2, 4, 4, 32\) \(NCHW32c\); "
            r"schedsearch.pack\(x, 'NCHW32c'\) makes it of an NCHW array",
        ),
        (
            "weight",
            np.ones((64, 64, 1, 1), np.int8),
            r"weight has shape .*; schedsearch.pack\(weight, 'OIHW32o32i'\) makes it of an OIHW array",
        ),
        ("x", np.ones((1, 2, 4, 4, 64), np.int8)[..., ::2], "x has strides .*make it contiguous"),
        ("x", np.ones((1, 2, 4, 4, 32), np.uint8), "x has dtype uint8, the kernel takes int8; convert it"),
    ],
)
def test_packed_arrays_have_the_shape_and_the_strides_of_their_layout(name: str, array: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        kernel(PACKED).bind(**{**arrays(PACKED), name: array})
