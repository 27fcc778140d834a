"""What a call refuses before it touches a device: zero points out of range, scales of the wrong length."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from schedsearch.config import Config
from schedsearch.errors import ArgumentError
from schedsearch.runtime.kernel import Kernel, Provenance
from schedsearch.workload import Workload

WORKLOAD = Workload.conv2d(
    n=1, h=4, w=4, c=16, k=16, r=1, s=1, dtype="uint8", weight_dtype="int8", zero_points=["x", "weight"],
    epilogue=["clip", {"requantise": {"to": "int8"}}],
)  # fmt: skip


class Bound(Exception):
    """The arguments were accepted."""


def bind(*args: Any, **named: Any) -> None:
    def refuse(*_: Any) -> None:
        raise Bound

    plan = SimpleNamespace(constants=())
    loaded = SimpleNamespace(artifact=SimpleNamespace(plan=plan), bind=refuse)
    kernel = Kernel(WORKLOAD, loaded, ("cpu", 0), Provenance("default", "none", Config({})), verified=False)
    kernel.bind(*args, **named)


def arrays() -> dict[str, Any]:
    return {spec.name: np.zeros(spec.shape, spec.dtype) for spec in WORKLOAD.signature}


@pytest.mark.parametrize(
    ("name", "least", "most"), [("x_zero_point", 0, 255), ("weight_zero_point", -128, 127), ("y_zero_point", -128, 127)]
)
def test_a_zero_point_is_a_whole_number_of_its_format(name: str, least: int, most: int) -> None:
    for value in (least, most, np.int64(most), float(least)):
        with pytest.raises(Bound):
            bind(**arrays(), **{name: value})
    for value in (least - 1, most + 1, least + 0.5, float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match=f"{name} is .*; allowed: a whole number from {least} to {most}"):
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
