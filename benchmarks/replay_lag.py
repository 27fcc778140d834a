"""Does a search lose when a tuner is asked for more proposals at a time while others are still being measured?

    python benchmarks/replay_lag.py *.json.gz --under-way 8 --seeds 30 --out FILE.json

Replays the default tuner over recorded spaces. So many candidates are under way when a result comes, as in a run on several
devices. The tuner is asked for the batch that it prefers, or for twice that and at most 8. The table has
the geometric mean over the seeds of the fraction of the optimum after so many evaluations, with its standard error in units
of the last digit, and the requests to the tuner.
"""

from __future__ import annotations

import argparse
from collections import deque

import common
import numpy as np
from numpy.typing import NDArray

from schedsearch.config import Config
from schedsearch.replay import load
from schedsearch.replay.recorded import RecordedSpace
from schedsearch.tuner import make_tuner

BUDGETS = (50, 100, 200)
LARGEST = 8  # batch


def searched(recorded: RecordedSpace, seed: int, under_way: int, factor: int) -> tuple[NDArray[np.float64], int]:
    """The fractions of the optimum after `BUDGETS` evaluations, and the number of requests."""
    space = recorded.space()
    keys = space.keys(recorded.rows)
    tuner = make_tuner("xgb", space, seed=seed)
    waiting: deque[Config] = deque()
    times_ns: list[float] = []
    requests = 0
    while len(times_ns) < BUDGETS[-1]:
        batch = max(tuner.batch, min(factor * tuner.batch, LARGEST))
        if not waiting or len(waiting) + batch <= under_way:
            waiting += tuner.ask(batch)
            requests += 1
            continue
        config = waiting.popleft()
        time_ns = float(recorded.times_ns[np.searchsorted(keys, space.keys(space.indices([config])))[0]])
        times_ns.append(time_ns)
        tuner.tell([(config, None if np.isnan(time_ns) else time_ns)])
    best = np.fmin.accumulate(times_ns)
    return recorded.best_ns / best[np.array(BUDGETS) - 1], requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="recorded spaces")
    parser.add_argument("--under-way", type=int, default=8, help="candidates that wait for their results")
    parser.add_argument("--seeds", type=int, default=30, help="searches of each space")
    parser.add_argument("--out", help="write the data here")
    options = parser.parse_args()
    rows, lines = [], []
    for recorded in load(options.files).spaces:
        if len(recorded.rows) < 2 * BUDGETS[-1]:
            raise SystemExit(f"{recorded.name} has {len(recorded.rows)} configurations; {2 * BUDGETS[-1]} are needed")
        for factor in (1, 2):
            runs = [searched(recorded, seed, options.under_way, factor) for seed in range(options.seeds)]
            logs = np.log(np.array([fractions for fractions, _ in runs]))
            mean, error = np.exp(logs.mean(axis=0)), logs.std(axis=0) / options.seeds**0.5
            requests = float(np.mean([count for _, count in runs]))
            rows.append(
                {
                    "space": recorded.name, "factor": factor, "under_way": options.under_way, "requests": requests,
                    "fractions": dict(zip(map(str, BUDGETS), mean.tolist())), "errors": error.tolist(),
                }
            )  # fmt: skip
            shown = (f"{one:.3f} ({1e3 * off:.0f})" for one, off in zip(mean, error))
            lines.append((recorded.name, f"x{factor}", *shown, f"{requests:.0f}"))
            common.write(options.out, {"rows": rows})
    print(common.table(("space", "batch", *(f"after {budget}" for budget in BUDGETS), "requests"), lines))


if __name__ == "__main__":
    main()
