"""Draws the tables of convolutions from the data in benchmarks/results/."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import common
import conv2d_blocks
import conv2d_ideas
import conv2d_predictions
from table_text import layer_text, markdown, shortest_us

CUDNN = {"cuDNN NCHW": ("cudnn_nchw",), "cuDNN NHWC": ("cudnn_nhwc",)}  # heading -> times of which the shortest is shown


def conv2d_fp16(data: dict[str, Any]) -> str:
    """One row per workload: both of cuDNN's layouts, the rule-based default, the tuned kernel."""
    return _conv2d(data, CUDNN)


def conv2d_grouped(data: dict[str, Any]) -> str:
    """The same with the fastest configuration of conv2d_mma, which took all groups before conv2d_halo did."""
    rows = [{**row, "mma_us": row.get("template_us", {}).get("conv2d_mma")} for row in data["rows"]]
    return _conv2d({**data, "rows": rows}, {**CUDNN, "conv2d_mma": ("mma",)})


def conv2d_awkward(data: dict[str, Any]) -> str:
    """Layers whose channels fill no 16 bytes: both of cuDNN's layouts, the fastest kernel of each template."""
    names = sorted({name for row in data["rows"] for name in row["template_us"]})
    rows = [
        (
            layer_text(row["workload"]),
            *(f"{row[f'cudnn_{layout}_us']:.2f}" for layout in ("nchw", "nhwc")),
            *(f"{row['template_us'][name]:.2f}" if name in row["template_us"] else "" for name in names),
            f"{row['ratio']:.2f}",
            f"{row['cudnn_nhwc_us'] / row['us']:.2f}",
        )
        for row in data["rows"]
    ]
    nhwc = common.geometric_mean([row["cudnn_nhwc_us"] / row["us"] for row in data["rows"]])
    rows.append(("geometric mean", *[""] * (2 + len(names)), f"**{data['geometric_mean_ratio']:.2f}**", f"**{nhwc:.2f}**"))
    return markdown(("layer, us", *CUDNN, *names, "ratio", "of cuDNN NHWC"), rows)


def conv2d_fused(data: dict[str, Any]) -> str:
    """The same with a fused epilogue: PyTorch's ways, each in the faster of its layouts."""
    ways = {"conv, bias, relu": "separate", "cuDNN fused": "fused", "torch.compile": "compiled"}
    return _conv2d(data, {head: (f"{name}_nchw", f"{name}_nhwc") for head, name in ways.items()})


def conv2d_int8(data: dict[str, Any]) -> str:
    """int8 beside cuDNN's int8 plans, its fp16 kernels and our fp16 kernels; the ratio is that of cuDNN's faster ones."""
    return _conv2d(data, {"cuDNN int8": ("cudnn_int8",), "cuDNN fp16": ("cudnn_fp16",), "our fp16": ("fp16",)})


def int8_cases(data: dict[str, Any]) -> str:
    """int8 beside the fastest of cuDNN's int8 plans."""
    rows = [
        (layer_text(row["workload"]), shortest_us(row, "cudnn_int8"), shortest_us(row, "cudnn_fp16"), f"{row['us']:.2f}",
         f"{row['cudnn_int8_us'] / row['us']:.2f}", row["template"])
        for row in data["rows"]
    ]  # fmt: skip
    return markdown(("layer, us", "cuDNN int8", "cuDNN fp16", "ours", "cuDNN int8 / ours", "template"), rows)


def int8_networks(data: dict[str, Any]) -> str:
    """Sums over all convolutions of one pass, then every layer."""
    rows = [
        (name, sums["layers"], *(f"{sums[key]:.3f}" for key in ("cudnn_ms", "fp16_ms", "ms")),
         f"{sums['cudnn_ms'] / sums['ms']:.2f}", f"{sums['fp16_ms'] / sums['ms']:.2f}")
        for name, sums in data["networks"].items()
    ]  # fmt: skip
    heads = ("network, ms", "layers", "cuDNN, int8 or fp16", "our fp16", "our int8", "cuDNN / int8", "fp16 / int8")
    return f"{markdown(heads, rows)}\n\n{conv2d_int8(data)}"


def conv2d_float32(data: dict[str, Any]) -> str:
    """float32, with or without TF32, beside cuDNN with the same rounding."""
    return _conv2d(data, {"cuDNN": ("cudnn_tf32", "cudnn_fp32")})


def conv2d_float8(data: dict[str, Any]) -> str:
    """float8 beside our own fp16, with which the ratio is; cuDNN's fp16 kernels for comparison."""
    return _conv2d(data, {"cuDNN fp16": ("cudnn_fp16",), "our fp16": ("fp16",)}, against="our fp16")


def conv2d_int8_search(data: dict[str, Any]) -> str:
    """The fastest kernels of int8 and fp16 that one search found."""
    rows: list[Sequence[object]] = [
        (layer_text(row["workload"]), f"{row['fp16_us']:.2f}", f"{row['us']:.2f}", f"{row['fp16_us'] / row['us']:.2f}",
         f"{row['tops']:.0f}", row["template"])
        for row in data["rows"]
    ]  # fmt: skip
    mean = common.geometric_mean([row["fp16_us"] / row["us"] for row in data["rows"]])
    rows.append((f"geometric mean of {len(data['rows'])}", "", "", f"**{mean:.2f}**", "", ""))
    return markdown(("layer, us", "our fp16", "int8", "fp16 / int8", "TOP/s", "template"), rows)


def _conv2d(data: dict[str, Any], peers: dict[str, tuple[str, ...]], against: str = "cuDNN") -> str:
    """`peers`: heading of a column -> the times; the column shows the shortest of them. The ratio is with `against`."""
    rows = [
        (
            layer_text(row["workload"]), *(shortest_us(row, *names) for names in peers.values()),
            shortest_us(row, "default"), f"{row['us']:.2f}", f"{row['ratio']:.2f}", f"{row['tflops']:.0f}", row["trials"],
            row["template"],
        )
        for row in data["rows"]
        if "ratio" in row
    ]  # fmt: skip
    parts = [markdown(("layer, us", *peers, "default", "tuned", "ratio", "TFLOP/s", "trials", "template"), rows)]
    parts += [f"- {row['workload']}: {row['error']}" for row in data["rows"] if "error" in row]
    failed = [(layer_text(row["workload"]), *pair) for row in data["rows"] for pair in row.get("failed", {}).items()]
    parts += [f"- {layer}, {name}: {text.splitlines()[0]}" for layer, name, text in failed]
    named = {"device": "device busy", "preparing": "preparing", "build": "waiting for a build", "tuner": "for the tuner"}
    shares = ", ".join(f"{named[share]} {100 * value:.0f} %" for share, value in data["shares"].items())
    behind = [row["default_us"] / row["us"] for row in data["rows"] if row.get("default_us") and "ratio" in row]
    default = f"The default takes {max(behind):.2f} times the tuned time at most. " if behind else ""
    parts.append(
        f"Geometric mean **{data['geometric_mean_ratio']:.2f}x** {against} over {len(rows)} of {len(data['rows'])} layers. "
        f"{default}"
        f"Tuned in {data['tuning_s']:.0f} s, {data['trials_per_s']:.1f} trials/s; of the wall time: {shares}."
    )
    return "\n\n".join(parts)


def conv2d_fp16_short(data: dict[str, Any]) -> str:
    rows: list[Sequence[object]] = [
        (
            layer_text(row["workload"]),
            *(shortest_us(row, name) for name in ("cudnn", "default")),
            f"{row['us']:.2f}",
            f"{row['ratio']:.2f}x",
        )
        for row in data["rows"]
        if "ratio" in row
    ]
    rows.append((f"geometric mean of {len(rows)}", "", "", "", f"**{data['geometric_mean_ratio']:.2f}x**"))
    header = ("fp16 convolution, microseconds", "cuDNN, the faster layout", "rule-based default", "tuned", "cuDNN / tuned")
    return markdown(header, rows)


def networks(data: dict[str, Any]) -> str:
    """Sums over all convolutions of one pass, then every layer with the template that won."""
    rows = [
        (name, sums["layers"], sums["missing"], f"{sums['cudnn_ms']:.3f}", f"{sums['ms']:.3f}",
         f"{sums['cudnn_ms'] / sums['ms']:.2f}")
        for name, sums in data["networks"].items()
    ]  # fmt: skip
    won = Counter(row["template"] for row in data["rows"] if "template" in row)
    table = markdown(("network", "layers", "missing", "cuDNN ms", "tuned ms", "ratio"), rows)
    winners = ", ".join(f"{name} for {count} layers" for name, count in won.most_common())
    return f"{table}\n\nFastest template: {winners}.\n\n{conv2d_fp16(data)}"


def resnet50_chain(data: dict[str, Any]) -> str:
    """One row per way to compute the chain."""
    named = {
        "schedsearch": "ours, tuned", "cudnn_fused": "PyTorch, cuDNN fused", "cudnn_separate": "PyTorch, conv, bias, relu",
        "torch_compile": "PyTorch, torch.compile",
    }  # fmt: skip
    rows = [
        (
            named[row["way"]],
            f"{row['us']:.1f}",
            f"{row['hot_us']:.1f}",
            row["launches"] or "",
            f"{row['relative_error']:.1e}",
        )
        for row in data["rows"]
        if "us" in row
    ]
    header = (f"{data['layers']} layers at batch 1, us", "cold", "one set of operands", "kernels", "relative error")
    parts = [markdown(header, rows)]
    parts += [f"- {named[row['way']]}: {row['error'].splitlines()[0]}" for row in data["rows"] if "error" in row]
    if "ratio" in data:
        trials = list(data["trials"].values())
        parts.append(
            f"PyTorch's fastest takes **{data['ratio']:.2f}x** our time, {data['hot_ratio']:.2f}x with one set of operands. "
            f"Our layers one by one: {data['sum_of_layers_us']:.1f} us, as recorded. "
            f"{sum(trials) / len(trials):.0f} trials per layer on average."
        )
    return "\n\n".join(parts)


def profile(data: dict[str, Any]) -> str:
    """Nsight Compute's figures of one kernel of ours and of PyTorch's."""
    (task,) = data["tasks"]
    rows = []
    for profile in task["profiles"]:
        q, ours = profile["all"], profile["subject"] == "kernel"
        name = f"ours, {task['template']}" if ours else "PyTorch, " + profile["launches"][0]["kernel"].partition("_nhwc")[0]
        rows.append(
            (
                name, f"{q['tensor_active_pct']:.1f} %", f"{q['tensor_elapsed_pct']:.1f} %", f"{q['occupancy_pct']:.0f} %",
                f"{q['l2_pct']:.0f} %", f"{q['l2_bytes'] / 1e6:.0f}", f"{q['dram_pct']:.0f} %",
                f"{q['duration_ns'] / 1e3:.0f}",
            )
        )  # fmt: skip
    header = (layer_text(task["label"]), "tensor pipe, active", "elapsed", "occupancy", "L2", "MB of L2", "DRAM", "us")
    return markdown(header, rows)


def conv2d_ideas_table(data: dict[str, Any]) -> str:
    """The gain of single knobs. It reads its packed data itself."""
    header = ("knob", "layer", "predicted, µs", "measured, µs", "configurations")
    return markdown(header, conv2d_ideas.rows())


FASTEST_TEMPLATES = ("conv2d_wgmma", "conv2d_halo", "conv2d_mma", "conv2d_stem")
FASTEST_LAYERS = (
    "32x56x56x64 k64 3x3 p1", "32x28x28x128 k128 3x3 p1", "32x14x14x256 k256 3x3 p1", "32x7x7x512 k512 3x3 p1",
    "32x56x56x64 k256 1x1", "32x28x28x512 k128 1x1", "32x56x56x128 k128 3x3 s2 p1", "32x28x28x256 k256 3x3 s2 p1",
    "32x224x224x3 k64 7x7 s2 p3", "32x300x300x64 k64 3x3 p1", "1x56x56x64 k64 3x3 p1", "1x28x28x128 k128 3x3 p1",
    "1x14x14x256 k256 3x3 p1", "1x7x7x512 k512 3x3 p1", "1x56x56x64 k256 1x1", "1x28x28x512 k128 1x1",
    "1x224x224x3 k64 7x7 s2 p3",
)  # fmt: skip


def conv2d_fastest(data: dict[str, Any]) -> str:
    """Each template's fastest configuration in the searches behind the tables, the last of the runs."""
    run = conv2d_ideas.runs()[-1]
    times = {
        (workload.label, template): min(row[-1] for row in rows) for template in run for workload, _, rows in run[template]
    }
    rows = []
    for layer in FASTEST_LAYERS:
        of_layer = [times.get((f"conv2d {layer} f16 NHWC", template)) for template in FASTEST_TEMPLATES]
        best = min(time for time in of_layer if time is not None)
        rows.append((layer, *("" if t is None else f"**{t:.1f}**" if t == best else f"{t:.1f}" for t in of_layer)))
    return markdown(("layer", *FASTEST_TEMPLATES), rows)


def conv2d_predictions_table(data: dict[str, Any]) -> str:
    """Measured and predicted times of conv2d_wgmma. It reads its packed data itself."""
    header = ("layer", "measured", "the fastest", "predicted for it", "chosen", "predicted for it", "rank correlation")
    return f"{markdown(header, conv2d_predictions.rows())}\n\n{conv2d_predictions.summary('conv2d_wgmma')}"


def conv2d_halo_predictions(data: dict[str, Any]) -> str:
    return conv2d_predictions.summary("conv2d_halo")


def cpu_conv2d(data: dict[str, Any]) -> str:
    rows = [
        (
            layer_text(row["label"]), f"{row['plain_us']:.0f}", "" if row["torch_us"] is None else f"{row['torch_us']:.0f}",
            f"{row['default_us']:.0f}", f"{row['best_us']:.0f}", f"{row['plain_us'] / row['best_us']:.1f}",
            f"{row['flops'] / row['best_us'] / 1e3:.0f}",
        )
        for row in data["rows"]
    ]  # fmt: skip
    table = markdown(("fp32 layer, us", "plain loops", "PyTorch", "default", "best found", "over plain", "GFLOP/s"), rows)
    gain = math.exp(sum(math.log(row["plain_us"] / row["best_us"]) for row in data["rows"]) / len(rows))
    searched = max(row["configs"] for row in data["rows"])
    return f"{table}\n\nBest of {searched} configurations drawn at random. Geometric mean {gain:.0f}x the plain loops."


def before_after(data: dict[str, Any]) -> str:
    """Two versions in one run: what tuning found, how fast it went, and the host time of a call."""
    layers = sorted(data["before"]["us"].keys() & data["after"]["us"].keys(), key=list(data["before"]["us"]).index)
    rows: list[tuple[object, ...]] = [
        (f"{layer_text(layer)}, us", *(f"{data[run]['us'][layer]:.2f}" if layer in data[run]["us"] else "" for run in _RUNS))
        for layer in layers
    ]
    rows.append(("geometric mean over cuDNN", *(f"{data[run]['geometric_mean_ratio']:.3f}" for run in _RUNS)))
    rows.append(("trials per second", *(f"{data[run]['trials_per_s']:.1f}" for run in _RUNS)))
    rows.append(("wall time spent waiting for builds", *(f"{data[run]['shares']['build']:.0%}" for run in _RUNS)))
    calls = data["calls"]
    rows += [
        (f"{call}, us of the host", f"{us:.2f}", f"{calls['after'][call]:.2f}", "") for call, us in calls["before"].items()
    ]
    return markdown(("", "before", "after", "after, second run"), rows)


_RUNS = ("before", "after", "warm")


def blocks(data: dict[str, Any]) -> str:
    """int8 layers in NCHW[x]c: the fastest time for each x, and how much slower TVM's x = 4 is than the best."""
    found = conv2d_blocks.winners(data["rows"])
    rows = [
        (
            layer.removeprefix("conv2d "),
            *(f"{entry['times'][x]:.2f}" if x in entry["times"] else "" for x in conv2d_blocks.XS),
            entry["best"],
            f"{entry['four']:.1f}" if "four" in entry else "",
        )
        for layer, entry in found.items()
    ]
    return markdown(("layer, us", *(f"x = {x}" for x in conv2d_blocks.XS), "best", "x = 4 / best"), rows)
