"""Networks on a machine that tuned nothing: by shipped records, by the database that they were made from, and by defaults.

    python benchmarks/fresh_machine.py --shipped schedsearch/tuned --db tuned.db --out fresh_machine_h200.json
    python benchmarks/fresh_machine.py --through build --shipped folder --db tuned.db --networks inception_v3 --out own.json

Each network, for one image in float16, is made three times, each time in a process of its own: `shipped` without a database,
`tuned` with --db and without shipped records, `default` with neither. `shipped` and `tuned` begin with an empty build cache;
`default` has that of `shipped`, where the same kernels need no compiler, and with --cold one of its own. `first_s` is the
time to the first result, without imports and without making the model. Bytecode is written first, as pip does. All three
processes stay, and replay their network in CUDA graphs in turns while the others wait: `us` is the median.

--through optimize_     torchvision's model in channels_last, `schedsearch.torch.optimize_(networks=True)` (the default)
--through build         the network of onnx_models.py, `schedsearch.build` without the comparison with the model

`kernels` says where the kernels come from. Needs PyTorch, torchvision or onnx, onnx-ir and onnxscript, and a CUDA device;
with --target cpu it calls the networks as they are, in float32.
"""

from __future__ import annotations

import argparse
import collections
import compileall
import contextlib
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


def by_build(name: str, db: str, target: str, dtype: str) -> tuple[float, Any, Callable[[], Any]]:
    """Seconds until the first result, what says how many kernels are of which level, and what runs the network."""
    import numpy as np
    import onnx_models

    import schedsearch

    with tempfile.TemporaryDirectory() as folder:
        model = onnx_models.saved(f"{name}:1:float16", Path(folder))
        started = time.perf_counter()
        net = schedsearch.build(model, db=db, target=target, dtype=dtype, check=False, progress=False)
    if target == "cpu":
        arrays: list[Any] = [np.ones(port.shape, port.dtype) for port in net.inputs]
    else:
        import torch

        arrays = [torch.ones(port.shape, dtype=getattr(torch, port.dtype), device="cuda") for port in net.inputs]
    net(*arrays)
    wait(target)
    first_s = time.perf_counter() - started
    return first_s, collections.Counter(kernel.level for kernel in net.kernels), lambda: net(*arrays)


def by_optimize(name: str, db: str, target: str, dtype: str) -> tuple[float, Any, Callable[[], Any]]:
    """As `by_build`, of a model of torchvision."""
    import torch
    from tuned_layers import torchvision_model

    import schedsearch.executable.build as building
    from schedsearch.torch import optimize_

    model, x = torchvision_model(name, 1)
    place = {"device": "cpu" if target == "cpu" else "cuda", "dtype": getattr(torch, dtype)}
    model, x = (each.to(**place).to(memory_format=torch.channels_last) for each in (model, x + 1))
    levels: collections.Counter[str] = collections.Counter()
    inner = building.build_within

    def counting(*args: Any, **options: Any) -> Any:
        net = inner(*args, **options)
        levels.update(kernel.level for kernel in net.kernels)
        return net

    building.build_within = counting
    with torch.no_grad():
        model(x)  # what PyTorch does once is not ours
        wait(target)
        started = time.perf_counter()
        report = optimize_(model, x, db=db, networks=True, allow=(*_ALLOWED, "default"), progress=False)
        model(x)
        wait(target)
    first_s = time.perf_counter() - started
    print(report.headline, file=sys.stderr)

    def run() -> Any:
        with torch.no_grad():
            return model(x)

    return first_s, levels, run


_ALLOWED = ("exact", "same_architecture", "shipped")
THROUGH = {"optimize_": by_optimize, "build": by_build}


def serve(through: str, name: str, db: str, target: str, dtype: str) -> None:
    """In a process of its own: prints what making the network took, then for each line that it reads the us of a run."""
    first_s, levels, run = THROUGH[through](name, db, target, dtype)
    print(json.dumps({"first_s": first_s, "levels": dict(levels)}), flush=True)
    call = captured(run, target)
    for _ in sys.stdin:
        print(replay_us(call, target), flush=True)


def wait(target: str) -> None:
    if target != "cpu":
        import torch

        torch.cuda.synchronize()


def captured(run: Callable[[], Any], target: str) -> Callable[[], Any]:
    """A CUDA graph of a call, or the call on a CPU."""
    if target == "cpu":
        return run
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def replay_us(call: Callable[[], object], target: str) -> float:
    call()
    wait(target)
    started = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    wait(target)
    return (time.perf_counter_ns() - started) / CALLS / 1e3


class Served:
    """The process of a network."""

    def __init__(self, words: list[str], environment: dict[str, str]) -> None:
        command = [sys.executable, __file__, "--serve", *words]
        self._process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def line(self) -> Any:
        """The next line as JSON. Raises SystemExit if the process ended."""
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise SystemExit(f"the process of {self._process.args} ended")
        return json.loads(text)

    def us(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self.line())


def measured(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    nowhere = str(folder / "none.db")
    databases = {"shipped": nowhere, "tuned": str(Path(options.db).absolute()), "default": nowhere}
    caches = {"shipped": "first", "tuned": "own", "default": "cold" if options.cold else "first"}
    row: dict[str, Any] = {"network": name}
    with contextlib.ExitStack() as stack:
        served: dict[str, Served] = {}
        for way in options.ways:
            tuned = str(Path(options.shipped).absolute()) if way == "shipped" else ""
            environment = {"SCHEDSEARCH_TUNED_DIR": tuned, "SCHEDSEARCH_BUILD_CACHE": str(folder / name / caches[way])}
            words = [options.through, name, databases[way], options.target, options.dtype]
            served[way] = stack.enter_context(Served(words, environment))
            row[way] = served[way].line()
            print(name, way, row[way], flush=True)
        groups: dict[str, list[float]] = {way: [] for way in served}
        for turn in range(TURNS):
            for way, process in list(served.items())[:: 1 if turn % 2 else -1]:
                groups[way].append(process.us())
    for way, found in groups.items():
        row[way]["us"] = statistics.median(found)
    return row


def write_bytecode() -> None:
    import schedsearch
    from schedsearch import records, templates, tuner

    for each in (schedsearch, records, templates, tuner):
        for folder in each.__path__:
            compileall.compile_dir(folder, quiet=1)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["resnet50", "mobilenet_v2"])
    parser.add_argument("--through", choices=THROUGH, default="optimize_")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--cold", action="store_true", help="an empty build cache for `default`, too")
    parser.add_argument("--shipped", required=True, help="folder of shipped records")
    parser.add_argument("--db", required=True, help="the database that they were made from")
    parser.add_argument("--target", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", help="default: float16, or float32 on a CPU")
    parser.add_argument("--out", required=True, help="JSON file to write")
    options = parser.parse_args()
    options.dtype = options.dtype or ("float32" if options.target == "cpu" else "float16")
    write_bytecode()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.networks:
            rows.append(measured(name, options, Path(folder)))
            common.write(options.out, {"through": options.through, "dtype": options.dtype, "rows": rows})
            print(report(rows, options.ways), flush=True)


def report(rows: list[dict[str, Any]], ways: list[str]) -> str:
    names = ["network", *(f"{way} us" for way in ways), *(f"first result, {way}, s" for way in ways), "kernels"]
    lines = [
        (
            row["network"], *(f"{row[way]['us']:.1f}" for way in ways), *(f"{row[way]['first_s']:.1f}" for way in ways),
            " ".join(f"{level} {count}" for level, count in sorted(row[ways[0]]["levels"].items())),
        )
        for row in rows
    ]  # fmt: skip
    return common.table(names, lines)


if __name__ == "__main__":
    main()
