"""What the tables of all benchmarks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """First column left-aligned, the others right-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def layer_text(label: str) -> str:
    """'conv2d 32x56x56x64 k64 3x3 p1 f16 NHWC+relu' without the parts that all rows share."""
    return label.removeprefix("conv2d ").partition("+")[0].removesuffix(" NHWC").rpartition(" ")[0]


def shortest_us(row: dict[str, Any], *names: str) -> str:
    """The shortest of the named times; empty if none was measured."""
    times = [row[f"{name}_us"] for name in names if row.get(f"{name}_us") is not None]
    return f"{min(times):.2f}" if times else ""
