"""When the kernels of a network begin and end, with and without an early launch, as data and as a picture.

    python benchmarks/timeline.py --case mobilenet_v2:1:float16 --out benchmarks/results/timeline_h200.json
    python benchmarks/timeline.py --data benchmarks/results/timeline_h200.json --draw docs/images/timeline.svg

The network NAME:BATCH:FORMAT of `onnx_models.py` is built without tuning and loaded in both ways. PyTorch's profiler (CUPTI)
notes the times of each kernel in replays of a CUDA graph; the replay of median length counts. A profiled replay may take
longer than others: each way's time without a profiler stands beside it. Measuring needs PyTorch and a GPU of compute
capability 9.0, drawing does not.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
from plot_run import GRID, INK, MUTED, Svg

REPLAYS = 40
WAYS = {"one after another": False, "early": True}
SHOWN, FIRST = 24, 10  # kernels of the picture, and the first of them
WIDTH, LEFT, TOP, BAR, ROWS, GAP = 960, 20, 64, 16, 2, 62
COLOURS = ("#2f6fb3", "#3a9d7a")  # of kernels in turn


def spans(graph: Any, calls: int) -> list[tuple[float, float]]:
    """(begin, end) of each kernel of a replay, in microseconds from the first one's begin."""
    import torch

    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(REPLAYS):
            graph.replay()
            torch.cuda.synchronize()
    events = [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profile.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.name().startswith("kernel_")
    ]
    events.sort()
    if len(events) % REPLAYS or not events:
        raise SystemExit(f"{len(events)} kernels in {REPLAYS} replays of {calls} calls")
    count = len(events) // REPLAYS
    replays = [events[first : first + count] for first in range(0, len(events), count)]
    replays.sort(key=lambda each: max(end for _, end in each) - each[0][0])
    middle = replays[len(replays) // 2]
    return [((begin - middle[0][0]) / 1e3, (end - middle[0][0]) / 1e3) for begin, end in middle]


def measured(case: str) -> dict[str, Any]:
    from early_launch import built
    from replays import Captured, turns_us

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = built(case, Path(folder), None)[""]
        for way, early in WAYS.items():
            each = Captured(file, early)
            (us,) = turns_us({way: each.graph.replay}).values()
            rows.append({"way": way, "replay_us": us, "spans_us": spans(each.graph, len(each.net.kernels))})
            each.close()
    return {"case": case, "rows": rows}


def draw(data: dict[str, Any]) -> str:
    """The same kernels of both ways on one scale of time."""
    shown = [row["spans_us"][FIRST : FIRST + SHOWN] for row in data["rows"]]
    longest = max(max(end for _, end in some) - some[0][0] for some in shown)
    scale = (WIDTH - 2 * LEFT) / longest
    svg = Svg(WIDTH, TOP + len(shown) * (ROWS * (BAR + 3) + GAP) - 16)
    name, batch, format_ = data["case"].split(":")
    last = FIRST + min(SHOWN, len(shown[0]))
    svg.text(LEFT, 24, f"{name}, batch {batch}, {format_}: kernels {FIRST + 1} to {last}", size=15, weight=600)
    for number, (row, some) in enumerate(zip(data["rows"], shown)):
        top = TOP + number * (ROWS * (BAR + 3) + GAP)
        taken = max(end for _, end in some) - some[0][0]
        svg.text(LEFT, top - 8, f"{row['way']}: {taken:.1f} µs; the whole network {row['replay_us']:.1f} µs", fill=MUTED)
        _bars(svg, some, top, scale)
    return svg.render()


def _bars(svg: Svg, some: Sequence[Sequence[float]], top: float, scale: float) -> None:
    bottom = top + ROWS * (BAR + 3)
    for mark in range(0, int((WIDTH - 2 * LEFT) / scale) + 1, 10):
        x = round(LEFT + mark * scale, 2)
        svg.path([(x, top), (x, bottom)], GRID, 1)
        svg.text(x, bottom + 13, f"{mark} µs", anchor="middle" if mark else "start", size=11, fill=INK)
    for number, (begin, end) in enumerate(some):
        x, width = LEFT + (begin - some[0][0]) * scale, max((end - begin) * scale, 1.0)
        svg.add(
            "rect", x=round(x, 2), y=top + number % ROWS * (BAR + 3), width=round(width, 2), height=BAR, rx=2,
            fill=COLOURS[number % len(COLOURS)], fill_opacity=0.9,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="mobilenet_v2:1:float16", metavar="N:B:F")
    parser.add_argument("--data", type=Path, help="draw what an earlier run has measured")
    parser.add_argument("--draw", type=Path, help="an SVG file to write")
    parser.add_argument("--out")
    options = parser.parse_args()
    data = json.loads(options.data.read_text(encoding="utf-8")) if options.data else measured(options.case)
    if not options.data:
        common.write(options.out, data)
        for row in data["rows"]:
            ends = max(end for _, end in row["spans_us"])
            print(
                f"{row['way']}: {row['replay_us']:.1f} us, {ends:.1f} us under the profiler, {len(row['spans_us'])} kernels"
            )
    if options.draw:
        options.draw.write_text(draw(data), encoding="utf-8")


if __name__ == "__main__":
    main()
