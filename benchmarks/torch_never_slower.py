"""Whether the backend is ever slower than torch.compile, and whether `tune_s` is wall time until the first answer.

    python benchmarks/torch_never_slower.py --models shufflenet_v2_x1_0:1,densenet121:1 --tune 60 --db models.db
    python benchmarks/torch_never_slower.py --models densenet121:1 --tune 60 --db new.db --wall
    python benchmarks/torch_never_slower.py --models shufflenet_v2_x1_0:1 --tune 20 --db new.db --device cpu --size 64 --wall

Without --wall it compiles each model by PyTorch alone and by our backend, tuned for --tune seconds, and times both in turns:
calls from Python, and on a GPU replays of CUDA graphs. `ratio` is PyTorch's time over ours.

With --wall it prints the seconds until the first answer of the backend, of optimize_ and of schedsearch.build, each with a
database of its own.

Models are those of torchvision; without it the two named above are lookalikes: the same layers with random weights.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import schedsearch
import schedsearch.torch as sst

TURNS = 15


class Shuffle(nn.Module):
    """A unit of ShuffleNet V2 (Ma et al. 2018)."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        half, given = out // 2, channels if stride == 2 else channels // 2
        self.stride = stride
        self.short = nn.Sequential(*_depthwise(given, stride), *_pointwise(given, half)) if stride == 2 else nn.Identity()
        self.long = nn.Sequential(*_pointwise(given, half), *_depthwise(half, stride), *_pointwise(half, half))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (x, x) if self.stride == 2 else x.chunk(2, 1)
        y = torch.cat((self.short(first), self.long(second)), 1)
        n, c, h, w = y.shape
        return y.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def _pointwise(channels: int, out: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, out, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]


def _depthwise(channels: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False)
    return [convolution, nn.BatchNorm2d(channels)]


def _stem(out: int, kernel: int, padding: int) -> list[nn.Module]:
    first = [nn.Conv2d(3, out, kernel, 2, padding, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
    return [*first, nn.MaxPool2d(3, 2, 1)]


def shufflenet_v2_x1_0() -> nn.Module:
    layers, channels = _stem(24, 3, 1), 24
    for out, repeats in ((116, 4), (232, 8), (464, 4)):
        for place in range(repeats):
            layers.append(Shuffle(channels, out, 2 if place == 0 else 1))
            channels = out
    return nn.Sequential(*layers, *_pointwise(464, 1024), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000))


class Dense(nn.Module):
    """A layer of DenseNet (Huang et al. 2017)."""

    def __init__(self, channels: int, growth: int = 32) -> None:
        super().__init__()
        wide = 4 * growth
        self.layers = nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, wide, 1, bias=False),
            nn.BatchNorm2d(wide), nn.ReLU(inplace=True), nn.Conv2d(wide, growth, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, self.layers(x)), 1)


def densenet121() -> nn.Module:
    layers, channels = _stem(64, 7, 3), 64
    for block, count in enumerate((6, 12, 24, 16)):
        for _ in range(count):
            layers.append(Dense(channels))
            channels += 32
        norm = [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        if block < 3:
            norm += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
        layers += norm
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


LOOKALIKES: dict[str, Callable[[], nn.Module]] = {"shufflenet_v2_x1_0": shufflenet_v2_x1_0, "densenet121": densenet121}


def made(name: str, device: str) -> nn.Module:
    torch.manual_seed(0)
    try:
        import torchvision
    except ImportError:
        model = LOOKALIKES[name]()
    else:
        model = getattr(torchvision.models, name)(weights=None)
    dtype = torch.float32 if device == "cpu" else torch.float16
    return model.eval().to(device, dtype).to(memory_format=torch.channels_last)


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def in_turns(calls: dict[str, Callable[[], Any]], device: str) -> dict[str, float]:
    """Microseconds: the medians of turns, each of several calls that follow one another."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(TURNS + 2):
        for name, call in calls.items():
            started = time.perf_counter()
            for _ in range(10):
                call()
            if device != "cpu":
                torch.cuda.synchronize()
            if turn > 1:
                found[name].append((time.perf_counter() - started) * 1e5)
    return {name: statistics.median(times) for name, times in found.items()}


def compare(model: nn.Module, x: torch.Tensor, options: argparse.Namespace) -> None:
    reports: list[sst.Report] = []
    given = {"db": options.db, "tune": True, "tune_s": options.tune, "report": reports.append}
    ours, plain = torch.compile(model, backend="schedsearch", options=given), torch.compile(copy.deepcopy(model))
    for each in (plain, ours):
        each(x)
    print(*reports, sep="\n", flush=True)
    ways = {"called": {"PyTorch": lambda: plain(x), "ours": lambda: ours(x)}}
    if options.device != "cpu":
        ways["captured"] = {name: captured(call) for name, call in ways["called"].items()}
    for way, calls in ways.items():
        times = in_turns(calls, options.device)
        ratio = times["PyTorch"] / times["ours"]
        print(f"{way}: PyTorch {times['PyTorch']:.1f} us, ours {times['ours']:.1f} us, ratio {ratio:.3f}", flush=True)


def wall(model: nn.Module, x: torch.Tensor, options: argparse.Namespace) -> None:
    limit = 1.3 * options.tune

    def told(what: str, started: float, report: object) -> None:
        seconds = time.perf_counter() - started
        print(f"{what}: {seconds:.1f} s of {options.tune:.0f} s{'' if seconds <= limit else ': too long'}", flush=True)
        print(str(report)[:2000], flush=True)

    reports: list[object] = []
    started = time.perf_counter()
    given = {"db": f"{options.db}.backend", "tune": True, "tune_s": options.tune, "report": reports.append}
    torch.compile(model, backend="schedsearch", options=given)(x)
    told("torch.compile(backend='schedsearch')", started, reports[-1])
    started = time.perf_counter()
    report = sst.optimize_(copy.deepcopy(model), x, db=f"{options.db}.optimize", tune=True, tune_s=options.tune)
    told("optimize_", started, report)
    lines: list[str] = []
    started = time.perf_counter()
    schedsearch.build(
        model, x, db=f"{options.db}.build", tune_s=options.tune, target=options.device, say=lines.append
    ).close()
    told("schedsearch.build", started, "\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="shufflenet_v2_x1_0:1,densenet121:1", help="NAME:BATCH,...")
    parser.add_argument("--tune", type=float, default=60.0, help="seconds")
    parser.add_argument("--db", default="never_slower.db")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", type=int, default=224, help="of images")
    parser.add_argument("--wall", action="store_true", help="print wall times until the first answer")
    options = parser.parse_args()
    for case in options.models.split(","):
        name, _, batch = case.partition(":")
        model = made(name, options.device)
        x = torch.randn(int(batch or 1), 3, options.size, options.size).to(
            model.get_parameter(next(iter(model.state_dict()))).dtype
        )
        x = x.to(options.device).contiguous(memory_format=torch.channels_last)
        torch._dynamo.reset()
        print(f"== {case}", flush=True)
        with torch.no_grad():
            (wall if options.wall else compare)(model, x, options)


if __name__ == "__main__":
    main()
