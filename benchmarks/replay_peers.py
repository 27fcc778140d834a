"""Replays a tuner and Kernel Tuner's own strategies over the same recorded spaces, budgets and seeds.

    python benchmarks/replay_peers.py ../shared/replay/*.json.gz --jobs 8 --out replay_peers.json

FILE is any file that `schedsearch replay` takes; the same data twice counts once. Kernel Tuner runs in its simulation mode,
from a cache with the same configurations and times. As in `schedsearch replay`, an evaluation is one unique legal
configuration, and failures count. Each run has its own objects (search space, runner, strategy) and seeds the random
generators again. Kernel Tuner's strategies keep their default options. One run with the greatest budget serves all budgets.

The program prints fractions of the optimum per space and as a geometric mean, with bootstrap intervals over the seeds. For
each strategy it prints by how much ours exceeds it, with an interval that keeps runs of the same seed together. `--out`
keeps every figure; its list `reports` has the objects that `schedsearch replay --json` prints.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from common import table, write

from schedsearch import replay
from schedsearch.processes.process import call_in_children
from schedsearch.replay import RecordedSpace, Run

STRATEGIES = ("genetic_algorithm", "adaptive_tabu_greywolf", "hybrid_vndx", "simulated_annealing", "bayes_opt")
_KERNEL = "recorded"


def write_cache(space: RecordedSpace, path: Path) -> Path:
    """The space as a cache file of Kernel Tuner, with the times only, because every run parses the file."""
    names = [knob.name for knob in space.knobs]
    entries = {}
    for config, time_ns in zip(space.space().configs(space.rows), space.times_ns.tolist()):
        values = {name: config[name] for name in names}
        outcome: dict[str, Any] = {"time": "RuntimeFailedConfig" if np.isnan(time_ns) else time_ns / 1e6}
        durations = {"compile_time": 0, "verification_time": 0, "benchmark_time": 0}
        entries[",".join(str(value) for value in values.values())] = values | outcome | durations
    data = {
        "device_name": "recorded",
        "kernel_name": _KERNEL,
        "problem_size": 1,
        "tune_params_keys": names,
        "tune_params": {knob.name: list(knob.values) for knob in space.knobs},
        "objective": "time",
        "cache": entries,
    }
    path.write_text(json.dumps(data))
    return path


def run_strategy(cache: Path, strategy: Any, seed: int, evaluations: int) -> Run:
    """Searches a cache once with new objects. Returns fractions of its fastest time, see `schedsearch.replay.Run`.

    `strategy` is what `tune_kernel` takes: a name, or an object with a method `tune`.
    """
    from kernel_tuner import tune_kernel

    data = json.loads(cache.read_text())
    legal = frozenset(data["cache"])
    params: dict[str, list[Any]] = data["tune_params"]

    def allowed(values: dict[str, Any]) -> bool:
        return ",".join(str(values[name]) for name in params) in legal

    random.seed(seed)
    np.random.seed(seed)
    started = time.process_time()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        results, _ = tune_kernel(
            _KERNEL,
            f"void {_KERNEL}() {{}}",
            data["problem_size"],
            [],
            params,
            restrictions=[allowed],
            lang="C",
            block_size_names=list(params)[:1],
            strategy=strategy,
            strategy_options={"max_fevals": evaluations},
            cache=str(cache),
            simulation_mode=True,
            quiet=True,
        )
    cpu_s = time.process_time() - started
    first: dict[str, float] = {}  # in order of evaluation, each configuration once
    for result in results:
        failed = "__error__" in result or isinstance(result["time"], str)
        first.setdefault(",".join(str(result[name]) for name in params), np.inf if failed else result["time"])
    if not first or not legal.issuperset(first):
        raise AssertionError(f"{strategy} evaluated {len(first)} configurations, not all of them in the cache {cache}")
    optimum = min(fields["time"] for fields in data["cache"].values() if not isinstance(fields["time"], str))
    best = np.minimum.accumulate(np.array(list(first.values())))[:evaluations]
    fractions = np.full(evaluations, optimum / best[-1])  # a strategy that stops before the budget keeps its best
    fractions[: len(best)] = optimum / best
    return Run(fractions, len(first), cpu_s)


def _one(tuner: str | None, strategy: str, space: RecordedSpace | Path, seed: int, evaluations: int) -> Run:
    """Not a tuner but a strategy of Kernel Tuner."""
    if isinstance(space, RecordedSpace):
        assert tuner is not None
        return replay.run(space, tuner, seed, evaluations)
    return run_strategy(space, strategy, seed, evaluations)


def run_all(
    spaces: Sequence[RecordedSpace], tuner: str, strategies: Sequence[str], evaluations: int, seeds: int, jobs: int
) -> dict[str, list[list[Run]]]:
    """The runs of the tuner, under its name, and of each strategy: per space one per seed."""
    slim = [replace(space, repetitions_ns=()) for space in spaces]
    with tempfile.TemporaryDirectory() as folder:
        caches = [write_cache(space, Path(folder) / f"{i}.json") for i, space in enumerate(slim)]
        tasks: list[tuple[str, int, int]] = []
        calls: list[tuple[Any, ...]] = []
        for i, seed in ((i, seed) for seed in range(seeds) for i in range(len(spaces))):
            tasks += [(name, i, seed) for name in (tuner, *strategies)]
            calls += [(tuner, "", slim[i], seed, evaluations)]
            calls += [(None, name, caches[i], seed, evaluations) for name in strategies]
        found = {}
        for number, run in call_in_children("replay_peers:_one", calls, jobs):
            found[tasks[number]] = run
            if 10 * len(found) // len(tasks) > 10 * (len(found) - 1) // len(tasks):
                print(f"{len(found)} of {len(tasks)} runs", flush=True)
    return {
        name: [[found[name, i, seed] for seed in range(seeds)] for i in range(len(spaces))] for name in (tuner, *strategies)
    }


def compare(
    spaces: Sequence[RecordedSpace],
    tuner: str,
    strategies: Sequence[str],
    budgets: Sequence[int],
    seeds: int,
    jobs: int = 1,
) -> dict[str, Any]:
    """Everything that `--out` keeps."""
    runs = run_all(spaces, tuner, strategies, max(budgets), seeds, jobs)
    reports = [
        replay.to_json(replay.summarise(spaces, name if name == tuner else f"Kernel Tuner {name}", budgets, own))
        for name, own in runs.items()
    ]
    differences = {
        name: [asdict(each) for each in replay.differences(spaces, runs[tuner], runs[name], budgets)] for name in strategies
    }
    return {"tuner": tuner, "seeds": seeds, "budgets": list(budgets), "reports": reports, "differences": differences}


def show(data: dict[str, Any]) -> str:
    """The tables for the result of `compare`."""
    budgets = [str(budget) for budget in data["budgets"]]
    header = ["", *(f"at {budget}" for budget in budgets)]
    rows = []
    for report in data["reports"]:
        for space in [*report["spaces"], None]:
            label = "geometric mean" if space is None else Path(space["file"]).name.partition(".")[0]
            figures = (
                (report["geomean"], report["geomean_low"], report["geomean_high"])
                if space is None
                else (space["fractions"], space["low"], space["high"])
            )
            cells = [f"{mean[b]:.3f} [{low[b]:.3f} {high[b]:.3f}]" for b in budgets for mean, low, high in [figures]]
            rows.append([f"{report['tuner']}: {label}", *cells])
    text = [table(header, rows)]
    for name, differences in data["differences"].items():
        cells = [
            [
                Path(each["of"].partition(": ")[0]).name.partition(".")[0],
                *(f"{each['mean'][int(b)]:+.3f} [{each['low'][int(b)]:+.3f} {each['high'][int(b)]:+.3f}]" for b in budgets),
            ]
            for each in differences
        ]
        text.append(f"\n{data['tuner']} minus {name}, paired by seed\n" + table(header, cells))
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--tuner", default="xgb", help="ours")
    parser.add_argument("--strategies", default=",".join(STRATEGIES[:3]), help=f"e.g. {','.join(STRATEGIES)}")
    parser.add_argument("--evaluations", default="25,50,100,200")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args()
    loaded = replay.load(options.files)
    for text in loaded.left_out:
        print(f"left out: {text}")
    budgets = sorted({int(text) for text in options.evaluations.split(",")})
    data = compare(loaded.spaces, options.tuner, options.strategies.split(","), budgets, options.seeds, options.jobs)
    print(show(data))
    write(options.out, {**data, "left_out": list(loaded.left_out)})


if __name__ == "__main__":
    main()
