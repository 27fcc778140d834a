"""What the host does in an exact run of a slice: Python's time before and after it waits for the sizes. No GPU is needed.

    python benchmarks/dynamic_host.py --out dynamic_host.json

Kernels run once, so that the sizes are there; from then on launches, copies and waits do nothing. What is left is the time
that an exact run takes beyond kernels and driver. Arrays are NumPy's; `--torch` takes tensors of PyTorch on the CPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from typing import Any

import common
import numpy as np

import schedsearch
from schedsearch.device import open_device
from schedsearch.dynamic.graph import DynamicGraph
from schedsearch.dynamic.net import DynamicNet

SHAPE = (8, 16, 16)
WINDOWS = {"the same slice": ((1, 0, 3), (1, 0, 3)), "other extents": ((1, 0, 3), (2, 1, 4))}  # begin of two runs in turn
_WORDS = 3


class HostOnly:
    """A device whose kernels, copies and waits can be turned off; it notes when the host waits."""

    def __init__(self, device: Any) -> None:
        self._device, self.off, self.waited_ns = device, False, 0
        self.target = device.target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def load(self, artifact: Any) -> Any:
        return _Loaded(self, self._device.load(artifact))

    def copy_to_host(self, *args: Any) -> None:
        if not self.off:
            self._device.copy_to_host(*args)

    def wait(self, stream: int = 0) -> None:
        self.waited_ns = time.perf_counter_ns()


class _Loaded:
    def __init__(self, device: HostOnly, kernel: Any) -> None:
        self.device, self._kernel, self.artifact = device, kernel, kernel.artifact

    def bind(self, buffers: Mapping[str, int], scalars: Mapping[str, float], prepared: Any = None) -> Any:
        return _Bound(self.device, self._kernel.bind(buffers, scalars, prepared))

    def close(self) -> None:
        self._kernel.close()


class _Bound:
    def __init__(self, device: HostOnly, bound: Any) -> None:
        self._device, self._bound = device, bound
        self.set_pointer, self.set_scalar = bound.set_pointer, bound.set_scalar

    def launch(self, stream: int = 0) -> None:
        if not self._device.off:
            self._bound.launch(stream)


def slice_net(device: Any) -> DynamicNet:
    graph = DynamicGraph()
    x = graph.input("x", SHAPE, "float32")
    positions = [graph.input(name, (_WORDS,), "int64") for name in ("begin", "end", "strides")]
    graph.output(graph.call(schedsearch.dyn_strided_slice(x=SHAPE, dtype="float32"), x, *positions))
    return DynamicNet(
        graph.program(),
        device,
        lambda each: schedsearch.compile(each, target="cpu", allow=("default",)).artifact,
    )


def measure(net: DynamicNet, device: HostOnly, begins: Any, make: Any, repeat: int) -> dict[str, float]:
    """Medians in us before and after the wait, over runs that take two slices in turn."""
    x, end, strides = (make(each) for each in (np.zeros(SHAPE, np.float32), np.full(3, 2**31), np.ones(3, np.int64)))
    runs, sizes = [], []
    for begin in begins:
        given = (x, make(np.array(begin)), end, strides)
        device.off = False
        net(*given)
        runs.append(given)
        sizes.append(net._words.copy())
    device.off = True
    before, after = [], []
    for number in range(repeat):
        net._words[:] = sizes[number % 2]  # as the copy would have it
        begun = time.perf_counter_ns()
        net(*runs[number % 2])
        ended = time.perf_counter_ns()
        before.append((device.waited_ns - begun) / 1e3)
        after.append((ended - device.waited_ns) / 1e3)
    return {"before_us": statistics.median(before), "after_us": statistics.median(after)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="FILE", help="JSON file to write")
    parser.add_argument("--repeat", type=int, default=5000, metavar="N", help="runs")
    parser.add_argument("--torch", action="store_true", help="tensors of PyTorch instead of arrays of NumPy")
    args = parser.parse_args()
    make: Any = np.asarray
    if args.torch:
        import torch

        make = torch.from_numpy
    device = HostOnly(open_device(schedsearch.detect("cpu")))
    rows = []
    with slice_net(device) as net:
        for case, begins in WINDOWS.items():
            rows.append({"case": case, **measure(net, device, begins, make, args.repeat)})
            print({name: round(each, 2) if isinstance(each, float) else each for name, each in rows[-1].items()}, flush=True)
    common.write(args.out, {"rows": rows})


if __name__ == "__main__":
    main()
