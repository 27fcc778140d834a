"""What the benchmarks of PyTorch models share: arguments, and times on a GPU or on a CPU."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import stages
import torch

Call = Callable[[], Any]


def captured(call: Call, device: str) -> Call:
    """A call as the replay of a CUDA graph; on a CPU the call itself."""
    if device == "cpu":
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replay: Call = graph.replay
    return replay


def hot_us(call: Call, device: str, *, groups: int = 10, calls: int = 10) -> float:
    """The median time of calls that follow one another, over groups of them."""
    for _ in range(min(5, calls)):
        call()
    times = []
    for _ in range(groups):
        times.append(_elapsed_us(call, calls, device) / calls)
    return statistics.median(times)


def _elapsed_us(call: Call, calls: int, device: str) -> float:
    if device == "cpu":
        started = time.perf_counter_ns()
        for _ in range(calls):
            call()
        return (time.perf_counter_ns() - started) / 1e3
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(calls):
        call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e3


def host_us(call: Call, device: str, calls: int = 50) -> float:
    """The median time of the host for a call that only enqueues, on an idle GPU."""
    times_ns = []
    for _ in range(calls):
        if device != "cpu":
            torch.cuda.synchronize()
        started = time.perf_counter_ns()
        call()
        times_ns.append(time.perf_counter_ns() - started)
    return statistics.median(times_ns[calls // 10 :]) / 1e3


def options(description: str | None, cases: Sequence[str], names: Sequence[str], limit_s: float) -> argparse.ArgumentParser:
    """The arguments that every benchmark of models takes."""
    parser = stages.options(description, cases, names, limit_s)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes and few runs, to see that everything works")
    parser.add_argument("--db", default="models.db")
    parser.add_argument("--verbose", action="store_true", help="print every layer")
    return parser
