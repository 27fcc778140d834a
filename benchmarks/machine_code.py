"""Checks that the templates still compile to the same machine code: sha256 of cubins, before and after a change.

It writes the hashes of fixed candidates (12 of each CUDA template of conv2d: defaults and random ones for layers that differ
in size, dtype, epilogue, stride and groups), or compiles the candidates of an earlier file again and compares. It needs the
CUDA wheels of that file and no GPU. The file has the versions: another compiler may change the code without any change of
the template.

Run: python benchmarks/machine_code.py --json FILE
     python benchmarks/machine_code.py --against FILE [--json FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from common import table, write

from schedsearch import Config, Workload, load_templates
from schedsearch.backend import CompileError, RejectedError, compile_source, toolchain
from schedsearch.target import PRESETS

CANDIDATES = 12  # of each template
FUSED = ("bias", "relu")
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
]


def candidates() -> list[dict[str, Any]]:
    """The candidates as plain data: template, parameters of the workload, configuration. They are always the same."""
    target, rng = PRESETS["h200"], np.random.default_rng(0)
    rows = []
    for template in load_templates().values():
        if template.kind != target.kind or "conv2d" not in template.ops:
            continue
        taken = [layer for layer in LAYERS if not template.validate(Workload("conv2d", layer), target)]
        for number in range(CANDIDATES if taken else 0):
            layer = taken[number % len(taken)]
            workload = Workload("conv2d", layer)
            if number < len(taken):
                config = template.default(workload, target, template.space(workload, target))
            else:
                config = template.space(workload, target).sample(1, rng)[0]
            rows.append({"template": template.name, "params": layer, "config": dict(config)})
    return rows


def compiled(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the cubin's sha256, or with the compiler's reason for refusing it."""
    target = PRESETS["h200"]
    template = load_templates([row["template"]])[row["template"]]
    workload = Workload("conv2d", row["params"])
    try:
        built = compile_source(template.kernel(workload, target, Config(row["config"])), target)
    except (CompileError, RejectedError) as error:
        return {**row, "refused": str(error)}
    return {**row, "sha256": hashlib.sha256(built.artifact.code).hexdigest(), "registers": built.resources.registers}


def outcome(row: dict[str, Any]) -> str:
    return str(row.get("sha256") or row.get("refused"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="FILE", type=Path, help="a file that an earlier version wrote")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    before = json.loads(args.against.read_text())["rows"] if args.against else None
    rows = [compiled({key: row[key] for key in ("template", "params", "config")}) for row in before or candidates()]
    result: dict[str, Any] = {"toolchain": toolchain("cuda"), "rows": rows}
    if before is None:
        print(f"{len(rows)} candidates compiled")
    else:
        same = [outcome(old) == outcome(new) for old, new in zip(before, rows)]
        names = list(dict.fromkeys(row["template"] for row in rows))
        of = {name: [equal for row, equal in zip(rows, same) if row["template"] == name] for name in names}
        print(table(["template", "candidates", "identical"], [[name, len(of[name]), sum(of[name])] for name in names]))
        result |= {"against": str(args.against), "identical": sum(same), "candidates": len(same)}
    write(args.json, result)
    sys.exit(0 if before is None or all(same) else 1)


if __name__ == "__main__":
    main()
