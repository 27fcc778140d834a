"""The result of a campaign: a JSON file, and the table in docs/reliability.md that is made from it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"


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


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table with its command."""
    where = result["machine"]
    lines = [
        f"`{result['command']}` on {where['date']}: {result['seconds'] / 60:.0f} minutes, {where['cpu']}, "
        f"{where['cores']} cores, {where['system']}, Python {where['python']}.",
        "",
        "| fault | what happens | tries | held | seconds each | peak MiB |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in result["scenarios"]:
        if not row["tries"]:
            continue
        each_s = row["seconds"] / row["tries"] if row["tries"] else 0.0
        digits = 1 if each_s >= 0.1 else 4
        cells = (
            f"`{row['name']}`",
            row["what"],
            f"{row['tries']:,}",
            f"{row['held']:,}",
            f"{each_s:.{digits}f}",
            row["peak_mib"],
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    tries, held = (sum(row[key] for row in result["scenarios"]) for key in ("tries", "held"))
    lines.append(f"| all | | {tries:,} | {held:,} | | {max((row['peak_mib'] for row in result['scenarios']), default=0)} |")
    return "\n".join(lines)


def render(results: list[Path], page: Path = PAGE) -> None:
    """Puts the table of each result between the marks `<!-- NAME -->` and `<!-- end -->` of the page; NAME is the file's.

    Raises:
        ValueError: the page has no such marks.
    """
    text = page.read_text()
    for path in results:
        mark = f"<!-- {path.stem} -->"
        before, found, rest = text.partition(mark)
        _, end, after = rest.partition("<!-- end -->")
        if not (found and end):
            raise ValueError(f"{page} has no place for {path.name}: it needs the lines {mark} and <!-- end -->")
        text = f"{before}{mark}\n{table(json.loads(path.read_text()))}\n{end}{after}"
    page.write_text(text)


def summary(tallies: list[dict[str, Any]]) -> str:
    """Some lines for the terminal."""
    lines = [
        f"{row['name']:42} {row['held']:>7} of {row['tries']:<7} held  {row['seconds']:7.1f} s  {row['cpu_s']:7.1f} CPU s  "
        f"{row['peak_mib']:5} MiB"
        for row in tallies
        if row["tries"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    render([Path(name) for name in sys.argv[1:]])
