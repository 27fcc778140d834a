"""conv2d_mma with operands loaded by TMA against cp.async: each is tuned alone, then both winners race.

    python benchmarks/mma_loads.py --time 80 --out benchmarks/results/mma_loads_h200.json
    python benchmarks/mma_loads.py --show benchmarks/results/mma_loads_h200.json

The shapes are those of conv2d_fp16.py; cards without wgmma run them by conv2d_mma. Needs a GPU with TMA (compute capability
9.0 and later). The race verifies both kernels and times them in turns, cold and in a graph. Half of the time goes to each
search; `--db` keeps them, so a later run continues.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import common
from convolutions import SHAPES, square

import schedsearch
from schedsearch.measure import Builder, Runner
from schedsearch.measurement import Measurement, Verdict
from schedsearch.processes.builder import Candidate
from schedsearch.session.race import Entrant, judged
from schedsearch.task import Task
from schedsearch.template import load_template

TEMPLATE = "conv2d_mma"
SIDES = ("copies", "tma")  # values of the knob `loads`


def tuned(workloads: list[schedsearch.Workload], options: argparse.Namespace) -> list[dict[str, Any]]:
    """For each workload, by side: the fastest configuration, or nothing if none was found."""
    found: list[dict[str, Any]] = [{} for _ in workloads]
    for side in SIDES:
        summary = schedsearch.tune(
            [Task(workload, restrict={"loads": [side]}) for workload in workloads],
            f"{options.db}_{side}.db",
            target="cuda",
            trials=options.trials,
            time_s=options.time / len(SIDES),
            templates=[TEMPLATE],
        )
        for row, task in zip(found, summary.tasks):
            if task.best_config is not None:
                row[side] = {"config": dict(task.best_config), "trials": task.trials}
    return found


def raced(runner: Runner, workload: schedsearch.Workload, row: dict[str, Any], built: list[Any]) -> dict[str, Any]:
    """The row with the times of both winners in one race, or with the reason why there are none."""
    row = {"workload": workload.label, **row}
    if failed := [each.message for each in built if isinstance(each, Measurement)]:
        return {**row, "problem": failed[0]}
    results = runner.race(workload, built)
    if failed := [each.message for each in results if not each.ok]:
        return {**row, "problem": failed[0]}
    entrants = [Entrant(side, schedsearch.Config(), measured) for side, measured in zip(SIDES, results)]
    for side, measured in zip(SIDES, results):
        row[f"{side}_ns"] = measured.time_ns
    return {**row, "differ": Verdict.TIED not in judged(entrants)}


def shown(result: dict[str, Any]) -> None:
    timed = [row for row in result["rows"] if "tma_ns" in row]
    lines = [
        [row["workload"].removeprefix("conv2d "), f"{row['copies_ns'] / 1e3:.2f}", f"{row['tma_ns'] / 1e3:.2f}",
         f"{row['copies_ns'] / row['tma_ns']:.2f}", "" if row["differ"] else "tied"]
        for row in timed
    ]  # fmt: skip
    print(common.table(["layer", "cp.async, us", "TMA, us", "ratio", ""], lines))
    for row in result["rows"]:
        if "problem" in row:
            print(f"{row['workload']}: {row['problem'][:300]}")
    if timed:
        mean = common.geometric_mean([row["copies_ns"] / row["tma_ns"] for row in timed])
        print(f"{mean:.3f} in the geometric mean over {len(timed)} layers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", type=float, default=600.0, help="seconds of tuning, half of them for each side")
    parser.add_argument("--trials", type=int, default=64, help="of each layer and side at most")
    parser.add_argument("--db", default="mma_loads", help="databases are named after it")
    parser.add_argument("--out", metavar="FILE")
    parser.add_argument("--show", metavar="FILE", type=Path, help="only print the table of such a file")
    options = parser.parse_args()
    if options.show:
        shown(json.loads(options.show.read_text()))
        return
    workloads, target = [square(*shape) for shape in SHAPES], schedsearch.detect("cuda")
    began = time.monotonic()
    found = tuned(workloads, options)
    result: dict[str, Any] = {**common.facts(), "tuning_s": time.monotonic() - began, "rows": []}
    both = [(workload, row) for workload, row in zip(workloads, found) if len(row) == len(SIDES)]
    template = load_template(TEMPLATE)
    with Builder(target) as builder, Runner(target) as runner:
        tokens = [
            [builder.submit(Candidate(workload, template, schedsearch.Config(row[side]["config"]))) for side in SIDES]
            for workload, row in both
        ]
        built = dict(builder.drain())
        for (workload, row), pair in zip(both, tokens):
            result["rows"].append(raced(runner, workload, row, [built[token] for token in pair]))
            common.write(options.out, result)
    shown(result)


if __name__ == "__main__":
    main()
