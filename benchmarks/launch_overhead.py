"""Host time of calling a deployed kernel with torch tensors, including the allocation of the output.

    python benchmarks/launch_overhead.py --db benchmark.db --out launch_overhead.json

Needs a CUDA device and PyTorch. The kernel is a 1x1 convolution of a 7x7 image, so the device keeps up with the host. If the
database has no record of it, the rule-based default is built. Times are host microseconds per call of a loop that only
enqueues (median of rounds).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import common
import torch

import schedsearch

CALLS, ROUNDS = 1000, 15


def host_us(call: Callable[[], object]) -> float:
    """Median over rounds of the host time per call. The device is idle before each round, and its queue does not fill."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - started) / CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", default="benchmark.db")
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.backends.cudnn.benchmark = True
    workload = schedsearch.Workload.conv2d(n=1, h=7, w=7, c=64, k=64, r=1, s=1)
    kernel = schedsearch.compile(workload, options.db, target="cuda", allow=("exact", "default"))

    def tensors(c: int, k: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(1, c, size, size, device="cuda", dtype=torch.float16).contiguous(memory_format=torch.channels_last)
        weight = torch.randn(k, c, 1, 1, device="cuda", dtype=torch.float16).contiguous(memory_format=torch.channels_last)
        return x, weight

    sets = [tensors(64, 64, 7) for _ in range(16)]
    x, weight = sets[0]
    step = kernel.bind(x, weight)
    stream = torch.cuda.current_stream().cuda_stream
    cycle = itertools.cycle(sets)
    rows = [
        ("kernel(x, w), the same pointers", host_us(lambda: kernel(x, weight)), 10.0),
        ("kernel(x, w), new pointers every call", host_us(lambda: kernel(*next(cycle))), 15.0),
        ("step(stream), bound", host_us(lambda: step(stream)), 4.0),
        ("step(), bound, on torch's current stream", host_us(step), None),
        ("torch.nn.functional.conv2d (cuDNN)", host_us(lambda: torch.nn.functional.conv2d(x, weight)), None),
        ("torch.empty_strided of the output alone", host_us(lambda: torch.empty_like(x)), None),
    ]
    print(kernel)
    print(common.table(("call", "host us", "goal"), [(name, f"{us:.2f}", goal or "") for name, us, goal in rows]))
    common.write(options.out, {"rows": [{"call": name, "host_us": us, "goal_us": goal} for name, us, goal in rows]})


if __name__ == "__main__":
    main()
