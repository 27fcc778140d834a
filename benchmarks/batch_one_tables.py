"""Tables about networks at batch 1, whose time is that of many small kernels."""

from __future__ import annotations

from typing import Any

from table_text import markdown


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
