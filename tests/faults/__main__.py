"""The command line of the campaign: `python -m tests.faults --help`."""

from __future__ import annotations

import argparse
import gc
import importlib
import math
import os
import shlex
import sys
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the other modules of tests/

from . import fuzz_command
from .campaign import Campaign
from .results import summary
from .scenario import catalogue

# Runs are forked from this process, so what it imports costs nothing in each of them.
_PRELOADED = (
    "faulty_templates",
    "schedsearch.cli.main",
    "schedsearch.cli.tune",
    "schedsearch.session",
    "schedsearch.records.store",
    "schedsearch.runtime",
    "schedsearch.workload_file",
    "llvmlite.binding",
    "numpy",
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the campaign; returns 0 when everything held, 1 when something did not, 130 when it was interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["fuzz"]:
        return fuzz_command.main(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description="Injects faults and checks what must hold.",
        epilog="`python -m tests.faults fuzz --help`: one fuzzer alone",
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="a scenario or a pattern such as 'process.*'")
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cpu", help="the device that candidates run on")
    parser.add_argument("--n", type=int, default=100, help="tries of each fault")
    parser.add_argument("--files", type=int, help="workload files for the fuzzers; default: 1000 for each try")
    parser.add_argument("--databases", type=int, help="databases and imports for the fuzzers; default: 100 for each try")
    parser.add_argument("--time", type=float, default=math.inf, metavar="S", help="begin nothing after this many seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the first try; the next has seed + 1")
    parser.add_argument("--jobs", type=int, help="batches at once; default: 2 for each core on a CPU, 1 on a GPU")
    parser.add_argument("--short", action="store_true", help="the size of `make test`: each fault about once")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--add", action="store_true", help="keep what --out has of other scenarios")
    parser.add_argument("--keep", action="store_true", help="keep the folders of batches in which something did not hold")
    parser.add_argument("--list", action="store_true", help="print the scenarios and end")
    chosen = parser.parse_args(arguments)

    scenarios = [
        scenario
        for scenario in catalogue()
        if scenario.target == chosen.target
        and (not chosen.only or any(fnmatch(scenario.name, pattern) for pattern in chosen.only))
    ]
    if not scenarios:
        parser.error(f"no scenario of target {chosen.target} is called {' or '.join(chosen.only or [])}; see --list")
    if chosen.list:
        for scenario in scenarios:
            print(f"{scenario.name:42} {scenario.what}")
        return 0
    for name in _PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    alone = chosen.only is not None and not any(character in pattern for pattern in chosen.only for character in "*?[")
    if alone:  # a failure prints this command with --n 1
        scenarios = [replace(scenario, share=min(scenario.share, 1.0)) for scenario in scenarios]
    counts = {
        "tries": chosen.n,
        # A single fuzzer that is named is repeated with --n: a failure prints that command.
        "files": chosen.files or (chosen.n if alone else 1000 * chosen.n),
        "databases": chosen.databases or (chosen.n if alone else 100 * chosen.n),
    }
    cores = len(os.sched_getaffinity(0))
    campaign = Campaign(
        scenarios,
        None if chosen.short else counts,
        seed=chosen.seed,
        jobs=chosen.jobs or (1 if chosen.target == "cuda" else 2 * cores),
        time_s=chosen.time,
        out=chosen.out,
        add=chosen.add,
        keep=chosen.keep,
        command=shlex.join(["python", "-m", "tests.faults", *arguments]),
    )
    campaign.run()
    print(summary([tally.to_json() for tally in campaign.tallies]))
    if campaign.interrupted:
        return 130
    return 0 if campaign.held else 1


if __name__ == "__main__":
    sys.exit(main())
