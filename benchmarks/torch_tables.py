"""Tables of models in PyTorch by its own backends and by ours, for `render_tables`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from common import geometric_mean
from table_text import markdown

TRAINED = {
    "eager": "PyTorch", "compile": "torch.compile", "graphs": "its reduce-overhead", "ours": "backend of ours",
    "ours_graphs": "ours, reduce-overhead",
}  # fmt: skip


def torch_dispatch(data: dict[str, Any]) -> str:
    return markdown(("host time of a call", "us"), [(row["call"], f"{row['host_us']:.2f}") for row in data["rows"]])


def idle_host(data: dict[str, Any]) -> str:
    """How the host times of two versions in turns compare, without the driver's own time."""
    rows: list[Sequence[object]] = [
        (
            row["call"] + (", cold" if row["cold"] else ""),
            f"{median(row['ratios']):.2f}",
            f"{row['ratios'][0]:.2f} to {row['ratios'][-1]:.2f}",
        )
        for row in data["rows"]
    ]
    return markdown(("host time of a call", "before / after", "of pairs of processes"), rows)


def torch_models(data: dict[str, Any]) -> str:
    """Models of PyTorch by its backends; times are those of CUDA graphs. What was not measured is an empty cell."""
    ways = ("eager", "compile", "autotune", "network")
    best = [min(row[f"{way}_us"] for way in ways[:3] if f"{way}_us" in row) / row["network_us"] for row in data["rows"]]
    rows: list[Sequence[object]] = [
        (
            row["case"].replace(":", ", batch "),
            *(f"{row[f'{way}_us']:.0f}" if f"{way}_us" in row else "" for way in ways),
            f"{ratio:.2f}",
            *(f"{row[key]:.1e}" if (key := f"{way}_error") in row else "" for way in ("compile", "network")),
        )
        for row, ratio in zip(data["rows"], best)
    ]
    for batch in sorted({row["batch"] for row in data["rows"]}):
        mean = geometric_mean([ratio for row, ratio in zip(data["rows"], best) if row["batch"] == batch])
        rows.append((f"geometric mean, batch {batch}", "", "", "", "", f"**{mean:.2f}**", "", ""))
    header = ("PyTorch", "torch.compile", "its max-autotune", "backend of ours", "ratio", "error of torch.compile")
    return markdown(("model, us", *header, "error of ours"), rows)


def torch_models_plain(data: dict[str, Any]) -> str:
    """The same models called from Python."""
    ways = ("graphs", "network")
    rows: list[Sequence[object]] = []
    for row in (each for each in data["rows"] if all(f"{way}_plain_us" in each for way in ways)):
        times = [f"{row[f'{way}_{kind}_us']:.0f}" for kind in ("plain", "host") for way in ways]
        ratio = row["graphs_plain_us"] / row["network_plain_us"]
        rows.append((row["case"].replace(":", ", batch "), *times[:2], f"{ratio:.2f}", *times[2:]))
    header = ("torch.compile's reduce-overhead", "backend of ours", "ratio", "host, reduce-overhead", "host, ours")
    return markdown(("model called from Python, us", *header), rows)


def torch_training(data: dict[str, Any]) -> str:
    """Training steps: plain ones, and replays of a CUDA graph. A time that was not measured is an empty cell."""
    rows = []
    for row in data["rows"]:
        for way, end in (("plain", "_us"), ("captured", "_captured_us")):
            times = {name: us for name in TRAINED if (us := row.get(f"{name}{end}"))}
            ours, theirs = (
                [us for name, us in times.items() if name.startswith("ours") is wanted] for wanted in (True, False)
            )
            rows.append(
                (
                    f"{_training(row)}, {way}",
                    *(f"{times[name] / 1e3:.2f}" if name in times else "" for name in TRAINED),
                    f"{min(theirs) / min(ours):.2f}" if ours and theirs else "",
                )
            )
    return markdown(("training step, ms", *TRAINED.values(), "ratio"), rows)


def _training(row: dict[str, Any]) -> str:
    return f"{row['model']}, batch {row['batch']}, {row['precision']}"


def torch_losses(data: dict[str, Any]) -> str:
    """Losses at the end of short trainings, and how far two ways are from PyTorch's, with standard errors."""
    rows = []
    for row in data["rows"]:
        if "loss_apart_compile" in row:
            apart = [row[f"loss_apart_{name}"] for name in ("compile", "ours")]
            eager = fmean(row["loss_end"]["eager"])
            cells = [f"{each['mean']:+.4f} ± {each['standard_error']:.4f}" for each in apart]
            rows.append((_training(row), f"{row['loss_first']:.3f}", f"{eager:.4f}", *cells))
    return markdown(("training", "first loss", "last loss, PyTorch", "torch.compile's is apart", "ours is apart"), rows)


def network_host(data: dict[str, Any]) -> str:
    """Calls in groups of each length, each group on an idle GPU; a group of many calls waits for no one before it ends."""
    times: dict[str, list[str]] = {}
    for row in data["rows"]:
        times.setdefault(row["call"], []).append(f"{row['host_us']:.1f}")
    return markdown(("host time of a call, us", "8 in a row", "40 or 500"), [(call, *us) for call, us in times.items()])
