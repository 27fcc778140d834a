"""The kernels of examples/own_kernel: default and tuned times, beside the limits of the card and other libraries.

    python benchmarks/own_kernels.py [--only softmax ...] [--trials 60] [--time 20] [--out own_kernels.json]

Columns: the time of the default configuration and of the best one, both of the final race; the speed-up; the rate, and its
share of the card's limit (the rate of a copy of 1 GiB, or the card's FP32 peak); trials and seconds; the time of PyTorch or
CuPy on the same arrays, where they have such a function. The first lines show the host time of calls.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "own_kernel"
COPIED_BYTES = 2 << 30  # that a copy reads and writes to find out its rate
NAMES = ("matmul", "stencil", "softmax", "histogram", "total", "pnpoly", "convolution")


def peers(name: str, arrays: list[Any]) -> dict[str, Callable[[], Any]]:
    """Library -> a function that computes the same on the same arrays."""
    import torch

    first = arrays[0]
    found: dict[str, Callable[[], Any]] = {}
    if name == "matmul":
        found["torch"] = lambda: torch.matmul(first, arrays[1])
    elif name == "softmax":
        found["torch"] = lambda: torch.softmax(first, 1)
    elif name == "total":
        found["torch"] = lambda: first.sum()
    elif name == "convolution":
        found["torch"] = lambda: torch.nn.functional.conv2d(first[None, None], arrays[1][None, None])
    elif name == "histogram":
        try:
            import cupy
        except ImportError:
            return found
        numbers = cupy.from_dlpack(first)
        found["cupy"] = lambda: cupy.bincount(numbers, minlength=256)
    return found


def time_ns(function: Callable[[], Any], repeats: int = 20) -> float:
    """Median time of one call on the device, with a cold L2 cache."""
    import torch

    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats + 3):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e6)
    return sorted(times[3:])[repeats // 2]


def fp32_peak() -> float:
    """Floating-point operations per ns: two for each of 128 lanes of a multiprocessor and clock."""
    import torch

    clock = float(common.facts()["card"].split(",")[2].split()[0]) if common.facts()["card"] else math.nan
    return torch.cuda.get_device_properties(0).multi_processor_count * 128 * 2 * clock / 1e3


def host_us(function: Callable[[], Any], calls: int = 500) -> float:
    """Microseconds of the host's time for one call."""
    import torch

    best = math.inf
    for _ in range(7):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            function()
        best = min(best, (time.perf_counter() - began) / calls * 1e6)
        torch.cuda.synchronize()
    return best


def measure(name: str, options: argparse.Namespace, copy: float, peak: float) -> dict[str, Any]:
    """One row of the table."""
    import torch

    module = importlib.import_module(name)
    kernel = getattr(module, name)
    kernel.db = options.db
    began = time.monotonic()
    summary = kernel.tune(
        *module.SHAPES, target="cuda", trials=options.trials, time_s=options.time, run_timeout_s=options.run_timeout
    )
    (task,) = summary.tasks
    row: dict[str, Any] = {"kernel": name, "trials": task.trials, "seconds": round(time.monotonic() - began, 1)}
    row["outcomes"] = {str(outcome): count for outcome, count in task.outcomes.items()}
    if task.best_ns is None:
        return row | {"problem": task.problem or "no valid configuration"}
    work = task.workload.work
    row |= {"yours_us": (task.default_ns or math.nan) / 1e3, "tuned_us": task.best_ns / 1e3}
    row |= {"speedup": row["yours_us"] / row["tuned_us"], "best": dict(task.best_config or {})}
    if work.flops:
        row |= {"rate": f"{work.flops / task.best_ns / 1e3:.1f} TFLOP/s", "share": work.flops / task.best_ns / peak}
    else:
        row |= {"rate": f"{work.nbytes / task.best_ns:.0f} GB/s", "share": work.nbytes / task.best_ns / copy}
    dtypes = [shape.partition(":")[2] for shape in module.SHAPES]
    sizes = [tuple(map(int, shape.partition(":")[0].split("x"))) for shape in module.SHAPES]
    arrays = [torch.zeros(size, dtype=getattr(torch, dtype), device="cuda") for size, dtype in zip(sizes, dtypes)]
    row["peers_us"] = {library: time_ns(call) / 1e3 for library, call in peers(name, arrays).items()}
    return row


def host_times(options: argparse.Namespace) -> dict[str, float]:
    """Host time in us of a call, a bound call, and the same kernel through Numba's launcher."""
    import torch
    from numba import cuda

    sys.path.insert(0, str(EXAMPLES))
    stencil = importlib.import_module("stencil").stencil
    stencil.db = options.db
    u = torch.zeros((64, 64), device="cuda")
    v = torch.zeros_like(u)
    stencil(u, v)
    bound = stencil.bind(u, v)
    stream = torch.cuda.current_stream().cuda_stream
    found = {"call": host_us(lambda: stencil(u, v)), "bound": host_us(lambda: bound(stream))}

    @cuda.jit
    def plain(a, b):  # type: ignore[no-untyped-def]
        x, y = cuda.grid(2)
        if x < a.shape[1] and y < a.shape[0]:
            b[y, x] = a[y, x]

    a, b = cuda.as_cuda_array(u), cuda.as_cuda_array(v)
    launcher = plain[(2, 8), (32, 8)]
    launcher(a, b)
    return found | {"numba": host_us(lambda: launcher(a, b))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--time", type=float, default=None, help="seconds for each kernel")
    parser.add_argument("--run-timeout", type=float, default=10.0)
    parser.add_argument("--db", default="own_kernels.db")
    parser.add_argument("--out")
    options = parser.parse_args()
    sys.path.insert(0, str(EXAMPLES))
    copy, peak = COPIED_BYTES / (1e3 * common.copy_us(COPIED_BYTES)), fp32_peak()  # bytes and operations per ns
    print(f"copy {copy:.0f} GB/s, FP32 peak {peak / 1e3:.1f} TFLOP/s", flush=True)
    host = host_times(options)
    print("host time: " + ", ".join(f"{what} {us:.1f} us" for what, us in host.items()), flush=True)
    rows = []
    for name in options.only:
        row = measure(name, options, copy, peak)
        rows.append(row)
        if "problem" in row:
            print(f"{name:12} {row['problem']} {row['outcomes']}", flush=True)
            continue
        others = ", ".join(f"{library} {us:.1f} us" for library, us in row["peers_us"].items())
        yours, tuned = row["yours_us"], row["tuned_us"]
        print(f"{name:12} yours {yours:9.1f} us  tuned {tuned:9.1f} us  {row['speedup']:5.2f}x", end="  ")
        print(f"{row['rate']} ({row['share']:.0%})  {row['trials']} trials {row['seconds']} s  {others}", end="  ")
        print(row["best"], row["outcomes"], flush=True)
    common.write(options.out, {"copy_gb_s": copy, "fp32_peak_gflops": peak, "rows": rows, "host_us": host})


if __name__ == "__main__":
    main()
