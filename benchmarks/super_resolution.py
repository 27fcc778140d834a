"""A super-resolution network in one CUDA graph, compared with PyTorch: 627 GFLOP, 1x3x720x1280 in, 1x3x2880x5120 out, fp16.

    python benchmarks/super_resolution.py --db benchmark.db --trials 64 --out super_resolution.json

Needs a CUDA device and PyTorch. All convolutions are 3x3 with padding 1 and a bias:

    h = head(x)                                   3 -> 64
    y = h + conv(leaky_relu(conv(h), 0.1))        64 -> 64, twice: two residual blocks
    y = tail(y) + h                               64 -> 64
    y = pixel_shuffle(up1(y), 2)                  64 -> 128, 32 channels of twice the height and width
    y = pixel_shuffle(up2(y), 2)                  32 -> 64, 16 channels
    y = last(y)                                   16 -> 3

Here each convolution is one kernel. Additions, leaky_relu and pixel_shuffle (depth_to_space, mode CRD) are stages of their
epilogues, so there is no pass over memory between convolutions. Weights are random. The output is compared with PyTorch's
in float32. PyTorch runs the same network in channels_last, eager and with torch.compile in its default mode, both in a
CUDA graph.

`--plain` also tunes the two convolutions before pixel_shuffle without it, to show what it costs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import common

import schedsearch

if TYPE_CHECKING:
    import torch

SLOPE = 0.1  # of leaky_relu
SHUFFLE = {"depth_to_space": {"block": 2, "mode": "CRD"}}
WAY_LIMIT_S = 120.0  # of one way, compilation included


@dataclass(frozen=True)
class Layer:
    """A convolution with its epilogue. `reads` and `adds` name the layers whose outputs are its input and its residual; the
    network's input is `image`."""

    name: str
    reads: str
    workload: schedsearch.Workload
    adds: str = ""

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self.workload.epilogue)


def layers(height: int = 720, width: int = 1280, output_layout: str = "NHWC") -> list[Layer]:
    """The network for images of this size, in the order in which its layers run."""

    def conv(scale: int, c: int, k: int, *stages: Any, **further: Any) -> schedsearch.Workload:
        return schedsearch.Workload.conv2d(
            n=1, h=scale * height, w=scale * width, c=c, k=k, r=3, s=3, padding=1, epilogue=("bias", *stages), **further
        )

    found = [Layer("head", "image", conv(1, 3, 64))]
    for block in ("block1", "block2"):
        reads = found[-1].name
        found += [
            Layer(f"{block}.conv1", reads, conv(1, 64, 64, "leaky_relu")),
            Layer(f"{block}.conv2", f"{block}.conv1", conv(1, 64, 64, "residual"), adds=reads),
        ]
    return [
        *found,
        Layer("tail", "block2.conv2", conv(1, 64, 64, "residual"), adds="head"),
        Layer("up1", "tail", conv(1, 64, 128, SHUFFLE)),
        Layer("up2", "up1", conv(2, 32, 64, SHUFFLE)),
        Layer("last", "up2", conv(4, 16, 3, output_layout=output_layout)),
    ]


Weights = Mapping[str, "tuple[torch.Tensor, torch.Tensor]"]


def draw(network: list[Layer]) -> tuple[torch.Tensor, Weights]:
    """An image and (weight, bias) of each layer, in channels_last."""
    import torch

    random, memory = torch.Generator("cuda").manual_seed(0), torch.channels_last

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device="cuda")

    first = network[0].workload
    image = normal(1, first.c, first.h, first.w).half().to(memory_format=memory)
    weights = {}
    for layer in network:
        w = layer.workload
        weight = normal(w.k, w.c, w.r, w.s) * (0.5 / (w.c * w.r * w.s)) ** 0.5
        weights[layer.name] = weight.half().to(memory_format=memory), (0.1 * normal(w.k)).half()
    return image, weights


def forward(network: list[Layer], image: torch.Tensor, weights: Weights) -> torch.Tensor:
    """The network in PyTorch, in the format of the image."""
    from torch.nn import functional

    values = {"image": image}
    for layer in network:
        y = functional.conv2d(values[layer.reads], *weights[layer.name], padding=1)
        if "leaky_relu" in layer.stages:
            y = functional.leaky_relu(y, SLOPE)
        if layer.adds:
            y = y + values[layer.adds]
        values[layer.name] = functional.pixel_shuffle(y, 2) if "depth_to_space" in layer.stages else y
    return values[network[-1].name]


Kernels = Mapping[schedsearch.Workload, schedsearch.Kernel]


def ours(network: list[Layer], kernels: Kernels, image: torch.Tensor, weights: Weights) -> Callable[[], Any]:
    """All launches packed in advance, with outputs at fixed addresses."""
    values, steps = {"image": image}, []
    for layer in network:
        further = [values[layer.adds]] if layer.adds else []
        scalars = {"leaky_relu_slope": SLOPE} if "leaky_relu" in layer.stages else {}
        step = kernels[layer.workload].bind(values[layer.reads], *weights[layer.name], *further, **scalars)
        steps.append(step)
        values[layer.name] = step.y

    def call() -> Any:
        for step in steps:
            step()
        return steps[-1].y

    return call


def without_shuffle(workload: schedsearch.Workload) -> schedsearch.Workload:
    return workload.replace(epilogue=[stage for stage in workload.epilogue if stage.name != "depth_to_space"])


def tune(network: list[Layer], options: argparse.Namespace) -> tuple[dict[str, Any], Kernels]:
    """Tunes the layers. Returns their times and templates for the data file, and the best kernel of each workload."""
    workloads = list(dict.fromkeys(layer.workload for layer in network))
    shuffled = [workload for workload in workloads if without_shuffle(workload) != workload]
    plain = [without_shuffle(workload) for workload in shuffled] if options.plain else []
    started = time.perf_counter()
    summary = schedsearch.tune(
        [*workloads, *plain], options.db, target="cuda", trials=options.trials, time_s=options.time, seed=options.seed
    )
    kernels = {
        workload: schedsearch.compile(workload, options.db, target="cuda", allow=("exact",))
        for workload, task in zip([*workloads, *plain], summary.tasks)
        if task.best_ns is not None
    }
    us = {workload: (kernel.provenance.time_ns or 0) / 1e3 for workload, kernel in kernels.items()}
    rows = [
        {
            "layer": layer.name,
            "workload": layer.workload.label,
            "us": us[layer.workload],
            "plain_us": us.get(without_shuffle(layer.workload)) if layer.workload in shuffled else None,
            "template": kernels[layer.workload].provenance.template,
            "config": dict(kernels[layer.workload].config),
        }
        for layer in network
        if layer.workload in kernels
    ]
    missing = [layer.name for layer in network if layer.workload not in kernels]
    return {"tuning_s": time.perf_counter() - started, "layers": rows, "without_a_kernel": missing}, kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=64, help="trials per layer, including earlier runs with this --db")
    parser.add_argument("--time", type=float, help="seconds of tuning over all layers")
    parser.add_argument("--seed", type=int, default=0, help="of the tuner")
    parser.add_argument("--size", type=int, nargs=2, default=(720, 1280), metavar=("H", "W"), help="of the image")
    parser.add_argument("--output-layout", choices=("NHWC", "NCHW"), default="NHWC", help="of the last layer's output")
    parser.add_argument("--plain", action="store_true", help="also time the layers before pixel_shuffle without it")
    parser.add_argument("--db", default="benchmark.db")
    parser.add_argument("--out", help="JSON file to write; it is written after every way to compute the network")
    options = parser.parse_args()
    import torch
    import torch_conv2d as peers

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False  # of the reference
    torch.set_grad_enabled(False)
    network = layers(*options.size, options.output_layout)
    result, kernels = tune(network, options)
    result["gflop"] = sum(layer.workload.flops for layer in network) / 1e9
    cells = [
        (row["layer"], row["workload"], f"{row['us']:.1f}", f"{row['plain_us'] or 0:.1f}", row["template"])
        for row in result["layers"]
    ]
    print(common.table(("layer", "workload", "us", "plain us", "template"), cells), flush=True)
    total = sum(row["us"] for row in result["layers"])
    print(f"sum of the layers: {total:.1f} us; tuned in {result['tuning_s']:.0f} s", flush=True)
    common.write(options.out, result)

    image, weights = draw(network)
    truth = forward(network, image.float(), {name: (w.float(), b.float()) for name, (w, b) in weights.items()})
    torch._dynamo.reset()
    compiled = torch.compile(lambda image: forward(network, image, weights), fullgraph=True, dynamic=False)
    ways: dict[str, Callable[[], Callable[[], Any]]] = {
        "schedsearch": lambda: ours(network, kernels, image, weights),
        "eager": lambda: lambda: forward(network, image, weights),
        "torch_compile": lambda: lambda: compiled(image),
    }
    result["ways"] = []
    for name, make in ways.items():
        try:
            with peers.time_limit(WAY_LIMIT_S):
                call = make()
                row = {"way": name, "relative_error": peers.relative_error(call(), truth)}
                row["us"] = common.cold_graph_us([call])
        except Exception as error:  # torch.compile may raise anything; the other ways are still timed
            row = {"way": name, "error": f"{type(error).__name__}: {error}"[:500]}
        result["ways"].append(row)
        common.write(options.out, result)
        print(row, flush=True)
    times = {row["way"]: row["us"] for row in result["ways"] if "us" in row}
    mine = times.pop("schedsearch", None)
    if mine and times:
        result["ratio"] = min(times.values()) / mine
        common.write(options.out, result)
        rate = 1e-3 * result["gflop"] / (mine * 1e-6)
        print(f"{mine:.0f} us, {rate:.0f} TFLOP/s; {result['ratio']:.2f}x as fast as the fastest of PyTorch")


if __name__ == "__main__":
    main()
