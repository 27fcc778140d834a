"""Checks that the templates still compile to the same machine code: sha256 of cubins, before and after a change.

It writes the hashes of fixed candidates of every CUDA template: defaults, then random configurations, of the workloads that
the template's contract test accepts and of layers that differ in size, dtype, epilogue, stride and groups. Or it compiles
the candidates of an earlier file again and compares, also how the steps are launched. It takes 200 s on two cores, needs the
CUDA wheels of that file, no GPU, and leaves the build cache alone. The file has the versions: another compiler may change
the code without any change of the template.

Run: python benchmarks/machine_code.py --json FILE
     python benchmarks/machine_code.py --against FILE [--json FILE] [--templates WORD ...]
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from common import table, write

from schedsearch import Workload, load_templates
from schedsearch.backend import CompileError, RejectedError, compile_source, toolchain
from schedsearch.target import PRESETS
from schedsearch.template import KernelSource, KernelStep

CANDIDATES = {"conv2d": 16, "depthwise_conv2d": 7, "dense": 9}  # of each template, by its first operator
OTHERS = 5  # of each template of another operator
NOT_LAUNCHED = ("function", "shaped_by", "contract")  # fields of a step that only its code shows
FUSED = ("bias", "relu")
QUANTISED = ("bias", "relu", "requantise")
LAYERS: list[dict[str, Any]] = [
    dict(n=32, h=56, w=56, c=64, k=64, r=3, s=3, padding=1),
    dict(n=1, h=14, w=14, c=256, k=256, r=3, s=3, padding=1, epilogue=FUSED),
    dict(n=32, h=28, w=28, c=512, k=128, r=1, s=1, epilogue=("scale_shift", "residual", "relu")),
    dict(n=4, h=35, w=35, c=48, k=80, r=5, s=5, padding=2, dtype="bfloat16", epilogue=("bias", "leaky_relu")),
    dict(n=2, h=17, w=17, c=128, k=192, r=1, s=7, padding=(0, 3, 0, 3), dilation=(1, 1), out_dtype="float32"),
    dict(n=8, h=224, w=224, c=3, k=64, r=7, s=7, stride=2, padding=3, epilogue=FUSED),
    dict(n=8, h=112, w=112, c=4, k=32, r=3, s=3, stride=2, padding=(0, 0, 1, 1), epilogue=("bias", "clip")),
    dict(n=16, h=56, w=56, c=128, k=128, r=3, s=3, padding=1, groups=4, epilogue=("residual", "relu")),
    dict(n=2, h=33, w=31, c=96, k=56, r=3, s=3, stride=2, padding=2, dilation=2, epilogue=("bias", "residual", "clip")),
    dict(n=8, h=28, w=28, c=128, k=128, r=3, s=3, padding=1, dtype="int8", epilogue=QUANTISED),
    dict(n=4, h=28, w=28, c=64, k=96, r=3, s=3, padding=1, dtype="int8", zero_points=("x", "weight"), layout="NCHW4c"),
    dict(n=8, h=112, w=112, c=3, k=32, r=3, s=3, stride=2, padding=1, dtype="uint8", zero_points=("x",), epilogue=QUANTISED),
    dict(n=4, h=28, w=28, c=64, k=96, r=3, s=3, padding=1, layout="NCHW", epilogue=("bias", "residual", "relu")),
    dict(n=4, h=28, w=28, c=64, k=96, r=3, s=3, padding=1, dtype="float32", epilogue=FUSED),
    dict(n=2, h=28, w=28, c=20, k=24, r=3, s=3, padding=1, dtype="float32", precision="tf32"),
    dict(n=2, h=28, w=28, c=64, k=64, r=1, s=1, layout="NCHW", dtype="float32", precision="fp32"),
    dict(n=2, h=72, w=80, c=32, k=12, r=3, s=3, padding=1, epilogue=FUSED),
]
PRODUCTS: list[dict[str, Any]] = [
    dict(m=1, n=1000, k=2048, epilogue=("bias",)),
    dict(m=200, n=264, k=520, dtype="bfloat16", epilogue=("bias", "residual", "relu")),
    dict(m=65, n=48, k=64, dtype="float32", precision="tf32"),
    dict(m=5, n=33, k=17, dtype="float32", weight_layout="KN", epilogue=("bias",)),
    dict(m=130, n=96, k=160, dtype="int8", epilogue=QUANTISED),
    dict(m=9, n=21, k=30, dtype="uint8", zero_points=("x", "weight"), weight_layout="KN"),
]


def workloads() -> dict[str, list[Workload]]:
    """Of each template, by its name: what its contract test accepts. The layers are added by `candidates`."""
    folder = Path(__file__).resolve().parents[1] / "tests"
    sys.path.insert(0, str(folder))
    found = dict[str, list[Workload]]()
    for file in sorted(folder.glob("test_*.py")):
        if "TemplateContract)" in file.read_text():
            for value in vars(importlib.import_module(file.stem)).values():
                if isinstance(value, type) and value.__name__ != "TemplateContract" and hasattr(value, "accepted"):
                    found.setdefault(value.template.name, []).extend(value.accepted)
    return found


def candidates() -> list[dict[str, Any]]:
    """The candidates as plain data: template, workload, configuration. They are always the same."""
    target, rng, accepted = PRESETS["h200"], np.random.default_rng(0), workloads()
    more = [*(Workload("conv2d", layer) for layer in LAYERS), *(Workload("dense", product) for product in PRODUCTS)]
    rows = []
    for template in load_templates().values():
        if template.kind != target.kind or template.name == "own_kernel_cuda":  # its kernels are the user's
            continue
        taken = [w for w in more if w.op in template.ops and not template.validate(w, target)]
        taken += [w for w in accepted.get(template.name, []) if not template.validate(w, target)]
        if not taken:  # it is for other cards
            continue
        for number in range(CANDIDATES.get(template.ops[0], OTHERS)):
            workload = taken[number % len(taken)]
            space = template.space(workload, target)
            config = template.default(workload, target, space) if number < len(taken) else space.sample(1, rng)[0]
            rows.append({"template": template.name, "workload": json.loads(workload.json), "config": dict(config)})
    return rows


def launches(source: KernelSource) -> str:
    """sha256 of how the steps are launched: parameters, grid, threads, shared bytes, workspaces, alignments."""
    names = [field.name for field in dataclasses.fields(KernelStep) if field.name not in NOT_LAUNCHED]
    steps = [[(name, getattr(step, name)) for name in names] for step in source.steps]
    text = repr((source.arch, steps, dict(source.workspaces), sorted(source.alignments.items())))
    return hashlib.sha256(text.encode()).hexdigest()


def compiled(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the sha256 of the cubin and of the launches, or with the compiler's reason for refusing it."""
    target = PRESETS["h200"]
    template = load_templates([row["template"]])[row["template"]]
    source = template.kernel(Workload.from_json(json.dumps(row["workload"])), target, template.current(row["config"]))
    try:
        built = compile_source(source, target)
    except (CompileError, RejectedError) as error:
        return {**row, "refused": str(error), "launches": launches(source)}
    code = hashlib.sha256(built.artifact.code).hexdigest()
    return {**row, "sha256": code, "registers": built.resources.registers, "launches": launches(source)}


def outcome(row: dict[str, Any]) -> tuple[str, str]:
    return str(row.get("sha256") or row.get("refused")), row["launches"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="FILE", type=Path, help="a file that an earlier version wrote")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--templates", metavar="WORD", nargs="+", help="only templates whose name contains one of these")
    args = parser.parse_args()
    before = json.loads(args.against.read_text())["rows"] if args.against else None
    given = [row for row in before or candidates() if any(word in row["template"] for word in args.templates or [""])]
    os.environ["SCHEDSEARCH_BUILD_CACHE"] = "off"
    with multiprocessing.get_context("spawn").Pool(min(4, os.cpu_count() or 1)) as pool:
        plain = [{key: row[key] for key in ("template", "workload", "config")} for row in given]
        rows = pool.map(compiled, plain, chunksize=1)
    result: dict[str, Any] = {"toolchain": toolchain("cuda"), "rows": rows}
    same = [True]
    if before is None:
        print(f"{len(rows)} candidates compiled")
    else:
        same = [outcome(old) == outcome(new) for old, new in zip(given, rows)]
        names = list(dict.fromkeys(row["template"] for row in rows))
        of = {name: [equal for row, equal in zip(rows, same) if row["template"] == name] for name in names}
        print(table(["template", "candidates", "identical"], [[name, len(of[name]), sum(of[name])] for name in names]))
        result |= {"against": str(args.against), "identical": sum(same), "candidates": len(same)}
    write(args.json, result)
    sys.exit(0 if all(same) else 1)


if __name__ == "__main__":
    main()
