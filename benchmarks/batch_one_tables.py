"""Tables about networks at batch 1, whose time is that of many small kernels."""

from __future__ import annotations

from typing import Any

from table_text import markdown


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
