"""How many candidates a core builds in a second: random ones of a template for some layers, in one process.

CPU seconds, so that it can run beside other work. The first three candidates warm up and are not counted. `alone` is without
sharing Numba's work among candidates (the first 20 of them say enough), `shared` with it. Needs the CUDA wheels, no GPU.

Run: python benchmarks/build_speed.py [--template conv2d_wgmma] [--candidates 100] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import statistics
import time
from typing import Any

import numpy as np
from common import table, write

from schedsearch.backend import CompileError, RejectedError, compile_source
from schedsearch.target import PRESETS
from schedsearch.template import KernelSource, load_template
from schedsearch.workload import Workload

WARM_UP, ALONE = 3, 20
FUSED = ("bias", "relu")
LAYERS = [
    dict(n=32, h=56, w=56, c=64, k=64, r=3, s=3, padding=1, epilogue=FUSED),
    dict(n=32, h=28, w=28, c=128, k=128, r=3, s=3, padding=1, epilogue=FUSED),
    dict(n=32, h=14, w=14, c=256, k=256, r=3, s=3, padding=1, epilogue=FUSED),
    dict(n=32, h=14, w=14, c=1024, k=256, r=1, s=1, epilogue=FUSED),
]


def without_sharing(source: KernelSource) -> KernelSource:
    return dataclasses.replace(source, steps=tuple(dataclasses.replace(step, shaped_by=None) for step in source.steps))


def build_s(name: str, candidates: int, shared: bool) -> list[float]:
    """CPU seconds of each candidate, from configuration to machine code; the layers take turns, as in a run."""
    template, target = load_template(name), PRESETS["h200"]
    rng = np.random.default_rng(0)
    workloads = [Workload.conv2d(**layer) for layer in LAYERS]
    spaces = [template.space(workload, target) for workload in workloads]
    turns = itertools.islice(itertools.cycle(zip(workloads, spaces)), WARM_UP + candidates)
    taken = []
    for workload, config in [(workload, space.sample(1, rng)[0]) for workload, space in turns]:
        started = time.process_time()
        source = template.kernel(workload, target, config)
        with contextlib.suppress(CompileError, RejectedError):  # takes its time too
            compile_source(source if shared else without_sharing(source), target)
        taken.append(time.process_time() - started)
    return taken[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--template", default="conv2d_wgmma")
    parser.add_argument("--candidates", type=int, default=100)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()

    rows: list[dict[str, Any]] = []
    for how in ("alone", "shared"):
        taken = build_s(args.template, args.candidates if how == "shared" else ALONE, how == "shared")
        row = {"template": args.template, "how": how, "candidates": len(taken)}
        row |= {"per_s": round(len(taken) / sum(taken), 2), "median_s": round(statistics.median(taken), 3)}
        rows.append({**row, "least_s": round(min(taken), 3), "most_s": round(max(taken), 3)})
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    write(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
