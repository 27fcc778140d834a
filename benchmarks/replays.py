"""How benchmarks of whole networks build them, give them numbers, and time their runs in turns."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

TURNS, CALLS = 15, 40


def build_untuned(model: Path, out: Path) -> None:
    """Builds a model in float16 with default kernels, for images in NHWC, without comparing it."""
    import schedsearch

    options: dict[str, Any] = {"target": "cuda", "db": out.with_name("empty.db"), "dtype": "float16", "out": out}
    schedsearch.build(model, **options, io_layout="NHWC", check=False).close()


class Captured:
    """A network whose calls a CUDA graph captured.

    Args:
        early: its kernels begin before the one in front of them ends, and those of branches run side by side; else they run
            one after another.
    """

    def __init__(self, path: Path, early: bool) -> None:
        import torch

        import schedsearch

        for name in ("SCHEDSEARCH_EARLY_LAUNCH", "SCHEDSEARCH_BRANCHES"):
            os.environ[name] = str(int(early))
        self.net = schedsearch.load(path)
        self.inputs = inputs_of(self.net)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.net(*self.inputs)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            found = self.net(*self.inputs)
        self.outputs = found if isinstance(found, tuple) else (found,)

    def close(self) -> None:
        self.graph.reset()
        self.net.close()

    def results(self, numbers: list[Any]) -> list[Any]:
        for array, new in zip(self.inputs, numbers, strict=True):
            array.copy_(new)
        self.graph.replay()
        return [output.clone() for output in self.outputs]


def replay_us(call: Callable[[], object]) -> float:
    """Microseconds of a call, of a group of them that follow one another."""
    import torch

    torch.cuda.synchronize()
    started = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter_ns() - started) / CALLS / 1e3


def inputs_of(net: Any) -> list[Any]:
    """Zeros on the GPU for the inputs of a network."""
    import torch

    return [torch.zeros(port.shape, dtype=getattr(torch, port.dtype), device="cuda") for port in net.inputs]


def drawn(arrays: Sequence[Any]) -> list[Any]:
    """New normally distributed numbers of the shapes and dtypes of arrays."""
    import torch

    return [torch.randn(array.shape, device="cuda").to(array.dtype) for array in arrays]


def turns_us(calls: Mapping[Any, Callable[[], object]]) -> dict[Any, float]:
    """Microseconds of each call: the median of groups of calls that take turns."""
    groups: dict[Any, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            groups[name].append(replay_us(call))
    return {name: statistics.median(some) for name, some in groups.items()}
