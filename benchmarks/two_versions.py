"""Two versions of schedsearch on one machine, measured in turns: build, load, run and call the same networks and kernels.

    git archive OLD | tar -x -C /tmp/old-tree
    python -m pip install --no-deps --target /tmp/before /tmp/old-tree
    python -m pip install --no-deps --target /tmp/after .
    python benchmarks/two_versions.py --before /tmp/before --after /tmp/after --target cuda --out two_versions_h200.json
    taskset -c 0,1 python benchmarks/two_versions.py --before /tmp/before --after /tmp/after --target cpu \\
        --networks inception_v3 --out two_versions_cpu.json

`--before` and `--after` are folders that hold an installed schedsearch; everything else comes from this interpreter's
environment. Both versions build each network of `onnx_models.py` from one ONNX file, side by side on the same cores, with
empty build caches. Kernels are the defaults, so that a search's luck changes nothing. Then processes of both versions take
turns, `--rounds` each: the time from `schedsearch.load` to the first result, the time of a run (on a GPU of a CUDA graph of
`net(x)`), and on a GPU the host's time of `net(x)`, of a bound step, of a built-in kernel and of a user's kernel, and the
fp16 convolutions of `convolutions.py`. The table shows the least time of a version's rounds: other processes only add to it.

On a GPU it needs PyTorch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NETWORKS = (
    "resnet50", "resnet50:int8", "inception_v3", "vgg16", "vgg16:int8", "mobilenet_v2", "super_resolution",
    "resnet18_depthwise",
)  # fmt: skip
VERSIONS = ("before", "after")
CALLS, GROUPS = 20, 25
HERE = Path(__file__).resolve().parent


# ---- one version, in a process of its own


def median_us(call: Callable[[], object], wait: Callable[[], object], *, include_wait: bool) -> float:
    """The median over groups of calls, each begun on an idle device; microseconds a call."""
    times_ns = []
    for _ in range(GROUPS):
        wait()
        started = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        if include_wait:
            wait()
        times_ns.append((time.perf_counter_ns() - started) / CALLS)
        wait()
    return statistics.median(times_ns) / 1e3


class Machine:
    """Arrays and waiting on the target: tensors of PyTorch on a GPU, arrays of NumPy on a CPU."""

    def __init__(self, target: str) -> None:
        self.gpu = target != "cpu"
        if self.gpu:
            import torch

            torch.zeros(1, device="cuda")

    def random(self, shape: tuple[int, ...], dtype: str) -> Any:
        import numpy as np

        rng = np.random.default_rng(0)
        array = rng.standard_normal(shape, dtype=np.float32)
        if dtype.startswith(("int", "uint")):
            array = rng.integers(0, 100, shape)
        array = array.astype(dtype)
        if not self.gpu:
            return array
        import torch

        return torch.from_numpy(array).cuda()

    def wait(self) -> None:
        if self.gpu:
            import torch

            torch.cuda.synchronize()

    def run_us(self, call: Callable[[], object]) -> float:
        """What a run takes, without the host's part where the device can repeat it alone."""
        for _ in range(3):
            call()
        if not self.gpu:
            return median_us(call, self.wait, include_wait=True)
        import torch

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return median_us(graph.replay, self.wait, include_wait=True)

    def host_us(self, call: Callable[[], object]) -> float:
        for _ in range(3):
            call()
        return median_us(call, self.wait, include_wait=False)


def _require(folder: Path) -> None:
    import schedsearch

    if not Path(schedsearch.__file__).is_relative_to(folder.resolve()):
        raise SystemExit(f"this interpreter has a schedsearch of its own ({schedsearch.__file__}); use one without")


def build(options: argparse.Namespace) -> dict[str, float]:
    """Builds the networks that `--models` holds, and says how many seconds each took."""
    import schedsearch

    found = {}
    for name in options.networks:
        started = time.perf_counter()
        net = schedsearch.build(options.models / f"{name}.onnx", target=options.target, db=options.folder / "empty.db")
        found[f"build {name}, s"] = time.perf_counter() - started
        net.save(options.folder / f"{name}.ssx")
        net.close()
    if options.layers:
        list(_layers(options))  # into the build cache
    return found


def measure(options: argparse.Namespace) -> dict[str, float]:
    import schedsearch

    machine = Machine(options.target)
    found: dict[str, float] = {}
    for name in options.networks:
        path = options.folder / f"{name}.ssx"
        started = time.perf_counter()
        net = schedsearch.load(path)
        inputs = [machine.random(port.shape, port.dtype) for port in net.inputs]
        net(*inputs)
        machine.wait()
        found[f"load {name} to its first result, ms"] = (time.perf_counter() - started) * 1e3
        found[f"run {name}, us"] = machine.run_us(lambda: net(*inputs))  # noqa: B023
        if machine.gpu:  # on a CPU the host runs the kernels
            found[f"host: net(x) of {name}, us"] = machine.host_us(lambda: net(*inputs))  # noqa: B023
            found[f"host: bound step of {name}, us"] = machine.host_us(net.bind(*inputs))
        net.close()
    if options.layers:
        found |= _kernels(machine, options)
    return found


SMALL = (1, 7, 7, 64, 64, 1, 1, 0)  # the device keeps up with the host


def _layers(options: argparse.Namespace) -> Iterator[tuple[list[int], Any]]:
    """The fp16 layers and a deployed kernel of each."""
    import schedsearch

    for layer in [*options.layers, SMALL]:
        n, h, w, c, k, size, stride, padding = layer
        sizes = {"n": n, "h": h, "w": w, "c": c, "k": k, "r": size, "s": size, "stride": stride, "padding": padding}
        workload = schedsearch.Workload.conv2d(**sizes, dtype="float16", layout="NHWC")
        yield layer, schedsearch.compile(workload, target=options.target, db=options.folder / "empty.db")


def _kernels(machine: Machine, options: argparse.Namespace) -> dict[str, float]:
    found: dict[str, float] = {}
    for (n, h, w, c, k, size, _, _), kernel in _layers(options):
        x = machine.random((n, h, w, c), "float16").permute(0, 3, 1, 2)  # NCHW to PyTorch, channels last in memory
        weight = machine.random((k, size, size, c), "float16").permute(0, 3, 1, 2)
        found[f"conv2d fp16 {n}x{h}x{w}x{c} k{k} {size}x{size}, us"] = machine.run_us(lambda: kernel(x, weight))  # noqa: B023
    found["host: kernel(x, w), us"] = machine.host_us(lambda: kernel(x, weight))  # of the small one, which comes last
    found["host: bound step of a kernel, us"] = machine.host_us(kernel.bind(x, weight))
    sys.path.insert(0, str(HERE.parent / "examples" / "own_kernel"))
    stencil = importlib.import_module("stencil").stencil
    u, v = machine.random((64, 64), "float32"), machine.random((64, 64), "float32")
    found["host: a user's kernel, us"] = machine.host_us(lambda: stencil(u, v))
    return found


# ---- both versions


def _start(version: str, part: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    folder = options.folder / version
    folder.mkdir(exist_ok=True)
    command = [sys.executable, __file__, "--part", part, "--target", options.target, "--models", str(options.folder)]
    command += ["--folder", str(folder), "--version", str(getattr(options, version)), "--networks", *options.networks]
    command += ["--layers", json.dumps(options.layers)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [str(getattr(options, version).resolve()), str(HERE), os.environ.get("PYTHONPATH", "")]
        ),
        "PYTHONSAFEPATH": "1",
        "SCHEDSEARCH_BUILD_CACHE": str(folder / "cache"),
        "SCHEDSEARCH_STATE_DIR": str(folder / "state"),
    }
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def _answer(process: subprocess.Popen[str]) -> dict[str, float]:
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"a part failed with exit code {process.returncode}")
    answer: dict[str, float] = json.loads(out.splitlines()[-1])
    return answer


def compare(options: argparse.Namespace) -> None:
    sys.path.insert(0, str(options.after.resolve()))
    import common
    import onnx
    import onnx_models
    from convolutions import SHAPES

    for name in options.networks:
        network, _, dtype = name.partition(":")
        onnx.save(onnx_models.build(network, int8=dtype == "int8"), options.folder / f"{name}.onnx")
    options.layers = [] if options.target == "cpu" else SHAPES
    runs: dict[str, list[dict[str, float]]] = {version: [] for version in VERSIONS}
    builds = [_start(version, "build", options) for version in VERSIONS]
    for version, process in zip(VERSIONS, builds, strict=True):
        runs[version].append(_answer(process))
    for _ in range(options.rounds):
        for version in VERSIONS:
            runs[version].append(_answer(_start(version, "measure", options)))
        rows = _rows(runs)  # written after each round: a limit of time costs only what was not measured
        common.write(
            options.out, {"rounds": options.rounds, "cores": len(os.sched_getaffinity(0)), "rows": rows, "runs": runs}
        )
    print(
        common.table(
            ("", *VERSIONS, "after / before"),
            [(r["what"], f"{r['before']:.2f}", f"{r['after']:.2f}", f"{r['after'] / r['before']:.3f}") for r in rows],
        )
    )


def _rows(runs: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    least = {version: _least(runs[version]) for version in VERSIONS}
    shared = [what for what in least["after"] if what in least["before"]]
    return [{"what": what, **{version: least[version][what] for version in VERSIONS}} for what in shared]


def _least(runs: list[dict[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for run in runs:
        for what, value in run.items():
            found[what] = min(value, found.get(what, value))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="folder with the earlier schedsearch")
    parser.add_argument("--after", type=Path, help="folder with the later schedsearch")
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), help="NAME, or NAME:int8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out")
    parser.add_argument("--version", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=("build", "measure"), help=argparse.SUPPRESS)
    parser.add_argument("--models", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        _require(options.version)
        print(json.dumps(build(options) if options.part == "build" else measure(options)))
        return
    if not options.before or not options.after:
        parser.error("give --before and --after")
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        compare(options)


if __name__ == "__main__":
    main()
