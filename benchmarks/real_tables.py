"""Tables of ONNX files that packages ship, for `render_tables`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from common import geometric_mean
from table_text import markdown


def real_models(data: dict[str, Any]) -> str:
    """ONNX files that packages ship: what builds them, how long that takes, and times beside ONNX Runtime's."""
    rows: list[Sequence[object]] = []
    ratios = []
    for row in data["rows"]:
        times = [row.get(f"{name}_us") for name in ("ours", "ort1", "ort2")]
        if None not in times:
            ratios.append(times[0] / min(times[1:]))
        rows.append(
            (
                row["file"], row["state"], row.get("calls", ""), f"{row.get('user_s') or 0:.0f}",
                f"{row['error']:.0e}" if "error" in row else "", *("" if us is None else f"{us:.0f}" for us in times),
                "" if None in times else f"{ratios[-1]:.2f}",
            )
        )  # fmt: skip
    if ratios:
        rows.append((f"geometric mean of {len(ratios)}", *[""] * 7, f"**{geometric_mean(ratios):.2f}**"))
    header = ("built", "kernel calls", "CPU s", "error", "ours", "ONNX Runtime, 1 thread", "2 threads", "ratio")
    return markdown(("file, us", *header), rows)


def real_models_gpu(data: dict[str, Any]) -> str:
    """The same on a GPU: of arrays in the host's memory and on the device, beside ONNX Runtime on that machine's CPU."""
    rows: list[Sequence[object]] = []
    ratios = []
    for row in data["rows"]:
        peers = [us for name, us in row.items() if re.fullmatch(r"ort\d+_us", name)]
        ours = row.get("ours_us")
        ratios += [min(peers) / ours] if peers and ours else []
        times = [ours, row.get("device_us"), min(peers, default=None)]
        rows.append(
            (
                row["file"], row["state"], row.get("calls", ""), f"{row.get('build_s') or 0:.0f}",
                f"{row['error']:.0e}" if "error" in row else "", *("" if us is None else f"{us:.0f}" for us in times),
                f"{ratios[-1]:.1f}" if peers and ours else "",
            )
        )  # fmt: skip
    if ratios:
        rows.append((f"geometric mean of {len(ratios)}", *[""] * 7, f"**{geometric_mean(ratios):.1f}**"))
    header = ("built", "kernel calls", "build s", "error", "from the host", "on the device", "ONNX Runtime, CPU", "ratio")
    return markdown(("file, us", *header), rows)


def real_cpu(data: dict[str, Any]) -> str:
    """Networks that packages ship, untuned, beside ONNX Runtime, while other processes do and do not compute."""
    names, states = ("ours", "ort1", "ort2"), ("quiet", "busy")
    rows: list[Sequence[object]] = []
    ratios: dict[str, list[float]] = {state: [] for state in states}
    for file in data["medians_us"]["quiet"]:
        row = [file]
        for state in states:
            times = [data["medians_us"][state][file][name] for name in names]
            ratios[state].append(times[0] / min(times[1:]))
            row += [*(f"{us:.3g}" if us < 100 else f"{us:.0f}" for us in times), f"{ratios[state][-1]:.2f}"]
        rows.append(row)
    means = [f"**{geometric_mean(ratios[state]):.2f}**" for state in states]
    rows.append(("geometric mean", "", "", "", means[0], "", "", "", means[1]))
    header = [f"{state}, us: ours | ONNX Runtime, 1 thread | 2 threads | ours / better" for state in states]
    return markdown(("network", *" | ".join(header).split(" | ")), rows)
