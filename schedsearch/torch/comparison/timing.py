"""Times of calls on torch tensors, in this process: what `schedsearch.torch.comparison.benchmark` decides by."""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, overload

import torch

from schedsearch.device.clock import runs_ns

Run = Callable[[], Any]
L2_FACTOR = 2.5  # the operands rotate over sets that together exceed this many times the last-level cache
_LEAST_MS, _MOST_LAUNCHES = 2.0, 200
_WARM = 3  # calls before a measurement, in which libraries and compilers choose their code
_CALLED = 5  # calls between two events


class Candidate(Sequence[Run]):
    """One way to compute something.

    Attributes:
        name: what computes, for reports and for timers of tests.
        around: makes the state in which the runs are measured; it is entered outside of what is timed.
    """

    def __init__(self, name: str, *runs: Run, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        """Takes one run or more; all compute the same, each with its own operands."""
        self.name, self._runs, self.around = name, runs, around

    @overload
    def __getitem__(self, place: int) -> Run: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Run]: ...
    def __getitem__(self, place: int | slice) -> Run | Sequence[Run]:
        return self._runs[place]

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)


class Timer(Protocol):
    """Times something that is called with one set of operands after the other."""

    def ns(self, runs: Candidate) -> float:
        """The time of a call."""


class Sampler(ABC):
    """A timer that measures several candidates in turns, so that clocks and other load are the same for all."""

    @abstractmethod
    def sampler(self, runs: Candidate) -> Callable[[], float]:
        """Prepares a measurement. Each call of the result measures once: the nanoseconds of a call."""

    def ns(self, runs: Candidate) -> float:
        sample = self.sampler(runs)
        return statistics.median(sample() for _ in range(5))


def sets_needed(nbytes: int, cache_bytes: int) -> int:
    """How many sets of operands of `nbytes` are timed in rotation."""
    return max(1, min(_MOST_LAUNCHES, math.ceil(L2_FACTOR * cache_bytes / max(1, nbytes))))


class CudaTimer(Sampler):
    """By events around a CUDA graph of many calls that follow one another: the time of the GPU alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def sampler(self, runs: Candidate) -> Callable[[], float]:
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for place in range(_WARM):
                    runs[place % len(runs)]()
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                estimate_ms = max(2e-3, _elapsed_ms(first, last, runs[0]))
                rounds = max(1, min(round(_LEAST_MS / (estimate_ms * len(runs))), _MOST_LAUNCHES // len(runs)))
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):  # others may allocate
                    for _ in range(rounds):
                        for run in runs:
                            run()
                graph.replay()
            torch.cuda.current_stream().wait_stream(stream)

        def sample() -> float:
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                return _elapsed_ms(first, last, graph.replay) * 1e6 / (rounds * len(runs))

        return sample


class CalledTimer(Sampler):
    """By events around calls from Python that follow one another: the GPU's time, or the host's where that is longer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def sampler(self, runs: Candidate) -> Callable[[], float]:
        with torch.cuda.device(self._device):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for place in range(_WARM):
                runs[place % len(runs)]()

        def several() -> None:
            for place in range(_CALLED):
                runs[place % len(runs)]()

        def sample() -> float:
            with torch.cuda.device(self._device):
                return _elapsed_ms(first, last, several) * 1e6 / _CALLED

        return sample


def _elapsed_ms(first: torch.cuda.Event, last: torch.cuda.Event, run: Run) -> float:
    first.record()
    run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last))


class HostTimer(Sampler):
    """By the host's clock, for calls that return when they are done."""

    def sampler(self, runs: Candidate) -> Callable[[], float]:
        for run in runs:
            run()

        return lambda: statistics.median(runs_ns(runs))


def timer_of(device: torch.device) -> Timer:
    """What times layers and models: without the host's share on a GPU."""
    return CudaTimer(device) if device.type == "cuda" else HostTimer()


def timers_of_graphs(device: torch.device, captures: bool) -> list[Timer]:
    """What times graphs of torch.compile, by every way in which callers may run them; the first is the one to report.

    Args:
        captures: whether compiled graphs can be part of a CUDA graph.
    """
    if device.type == "cpu":
        return [HostTimer()]
    return [CudaTimer(device), CalledTimer(device)] if captures else [CalledTimer(device)]
