"""Draws the tables of docs/performance.md: one for each topic, out of the data behind the long tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common
import sequence_tables
from table_text import markdown

RESULTS = Path(__file__).resolve().parent / "results"

# what -> the file of benchmarks/results/, the peer's time (the ratio of the row where none is named), the peer
CONVOLUTIONS = {
    "fp16, 13 layers": ("conv2d_fp16_h200", "", "cuDNN"),
    "fp16, 20 layers drawn at random": ("conv2d_fp16_random_h200", "", "cuDNN"),
    "fp16, all layers of three networks": ("networks_h200", "", "cuDNN"),
    "fp16 with bias and relu fused": ("conv2d_fused_h200", "", "PyTorch's fastest of three"),
    "fp16 in groups": ("conv2d_grouped_h200", "", "cuDNN"),
    "bf16": ("conv2d_bf16_h200", "", "cuDNN"),
    "int8, all layers of three networks": ("conv2d_int8_networks_h100", "", "cuDNN's int8 or fp16"),
    "int8, 10 layers of TVM's tests": ("conv2d_int8_cases_h100", "cudnn_int8_us", "cuDNN's int8"),
    "float32 by TF32": ("conv2d_tf32_h100", "", "cuDNN with TF32"),
    "float32 within its rounding": ("conv2d_fp32_h200", "", "cuDNN without TF32"),
    "FP8 (e4m3)": ("conv2d_float8_h200", "fp16_us", "our fp16"),
}


def _rows(data: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = data["rows"]
    return rows


# what -> the file, and the rows of its data: us, torch_us, and copy_us if there is one
MEMORY_BOUND: dict[str, tuple[str, Callable[[dict[str, Any]], list[dict[str, Any]]]]] = {
    "depthwise layers and their gradients": ("depthwise_tuned_h100", _rows),
    "causal convolutions over time, untuned": ("sequences_h200", sequence_tables.beside_torch),
    "movements of data, untuned": ("data_movement_random_h100", _rows),
    "pools, expressions, softmax, resize, untuned": ("bandwidth_ops_h200", _rows),
    "topk, nonzero, unique, nms and others, untuned": ("dynamic_ops_h200", _rows),
}


def _data(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return data


def _card(data: dict[str, Any]) -> str:
    return str(data["card"]).partition(",")[0].removeprefix("NVIDIA ").partition(" ")[0]


def _spread(ratios: Sequence[float], form: str) -> tuple[str, str, str]:
    """Geometric mean, least and largest."""
    return f"**{common.geometric_mean(list(ratios)):{form}}**", f"{min(ratios):{form}}", f"{max(ratios):{form}}"


def convolutions(_: dict[str, Any]) -> str:
    rows = []
    for what, (file, peer_us, peer) in CONVOLUTIONS.items():
        data = _data(file)
        ratios = [row[peer_us] / row["us"] if peer_us else row["ratio"] for row in data["rows"]]
        rows.append((what, peer, _card(data), len(ratios), *_spread(ratios, ".2f")))
    return markdown(("convolutions on a GPU", "beside", "card", "layers", "mean ratio", "least", "largest"), rows)


def memory_bound(_: dict[str, Any]) -> str:
    rows = []
    for what, (file, rows_of) in MEMORY_BOUND.items():
        data = _data(file)
        shares = [row["copy_us"] / row["us"] for row in rows_of(data) if "copy_us" in row]
        torch = [row["torch_us"] / row["us"] for row in rows_of(data)]
        of_copy = _spread(shares, ".0%")[:2] if shares else ("", "")
        rows.append((what, _card(data), len(torch), *of_copy, *_spread(torch, ".2f")))
    header = ("of a copy's speed, mean", "least", "times PyTorch's speed, mean", "least", "largest")
    return markdown(("kernels bound by memory", "card", "cases", *header), rows)


def network_times(_: dict[str, Any]) -> str:
    """PyTorch's shortest time beside ours, in a CUDA graph, wherever it was measured: the newest of each network."""
    rows: dict[str, tuple[object, ...]] = {}

    def add(what: str, card: str, ours: float, peers: Sequence[float]) -> None:
        if peers and what not in rows:
            rows[what] = what, card, f"{ours:.0f}", f"{min(peers):.0f}", f"{min(peers) / ours:.2f}"

    newest = _data("network_times_h200")
    for row in newest["rows"]:
        name, batch, format_ = row["case"].split(":")
        peers = [row[peer] for peer in ("torch.compile", "max-autotune") if peer in row]
        add(f"{name}, batch {batch}, {format_}", _card(newest), row["early"], peers)
    for data in map(_data, ("networks_graphs_h200", "networks_graphs_h100")):
        for row in (each for each in data["rows"] if "plans" in each):
            peers = [us for peer in ("torch", "torch.compile") if (us := row.get(f"{peer} hot_us"))]
            what = f"{row['network']}, batch {row['batch']}, {row['format']}"
            add(what, _card(data), row["plans"]["plan"]["hot_us"], peers)
    return markdown(("network, us", "card", "ours", "PyTorch", "ratio"), list(rows.values()))


def models(data: dict[str, Any]) -> str:
    """The shortest of PyTorch's times over ours, for each model and batch."""
    ratios: dict[str, dict[int, float]] = {}
    for row in data["rows"]:
        peers = [row[f"{way}_us"] for way in ("eager", "compile", "autotune") if f"{way}_us" in row]
        ratios.setdefault(row["model"], {})[row["batch"]] = min(peers) / row["network_us"]
    batches = sorted({row["batch"] for row in data["rows"]})
    rows: list[Sequence[object]] = [
        (model, *(f"{found[batch]:.2f}" for batch in batches)) for model, found in ratios.items()
    ]
    means = [common.geometric_mean([found[batch] for found in ratios.values()]) for batch in batches]
    rows.append((f"geometric mean of {len(ratios)}", *(f"**{mean:.2f}**" for mean in means)))
    return markdown(("model in fp16, PyTorch's fastest over ours", *(f"batch {batch}" for batch in batches)), rows)


def own_kernels(data: dict[str, Any]) -> str:
    rows = [
        (row["kernel"], f"{row['yours_us']:.1f}", f"{row['tuned_us']:.1f}", f"{row['speedup']:.2f}", f"{row['share']:.0%}")
        for row in data["rows"]
    ]
    return markdown(("kernel, us", "the author's choice", "tuned", "speed-up", "of the limit"), rows)


def cpu(data: dict[str, Any]) -> str:
    rows = [
        (
            row["label"].removeprefix("conv2d ").removesuffix(" f32 NHWC"), f"{row['plain_us'] / row['best_us']:.1f}",
            f"{row['default_us'] / row['best_us']:.1f}",
            "" if row["torch_us"] is None else f"{row['torch_us'] / row['best_us']:.2f}",
        )
        for row in data["rows"]
    ]  # fmt: skip
    return markdown(("fp32 layer on a CPU: times the speed of", "plain loops", "our default", "PyTorch"), rows)


def host_time(_: dict[str, Any]) -> str:
    """What a call costs the host, in microseconds, on one machine."""
    calls = [(row["call"], f"{row['host_us']:.2f}") for row in _data("launch_overhead_h200")["rows"][:5]]
    launches = [(f"a launch in C, {row['kernel']}", f"{row['c_us']:.2f}") for row in _data("c_call_h200")["rows"]]
    lookups = [
        (f"database of {data['records']:,} records: {name}", f"{result['median_us']:,.3g}")
        for data in [_data("lookup_latency")]
        for name, result in data["results"].items()
        if result["median_us"] < 10_000
    ]
    return markdown(("host time", "us"), [*calls, *launches, *lookups])
