"""Draws the order of conv2d_wgmma's steps: two kinds of grids, and a reduction that a cluster shares.

    python benchmarks/draw_pipeline.py --out docs/images/conv2d-pipeline.svg

The durations are invented. The order is that of the kernel: a buffer is loaded once it is free, one transfer after the
other. It is multiplied once it has arrived and the previous step is done. After that it is free again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plot_run import GRID, INK, MUTED, Svg

TRANSFER, LATENCY, MULTIPLY, STORE, START, EXCHANGE = 1.0, 3.0, 1.3, 4.5, 1.5, 1.8
STAGES, STEPS = 4, 8  # buffers of the ring, steps of a tile
COLOURS = {"load": "#bcd3ec", "multiply": "#2f6fb3", "add up": "#8457a8", "epilogue, store": "#e0913a"}
WIDTH, LEFT, LANE, UNIT = 940, 150, 19, 19.5
TITLE, GAP = 46, 16  # height of a panel's title, distance between panels


@dataclass(frozen=True)
class Bar:
    """The work of a lane from `start` to `end`, in units of time; `label` is the number of the step."""

    lane: str
    kind: str
    start: float
    end: float
    label: str = ""


def ring(tiles: int, persistent: bool) -> list[Bar]:
    """One multiprocessor computes tiles one after the other, with one persistent block or one block per tile."""
    bars: list[Bar] = []
    free = [START] * STAGES
    link = multiplied = START
    for tile in range(tiles):
        for step in range(STEPS):
            buffer = (tile * STEPS + step) % STAGES
            start = max(link, free[buffer])
            link = start + TRANSFER
            landed = start + LATENCY
            begin = max(landed, multiplied)
            multiplied = free[buffer] = begin + MULTIPLY
            name = f"buffer {buffer}"
            bars += [Bar(name, "load", start, landed, str(step)), Bar(name, "multiply", begin, multiplied, str(step))]
        stored = multiplied + STORE
        bars.append(Bar("warpgroups", "epilogue, store", multiplied, stored))
        multiplied = stored
        if not persistent:  # the next block starts when this one ends
            link = multiplied = stored + START
            free = [link] * STAGES
    return bars


def cluster(ranks: int) -> list[Bar]:
    """The blocks of a cluster share the steps of one tile, add up, and store a part each. Shows only the first's loads."""
    bars: list[Bar] = []
    share = STEPS // ranks
    for rank in range(ranks):
        name = f"block {rank}"
        end = START + LATENCY
        bars.append(Bar(name, "load", START, end, str(rank * share)))
        for step in range(share):
            bars.append(Bar(name, "multiply", end, end + MULTIPLY, str(rank * share + step)))
            end += MULTIPLY
        if ranks > 1:
            bars.append(Bar(name, "add up", end, end + EXCHANGE))
            end += EXCHANGE
        bars.append(Bar(name, "epilogue, store", end, end + STORE / ranks))
    return bars


def panel(svg: Svg, top: float, title: str, bars: Sequence[Bar]) -> float:
    """Draws lanes below each other in the order in which they come; returns the y below them."""
    svg.text(20, top + 16, title, size=14, weight=600)
    lanes = list(dict.fromkeys(bar.lane for bar in sorted(bars, key=lambda bar: (bar.lane == "warpgroups", bar.lane))))
    first = top + TITLE - GAP
    for number, lane in enumerate(lanes):
        y = first + number * LANE
        svg.text(LEFT - 8, y + 13, lane, anchor="end", fill=MUTED)
        svg.path([(LEFT, y + LANE - 1), (WIDTH - 16, y + LANE - 1)], GRID, 1)
    for bar in bars:
        x, y = LEFT + bar.start * UNIT, first + lanes.index(bar.lane) * LANE
        width = (bar.end - bar.start) * UNIT
        svg.add("rect", x=round(x, 1), y=y + 1, width=round(width - 1, 1), height=LANE - 4, fill=COLOURS[bar.kind])
        if bar.label:
            svg.text(x + width / 2, y + 13, bar.label, "middle", 11, INK if bar.kind == "load" else "#ffffff")
    return first + len(lanes) * LANE + GAP


PANELS = (
    ("grid = split: one block per tile. Nothing is loaded while a tile is stored", ring(2, persistent=False)),
    ("grid = persistent: the next tile is loaded while this one is stored", ring(2, persistent=True)),
    ("split_k = 1: one block multiplies all steps of a tile", cluster(1)),
    ("split_k = 4: a cluster of four blocks shares them, adds up through shared memory, stores a quarter each", cluster(4)),
)


def draw() -> str:
    lanes = sum(len({bar.lane for bar in bars}) for _, bars in PANELS)
    svg = Svg(WIDTH, round(40 + lanes * LANE + len(PANELS) * TITLE))
    x = LEFT
    for kind, colour in COLOURS.items():
        svg.add("rect", x=x, y=12, width=12, height=12, fill=colour)
        svg.text(x + 18, 22, kind)
        x += 40 + 7 * len(kind)
    svg.text(WIDTH - 16, 22, "time, numbers are steps of the reduction", anchor="end", fill=MUTED)
    top = 36.0
    for title, bars in PANELS:
        top = panel(svg, top, title, bars)
    return svg.render()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="SVG file to write")
    Path(parser.parse_args().out).write_text(draw())


if __name__ == "__main__":
    main()
