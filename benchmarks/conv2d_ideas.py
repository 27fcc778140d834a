"""The gain of single knobs of conv2d_wgmma: the fastest configurations without and with each, measured and predicted.

    python benchmarks/conv2d_ideas.py

prints the table of docs/kernels/conv2d.md; `render_tables.py` writes it there. Configurations and times come from
benchmarks/results/conv2d_configurations_h200.json.gz. Each row uses one of its runs, so both sides are from the same day.
"""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from schedsearch.target import PRESETS
from schedsearch.template import load_template
from schedsearch.templates.conv2d.wgmma_sizes import derived_quantities
from schedsearch.workload import Workload

DATA = Path(__file__).parent / "results" / "conv2d_configurations_h200.json.gz"
H200 = PRESETS["h200"]
TEMPLATE = "conv2d_wgmma"
LATER_KNOBS = {"schedule": "together"}  # the meaning of configurations from versions without the knob
POWERS_OF_TWO = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Idea:
    """`uses` says whether a configuration uses it. `layers` are (number of the run in DATA, label in the page's tables)."""

    name: str
    uses: Callable[[Mapping[str, Any]], bool]
    layers: tuple[tuple[int, str], ...]


IDEAS = (
    Idea("blocks of a cluster share a tile's reduction (`split_k`)", lambda c: c["split_k"] > 1,
         ((3, "1x7x7x512 k512 3x3 p1"), (3, "1x14x14x256 k256 3x3 p1"), (3, "1x28x28x512 k512 3x3 p1"))),
    Idea("a cluster shares loads by multicast (`cluster_m`, `cluster_n`)", lambda c: c["cluster_m"] * c["cluster_n"] > 1,
         ((0, "12x100x100x488 k448 5x5 s2 p2"), (3, "6x70x70x136 k648 3x3 s2 p1"), (3, "1x28x28x512 k512 3x3 p1"))),
    Idea("a persistent grid loads the next tile during a store (`persistent`)", lambda c: c["persistent"],
         ((2, "32x28x28x512 k128 1x1"), (0, "14x88x88x528 k984 1x1"), (0, "32x28x28x128 k128 3x3 p1"))),
    Idea("k steps of 16 or 32 channels (`bk`)", lambda c: c["bk"] < 64,
         ((3, "6x70x70x136 k648 3x3 s2 p1"), (3, "14x88x88x528 k984 1x1"))),
    Idea("tiles of 48, 80, 96, 112, 160, 192 or 224 channels (`bn`)", lambda c: c["bn"] not in POWERS_OF_TWO,
         ((0, "12x100x100x488 k448 5x5 s2 p2"), (2, "32x14x14x1024 k2048 1x1 s2"), (2, "32x7x7x512 k2048 1x1"))),
    Idea("tiles of 192 pixels (`warpgroups` of 3)", lambda c: c["warpgroups"] == 3,
         ((3, "32x14x14x256 k256 3x3 p1"), (0, "32x28x28x128 k128 3x3 p1"))),
    Idea("groups in turn, ping-pong (`schedule`)", lambda c: c["schedule"] == "in_turn",
         ((2, "32x28x28x512 k128 1x1"), (2, "32x7x7x512 k2048 1x1"), (3, "32x14x14x256 k256 3x3 p1"))),
    Idea("rows of tiles walked in groups, for L2 (`band`)", lambda c: c["band"] > 1,
         ((0, "12x100x100x488 k448 5x5 s2 p2"), (2, "14x88x88x528 k984 1x1"), (3, "32x7x7x512 k512 3x3 p1"))),
    Idea("two or three blocks on a multiprocessor (`blocks_per_sm`)", lambda c: c["blocks_per_sm"] > 1,
         ((2, "32x56x56x64 k256 1x1"), (2, "32x28x28x512 k128 1x1"))),
)  # fmt: skip


@functools.cache
def runs() -> list[dict[str, list[tuple[Workload, list[str], list[list[Any]]]]]]:
    """For each run: template -> (layer, its knobs, configurations as their values followed by the time in us)."""
    with gzip.open(DATA, "rt", encoding="utf-8") as file:
        sources = json.load(file)["sources"]
    found: list[dict[str, list[tuple[Workload, list[str], list[list[Any]]]]]] = []
    for source in sources:
        found.append({})
        for layer in source["layers"]:
            workload = Workload(layer["workload"]["op"], layer["workload"]["params"])
            for template, data in layer["templates"].items():
                found[-1].setdefault(template, []).append((workload, data["knobs"], data["rows"]))
    return found


def measured(run: int, label: str) -> tuple[Workload, list[dict[str, Any]]]:
    """A layer's configurations in one run, each with its time as `us`."""
    template = load_template(TEMPLATE)
    for workload, knobs, rows in runs()[run][TEMPLATE]:
        if workload.label == f"conv2d {label} f16 NHWC":
            return workload, [dict(template.current(LATER_KNOBS | dict(zip((*knobs, "us"), row)))) for row in rows]
    raise KeyError(f"run {run} has no layer {label!r}")


def predicted_us(
    workload: Workload, configurations: Sequence[Mapping[str, Any]], formulas: Callable[..., Any] = derived_quantities
) -> list[float]:
    q: dict[str, Any] = {name: np.array([each[name] for each in configurations]) for name in configurations[0]}
    for name, formula in formulas(workload, H200).items():
        q[name] = formula(q)
    return [float(cycles) * 1e3 / H200.clock_khz for cycles in q["predicted_cycles"]]


def rows() -> list[tuple[str, str, str, str, str]]:
    """(idea, layer, predicted, measured, configurations), the last three as 'without → with'."""
    found = []
    for idea in IDEAS:
        for run, label in idea.layers:
            workload, configurations = measured(run, label)
            sides = [[each for each in configurations if idea.uses(each) == uses] for uses in (False, True)]
            pairs = (
                [f"{min(predicted_us(workload, side)):.1f}" for side in sides],
                [f"{min(each['us'] for each in side):.1f}" for side in sides],
                [str(len(side)) for side in sides],
            )
            name = idea.name if (run, label) == idea.layers[0] else ""
            found.append((name, label, *(" → ".join(pair) for pair in pairs)))
    return found


if __name__ == "__main__":
    for row in rows():
        print(" | ".join(row))
