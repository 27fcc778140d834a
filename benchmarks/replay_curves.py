"""Draws replayed searches: fraction of the optimum over evaluations, one panel per space and one for the geometric mean.

    schedsearch replay *.json.gz --tuner xgb --evaluations 8,11,16,23,32,45,64,91,128,181,256,400 --json > xgb.json
    python benchmarks/replay_peers.py *.json.gz --evaluations 8,11,16,...,400 --out peers.json
    python benchmarks/replay_curves.py xgb.json peers.json --out docs/images/replay.svg

FILE is the output of `schedsearch replay --json`, or of `replay_peers.py --out`, which holds several such reports. All
reports must have the same spaces. A tuner that occurs twice is drawn once, from its first report. The curves have the
evaluations that the replays reported, so ask for many. Bands are the 95 % bootstrap intervals over the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plot_run import GRID, INK, MUTED, Axis, Point, Svg

COLOURS = ("#b42318", "#2f6fb3", "#e0913a", "#3d9a63", "#8457a8", "#65727f")
COLUMNS = 3
PANEL_WIDTH, PANEL_HEIGHT = 300, 230  # with margins
LEFT, RIGHT, ABOVE, BELOW = 42, 14, 34, 30  # margins of a panel
HEAD, LEGEND_LINE = 38, 18  # height of the caption, and of a line of the legend


@dataclass(frozen=True)
class Curve:
    """One tuner on one space: evaluations, and at each the mean fraction with the ends of its interval."""

    tuner: str
    evaluations: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    @classmethod
    def of(cls, tuner: str, mean: Mapping[str, float], low: Mapping[str, float], high: Mapping[str, float]) -> Curve:
        budgets = sorted(mean, key=int)
        return cls(tuner, tuple(map(int, budgets)), *(tuple(side[b] for b in budgets) for side in (mean, low, high)))


def read(paths: Sequence[str]) -> list[dict[str, Any]]:
    """The reports in the files, each tuner once.

    Raises:
        SystemExit: a file holds no report, or the reports are not of the same spaces.
    """
    reports: dict[str, dict[str, Any]] = {}
    for path in paths:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        found = data.get("reports", [data]) if isinstance(data, dict) else []
        for report in found:
            if not {"tuner", "spaces", "geomean", "geomean_low", "geomean_high"} <= set(report):
                raise SystemExit(f"{path} is not the output of `schedsearch replay --json` or `replay_peers.py --out`")
            reports.setdefault(report["tuner"], report)
    chosen = list(reports.values())
    for report in chosen:
        if sorted(map(_title, report["spaces"])) != sorted(map(_title, chosen[0]["spaces"])):
            raise SystemExit(
                f"{report['tuner']} was replayed over other spaces than {chosen[0]['tuner']}; replay both alike"
            )
    return chosen


def panels(reports: Sequence[dict[str, Any]]) -> dict[str, list[Curve]]:
    """Title -> curves, one per report; the geometric mean comes last if there are several spaces."""
    drawn: dict[str, list[Curve]] = {}
    for report in reports:
        for space in report["spaces"]:
            curve = Curve.of(report["tuner"], space["fractions"], space["low"], space["high"])
            drawn.setdefault(_title(space), []).append(curve)
    if len(drawn) > 1:
        drawn["geometric mean"] = [
            Curve.of(report["tuner"], report["geomean"], report["geomean_low"], report["geomean_high"]) for report in reports
        ]
    return drawn


def _title(space: Mapping[str, Any]) -> str:
    stem = Path(space["file"]).name.removesuffix(".gz").removesuffix(".json")
    return f"{stem}: {space['name']}" if stem.endswith(".db") else stem


def draw(reports: Sequence[dict[str, Any]]) -> str:
    drawn = panels(reports)
    columns = min(COLUMNS, len(drawn))
    rows = math.ceil(len(drawn) / columns)
    width = columns * PANEL_WIDTH + 12
    legend = _legend([report["tuner"] for report in reports], width)
    head = HEAD + LEGEND_LINE * (1 + max(line for _, line in legend))
    svg = Svg(width, rows * PANEL_HEIGHT + head + 6)
    svg.add("rect", width=svg.width, height=svg.height, rx=8, fill="#ffffff")
    seeds = " or ".join(str(number) for number in sorted({report["seeds"] for report in reports}))
    svg.text(
        LEFT, 20, f"fraction of the optimum over the number of evaluations; mean of {seeds} runs, 95 % interval", fill=MUTED
    )
    for report, colour, (at, line) in zip(reports, _colours(len(reports)), legend):
        svg.add("rect", x=at, y=32 + line * LEGEND_LINE, width=14, height=4, fill=colour)
        svg.text(at + 19, 39 + line * LEGEND_LINE, report["tuner"])
    every = [curve for curves in drawn.values() for curve in curves]
    first, last = min(c.evaluations[0] for c in every), max(c.evaluations[-1] for c in every)
    lowest = max(0.0, math.floor(10 * min(min(curve.low) for curve in every)) / 10)
    for number, (title, curves) in enumerate(drawn.items()):
        left, top = number % columns * PANEL_WIDTH, number // columns * PANEL_HEIGHT + head
        x = Axis(first, max(last, first + 1), left + LEFT, left + PANEL_WIDTH - RIGHT, log=True)
        y = Axis(min(lowest, 0.9), 1.0, top + PANEL_HEIGHT - BELOW, top + ABOVE)
        _panel(svg, x, y, title, curves)
    return svg.render()


def _legend(names: Sequence[str], width: int) -> list[tuple[int, int]]:
    """The start and the line of each name."""
    places, at, line = [], LEFT, 0
    for name in names:
        space = 34 + round(6.7 * len(name))
        if at > LEFT and at + space > width:
            at, line = LEFT, line + 1
        places.append((at, line))
        at += space
    return places


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def _panel(svg: Svg, x: Axis, y: Axis, title: str, curves: Sequence[Curve]) -> None:
    svg.text(x.start, y.end - 10, title, size=13, weight=600)
    step = 0.1 if y.high - y.low <= 0.55 else 0.2
    marks = [i * step for i in range(math.ceil(y.low / step - 1e-9), int(y.high / step + 1e-9) + 1)]
    for value in marks:
        svg.path([(x.start, y(value)), (x.end, y(value))], GRID, 1)
        svg.text(x.start - 6, y(value) + 4, f"{value:.1f}", anchor="end", size=11, fill=MUTED)
    for value in (v for power in range(5) for m in (1, 2.5, 5) if x.low <= (v := m * 10**power) <= x.high):
        if value == int(value):
            svg.path([(x(value), y.start), (x(value), y.start + 4)], MUTED, 1)
            svg.text(x(value), y.start + 17, f"{value:g}", anchor="middle", size=11, fill=MUTED)
    svg.path([(x.start, y.start), (x.end, y.start)], INK, 1)
    for curve, colour in reversed(list(zip(curves, _colours(len(curves))))):  # the first on top
        upper, lower, line = ([(x(n), y(max(v, y.low))) for n, v in zip(curve.evaluations, side)] for side in _sides(curve))
        svg.add("path", d=_outline([*upper, *reversed(lower)]), fill=colour, fill_opacity=0.14)
        svg.path(line, colour, 2)


def _sides(curve: Curve) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    return curve.high, curve.low, curve.mean


def _outline(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points) + "Z"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--out", required=True, help="SVG file to write")
    options = parser.parse_args()
    Path(options.out).write_text(draw(read(options.files)), encoding="utf-8")


if __name__ == "__main__":
    main()
