"""GridSample beside PyTorch in float64: what a network computes, and onnx's evaluator as networks are compared with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
torch = pytest.importorskip("torch")

from compared_models import Array, normal, referred  # noqa: E402
from onnx import TensorProto, helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from schedsearch.network_check.own_operators import of_opset  # noqa: E402

MODES = {"bilinear": (16, "bilinear"), "bicubic": (16, "bicubic"), "linear": (20, "bilinear"), "cubic": (20, "bicubic")}
_EVERY = pytest.mark.parametrize(
    ("mode", "padding", "aligned"),
    [(mode, padding, aligned) for mode in MODES for padding in ("zeros", "border", "reflection") for aligned in (0, 1)],
)


def model_of(mode: str, padding: str, aligned: int, size: tuple[int, int] = (5, 4)) -> Any:
    info = helper.make_tensor_value_info
    inputs = [info("x", TensorProto.FLOAT, [2, 3, *size]), info("grid", TensorProto.FLOAT, [2, 6, 7, 2])]
    options = {"mode": mode, "padding_mode": padding, "align_corners": aligned}
    node = helper.make_node("GridSample", ["x", "grid"], ["y"], name="sampled", **options)
    graph = helper.make_graph([node], "net", inputs, [info("y", TensorProto.FLOAT, [2, 3, 6, 7])])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", MODES[mode][0])], ir_version=8)


def inputs_of(*size: int) -> dict[str, Array]:
    """A third of the places lie outside of the image, some of them far away."""
    grid = np.random.default_rng(3).uniform(-1.5, 1.5, (2, 6, 7, 2)).astype(np.float32)
    grid[0, 0] *= 3
    return {"x": normal(2, 3, *size), "grid": grid}


def wanted(inputs: dict[str, Array], mode: str, padding: str, aligned: int) -> Array:
    x, grid = (torch.from_numpy(each).double() for each in inputs.values())
    options = {"mode": MODES[mode][1], "padding_mode": padding, "align_corners": bool(aligned)}
    return np.asarray(torch.nn.functional.grid_sample(x, grid, **options))


@_EVERY
@pytest.mark.parametrize("size", [(5, 4), (1, 2)])
def test_a_network_takes_the_pixels_of_pytorch(mode: str, padding: str, aligned: int, size: tuple[int, int]) -> None:
    inputs = inputs_of(*size)
    found = referred(model_of(mode, padding, aligned, size), inputs)[0]
    np.testing.assert_allclose(found, wanted(inputs, mode, padding, aligned), rtol=1e-4, atol=2e-5)


@_EVERY
def test_the_evaluator_that_networks_are_compared_with_does_too(mode: str, padding: str, aligned: int) -> None:
    """onnx 1.23's own differs with cubic weights at a border, and knows no names of opset 16."""
    inputs, model = inputs_of(5, 4), model_of(mode, padding, aligned)
    (found,) = ReferenceEvaluator(model, new_ops=of_opset(MODES[mode][0])).run(None, inputs)
    np.testing.assert_allclose(found, wanted(inputs, mode, padding, aligned), rtol=1e-4, atol=2e-5)
