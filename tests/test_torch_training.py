"""What a training step of a graph needs tuned is what its operators look for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-integrations installs it")

from torch_support import Clock, prepared  # noqa: E402

import schedsearch.torch as sst  # noqa: E402
from schedsearch.torch.compiler import backend, inductor, training  # noqa: E402

pytestmark = pytest.mark.integrations
nn = torch.nn


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with sst.use(None):
        yield
    torch._dynamo.reset()


class Depthwise(nn.Sequential):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(8, 8, 3, 2, 1, groups=8, bias=False),  # whose input needs no gradient
            nn.ReLU(),
            nn.Conv2d(8, 16, (3, 5), padding="same", dilation=2, groups=8),
            nn.Conv2d(16, 16, 3, padding=(1, 0), groups=16, bias=False),
            nn.Conv2d(16, 16, 3, padding=(1, 0), groups=16, bias=False),
        )


def step(model: Any, x: Any) -> None:
    model(x).square().sum().backward()


def test_workloads_of_a_graph_are_those_of_its_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def compiled(graph: Any, inputs: Any) -> Any:
        found.append(training.workloads(graph.graph))
        training.swap_depthwise(graph.graph, Clock(), 1 << 20)
        graph.recompile()
        return graph.forward

    x = torch.randn(2, 8, 9, 9).contiguous(memory_format=torch.channels_last)
    model = prepared(Depthwise()).train()
    with sst.use(tmp_path / "none.db", allow=("default",)):
        step(torch.compile(model, backend=compiled, fullgraph=True), x)
        asked = {each.kernel.workload for each in sst.served() if each.kernel is not None}
    wanted = {workload for _, workload in found[0]}
    assert {each.params["direction"] for each in asked} == {"forward", "grad_weight", "grad_both"}
    assert asked <= wanted
    extra = {each.params["direction"] for each in wanted - asked}
    assert extra <= {"grad_input", "grad_weight"}  # what one kernel for both gradients is compared with


def test_a_step_is_tuned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "compiled", lambda graph, inputs, mode: graph.forward)
    model, x = prepared(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False))).train(), torch.randn(1, 4, 5, 5)
    reports: list[Any] = []
    for _ in range(2):
        torch._dynamo.reset()
        options = {"db": tmp_path / "records.db", "tune": True, "trials": 1, "timer": Clock(), "report": reports.append}
        step(torch.compile(model, backend=backend.schedsearch, options=options), x)
    assert [each.notes for each in reports] == [
        ("tuned 2 layers",), ("every layer has a record; nothing was tuned",)
    ]  # fmt: skip
    assert all(each.swapped for each in reports)
