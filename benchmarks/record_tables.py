"""The tables of records that ship, of two tunings of the same layers, and of two toolchains, for `render_tables`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import reproducibility
from common import geometric_mean
from table_text import layer_text, markdown


def fresh_machine(data: dict[str, Any]) -> str:
    """Of `fresh_machine.py`: networks by shipped records and by a database of their own."""
    rows = [
        (
            row["network"],
            *(f"{row[way]['us']:.1f}" for way in ("shipped", "tuned")),
            f"{row['shipped']['us'] / row['tuned']['us']:.3f}",
            f"{row['shipped']['first_s']:.1f}",
        )
        for row in data["rows"]
    ]
    head = ("network, us", "by shipped records", "tuned here", "ratio", "first result, s")
    return f"{markdown(head, rows)}\n\nTuned here by `{data['tuned_by']}`; {data['note']}"


def two_tunings(data: dict[str, Any]) -> str:
    """Of `reproducibility.py`: a row for each layer, and what it counts."""
    rows: list[Sequence[object]] = [
        (
            layer_text(row["layer"]), "yes" if row["same"] else "", f"{row['ratio']:.3f}", f"{row['over_default']:.3f}",
            " and ".join(map(str, row["tied"])),
        )
        for row in data["rows"]
    ]  # fmt: skip
    head = ("layer", "same configuration", "slower over faster", "worse over the default", "ties of the winners")
    counts = "\n".join(f"- {line}" for line in reproducibility.counts(data["rows"]))
    return f"{markdown(head, rows)}\n\n{counts}\n\n{data['time_s_a_layer']:g} s of tuning a layer and seed; {data['note']}."


def toolchains(data: dict[str, Any]) -> str:
    """Of `toolchains.py race`: here is the older one."""
    timed = [row for row in data["rows"] if "ratio" in row]
    rows = [
        (
            f"`{row['template']}`",
            layer_text(row["workload"]),
            *(f"{row[key] / 1e3:.2f}" for key in ("here_ns", "there_ns")),
            f"{row['there_ns'] / row['here_ns']:.3f}",
            "yes" if row["differ"] else "",
        )
        for row in timed
    ]
    old, new = (data[where]["nvidia-nvjitlink"] for where in ("here", "there"))
    mean = geometric_mean([row["there_ns"] / row["here_ns"] for row in timed])
    head = ("template", "workload", f"{old}, us", f"{new}, us", "ratio", "more than noise")
    return f"{markdown(head, rows)}\n\nGeometric mean of the ratios over {len(rows)} kernels: {mean:.3f}."
