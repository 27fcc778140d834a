"""Reads files of `schedsearch replay --json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from schedsearch.dashboard.views.replay import ReplayFile, ReplaySpace, ReplayView
from schedsearch.text import quoted
from schedsearch.typed import JsonMapping

MAX_BYTES = 64 << 20


def replay_view(paths: Sequence[str]) -> ReplayView:
    """All files that can be read, and why the others cannot."""
    files, problems = [], []
    for path in paths:
        try:
            files.append(_read(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"it has no {quoted(error.args[0])}" if isinstance(error, KeyError) else str(error)
            problems.append(f"{path} is not a file of schedsearch replay --json: {reason}")
    return ReplayView(tuple(files), tuple(problems))


def _read(path: str) -> ReplayFile:
    file = Path(path)
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB")
    data = json.loads(file.read_bytes())
    budgets = sorted(map(int, data["geomean"]))
    return ReplayFile(
        name=file.name,
        tuner=str(data["tuner"]),
        seeds=int(data["seeds"]),
        budgets=tuple(budgets),
        geomean=_by_budget(data["geomean"], budgets),
        low=_by_budget(data["geomean_low"], budgets),
        high=_by_budget(data["geomean_high"], budgets),
        cpu_s_per_64=float(data["cpu_s_per_64"]),
        spaces=tuple(
            ReplaySpace(
                name=str(space["name"]),
                configurations=int(space["configurations"]),
                valid=int(space["valid"]),
                best_ns=float(space["best_ns"]),
                fractions=_by_budget(space["fractions"], budgets),
                low=_by_budget(space["low"], budgets),
                high=_by_budget(space["high"], budgets),
                within_5=_by_budget(space["within_5"], budgets),
            )
            for space in data["spaces"]
        ),
    )


def _by_budget(values: JsonMapping, budgets: Sequence[int]) -> tuple[float, ...]:
    return tuple(float(values[str(budget)]) for budget in budgets)
