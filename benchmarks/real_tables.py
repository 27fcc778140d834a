"""Tables of ONNX files that packages ship, for `render_tables`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from common import geometric_mean
from table_text import markdown

Times = list[float | None]


def real_models(data: dict[str, Any]) -> str:
    """ONNX files that packages ship: what builds them, how long that takes, and times beside ONNX Runtime's."""

    def times(row: dict[str, Any]) -> Times:
        return [row.get(f"{name}_us") for name in ("ours", "ort1", "ort2")]

    def ratio(ours: float | None, one: float | None, two: float | None) -> float | None:
        return None if ours is None or one is None or two is None else ours / min(one, two)

    header = ("CPU s", "error", "ours", "ONNX Runtime, 1 thread", "2 threads", "ratio")
    return _files(data, "user_s", times, ratio, 2, header)


def real_models_gpu(data: dict[str, Any]) -> str:
    """The same on a GPU: of arrays in the host's memory and on the device, beside ONNX Runtime on that machine's CPU."""

    def times(row: dict[str, Any]) -> Times:
        peers = [us for name, us in row.items() if re.fullmatch(r"ort\d+_us", name)]
        return [row.get("ours_us"), row.get("device_us"), min(peers, default=None)]

    def ratio(ours: float | None, device: float | None, peer: float | None) -> float | None:
        return None if ours is None or peer is None else peer / ours

    header = ("build s", "error", "from the host", "on the device", "ONNX Runtime, CPU", "ratio")
    return _files(data, "build_s", times, ratio, 1, header)


def _files(
    data: dict[str, Any], seconds: str, times: Callable[[dict[str, Any]], Times], ratio: Callable[..., float | None],
    digits: int, header: Sequence[str],
) -> str:  # fmt: skip
    """A row for each file, and the geometric mean of the ratios that are known."""
    rows: list[Sequence[object]] = []
    ratios = []
    for row in data["rows"]:
        found = times(row)
        known = ratio(*found)
        ratios += [] if known is None else [known]
        rows.append(
            (
                row["file"], row["state"], row.get("calls", ""), f"{row.get(seconds) or 0:.0f}",
                f"{row['error']:.0e}" if "error" in row else "", *("" if us is None else f"{us:.0f}" for us in found),
                "" if known is None else f"{known:.{digits}f}",
            )
        )  # fmt: skip
    if ratios:
        rows.append((f"geometric mean of {len(ratios)}", *[""] * 7, f"**{geometric_mean(ratios):.{digits}f}**"))
    return markdown(("file, us", "built", "kernel calls", *header), rows)


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
