"""Host time of a call of `schedsearch.torch` beside PyTorch's own operator, in the same process.

    python benchmarks/torch_dispatch.py --db benchmark.db --out torch_dispatch.json
    python benchmarks/torch_dispatch.py --without-gpu --out torch_dispatch_cpu.json

Needs PyTorch, and a CUDA device unless `--without-gpu` puts a driver in its place that accepts launches and does nothing.
The layers are small, so that the device keeps up with the host. If the database has no record of one, the rule-based default
is built. Times are host microseconds per call of a loop that only enqueues (median of rounds). Without a GPU they are the
processor time of the calling thread, and PyTorch convolves a single pixel, which computes next to nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable

import common
import torch
from idle_driver import idle_driver
from torch.nn import functional

import schedsearch.torch as sst
from schedsearch.device.detect import detect

CALLS, ROUNDS = 1000, 15
Row = tuple[str, Callable[[], object]]


def host_us(calls: list[Callable[[], object]], device: str) -> list[float]:
    """Median over rounds of the host time per call of each; a round times all of them in turns, with the device idle."""
    times: list[list[float]] = [[] for _ in calls]
    wait, clock = (torch.cuda.synchronize, time.perf_counter) if device == "cuda" else (lambda: None, time.thread_time)
    for call in calls:
        call()
    for _ in range(ROUNDS):
        for place, call in enumerate(calls):
            wait()
            started = clock()
            for _ in range(CALLS):
                call()
            times[place].append((clock() - started) / CALLS * 1e6)
    wait()
    return [statistics.median(each) for each in times]


def convolution(device: str) -> list[Row]:
    dtype = torch.float16 if device == "cuda" else torch.float32

    def image(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype).to(memory_format=torch.channels_last)

    x, weight, residual = image(1, 64, 7, 7), image(64, 64, 1, 1), image(1, 64, 7, 7)
    bias = torch.randn(64, device=device).to(dtype)
    turns = itertools.cycle([(image(1, 64, 7, 7), image(64, 64, 1, 1)) for _ in range(16)])
    op, relu = torch.ops.schedsearch.conv2d, torch.relu_
    epilogue = "epilogue=bias,residual,relu"
    sst.conv2d(x, weight)
    kernel = sst.served()[-1].kernel
    assert kernel is not None
    theirs = (x, weight, bias, residual) if device == "cuda" else (image(1, 1, 1, 1),) * 4
    its_bias = bias if device == "cuda" else bias[:1]
    return [
        ("conv2d: kernel(x, weight)", lambda: kernel(x, weight)),
        ("conv2d: torch.ops.schedsearch.conv2d", lambda: op(x, weight)),
        ("conv2d: torch.ops.schedsearch.conv2d, new tensors", lambda: op(*next(turns))),
        ("conv2d: sst.conv2d", lambda: sst.conv2d(x, weight)),
        ("conv2d: torch.ops.aten.conv2d", lambda: torch.ops.aten.conv2d(theirs[0], theirs[1])),
        ("conv2d: torch.nn.functional.conv2d", lambda: functional.conv2d(theirs[0], theirs[1])),
        (
            "conv2d+bias+residual+relu: torch.ops.schedsearch.conv2d",
            lambda: op(x, weight, bias, None, residual, epilogue),
        ),
        ("conv2d+bias+residual+relu: sst.conv2d", lambda: sst.conv2d(x, weight, bias, residual, activation="relu")),
        (
            "conv2d+bias+residual+relu: PyTorch, three calls",
            lambda: relu(functional.conv2d(theirs[0], theirs[1], its_bias).add_(theirs[3])),
        ),
    ]


def depthwise(device: str) -> list[Row]:
    x = torch.randn(1, 64, 14, 14, device=device).to(memory_format=torch.channels_last)
    weight = torch.randn(64, 1, 3, 3, device=device)
    if device == "cuda":
        x, weight = x.half(), weight.half()
    trained = weight.clone().requires_grad_()
    image = x.clone().requires_grad_()
    dy = torch.randn_like(x)

    def step(convolve: Callable[..., torch.Tensor]) -> None:
        image.grad = trained.grad = None
        convolve(image, trained, padding=1).backward(dy)

    def plain(x: torch.Tensor, weight: torch.Tensor, padding: int) -> torch.Tensor:
        return functional.conv2d(x, weight, padding=padding, groups=64)

    ours: list[Row] = [
        ("depthwise: sst.depthwise_conv2d", lambda: sst.depthwise_conv2d(x, weight, padding=1)),
        ("depthwise, forward and backward: sst.depthwise_conv2d", lambda: step(sst.depthwise_conv2d)),
    ]
    theirs: list[Row] = [
        ("depthwise: torch.nn.functional.conv2d", lambda: plain(x, weight, 1)),
        ("depthwise, forward and backward: torch.nn.functional.conv2d", lambda: step(plain)),
    ]
    return [*ours, *theirs] if device == "cuda" else ours  # on a CPU theirs computes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", default="benchmark.db")
    parser.add_argument("--without-gpu", action="store_true", help="measure up to the driver, which does nothing")
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    device = "cpu" if options.without_gpu else "cuda"
    with idle_driver() if options.without_gpu else contextlib.nullcontext():
        sst.use(options.db, allow=("exact", "default"))
        rows = [*convolution(device), *depthwise(device)]
        output = torch.randn(1, 64, 7, 7, device=device)
        rows.append(("torch.empty_like of the output alone", lambda: torch.empty_like(output)))
        times = host_us([call for _, call in rows], device)
        print(*sst.served(), sep="\n")
    print(common.table(("call", "host us"), [(name, f"{us:.2f}") for (name, _), us in zip(rows, times)]))
    machine = {"cpu": detect("cpu").name, "cores": os.cpu_count()}
    data = {"machine": machine, "rows": [{"call": name, "host_us": us} for (name, _), us in zip(rows, times)]}
    common.write(options.out, data)


if __name__ == "__main__":
    main()
