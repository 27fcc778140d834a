"""From a fresh clone to a measured speed-up of a model of torchvision, in one command.

    pip install ".[cu13,network,torch]" torchvision
    python examples/pytorch/faster_model.py mobilenet_v2 --batch 1 --minutes 3

The model is tuned for its shapes on this machine and then timed, as PyTorch runs it best and with our kernels. A second run
with the same --db starts from the records of the first. Without torchvision a small network that is defined here takes the
place of the model, and without a GPU of CUDA the CPU runs it, in float32:

    pip install ".[network,torch]"
    python examples/pytorch/faster_model.py --minutes 1 --size 64
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import schedsearch.torch as sst

Call = Callable[[], Any]


class Separable(nn.Module):
    """A residual block of MobileNet's kind: a depthwise convolution, then one of single pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.pointwise = nn.Conv2d(channels, channels, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.depthwise(x)))
        return x + self.bn2(self.pointwise(y))


def stand_in(channels: int = 32, blocks: int = 6) -> nn.Module:
    """A small classifier, for machines without torchvision."""
    stem = [nn.Conv2d(3, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return nn.Sequential(*stem, *(Separable(channels) for _ in range(blocks)), *head)


def model_of(name: str) -> nn.Module:
    """A model of torchvision with random weights, or what stands in for it."""
    try:
        import torchvision
    except ImportError:
        print(
            f"torchvision is not installed: a small network takes the place of {name}; for {name}: pip install torchvision"
        )
        return stand_in()
    model: nn.Module = torchvision.models.get_model(name, weights=None)
    return model


def captured(call: Call, device: str) -> Call:
    """A call as the replay of a CUDA graph; on a CPU the call itself."""
    if device == "cpu":
        return call
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def call_us(call: Call, device: str) -> float:
    """The median time of calls that follow one another."""
    times = []
    for _ in range(25):
        if device == "cpu":
            started = time.perf_counter()
            call()
            times.append((time.perf_counter() - started) * 1e6)
            continue
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(10):
            call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) * 100)
    return statistics.median(times[5:])


class Comparison:
    """One model on one input: PyTorch's times, then ours."""

    def __init__(self, options: argparse.Namespace, device: str) -> None:
        self.options, self.device = options, device
        dtype = torch.float16 if device == "cuda" else torch.float32
        self.model = model_of(options.model).eval().to(device, dtype).to(memory_format=torch.channels_last)
        x = torch.randn(options.batch, 3, options.size, options.size, device=device, dtype=dtype)
        self.x = x.to(memory_format=torch.channels_last)

    def us(self, model: Callable[[torch.Tensor], Any]) -> float:
        return call_us(captured(lambda: model(self.x), self.device), self.device)

    def torch_us(self) -> float:
        """PyTorch's best."""
        times = {"as it is": self.us(self.model)}
        if self.options.compile:
            times["compiled"] = self.us(torch.compile(self.model))
        where = "in CUDA graphs" if self.device == "cuda" else "on the CPU"
        print(f"PyTorch, {where}:", ", ".join(f"{what} {us:.1f} us" for what, us in times.items()), flush=True)
        return min(times.values())

    def network_us(self) -> tuple[float, str] | None:
        """The model as one network of ours or several, where they are faster than what Inductor makes of it."""
        reports: list[sst.Report] = []
        minutes = self.options.minutes
        found = {"db": self.options.db, "report": reports.append, "layers": False, "tune": minutes > 0}
        fast = torch.compile(self.model, backend="schedsearch", options={**found, "tune_s": 60 * minutes or 1.0})
        fast(self.x)
        print(reports[-1])
        network = reports[-1].network
        if network is None or not network.served:
            return None
        if network.parts:
            return self.us(fast), f"networks for {sum(part.served for part in network.parts)} parts"
        return call_us(lambda: fast(self.x), self.device), "the whole network"

    def layers_us(self) -> tuple[float, str]:
        """The model with kernels for those of its layers where they are faster."""
        options = self.options
        tuning = {"tune": options.minutes > 0, "tune_s": 60 * options.minutes or 1.0, "trials": options.trials}
        print(report := sst.optimize_(self.model, self.x, db=options.db, **tuning))
        if not report.swapped:
            return float("inf"), "no layer"
        return self.us(torch.compile(self.model) if options.compile else self.model), f"{len(report.swapped)} layers"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="mobilenet_v2", help="of torchvision.models")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--minutes", type=float, default=3.0, help="for tuning; 0: the records of --db serve")
    parser.add_argument("--trials", type=int, default=16, help="configurations to try for each layer")
    parser.add_argument("--db", default="records.db")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: a GPU of CUDA, if there is one")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="without torch.compile: layers only")
    options = parser.parse_args(arguments)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")

    torch.backends.cudnn.benchmark = True
    with torch.no_grad():
        comparison = Comparison(options, device)
        best_us = comparison.torch_us()
        found = comparison.network_us() if options.compile else None
        ours_us, what = found or comparison.layers_us()
    if ours_us == float("inf"):
        print(f"schedsearch: {what} is faster with a kernel, so the model runs as before, in {best_us:.1f} us")
    else:
        print(f"schedsearch, {what}: {ours_us:.1f} us, {best_us / ours_us:.2f} times as fast as PyTorch's best")


if __name__ == "__main__":
    main()
