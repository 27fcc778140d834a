"""Times of calls on torch tensors, in this process: what decides whether a kernel takes the place of PyTorch's own."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Run = Callable[[], Any]
L2_FACTOR = 2.5  # the operands rotate over sets that together exceed this many times the last-level cache
_LEAST_MS, _REPEATS, _MOST_LAUNCHES = 2.0, 5, 200


class Timer(Protocol):
    """Times something that is called with one set of operands after the other."""

    def ns(self, runs: Sequence[Run]) -> float:
        """The time of a call; `runs` computes the same, each with its own operands."""


def sets_needed(nbytes: int, cache_bytes: int) -> int:
    """How many sets of operands of `nbytes` are timed in rotation."""
    return max(1, min(_MOST_LAUNCHES, math.ceil(L2_FACTOR * cache_bytes / max(1, nbytes))))


class CudaTimer:
    """By events around a CUDA graph of many calls that follow one another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def ns(self, runs: Sequence[Run]) -> float:
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for run in runs[:3]:
                    run()
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                estimate_ms = max(2e-3, _elapsed(first, last, runs[0]))
                rounds = max(1, min(round(_LEAST_MS / (estimate_ms * len(runs))), _MOST_LAUNCHES // len(runs)))
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):  # others may allocate
                    for _ in range(rounds):
                        for run in runs:
                            run()
                graph.replay()
                times = [_elapsed(first, last, graph.replay) for _ in range(_REPEATS)]
            torch.cuda.current_stream().wait_stream(stream)
            graph.reset()
        return statistics.median(times) * 1e6 / (rounds * len(runs))


def _elapsed(first: torch.cuda.Event, last: torch.cuda.Event, run: Run) -> float:
    """Milliseconds."""
    first.record()
    run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last))


class HostTimer:
    """By the host's clock, for calls that return when they are done: the fastest of several rounds."""

    def ns(self, runs: Sequence[Run]) -> float:
        times = []
        for _ in range(_REPEATS):
            for run in runs:
                started = time.perf_counter_ns()
                run()
                times.append(time.perf_counter_ns() - started)
        return statistics.median(times[len(times) // _REPEATS :])


def timer_of(device: torch.device) -> Timer:
    return CudaTimer(device) if device.type == "cuda" else HostTimer()
