"""Draws the plan of one block of Inception-v3: kernels, the layouts between them, and conversions.

    python benchmarks/draw_plan.py --out docs/images/layout-plan.svg

The times are invented, as those of layout_plan.py.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from layout_graphs import LAYOUTS, Graph
from layout_plan import made_up
from plot_run import INK, MUTED, Svg

from schedsearch.network.costs import Costs
from schedsearch.network.graph import Network, Node, Plan
from schedsearch.network.layouts import canonical, uses
from schedsearch.network.plan import baselines, best_plan

COLOURS = {"NCHW": "#8457a8", "NHWC": "#2f6fb3", "NCHW4c": "#3a9d7a", "NCHW8c": "#b8860b", "NCHW16c": "#c8553d"}
SEED, SPREAD = 3, 1.0  # for these a conversion pays off
COLUMN, ROW, WIDTH, HEIGHT, TOP, LEFT = 118, 62, 96, 36, 92, 16


@dataclass
class Box:
    """A kernel, or the input or output.

    Attributes:
        reads: boxes before it, and the layout of the array between.
    """

    title: str
    time: str
    reads: list[tuple[str, str]] = field(default_factory=list)
    is_conversion: bool = False
    column: int = 0
    row: float = 0.0


def block() -> Network:
    """The first block of Inception-v3, and a convolution behind it."""
    g = Graph((1, 192, 35, 35), LAYOUTS[:5])
    x = g.input
    fives = g.conv(g.conv(x, 48), 64, 5)
    threes = g.conv(g.conv(g.conv(x, 64), 96, 3), 96, 3)
    return g.network(g.conv(g.concat(g.conv(x, 64), fives, threes, g.conv(g.pool(x), 32)), 64))


def boxes(network: Network, plan: Plan, costs: Costs) -> dict[str, Box]:
    """Every box by name, in an order in which they can run."""
    (input_name,), (output_name,) = network.inputs, network.outputs
    found = {"input": Box("input", "")}
    there = {(input_name, network.values[input_name].axes): "input"}
    made = {input_name: network.values[input_name].axes}

    def source(name: str, letters: str) -> tuple[str, str]:
        layout = canonical(network.values[name], letters)
        if (name, layout) not in there:
            step = next(each for each in plan.conversions if each.value == name and each.y == layout)
            key = f"{name} {layout}"
            found[key] = Box("convert", _us(costs, step.workload), [(there[name, made[name]], made[name])], True)
            there[name, layout] = key
        return there[name, layout], layout

    for node in network.nodes:
        assert isinstance(node, Node)
        workload = plan.implementations[node.name]
        use = uses(network, node)[node.implementations.index(workload)]
        reads = [source(name, letters) for name, letters in use.reads]
        ((name, letters),) = use.writes
        made[name] = canonical(network.values[name], letters)
        there[name, made[name]] = node.name
        title = f"{workload.op.removesuffix('2d')} {workload.r}x{workload.s}" if workload.op != "concat" else "concat"
        found[node.name] = Box(title, _us(costs, workload), list(dict.fromkeys(reads)))
    found["output"] = Box("output", "", [source(output_name, network.values[output_name].axes)])
    return found


def _us(costs: Costs, workload: object) -> str:
    return f"{costs(workload).time_ns / 1e3:.1f} us"  # type: ignore[arg-type]


def place(found: dict[str, Box]) -> int:
    """Columns by the longest way from the input, rows by those of the boxes before; the number of rows."""
    for box in found.values():
        box.column = max((found[name].column + 1 for name, _ in box.reads), default=0)
    readers = {name: [each for each in found.values() if name in dict(each.reads)] for name in found}
    for name, box in reversed(found.items()):  # a kernel with one reader stands right before it
        if box.reads and readers[name]:
            box.column = min(each.column for each in readers[name]) - 1
    columns: dict[int, list[Box]] = {}
    for box in found.values():
        columns.setdefault(box.column, []).append(box)
    most = max(map(len, columns.values()))
    for column in sorted(columns):
        members = columns[column]
        for box in members:
            box.row = sum(found[name].row for name, _ in box.reads) / len(box.reads) if box.reads else (most - 1) / 2
        members.sort(key=lambda box: box.row)
        for number, box in enumerate(members):
            box.row = number + (most - len(members)) / 2
    return most


def draw() -> str:
    network, costs = block(), made_up(SEED, SPREAD)
    plan = best_plan(network, costs)
    found = boxes(network, plan, costs)
    rows = place(found)
    columns = 1 + max(box.column for box in found.values())
    svg = Svg(2 * LEFT + (columns - 1) * COLUMN + WIDTH, TOP + rows * ROW + 6)
    svg.text(LEFT, 24, "A block of Inception-v3: the layout of every array", size=14, weight=600)
    others = "; ".join(f"{name} {each.predicted_ns / 1e3:.1f} us" for name, each in baselines(network, costs).items())
    svg.text(LEFT, 42, f"the plan {plan.predicted_ns / 1e3:.1f} us; {others}. Invented times.", fill=MUTED)
    used = {layout for box in found.values() for _, layout in box.reads}
    for number, layout in enumerate(each for each in COLOURS if each in used):
        x = LEFT + number * 96
        svg.path([(x, 64), (x + 20, 64)], COLOURS[layout], 3)
        svg.text(x + 26, 68, layout)
    for box in found.values():
        for name, layout in box.reads:
            before = found[name]
            start = _corner(before)[0] + WIDTH, _corner(before)[1] + HEIGHT / 2
            end = _corner(box)[0], _corner(box)[1] + HEIGHT / 2
            turn = end[0] - (COLUMN - WIDTH) / 2
            svg.path([start, (start[0] + 4, start[1]), (turn, end[1]), end], COLOURS[layout], 2.5)
    for box in found.values():
        x, y = _corner(box)
        fill = "#fff4e0" if box.is_conversion else "#ffffff"
        svg.add(
            "rect", x=x, y=y, width=WIDTH, height=HEIGHT, rx=4, fill=fill, stroke="#e0913a" if box.is_conversion else MUTED
        )
        svg.text(x + WIDTH / 2, y + (16 if box.time else 22), box.title, anchor="middle", fill=INK, weight=600)
        svg.text(x + WIDTH / 2, y + 30, box.time, anchor="middle", size=11, fill=MUTED)
    return svg.render()


def _corner(box: Box) -> tuple[float, float]:
    return LEFT + box.column * COLUMN, TOP + box.row * ROW


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="SVG file")
    Path(parser.parse_args().out).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
