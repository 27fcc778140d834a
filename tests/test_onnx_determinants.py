"""Determinants of small matrices beside NumPy in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from compared_models import normal, referred  # noqa: E402
from onnx import TensorProto, helper  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.network.model import ModelError  # noqa: E402


def model_of(*shape: int) -> Any:
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Det", ["x"], ["y"], name="det")], "net",
        [info("x", TensorProto.FLOAT, shape)], [info("y", TensorProto.FLOAT, shape[:-2])],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (3, 3), (4, 4), (5, 2, 2), (2, 3, 3, 3), (7, 4, 4)])
def test_a_determinant_is_that_of_numpy(shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    found = referred(model_of(*shape), {"x": x})[0]
    np.testing.assert_allclose(found, np.linalg.det(x.astype(np.float64)), rtol=1e-4, atol=1e-5)


def test_larger_matrices_are_refused() -> None:
    with pytest.raises(ModelError, match=r"det \(is of matrices of 5 x 5; allowed: square ones of up to 4 x 4"):
        referred(model_of(2, 5, 5), {"x": normal(2, 5, 5)})


@pytest.mark.long  # builds a network
def test_a_network_with_a_determinant_runs_on_the_cpu(tmp_path: Path) -> None:
    onnx.save(model_of(6, 3, 3), tmp_path / "det.onnx")
    x = normal(6, 3, 3)
    with schedsearch.build(tmp_path / "det.onnx", target="cpu", db=tmp_path / "none.db") as net:
        np.testing.assert_allclose(net.evaluate({"x": x})["y"], np.linalg.det(x.astype(np.float64)), rtol=1e-4, atol=1e-5)
