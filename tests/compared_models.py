"""What a model computes: by the references of the operators that it is lowered to, and by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir
import pytest

from schedsearch.network.evaluate import evaluate
from schedsearch.network.graph import Network
from schedsearch.network.lower import lower
from schedsearch.network.model import simplified

Array = np.ndarray[Any, Any]


def lowered(model: Any, **options: Any) -> Network:
    return lower(simplified(onnx_ir.from_proto(model), "the model"), **options)


def referred(model: Any, inputs: Mapping[str, Array], **options: Any) -> list[Array]:
    """The outputs by our references."""
    network = lowered(model, **options)
    values = evaluate(network, inputs)
    return [values[name] for name in network.outputs]


def run_by_onnxruntime(model: Any, inputs: Mapping[str, Array]) -> list[Array]:
    """The outputs by ONNX Runtime without its optimisations. Skips the test if it is missing."""
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: list[Array] = session.run(None, dict(inputs))
    return found


def assert_as_onnxruntime(model: Any, inputs: Mapping[str, Array], *, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    wanted = run_by_onnxruntime(model, inputs)
    for found, want in zip(referred(model, inputs), wanted, strict=True):
        assert found.shape == want.shape
        np.testing.assert_allclose(found.astype(np.float64), want.astype(np.float64), rtol=rtol, atol=atol)


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Array:
    found: Array = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    return found
