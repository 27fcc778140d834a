"""conv2d_mma with operands loaded by TMA against cp.async, on the shapes of conv2d_fp16.py: both winners race.

    python benchmarks/mma_loads.py --trials 64 --out benchmarks/results/mma_loads_h200.json
    python benchmarks/mma_loads.py --copies conv2d_mma_h200.json --limit 30 --out benchmarks/results/mma_loads_h200.json
    python benchmarks/mma_loads.py --show benchmarks/results/mma_loads_h200.json

Cards without wgmma run these layers by conv2d_mma. Needs a GPU with TMA (compute capability 9.0 and later). Both sides are
tuned with the same number of trials. Or the side of cp.async has the configurations of an earlier run of
`conv2d_fp16.py --templates conv2d_mma`, and for the other side a few configurations near them are measured: the same tile,
and two usual ones if they fill half of the card. The race verifies the winners and times them in turns, cold and in a graph.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
from convolutions import SHAPES, square

import schedsearch
from schedsearch import Config, Workload
from schedsearch.measure import Builder, Runner
from schedsearch.measurement import Measurement, Verdict
from schedsearch.processes.builder import Built, Candidate
from schedsearch.session.race import Entrant, judged
from schedsearch.space import ConfigSpace
from schedsearch.task import Task
from schedsearch.template import load_template

TEMPLATE = load_template("conv2d_mma")
SIDES = ("copies", "tma")  # values of the knob `loads`
TILES = (dict(bm=128, bn=64, wm=64, wn=32, slices=1), dict(bm=128, bn=128, wm=64, wn=32, slices=1))
SCHEDULES = ((False, 1), (True, 1), (True, 2))  # persistent, blocks_per_sm
MOST = 5  # configurations of a layer
Side = list[tuple[Config, Built | Measurement]]


def tuned(workloads: list[Workload], side: str, options: argparse.Namespace) -> list[list[Config]]:
    """The fastest configuration of each workload, or none."""
    summary = schedsearch.tune(
        [Task(workload, restrict={"loads": [side]}) for workload in workloads],
        f"{options.db}_{side}.db",
        target="cuda",
        trials=options.trials,
        templates=[TEMPLATE.name],
    )
    return [[task.best_config] if task.best_config else [] for task in summary.tasks]


def near(workload: Workload, space: ConfigSpace, copies: Config, sms: int) -> Iterator[Config]:
    """Configurations with TMA near one without: for each tile and schedule the deepest ring, and one of three stages for
    several blocks on a multiprocessor, in steps of 64 channels."""
    stages = space.values["stages"]
    pixels, channels = workload.output.size // workload.k, workload.k
    usual = [tile for tile in TILES if 2 * -(-pixels // tile["bm"]) * -(-channels // tile["bn"]) >= sms]
    for tile in (dict(copies), *usual):
        for persistent, blocks in SCHEDULES:
            shared = {**copies, **tile, "bk": 64, "persistent": persistent, "blocks_per_sm": blocks, "loads": "tma"}
            legal = [Config({**shared, "stages": count}) for count in stages]
            legal = [config for config in legal if not space.check(config)]
            yield from legal[-1:]
            if not persistent and len(legal) > 2:
                yield legal[1]


def built(builder: Builder, workloads: list[Workload], sides: list[list[Config]]) -> list[Side]:
    """The kernels of the configurations of each workload."""
    tokens = [
        [builder.submit(Candidate(workload, TEMPLATE, config)) for config in configs]
        for workload, configs in zip(workloads, sides)
    ]
    results = dict(builder.drain())
    return [list(zip(configs, (results[token] for token in of_one))) for configs, of_one in zip(sides, tokens)]


def fastest(runner: Runner, workload: Workload, side: Side) -> tuple[Config, Built] | str:
    """The fastest kernel, each measured once; or why there is none."""
    found: list[tuple[float, int]] = []
    problem = "no configuration"
    for number, (_, kernel) in enumerate(side):
        result = kernel if isinstance(kernel, Measurement) else runner.measure(workload, kernel)
        if result.ok and result.time_ns is not None:
            found.append((result.time_ns, number))
        else:
            problem = result.message
    if not found:
        return problem
    config, kernel = side[min(found)[1]]
    assert isinstance(kernel, Built)
    return config, kernel


def raced(runner: Runner, workload: Workload, sides: dict[str, Side]) -> dict[str, Any]:
    """The times of both winners in one race, or the reason why there are none."""
    row: dict[str, Any] = {"workload": workload.label, "configurations": len(sides["tma"])}
    winners = {name: fastest(runner, workload, side) if len(side) > 1 else side[0] for name, side in sides.items()}
    for name, winner in winners.items():
        if isinstance(winner, str) or isinstance(winner[1], Measurement):
            return {**row, "problem": f"{name}: {winner if isinstance(winner, str) else winner[1].message}"}
        row[name] = {"config": dict(winner[0])}
    results = runner.race(workload, [winners[name][1] for name in SIDES])  # type: ignore[misc]
    for name, result in zip(SIDES, results):
        if not result.ok:
            return {**row, "problem": f"{name}: {result.message}"}
        row[name]["ns"] = result.time_ns
    entrants = [Entrant(name, Config(), measured) for name, measured in zip(SIDES, results)]
    return {**row, "differ": Verdict.TIED not in judged(entrants)}


def line(row: dict[str, Any]) -> list[str]:
    if "problem" in row:
        return [row["workload"], "", "", "", row["problem"][:200]]
    times = [row[side]["ns"] for side in SIDES]
    tied = "" if row["differ"] else "tied"
    return [row["workload"], *(f"{each / 1e3:.2f}" for each in times), f"{times[0] / times[1]:.2f}", tied]


def shown(result: dict[str, Any]) -> None:
    print(common.table(["layer", "cp.async, us", "TMA, us", "ratio", ""], [line(row) for row in result["rows"]]))
    ratios = [row["copies"]["ns"] / row["tma"]["ns"] for row in result["rows"] if "problem" not in row]
    if ratios:
        print(f"{common.geometric_mean(ratios):.3f} in the geometric mean over {len(ratios)} layers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=64, help="of each layer and side")
    parser.add_argument("--copies", metavar="FILE", type=Path, help="of conv2d_fp16.py: the side of cp.async, not tuned")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds from the start, after which no race begins")
    parser.add_argument("--db", default="mma_loads", help="databases are named after it")
    parser.add_argument("--out", metavar="FILE")
    parser.add_argument("--show", metavar="FILE", type=Path, help="only print the table of such a file")
    options = parser.parse_args()
    if options.show:
        shown(json.loads(options.show.read_text()))
        return
    began, target = time.monotonic(), schedsearch.detect("cuda")
    workloads = [square(*shape) for shape in SHAPES]
    if options.copies:
        given = {row["workload"]: TEMPLATE.current(row["config"]) for row in json.loads(options.copies.read_text())["rows"]}
        copies = [[given[workload.label]] for workload in workloads]
        spaces = [TEMPLATE.space(workload, target) for workload in workloads]
        found = [near(*one, *config, target.sms) for *one, config in zip(workloads, spaces, copies)]
        tma = [list(dict.fromkeys(configs))[:MOST] for configs in found]
    else:
        copies, tma = (tuned(workloads, side, options) for side in SIDES)
    result: dict[str, Any] = {**common.facts(), "rows": []}
    with Builder(target) as builder, Runner(target) as runner:
        kernels = [built(builder, workloads, side) for side in (copies, tma)]
        for workload, *sides in zip(workloads, *kernels):
            if time.monotonic() - began > options.limit:
                print("the time is over")
                break
            result["rows"].append(raced(runner, workload, dict(zip(SIDES, sides))))
            print(*line(result["rows"][-1]), flush=True)
            common.write(options.out, result)
    shown(result)


if __name__ == "__main__":
    main()
