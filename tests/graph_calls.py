"""Calls of a network on the fake driver, whose graphs hold what their kernels would read; a script.

    graph_calls.py folder

It prints JSON: for each step of the story below, what the driver launched since the one before. Arrays are NumPy's: the fake
GPU's memory is the host's.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

DRIVER = ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)

import network_support as support  # noqa: E402
from c_export_support import parameter_bytes  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.device import open_device  # noqa: E402
from schedsearch.device.cuda_driver import DriverError  # noqa: E402
from schedsearch.errors import ArgumentError, UsageError  # noqa: E402
from schedsearch.executable.assemble import Executable  # noqa: E402
from schedsearch.executable.fixed import FixedNet  # noqa: E402
from schedsearch.network.graph import Network, Node, Value  # noqa: E402
from schedsearch.runtime import loading  # noqa: E402

SHAPE = (8, 16)
Array = np.ndarray[Any, Any]


def two_calls() -> Network:
    """x -> t -> y."""

    def node(name: str, expression: str, x: str, y: str) -> Node:
        workload = schedsearch.elementwise(y=SHAPE, expression=expression, dtype="float32")
        return Node(name, (name,), {"a": x}, {"y": y}, (workload,))

    nodes = node("first", "tanh(a)", "x", "t"), node("second", "relu(a)", "t", "y")
    return Network(("x",), ("y",), {name: Value(name, "AB", SHAPE, "float32") for name in "xty"}, {}, nodes)


def built(folder: Path) -> Executable:
    with mock.patch.object(
        loading, "_verified", lambda device, fallback, loaded, workload=None: loaded
    ):  # it computes nothing
        made = support.build(two_calls(), schedsearch.detect("cuda"), folder / "no.db")
    os.environ["FAKE_PARAMS"] = str(folder / "params.txt")
    (folder / "params.txt").write_text(parameter_bytes(made.artifacts.values()))
    return made


class Story:
    """Steps, with what the driver saw in each.

    A launch of a graph reads `graph on 0: x y`: the stream's number, and which of the step's arrays the kernels get, in
    order. Before it there is an `update` for each kernel whose arguments the graph did not know, and a `copy`, where there
    is one.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self.steps: dict[str, list[str]] = {}

    def step(self, name: str, **arrays: Array) -> None:
        known = {address_of(each).to_bytes(8, "little").hex(): label for label, each in arrays.items()}
        seen: list[str] = []
        for line in self._log.read_text().splitlines():
            kind, *words = line.split()
            if kind == "node":
                seen[-1] += "".join(f" {known[word]}" for word in words if word in known)
            elif kind == "graph":
                seen.append(f"{line}:")
            elif kind in ("update", "copy", "launch"):
                seen.append(kind)
        self.steps[name] = seen
        self._log.write_text("")

    def refuses(self, name: str, error: type[Exception], call: Callable[[], object]) -> None:
        """Notes the error's message in front of what the driver saw."""
        try:
            call()
        except error as raised:
            text = str(raised)
        self.step(name)
        self.steps[name].insert(0, text)


def address_of(array: Array) -> int:
    return int(array.ctypes.data)


def zeros() -> Array:
    return np.zeros(SHAPE, np.float32)


def addresses(story: Story, net: FixedNet) -> None:
    a, b, out = zeros(), zeros(), zeros()
    y = net(a)
    story.step("first", a=a, y=y)
    net(a, out=out)
    net(a, out=out)
    story.step("twice to out", a=a, out=out)
    y = net(a)
    story.step("a new output", a=a, y=y)
    before = address_of(y)
    del y
    y = net(a)
    assert address_of(y) == before  # NumPy takes the memory that was freed last
    story.step("the same addresses", a=a, y=y)
    kept = y
    y = net(b)
    story.step("another input", a=a, b=b, y=y, kept=kept)
    odd = np.zeros(a.size + 1, np.float32)[1:].reshape(SHAPE)
    odd = odd if address_of(odd) % 16 else np.zeros(a.size + 2, np.float32)[2:].reshape(SHAPE)
    y = net(odd)
    story.step("not aligned", a=a, b=b, odd=odd, y=y)
    y = net(b)
    story.step("after that", a=a, b=b, y=y)
    for name, wrong in {"dtype": a.astype(np.float64), "shape": a[:4], "strides": a[:, ::-1], "kind": a.tolist()}.items():
        story.refuses(f"wrong {name}", ArgumentError, lambda: net(wrong))  # noqa: B023
    y = net(b)
    story.step("after wrong ones", b=b, y=y)


def streams(story: Story, net: FixedNet) -> None:
    a, b = zeros(), zeros()
    first, second = (net._device.create_stream() for _ in range(2))
    other = net.instance()
    other.device = net.device
    y, z = net(a, stream=first), other(b, stream=second)
    story.step("two streams", a=a, b=b, y=y, z=z)
    y, z = net(b, stream=first), other(a, stream=second)
    story.step("two streams, other inputs", a=a, b=b, y=y, z=z)
    step, again = net.bind(a), other.bind(a)
    step()
    step(first)
    again(second)
    z = net(b)
    step()
    story.step("bound", a=a, b=b, y=step.outputs[0], other=again.outputs[0], z=z)
    step.close()
    again.close()
    other.close()


def contexts(story: Story, net: FixedNet) -> None:
    a, context = zeros(), ctypes.c_void_p()
    y = net(a)
    for name in ("another context", "no context"):
        if name == "another context":
            DRIVER.cuCtxCreate_v2(ctypes.byref(context), 0, 0)
        DRIVER.cuCtxSetCurrent(context)
        del y
        y = net(a)
        story.step(name, a=a, y=y)
        current = ctypes.c_void_p()
        DRIVER.cuCtxGetCurrent(ctypes.byref(current))
        assert current.value == context.value
        context = ctypes.c_void_p()
    net._device.make_current()


def failures(story: Story, net: FixedNet) -> None:
    a, b = zeros(), zeros()
    y = net(a)
    story.step("before", a=a, y=y)
    for function in ("cuGraphExecKernelNodeSetParams", "cuGraphLaunch"):
        os.environ["FAKE_REFUSE"] = function
        story.refuses(function, DriverError, lambda: net(b))
        del os.environ["FAKE_REFUSE"]
        y = net(b)
        story.step(f"after {function}", a=a, b=b, y=y)
        y = net(a)
        story.step(f"another after {function}", a=a, b=b, y=y)
    net.close()
    story.refuses("closed", UsageError, lambda: net(a))


def main() -> None:
    folder = Path(sys.argv[1])
    executable, story = built(folder), Story(Path(os.environ["FAKE_LOG"]))
    with FixedNet(executable, open_device(schedsearch.detect("cuda"))) as net:
        net.device = ("cpu", 0)  # where its arrays are
        net._device.make_current()  # as it is where PyTorch was used before
        story.step("load")
        for tell in (addresses, streams, contexts, failures):
            tell(story, net)
    print(json.dumps(story.steps))


if __name__ == "__main__":
    main()
