"""The host's time of calls, of ResNet-50, a small kernel and operators of PyTorch, beside what the driver takes alone.

    python benchmarks/network_host.py --file resnet50.ssx --out network_host_h200.json

`--file` is built with default kernels if it is missing. Each time is the median over groups of calls that begin on an idle
GPU, without the wait at their end. Groups of different calls take turns, because the clocks of processors change within
seconds; before each group its call runs once. A processor that has waited for the GPU runs the first calls of a group
slowly. It needs PyTorch and a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import common
import torch
from network_run import resnet50
from networks import hot_us

import schedsearch
import schedsearch.torch as sst
from schedsearch.executable.run import Weights

GROUPS = {8: 60, 40: 20, 500: 12}  # calls of a group -> groups
WARM_UP_S = 0.4
Row = tuple[str, Callable[[], object]]


def group_us(call: Callable[[], object], count: int) -> float:
    call()
    torch.cuda.synchronize()
    started = time.perf_counter_ns()
    for _ in range(count):
        call()
    return (time.perf_counter_ns() - started) / count / 1e3


def in_turns(label: str, calls: Sequence[Row], counts: tuple[int, int]) -> list[dict[str, Any]]:
    """The host's time of each call, in groups of so many."""
    times: dict[tuple[str, int], list[float]] = {(name, count): [] for name, _ in calls for count in counts}
    for count in counts:
        for number in range(GROUPS[count]):
            start = number % len(calls)
            for name, call in (*calls[start:], *calls[:start]):
                times[name, count].append(group_us(call, count))
    torch.cuda.synchronize()
    return [
        {"call": f"{label}: {name}", "in_a_row": count, "host_us": statistics.median(found[len(found) // 10 :])}
        for (name, count), found in times.items()
    ]


def driver_of(calls: Any) -> Callable[[], object]:
    """The driver's launch of the one graph of a network's calls."""
    (graph,) = calls._graph._launches
    handle, stream, launch = graph._graph.handle, ctypes.c_void_p.from_param(0), graph._graph._launch
    return lambda: launch(handle, stream)


def warm_up(call: Callable[[], object]) -> None:
    ends = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < ends:
        call()
    torch.cuda.synchronize()


def network(path: Path, early: bool) -> list[dict[str, Any]]:
    """Of a network whose kernels begin early, or one after the other."""
    os.environ["SCHEDSEARCH_EARLY_LAUNCH"] = str(int(early))
    with schedsearch.load(path) as net:
        (port,) = net.inputs
        inputs = [torch.randn(port.shape, device="cuda").to(getattr(torch, port.dtype)) for _ in range(2)]
        x = inputs[0]
        warm_up(lambda: net(x))
        step = net.bind(x)
        step()
        turns = itertools.cycle(inputs)
        kept: list[Any] = []

        def with_others() -> None:
            kept.append(net(next(turns)))
            del kept[:-1]

        rows: list[Row] = [
            ("the driver alone", driver_of(net._calls)),  # type: ignore[attr-defined]
            ("the driver alone, the graph of step()", driver_of(step._calls)),  # type: ignore[attr-defined]
            ("net(x)", lambda: net(x)),
            ("net(x), another x each time, the output kept", with_others),
            ("step(), bound", step),
            ("step(0), bound", lambda: step(0)),
        ]
        found = in_turns(f"ResNet-50, {'early' if early else 'one after the other'}", rows, (8, 40))
        step.close()
    return found


def edges(path: Path) -> list[dict[str, Any]]:
    """What the driver's launch of the graph costs the host if only some kernels begin early, and what the GPU then takes."""
    may_begin_early, rows = Weights._may_begin_early, []
    os.environ["SCHEDSEARCH_EARLY_LAUNCH"] = "1"
    for every in (0, 16, 8, 4, 2, 1):

        def some(weights: Weights, number: int, constants: Collection[str], every: int = every) -> bool:
            return every > 0 and number % every == 0 and may_begin_early(weights, number, constants)

        with mock.patch.object(Weights, "_may_begin_early", some), schedsearch.load(path) as net:
            (port,) = net.inputs
            x = torch.randn(port.shape, device="cuda").to(getattr(torch, port.dtype))
            warm_up(lambda: net(x))  # noqa: B023
            step = net.bind(x)
            step()
            name = (
                f"ResNet-50, every kernel whose number {every} divides begins early"
                if every
                else "ResNet-50, none begins early"
            )
            found = in_turns(name, [("the driver alone", driver_of(net._calls))], (8, 40))  # type: ignore[attr-defined]
            rows += [row | {"gpu_us": hot_us(step)} for row in found]
            step.close()
    return rows


def kernels() -> list[dict[str, Any]]:
    def image(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.float16).contiguous(memory_format=torch.channels_last)

    x, weight, residual = image(1, 64, 7, 7), image(64, 64, 1, 1), image(1, 64, 7, 7)
    bias = torch.randn(64, device="cuda", dtype=torch.float16)
    sst.use("none.db", allow=("exact", "default"))
    for _ in range(4):
        torch.ops.schedsearch.conv2d(x, weight)
    kernel = sst.served()[-1].kernel
    assert kernel is not None
    step = kernel.bind(x, weight)
    (launch,) = step._launch.__self__._launches
    driver = step._launch.__self__._launch
    ours, theirs = torch.ops.schedsearch.conv2d, torch.ops.aten.conv2d
    rows: list[Row] = [
        ("the driver alone", lambda: driver(launch[1], launch[2], launch[3], None)),
        ("kernel(x, weight)", lambda: kernel(x, weight)),
        ("step(0), bound", lambda: step(0)),
        ("torch.ops.schedsearch.conv2d", lambda: ours(x, weight)),
        (
            "torch.ops.schedsearch.conv2d with bias, residual and relu",
            lambda: ours(x, weight, bias, None, residual, "epilogue=bias,residual,relu"),
        ),
        ("torch.ops.aten.conv2d", lambda: theirs(x, weight)),
        ("torch.empty_like of the output", lambda: torch.empty_like(x)),
    ]
    return in_turns("1x1 of 7x7", rows, (8, 500))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=Path("resnet50.ssx"))
    parser.add_argument("--edges", action="store_true", help="only: graphs in which some of the kernels begin early")
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    if not options.file.exists():
        schedsearch.build(resnet50(1, "float16"), db="none.db", target="cuda", out=options.file, check=False).close()
    rows = edges(options.file) if options.edges else []
    rows = rows or [*network(options.file, early=True), *network(options.file, early=False), *kernels()]
    cells = [(r["call"], r["in_a_row"], f"{r['host_us']:.2f}", f"{r['gpu_us']:.1f}" if "gpu_us" in r else "") for r in rows]
    print(common.table(("call", "in a row", "host us", "GPU us"), cells))
    common.write(options.out, {"rows": rows})


if __name__ == "__main__":
    main()
