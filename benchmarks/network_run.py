"""A whole network in one CUDA graph: its time, the time of every kernel call, and the host time of a call.

    python benchmarks/network_run.py --network resnet50 --db records.db --out network_run.json

Needs a CUDA device and PyTorch, but not ONNX: the networks are written here node by node, in NHWC and with random weights.
Kernels without a record take their default configuration. The output is compared with PyTorch in float32.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import schedsearch
from schedsearch.network.graph import Constant, Network, Node, Value, View

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # middle channels and blocks of ResNet-50
EXPANSION = 4
CALLS = 200


class Writer:
    """A network that grows node by node. Values are images in NCHW; kernels take and give NHWC."""

    def __init__(self, *shape: int, dtype: str) -> None:
        self.dtype = dtype
        self.values = {"x": Value("x", "NCHW", shape, dtype)}
        self.constants: dict[str, Constant] = {}
        self.nodes: list[Node | View] = []
        self._rng = np.random.default_rng(0)

    def conv(self, name: str, x: str, k: int, size: int, stride: int = 1, residual: str = "", relu: bool = True) -> str:
        n, c, h, w = self.values[x].shape
        stages = ("bias", *(("residual",) if residual else ()), *(("relu",) if relu else ()))
        workload = schedsearch.conv2d(
            n=n, h=h, w=w, c=c, k=k, r=size, s=size, stride=stride, padding=size // 2, dtype=self.dtype, epilogue=stages
        )
        arguments = {
            "x": x,
            "weight": self._constant(f"{name}.weight", "OIHW", (k, c, size, size), (2.0 / (c * size * size)) ** 0.5),
            "bias": self._constant(f"{name}.bias", "K", (k,), 0.1),
            **({"residual": residual} if residual else {}),
        }
        return self._node(name, workload, arguments, (n, k, *workload.output.shape[1:3]))

    def pool(self, name: str, x: str, mode: str, size: int, stride: int, padding: int) -> str:
        n, c, h, w = self.values[x].shape
        workload = schedsearch.pool2d(
            n=n, c=c, h=h, w=w, r=size, s=size, mode=mode, stride=stride, padding=padding, dtype=self.dtype
        )
        return self._node(name, workload, {"x": x}, (n, c, *workload.output.shape[1:3]))

    def dense(self, name: str, x: str, outputs: int) -> str:
        n, c, _, _ = self.values[x].shape
        self.values[f"{name}.flat"] = Value(f"{name}.flat", "AB", (n, c), self.dtype)
        self.nodes.append(View(f"{name}.flatten", (f"{name}.flatten",), x, f"{name}.flat", (("NHWC", "AB"),)))
        workload = schedsearch.dense(m=n, n=outputs, k=c, dtype=self.dtype, epilogue=("bias",))
        arguments = {
            "x": f"{name}.flat",
            "weight": self._constant(f"{name}.weight", "AB", (outputs, c), c**-0.5),
            "bias": self._constant(f"{name}.bias", "A", (outputs,), 0.1),
        }
        return self._node(name, workload, arguments, (n, outputs), axes="AB")

    def network(self, output: str) -> Network:
        return Network(("x",), (output,), self.values, self.constants, tuple(self.nodes))

    def _constant(self, name: str, axes: str, shape: tuple[int, ...], scale: float) -> str:
        array = (self._rng.standard_normal(shape) * scale).astype(np.float16).astype(np.float32)
        self.constants[name] = Constant(name, axes, array)
        return name

    def _node(
        self,
        name: str,
        workload: schedsearch.Workload,
        arguments: dict[str, str],
        shape: tuple[int, ...],
        axes: str = "NCHW",
    ) -> str:
        self.values[f"{name}.y"] = Value(f"{name}.y", axes, shape, self.dtype)
        self.nodes.append(Node(name, (name,), arguments, {"y": f"{name}.y"}, (workload,)))
        return f"{name}.y"


def resnet50(
    batch: int, dtype: str, classes: int = 1000, size: int = 224, stages: Sequence[tuple[int, int]] = STAGES
) -> Network:
    """torchvision's resnet50 with batch norms folded into the convolutions."""
    net = Writer(batch, 3, size, size, dtype=dtype)
    y = net.pool("maxpool", net.conv("conv1", "x", 64, 7, 2), "max", 3, 2, 1)
    for number, (middle, blocks) in enumerate(stages, 1):
        for block in range(blocks):
            name, stride = f"layer{number}.{block}", 2 if number > 1 and block == 0 else 1
            short = y if block else net.conv(f"{name}.downsample", y, EXPANSION * middle, 1, stride, relu=False)
            t = net.conv(f"{name}.conv2", net.conv(f"{name}.conv1", y, middle, 1), middle, 3, stride)
            y = net.conv(f"{name}.conv3", t, EXPANSION * middle, 1, residual=short)
    y = net.pool("avgpool", y, "average", net.values[y].shape[2], 1, 0)
    return net.network(net.dense("fc", y, classes))


def small(batch: int, dtype: str) -> Network:
    """One block of each kind of ResNet-50, for a first look."""
    return resnet50(batch, dtype, classes=64, size=64, stages=((64, 1), (128, 1)))


NETWORKS = {"small": small, "resnet50": resnet50}


def by_torch(network: Network, x: Any) -> Any:
    """The output of a network, computed by PyTorch in float32 from the same numbers."""
    import torch

    functional = torch.nn.functional
    values = {"x": x.float()}

    def constant(name: str) -> Any:
        return torch.from_numpy(network.constants[name].array).to(x.device)

    for node in network.nodes:
        if isinstance(node, View):
            values[node.y] = values[node.x].flatten(1)
            continue
        workload, (result,), source = node.implementations[0], node.outputs.values(), values[node.arguments["x"]]
        if workload.op == "pool2d":
            pool = functional.max_pool2d if workload.mode == "max" else functional.avg_pool2d
            values[result] = pool(source, (workload.r, workload.s), workload.stride, workload.padding[0])
            continue
        weight, bias = constant(node.arguments["weight"]), constant(node.arguments["bias"])
        if workload.op == "dense":
            values[result] = functional.linear(source, weight, bias)
            continue
        y = functional.conv2d(source, weight, bias, workload.stride, workload.padding[:2])
        if "residual" in node.arguments:
            y = y + values[node.arguments["residual"]]
        values[result] = y.relu() if "relu" in workload.epilogue else y
    return values[network.outputs[0]]


def host_time_us(call: Any) -> float:
    """Microseconds that the calling thread needs for one call, without waiting for the GPU."""
    import torch

    for _ in range(10):
        call()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(CALLS // 10):
            call()
        best = min(best, (time.perf_counter() - start) / (CALLS // 10))
        torch.cuda.synchronize()
    return best * 1e6


def measure(name: str, batch: int, dtype: str, db: str, out: Path | None) -> dict[str, Any]:
    import torch

    network = NETWORKS[name](batch, dtype)
    start = time.perf_counter()
    net = schedsearch.build(network, db=db, target="cuda", say=print, out=out)
    build_s = time.perf_counter() - start
    print(net.explain().split("\n  ")[0])
    x = torch.randn(network.values["x"].shape, device="cuda", dtype=getattr(torch, dtype))
    y, truth = net(x), by_torch(network, x)
    error = float((y.float() - truth).abs().max() / truth.abs().max())
    step = net.bind(x)
    same = bool(torch.equal(step(), y))
    times = net.measure()
    result = {
        "network": name,
        "batch": batch,
        "dtype": dtype,
        "target": net.program.target,
        "build_s": build_s,
        "error": error,
        "bound_is_same": same,
        "total_us": times.total_ns / 1e3,
        "sum_of_calls_us": sum(times.calls_ns) / 1e3,
        "host_us": host_time_us(lambda: net(x)),
        "host_bound_us": host_time_us(step),
        "arena_bytes": net.program.arena_bytes,
        "least_arena_bytes": net.program.least_arena_bytes,
        "calls": [
            {
                "name": call.name,
                "kernel": call.label,
                "template": call.origin.template,
                "level": call.origin.level,
                "us": ns / 1e3,
            }
            for call, ns in zip(net.steps, times.calls_ns)
        ],
    }
    if out is not None:
        start = time.perf_counter()
        with schedsearch.load(out) as loaded:
            again = loaded(x)
            torch.cuda.synchronize()
            result["load_ms"] = (time.perf_counter() - start) * 1e3
            result["loaded_is_same"] = bool(torch.equal(again, y))
    net.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=sorted(NETWORKS), default="resnet50")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--db", default="records.db")
    parser.add_argument("--save", type=Path, help="also write the executable, load it and time that")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    arguments = parser.parse_args()
    found = measure(arguments.network, arguments.batch, arguments.dtype, arguments.db, arguments.save)
    for call in sorted(found["calls"], key=lambda call: -call["us"])[:12]:
        print(f"  {call['us']:8.2f} us  {call['name']:22} {call['kernel']} by {call['template']}")
    print({name: value for name, value in found.items() if name != "calls"})
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
