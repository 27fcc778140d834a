"""Compiles a kernel of every CUDA template for every card of `schedsearch.target.PRESETS`, without any of them.

The kernel is the template's default for the first of its workloads in results/machine_code.json that it accepts on the card;
templates that have none there have one here.
Cards of one compute capability that get the same source share a compilation. docs/performance/targets.md shows the data.
With --share 0.5 each template is compiled for half of the compute capabilities that it fits, one at least; --draw decides
for which.

It exits with 1 if a template fits a card and none of the kernels that were tried compiles for it.

Run: python benchmarks/targets.py --out benchmarks/results/targets.json
     python benchmarks/targets.py --show benchmarks/results/targets.json
     python benchmarks/targets.py --share 0.5 --draw 0eec815
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

from common import facts, table, write

import schedsearch
from schedsearch import Workload, load_templates
from schedsearch.backend import CompileError, RejectedError, compile_source, toolchain
from schedsearch.target import PRESETS, Target
from schedsearch.template import KernelSource, Template

CANDIDATES = Path(__file__).parent / "results" / "machine_code.json"
TRIES = 6  # configurations, until one fits
NOT_DRAWN = "not drawn, or refused"
SEQUENCES = schedsearch.depthwise_conv1d(n=8, c=64, t=1024, taps=4)
LARGE_FILTERS = schedsearch.depthwise_conv2d(n=32, h=28, w=28, c=192, r=7, s=7, padding=3)
FURTHER = {
    "conv2d_tcgen05": schedsearch.conv2d(n=32, h=28, w=28, c=128, k=128, r=3, s=3, padding=1, epilogue=["bias", "relu"]),
    "matmul_tcgen05": schedsearch.dense(m=512, n=1024, k=1024, dtype="float8_e4m3", epilogue=["bias"]),
    "conv2d_reordered": schedsearch.conv2d(
        n=8, h=224, w=224, c=3, k=64, r=7, s=7, stride=2, padding=3, layout="NCHW", output_layout="NHWC"
    ),
    "depthwise_conv2d_mma": LARGE_FILTERS,
    "depthwise_conv2d_dw_mma": LARGE_FILTERS.replace(direction="grad_weight"),
    "depthwise_conv1d_rows_cuda": SEQUENCES,
    "depthwise_conv1d_lines_cuda": SEQUENCES.replace(layout="NCT"),
    "depthwise_conv1d_any_cuda": SEQUENCES.replace(direction="backward"),
    "causal_conv1d_token_cuda": schedsearch.causal_conv1d_update(n=32, c=4096, t=1, taps=4, length=4),
    "causal_conv1d_update_cuda": schedsearch.causal_conv1d_update(n=8, c=512, t=3, taps=4, length=8),
    "recurrent_cuda": schedsearch.recurrent(cell="lstm", t=50, n=8, hidden=128),
    "squeeze_excite_cuda": schedsearch.squeeze_excite(n=1, c=960, h=7, w=7, squeezed=240),
}


def workloads() -> dict[str, list[Any]]:
    """Template -> workloads as JSON objects, for all built-in templates for GPUs but that of users' own kernels."""
    found: dict[str, list[Any]] = {
        name: [] for name, each in load_templates().items() if each.kind == "cuda" and name != "own_kernel_cuda"
    }
    for row in json.loads(CANDIDATES.read_text())["rows"]:
        found[row["template"]].append(row["workload"])
    return {name: rows or [json.loads(FURTHER[name].json)] for name, rows in found.items()}


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


def drawn(template: Template, workloads: list[Any], share: float, draw: str) -> set[tuple[int, int]]:
    """The compute capabilities for which a template is compiled, of those that it fits."""
    given = [Workload.from_json(json.dumps(params)) for params in workloads]
    fitting = {
        target.compute_capability
        for target in PRESETS.values()
        if not all(template.validate(workload, target) for workload in given)
    }
    count = min(len(fitting), max(1, round(share * len(fitting))))
    return set(random.Random(f"{draw} {template.name}").sample(sorted(fitting), count))


def compiled(given: tuple[str, list[Any]], share: float = 1.0, draw: str = "0") -> dict[str, Any]:
    """What each card gets of a template."""
    name, workloads = given
    template, cards, known = load_templates([name])[name], dict[str, Any](), dict[Any, dict[str, Any]]()
    capabilities = drawn(template, workloads, share, draw)
    for preset, target in PRESETS.items():
        row: dict[str, Any] = {}
        if share < 1 and target.compute_capability not in capabilities:
            cards[preset] = {"refused": NOT_DRAWN}
            continue
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
    parser.add_argument(
        "--share", metavar="S", type=float, default=1.0, help="of the compute capabilities, 0 to 1 (default 1)"
    )
    parser.add_argument("--draw", metavar="TEXT", default="0", help="decides which ones --share takes (default 0)")
    args = parser.parse_args()
    if args.show:
        shown(json.loads(args.show.read_text()))
        return
    given = [pair for pair in workloads().items() if any(word in pair[0] for word in args.templates)]
    os.environ.setdefault("SCHEDSEARCH_BUILD_CACHE", "off")
    if args.share < 1:
        print(f"a share of the compute capabilities: --share {args.share:g} --draw {args.draw}", flush=True)
    result: dict[str, Any] = {**facts(), "toolchain": toolchain("cuda"), "rows": []}
    compile_one = functools.partial(compiled, share=args.share, draw=args.draw)
    with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count() or 1)) as pool:
        for row in pool.imap(compile_one, given, chunksize=1):
            result["rows"].append(row)
            print(len(result["rows"]), row["template"], flush=True)
            write(args.out, result)
    shown(result)
    sys.exit(any("rejected" in card for row in result["rows"] for card in row["cards"].values()))


if __name__ == "__main__":
    main()
