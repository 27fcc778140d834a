"""Do two fresh runs find the same? Tunes the same layers with different seeds, then races the winners against each other.

    python benchmarks/reproducibility.py                                          the 13 shapes, 60 s each, seeds 0 and 1
    python benchmarks/reproducibility.py --shapes 0,1,4,6,12 --time 12 --out FILE.json
    python benchmarks/reproducibility.py --workloads benchmarks/tuned/first_1.yaml --first 8 --trials 24 --keep FOLDER
    python benchmarks/reproducibility.py --target cpu --small --time 5            without a GPU

Each seed has a database of its own and starts without records. The time and the trials are those of a layer; a run shares
them over its layers. Times are taken as networks ask for them on the device. With --keep the databases 0.db and 1.db, named
by the seeds, stay in a folder; `records ship` can go on with one. Afterwards the winners of both runs and the default meet
in one race, several times (`--rounds`). The table has

- whether both named the same configuration, and how many others were tied with the winner in each run's race;
- the slower winner's time over the faster one's, by the median over the rounds;
- the worse winner's time over the default's, in bursts and, where kernels are long, under load: above 1 it should not have
  won.

The last lines count the layers with the same winner, within 2 % of each other, and above the default by more than 0.5 %.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
from convolutions import SHAPES, square

import schedsearch
from schedsearch.config import Config
from schedsearch.executable.build_options import network_mode
from schedsearch.measure import Builder, Runner
from schedsearch.measurement import MODES, Measurement
from schedsearch.processes.builder import Built, Candidate
from schedsearch.session.race import NOISE
from schedsearch.session.summary import TaskSummary
from schedsearch.target import Target
from schedsearch.template import load_template
from schedsearch.workload_file import load

CLOSE = 1.02
SMALL = [(1, 16, 16, 16, 16, 3, 1, 1), (1, 14, 14, 32, 32, 3, 1, 1)]


@dataclass(frozen=True)
class Winner:
    template: str
    config: Config
    tied: int


def winner_of(task: TaskSummary) -> Winner:
    assert task.race is not None
    return Winner(task.race.best.template, task.race.best.config, len(task.race.tied))


def built(builder: Builder, entrants: Sequence[tuple[schedsearch.Workload, Winner]]) -> list[Built]:
    """The kernels, compiled by all processes at once."""
    tokens = [builder.submit(Candidate(workload, load_template(each.template), each.config)) for workload, each in entrants]
    results = dict(builder.drain())
    for token, (_, winner) in zip(tokens, entrants):
        if isinstance(results[token], Measurement):
            raise SystemExit(f"{winner} does not build any more: {results[token].message}")
    return [results[token] for token in tokens]


def default_of(workload: schedsearch.Workload, target: Target, task: TaskSummary) -> Winner:
    """What the task gets without tuning."""
    template = load_template(task.arms[0].template)
    return Winner(template.name, template.default(workload, target, template.space(workload, target)), 0)


def compared(
    runner: Runner, workload: schedsearch.Workload, winners: Sequence[Winner], kernels: Sequence[Built], rounds: int
) -> dict[str, Any]:
    """A row of the table. `kernels` are those of the two winners and the default."""
    races = [runner.race(workload, list(kernels)) for _ in range(rounds)]
    failed = [each.message for race in races for each in race if not each.ok]
    if failed:
        raise SystemExit(f"{workload.label}: {failed[0]}")

    def time_ns(number: int) -> float:
        return statistics.median(race[number].time_ns for race in races)

    def under_load_ns(number: int) -> float | None:
        times = [race[number].sustained_ns for race in races]
        return None if None in times else statistics.median(times)

    times, loads = [time_ns(number) for number in range(3)], [under_load_ns(number) for number in range(3)]
    return {
        "layer": workload.label,
        "same": (winners[0].template, winners[0].config) == (winners[1].template, winners[1].config),
        "tied": [each.tied for each in winners],
        "winners": [{"template": each.template, "config": dict(each.config)} for each in winners],
        "times_ns": times,
        "under_load_ns": loads,
        "ratio": max(times[:2]) / min(times[:2]),
        "over_default": max(times[:2]) / times[2],
        "over_default_under_load": None if None in loads else max(loads[:2]) / loads[2],
    }


def report(rows: Sequence[dict[str, Any]]) -> str:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.3f}"

    header = ["layer", "same", "tied", "slower / faster", "worse / default", "under load"]
    lines = [
        [
            row["layer"], "yes" if row["same"] else "no", " ".join(map(str, row["tied"])), number(row["ratio"]),
            number(row["over_default"]), number(row["over_default_under_load"]),
        ]
        for row in rows
    ]  # fmt: skip
    return "\n".join([common.table(header, lines), *counts(rows)])


def counts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """In how many layers the winners are the same, close, or worse than the default, in words."""
    same, close = sum(row["same"] for row in rows), sum(row["same"] or row["ratio"] <= CLOSE for row in rows)
    above = sum(max(row["over_default"], row["over_default_under_load"] or 0.0) > 1 + NOISE for row in rows)
    return [
        f"the same configuration for {same} of {len(rows)}",
        f"the same or within {CLOSE - 1:.0%} for {close} of {len(rows)}, at worst {max(row['ratio'] for row in rows):.3f}",
        f"slower than the default by more than {NOISE:.1%}: {above} of {len(rows)}",
    ]


def chosen(options: argparse.Namespace, target: Target) -> list[schedsearch.Workload]:
    if options.workloads:
        return [task.workload for task in load(options.workloads).resolve(target).tasks if task.of_range is None]
    numbers = range(len(SHAPES)) if options.shapes is None else [int(number) for number in options.shapes.split(",")]
    workloads = [square(*shape) for shape in (SMALL if options.small else [SHAPES[number] for number in numbers])]
    return [workload.replace(dtype="float32") for workload in workloads] if target.kind == "cpu" else workloads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", help="numbers of the 13 shapes, from 0; default: all")
    parser.add_argument("--small", action="store_true", help="two small layers instead")
    parser.add_argument("--workloads", help="a workload file instead")
    parser.add_argument("--first", type=int, help="only so many layers, the first ones")
    parser.add_argument("--time", type=float, default=60.0, help="seconds of tuning a layer and seed")
    parser.add_argument("--trials", type=int, help="of a layer and seed, in place of the time")
    parser.add_argument("--mode", choices=MODES, help="default: as networks ask for")
    parser.add_argument("--keep", help="folder for the databases")
    parser.add_argument("--seeds", default="0,1", help="two seeds")
    parser.add_argument("--rounds", type=int, default=3, help="races of the winners")
    parser.add_argument("--target", default="auto")
    parser.add_argument("--out", help="also write the data here")
    options = parser.parse_args()
    first, second = (int(seed) for seed in options.seeds.split(","))
    target = schedsearch.detect(options.target)
    mode = options.mode or network_mode(target)
    workloads = chosen(options, target)[: options.first]
    runs = []
    with contextlib.ExitStack() as stack:
        folder = Path(options.keep or stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        for seed in (first, second):
            budget = {"time_s": options.time * len(workloads)} if options.trials is None else {"trials": options.trials}
            db = folder / f"{seed}.db"
            runs.append(schedsearch.tune(workloads, db, target=target, seed=seed, resume=False, mode=mode, **budget))
    pairs = list(zip(*(run.tasks for run in runs)))
    raced = [tasks for tasks in pairs if all(task.race is not None for task in tasks)]
    winners = [[winner_of(task) for task in tasks] for tasks in raced]
    entrants = [
        (tasks[0].workload, each)
        for tasks, two in zip(raced, winners)
        for each in (*two, default_of(tasks[0].workload, target, tasks[0]))
    ]
    with Builder(target) as builder:
        kernels = built(builder, entrants)
    with Runner(target, mode=mode) as runner:
        rows = [
            compared(runner, tasks[0].workload, two, kernels[3 * number : 3 * number + 3], options.rounds)
            for number, (tasks, two) in enumerate(zip(raced, winners))
        ]
    if len(raced) < len(pairs):
        print(f"{len(pairs) - len(raced)} layers are left out, no final race was held: give them more time")
    if not rows:
        raise SystemExit(1)
    print(report(rows))
    budget = {"time_s_a_layer": options.time} if options.trials is None else {"trials_a_layer": options.trials}
    common.write(options.out, {**budget, "mode": mode, "seeds": [first, second], "rows": rows})


if __name__ == "__main__":
    main()
