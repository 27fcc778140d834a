"""From a fresh clone to a measured speed-up of a model of torchvision, in one command.

    pip install ".[cu13,network,torch]" torchvision
    python examples/pytorch/faster_model.py mobilenet_v2 --batch 1 --minutes 3

The model is tuned for its shapes on this machine's GPU and then timed, as PyTorch runs it best and with our kernels. A
second run with the same --db starts from the records of the first.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torchvision

import schedsearch.torch as sst


def graph_us(call: Callable[[], Any]) -> float:
    """The time of a call in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return call_us(graph.replay)


def call_us(call: Callable[[], Any]) -> float:
    """The median time of calls that follow one another."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(25):
        first.record()
        for _ in range(10):
            call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) * 100)
    return statistics.median(times[5:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="mobilenet_v2", help="of torchvision.models")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--minutes", type=float, default=3.0, help="for tuning")
    parser.add_argument("--db", default="records.db")
    options = parser.parse_args()

    torch.backends.cudnn.benchmark = True
    model = torchvision.models.get_model(options.model, weights=None).eval().half().cuda()
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(options.batch, 3, options.size, options.size, device="cuda", dtype=torch.float16)
    x = x.to(memory_format=torch.channels_last)

    reports: list[sst.Report] = []
    tuning = {"tune": options.minutes > 0, "tune_s": 60 * options.minutes, "layers": False}
    with torch.no_grad():
        eager_us = graph_us(lambda: model(x))
        compiled = torch.compile(model)
        compiled_us = graph_us(lambda: compiled(x))
        print(f"PyTorch, in CUDA graphs: {eager_us:.1f} us, compiled {compiled_us:.1f} us", flush=True)

        found = {"db": options.db, "report": reports.append, **tuning}
        fast = torch.compile(model, backend="schedsearch", options=found)
        fast(x)
        print(reports[-1])
        network = reports[-1].network
        if network is not None and network.served:
            if network.parts:
                ours_us, what = graph_us(lambda: fast(x)), f"networks for {sum(part.served for part in network.parts)} parts"
            else:
                ours_us, what = call_us(lambda: fast(x)), "the whole network"
        else:
            print(report := sst.optimize_(model, x, db=options.db, tune=options.minutes > 0, trials=16))
            layered = torch.compile(model)
            ours_us, what = graph_us(lambda: layered(x)), f"{len(report.swapped)} layers"
    best_us = min(eager_us, compiled_us)
    print(f"schedsearch, {what}: {ours_us:.1f} us, {best_us / ours_us:.2f} times as fast as PyTorch's best")


if __name__ == "__main__":
    main()
