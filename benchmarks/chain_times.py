"""How well the times of kernels, taken in each mode of timing, predict the time of the network that they make.

    python benchmarks/chain_times.py --cases resnet50:1:float16 mobilenet_v2:1:float16 --out chain_times_h200.json

Each network of `onnx_models.py` is planned and assembled with the kernels that the database has, else with defaults. Then
every kernel is timed alone in each mode, and the network in its CUDA graph. The table has the differences from the network's
time of the sums of the kernels' times, and of the prediction that a plan makes of the times in a chain
(`network.residency.NEIGHBOURS`). It needs PyTorch and a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import common
import onnx_models
import torch
from networks import hot_us

from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.executable.assemble import assemble
from schedsearch.executable.fixed import FixedNet
from schedsearch.executable.kernels import find_kernels
from schedsearch.measure.timing import Arena, open_timer
from schedsearch.measurement import CHAIN_GRAPH, COLD_GRAPH, COLD_GRAPH_PREPARED, HOT_GRAPH
from schedsearch.network.costs import costs_of
from schedsearch.network.graph import Network, Node
from schedsearch.network.lower import lower
from schedsearch.network.model import read_model
from schedsearch.network.plan import best_plan
from schedsearch.network.residency import Residency

MODES = (COLD_GRAPH_PREPARED, HOT_GRAPH, CHAIN_GRAPH)
SAMPLES = 5


def kernel_us(device: Any, timer: Any, workload: Any, artifact: Any, mode: str) -> float:
    """The time of one launch."""
    with (
        contextlib.closing(Arena(device, workload, mode)) as arena,
        contextlib.closing(device.load(artifact)) as kernel,
        contextlib.closing(timer.prepare(kernel, arena)) as timed,
    ):
        return statistics.median(timed.sample(SAMPLES)) / 1e3


def measured(case: str, db: str) -> dict[str, Any]:
    target = detect("cuda")
    with tempfile.TemporaryDirectory() as folder:
        path = onnx_models.saved(case, Path(folder))
        network = lower(read_model(path), dtype="float16").with_io_layout("NHWC")
    with costs_of(network, db, target, COLD_GRAPH) as costs:
        plan = best_plan(network, costs)
    counts = Counter([*plan.implementations.values(), *(each.workload for each in plan.conversions)])
    kernels = find_kernels(counts, db, target)
    executable = assemble(network, plan, kernels.__getitem__, target=target.key)
    with FixedNet(executable, open_device(target)) as net:
        (port,) = net.inputs
        x = torch.randn(port.shape, device="cuda").to(getattr(torch, port.dtype))
        launch = net.bind(x)
        network_us = statistics.median(hot_us(launch) for _ in range(3))
        alone_us = sum(net.measure(60).calls_ns) / 1e3
        launch.close()
    rows = []
    with contextlib.closing(open_device(target)) as device:
        timer = open_timer(device)
        for workload, count in counts.items():
            times = {mode: kernel_us(device, timer, workload, kernels[workload].artifact, mode) for mode in MODES}
            constant_bytes = sum(spec.nbytes for spec in workload.signature if spec.constant)
            rows.append({"kernel": workload.label, "count": count, "constant_bytes": constant_bytes, "us": times})
    sums = {mode: sum(row["count"] * row["us"][mode] for row in rows) for mode in MODES}
    residency = Residency.of(network, target, CHAIN_GRAPH)
    saved_us = sum(count * residency.saved_ns(workload, 1e9) for workload, count in counts.items()) / 1e3
    sums["predicted"] = sums[CHAIN_GRAPH] - saved_us
    return {
        "case": case, "network_us": network_us, "calls": sum(counts.values()), "weight_bytes": weight_bytes(network),
        "alone_us": alone_us, "sums_us": sums, "kernels": rows,
    }  # fmt: skip


def weight_bytes(network: Network) -> int:
    """Bytes of the constants that the kernels read."""
    found: dict[str, int] = {}
    for node in network.nodes:
        if isinstance(node, Node):
            found |= {node.arguments[spec.name]: spec.nbytes for spec in node.implementations[0].signature if spec.constant}
    return sum(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["resnet50:1:float16", "mobilenet_v2:1:float16", "vgg16:1:float16"])
    parser.add_argument("--db", default="benchmark.db")
    parser.add_argument("--out")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in options.cases:
        rows.append(measured(case, options.db))
        common.write(options.out, {"rows": rows})
        network_us = rows[-1]["network_us"]
        shares = ", ".join(f"{mode} {us:.1f} ({us / network_us - 1:+.1%})" for mode, us in rows[-1]["sums_us"].items())
        print(f"{case}: {network_us:.1f} us in its graph; sums of {rows[-1]['calls']} kernels: {shares}", flush=True)
    header = ("network, us", "in its graph", *MODES)
    cells = [
        (
            row["case"],
            f"{row['network_us']:.1f}",
            *(f"{row['sums_us'][mode] / row['network_us'] - 1:+.1%}" for mode in MODES),
        )
        for row in rows
    ]
    print(common.table(header, cells))


if __name__ == "__main__":
    main()
