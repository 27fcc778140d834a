"""Tables about networks at batch 1, whose time is that of many small kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import common
from table_text import markdown

_WAYS = ("one after another", "early", "tuned", "torch.compile", "max-autotune")  # of early_launch.py


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
    headings = ("network, us", *ways, "one after another / early", "PyTorch / ours")
    return markdown(headings, rows)


def _ratios(row: dict[str, Any]) -> tuple[float | None, float | None]:
    """Of the chain of kernels and of PyTorch's fastest to our fastest."""
    ours = min(row[way] for way in ("early", "tuned") if way in row)
    theirs = [row[way] for way in ("torch.compile", "max-autotune") if way in row]
    return row["one after another"] / row["early"], min(theirs) / ours if theirs else None


def _mean(ratios: Sequence[float | None]) -> str:
    known = [ratio for ratio in ratios if ratio is not None]
    return f"**{common.geometric_mean(known):.2f}** of {len(known)}" if known else ""
