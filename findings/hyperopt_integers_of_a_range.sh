#!/bin/sh
# hyperopt 0.3.0, numpy 2.4.6
# hp.uniformint draws a number between two bounds and rounds it, so that the first and the last integer are half as likely as each of the
# others: random search over four sizes tries those at the ends in one of six trials, not in one of four. hp.quniform rounds to
# multiples of its step, not to steps from the lower bound: from 1 to 10 by 4 are 0, which is below the bound, 4 and 8. TPE tries
# a configuration again that it knows: 16 trials over 16 configurations reach 9 of them.
# Seen on 2026-11-29:
#     uniformint(1, 4), 2000 trials: at the ends 0.33, right: 0.5
#     quniform(1, 10, 4): [0.0, 4.0, 8.0]
#     TPE: 16 trials, 9 configurations
# Exits 0 while hyperopt behaves like that.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q hyperopt==0.3.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import sys

import numpy as np
from hyperopt import fmin, hp, rand, tpe


def seen(space, algorithm, trials):
    found = []

    def time(config):
        found.append(tuple(config.values()))
        return float(config["a"])

    random = np.random.default_rng(0)
    fmin(time, space, algo=algorithm, max_evals=trials, rstate=random, show_progressbar=False, verbose=False)
    return found


drawn = [a for (a,) in seen({"a": hp.uniformint("a", 1, 4)}, rand.suggest, 2000)]
ends = sum(a in (1, 4) for a in drawn) / len(drawn)
print(f"uniformint(1, 4), 2000 trials: at the ends {ends:.2f}, right: 0.5")
steps = sorted({float(a) for (a,) in seen({"a": hp.quniform("a", 1, 10, 4)}, rand.suggest, 300)})
print(f"quniform(1, 10, 4): {steps}")
knobs = {name: hp.choice(name, [16, 32, 64, 128]) for name in "ab"}
tried = seen(knobs, tpe.suggest, 16)
print(f"TPE: {len(tried)} trials, {len(set(tried))} configurations")
sys.exit(not 0.3 < ends < 0.37 or steps != [0.0, 4.0, 8.0] or len(set(tried)) > 12)
PYTHON
