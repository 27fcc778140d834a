"""Exponentials of kernels for CPUs in plain arithmetic, against Python's in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from matmul_support import Array

from schedsearch.templates.parts import cpu_functions

NUMBERS = np.float32([*np.linspace(-87, 88.7, 5001), *np.linspace(-5, 5, 3001), 1e-30, -1e-30, 1e-4])


pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")


@pytest.fixture(autouse=True)
def numpy_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation is NumPy's of float32."""

    def scaled(value: Array, shifted: Array) -> Array:
        return value * np.exp2(shifted - np.float32(12582912))

    monkeypatch.setattr(cpu_functions, "times_power_of_two", scaled)
    monkeypatch.setattr(cpu_functions, "f32", np.float32)


@pytest.mark.parametrize(("name", "right"), [("exp", math.exp), ("tanh", math.tanh), ("erf", math.erf)])
def test_errors_are_below_four_roundoffs(name: str, right: object) -> None:
    assert callable(right)
    found = np.array([cpu_functions.FUNCTIONS[name](each) for each in NUMBERS], np.float64)
    np.testing.assert_allclose(found, [right(float(each)) for each in NUMBERS], rtol=4 * 2.0**-24)


def test_limits_and_nan_are_those_of_ieee_arithmetic() -> None:
    limits = {"exp": (0.0, math.inf), "tanh": (-1.0, 1.0), "erf": (-1.0, 1.0), "sigmoid": (0.0, 1.0)}
    for name, (least, most) in limits.items():
        function = cpu_functions.FUNCTIONS[name]
        for far in (100.0, math.inf):
            assert (function(np.float32(-far)), function(np.float32(far))) == (least, most), name
    for name, function in cpu_functions.FUNCTIONS.items():
        assert np.isnan(function(np.float32(np.nan))), name
