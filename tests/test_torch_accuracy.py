"""What errors a kernel or a network may have, against NumPy's float64."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-integrations installs it")

from schedsearch.torch.comparison.accuracy import LAYER, NETWORK, Errors, errors_of  # noqa: E402

pytestmark = pytest.mark.integrations


def test_errors_are_relative_to_the_largest_magnitude() -> None:
    exact = np.array([-8.0, 0.5, 4.0])
    ours, theirs = exact + np.array([0.0, 0.25, 0.0]), exact + np.array([0.0, 0.0, -0.5])
    found = errors_of(*(torch.from_numpy(each).float() for each in (exact, ours, theirs)))
    assert found == (np.abs(ours - exact).max() / np.abs(exact).max(), np.abs(theirs - exact).max() / np.abs(exact).max())


def test_errors_of_zeros_are_absolute() -> None:
    assert errors_of(torch.zeros(2), torch.full((2,), 0.25), torch.zeros(2)) == (0.25, 0.0)


@pytest.mark.parametrize("allowed", [LAYER, NETWORK])
def test_what_is_not_a_number_is_never_accepted(allowed: object) -> None:
    assert "its error against float32 is nan" in allowed.excess(Errors(float("nan"), 1.0), torch.float32)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("allowed", "dtype", "tf32", "most"),
    [
        (LAYER, torch.float16, False, 2e-3),
        (LAYER, torch.bfloat16, False, 1.6e-2),
        (LAYER, torch.float32, False, 2e-5),
        (LAYER, torch.float32, True, 2e-3),
        (NETWORK, torch.float16, False, 2e-2),
        (NETWORK, torch.int64, False, 0.0),
    ],
)
def test_the_tolerance_is_that_of_the_dtype_or_some_times_the_error_of_pytorch(
    allowed: object, dtype: object, tf32: bool, most: float
) -> None:
    excess = lambda ours, theirs: allowed.excess(Errors(ours, theirs), dtype, tf32=tf32)  # type: ignore[attr-defined]  # noqa: E731
    times = 4.0 if allowed is LAYER else 2.0
    assert not excess(most, 0.0) and f"allowed: {most:.1e} (PyTorch's own: 0.0e+00)" in excess(most + 1e-6, 0.0)
    assert not excess(times * 0.5, 0.5) and f"allowed: {times * 0.5:.1e}" in excess(times * 0.5 + 1e-3, 0.5)
