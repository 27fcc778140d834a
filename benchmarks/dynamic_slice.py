"""strided_slice of 256 MB with begin, end and strides on the device: bounded, exact, the static kernel and PyTorch.

Copies, bytes to the host, synchronisations and allocations are those that torch.profiler (CUPTI) sees, not our own counts.

    python benchmarks/dynamic_slice.py --out dynamic_slice.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import schedsearch
from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.device import open_device
from schedsearch.dynamic.graph import DynamicGraph
from schedsearch.dynamic.net import DynamicNet
from schedsearch.launch import Artifact
from schedsearch.template import load_template

SHAPE = (256, 1024, 512)  # 256 MiB of float16
FAR = 2**31 - 1
CASES = {  # begin, end, strides
    "everything": ((0, 0, 0), (FAR, FAR, FAR), (1, 1, 1)),
    "rows": ((8, 0, 0), (248, FAR, FAR), (1, 1, 1)),
    "middle": ((8, 8, 16), (248, 1016, 496), (1, 1, 1)),
    "every other row": ((0, 0, 0), (FAR, FAR, FAR), (1, 2, 1)),
    "every other element": ((0, 0, 0), (FAR, FAR, FAR), (1, 1, 2)),
}
CONFIGS = [
    {"threads": 128, "unroll": 8, "blocks_per_sm": 4, "stores": "default"},
    {"threads": 128, "unroll": 8, "blocks_per_sm": 4, "stores": "streaming"},
    {"threads": 256, "unroll": 4, "blocks_per_sm": 2, "stores": "streaming"},
    {"threads": 512, "unroll": 4, "blocks_per_sm": 1, "stores": "streaming"},
]
SYNCHRONISATIONS = (
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cuStreamSynchronize", "cuCtxSynchronize", "cudaEventSynchronize",
)  # fmt: skip
ALLOCATIONS = (
    "cudaMalloc", "cuMemAlloc", "cuMemAlloc_v2", "cuMemAllocAsync", "cudaMallocAsync", "cuMemAllocHost", "cuMemAllocHost_v2",
)  # fmt: skip


def time_us(run: Callable[[], Any], repeat: int = 30) -> float:
    """The median time of a call over `repeat` calls, by events around each; the host may be what takes it."""
    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def seen_by_profiler(run: Callable[[], Any], calls: int = 10) -> dict[str, float]:
    """Counts for each call: kernels, copies and bytes to the host, synchronisations and allocations of the driver."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            run()
    path = Path("dynamic_slice_trace.json")
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    path.unlink()
    names = [(event.get("cat", ""), event.get("name", ""), event.get("args", {})) for event in events]
    to_host = [args for cat, name, args in names if cat == "gpu_memcpy" and "DtoH" in name]
    api = [name for cat, name, _ in names if cat in ("cuda_runtime", "cuda_driver")]
    waits = sum(name in SYNCHRONISATIONS for name in api) - 1  # the profiler's own at the end
    return {
        "kernels": sum(cat == "kernel" for cat, _, _ in names) / calls,
        "copies_to_host": len(to_host) / calls,
        "bytes_to_host": sum(args.get("bytes", 0) for args in to_host) / calls,
        "synchronisations": max(waits, 0) / calls,
        "allocations": sum(name in ALLOCATIONS for name in api) / calls,
    }


def dynamic_net(device: Any, config: Config) -> DynamicNet:
    workload = schedsearch.dyn_strided_slice(x=SHAPE)
    template = load_template("dyn_strided_slice_cuda")

    def code(each: schedsearch.Workload) -> Artifact:
        return compile_source(template.kernel(each, device.target, config), device.target).artifact

    graph = DynamicGraph()
    arrays = [
        graph.input("x", SHAPE, "float16"),
        *(graph.input(name, (3,), "int64") for name in ("begin", "end", "strides")),
    ]
    graph.output(graph.call(workload, *arrays))
    return DynamicNet(graph.program(), device, code)


def measure(nets: dict[str, DynamicNet], device: Any, case: str, x: Any, counted: bool) -> list[dict[str, Any]]:
    numbers = CASES[case]
    begin, end, strides = (torch.tensor(each, device="cuda") for each in numbers)
    index = tuple(slice(b, min(e, n), s) for b, e, s, n in zip(*numbers, SHAPE))
    wanted = x[index].contiguous()
    static = schedsearch.strided_slice(x=SHAPE, begin=numbers[0], end=numbers[1], strides=numbers[2])
    kernel = schedsearch.compile(static, target="cuda", allow=("default",))
    out = torch.empty_like(wanted)
    static_step = kernel.bind(x, out=out)

    def eager_by_items() -> Any:
        parts = [[int(each[axis].item()) for axis in range(3)] for each in (begin, end, strides)]
        return x[tuple(slice(b, e, s) for b, e, s in zip(*parts))].contiguous()

    def eager_by_lists() -> Any:
        return x[tuple(slice(*each) for each in zip(begin.tolist(), end.tolist(), strides.tolist()))].contiguous()

    runs: dict[str, Callable[[], Any]] = {
        "copy of as many bytes": lambda: out.view(-1).copy_(x.view(-1)[: out.numel()]),
        "static kernel": static_step,
        "PyTorch, three tolist()": eager_by_lists,
        "PyTorch, nine item()": eager_by_items,
    }
    for name, net in nets.items():
        bound = net.bind(x, begin, end, strides)
        bound.step()
        assert torch.equal(bound.sliced()[0], wanted), (case, name)
        assert torch.equal(net(x, begin, end, strides), wanted), (case, name)
        runs[f"bounded {name}"] = bound.step
        runs[f"exact {name}"] = lambda net=net: net(x, begin, end, strides)
    rows = []
    for name, run in runs.items():
        row = {"case": case, "run": name, "time_us": time_us(run), "bytes": 2 * out.numel() * 2}
        rows.append(row | (seen_by_profiler(run) if counted else {}))
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("dynamic_slice.json"))
    parser.add_argument("--configs", type=int, default=1, help="how many configurations of the kernel are tried")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    device = open_device(schedsearch.detect("cuda"))
    x = torch.randn(SHAPE, device="cuda", dtype=torch.float32).half()
    nets = {" ".join(map(str, each.values())): dynamic_net(device, Config(each)) for each in CONFIGS[: args.configs]}
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(args.cases):
        rows += measure(nets, device, case, x, counted=number == 0)
        args.out.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "shape": SHAPE, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
