"""The kernels of examples/own_kernel: default and tuned times, beside the limits of the card and other libraries.

    python benchmarks/own_kernels.py [--only softmax ...] [--trials 60] [--time 20] [--together] [--out own_kernels.json]

Columns: the time of the author's configuration and of the best one, both of the final race; the speed-up; the rate, and its
share of the limit (the rate of a copy of as many bytes, for the sum the rate at which PyTorch reads 1 GiB, or the card's
FP32 peak); trials; the times of PyTorch, torch.compile (with --compile) and CuPy on arrays of the same sizes, where they
have such a function. The first lines show the host time of calls and the speed of tuning a small kernel. With --together one
run tunes all kernels.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "own_kernel"
READ_BYTES = 1 << 30  # that a sum reads to find out the rate of reading
NAMES = ("softmax", "stencil", "histogram", "matmul", "convolution", "pnpoly", "total")
FIRST_CALL = """
import sys, time
import torch, schedsearch
u, v = torch.zeros((64, 64), device="cuda"), torch.zeros((64, 64), device="cuda")
torch.cuda.synchronize()
kernel = schedsearch.own_kernel("stencil", sys.argv[1])
began = time.perf_counter()
kernel(u, v)
torch.cuda.synchronize()
print((time.perf_counter() - began) * 1e3)
"""


def peers(name: str, arrays: list[Any], compiled: bool) -> dict[str, Callable[[], Any]]:
    """Library -> a function that computes the same on the same arrays."""
    import torch

    first = arrays[0]
    found: dict[str, Callable[[], Any]] = {}
    if name == "matmul":
        found["torch"] = lambda: torch.matmul(first, arrays[1])
    elif name == "softmax":
        found["torch"] = lambda: torch.softmax(first, 1)
        if compiled:
            function = torch.compile(lambda x: torch.softmax(x, 1))
            found["torch.compile"] = lambda: function(first)
    elif name == "total":
        found["torch"] = lambda: first.sum()
    elif name == "convolution":
        found["torch"] = lambda: torch.nn.functional.conv2d(first[None, None], arrays[1][None, None])
    elif name == "histogram":
        found["torch.bincount"] = lambda: torch.bincount(first, minlength=256)
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


def read_rate() -> float:
    """Bytes per ns at which a large array is read."""
    import torch

    numbers = torch.zeros(READ_BYTES // 4, device="cuda")
    return READ_BYTES / time_ns(lambda: numbers.sum())


def tuned(names: list[str], options: argparse.Namespace) -> Iterator[tuple[str, Any, float]]:
    """Name, summary of the task and seconds of each kernel."""
    import schedsearch

    modules = [importlib.import_module(name) for name in names]
    tasks = [getattr(module, name).task(*module.SHAPES) for name, module in zip(names, modules)]
    limits = {"trials": options.trials, "time_s": options.time, "run_timeout_s": options.run_timeout}
    for some in [names] if options.together else [[name] for name in names]:
        began = time.monotonic()
        try:
            summary = schedsearch.tune([tasks[names.index(name)] for name in some], options.db, target="cuda", **limits)
        except schedsearch.SchedsearchError as error:  # the others still count
            print(f"{', '.join(some)}: {type(error).__name__}: {error}", flush=True)
            continue
        yield from ((name, task, time.monotonic() - began) for name, task in zip(some, summary.tasks))
        print(f"  {speed(summary)}", flush=True)


def speed(summary: Any) -> str:
    verified = sum(task.outcomes.get("ok", 0) for task in summary.tasks)
    return f"{verified} verified trials in {summary.wall_s:.1f} s ({verified / summary.wall_s:.1f}/s): {summary.shares}"


def row_of(name: str, task: Any, seconds: float, options: argparse.Namespace, read: float, peak: float) -> dict[str, Any]:
    """One row of the table."""
    import torch

    module = importlib.import_module(name)
    row: dict[str, Any] = {"kernel": name, "trials": task.trials, "seconds": round(seconds, 1)}
    row["outcomes"] = {str(outcome): count for outcome, count in task.outcomes.items()}
    if task.best_ns is None:
        return row | {"problem": task.problem or "no valid configuration"}
    work = task.workload.work
    row |= {"yours_us": (task.default_ns or math.nan) / 1e3, "tuned_us": task.best_ns / 1e3}
    row |= {"speedup": row["yours_us"] / row["tuned_us"], "best": dict(task.best_config or {})}
    if work.flops:
        row |= {"rate": f"{work.flops / task.best_ns / 1e3:.1f} TFLOP/s", "share": work.flops / task.best_ns / peak}
    else:
        limit = read if name == "total" else work.nbytes / (1e3 * common.copy_us(work.nbytes))
        row |= {"rate": f"{work.nbytes / task.best_ns:.0f} GB/s", "share": work.nbytes / task.best_ns / limit}
    arrays = []
    for shape in module.SHAPES:
        sizes, _, dtype = shape.partition(":")
        size, of_floats = tuple(map(int, sizes.split("x"))), dtype.startswith("float")
        made = torch.randn(size, device="cuda") if of_floats else torch.randint(0, 256, size, device="cuda")
        arrays.append(made.to(getattr(torch, dtype)))
    row["peers_us"] = {library: time_ns(call) / 1e3 for library, call in peers(name, arrays, options.compile).items()}
    return row


def host_times(options: argparse.Namespace) -> dict[str, float]:
    """Host time in us of a call, a bound call, a kernel of as many arguments through Numba's launcher, and the first call
    of another process, from records."""
    import torch
    from numba import cuda

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
    found["numba"] = host_us(lambda: launcher(a, b))
    print(f"stencil of 64 x 64: {speed(stencil.tune(u, v, trials=options.trials))}", flush=True)
    done = subprocess.run([sys.executable, "-c", FIRST_CALL, options.db], capture_output=True, text=True)
    if done.returncode:
        print(f"the first call of another process failed: {done.stderr.strip().splitlines()[-1]}", flush=True)
        return found
    return found | {"first call": float(done.stdout) * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--time", type=float, default=None, help="seconds for each kernel")
    parser.add_argument("--run-timeout", type=float, default=10.0)
    parser.add_argument("--db", default="own_kernels.db")
    parser.add_argument("--together", action="store_true", help="tune all kernels in one run")
    parser.add_argument("--compile", action="store_true", help="time torch.compile too")
    parser.add_argument("--out")
    options = parser.parse_args()
    sys.path.insert(0, str(EXAMPLES))
    host = host_times(options)
    print("host time: " + ", ".join(f"{what} {us:.1f} us" for what, us in host.items()), flush=True)
    read, peak = read_rate(), fp32_peak()  # bytes and operations per ns
    print(f"read {read:.0f} GB/s, FP32 peak {peak / 1e3:.1f} TFLOP/s", flush=True)
    rows: list[dict[str, Any]] = []
    for name, task, seconds in tuned(list(options.only), options):
        row = row_of(name, task, seconds, options, read, peak)
        rows.append(row)
        common.write(options.out, {"read_gb_s": read, "fp32_peak_gflops": peak, "rows": rows, "host_us": host})
        if "problem" in row:
            print(f"{name:12} {row['problem']} {row['outcomes']}", flush=True)
            continue
        others = ", ".join(f"{library} {us:.1f} us" for library, us in row["peers_us"].items())
        yours, fastest = row["yours_us"], row["tuned_us"]
        print(f"{name:12} yours {yours:9.1f} us  tuned {fastest:9.1f} us  {row['speedup']:5.2f}x", end="  ")
        print(f"{row['rate']} ({row['share']:.0%})  {row['trials']} trials  {others}", end="  ")
        print(json.dumps(row["best"]), row["outcomes"], flush=True)


if __name__ == "__main__":
    main()
