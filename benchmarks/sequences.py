"""Causal depthwise convolutions over time on a GPU, beside PyTorch in both layouts, compiled, Triton, and a copy.

    python benchmarks/sequences.py --tune records.db     tunes one shape forward and backward
    python benchmarks/sequences.py --db records.db --out sequences.json

All contenders of a shape take turns in one process. Each runs in a CUDA graph over several sets of tensors, more than L2
holds, so that data comes from memory. PyTorch's causal form pads on both sides and cuts the end off, as models do.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
from torch.nn import functional

import schedsearch
import schedsearch.torch as sst

TAPS, DTYPE = 4, torch.bfloat16
SHAPES = (
    (1, 2048, 2048),
    (8, 2048, 2048),
    (8, 4096, 2048),
    (2, 8192, 8192),
    (1, 4096, 131072),
    (32, 16384, 512),
    (1, 8192, 64),
)
SHORT = ((1, 4096, 1), (32, 4096, 1), (32, 16384, 1))
PARTS = ("updates", "forward", "training")
SETS_BYTES = 400 << 20  # of all sets; L2 holds 60 MB
ROUNDS, REPLAYS = 5, 3


def sets_of(b: int, c: int, t: int, last: bool, count: int) -> list[dict[str, Any]]:
    def sequence() -> Any:
        made = torch.randn((b, t, c) if last else (b, c, t), device="cuda", dtype=DTYPE)
        return made.transpose(1, 2) if last else made

    weight, bias = (torch.randn(shape, device="cuda", dtype=DTYPE) for shape in ((c, TAPS), (c,)))
    return [{"x": sequence(), "dy": sequence(), "weight": weight, "bias": bias} for _ in range(count)]


def by_torch(x: Any, weight: Any, bias: Any) -> Any:
    padded = functional.conv1d(x, weight[:, None], bias, padding=TAPS - 1, groups=x.shape[1])
    return functional.silu(padded[:, :, : x.shape[2]])


def ours(x: Any, weight: Any, bias: Any) -> Any:
    return sst.causal_conv1d(x, weight, bias, activation="silu")


def triton_kernel() -> Callable[..., Any] | None:
    """A forward kernel for channels side by side: a program streams some steps of a block of channels."""
    try:
        import triton
    except ImportError:
        return None

    source = """
@triton.jit
def causal(x, weight, bias, y, channels, steps, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first, batch, mask = tl.program_id(1) * STEPS, tl.program_id(2), channel < channels
    w0 = tl.load(weight + channel * 4, mask).to(tl.float32)
    w1 = tl.load(weight + channel * 4 + 1, mask).to(tl.float32)
    w2 = tl.load(weight + channel * 4 + 2, mask).to(tl.float32)
    w3 = tl.load(weight + channel * 4 + 3, mask).to(tl.float32)
    start = tl.load(bias + channel, mask).to(tl.float32)
    at = x + batch.to(tl.int64) * steps * channels + channel
    to = y + batch.to(tl.int64) * steps * channels + channel
    a = tl.load(at + (first - 3).to(tl.int64) * channels, mask & (first >= 3), 0.0).to(tl.float32)
    b = tl.load(at + (first - 2).to(tl.int64) * channels, mask & (first >= 2), 0.0).to(tl.float32)
    c = tl.load(at + (first - 1).to(tl.int64) * channels, mask & (first >= 1), 0.0).to(tl.float32)
    for i in tl.static_range(STEPS):
        step = (first + i).to(tl.int64)
        d = tl.load(at + step * channels, mask & (step < steps), 0.0).to(tl.float32)
        z = start + w0 * a + w1 * b + w2 * c + w3 * d
        tl.store(to + step * channels, (z * tl.sigmoid(z)).to(y.dtype.element_ty), mask & (step < steps))
        a, b, c = b, c, d
"""
    import importlib.util
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write("import triton\nimport triton.language as tl\n" + source)
    spec = importlib.util.spec_from_file_location("causal_triton", file.name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tuned = triton.autotune(
        [
            triton.Config({"STEPS": steps, "BLOCK": block}, num_warps=warps)
            for steps in (8, 16, 32)
            for block, warps in ((256, 2), (512, 4), (1024, 4))
        ],
        key=["channels", "steps"],
    )(module.causal)

    def run(x: Any, weight: Any, bias: Any) -> Any:
        b, c, t = x.shape
        y = torch.empty_like(x)
        tuned[lambda k: (triton.cdiv(c, k["BLOCK"]), triton.cdiv(t, k["STEPS"]), b)](x, weight, bias, y, c, t)
        return y

    return run


def graph_of(run: Callable[[dict[str, Any]], Any], sets: list[dict[str, Any]]) -> Any:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for each in sets[:2]:
            run(each)
            run(each)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for each in sets:
            run(each)
    return graph


def microseconds(graph: Any, sets: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / (REPLAYS * sets)


def gradient_of(function: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    """Forward and backward of a layer, as a step of training has them."""

    def run(each: dict[str, Any]) -> Any:
        leaves = [each[name].detach().requires_grad_() for name in ("x", "weight", "bias")]
        return torch.autograd.grad(function(*leaves), leaves, each["dy"])

    return run


def plain_of(function: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    def run(each: dict[str, Any]) -> Any:
        with torch.no_grad():
            return function(each["x"], each["weight"], each["bias"])

    return run


def row_of(
    shape: tuple[int, int, int], training: bool, triton: Callable[..., Any] | None, without: list[str]
) -> dict[str, Any]:
    """Medians of microseconds for one call of each contender."""
    b, c, t = shape
    nbytes = 2 * b * c * t
    count = max(2, min(64, SETS_BYTES // (2 * nbytes)))
    sets = {last: sets_of(b, c, t, last, count) for last in (True, False)}
    made = gradient_of if training else plain_of
    torch._dynamo.reset()
    compiled = torch.compile(by_torch, dynamic=False)
    contenders: dict[str, tuple[Callable[[dict[str, Any]], Any], bool]] = {
        "ours": (made(ours), True),
        "ours, time last": (made(ours), False),
        "PyTorch": (made(by_torch), False),
        "PyTorch, channels last": (made(by_torch), True),
        "compiled": (made(compiled), False),
        "compiled, channels last": (made(compiled), True),
        "copy": (lambda each: each["x"].clone(), True),
    }
    if triton is not None and not training:
        contenders["Triton"] = (made(triton), True)
    graphs, failed = {}, {}
    for name, (run, last) in contenders.items():
        if name in without:
            continue
        try:
            graphs[name] = graph_of(run, sets[last])
        except Exception as error:  # a peer that cannot run this shape
            failed[name] = f"{type(error).__name__}: {error}"[:300]
            torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            times[name].append(microseconds(graph, count))
    found = {name: statistics.median(each) for name, each in times.items()}
    return {"shape": shape, "training": training, "us": found, "bytes": nbytes, "failed": failed}


def updates(shape: tuple[int, int, int]) -> dict[str, Any]:
    """Microseconds of one token; states of four inputs, as models keep them."""
    b, c, _ = shape
    nbytes = 2 * b * c * (2 * TAPS + 2)
    count = max(8, min(128, SETS_BYTES // nbytes))
    weight, bias = (torch.randn(shape, device="cuda", dtype=DTYPE) for shape in ((c, TAPS), (c,)))
    sets = [
        {
            "x": torch.randn((b, c), device="cuda", dtype=DTYPE),
            "state": torch.zeros((b, c, TAPS), device="cuda", dtype=DTYPE),
        }
        for _ in range(count)
    ]

    def by_torch(x: Any, state: Any) -> Any:
        state.copy_(torch.roll(state, -1, -1))
        state[:, :, -1] = x
        return functional.silu((state * weight).sum(-1) + bias)

    compiled = torch.compile(by_torch, dynamic=False)
    contenders: dict[str, Callable[[dict[str, Any]], Any]] = {
        "ours": lambda each: sst.causal_conv1d_update(each["x"], each["state"], weight, bias, "silu"),
        "PyTorch": lambda each: by_torch(each["x"], each["state"]),
        "compiled": lambda each: compiled(each["x"], each["state"]),
        "copy": lambda each: each["state"].clone(),
    }
    with torch.no_grad():
        graphs = {name: graph_of(run, sets) for name, run in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            times[name].append(microseconds(graph, count))
    found = {name: statistics.median(each) for name, each in times.items()}
    return {"shape": shape, "update": True, "us": found, "bytes": nbytes}


def check(shape: tuple[int, int, int]) -> float:
    """Largest error of y beside PyTorch's in float32."""
    (each,) = sets_of(*shape, True, 1)
    x, weight, bias = (each[name] for name in ("x", "weight", "bias"))
    right = by_torch(x.float().contiguous(), weight.float(), bias.float())
    return float((ours(x, weight, bias).float() - right).abs().max())


def tune(db: Path, trials: int) -> None:
    workload = schedsearch.depthwise_conv1d(n=8, c=4096, t=2048, taps=TAPS, dtype="bfloat16", epilogue=["bias", "silu"])
    tasks = [workload, workload.replace(direction="backward")]
    print(schedsearch.tune(tasks, db, target="cuda", trials=trials * len(tasks), progress=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", type=Path, help="tunes into this database, and ends")
    parser.add_argument("--trials", type=int, default=32, help="of each direction")
    parser.add_argument("--db", type=Path, default=Path("records.db"))
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="what to measure")
    parser.add_argument("--without", nargs="*", default=[], help="contenders to leave out, e.g. 'compiled, channels last'")
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.tune is not None:
        tune(args.tune, args.trials)
        return
    sst.use(args.db, allow=("exact", "nearest", "default"))
    print("largest error", check((2, 2048, 300)), flush=True)
    triton, rows = triton_kernel(), []
    for shape in SHORT if "updates" in args.parts else ():
        rows.append(updates(shape))
        print(json.dumps(rows[-1]), flush=True)
        common.write(args.out, {"rows": rows})
    for training in (part == "training" for part in ("forward", "training") if part in args.parts):
        for shape in SHAPES[: args.shapes] + (() if training else SHORT):
            rows.append(row_of(shape, training, triton, args.without))
            print(json.dumps(rows[-1]), flush=True)
            common.write(args.out, {"rows": rows})
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
