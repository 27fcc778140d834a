"""Host time of a call of `schedsearch.torch` beside PyTorch's own operator, in the same process.

    python benchmarks/torch_dispatch.py --db benchmark.db --out torch_dispatch.json

Needs a CUDA device and PyTorch. The layers are small, so that the device keeps up with the host. If the database has no
record of one, the rule-based default is built. Times are host microseconds per call of a loop that only enqueues (median of
rounds).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import common
import torch
from torch.nn import functional

import schedsearch.torch as sst

CALLS, ROUNDS = 1000, 15
Row = tuple[str, Callable[[], object]]


def host_us(calls: list[Callable[[], object]]) -> list[float]:
    """Median over rounds of the host time per call of each; a round times all of them in turns, with the device idle."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for place, call in enumerate(calls):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(CALLS):
                call()
            times[place].append((time.perf_counter() - started) / CALLS * 1e6)
    torch.cuda.synchronize()
    return [statistics.median(each) for each in times]


def convolution() -> list[Row]:
    x = torch.randn(1, 64, 7, 7, device="cuda").half().to(memory_format=torch.channels_last)
    weight = torch.randn(64, 64, 1, 1, device="cuda").half().to(memory_format=torch.channels_last)
    bias = torch.randn(64, device="cuda").half()
    residual = torch.randn_like(x)
    op, relu = torch.ops.schedsearch.conv2d.default, torch.relu_
    sst.conv2d(x, weight)
    kernel = sst.served()[-1].kernel
    assert kernel is not None
    return [
        ("conv2d: kernel(x, weight)", lambda: kernel(x, weight)),
        ("conv2d: torch.ops.schedsearch.conv2d", lambda: op(x, weight, None, None, None, "", 0.0, 0.0)),
        ("conv2d: sst.conv2d", lambda: sst.conv2d(x, weight)),
        ("conv2d: torch.nn.functional.conv2d", lambda: functional.conv2d(x, weight)),
        ("conv2d+bias+residual+relu: sst.conv2d", lambda: sst.conv2d(x, weight, bias, residual, activation="relu")),
        (
            "conv2d+bias+residual+relu: PyTorch, three calls",
            lambda: relu(functional.conv2d(x, weight, bias).add_(residual)),
        ),
    ]


def depthwise() -> list[Row]:
    x = torch.randn(1, 64, 14, 14, device="cuda").half().to(memory_format=torch.channels_last)
    weight = torch.randn(64, 1, 3, 3, device="cuda").half()
    trained = weight.clone().requires_grad_()
    image = x.clone().requires_grad_()
    dy = torch.randn_like(x)

    def step(convolve: Callable[..., torch.Tensor]) -> None:
        image.grad = trained.grad = None
        convolve(image, trained, padding=1).backward(dy)

    def plain(x: torch.Tensor, weight: torch.Tensor, padding: int) -> torch.Tensor:
        return functional.conv2d(x, weight, padding=padding, groups=64)

    return [
        ("depthwise: sst.depthwise_conv2d", lambda: sst.depthwise_conv2d(x, weight, padding=1)),
        ("depthwise: torch.nn.functional.conv2d", lambda: plain(x, weight, 1)),
        ("depthwise, forward and backward: sst.depthwise_conv2d", lambda: step(sst.depthwise_conv2d)),
        ("depthwise, forward and backward: torch.nn.functional.conv2d", lambda: step(plain)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", default="benchmark.db")
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    sst.use(options.db, allow=("exact", "default"))
    rows = [*convolution(), *depthwise()]
    rows.append(("torch.empty_strided of the output alone", lambda: torch.empty(1, 64, 7, 7, device="cuda")))
    times = host_us([call for _, call in rows])
    print(*sst.served(), sep="\n")
    print(common.table(("call", "host us"), [(name, f"{us:.2f}") for (name, _), us in zip(rows, times)]))
    common.write(options.out, {"rows": [{"call": name, "host_us": us} for (name, _), us in zip(rows, times)]})


if __name__ == "__main__":
    main()
