"""Text and JSON for people and programs: the formats that several commands share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from schedsearch.text import MESSAGE_LIMIT, printable, shortened
from schedsearch.text import counted as counted
from schedsearch.text import counts as counts
from schedsearch.text import duration as duration
from schedsearch.text import seconds as seconds
from schedsearch.text import table as table
from schedsearch.typed import JsonObject

if TYPE_CHECKING:
    from schedsearch.profiling.profile import Launch, Profile


def say(text: str = "", *, err: bool = False) -> None:
    """Prints text for people on standard output, or on standard error.

    All text of all commands goes through here, so that nothing foreign reaches a terminal unescaped.
    """
    click.echo(printable(text, lines=True), err=err)


def note(text: str) -> None:
    """Prints one line about the run on standard error."""
    say(printable(shortened(text, MESSAGE_LIMIT)), err=True)


def echo_json(value: object, *, err: bool = False) -> None:
    """One JSON value on one line of standard output, or of standard error."""
    click.echo(json.dumps(value, default=lambda each: each.to_json() if hasattr(each, "to_json") else str(each)), err=err)


def size_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.4g} {unit}"
        count /= 1024
    raise AssertionError


def config_text(config: Mapping[str, object] | None) -> str:
    return "-" if config is None else " ".join(f"{name}={value}" for name, value in config.items())


_KERNEL_NAME_WIDTH = 48


def profile_table(profiles: Sequence[Profile]) -> str:
    """One line per launch, and one for all launches of a subject that takes several."""
    headers = ("", "launch", "time", "tensor/active", "tensor/elapsed", "occupancy", "L2", "L2 GB/s", "DRAM", "DRAM GB/s")
    rows = []
    for profile in profiles:
        lines: list[tuple[str, Launch | None]] = [
            (launch.kernel[:_KERNEL_NAME_WIDTH], launch) for launch in profile.launches
        ]
        if len(lines) > 1:
            lines.append(("all", None))
        for name, launch in lines:
            read = profile.figures(launch)
            rows.append(
                (
                    profile.subject,
                    name,
                    duration(read["duration_ns"]),
                    _percent(read["tensor_active_pct"]),
                    _percent(read["tensor_elapsed_pct"]),
                    _percent(read["occupancy_pct"]),
                    _percent(read["l2_pct"]),
                    _rate(read["l2_bytes"], read["duration_ns"]),
                    _percent(read["dram_pct"]),
                    _rate(read["dram_bytes"], read["duration_ns"]),
                )
            )
    return table(headers, rows, right=headers[2:])


def profile_json(profile: Profile) -> JsonObject:
    """The whole profile: the figures of each launch and of all, their sources, and every metric."""
    return {
        "subject": profile.subject,
        "tool": profile.tool,
        "cache": profile.cache,
        "taken_at": profile.taken_at,
        "all": profile.figures(),
        "sources": {name: list(profile.source(name)) for name in profile.figures()},
        "missing": list(profile.missing),
        "launches": [
            {
                "kernel": launch.kernel,
                "grid": launch.grid,
                "block": launch.block,
                **profile.figures(launch),
                "metrics": dict(launch.metrics),
            }
            for launch in profile.launches
        ],
    }


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} %"


def _rate(count_bytes: float | None, time_ns: float | None) -> str:
    """Bytes per nanosecond are gigabytes per second."""
    return "-" if count_bytes is None or not time_ns else f"{count_bytes / time_ns:,.0f}"
