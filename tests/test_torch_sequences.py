"""Depthwise convolutions over time in models: `optimize_` and torch.compile find every way in which they are written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-integrations installs it")

from torch_support import Clock  # noqa: E402

import schedsearch.torch as sst  # noqa: E402
from schedsearch.torch.compiler import training  # noqa: E402

pytestmark = pytest.mark.integrations
nn, functional = torch.nn, torch.nn.functional


class Filter(nn.Module):  # type: ignore[misc, name-defined]
    """A causal filter, written as `form` says."""

    def __init__(self, form: Callable[[Any, Any], Any], padding: Any = 0, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(8, 8, 4, groups=8, padding=padding, **options)
        self.form = form

    def forward(self, x: Any) -> Any:
        return self.form(self.conv, x)


FORMS: dict[str, tuple[Callable[[Any, Any], Any], Any, str]] = {
    "both sides padded, then a slice": (lambda conv, x: functional.silu(conv(x)[..., : x.shape[2]]), 3, "NCT+bias+silu"),
    "a slice from the end": (lambda conv, x: functional.silu(conv(x)[:, :, :-3]), 3, "NCT+bias+silu"),
    "a slice behind the activation": (lambda conv, x: functional.silu(conv(x))[:, :, : x.shape[2]], 3, "NCT+bias+silu"),
    "padded on the left": (lambda conv, x: functional.silu(conv(functional.pad(x, (3, 0)))), 0, "NCT+bias+silu"),
    "not causal": (lambda conv, x: conv(x), "same", "pad(1,2) f32 NCT+bias"),
    "channels last": (
        lambda conv, x: functional.silu(conv(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2) * 1.0,
        3,
        "NTC+bias+silu",
    ),
    "a slice that cuts more": (lambda conv, x: conv(x)[:, :, :5], 3, "pad(3,3) f32 NCT+bias"),
}


@pytest.fixture(scope="module")
def optimized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any, Any], Any]:
    """`optimize_` with kernels that are built here, once for all tests."""
    db: Path = tmp_path_factory.mktemp("sequences") / "none.db"
    return lambda model, x: sst.optimize_(model, x, db=db, allow=("default",), timer=Clock(), progress=False)


@pytest.mark.parametrize("name", FORMS)
def test_optimize_finds_it_in_every_form(optimized: Any, name: str) -> None:
    form, padding, words = FORMS[name]
    model = Filter(form, padding).eval()
    x = torch.randn(2, 8, 21)
    x = x.transpose(1, 2).contiguous() if name == "channels last" else x
    with torch.no_grad():
        expected = model(x)
        report = optimized(model, x)
        (layer,) = report.layers
        assert layer.swapped and layer.name == "conv" and words in layer.kernel, str(report)
        torch.testing.assert_close(model(x), expected)
        model.conv.weight.mul_(2)  # weights are those of the module
        assert not torch.allclose(model(x), expected)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a stride": (dict(stride=2), "its stride over time is 2; allowed: 1"),
    "several outputs of a channel": (dict(out_channels=16), "it makes 16 channels of 8; allowed: as many"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_computes_is_left_with_a_reason(optimized: Any, name: str) -> None:
    change, words = REFUSED[name]
    model = nn.Sequential(nn.Conv1d(**dict(in_channels=8, out_channels=8, kernel_size=4, groups=8) | change)).eval()
    (layer,) = optimized(model, torch.randn(2, 8, 21)).layers
    assert not layer.swapped and words in layer.reason


def test_a_value_that_is_read_twice_remains(optimized: Any) -> None:
    model = Filter(lambda conv, x: (y := conv(x), y[:, :, :21] * functional.silu(y)[:, :, 3:])[1], 3).eval()
    x = torch.randn(2, 8, 21)
    with torch.no_grad():
        expected = model(x)
        (layer,) = optimized(model, x).layers
        assert layer.kernel.endswith("pad(3,3) f32 NCT+bias")
        torch.testing.assert_close(model(x), expected)


def test_a_write_in_between_keeps_the_padding(optimized: Any) -> None:
    def form(conv: Any, x: Any) -> Any:
        x = x * 1.0
        padded = functional.pad(x, (3, 0))
        x.add_(1.0)
        return conv(padded)

    model, x = Filter(form).eval(), torch.randn(2, 8, 21)
    with torch.no_grad():
        expected = model(x)
        (layer,) = optimized(model, x).layers
        assert "pad(0,0)" in layer.kernel
        torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("name", ["both sides padded, then a slice", "padded on the left", "channels last"])
def test_a_step_of_training_takes_the_causal_function(name: str) -> None:
    form, padding, _ = FORMS[name]
    model, x = Filter(form, padding), torch.randn(2, 8, 21)
    x = (x.transpose(1, 2).contiguous() if name == "channels last" else x).requires_grad_()
    wanted, rows = [x, *model.parameters()], []

    def compiled(graph: Any, inputs: Any) -> Any:
        rows.extend(training.swap_depthwise(graph.graph, Clock(), 1 << 20))
        graph.recompile()
        return graph.forward

    torch._dynamo.reset()
    with sst.use(None):
        expected = torch.autograd.grad(model(x).square().sum(), wanted)
        run = torch.compile(model, backend=compiled, fullgraph=True)
        found = torch.autograd.grad(run(x).square().sum(), wanted)
    torch._dynamo.reset()
    (row,) = rows
    assert row.swapped and "forward and backward" in row.kernel
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
