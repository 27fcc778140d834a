"""One persistent kernel for a run of layers, and the same layers as kernels of a network.

    python benchmarks/persistent.py --out persistent_h200.json

The layers are eight bottleneck blocks of ResNet-50's last stage (7x7 pixels, batch 1, float16). Their 71 MB of weights do
not fit in L2, as those of the whole network do not. They run as a network in a CUDA graph whose kernels begin early, with
default kernels and tuned for `--tune` seconds, and as persistent kernels (`persistent_kernel.py`) for two blocks each, as
many as ResNet-50 has in a row, and for eight. All get the same inputs; the table has the largest difference from float64,
over its largest number, and microseconds of a layer, in turns, in graphs that run all layers twice. `cycles` are those of
the parts of a layer, the median over all blocks of the grid. It needs PyTorch, cuda-python and a GPU of compute capability
9.0.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import hashlib
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import common
import numpy as np
import persistent_kernel as kernel
import persistent_ops as ops
from replays import Captured, drawn, turns_us

BLOCKS, LAYERS = 8, 24
RUNS = {
    "32 columns": kernel.Run(32, "all"),
    "40 columns": kernel.Run(40, "all"),
    "40 columns, one first": kernel.Run(40, "one"),
    "64 columns": kernel.Run(64, "all"),
}
LAUNCHED = (2, 8)  # bottleneck blocks of a launch
CHECKED = 10  # inputs


def model() -> Any:
    """The layers as ONNX."""
    import onnx_models

    m = onnx_models.Model((1, kernel.WIDE, kernel.SIDE, kernel.SIDE))
    x = "x"
    for _ in range(BLOCKS):
        y = m.conv(m.conv(x, kernel.NARROW, 1), kernel.NARROW, 3)
        x = m.add(m.conv(y, kernel.WIDE, 1, act=""), x, "relu")
    return m.finished(x)


def built(run: kernel.Run, cache: Path | None) -> bytes:
    """The code of a run, from the folder that keeps it if it is there."""
    from schedsearch.backend import compile_source
    from schedsearch.target import PRESETS

    sources = (Path(module.__file__ or "").read_bytes() for module in (kernel, ops))
    name = hashlib.sha256(b"".join([*sources, repr(run).encode()])).hexdigest()[:16]
    if cache and (file := cache / f"{name}.cubin").exists():
        return file.read_bytes()
    code = compile_source(run.source(LAUNCHED[0]), PRESETS["h200"]).artifact.code
    if cache:
        cache.mkdir(parents=True, exist_ok=True)
        file.write_bytes(code)
    return code


class Weights:
    """Filters (OHWI, float16) and biases of all layers."""

    def __init__(self, network: Any) -> None:
        from onnx import numpy_helper

        found = {each.name: numpy_helper.to_array(each) for each in network.graph.initializer}
        names = [f"conv{number}" for number in range(LAYERS)]
        self.filters = [found[f"{name}.weight"].astype(np.float16).transpose(0, 2, 3, 1) for name in names]
        self.biases = [found[f"{name}.bias"].astype(np.float16).astype(np.float32) for name in names]
        self._packed: dict[int, Any] = {}
        self._exact: list[list[Any]] = []

    def packed(self, run: kernel.Run) -> Any:
        """The filters of all bottleneck blocks as the run reads them, on the GPU."""
        import torch

        if run.columns not in self._packed:
            blocks = [run.packed(*self.filters[3 * b : 3 * b + 3]) for b in range(BLOCKS)]
            self._packed[run.columns] = torch.from_numpy(np.stack(blocks)).cuda()
        return self._packed[run.columns]

    def truth(self, x: Any) -> Any:
        """The layers in float64; x is NHWC."""
        import torch

        y = x.permute(0, 3, 1, 2).double()
        if not self._exact:
            given = [(f.transpose(0, 3, 1, 2), b) for f, b in zip(self.filters, self.biases)]
            tensors = [[torch.from_numpy(np.ascontiguousarray(each)).to(x.device) for each in pair] for pair in given]
            self._exact = [[tensor.double() for tensor in pair] for pair in tensors]
        for number in range(0, LAYERS, 3):
            z = y
            for at, (filters, bias) in enumerate(self._exact[number : number + 3]):
                z = torch.nn.functional.conv2d(z, filters, bias, padding=filters.shape[2] // 2)
                z = torch.relu(z + y if at == 2 else z)
            y = z
        return y.permute(0, 2, 3, 1)


class Persistent:
    """A graph of two passes over all layers."""

    def __init__(self, run: kernel.Run, code: bytes, blocks: int, weights: Weights) -> None:
        import torch
        from cuda.bindings import driver

        self.run, self.blocks, self.driver = run, blocks, driver
        module = _checked(driver.cuModuleLoadData(code))
        self.function = _checked(driver.cuModuleGetFunction(module, b"kernel_0"))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(self.function, attribute, run.regions["end"]))
        self.weights = weights.packed(run)
        self.bias = torch.from_numpy(np.concatenate(weights.biases)).cuda()
        self.sets = [torch.full((kernel.set_bytes(blocks) // 2,), -1, dtype=torch.int16, device="cuda") for _ in range(2)]
        shape = (1, kernel.SIDE, kernel.SIDE, kernel.WIDE)
        launches = BLOCKS // blocks
        self.arrays = [torch.zeros(shape, dtype=torch.float16, device="cuda") for _ in range(launches + 1)]
        phases = 3 * ops.TRACED_BLOCKS
        self.errors = torch.zeros(ops.MARKS_AT // 4 + run.grid * phases * ops.MARKS, dtype=torch.int32, device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for number in range(2 * launches):
                self._launch(number, number % launches, torch.cuda.current_stream().cuda_stream)

    def clusters(self) -> int:
        """Clusters that are resident at the same time, at most."""
        config = self._config(0, early=False)
        attribute = self.driver.CUlaunchAttribute()
        attribute.id = self.driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = kernel.RANKS, 1, 1
        config.attrs, config.numAttrs = [attribute], 1
        return int(_checked(self.driver.cuOccupancyMaxActiveClusters(self.function, config)))

    def results(self, numbers: Any) -> Any:
        self.arrays[0].copy_(numbers)
        self.graph.replay()
        return self.arrays[-1].clone()

    def phases(self) -> list[list[float]]:
        """Cycles from the begin of a layer to each mark, and to the begin of the next layer; the median of all blocks."""
        marks = self.errors[ops.MARKS_AT // 4 :].cpu().numpy().astype(np.int64) & 0xFFFFFFFF
        marks = marks.reshape(self.run.grid, -1, ops.MARKS)[:, : 3 * min(self.blocks, ops.TRACED_BLOCKS)]
        since = (marks - marks[:, :, :1]) & 0xFFFFFFFF
        since[:, :-1, 7] = (marks[:, 1:, 0] - marks[:, :-1, 0]) & 0xFFFFFFFF
        return [[float(each) for each in row] for row in np.median(since, axis=0)]

    def _config(self, stream: int, early: bool) -> Any:
        config = self.driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.run.grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel.THREADS, 1, 1
        config.sharedMemBytes, config.hStream = self.run.regions["end"], stream
        if early:
            attribute = self.driver.CUlaunchAttribute()
            attribute.id = self.driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        return config

    def _launch(self, number: int, part: int, stream: int) -> None:
        used, cleared = self.sets[number % 2], self.sets[1 - number % 2]
        addresses = (
            self.arrays[part].data_ptr(),
            self.weights[part * self.blocks].data_ptr(),
            self.bias.data_ptr() + part * self.blocks * (2 * kernel.NARROW + kernel.WIDE) * kernel.FLOATS,
            used.data_ptr(),
            cleared.data_ptr(),
            self.arrays[part + 1].data_ptr(),
            self.errors.data_ptr(),
        )
        given = ((*addresses, self.blocks), (*[ctypes.c_uint64] * len(addresses), ctypes.c_int32))
        _checked(self.driver.cuLaunchKernelEx(self._config(stream, early=number > 0), self.function, given, 0))


def two_passes(net: Captured) -> Any:
    """A graph of two runs of a network."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            net.net(*net.inputs)
    return graph


def _checked(result: Any) -> Any:
    error, *values = result
    if int(error):
        raise RuntimeError(f"the driver failed: {error}")
    return values[0] if values else None


def main() -> None:
    import onnx

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", type=float, default=0, help="seconds of tuning of the network's kernels")
    parser.add_argument("--runs", default=";".join(RUNS), help="of RUNS, separated by semicolons")
    parser.add_argument("--cache", type=Path, help="folder that keeps compiled kernels for later runs")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    chosen = {name: RUNS[name] for name in options.runs.split(";")}
    pool = ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn"))
    codes = {name: pool.submit(built, run, options.cache) for name, run in chosen.items()}
    traced = [dataclasses.replace(run, traced=True) for run in chosen.values() if run.polls == "all"]
    traces = {run: pool.submit(built, run, options.cache) for run in traced}
    import torch

    import schedsearch

    network = model()
    weights = Weights(network)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "blocks.onnx")
        onnx.save(network, file)
        build: dict[str, Any] = {"target": "cuda", "dtype": "float16", "io_layout": "NHWC", "check": False}
        nets: dict[str, Any] = {}
        for name, seconds in {"network": 0.0, **({"network, tuned": options.tune} if options.tune else {})}.items():
            out, db = Path(folder, f"{name}.ssx"), Path(folder, f"{name}.db")
            schedsearch.build(file, **build, db=db, out=out, **({"tune_s": seconds} if seconds else {})).close()
            nets[name] = Captured(out, early=True)
        calls: dict[str, Any] = {name: two_passes(net).replay for name, net in nets.items()}
        persistent: dict[str, Persistent] = {}
        for name, run in chosen.items():
            code = codes[name].result()
            for blocks in LAUNCHED:
                graph = Persistent(run, code, blocks, weights)
                resident = graph.clusters()
                print(f"{name}, {blocks} blocks: {run.clusters} clusters, {resident} fit", flush=True)
                if resident >= run.clusters:
                    persistent[f"persistent, {name}, {blocks} blocks"] = graph
        torch.manual_seed(0)
        worst: dict[str, float] = {}
        repeats = dict.fromkeys([*nets, *persistent], 0)
        for _ in range(CHECKED):
            (numbers,) = drawn(next(iter(nets.values())).inputs)
            truth = weights.truth(numbers)
            for name, each in {**nets, **persistent}.items():
                if name in persistent and int(each.errors[0]):
                    continue  # it gave up waiting: its blocks do not run at the same time
                found = [each.results([numbers] if name in nets else numbers) for _ in range(2)]
                first, second = (one[0] if name in nets else one for one in found)
                repeats[name] += not torch.equal(first, second)
                error = float((first.double().reshape(truth.shape) - truth).abs().max() / truth.abs().max())
                worst[name] = float(np.maximum(worst.get(name, 0.0), error))  # NaN stays
        torch.cuda.synchronize()
        for name, graph in persistent.items():
            late = int(graph.errors[0])
            print(f"{name}: error {worst[name]:.2g}, {'gave up' if late else 'in time'}", flush=True)
            if not late:
                calls[name] = graph.graph.replay
        times = turns_us(calls)
        for name in calls:
            us = times[name] / 2
            rows.append({"form": name, "us": us, "us_a_layer": us / LAYERS, "error": worst[name], "unlike": repeats[name]})
            print(rows[-1], flush=True)
        common.write(options.out, {"rows": rows})
        found_phases = {}
        for run, code in traces.items():
            graph = Persistent(run, code.result(), BLOCKS, weights)
            if graph.clusters() < run.clusters:
                continue
            for _ in range(3):
                graph.graph.replay()
            torch.cuda.synchronize()
            found_phases[str(run.columns)] = graph.phases()
            print(f"cycles, {run.columns} columns: pixels, weights, multiplied, sent, received, stored, next layer")
            for number, row in enumerate(found_phases[str(run.columns)]):
                print(f"  layer {number % 3 + 1} of block {number // 3}: " + " ".join(f"{each:6.0f}" for each in row[1:]))
        common.write(options.out, {"rows": rows, "cycles": found_phases})
        for net in nets.values():
            net.close()
    pool.shutdown(cancel_futures=True)
    cells = [(r["form"], f"{r['us']:.1f}", f"{r['us_a_layer']:.2f}", f"{r['error']:.1e}", str(r["unlike"])) for r in rows]
    print(common.table(("24 layers", "us", "us a layer", "largest error", "runs that differ"), cells))


if __name__ == "__main__":
    main()
