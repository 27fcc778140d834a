"""Losses of classes beside PyTorch in float64. ONNX's own cases are in test_onnx_nodes.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
torch = pytest.importorskip("torch")

from compared_models import normal, referred  # noqa: E402
from onnx import TensorProto, helper  # noqa: E402

import schedsearch  # noqa: E402


def model_of(op: str, *, is_weighted: bool = False, **given: Any) -> Any:
    info = helper.make_tensor_value_info
    inputs = [info("scores", TensorProto.FLOAT, [3, 5, 2, 4]), info("classes", TensorProto.INT64, [3, 2, 4])]
    inputs += [info("weights", TensorProto.FLOAT, [5])] if is_weighted else []
    node = helper.make_node(op, [each.name for each in inputs], ["loss"], name="loss", **given)
    shape = [3, 2, 4] if given["reduction"] == "none" else []
    graph = helper.make_graph([node], "net", inputs, [info("loss", TensorProto.FLOAT, shape)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def inputs_of(*, is_weighted: bool, ignored: int | None) -> dict[str, Any]:
    classes = np.random.default_rng(1).integers(0, 5, (3, 2, 4))
    if ignored is not None:
        classes[:, 0, ::2] = ignored
    weights = {"weights": np.abs(normal(5, seed=2))} if is_weighted else {}
    return {"scores": normal(3, 5, 2, 4), "classes": classes, **weights}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [None, -100, 2])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("op", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_a_loss_is_that_of_pytorch(op: str, is_weighted: bool, ignored: int | None, reduction: str) -> None:
    inputs = inputs_of(is_weighted=is_weighted, ignored=ignored)
    given = {"reduction": reduction, **({} if ignored is None else {"ignore_index": ignored})}
    function = torch.nn.functional.cross_entropy if op.startswith("Softmax") else torch.nn.functional.nll_loss
    scores, classes, *weights = (torch.from_numpy(each) for each in inputs.values())
    wanted = function(scores.double(), classes, *(each.double() for each in weights), **given)
    (found,) = referred(model_of(op, is_weighted=is_weighted, **given), inputs)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.long  # builds a network
def test_a_network_with_a_loss_runs_on_the_cpu(tmp_path: Path) -> None:
    model = model_of("SoftmaxCrossEntropyLoss", is_weighted=True, reduction="mean", ignore_index=-1)
    onnx.save(model, tmp_path / "loss.onnx")
    inputs = inputs_of(is_weighted=True, ignored=-1)
    with schedsearch.build(tmp_path / "loss.onnx", target="cpu", db=tmp_path / "none.db") as net:
        found = net.evaluate(inputs)["loss"]
    scores, classes, weights = (torch.from_numpy(each) for each in inputs.values())
    wanted = torch.nn.functional.cross_entropy(scores.double(), classes, weights.double(), ignore_index=-1)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5)
