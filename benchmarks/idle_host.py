"""The host's time of calls of two versions in turns, on a machine without a GPU: all but the driver's own time.

    git archive OLD | tar -x -C /tmp/old-tree
    python -m pip install --no-deps --target /tmp/before /tmp/old-tree
    python -m pip install --no-deps --target /tmp/after .
    python benchmarks/idle_host.py --before /tmp/before --after /tmp/after --out idle_host.json

The driver is tests/fake_libcuda.c, which accepts every call and computes nothing; tensors are PyTorch's on the CPU, and a
network takes them for those of a GPU. The network has five kernels; a graph's launch costs Python the same with any number.
A process of each version answers in turns, some calls at a time, on one core. Times are processor time of the calling
thread. A pair of processes has the median of the ratios of neighbours; the table shows the median of all pairs, and the
least and the greatest: the same code differs from process to process. Before calls `in a cold cache`, 32 MiB of other memory
are written.

It needs PyTorch, gcc and the extra cu13 or cu12.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
HOT, COLD = 400, 4  # calls of a turn
OTHER_BYTES = 32 << 20
VERSIONS = ("before", "after")


def fake_driver(folder: Path) -> Path:
    library = folder / "libcuda.so.1"
    command = ["gcc", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", HERE.parent / "tests" / "fake_libcuda.c"]
    subprocess.run([*command, "-o", library, "-ldl", "-lpthread"], check=True)
    return library


# ---- one version, in a process of its own


def build(path: Path) -> None:
    from network_run import Writer

    import schedsearch
    from schedsearch.runtime import loading

    net = Writer(1, 64, 7, 7, dtype="float16")
    y = net.conv("c", net.conv("b", net.conv("a", "x", 64, 1), 64, 3), 64, 1, residual="x")
    with mock.patch.object(
        loading, "_verified", lambda device, fallback, loaded, workload=None: loaded
    ):  # it computes nothing
        schedsearch.build(net.network(y), db=path.parent / "none.db", target="cuda", out=path, check=False).close()


def network_calls(path: Path) -> dict[str, Callable[[], object]]:
    import torch

    import schedsearch

    net: Any = schedsearch.load(path)
    net.device = ("cpu", 0)  # where the tensors are
    net._device.make_current()  # as PyTorch makes it
    inputs = [torch.zeros(port.shape, dtype=torch.float16) for port in net.inputs for _ in range(2)]
    x, turns, kept = inputs[0], itertools.cycle(inputs), []

    def with_others() -> None:
        kept.append(net(next(turns)))
        del kept[:-1]

    net(x)
    step: Any = net.bind(x)
    stream = net._device.create_stream()
    step._is_complete = False  # as on a GPU
    step()
    (graph,) = net._calls._graph._launches
    handle, default, launch = graph._graph.handle, ctypes.c_void_p(0), graph._graph._launch
    return {
        "the fake driver's launch": lambda: launch(handle, default),
        "net(x)": lambda: net(x),
        "net(x), another x each time, the output kept": with_others,
        "net(x) on a stream": lambda: net(x, stream=stream),
        "step(), bound": step,
        "step(stream), bound": lambda: step(stream),
    }


def kernel_calls() -> dict[str, Callable[[], object]]:
    import torch

    import schedsearch.torch as sst

    def image(*shape: int) -> Any:
        return torch.zeros(shape).to(memory_format=torch.channels_last)

    x, weight, residual, bias = image(1, 64, 7, 7), image(64, 64, 1, 1), image(1, 64, 7, 7), torch.zeros(64)
    turns = itertools.cycle([(image(1, 64, 7, 7), image(64, 64, 1, 1)) for _ in range(16)])
    op = torch.ops.schedsearch.conv2d
    sst.conv2d(x, weight)
    kernel: Any = sst.served()[-1].kernel
    return {
        "kernel(x, weight)": lambda: kernel(x, weight),
        "torch.ops.schedsearch.conv2d": lambda: op(x, weight),
        "torch.ops.schedsearch.conv2d, new tensors": lambda: op(*next(turns)),
        "torch.ops.schedsearch.conv2d with bias, residual and relu": lambda: op(
            x, weight, bias, None, residual, "epilogue=bias,residual,relu"
        ),
        "sst.conv2d": lambda: sst.conv2d(x, weight),
    }


def answer(path: Path) -> None:
    """For each line `call count cold` of the standard input: the microseconds of a call."""
    import numpy as np
    import torch
    from idle_driver import idle_driver

    import schedsearch.torch as sst

    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    other = np.zeros(OTHER_BYTES, np.uint8)
    with idle_driver():  # operators find and bind their kernels
        sst.use("none.db", allow=("exact", "default"))
        calls = kernel_calls()
        for call in [*calls.values()] * 5:
            call()
    calls |= network_calls(path)
    print(json.dumps([*calls]), flush=True)
    for line in sys.stdin:
        name, count, cold = json.loads(line)
        call, clock = calls[name], time.thread_time_ns
        if cold:
            other += 1
        started = clock()
        for _ in range(count):
            call()
        print((clock() - started) / count / 1e3, flush=True)


# ---- both versions in turns


class Process:
    def __init__(self, tree: Path, driver: Path, network: Path) -> None:
        command = [sys.executable, __file__, "--answer", network, "--driver", driver]
        environment = os.environ | {"PYTHONPATH": str(tree.resolve())}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=network.parent
        )
        self.calls: list[str] = json.loads(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a process ended; what it said is above")
        return line

    def us(self, call: str, count: int, cold: bool) -> float:
        assert self._process.stdin is not None
        print(json.dumps([call, count, cold]), file=self._process.stdin, flush=True)
        return float(self._line())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def in_turns(before: Process, after: Process, call: str, rounds: int, cold: bool) -> list[tuple[float, float]]:
    """The times of neighbours in microseconds, of both versions."""
    count, pairs = COLD if cold else HOT, []
    for process in (before, after):
        process.us(call, count, False)
    for number in range(rounds):
        turn = [(before, 0), (after, 1)][:: 1 if number % 2 else -1]
        found = {place: process.us(call, count, cold) for process, place in turn}
        pairs.append((found[0], found[1]))
    return pairs


def row_of(call: str, cold: bool, measured: list[list[tuple[float, float]]]) -> dict[str, Any]:
    """Args: measured: what each pair of processes found."""
    before_us, after_us = (statistics.median(each[place] for pairs in measured for each in pairs) for place in range(2))
    ratios = sorted(statistics.median(old / new for old, new in pairs) for pairs in measured)
    return {"call": call, "cold": cold, "before_us": before_us, "after_us": after_us, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a folder that holds an installed schedsearch")
    parser.add_argument("--after", type=Path, help="another")
    parser.add_argument("--processes", type=int, default=7, help="pairs of processes, which differ more than rounds do")
    parser.add_argument("--rounds", type=int, default=30, help="turns of a pair with each call")
    parser.add_argument("--only", default="", help="calls with this text")
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--driver", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        ctypes.CDLL(str(options.driver), ctypes.RTLD_GLOBAL)  # libcuda.so.1 is this one from here on
        if not options.answer.exists():
            build(options.answer)
            return
        answer(options.answer)
        return
    import common

    from schedsearch.device.detect import detect

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        driver, network = fake_driver(Path(folder)), Path(folder, "network.ssx")
        environment = os.environ | {"PYTHONPATH": str(options.after.resolve())}
        command = [sys.executable, __file__, "--answer", network, "--driver", driver]
        subprocess.run(command, check=True, env=environment, cwd=folder, stdout=subprocess.DEVNULL)
        measured: dict[tuple[str, bool], list[list[tuple[float, float]]]] = {}
        for _ in range(options.processes):
            before, after = (Process(getattr(options, version), driver, network) for version in VERSIONS)
            for cold in (False, True):
                for call in (each for each in before.calls if options.only in each):
                    found = in_turns(before, after, call, options.rounds, cold)
                    measured.setdefault((call, cold), []).append(found)
            before.close()
            after.close()
    rows = [row_of(*which, found) for which, found in sorted(measured.items(), key=lambda each: each[0][1])]
    cells = [
        (
            row["call"] + (", in a cold cache" if row["cold"] else ""),
            *(f"{row[key]:.2f}" for key in ("before_us", "after_us")),
            f"{statistics.median(row['ratios']):.2f} ({row['ratios'][0]:.2f} to {row['ratios'][-1]:.2f})",
        )
        for row in rows
    ]
    print(common.table(("call", "before, us", "after, us", "before / after"), cells))
    rows = [
        {key: row[key] for key in ("call", "cold", "ratios")} for row in rows
    ]  # the times say little about other machines
    common.write(options.out, {"machine": {"cpu": detect("cpu").name, "cores": os.cpu_count()}, "rows": rows})


if __name__ == "__main__":
    main()
