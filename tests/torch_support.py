"""Models, a clock and fixtures of the tests of `schedsearch.torch`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-integrations installs it")

import schedsearch.torch as sst  # noqa: E402
from schedsearch.torch.comparison.timing import Candidate  # noqa: E402
from schedsearch.torch.layers.kernel_op import Call  # noqa: E402

nn = torch.nn


class Clock:
    """Says that kernels and networks take 1 us, or what is given for their name, and PyTorch `torch_us`; every call is run
    once."""

    def __init__(self, torch_us: float = 3.0, **others_us: float) -> None:
        self.us, self.asked = {"PyTorch": torch_us, **others_us}, 0

    def ns(self, runs: Candidate) -> float:
        runs[-1]()
        self.asked += 1
        return 1000.0 * self.us.get(runs.name.replace(" ", "_"), 1.0)


class Residual(nn.Module):  # type: ignore[misc, name-defined]
    """A block of ResNet with its batch norms."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.relu(y)


def small() -> Any:
    """A convolution with its batch norm and activation."""
    return prepared(nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)))


def prepared(model: Any) -> Any:
    """With batch norms that do something, in evaluation mode and channels_last."""
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for parameter, low, high in ((module.weight, 0.5, 2), (module.bias, -1, 1), (module.running_mean, -1, 1)):
                nn.init.uniform_(parameter, low, high)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return model.eval().to(memory_format=torch.channels_last)


class Scattered(nn.Module):  # type: ignore[misc, name-defined]
    """The first channel of images of 6 x 6 with pixels multiplied by others at places, which schedsearch does not do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.arange(36).reshape(1, 1, 6, 6) % 5)
        self.register_buffer("factors", torch.linspace(0.5, 2, 36).reshape(1, 1, 6, 6))

    def forward(self, x: Any) -> Any:
        return torch.scatter_reduce(x, 3, self.places, self.factors, "prod")


def image(*shape: int) -> Any:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(*(shape or (1, 8, 6, 6)), generator=generator).contiguous(memory_format=torch.channels_last)


@pytest.fixture(scope="session")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torch") / "records.db"


@pytest.fixture
def optimize(db: Path) -> Callable[..., Any]:
    """`optimize_` with kernels in their default configuration, which are always faster."""

    def call(model: Any, example: Any, **options: Any) -> Any:
        return sst.optimize_(model, example, **{"db": db, "allow": ("default",), "timer": Clock(), **options})

    return call


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that kernels computed, in order."""
    found: list[str] = []
    compute = Call.__call__

    def keep(self: Call, arrays: Any) -> Any:
        found.append(self.workload.op)
        return compute(self, arrays)

    monkeypatch.setattr(Call, "__call__", keep)
    return found


@pytest.fixture
def without_autograd() -> Iterator[None]:
    """Neither gradients nor what an earlier test compiled."""
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def close(got: Any, expected: Any) -> bool:
    return got.shape == expected.shape and float((got - expected).abs().max()) < 1e-5 * float(expected.abs().max())
