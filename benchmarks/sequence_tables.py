"""The tables of convolutions over time, from the data of sequences.py."""

from __future__ import annotations

from typing import Any

from table_text import markdown

_SHOWN = ("ours", "ours, time last", "Triton", "PyTorch", "PyTorch, channels last", "compiled", "copy")


def _rows(data: dict[str, Any], training: bool) -> str:
    """Microseconds of each contender."""
    names = [name for name in _SHOWN if name != "Triton" or not training]
    rows = []
    for row in data["rows"]:
        if row.get("update") or row["training"] != training:
            continue
        shape = " x ".join(f"{extent:,}" for extent in row["shape"])
        rows.append((shape, *(f"{row['us'][name]:,.1f}" if name in row["us"] else "" for name in names)))
    return markdown(("batch x channels x time, us", *names), rows)


def forward(data: dict[str, Any]) -> str:
    return _rows(data, False)


def training(data: dict[str, Any]) -> str:
    return _rows(data, True)


def updates(data: dict[str, Any]) -> str:
    names = ("ours", "PyTorch", "compiled", "copy")
    rows = [
        (" x ".join(f"{extent:,}" for extent in row["shape"][:2]), *(f"{row['us'][name]:,.1f}" for name in names))
        for row in data["rows"]
        if row.get("update")
    ]
    return markdown(("batch x channels, us", *names), rows)


def beside_torch(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Forward times and the shortest of PyTorch's; no copy's, which moves large arrays far below the memory's rate."""
    torch = ("PyTorch", "PyTorch, channels last", "compiled", "compiled, channels last")
    return [
        {"us": row["us"]["ours"], "torch_us": min(row["us"][name] for name in torch if name in row["us"])}
        for row in data["rows"]
        if not row.get("update") and not row["training"]
    ]
