"""Networks with and without kernels that begin before the one in front of them ends (programmatic dependent launch).

    python benchmarks/early_launch.py --networks resnet50,mobilenet_v2 --out early_launch_h200.json

Each network of `onnx_models.py` is built once with default kernels and loaded `--loads` times in two ways: as it is, and
with SCHEDSEARCH_EARLY_LAUNCH=0. CUDA graphs of both get the same inputs, `--replays` times with new numbers, and must give
the same bits. Then groups of replays of both take turns. The table has the median over the loads of the median group: where
weights lie in memory matters. It needs PyTorch and a GPU of compute capability 9.0.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

TURNS, CALLS = 15, 40


class Captured:
    """A network whose calls a CUDA graph captured."""

    def __init__(self, path: Path, early: bool) -> None:
        import torch

        import schedsearch

        os.environ["SCHEDSEARCH_EARLY_LAUNCH"] = str(int(early))
        self.net = schedsearch.load(path)
        self.inputs = [torch.zeros(port.shape, dtype=getattr(torch, port.dtype), device="cuda") for port in self.net.inputs]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.net(*self.inputs)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            found = self.net(*self.inputs)
        self.outputs = found if isinstance(found, tuple) else (found,)

    def results(self, numbers: list[Any]) -> list[Any]:
        for array, new in zip(self.inputs, numbers, strict=True):
            array.copy_(new)
        self.graph.replay()
        return [output.clone() for output in self.outputs]


def replay_us(call: Callable[[], object]) -> float:
    import torch

    torch.cuda.synchronize()
    started = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter_ns() - started) / CALLS / 1e3


def measured(path: Path, replays: int, loads: int) -> dict[str, Any]:
    """Microseconds of a replay of both, load by load, and how many replays differ."""
    import torch

    times: dict[str, list[float]] = {"early": [], "one after another": []}
    differing = 0
    for load in range(loads):
        pair = {name: Captured(path, name == "early") for name in times}
        torch.manual_seed(load)
        for _ in range(replays // loads):
            numbers = [torch.randn(array.shape, device="cuda").to(array.dtype) for array in pair["early"].inputs]
            results = zip(*(each.results(numbers) for each in pair.values()), strict=True)
            differing += not all(torch.equal(one, other) for one, other in results)
        groups: dict[str, list[float]] = {name: [] for name in times}
        for _ in range(TURNS):
            for name, each in pair.items():
                groups[name].append(replay_us(each.graph.replay))
        for name, each in pair.items():
            times[name].append(statistics.median(groups[name]))
            each.graph.reset()
            each.net.close()
    return {**{name: statistics.median(some) for name, some in times.items()}, "loads": times, "differing": differing}


def main() -> None:
    import onnx
    import onnx_models

    import schedsearch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="resnet50,mobilenet_v2")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--replays", type=int, default=2000)
    parser.add_argument("--loads", type=int, default=5, help="how often each network is loaded")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.networks.split(","):
            model, built = Path(folder, f"{name}.onnx"), Path(folder, f"{name}.ssx")
            onnx.save(onnx_models.build(name), model)
            database = Path(folder, "empty.db")
            schedsearch.build(model, target="cuda", db=database, dtype=options.dtype, out=built, check=False).close()
            rows.append({"network": name, "replays": options.replays, **measured(built, options.replays, options.loads)})
            common.write(options.out, {"dtype": options.dtype, "rows": rows})
    print(
        common.table(
            ("network", "one after another, us", "early, us", "ratio", "replays that differ"),
            [
                (r["network"], f"{r['one after another']:.1f}", f"{r['early']:.1f}",
                 f"{r['one after another'] / r['early']:.3f}", f"{r['differing']} of {r['replays']}")
                for r in rows
            ],
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
