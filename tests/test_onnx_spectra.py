"""Inverse transforms of one half of a spectrum, beside NumPy and ONNX Runtime: PyTorch's `irfft` writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from compared_models import assert_as_onnxruntime, lowered, normal, referred  # noqa: E402
from onnx_support import Net  # noqa: E402

from schedsearch.errors import UsageError  # noqa: E402


def inverse(shape: tuple[int, ...], length: int | None, axis: int, opset: int) -> Any:
    """A model of one DFT; axis is negative, as the last axis holds parts."""
    net = Net(*shape)
    by_input = [net.numbers(axis, dtype=np.int64)] if opset >= 20 else []
    given = [] if length is None and not by_input else ["" if length is None else net.numbers(length, dtype=np.int64)]
    attributes = {} if by_input else {"axis": axis % len(shape)}
    net.node("DFT", "x", *given, *by_input, name="back", inverse=1, onesided=1, **attributes)
    return net.model(opset=opset)


@pytest.mark.parametrize("opset", [17, 20])
@pytest.mark.parametrize("axis", [-2, -3])
@pytest.mark.parametrize("length", [None, 8, 9, 6, 12, 1, 2])
def test_the_inverse_of_half_a_spectrum_is_a_real_signal(length: int | None, axis: int, opset: int) -> None:
    """Bins beyond the half of the length are cut off, and missing ones are zeros."""
    x = normal(3, 5, 5, 2)
    model = inverse(x.shape, length, axis, opset)
    (found,) = referred(model, {"x": x})
    wanted = np.fft.irfft(x[..., 0].astype(np.float64) + 1j * x[..., 1], length, axis=axis + 1)
    np.testing.assert_allclose(found, wanted[..., None], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [None, 8, 9])
def test_halves_of_their_length_are_those_of_onnxruntime(length: int | None) -> None:
    x = normal(3, 5, 2)
    assert_as_onnxruntime(inverse(x.shape, length, -2, 20), {"x": x})


def test_half_a_spectrum_has_two_parts() -> None:
    with pytest.raises(UsageError, match=r"back .*one half of a spectrum of \[3, 5, 1\]; allowed: .* last extent is 2"):
        lowered(inverse((3, 5, 1), 8, -2, 20))
