"""Networks on a machine that tuned nothing: by shipped records, by the database that they were made from, and by defaults.

    python benchmarks/fresh_machine.py --shipped schedsearch/tuned --db tuned.db --out fresh_machine_h200.json
    python benchmarks/fresh_machine.py --shipped folder --db tuned.db --networks inception_v3 vgg16 --out others.json

Each network of onnx_models.py, for one image in float16, is built three times, each time in a process of its own with an
empty build cache: `shipped` without a database, `tuned` with --db and without shipped records, `default` with neither.
`first_s` is the time from the call of `schedsearch.build` to the first result, without the comparison with the model
(check=False) and without imports. Then one process loads all three and replays them in CUDA graphs in turns: `us` is the
median. Layers are counted by where their kernel comes from. Needs PyTorch, onnx, onnx-ir, onnxscript, and a CUDA device;
with --target cpu it calls the networks as they are, in float32.
"""

from __future__ import annotations

import argparse
import collections
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

import common

WAYS = ("shipped", "tuned", "default")
TURNS, CALLS = 25, 40


def build_one(model: str, db: str, target: str, dtype: str, out: str) -> None:
    """In a process of its own: builds a network, and prints what that took as JSON."""
    import numpy as np

    import schedsearch

    started = time.perf_counter()
    net = schedsearch.build(model, db=db, target=target, dtype=dtype, check=False, progress=False)
    arrays = _inputs(net, target)
    result = net(*arrays)
    if target != "cpu":
        import torch

        torch.cuda.synchronize()
    first_s = time.perf_counter() - started
    levels = collections.Counter(kernel.level for kernel in net.kernels)
    net.save(out)
    total = float(np.abs(result if target == "cpu" else result.float().cpu().numpy()).sum())
    print(json.dumps({"first_s": first_s, "levels": dict(levels), "finite": bool(np.isfinite(total))}))


def _inputs(net: Any, target: str) -> list[Any]:
    if target == "cpu":
        import numpy as np

        return [np.ones(port.shape, port.dtype) for port in net.inputs]
    import torch

    return [torch.ones(port.shape, dtype=getattr(torch, port.dtype), device="cuda") for port in net.inputs]


def launcher(path: str, target: str) -> tuple[Any, Callable[[], object]]:
    """A loaded network, and what runs it once."""
    import schedsearch

    net = schedsearch.load(path)
    arrays = _inputs(net, target)
    if target == "cpu":
        return net, lambda: net(*arrays)
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        net(*arrays)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        net(*arrays)
    return (net, graph), graph.replay


def replay_us(call: Callable[[], object], target: str) -> float:
    def wait() -> None:
        if target != "cpu":
            import torch

            torch.cuda.synchronize()

    wait()
    started = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    wait()
    return (time.perf_counter_ns() - started) / CALLS / 1e3


def measured(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import onnx_models

    model = onnx_models.saved(f"{name}:1:float16", folder)
    databases = {"shipped": folder / "none.db", "tuned": Path(options.db).absolute(), "default": folder / "none.db"}
    row: dict[str, Any] = {"network": name}
    for way in WAYS:
        with tempfile.TemporaryDirectory() as cache:
            tuned = str(Path(options.shipped).absolute()) if way == "shipped" else ""
            environment = {**os.environ, "SCHEDSEARCH_TUNED_DIR": tuned, "SCHEDSEARCH_BUILD_CACHE": cache}
            words = [str(model), str(databases[way]), options.target, options.dtype, str(folder / f"{name}_{way}.ssx")]
            command = [sys.executable, __file__, "--one", *words]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise SystemExit(f"{name} {way}: {done.stderr[-2000:]}")
        row[way] = json.loads(done.stdout.splitlines()[-1])
    loaded = {way: launcher(str(folder / f"{name}_{way}.ssx"), options.target) for way in WAYS}
    groups: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(TURNS):
        for way, (_, call) in loaded.items():
            groups[way].append(replay_us(call, options.target))
    for way in WAYS:
        row[way]["us"] = statistics.median(groups[way])
    return row


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        build_one(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["resnet50", "mobilenet_v2"])
    parser.add_argument("--shipped", required=True, help="folder of shipped records")
    parser.add_argument("--db", required=True, help="the database that they were made from")
    parser.add_argument("--target", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", help="default: float16, or float32 on a CPU")
    parser.add_argument("--out", required=True, help="JSON file to write")
    options = parser.parse_args()
    options.dtype = options.dtype or ("float32" if options.target == "cpu" else "float16")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.networks:
            rows.append(measured(name, options, Path(folder)))
            common.write(options.out, {**common.facts(), "dtype": options.dtype, "rows": rows})
    lines = [
        (
            row["network"],
            *(f"{row[way]['us']:.1f}" for way in WAYS),
            f"{row['shipped']['us'] / row['tuned']['us']:.3f}",
            f"{row['default']['us'] / row['shipped']['us']:.3f}",
            *(f"{row[way]['first_s']:.1f}" for way in WAYS),
            " ".join(f"{level} {count}" for level, count in sorted(row["shipped"]["levels"].items())),
        )
        for row in rows
    ]
    names = ("network", "shipped us", "tuned us", "default us", "shipped / tuned", "default / shipped")
    firsts = tuple(f"first result, {way}, s" for way in WAYS)
    print(common.table((*names, *firsts, "kernels"), lines))


if __name__ == "__main__":
    main()
