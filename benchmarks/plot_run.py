"""Draws a tuning run: every trial of one task, and best-so-far over trials of all tasks.

    python benchmarks/plot_run.py records.db --out run.svg                       the last run of a database
    python benchmarks/plot_run.py records.db --task 2 --data run.json            also keep the data of the picture
    python benchmarks/plot_run.py benchmarks/results/tuning_run_h200.json --out docs/images/tuning-run.svg

It writes SVG itself and needs no plotting library. Times are those of the search, without repetitions in the final race.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

Point = tuple[float, float]

WIDTH, HEIGHT = 940, 430
TOP, BOTTOM = 84, 372
LEFT_PANEL, RIGHT_PANEL = (64, 486), (624, 916)  # x of the frames
INK, MUTED, GRID = "#1f2933", "#65727f", "#e4e8ec"
LINE, DEFAULT_LINE = "#b42318", "#65727f"
TEMPLATE_COLOURS = ("#2f6fb3", "#e0913a", "#3d9a63", "#8457a8")


def read(path: str, run: str | None) -> dict[str, Any]:
    """The trials of one run, from a record database or from a file that `--data` wrote."""
    if path.endswith(".json"):
        return json.loads(Path(path).read_text())  # type: ignore[no-any-return]
    from schedsearch.records import Store

    with Store.open(path, create=False, readonly=True) as store:
        finished = {info["id"]: info for info in store.runs() if info["summary"]}
        if not finished or run not in (None, *finished):
            raise SystemExit(f"{path} has no finished run {run or ''}; it has: {', '.join(finished) or 'none'}")
        chosen = finished[run or list(finished)[-1]]
        records = [record for record in store.history() if record.run == chosen["id"] and not record.final_race]
    tasks = []
    for summary in chosen["summary"]["tasks"]:
        trials = [
            [record.template, str(record.measurement.outcome), _rounded(record.measurement.time_ns)]
            for record in sorted(records, key=lambda record: record.finished_at)
            if record.workload.id == summary["workload_id"] and record.measurement.outcome != "rejected"
        ]
        tasks.append({"label": summary["label"], "default_ns": _rounded(summary["default_ns"]), "trials": trials})
    return {
        "run": chosen["id"],
        "target": chosen["summary"]["target"],
        "options": chosen["info"]["options"],
        "wall_s": chosen["summary"]["wall_s"],
        "columns": ["template", "outcome", "time_ns"],
        "tasks": [task for task in tasks if task["trials"]],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def best_so_far(trials: Iterable[Sequence[Any]]) -> list[float]:
    """The best time in ns after each trial; infinity until one is ok."""
    return list(accumulate((trial[2] or math.inf for trial in trials), min))


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic scale from values to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        scale = math.log if self.log else float
        share = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return round(self.start + share * (self.end - self.start), 1)


class Svg:
    def __init__(self, width: int = WIDTH, height: int = HEIGHT) -> None:
        self.width, self.height = width, height
        self.parts: list[str] = []

    def add(self, tag: str, text: str = "", /, **attributes: object) -> None:
        fields = "".join(f' {name.replace("_", "-")}="{escape(str(value))}"' for name, value in attributes.items())
        self.parts.append(f"<{tag}{fields}>{escape(text)}</{tag}>" if text else f"<{tag}{fields}/>")

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", size: int = 12, fill: str = INK, weight: int = 400
    ) -> None:
        self.add("text", text, x=x, y=y, text_anchor=anchor, font_size=size, font_weight=weight, fill=fill)

    def path(self, points: Sequence[Point], stroke: str, width: float, **more: object) -> None:
        data = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        self.add("path", d=data, fill="none", stroke=stroke, stroke_width=width, stroke_linejoin="round", **more)

    def render(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" '
            'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">'
        )
        return "\n".join([head, *self.parts, "</svg>"]) + "\n"


def steps(values: Sequence[float], x: Axis, y: Axis) -> list[Point]:
    """A staircase: the value of trial i holds from i to i + 1. Starts at the first finite one."""
    points: list[Point] = []
    for i, value in enumerate(values, 1):
        if math.isfinite(value):
            height = y(min(value, y.high))
            points += [(x(i), points[-1][1] if points else height), (x(i), height)]
    return points


def ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 times powers of ten between the ends."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [v for p in powers for m in (1, 2, 5) if low <= (v := m * 10.0**p) <= high]


def step(most: float, marks: int) -> float:
    """The smallest of 1, 2, 5 times a power of ten that gives at most this many marks up to `most`."""
    return next(v for p in range(-3, 9) for m in (1, 2, 5) if most / (v := m * 10.0**p) <= marks)


def frame(svg: Svg, x: Axis, y: Axis, y_ticks: Sequence[float], title: str, subtitle: str, unit: str) -> None:
    svg.text(x.start, TOP - 38, title, size=14, weight=600)
    svg.text(x.start, TOP - 20, subtitle, fill=MUTED)
    for value in y_ticks:
        svg.path([(x.start, y(value)), (x.end, y(value))], GRID, 1)
        svg.text(x.start - 8, y(value) + 4, f"{value:g}{unit}", anchor="end", fill=MUTED)
    every = max(round(step(x.high, 7)), 1)
    for value in range(0, int(x.high) + 1, every):
        svg.text(x(value), BOTTOM + 18, str(value), anchor="middle", fill=MUTED)
    svg.path([(x.start, BOTTOM), (x.end, BOTTOM)], MUTED, 1)
    svg.text((x.start + x.end) / 2, BOTTOM + 38, "trials", anchor="middle", fill=MUTED)


def every_trial(svg: Svg, task: dict[str, Any]) -> None:
    """Left: one dot per trial, coloured by template, and the best so far; microseconds on a logarithmic scale."""
    trials = task["trials"]
    times = [trial[2] / 1e3 for trial in trials if trial[2]]
    x = Axis(0, len(trials) + 1, *LEFT_PANEL)
    y = Axis(min(times) * 0.78, max(times) * 1.15, BOTTOM, TOP, log=True)
    frame(svg, x, y, ticks(y.low, y.high), task["label"], "microseconds", "")
    names = list(dict.fromkeys(trial[0] for trial in trials))
    for i, (template, _, time_ns) in enumerate(trials, 1):
        colour = TEMPLATE_COLOURS[names.index(template) % len(TEMPLATE_COLOURS)]
        if time_ns:
            svg.add("circle", cx=x(i), cy=y(time_ns / 1e3), r=3.2, fill=colour, fill_opacity=0.75)
        else:  # a failure: a cross at the top
            svg.text(x(i), TOP + 4, "×", anchor="middle", fill=colour)
    best = min(times)
    if task["default_ns"]:
        default = task["default_ns"] / 1e3
        svg.path([(x.start, y(default)), (x.end, y(default))], DEFAULT_LINE, 1.5, stroke_dasharray="6 4")
        svg.text(x.end + 8, min(y(default) + 4, y(best) - 10), f"default {default:.1f}", fill=MUTED)
    line = steps([value / 1e3 for value in best_so_far(trials)], x, y)
    svg.path([*line, (x.end, line[-1][1])], LINE, 2.4)
    svg.text(x.end + 8, y(best) + 4, f"best {best:.1f}", fill=LINE, weight=600)
    for i, name in enumerate(names):
        at = x.end - 116 * (len(names) - i) + 14
        svg.add("circle", cx=at, cy=TOP - 24, r=4, fill=TEMPLATE_COLOURS[i % len(TEMPLATE_COLOURS)])
        svg.text(at + 9, TOP - 20, name)


def best_of_all(svg: Svg, tasks: Sequence[dict[str, Any]], highlighted: int) -> None:
    """Right: for each task the speed of the best so far, relative to its rule-based default."""
    curves = [[task["default_ns"] / value for value in best_so_far(task["trials"])] for task in tasks if task["default_ns"]]
    most = max(max(curve) for curve in curves)
    x = Axis(0, max(len(curve) for curve in curves) + 1, *RIGHT_PANEL)
    y = Axis(0.4, max(1.2, math.ceil(most * 10 + 0.5) / 10), BOTTOM, TOP)
    every = max(step(y.high - y.low, 6), 0.1)
    marks = [i * every for i in range(math.ceil(y.low / every - 1e-9), int(y.high / every + 1e-9) + 1)]
    title = f"All {len(tasks)} tasks of the run" if len(tasks) > 1 else "The run"
    frame(svg, x, y, marks, title, "best so far, relative to the default", "x")
    for number, curve in sorted(enumerate(curves), key=lambda item: item[0] == highlighted):
        drawn = [max(value, y.low) if value else math.inf for value in curve]
        line = steps(drawn, x, y)
        own = number == highlighted
        svg.path(line, LINE if own else INK, 2.4 if own else 1.1, stroke_opacity=1 if own else 0.4)
    svg.path([(x.start, y(1)), (x.end, y(1))], DEFAULT_LINE, 1.5, stroke_dasharray="6 4")
    svg.text(x.end, y(1) + 16, "rule-based default", anchor="end", fill=MUTED)


def draw(data: dict[str, Any], task: int) -> str:
    """The picture; `task` counts from 1."""
    svg = Svg()
    svg.add("rect", width=WIDTH, height=HEIGHT, rx=8, fill="#ffffff")
    trials = sum(len(task["trials"]) for task in data["tasks"])
    caption = (
        f"{trials} trials in {data['wall_s']:.0f} s on {data['target'].rpartition(':')[2]}, tuner {data['options']['tuner']}"
    )
    svg.text(LEFT_PANEL[0], 24, caption, size=12, fill=MUTED)
    every_trial(svg, data["tasks"][task - 1])
    best_of_all(svg, data["tasks"], task - 1)
    return svg.render()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a record database, or a JSON file written by --data")
    parser.add_argument("--run", help="id of the run in the database; the last finished one by default")
    parser.add_argument("--task", type=int, default=1, help="the task whose trials are shown, counted from 1")
    parser.add_argument("--data", help="JSON file to write with the data of the picture")
    parser.add_argument("--out", help="SVG file to write")
    options = parser.parse_args()
    data = read(options.source, options.run)
    if not 1 <= options.task <= len(data["tasks"]):
        parser.error(f"--task must be 1 to {len(data['tasks'])}, got {options.task}")
    if options.data:
        tasks = [json.dumps(task, separators=(",", ":")) for task in data.pop("tasks")]
        head = json.dumps({**data, "tasks": []}, indent=1)
        Path(options.data).write_text(head.replace('"tasks": []', '"tasks": [\n  ' + ",\n  ".join(tasks) + "\n ]") + "\n")
        data = json.loads(Path(options.data).read_text())
    if options.out:
        Path(options.out).write_text(draw(data, options.task), encoding="utf-8")


if __name__ == "__main__":
    main()
