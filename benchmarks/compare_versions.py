"""Joins what two versions of schedsearch measured on one card: tuned layers, trials per second, host time of a call.

Both versions run the same benchmarks one after the other, each with a database of its own:

    python benchmarks/conv2d_fp16.py --trials 300 --time 40 --db /tmp/before.db --out before.json       (old version)
    python benchmarks/conv2d_fp16.py --trials 300 --time 40 --db /tmp/after.db --out after.json         (new version)
    python benchmarks/conv2d_fp16.py --trials 300 --time 40 --seed 1 --db /tmp/warm.db --out warm.json  (new, second run)
    python benchmarks/launch_overhead.py --out launch_before_1.json                                     (both in turns)
    python benchmarks/compare_versions.py --before before.json --after after.json --warm warm.json \
        --calls-before launch_before_*.json --calls-after launch_after_*.json --out FILE
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import geometric_mean, table


def tuned(path: Path) -> dict[str, Any]:
    data = json.loads(path.read_text())
    keys = ("geometric_mean_ratio", "trials_per_s", "tuning_s", "shares")
    return {
        "command": data["command"],
        **{key: data[key] for key in keys},
        "us": {r["workload"]: r["us"] for r in data["rows"]},
    }


def calls(paths: list[Path]) -> dict[str, float]:
    """Call -> the shortest host time of all runs, microseconds: other processes only add to it."""
    runs = [{row["call"]: row["host_us"] for row in json.loads(path.read_text())["rows"]} for path in paths]
    return {call: min(run[call] for run in runs) for call in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("before", "after", "warm"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("calls-before", "calls-after"):
        parser.add_argument(f"--{name}", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    machine = json.loads(args.after.read_text())
    data = {key: machine[key] for key in ("command", "card", "cpus", "python", "versions")}
    data |= {name: tuned(getattr(args, name)) for name in ("before", "after", "warm")}
    data["calls"] = {"before": calls(args.calls_before), "after": calls(args.calls_after)}
    shared = data["before"]["us"].keys() & data["after"]["us"].keys()
    data["time_ratio"] = geometric_mean(
        [data["before"]["us"][layer] / data["after"]["us"][layer] for layer in sorted(shared)]
    )
    runs = [(name, data[name]) for name in ("before", "after", "warm")]
    rows = [[name, f"{run['geometric_mean_ratio']:.3f}", f"{run['trials_per_s']:.1f}"] for name, run in runs]
    print(table(["version", "over cuDNN", "trials/s"], rows))
    if args.out:
        args.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
