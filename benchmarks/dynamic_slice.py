"""strided_slice of 256 MB with begin, end and strides on the device: bounded, exact, the static kernel and PyTorch.

    python benchmarks/dynamic_slice.py --out dynamic_slice.json

Copies, bytes to the host and synchronisations are those that torch.profiler (CUPTI) sees, not our own counts. Allocated
bytes are the driver's: memory that is no longer free after the calls. The file is written after every run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import common
import torch
from torch.profiler import ProfilerActivity, profile

import schedsearch
from schedsearch.backend import RejectedError, compile_source
from schedsearch.config import Config
from schedsearch.device import open_device
from schedsearch.dynamic.graph import DynamicGraph
from schedsearch.dynamic.net import DynamicNet
from schedsearch.launch import Artifact
from schedsearch.template import load_template

SHAPE = (256, 1024, 512)  # 256 MiB of float16
FAR = 2**31 - 1
ROWS = torch.contiguous_format  # of copies by PyTorch, also where a slice is all of x
CASES = {  # begin, end, strides
    "everything": ((0, 0, 0), (FAR, FAR, FAR), (1, 1, 1)),
    "rows": ((8, 0, 0), (248, FAR, FAR), (1, 1, 1)),
    "middle": ((8, 8, 16), (248, 1016, 496), (1, 1, 1)),
    "columns": ((0, 0, 3), (FAR, FAR, 500), (1, 1, 1)),
    "every other row": ((0, 0, 0), (FAR, FAR, FAR), (1, 2, 1)),
    "every other element": ((0, 0, 0), (FAR, FAR, FAR), (1, 1, 2)),
}
CONFIGS: list[dict[str, Any]] = [  # what differs from the default
    {},
    {"blocks_per_sm": 4},
    {"blocks_per_sm": 16},
    {"blocks_per_sm": 32},
    {"persistent": False, "blocks_per_sm": 1},
    {"stores": "streaming"},
    {"threads": 512},
    {"threads": 128, "blocks_per_sm": 16},
    {"unroll": 2},
    {"unroll": 8, "blocks_per_sm": 4},
]
SYNCHRONISATIONS = ("Stream Sync", "Context Sync", "Event Sync")  # the profiler's names, for the driver's calls as well


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
    """Counts for each call: kernels, copies and bytes to the host, synchronisations, and bytes that stay allocated."""
    run()
    torch.cuda.synchronize()
    free_bytes, _ = torch.cuda.mem_get_info()
    seen, own = _profiled(lambda: [run() for _ in range(calls)]), _profiled(lambda: None)
    found = {name: (seen[name] - own[name]) / calls for name in seen}
    return found | {"allocated_bytes": (free_bytes - torch.cuda.mem_get_info()[0]) / calls}


def _profiled(run: Callable[[], Any]) -> dict[str, int]:
    """What CUPTI reports, with what the profiler does at its end."""
    sees_waits = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, experimental_config=sees_waits) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    seen = [(event.get("cat", ""), event.get("name", ""), event.get("args", {})) for event in events]
    to_host = [args for cat, name, args in seen if cat == "gpu_memcpy" and "DtoH" in name]
    return {
        "kernels": sum(cat == "kernel" for cat, _, _ in seen),
        "copies_to_host": len(to_host),
        "bytes_to_host": sum(args.get("bytes", 0) for args in to_host),
        "synchronisations": sum(cat == "cuda_sync" and name in SYNCHRONISATIONS for cat, name, _ in seen),
    }


def captured(enqueue: Callable[[Any], Any]) -> Callable[[], None]:
    """Replays a graph of what a call with a stream enqueues."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        enqueue(torch.cuda.current_stream().cuda_stream)

    def replay(_: Any = enqueue) -> None:  # keeps what is bound
        graph.replay()

    return replay


def kernel_alone(net: DynamicNet, arrays: dict[str, Any]) -> Callable[[int], None]:
    """Launches the slice without the kernel of sizes before it."""
    (loaded,) = net._loaded.kernels.values()
    arrays["y"] = torch.empty_like(arrays["x"])
    arrays["y_extents"] = torch.empty(len(SHAPE), dtype=torch.int64, device="cuda")
    workload = schedsearch.dyn_strided_slice(x=SHAPE)
    scalars = {scalar.name: scalar.default for scalar in workload.scalars}
    bound = loaded.bind({name: array.data_ptr() for name, array in arrays.items()}, scalars)

    def launch(stream: int, _: Any = arrays) -> None:  # keeps the arrays
        bound.launch(stream)

    return launch


def dynamic_net(device: Any, changes: Mapping[str, Any]) -> DynamicNet:
    """The slice as a graph, in the default configuration with `changes`."""
    workload = schedsearch.dyn_strided_slice(x=SHAPE)
    template = load_template("dyn_strided_slice_cuda")
    default = template.default(workload, device.target, template.space(workload, device.target))
    config = Config({**default, **changes})

    def code(each: schedsearch.Workload) -> Artifact:
        return compile_source(template.kernel(each, device.target, config), device.target).artifact

    graph = DynamicGraph()
    arrays = [
        graph.input("x", SHAPE, "float16"),
        *(graph.input(name, (3,), "int64") for name in ("begin", "end", "strides")),
    ]
    graph.output(graph.call(workload, *arrays))
    return DynamicNet(graph.program(), device, code)


def measure(nets: dict[str, DynamicNet], case: str, x: Any, counted: bool) -> Iterator[dict[str, Any]]:
    """A row for each way to compute a case.

    Args:
        counted: whether rows have what the profiler counts.

    Raises:
        AssertionError: a result is wrong.
    """
    numbers = CASES[case]
    begin, end, strides = (torch.tensor(each, device="cuda") for each in numbers)
    index = tuple(slice(b, min(e, n), s) for b, e, s, n in zip(*numbers, SHAPE))
    wanted = x[index].contiguous()
    static = schedsearch.strided_slice(x=SHAPE, begin=numbers[0], end=numbers[1], strides=numbers[2])
    out = torch.empty_like(wanted)

    def eager_by_items() -> Any:
        parts = [[int(each[axis].item()) for axis in range(3)] for each in (begin, end, strides)]
        return x[tuple(slice(b, e, s) for b, e, s in zip(*parts))].clone(memory_format=ROWS)

    def eager_by_lists() -> Any:
        parts = zip(begin.tolist(), end.tolist(), strides.tolist())
        return x[tuple(slice(*each) for each in parts)].clone(memory_format=ROWS)

    runs: dict[str, Callable[[], Any]] = {
        "copy of as many bytes": lambda: out.view(-1).copy_(x.view(-1)[: out.numel()]),
        "PyTorch, three tolist()": eager_by_lists,
        "PyTorch, nine item()": eager_by_items,
    }
    try:
        runs["static kernel"] = schedsearch.compile(static, target="cuda", allow=("default",)).bind(x, out=out)
        runs["static kernel in a graph"] = captured(runs["static kernel"])
    except schedsearch.SchedsearchError as error:  # the dynamic kernels are timed anyway
        print(f"{case}, static kernel: {error}", flush=True)
    for name, net in nets.items():
        bound = net.bind(x, begin, end, strides)
        bound.step()
        assert torch.equal(bound.sliced()[0], wanted), (case, name)
        assert torch.equal(net(x, begin, end, strides), wanted), (case, name)
        runs[f"bounded {name}"] = bound.step
        beside = net.bind(x, begin, end, strides, overlapped=True)
        beside.step()
        assert torch.equal(beside.sliced()[0], wanted), (case, name)
        runs[f"bounded, sizes beside, {name}"] = beside.step
        runs[f"kernel alone {name}"] = captured(kernel_alone(net, {"x": x, "begin": begin, "end": end, "strides": strides}))
        runs[f"exact {name}"] = lambda net=net: net(x, begin, end, strides)
    for name, run in runs.items():
        row = {"case": case, "run": name, "time_us": time_us(run), "bytes": 2 * out.numel() * 2}
        row |= seen_by_profiler(run) if counted else {}
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="FILE", help="JSON file to write")
    numbers = range(1, len(CONFIGS) + 1)
    parser.add_argument("--configs", type=int, choices=numbers, default=1, help="how many are tried; 1: the default")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    device = open_device(schedsearch.detect("cuda"))
    x = torch.randn(SHAPE, device="cuda", dtype=torch.float32).half()
    nets = {}
    for changes in CONFIGS[: args.configs]:
        name = " ".join(f"{knob}={value}" for knob, value in changes.items()) or "default"
        try:
            nets[name] = dynamic_net(device, changes)
        except RejectedError as error:  # the other configurations go on
            print(f"{name}: {error}", flush=True)
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(args.cases):
        try:
            for row in measure(nets, case, x, counted=number == 0):
                rows.append(row)
                common.write(args.out, {"shape": SHAPE, "rows": rows})
        except Exception as error:  # the other cases go on
            print(f"{case}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
