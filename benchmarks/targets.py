"""Compiles a kernel of every CUDA template for every card of `schedsearch.target.PRESETS`, without any of them.

The kernel is the template's default for the first of its workloads in results/machine_code.json that it accepts on the card.
Cards of one compute capability that get the same source share a compilation. docs/performance/targets.md shows the data.

It exits with 1 if a template fits a card and none of the kernels that were tried compiles for it.

Run: python benchmarks/targets.py --out benchmarks/results/targets.json
     python benchmarks/targets.py --show benchmarks/results/targets.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
from pathlib import Path
from typing import Any

from common import facts, table, write

from schedsearch import Workload, load_templates
from schedsearch.backend import CompileError, RejectedError, compile_source, toolchain
from schedsearch.target import PRESETS, Target
from schedsearch.template import KernelSource, Template

CANDIDATES = Path(__file__).parent / "results" / "machine_code.json"
TRIES = 6  # configurations, until one fits


def source_of(template: Template, workloads: list[Any], target: Target, number: int) -> KernelSource | str:
    """The `number`-th kernel to try on a card, or why there is none."""
    reasons = list[str]()
    for params in workloads:
        workload = Workload.from_json(json.dumps(params))
        if reason := template.validate(workload, target):
            reasons.append(reason)
            continue
        space = template.space(workload, target)
        if number == 0:
            return template.kernel(workload, target, template.default(workload, target, space))
        import numpy as np

        return template.kernel(workload, target, space.sample(number, np.random.default_rng(0))[-1])
    return reasons[0]


def compiled(given: tuple[str, list[Any]]) -> dict[str, Any]:
    """What each card gets of a template."""
    name, workloads = given
    template, cards, known = load_templates([name])[name], dict[str, Any](), dict[Any, dict[str, Any]]()
    for preset, target in PRESETS.items():
        row: dict[str, Any] = {}
        for number in range(TRIES):
            source = source_of(template, workloads, target, number)
            if isinstance(source, str):
                row = {"refused": source}
                break
            key = (
                target.compute_capability,
                number,
                [(step.block_threads, step.dynamic_shared_bytes) for step in source.steps],
            )
            row = known.get(repr(key)) or known.setdefault(repr(key), outcome(source, target))
            if "rejected" not in row:
                row = {**row, "tries": number + 1}
                break
        cards[preset] = row
    return {"template": name, "cards": cards}


def outcome(source: KernelSource, target: Target) -> dict[str, Any]:
    try:
        built = compile_source(source, target)
    except (CompileError, RejectedError) as error:
        return {"rejected": str(error)}
    found = built.resources
    return {
        "arch": built.artifact.plan.arch,
        "registers": found.registers,
        "shared_bytes": found.shared_bytes,
        "spill_bytes": found.spill_bytes,
    }


def cell(row: dict[str, Any]) -> str:
    if "refused" in row:
        return "-"
    if "rejected" in row:
        return f"rejected: {row['rejected'].partition(';')[0][:60]}"
    shared = f"{row['shared_bytes'] / 1024:.0f} KiB" if row["shared_bytes"] else "0"
    return f"{row['registers']}, {shared}"


def summary(result: dict[str, Any]) -> tuple[list[str], list[list[str]], list[str]]:
    """Head and cells of a table: registers of a thread and shared memory of a block; and why templates refuse cards."""
    rows = result["rows"]
    cells = [[f"`{row['template']}`", *(cell(row["cards"][preset]) for preset in PRESETS)] for row in rows]
    reasons = dict[tuple[str, str], list[str]]()  # reason and cards -> templates
    for row in rows:
        refused = dict[str, list[str]]()
        for preset, found in row["cards"].items():
            if "refused" in found:
                reason = re.sub(r"^as .*: |, got [0-9.]+$", "", found["refused"])
                refused.setdefault(reason, []).append(preset)
        for reason, presets in refused.items():
            reasons.setdefault((reason, ", ".join(presets)), []).append(f"`{row['template']}`")
    lines = [f"- {', '.join(names)}: {reason} ({presets})" for (reason, presets), names in reasons.items()]
    heads = [f"{preset} ({target.architecture})" for preset, target in PRESETS.items()]
    return ["template", *heads], cells, lines


def shown(result: dict[str, Any]) -> None:
    head, cells, reasons = summary(result)
    print(table(head, cells), *reasons, sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="FILE")
    parser.add_argument("--show", metavar="FILE", type=Path, help="only print the table of such a file")
    parser.add_argument("--templates", metavar="WORD", nargs="+", default=[""])
    args = parser.parse_args()
    if args.show:
        shown(json.loads(args.show.read_text()))
        return
    workloads = dict[str, list[Any]]()
    for row in json.loads(CANDIDATES.read_text())["rows"]:
        workloads.setdefault(row["template"], []).append(row["workload"])
    given = [pair for pair in workloads.items() if any(word in pair[0] for word in args.templates)]
    os.environ.setdefault("SCHEDSEARCH_BUILD_CACHE", "off")
    result: dict[str, Any] = {**facts(), "toolchain": toolchain("cuda"), "rows": []}
    with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count() or 1)) as pool:
        for row in pool.imap(compiled, given, chunksize=1):
            result["rows"].append(row)
            print(len(result["rows"]), row["template"], flush=True)
            write(args.out, result)
    shown(result)
    sys.exit(any("rejected" in card for row in result["rows"] for card in row["cards"].values()))


if __name__ == "__main__":
    main()
