"""Constants that follow from shapes, wherever they are read, beside NumPy."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from compared_models import lowered, normal, referred  # noqa: E402
from onnx_support import Net  # noqa: E402


@pytest.mark.parametrize("k", [-1, 0, 2])
def test_an_identity_matrix_that_is_reduced_is_a_constant(k: int) -> None:
    net = Net(3, 5)
    net.node("Add", "x", net.node("ReduceSum", net.node("EyeLike", "x", k=k), net.row(0)))
    x = normal(3, 5)
    (found,) = referred(net.model(), {"x": x})
    np.testing.assert_allclose(found, x + np.eye(3, 5, k).sum(0), rtol=1e-6)
    assert len(lowered(net.model()).nodes) == 1


def test_an_identity_matrix_can_be_an_output_and_have_a_dtype_of_its_own() -> None:
    net = Net(2, 3)
    eye = net.node("EyeLike", "x", dtype=onnx.TensorProto.INT64)
    net.results = [net.node("Relu", "x"), eye]
    x = normal(2, 3)
    _, found = referred(net.model(), {"x": x})
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, np.eye(2, 3))


def test_a_constant_that_a_product_reads_can_be_an_output() -> None:
    net = Net(2)
    half = net.node("Constant", value=onnx.numpy_helper.from_array(np.float32(0.5)))
    net.results = [net.node("Mul", half, "x"), half]
    halves, found = referred(net.model(), {"x": np.array([1, 3], np.float32)})
    np.testing.assert_array_equal(halves, [0.5, 1.5])
    assert found == 0.5


def test_an_output_without_a_type_may_be_a_constant_that_others_read() -> None:
    net = Net(2, 3)
    diagonal = net.weight("diagonal", value=-1, dtype=np.int64)
    net.results = [net.node("Trilu", "x", diagonal, upper=0), diagonal]
    model = net.model()
    for port in model.graph.output:
        port.ClearField("type")
    x = normal(2, 3)
    below, found = referred(model, {"x": x})
    np.testing.assert_array_equal(below, np.tril(x, -1))
    assert found.dtype == np.int64
    assert found == -1


def test_columns_that_a_constant_mask_chooses_have_a_known_number() -> None:
    """As PyTorch writes x[:, mask]: the extents behind NonZero are open until the mask is folded."""
    net = Net(5, 4)
    mask = net.weight("mask", 4, value=[1, 0, 1, 1], dtype=np.bool_)
    places = net.node("Transpose", net.node("NonZero", mask), perm=[1, 0])
    net.node("Relu", net.node("Gather", "x", net.node("Squeeze", places, net.row(1)), axis=1))
    x = normal(5, 4)
    (found,) = referred(net.model(opset=17), {"x": x})
    np.testing.assert_array_equal(found, np.maximum(x[:, [0, 2, 3]], 0))
