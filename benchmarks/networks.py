"""Whole networks: the plan and its baselines, predicted and measured, beside PyTorch in a CUDA graph.

    python benchmarks/networks.py --limit 600 --db networks.db --out benchmarks/results/networks_graphs_h200.json
    python benchmarks/networks.py --cases resnet50:1:float16 --limit 65 --tune 30 --out first.json

For each case NAME:BATCH:FORMAT, in the order given: the network of `onnx_models.py` is lowered, the plan without records is
timed, kernels are tuned for the case's share of the time that is left, then every plan is built and timed. PyTorch runs the
same weights in fp16 and channels_last, as it is and compiled; a process of its own compiles while kernels are tuned. int8
networks are compared with PyTorch's fp16 of the same shapes, and their values with the quantised model in fp32. `hot` is the
time of a launch among launches that follow one another, `cold` that of a launch after 256 MiB were written. The file is
written after every network.

For batch 1 the plan is also timed as a program sees it: the host's time to enqueue `net(x)` (with the input and output of
the call before, several in a row, and with arrays at other addresses) and a bound step, each on an idle GPU, and the time
from `schedsearch.load` to the first result, in a process whose CUDA context exists. The latter copies the weights, whose
size stands beside it.

Needs a CUDA device, PyTorch, onnx, onnx-ir and onnxscript.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
import onnx
import onnx_models
import onnx_torch
import torch

import schedsearch
from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.errors import NoValidConfigError, PreparationError, WrongResultError
from schedsearch.executable.assemble import assemble
from schedsearch.executable.fixed import FixedNet
from schedsearch.executable.kernels import find_kernels
from schedsearch.measurement import COLD_GRAPH
from schedsearch.network.costs import RecordCosts
from schedsearch.network.explain import explain
from schedsearch.network.graph import Network, Plan
from schedsearch.network.lower import lower
from schedsearch.network.model import read_model
from schedsearch.network.plan import baselines, best_plan, missing
from schedsearch.records.lookup import Lookup

CASES = (
    "resnet50:1:float16", "resnet50:1:int8", "inception_v3:1:float16", "mobilenet_v2:1:float16", "vgg16:1:float16",
    "super_resolution:1:float16", "resnet50:32:float16", "resnet50:32:int8", "inception_v3:1:int8", "vgg16:1:int8",
    "mobilenet_v2:32:float16", "vgg16:32:float16", "inception_v3:32:float16", "resnet18_depthwise:1:float16",
    "vgg16:32:int8", "inception_v3:32:int8",
)  # fmt: skip
RUNS = 60
HOST_CALLS = 200
IN_A_ROW = 8  # calls of which the host is ahead
FLUSHED = 256 << 20  # bytes
AFTER_TUNING_S = 12.0  # for builds and timing of a case


def hot_us(launch: Callable[[], Any]) -> float:
    """The median over groups of ten launches."""
    for _ in range(5):
        launch()
    return statistics.median(_events(launch, 10) / 10 for _ in range(RUNS // 5))


def cold_us(launch: Callable[[], Any]) -> float:
    flush = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(RUNS // 2):
        flush.zero_()
        times.append(_events(launch, 1))
    return statistics.median(times)


def host_us(call: Callable[[], Any], count: int = 1) -> float:
    """The median time of the host for a call that only enqueues, over groups of `count` calls that begin on an idle GPU."""
    times_ns = []
    for _ in range(HOST_CALLS // count):
        torch.cuda.synchronize()
        started = time.perf_counter_ns()
        for _ in range(count):
            call()
        times_ns.append((time.perf_counter_ns() - started) / count)
    torch.cuda.synchronize()
    return statistics.median(times_ns[len(times_ns) // 10 :]) / 1e3


def load_ms(net: FixedNet, x: torch.Tensor) -> float:
    """The least time from the file of a network to its first result."""
    times = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.ssx"
        net.save(path)
        for _ in range(3):
            torch.cuda.synchronize()
            started = time.perf_counter()
            with schedsearch.load(path) as loaded:
                loaded(x)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - started)
    return min(times) * 1e3


def _events(launch: Callable[[], Any], count: int) -> float:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(count):
        launch()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) * 1e3


# ---- PyTorch, in a process of its own: it compiles, waits for a line, and then times


def serve_peer(path: str) -> None:
    module = onnx_torch.as_module(onnx.load(path)).half().cuda().to(memory_format=torch.channels_last)
    x = _input(onnx.load(path)).half().contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        compiled = torch.compile(module)
        compiled(x)
    torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    found: dict[str, float] = {}
    for name, call in (("torch", module), ("torch.compile", compiled)):
        with torch.no_grad():
            graph = _captured(lambda: call(x))  # noqa: B023
        found |= {f"{name} hot_us": hot_us(graph.replay), f"{name} cold_us": cold_us(graph.replay)}
    print(json.dumps(found), flush=True)


def _captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


class Peer:
    """The other process."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, __file__, "--peer", str(path)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._process = subprocess.Popen(command, text=True, **pipes)

    def times(self, timeout_s: float) -> dict[str, Any]:
        try:
            out, errors = self._process.communicate("go\n", timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return {"torch error": f"not ready after {timeout_s:.0f} s more"}
        lines = out.strip().splitlines()
        if self._process.returncode or len(lines) < 2:
            return {"torch error": errors[-300:]}
        return json.loads(lines[-1])


def _input(model: onnx.ModelProto) -> torch.Tensor:
    shape = [each.dim_value for each in model.graph.input[0].type.tensor_type.shape.dim]
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).cuda()


# ---- ours


class Ours:
    """A network on this machine's GPU.

    Attributes:
        x: its input, in the layout that the options say.
        truth: its result in float32, by PyTorch.
    """

    def __init__(self, network: Network, model: onnx.ModelProto, options: argparse.Namespace) -> None:
        self.network, self.options, self.target = network, options, detect("cuda")
        self.x = _input(model)
        torch.backends.cudnn.allow_tf32 = False
        with torch.no_grad():
            self.truth = onnx_torch.as_module(model).cuda()(self.x)
        nhwc = options.io_layout == "NHWC"
        self.x = self.x.contiguous(memory_format=torch.channels_last if nhwc else torch.contiguous_format)

    @contextlib.contextmanager
    def costs(self) -> Iterator[RecordCosts]:
        if not Path(self.options.db).exists():
            yield RecordCosts(None, self.target, self.options.mode, self.network)
            return
        with Lookup(self.options.db) as lookup:
            yield RecordCosts(lookup, self.target, self.options.mode, self.network)

    def tune(self, time_s: float) -> dict[str, Any]:
        """Measures what is missing: what the plan uses, then what could change it most."""
        with self.costs() as costs:
            tasks, plan = missing(self.network, costs), best_plan(self.network, costs)
        used = set(workloads(plan))
        tasks.sort(key=lambda task: task.workload not in used)
        most = max(sum(task.workload in used for task in tasks), int(time_s * self.options.tasks_a_second))
        chosen = tasks[:most]
        started = time.perf_counter()
        found: dict[str, Any] = {"missing": len(tasks), "tuned": len(chosen)}
        if chosen and time_s > 1:
            trials = self.options.trials * len(chosen)
            try:
                schedsearch.tune(
                    chosen, self.options.db, target=self.target, time_s=time_s, trials=trials, mode=self.options.mode
                )
            except (NoValidConfigError, PreparationError, WrongResultError) as error:  # the plan takes default kernels
                found["tuning_error"] = str(error)[:300]
        return {**found, "tuning_s": round(time.perf_counter() - started, 1)}

    def plans(self, ends: float) -> dict[str, Any]:
        """The best plan, and the baselines until the time ends, each run unless it equals one before."""
        with self.costs() as costs:
            started = time.perf_counter()
            best = best_plan(self.network, costs)
            planning_s = time.perf_counter() - started
            plans = {"plan": best, **baselines(self.network, costs)}
            explanation = explain(self.network, best, costs).text()
        rows: dict[str, dict[str, Any]] = {}
        for label, plan in plans.items():
            same = next((other for other in rows if plans[other].implementations == plan.implementations), None)
            if same:
                rows[label] = {**rows[same], "same_as": same}
            elif label == "plan":
                rows[label] = self.run(plan, as_program=True)
            else:
                try:
                    rows[label] = self.run(plan)
                except Exception:  # the plan's own times are kept
                    print(f"{label} failed: {traceback.format_exc()[-400:]}", flush=True)
            if time.monotonic() > ends:
                break
        return {"planning_s": round(planning_s, 3), "explanation": explanation, "plans": rows}

    def run(self, plan: Plan, *, as_program: bool = False) -> dict[str, Any]:
        """Times of a plan, and its errors.

        Args:
            as_program: for one image also the host's times and the time to load.
        """
        started = time.perf_counter()
        kernels = find_kernels(workloads(plan), self.options.db, self.target, mode=self.options.mode)
        executable = assemble(self.network, plan, kernels.__getitem__, target=self.target.key)
        with FixedNet(executable, open_device(self.target)) as net:
            build_s = time.perf_counter() - started
            x = self.x.to(getattr(torch, net.inputs[0].dtype))  # strides stay
            launch = net.bind(x)
            y = launch().float().reshape(self.truth.shape)
            levels = [call.origin.level for call in net.steps]
            difference = (y - self.truth).abs()
            found = {
                "predicted_us": plan.predicted_ns / 1e3,
                "hot_us": hot_us(launch),
                "cold_us": cold_us(launch),
                "error": float(difference.max() / self.truth.abs().max()),
                "mean_error": float(difference.mean() / self.truth.abs().mean()),
                "calls": len(levels),
                "conversions": len(plan.conversions),
                "untuned_calls": len(levels) - levels.count("exact"),
                "build_s": round(build_s, 2),
                "arena_bytes": net.program.arena_bytes,
                "least_arena_bytes": net.program.least_arena_bytes,
            }
            if as_program and x.shape[0] == 1:
                others = itertools.cycle([x.clone(memory_format=torch.preserve_format) for _ in range(3)])
                kept: collections.deque[Any] = collections.deque(maxlen=2)  # so that outputs cannot take the same memory
                found |= {"call_host_us": host_us(lambda: net(x)), "step_host_us": host_us(launch)}
                found["row_call_host_us"] = host_us(lambda: net(x), IN_A_ROW)
                found["moved_call_host_us"] = host_us(lambda: kept.append(net(next(others))))
                found |= {"load_ms": load_ms(net, x), "weight_bytes": net.program.constant_bytes}
            launch.close()
            return found


def workloads(plan: Plan) -> list[schedsearch.Workload]:
    return list(dict.fromkeys([*plan.implementations.values(), *(each.workload for each in plan.conversions)]))


Keep = Callable[[dict[str, Any]], None]


def measure(case: str, options: argparse.Namespace, ends: float, share_s: float, keep: Keep) -> dict[str, Any]:
    """One case. `keep` takes what is known so far."""
    name, batch, format_ = case.split(":")
    found: dict[str, Any] = {"case": case, "network": name, "batch": int(batch), "format": format_}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path, peer_path = Path(folder) / "model.onnx", Path(folder) / "peer.onnx"
        model = onnx_models.build(name, batch=int(batch), int8=format_ == "int8")
        onnx.save(model, path)
        peer = None
        if not options.no_torch:
            onnx.save(onnx_models.build(name, batch=int(batch)) if format_ == "int8" else model, peer_path)
            peer = Peer(peer_path)
        try:
            started = time.perf_counter()
            network = lower(read_model(path), dtype="float16").with_io_layout(options.io_layout)
            found |= {"lowering_s": round(time.perf_counter() - started, 2), "nodes": len(network.nodes)}
            ours = Ours(network, model, options)
            if not options.no_default:
                with ours.costs() as costs:
                    found["untuned"] = ours.run(best_plan(network, costs))
                keep(found)
                print(f"{case}: hot {found['untuned']['hot_us']:.1f} us before tuning", flush=True)
            tune_s = share_s - (time.monotonic() - begun) - AFTER_TUNING_S if options.tune is None else options.tune
            found |= ours.tune(min(tune_s, ends - time.monotonic() - AFTER_TUNING_S))
            found |= ours.plans(min(ends, begun + share_s))
            keep(found)
        finally:
            if peer is not None:
                found |= peer.times(max(2.0, min(ends, begun + share_s) - time.monotonic()))
    return found


def _write(path: str | None, rows: list[dict[str, Any]], unfinished: dict[str, Any]) -> None:
    common.write(path, {"rows": [*rows, unfinished]})


def show(row: dict[str, Any]) -> None:
    if "error" in row:
        print(f"{row['case']:<28} failed: {row['error'][-400:]}", flush=True)
        return
    print(
        f"{row['case']:<28} {row['nodes']} nodes, tuned {row['tuned']} of {row['missing']} in {row['tuning_s']} s, "
        f"planned in {row['planning_s']} s"
    )
    for label in ("torch", "torch.compile"):
        if f"{label} hot_us" in row:
            print(f"   {label:<16} {'':18}  hot {row[f'{label} hot_us']:8.1f}  cold {row[f'{label} cold_us']:8.1f} us")
    if "torch error" in row:
        print(f"   torch: {row['torch error']}")
    if "tuning_error" in row:
        print(f"   tuning stopped: {row['tuning_error']}")
    for label, plan in row["plans"].items():
        same = f" (same as {plan['same_as']})" if "same_as" in plan else ""
        print(
            f"   {label:<16} predicted {plan['predicted_us']:8.1f}  hot {plan['hot_us']:8.1f}  "
            f"cold {plan['cold_us']:8.1f} us  {plan['calls']} calls, {plan['conversions']} conversions, "
            f"{plan['untuned_calls']} untuned, error {plan['error']:.2e} mean {plan['mean_error']:.2e}{same}",
            flush=True,
        )
    if "load_ms" in (plan := row["plans"]["plan"]):
        print(
            f"   a call takes the host {plan['call_host_us']:.1f} us, in a row {plan['row_call_host_us']:.1f}, with other "
            f"arrays {plan['moved_call_host_us']:.1f}, a bound step {plan['step_host_us']:.1f} us; load to first result "
            f"{plan['load_ms']:.0f} ms with {plan['weight_bytes'] / 1e6:.1f} MB of weights",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="NAME:BATCH:FORMAT")
    parser.add_argument("--limit", type=float, default=600, help="seconds for everything")
    parser.add_argument("--tune", type=float, help="seconds of tuning a case; default: its share of the limit")
    parser.add_argument("--tasks-a-second", type=float, default=1.0, help="how many workloads to tune in a second")
    parser.add_argument("--trials", type=int, default=48, help="for a workload")
    parser.add_argument("--no-default", action="store_true", help="do not time the plan before tuning")
    parser.add_argument("--mode", default=COLD_GRAPH, help="how kernels are timed")
    parser.add_argument("--db", default="networks.db")
    parser.add_argument("--io-layout", choices=("NCHW", "NHWC"), default="NCHW", help="of the caller's images")
    parser.add_argument("--no-torch", action="store_true", help="leave PyTorch's times out")
    parser.add_argument("--out", help="JSON file for the data")
    parser.add_argument("--peer", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        serve_peer(options.peer)
        return
    ends = time.monotonic() + options.limit
    rows: list[dict[str, Any]] = []
    for place, case in enumerate(options.cases):
        left = ends - time.monotonic()
        if left < AFTER_TUNING_S:
            print(f"no time is left for {', '.join(options.cases[place:])}")
            break
        try:
            share_s = left / (len(options.cases) - place)
            keep = functools.partial(_write, options.out, rows)
            rows.append(measure(case, options, ends, share_s, keep))
        except Exception:  # the other networks go on
            rows.append({"case": case, "error": traceback.format_exc()[-1500:]})
        show(rows[-1])
        common.write(options.out, {"rows": rows})


if __name__ == "__main__":
    main()
