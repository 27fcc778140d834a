"""Functions that the benchmarks share: cold timing in a CUDA graph, the facts of a run, tables and data files."""

from __future__ import annotations

import functools
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = (
    "schedsearch",
    "kernel-tuner",
    "numba",
    "numba-cuda",
    "numba-cuda-mlir",
    "numpy",
    "onnxruntime",
    "torch",
    "xgboost",
    "xgboost-cpu",
    "nvidia-cudnn-cu13",
    "nvidia-nvjitlink",
)
L2_FACTOR = 2.5  # all operands rotate over sets that together exceed this many times L2
MAX_LAUNCHES = 600
TIMED_MS = 20.0  # that the replays of a graph should take, within 5 to 30 of them


def facts() -> dict[str, Any]:
    """Command, versions and card."""
    command = " ".join(["python", *(shlex.quote(word) for word in [os.path.relpath(sys.argv[0]), *sys.argv[1:]])])
    return {"command": command, **_machine()}


@functools.cache
def _machine() -> dict[str, Any]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    query.append(f"--id={os.environ.get('CUDA_VISIBLE_DEVICES', '0').split(',')[0]}")  # the card that is used, of several
    try:
        card = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        card = ""
    return {"card": card, "cpus": os.cpu_count(), "python": platform.python_version(), "versions": versions}


def write(path: str | None, data: dict[str, Any]) -> None:
    """Writes data with the facts of the run as JSON if a path is given. A reader sees the old file or the new one."""
    if path:
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(file.name + ".new")
        new.write_text(json.dumps({**facts(), **data}, indent=1) + "\n")
        new.replace(file)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values)) if values else math.nan


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A plain table, the first column left-aligned, the others right-aligned."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths)))
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def sets_needed(bytes_per_set: int, l2_bytes: int) -> int:
    """The number of sets of operands that together exceed L2_FACTOR times L2."""
    return max(1, math.ceil(L2_FACTOR * l2_bytes / bytes_per_set))


def cold_graph_us(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds per call in a CUDA graph that rotates over `calls`, one per set of operands; median of the replays."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
        torch.cuda.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        calls[0]()
        last.record()
        torch.cuda.synchronize()
        estimate_ms = max(first.elapsed_time(last), 2e-3)
        rounds = max(1, min(round(2.0 / (estimate_ms * len(calls))), MAX_LAUNCHES // len(calls)))
        graph = torch.cuda.CUDAGraph()
        launches = rounds * len(calls)
        with torch.cuda.graph(graph, stream=stream):
            kept = [calls[i % len(calls)]() for i in range(launches)]
        graph.replay()
        torch.cuda.synchronize()
        repeats = max(5, min(30, int(TIMED_MS / (launches * estimate_ms))))
        times = []
        for _ in range(repeats):
            first.record()
            graph.replay()
            last.record()
            torch.cuda.synchronize()
            times.append(first.elapsed_time(last) * 1e3 / launches)
    del kept, graph
    return statistics.median(times)


@functools.cache
def copy_us(nbytes: int, sets: int = 1) -> float:
    """Microseconds of a copy on the device that reads and writes `nbytes` together, cold, in rotation over `sets`."""
    import torch

    halves = [torch.empty((2, nbytes // 2), dtype=torch.uint8, device="cuda") for _ in range(sets)]
    return cold_graph_us([lambda half=half: half[1].copy_(half[0]) for half in halves])
