"""What the benchmarks of PyTorch models share: cases in processes of their own, and times on a GPU or on a CPU."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import common
import torch

MARK = "RESULT "
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


# ---- cases in processes of their own


def options(description: str | None, cases: Sequence[str], stages: Sequence[str], limit_s: float) -> argparse.ArgumentParser:
    """The arguments that every benchmark of models takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(cases), metavar="CASE")
    parser.add_argument("--stages", default=",".join(stages), help="separated by commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes and few runs, to see that everything works")
    parser.add_argument("--db", default="models.db")
    parser.add_argument("--limit", type=float, default=limit_s, help="seconds for all cases")
    parser.add_argument("--verbose", action="store_true", help="print every layer")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--out", help="file for the data")
    return parser


def passed(given: argparse.Namespace) -> list[str]:
    """The arguments for the process of a case: all but those of the whole."""
    words = []
    for name, value in vars(given).items():
        if name in ("cases", "case", "out", "limit") or value is None or value is False:
            continue
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def run_stages(found: dict[str, Any], stages: dict[str, Callable[[], dict[str, Any]]]) -> None:
    """Runs stages one after the other and prints what is known after each; one that fails does not end the others."""
    for name, stage in stages.items():
        started = time.perf_counter()
        try:
            result = stage()
        except Exception:
            result = {f"{name}_failed": traceback.format_exc()[-600:]}
        found |= {**result, f"{name}_s": round(time.perf_counter() - started, 1)}
        print(MARK + json.dumps(found), flush=True)


def run_cases(
    file: str,
    given: argparse.Namespace,
    show: Callable[[dict[str, Any]], None],
    summary: Callable[[list[dict[str, Any]]], dict[str, Any]],
) -> None:
    """Runs each case in a process of its own with its share of the time, shows it, and writes all of them."""
    ends = time.monotonic() + given.limit
    rows: list[dict[str, Any]] = []
    for place, case in enumerate(given.cases):
        share_s = (ends - time.monotonic()) / (len(given.cases) - place)
        if share_s < 5:
            print(f"no time is left for {' '.join(given.cases[place:])}")
            break
        rows.append(_measured(file, case, passed(given), share_s))
        show(rows[-1])
        for key in (key for key in rows[-1] if key.endswith(("failed", "reason", "after_s"))):
            print(f"   {key}: {rows[-1][key]}", flush=True)
        common.write(given.out, {"torch": torch.__version__, "rows": rows, "summary": summary(rows)})
    print(json.dumps(summary(rows), indent=1))


def _measured(file: str, case: str, arguments: Sequence[str], limit_s: float) -> dict[str, Any]:
    """What a process of its own found until its time was up."""
    command = [sys.executable, file, "--case", case, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, errors = process.communicate(timeout=limit_s)
        ended: dict[str, Any] = {} if process.returncode == 0 else {"failed": errors[-600:]}
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with its builders and its runner, which hold the pipes and the GPU
        out, _ = process.communicate()
        ended = {"stopped_after_s": round(limit_s, 1)}
    for line in out.splitlines():
        if not line.startswith(MARK):
            print(line)
    rows = [json.loads(line.removeprefix(MARK)) for line in out.splitlines() if line.startswith(MARK)]
    return {"case": case, **(rows[-1] if rows else {}), **ended}
