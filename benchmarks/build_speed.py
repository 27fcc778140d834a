"""How many candidates a core builds per second, and where the time goes: random ones of a template, in one process.

The unit is CPU seconds, so other work may run at the same time. Each way of building gets the same candidates; the first
three warm up and are not counted:

- `alone`: nothing is shared (10 candidates are enough);
- `shared`: candidates share Numba's work, and the build cache is empty at first;
- `cached`: the same again, as in a later run: the build cache has the output of `shared`;
- `kept`: kernels that are served, for a GPU: the build cache has their machine code.

The stages are means: the template's `kernel()`, the compiler (Numba, or MLIR), NVVM, the linker, and the rest (including
keys and the cache). On the CPU, Numba and LLVM are one stage. Templates for a GPU need the CUDA wheels, but no GPU.
numba-cuda-mlir shares nothing between candidates, so that its first three rows differ by chance only.

Run: python benchmarks/build_speed.py [--template conv2d_wgmma conv2d_cpu] [--candidates 100] [--json FILE]
     python benchmarks/build_speed.py --compiler numba-cuda-mlir --candidates 6 --add --json FILE
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import facts, table, write

from schedsearch import Config, Workload
from schedsearch.backend import CompileError, RejectedError, compile_source, compilers, cpu, cuda, sharing
from schedsearch.backend.build_cache import BuildCache
from schedsearch.backend.kept import compile_kept
from schedsearch.device.detect import detect
from schedsearch.target import PRESETS, Target
from schedsearch.template import KernelSource, Template, load_template

WARM_UP, ALONE = 3, 10
WATCHED = {
    "numba-cuda": [("front_end", "_lower", "compiler"), ("front_end", "_to_ptx", "nvvm")],
    "numba-cuda-mlir": [("mlir_private", "_module", "compiler"), ("mlir_private", "_nvvm", "nvvm")],
}
STAGES = ("template", "compiler", "nvvm", "linker")
FUSED = ("bias", "relu")
LAYERS = [
    dict(n=32, h=56, w=56, c=64, k=64, r=3, s=3, padding=1, epilogue=FUSED),
    dict(n=32, h=28, w=28, c=128, k=128, r=3, s=3, padding=1, epilogue=FUSED),
    dict(n=32, h=14, w=14, c=256, k=256, r=3, s=3, padding=1, epilogue=FUSED),
    dict(n=32, h=14, w=14, c=1024, k=256, r=1, s=1, epilogue=FUSED),
]


def without_sharing(source: KernelSource) -> KernelSource:
    return dataclasses.replace(source, steps=tuple(dataclasses.replace(step, shaped_by=None) for step in source.steps))


class Clock:
    """CPU seconds spent in functions of modules, added up by stage."""

    def __init__(self) -> None:
        self.spent_s: collections.Counter[str] = collections.Counter()

    def watch(self, module: Any, name: str, stage: str) -> None:
        original = getattr(module, name)

        @functools.wraps(original)
        def watched(*args: Any, **named: Any) -> Any:
            started = time.process_time()
            try:
                return original(*args, **named)
            finally:
                self.spent_s[stage] += time.process_time() - started

        setattr(module, name, watched)


def candidates(name: str, count: int) -> list[tuple[Template, Target, Workload, Config]]:
    """The layers take turns, as in a run."""
    template = load_template(name)
    target, dtype = (PRESETS["h200"], "float16") if template.kind == "cuda" else (detect("cpu"), "float32")
    rng = np.random.default_rng(0)
    workloads = [Workload.conv2d(**layer, dtype=dtype) for layer in LAYERS]
    spaces = [template.space(workload, target) for workload in workloads]
    turns = itertools.islice(itertools.cycle(zip(workloads, spaces)), WARM_UP + count)
    return [(template, target, workload, space.sample(1, rng)[0]) for workload, space in turns]


def build(how: str, chosen: list[tuple[Template, Target, Workload, Config]], clock: Clock) -> list[float]:
    """CPU seconds of each candidate, from configuration to machine code."""
    taken = []
    for number, (template, target, workload, config) in enumerate(chosen):
        if number == WARM_UP:
            clock.spent_s.clear()
        started = time.process_time()
        source = template.kernel(workload, target, config)
        clock.spent_s["template"] += time.process_time() - started
        with contextlib.suppress(CompileError, RejectedError):  # takes its time too
            if how == "kept":
                compile_kept(source, target)
            else:
                compile_source(without_sharing(source) if how == "alone" else source, target)
        taken.append(time.process_time() - started)
    return taken[WARM_UP:]


def measured(name: str, count: int, clock: Clock) -> list[dict[str, Any]]:
    chosen, rows = candidates(name, count), []
    with tempfile.TemporaryDirectory() as folder:
        for how in ("alone", "shared", "cached", "kept")[: 4 if chosen[0][0].kind == "cuda" else 3]:
            cache = None if how == "alone" else BuildCache(Path(folder))
            setattr(sharing, "user_cache", functools.partial(lambda each: each, cache))  # noqa: B010
            if front_end := sys.modules.get("schedsearch.backend.front_end"):
                front_end._front_end.cache_clear()  # as in a new process
            if how == "kept":
                build(how, chosen, clock)
            taken = build(how, chosen[: WARM_UP + ALONE] if how == "alone" else chosen, clock)
            row = {
                "compiler": compilers.chosen().package,
                "template": name,
                "how": how,
                "candidates": len(taken),
                "per_s": round(len(taken) / sum(taken), 2),
            }
            row |= {"median_s": round(statistics.median(taken), 4), "mean_s": round(statistics.mean(taken), 4)}
            stages = {stage: clock.spent_s[stage] / len(taken) for stage in STAGES}
            stages["rest"] = statistics.mean(taken) - sum(stages.values())
            rows.append(row | {f"{stage}_s": round(seconds, 4) for stage, seconds in stages.items()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--template", nargs="+", default=["conv2d_wgmma", "conv2d_cpu"])
    parser.add_argument("--candidates", type=int, default=100)
    parser.add_argument("--compiler", choices=compilers.COMPILERS, help=f"as {compilers.ENVIRONMENT_VARIABLE}")
    parser.add_argument("--add", action="store_true", help="keep the rows of other compilers in FILE")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if args.compiler:
        os.environ[compilers.ENVIRONMENT_VARIABLE] = args.compiler

    clock = Clock()
    clock.watch(cpu, "_object_code", "compiler")
    clock.watch(cuda, "_link", "linker")
    for module, function, stage in WATCHED[compilers.chosen().package]:
        clock.watch(importlib.import_module(f"schedsearch.backend.{module}"), function, stage)
    rows = [row for name in args.template for row in measured(name, args.candidates, clock)]
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    file = Path(args.json or "")
    earlier = json.loads(file.read_text())["rows"] if args.add and file.is_file() else []
    kept = [row for row in earlier if row["compiler"] != compilers.chosen().package]
    write(args.json, {**facts(), "rows": [*kept, *rows]})


if __name__ == "__main__":
    main()
