"""Tables about networks at batch 1, whose time is that of many small kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import common
from table_text import markdown

_WAYS = ("before, early", "one after another", "early", "tuned", "torch.compile", "max-autotune")  # of early_launch.py


def early_launch(data: dict[str, Any]) -> str:
    """Networks one after another and early, and early as an older version built them, where it was measured."""
    has_before = any("before, early" in row for row in data["rows"])
    rows = []
    for row in data["rows"]:
        name, batch, format_ = row.get("case", f"{row.get('network')}:1:float16").split(":")
        differing = row["differing"]
        differing = max(differing.values()) if isinstance(differing, dict) else differing
        before = (f"{row['before, early']:.1f}" if "before, early" in row else "",) if has_before else ()
        rows.append((
            f"{name}, batch {batch}, {format_}", f"{row['one after another']:.1f}", *before, f"{row['early']:.1f}",
            f"{row['one after another'] / row['early']:.3f}", f"{differing:.0f} of {row['replays']:,}",
        ))  # fmt: skip
    before = ("early, before",) if has_before else ()
    return markdown(("network, us", "one after another", *before, "early", "ratio", "replays that differ"), rows)


def branches(data: dict[str, Any]) -> str:
    """Networks as a chain, and with kernels side by side that have up to so many blocks for each multiprocessor."""
    shares = [float(share) for share in data["rows"][0]["us"]]
    titles = ("network, batch 1, float16, us", "a chain", *(f"{share:g} blocks" for share in shares[1:]), "runs that differ")
    rows = [(row["network"], *(f"{time:.1f}" for time in row["us"].values()), str(row["differing"])) for row in data["rows"]]
    return markdown(titles, rows)


def early_joins(data: dict[str, Any]) -> str:
    """Networks whose kernels begin early behind several others, and only behind one."""
    rows = []
    for late, early in zip(data["rows"][::2], data["rows"][1::2]):
        times = late["us"]["0.0"], late["us"]["4.0"], early["us"]["4.0"]
        differing = late["differing"] + early["differing"]
        rows.append((late["network"], *(f"{us:.1f}" for us in times), f"{times[1] / times[2]:.3f}", str(differing)))
    titles = ("network, batch 1, float16, us", "a chain", "behind one", "behind several", "ratio", "runs that differ")
    return markdown(titles, rows)


def parts(data: dict[str, Any]) -> str:
    """Layers with few tiles by the number of blocks that share a reduction."""
    numbers = ("1", "2", "4", "8")
    layers: dict[str, dict[str, float]] = {}
    counts = {row["layer"]: row["count"] for row in data["rows"]}
    for row in data["rows"]:
        layers.setdefault(row["layer"], {})[row["parts"]] = row["us"]
    rows = [
        (
            f"{label.removeprefix('conv2d ')}, {counts[label]} times", f"{found['default']:.2f}",
            *(f"{found[each]:.2f}" if each in found else "" for each in numbers),
        )
        for label, found in layers.items()
    ]  # fmt: skip
    default = sum(counts[label] * found["default"] for label, found in layers.items())
    best = sum(counts[label] * min(found.values()) for label, found in layers.items())
    table = markdown(("layer in a chain, us", "default", *(f"{each} blocks" for each in numbers)), rows)
    return f"{table}\n\nAll of them: {default:.1f} us by default, {best:.1f} by the best column of each."


def squeeze_excite(data: dict[str, Any]) -> str:
    rows = [
        (row["network"], f"{row['four kernels']:.1f}", f"{row['one kernel']:.1f}",
         f"{row['four kernels'] / row['one kernel']:.3f}", f"{row['difference']:.1e}")
        for row in data["rows"]
    ]  # fmt: skip
    return markdown(("network, batch 1, float16, us", "four kernels", "one kernel", "ratio", "largest difference"), rows)


def network_times(data: dict[str, Any]) -> str:
    """Networks in all ways that were measured, with geometric means of the ratios of each batch."""
    found = [row for row in data["rows"] if "early" in row]
    ways = [way for way in _WAYS if any(way in row for row in found)]
    rows = []
    for row in found:
        name, batch, format_ = row["case"].split(":")
        times = (f"{row[way]:.1f}" if way in row else "" for way in ways)
        ratios = (f"{ratio:.2f}" if ratio else "" for ratio in _ratios(row))
        rows.append((f"{name}, batch {batch}, {format_}", *times, *ratios))
    for batch in sorted({row["case"].split(":")[1] for row in found}, key=int):
        of_batch = [_ratios(row) for row in found if row["case"].split(":")[1] == batch]
        rows.append((f"geometric mean, batch {batch}", *("" for _ in ways), *map(_mean, zip(*of_batch))))
    shown = ("before" if way == "before, early" else way for way in ways)
    headings = ("network, us", *shown, "one after another / early", "before / early", "PyTorch / ours")
    return markdown(headings, rows)


def _ratios(row: dict[str, Any]) -> tuple[float | None, ...]:
    """Of the chain of kernels and of the older version to the early launch, and of PyTorch's fastest to our fastest."""
    ours = min(row[way] for way in ("early", "tuned") if way in row)
    theirs = [row[way] for way in ("torch.compile", "max-autotune") if way in row]
    before = row["before, early"] / row["early"] if "before, early" in row else None
    return row["one after another"] / row["early"], before, min(theirs) / ours if theirs else None


def _mean(ratios: Sequence[float | None]) -> str:
    known = [ratio for ratio in ratios if ratio is not None]
    return f"**{common.geometric_mean(known):.2f}** of {len(known)}" if known else ""


def persistent(data: dict[str, Any]) -> str:
    """A run of layers as a network and as persistent kernels."""
    rows = [
        (row["form"], f"{row['us']:.1f}", f"{row['us_a_layer']:.2f}", f"{row['error']:.1e}", str(row["unlike"]))
        for row in data["rows"]
    ]
    return markdown(("24 layers, batch 1, float16", "us", "us a layer", "largest error", "runs that differ"), rows)


def persistent_cycles(data: dict[str, Any]) -> str:
    """Cycles from the begin of a layer to the end of each of its parts, of the second bottleneck block of a launch."""
    parts = ("pixels", "weights", "multiplied", "sent", "received", "stored", "next layer")
    rows = [
        (f"{kind}, {columns} columns", *(f"{cycles:.0f}" for cycles in marks[1:]))
        for columns, found in data["cycles"].items()
        for kind, marks in zip(("1x1 to 512", "3x3", "1x1 to 2048"), found[3:6])
    ]
    return markdown(("layer, cycles since its begin", *parts), rows)


def grids(data: dict[str, Any]) -> str:
    """Layers in grids of each size: the best time, with its parts of the reduction and columns of a tile."""
    sizes, rows = (16, 32, 64, 100, 132, 264), []
    for layer in dict.fromkeys(row["layer"] for row in data["rows"]):
        of = [row for row in data["rows"] if row["layer"] == layer]
        cells = [layer.removeprefix("conv2d "), f"{of[0]['us']:.2f} ({of[0]['blocks']})"]
        for least, most in zip((0, *sizes), sizes):
            fitting = [row for row in of if least < row["blocks"] <= most]
            best = min(fitting, key=lambda row: row["us"], default=None)
            cells.append(f"{best['us']:.2f} ({best['parts']})" if best else "")
        rows.append(tuple(cells))
    titles = ("layer in a chain, us", "default (blocks)", *(f"to {most} blocks" for most in sizes))
    return markdown(titles, rows)


def squeeze_excite_space(data: dict[str, Any]) -> str:
    """Layers by the default and by the best configuration."""
    rows = []
    for layer in dict.fromkeys(row["layer"] for row in data["rows"]):
        of = [row for row in data["rows"] if row["layer"] == layer]
        best = min(of, key=lambda row: row["us"])
        knobs = ", ".join(f"{name} {value}" for name, value in best["config"].items())
        rows.append((layer.removeprefix("squeeze_excite "), str(len(of)), f"{of[0]['us']:.2f}", f"{best['us']:.2f}", knobs))
    return markdown(("layer in a chain, us", "configurations", "default", "best", "the best"), rows)
