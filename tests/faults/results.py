"""The result of a campaign: a JSON file, which benchmarks/render_tables.py makes a table of, and lines for the terminal."""

from __future__ import annotations

import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Where and when a campaign ran, without names of hosts and users."""
    model = ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        pass
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Replaces the file at once, so that an interrupted campaign leaves a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(path)


def summary(tallies: list[dict[str, Any]]) -> str:
    """Some lines for the terminal."""
    lines = [
        f"{row['name']:42} {row['held']:>7} of {row['tries']:<7} held  {row['seconds']:7.1f} s  {row['cpu_s']:7.1f} CPU s  "
        f"{row['peak_mib']:5} MiB"
        for row in tallies
        if row["tries"]
    ]
    return "\n".join(lines)
