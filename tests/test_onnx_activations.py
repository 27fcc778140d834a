"""Activations of ONNX that are exponential functions: small, large and ordinary numbers, beside NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import schedsearch

Array = np.ndarray[Any, Any]
SELU = (1.67326319217681884765625, 1.05070102214813232421875)  # alpha and gamma that ONNX names


def elu(x: Array, alpha: float) -> Array:
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


def softplus(x: Array) -> Array:
    return np.logaddexp(0, x)


CASES: list[tuple[str, dict[str, float], Callable[[Array], Array]]] = [
    ("Elu", {}, lambda x: elu(x, 1.0)),
    ("Elu", {"alpha": 2.5}, lambda x: elu(x, 2.5)),
    ("Selu", {}, lambda x: SELU[1] * elu(x, SELU[0])),
    ("Selu", {"alpha": 0.5, "gamma": 3.0}, lambda x: 3.0 * elu(x, 0.5)),
    ("Celu", {"alpha": 2.0}, lambda x: np.maximum(x, 0) + 2.0 * np.expm1(np.minimum(x, 0) / 2.0)),
    ("Softplus", {}, softplus),
    ("Mish", {}, lambda x: x * np.tanh(softplus(x))),
    ("Swish", {"alpha": 1.75}, lambda x: x * np.exp(-np.logaddexp(0, -1.75 * x))),
]


@pytest.mark.parametrize(("op", "attributes", "exact"), CASES, ids=[f"{op} {attributes}" for op, attributes, _ in CASES])
@pytest.mark.mostly_long(8)
def test_all_magnitudes_agree_with_float64(
    op: str, attributes: dict[str, float], exact: Callable[[Array], Array], tmp_path: Path
) -> None:
    """exp(100) is beyond float32, so that a formula that takes it would give infinities or NaNs."""
    x = np.concatenate([np.linspace(-6, 6, 97), [0.0, 1e-3, -1e-3, 30.0, -30.0, 100.0, -100.0, 1e4, -1e4]]).astype(
        np.float32
    )
    node = helper.make_node(op, ["x"], ["y"], "activation", **attributes)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name in "xy"]
    graph = helper.make_graph([node], "activation", values[:1], values[1:])
    opset = 24 if op == "Swish" else 18
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]), tmp_path / "m.onnx")
    with schedsearch.build(tmp_path / "m.onnx", target="cpu", db=tmp_path / "none.db") as net:
        np.testing.assert_allclose(net(x), exact(x.astype(np.float64)), rtol=2e-6, atol=5e-7)
