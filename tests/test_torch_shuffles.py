"""Pixel shuffles of optimized models where PyTorch's return contiguous images, as on a GPU, whatever their input is.

Results keep PyTorch's strides. In between a shuffle writes what the convolutions behind it read.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-integrations installs it")

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch_support import Clock, close, image, prepared, without_autograd  # noqa: E402, F401

import schedsearch.torch as sst  # noqa: E402
from schedsearch.torch.layers import patterns  # noqa: E402
from schedsearch.torch.models.forward import Plan  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("without_autograd")]
nn = torch.nn
aten = torch.ops.aten
SHUFFLES = aten.pixel_shuffle.default, aten.pixel_unshuffle.default


class OnGpu(torch.fx.Interpreter):  # type: ignore[misc, name-defined]
    """Runs an exported graph on the CPU and notes each value as a GPU has it: in float16, contiguous if shuffled."""

    def run_node(self, node: Any) -> Any:
        value = super().run_node(node)
        if isinstance(value, torch.Tensor):
            value = value.contiguous() if node.target in SHUFFLES else value
            like = torch.empty_strided(value.shape, value.stride(), dtype=torch.float16, device="meta")
            node.meta["val"] = FakeTensor(FakeTensorMode(), like, torch.device("cuda", 0))
        return value


def layers(*modules: Any, memory: Any = torch.channels_last) -> list[str]:
    """The layers that a GPU has in a sequence of modules, which takes 8 channels: what each computes, or why not."""
    model, x = nn.Sequential(*modules).eval().to(memory_format=memory), image().contiguous(memory_format=memory)
    program = torch.export.export(model, (x,), strict=False)
    OnGpu(program.graph_module).run(*model.parameters(), x)
    found = patterns.find(program.graph)
    return [each.workload.label if isinstance(each, patterns.Layer) else each.reason for each in found]


# --- What a GPU computes ----------------------------------------------------------------------------------------------
def test_the_result_of_a_model_is_contiguous_as_that_of_pytorch() -> None:
    (label,) = layers(nn.Conv2d(8, 16, 3, padding=1), nn.PixelShuffle(2))
    assert label.endswith("f16 NHWC->NCHW+bias+depth_to_space(block=2, mode=CRD)")


def test_a_shuffle_keeps_channels_last_for_convolutions() -> None:
    last = nn.Conv2d(8, 8, 3, padding=1)
    for between in ((), (nn.ReLU(),), (nn.PReLU(8), nn.Hardtanh())):
        up, behind = layers(nn.Conv2d(8, 32, 3, padding=1), nn.PixelShuffle(2), *between, last)
        assert up.endswith("f16 NHWC+bias+depth_to_space(block=2, mode=CRD)") and behind.endswith("f16 NHWC+bias")
    alone, behind = layers(nn.Sigmoid(), nn.PixelUnshuffle(2), nn.Conv2d(32, 8, 1))
    assert alone.endswith("f16 NHWC") and behind.endswith("f16 NHWC+bias")


class ReadTwice(nn.Module):  # type: ignore[misc, name-defined]
    """A shuffled image that a convolution and something else read."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.up, self.last, self.read = nn.Conv2d(8, 32, 1), nn.Conv2d(8, 8, 1), read

    def forward(self, x: Any) -> Any:
        y = torch.nn.functional.pixel_shuffle(self.up(x), 2)
        return self.last(y), self.read(y)


@pytest.mark.parametrize("read", [lambda y: y, torch.relu, lambda y: y.mean(1), lambda y: y + 1])
def test_what_others_read_has_the_strides_of_pytorch(read: Any) -> None:
    up, behind = layers(ReadTwice(read))
    assert "f16 NHWC->NCHW+bias+depth_to_space" in up and behind.endswith("f16 NCHW->NHWC+bias")


def test_contiguous_models_stay_contiguous() -> None:
    modules = nn.Conv2d(8, 32, 1), nn.PixelShuffle(2), nn.Conv2d(8, 4, 1), nn.PixelShuffle(2)
    for label in layers(*modules, memory=torch.contiguous_format):
        assert "f16 NCHW+bias+depth_to_space" in label


def test_images_of_one_channel_have_the_format_of_the_rest() -> None:
    for memory, layout in ((torch.channels_last, "NHWC"), (torch.contiguous_format, "NCHW")):
        (up,) = layers(nn.Conv2d(8, 4, 1), nn.PixelShuffle(2), memory=memory)
        assert f"f16 {layout}+bias+depth_to_space" in up


def test_a_shuffle_that_changes_the_format_is_left_to_pytorch() -> None:
    assert layers(nn.Sigmoid(), nn.PixelShuffle(2)) == ["its input is in NHWC and its output in NCHW; allowed: the same"]


# --- Whole models -----------------------------------------------------------------------------------------------------
def contiguous_shuffle(x: Any, block: int) -> Any:
    n, c, h, w = x.shape
    parts = x.reshape(n, c // block**2, block, block, h, w).permute(0, 1, 4, 2, 5, 3)
    return parts.reshape(n, c // block**2, h * block, w * block).contiguous()


@pytest.fixture
def contiguous_shuffles() -> Iterator[None]:
    """Pixel shuffles on this CPU return contiguous images, as on a GPU."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):
        library.impl("pixel_shuffle", contiguous_shuffle, "CPU")
    yield
    library._destroy()


@pytest.fixture
def optimize(tmp_path: Path) -> Callable[..., Any]:
    def call(model: Any, x: Any) -> Any:
        return sst.optimize_(model, x, db=tmp_path / "records.db", allow=("default",), timer=Clock())

    return call


@pytest.mark.usefixtures("contiguous_shuffles")
def test_a_model_returns_the_strides_that_pytorch_returns(optimize: Any) -> None:
    ends = nn.Conv2d(8, 32, 3, padding=1), nn.PixelShuffle(2), nn.ReLU(), nn.Conv2d(8, 16, 1), nn.PixelShuffle(2)
    model, x = prepared(nn.Sequential(*ends)), image()
    expected = model(x)
    rows = {row.name: row for row in optimize(model, x).layers}
    got = model(x)
    assert close(got, expected) and got.is_contiguous() and got.stride() == expected.stride()
    assert [name for name, row in rows.items() if row.swapped] == ["0", "1", "3"] and "NHWC" in rows["3"].kernel
    assert rows["4"].reason == "its input is in NHWC and its output in NCHW; allowed: the same"


def test_a_model_that_fails_with_kernels_remains_as_it_was(optimize: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = prepared(nn.Sequential(nn.Conv2d(8, 8, 1), nn.PixelShuffle(2))), image()

    def fail(self: Plan, *given: Any) -> Any:
        raise RuntimeError("view size is not compatible with input tensor's size and stride\nSecond line")

    monkeypatch.setattr(Plan, "run", fail)
    report = optimize(model, x)
    reason = "the model fails with kernels: view size is not compatible with input tensor's size and stride"
    assert not report.swapped and report.notes[-1] == reason and {row.reason for row in report.layers} == {reason}
    assert "forward" not in vars(model) and close(model(x), model[1](model[0](x)))
