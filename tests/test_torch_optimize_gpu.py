"""`optimize_` and the backend on a GPU: formats, CUDA graphs, streams, torch.compile and the measured choice.

Kernels are those of default configurations, so that nothing needs to be tuned; where it says so the clock is made up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch_support import Clock, Residual, prepared  # noqa: E402

import schedsearch.torch as sst  # noqa: E402
from schedsearch.torch.compiler.backend import schedsearch  # noqa: E402
from schedsearch.torch.layers.report import Report  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.integrations]
nn = torch.nn
CHANNELS = 32


@pytest.fixture(autouse=True)
def _without_autograd() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad(), sst.use(None):
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu") / "records.db"


@pytest.fixture
def optimize(db: Path) -> Callable[..., Any]:
    """`optimize_` with default kernels that are always faster."""

    def call(model: Any, example: Any, **options: Any) -> Any:
        return sst.optimize_(model, example, **{"db": db, "allow": ("default",), "timer": Clock(), **options})

    return call


class Net(nn.Module):  # type: ignore[misc, name-defined]
    """A residual block, a depthwise layer and a pixel shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Residual(CHANNELS)
        self.depthwise = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS), nn.ReLU6())
        self.up = nn.Sequential(nn.Conv2d(CHANNELS, 64, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, x: Any) -> Any:
        return self.up(self.depthwise(self.block(x)))


def net(dtype: Any = torch.float16, memory: Any = torch.channels_last) -> Any:
    return prepared(Net()).to("cuda", dtype).to(memory_format=memory)


def image(dtype: Any = torch.float16, memory: Any = torch.channels_last, batch: int = 1) -> Any:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(batch, CHANNELS, 28, 28, generator=generator)
    return x.to("cuda", dtype).contiguous(memory_format=memory)


def error(model: Any, x: Any, got: Any) -> float:
    """The largest difference from the model in float32, over the largest magnitude."""
    import copy

    plain = sst.revert_(copy.deepcopy(model)).float()
    torch.backends.cudnn.allow_tf32 = False
    try:
        exact = plain(x.float())
    finally:
        torch.backends.cudnn.allow_tf32 = True
    return float((got.float() - exact).abs().max() / exact.abs().max())


TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.float32: 5e-3}


@pytest.mark.parametrize("memory", [torch.channels_last, torch.contiguous_format], ids=["channels_last", "contiguous"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_every_format_computes_what_pytorch_computes(optimize: Any, dtype: Any, memory: Any) -> None:
    model, x = net(dtype, memory), image(dtype, memory)
    expected = model(x)
    report = optimize(model, x)
    got = model(x)
    assert report.swapped, str(report)
    assert error(model, x, got) < TOLERANCE[dtype] and got.stride() == expected.stride(), str(report)


def test_the_pixel_shuffle_belongs_to_its_convolution(optimize: Any) -> None:
    model, x = net(), image()
    kernels = {layer.name: layer.kernel for layer in optimize(model, x).swapped}
    assert kernels["up.0"].endswith("NHWC->NCHW+bias+depth_to_space(block=2, mode=CRD)") and "up.1" not in kernels
    assert kernels["block.conv2"].endswith("NHWC+bias+scale_shift+residual+relu")


def test_a_shuffle_between_convolutions_stays_in_channels_last(optimize: Any) -> None:
    layers = nn.Conv2d(CHANNELS, 64, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(16, CHANNELS, 3, padding=1)
    model, x = prepared(nn.Sequential(*layers)).to("cuda", torch.float16), image()
    expected = model(x)
    kernels = {layer.name: layer.kernel for layer in optimize(model, x).swapped}
    assert set(kernels) == {"0", "2"} and not any("NCHW" in kernel for kernel in kernels.values())
    got = model(x)
    assert error(model, x, got) < 5e-3 and got.stride() == expected.stride()


def test_a_captured_graph_sees_new_images_and_new_weights(optimize: Any) -> None:
    model, x = net(), image()
    optimize(model, x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x)
    x.mul_(-1)
    model.block.conv1.weight.mul_(2)
    model.block.bn1.running_mean.add_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert error(model, x, y) < 5e-3


def test_calls_on_other_streams_and_after_half_take_the_right_way(optimize: Any) -> None:
    model, x = net(torch.float32), image(torch.float32)
    optimize(model, x)
    model.half()
    assert torch.equal(model(x.half()), model.forward.original(x.half()))
    optimize(model, x.half())
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for stream in streams * 3:
        with torch.cuda.stream(stream):
            results.append(model(x.half()))
    torch.cuda.synchronize()
    assert all(torch.equal(each, results[0]) for each in results) and error(model, x.half(), results[0]) < 5e-3


def test_both_sides_are_measured_in_cuda_graphs(optimize: Any) -> None:
    report = optimize(net(), image(), timer=None)
    measured = [layer for layer in report.layers if layer.ours_us is not None]
    assert measured and all(0.5 < layer.ours_us < 1000 and 0.5 < layer.torch_us < 1000 for layer in measured)
    assert all(layer.swapped == (layer.ours_us <= 0.98 * layer.torch_us) for layer in measured)


def test_inductor_compiles_an_optimized_model_to_one_graph(optimize: Any) -> None:
    model, x = net(), image()
    optimize(model, x)
    compiled = torch.compile(model, fullgraph=True)
    assert error(model, x, compiled(x)) < 5e-3
    model.block.bn2.bias.add_(1)
    assert error(model, x, compiled(x)) < 5e-3


def test_a_network_serves_a_compiled_graph(db: Path) -> None:
    model, x = net(), image()
    reports: list[Report] = []
    options = {"db": db, "allow": ("default",), "timer": Clock(), "layers": False, "report": reports.append}
    fast = torch.compile(model, backend=schedsearch, options=options)
    assert error(model, x, fast(x)) < 5e-3
    assert reports[-1].network is not None and reports[-1].network.served, str(reports[-1])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = fast(2 * x)
    torch.cuda.synchronize()
    assert error(model, 2 * x, y) < 5e-3
    model.up[0].weight.mul_(2)
    assert error(model, x, fast(x)) < 5e-3 and not reports[-1].network.served


def test_depthwise_layers_are_trained(db: Path) -> None:
    model = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS, bias=False), nn.ReLU())
    model = model.cuda().to(memory_format=torch.channels_last)
    x, reports = image(torch.float32, batch=4), []
    options = {"db": db, "allow": ("default",), "timer": Clock(), "report": reports.append}
    fast = torch.compile(model, backend=schedsearch, options=options)
    gradients = []
    with torch.enable_grad():
        for call in (fast, model):
            model.zero_grad()
            call(x).square().sum().backward()
            gradients.append(model[0].weight.grad.clone())
    assert reports[0].layers[0].swapped
    assert float((gradients[0] - gradients[1]).abs().max() / gradients[1].abs().max()) < 1e-2  # PyTorch may use TF32
