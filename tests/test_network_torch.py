"""Torch modules become the same networks as ONNX files."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxscript")

from schedsearch.network.evaluate import evaluate
from schedsearch.network.graph import Node
from schedsearch.network.lower import lower
from schedsearch.network.model import ModelError
from schedsearch.network.torch_export import export


def block(torch: Any) -> Any:
    """A residual block with batch norms, and a classifier."""
    nn = torch.nn

    class Block(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
            self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
            self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

        def forward(self, x: Any) -> Any:
            value = torch.relu(x + self.second(self.first(x)))
            return self.head(torch.flatten(self.pool(value), 1))

    torch.manual_seed(1)
    module = Block()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.uniform_(-1, 1)
            part.running_var.uniform_(0.5, 2)
    return module


def test_a_module_becomes_a_network_with_its_batch_norms_folded(torch: Any) -> None:
    module, x = block(torch), torch.randn(2, 8, 6, 6)
    network = lower(export(module, x))
    workloads = [node.implementations[0] for node in network.nodes if isinstance(node, Node)]
    assert [(workload.op, *map(str, workload.params.get("epilogue", ()))) for workload in workloads] == [
        ("conv2d", "bias", "relu"), ("conv2d", "bias", "residual", "relu"), ("pool2d",), ("dense", "bias"),
    ]  # fmt: skip
    assert module.training
    with torch.no_grad():
        expected = module.eval()(x).numpy()
    (name,), (output,) = network.inputs, network.outputs
    found = evaluate(network, {name: x.numpy()})[output]
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_a_module_that_cannot_be_exported_is_refused_with_the_reason(torch: Any) -> None:
    class Branches(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            return x if x.sum() > 0 else x + 1

    with pytest.raises(ModelError, match=r"torch.export cannot read Branches: "):
        export(Branches(), torch.ones(2))


def test_an_operator_that_onnx_lacks_is_named_in_one_line(torch: Any) -> None:
    with pytest.raises(
        ModelError, match=r"AdaptiveMaxPool2d: No ONNX function found for .*aten.adaptive_max_pool2d"
    ) as caught:
        export(torch.nn.AdaptiveMaxPool2d((2, 3)), torch.ones(1, 8, 9, 7))
    assert "\n" not in str(caught.value)


# --- What a module returns ----------------------------------------------------------------------------------------------
def returning(torch: Any, result: Any) -> Any:
    class Module(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return result(x, self.linear(x))

    torch.manual_seed(0)
    return Module().eval()


RETURNED: dict[str, Any] = {
    "a scalar": lambda x, y: y.sum(),
    "a tuple with None": lambda x, y: (None, y, None),
    "a dictionary and a list": lambda x, y: {"a": y, "b": [x * 2, {"c": x - y}]},
    "its own input": lambda x, y: (x, y),
    "one tensor twice": lambda x, y: (y, y),
    "a view of its input": lambda x, y: (x.view(-1), y),
}


@pytest.mark.parametrize("name", RETURNED)
def test_tensors_in_any_collection_are_outputs_in_their_order(name: str, torch: Any) -> None:
    from torch.utils import _pytree

    module, x = returning(torch, RETURNED[name]), torch.randn(2, 4)
    with torch.no_grad():
        wanted = [each.numpy() for each in _pytree.tree_flatten(module(x))[0] if each is not None]
    network = lower(export(module, x))
    (given,) = network.inputs
    values = evaluate(network, {given: x.numpy()})
    for output, right in zip(network.outputs, wanted, strict=True):
        assert values[output].shape == right.shape
        np.testing.assert_allclose(values[output], right, rtol=1e-5, atol=1e-5)


def test_a_module_that_returns_other_things_than_tensors_is_refused_by_what_it_returns(torch: Any) -> None:
    for result, message in (
        (lambda x, y: (y, 3.5), "returns 3.5, of type float; allowed: tensors, None"),
        (lambda x, y: {"y": y, "rows": x.shape[0]}, "returns 2, of type int"),
        (lambda x, y: None, "returns no tensor"),
    ):
        with pytest.raises(ModelError, match=message):
            export(returning(torch, result), torch.randn(2, 4))
