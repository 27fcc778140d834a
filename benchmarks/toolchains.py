"""Two toolchains beside each other: one kernel of each CUDA template, built by both, raced on one GPU.

    python benchmarks/toolchains.py build newest.json        where one toolchain is installed; needs no GPU
    python benchmarks/toolchains.py race newest.json --out toolchains_h200.json     where the other is, on the GPU

The two compilers of kernels (docs/decisions/361-two-compilers-of-kernels.md) are compared in the same way, where both are
installed; --against gives the kernels that are otherwise built by the toolchain of the race:

    SCHEDSEARCH_COMPILER=numba-cuda python benchmarks/toolchains.py build one.json
    SCHEDSEARCH_COMPILER=numba-cuda-mlir python benchmarks/toolchains.py build other.json
    python benchmarks/toolchains.py race other.json --against one.json --out compilers_h200.json

The kernels are the defaults of the first workload of `machine_code.py` that each template takes. With --suites they are
those of layers: the 13 float16 convolutions with the configurations of results/conv2d_fp16_h200.json, and int8
convolutions, depthwise convolutions and products of one row with the default of the first template that takes them. The
race verifies both and times them in turns. The table has the times, the ratio, and whether the difference can be told from
noise.
"""

from __future__ import annotations

import argparse
import base64
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import common
import machine_code
from convolutions import SHAPES, square

import schedsearch
from schedsearch.backend import CompileError, RejectedError, compile_source, toolchain
from schedsearch.config import Config
from schedsearch.identity import sha256_hex
from schedsearch.launch import Artifact, LaunchPlan
from schedsearch.measure import Builder, Runner
from schedsearch.measurement import Measurement, Resources, Verdict
from schedsearch.processes.builder import Built, Candidate
from schedsearch.session.race import Entrant, judged
from schedsearch.target import PRESETS, Target
from schedsearch.template import load_template, load_templates
from schedsearch.workload import Workload

RESULTS = Path(__file__).parent / "results"
INT8 = {"dtype": "int8", "epilogue": ("bias", "relu", {"requantise": {"to": "int8"}})}
DEPTHWISE = [  # channels, height and width, stride: MobileNetV1 and one layer more
    (32, 112, 1), (64, 112, 2), (128, 56, 1), (128, 56, 2), (256, 28, 1), (256, 28, 2), (512, 14, 1), (512, 14, 2),
    (1024, 7, 1), (144, 56, 1),
]  # fmt: skip
ONE_ROW = [(1000, 2048), (4096, 4096), (4096, 25088), (2304, 768), (768, 3072)]  # n, k
SUITES: dict[str, list[Workload]] = {
    "fp16": [square(*shape) for shape in SHAPES],
    "int8": [square(*shape).replace(**INT8) for shape in SHAPES[:10]],
    "depthwise": [
        schedsearch.depthwise_conv2d(n=32, h=size, w=size, c=c, r=3, s=3, stride=stride, padding=1)
        for c, size, stride in DEPTHWISE
    ],
    "gemv": [schedsearch.dense(m=1, n=n, k=k) for n, k in ONE_ROW],
}


def rows_of_suites(names: list[str]) -> list[dict[str, Any]]:
    """A candidate of each layer of some suites."""
    tuned = {row["workload"]: row for row in json.loads((RESULTS / "conv2d_fp16_h200.json").read_text())["rows"]}
    rows = []
    for name in names:
        for workload in SUITES[name]:
            row = {"suite": name, "workload": json.loads(workload.json)}
            known = tuned.get(workload.label)
            rows.append({**row, **({key: known[key] for key in ("template", "config")} if known else default_of(workload))})
    return rows


def default_of(workload: Workload) -> dict[str, Any]:
    """The first template that takes a workload, and its default configuration."""
    target = PRESETS["h200"]
    takers = (each for each in load_templates().values() if each.kind == "cuda" and workload.op in each.ops)
    template = next(each for each in takers if not each.validate(workload, target))
    return {
        "template": template.name,
        "config": dict(template.default(workload, target, template.space(workload, target))),
    }


def rows_of_templates(each: int, words: list[str]) -> list[dict[str, Any]]:
    """The first candidates of each template whose name contains one of `words`."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in machine_code.candidates():
        if any(word in row["template"] for word in words):
            found.setdefault(row["template"], []).append(row)
    return [row for rows in found.values() for row in rows[:each]]


def built(row: dict[str, Any], target: Target) -> Built:
    """Raises CompileError or RejectedError."""
    template = load_template(row["template"])
    made = compile_source(template.kernel(workload_of(row), target, template.current(row["config"])), target)
    return Built(made.artifact, made.resources, made.canonical_hash, 0.0)


def workload_of(row: dict[str, Any]) -> Workload:
    return Workload.from_json(json.dumps(row["workload"]))


def kernel_of(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its kernel, or with the reason why there is none."""
    try:
        artifact = built(row, PRESETS["h200"]).artifact
    except (CompileError, RejectedError) as error:
        return {**row, "refused": str(error)}
    return {**row, "plan": artifact.plan.to_json(), "code": base64.b64encode(artifact.code).decode()}


def build(path: Path, rows: list[dict[str, Any]]) -> None:
    with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count() or 1)) as pool:
        kernels = pool.map(kernel_of, rows, chunksize=1)
    path.write_text(json.dumps({"toolchain": toolchain("cuda"), "kernels": kernels}) + "\n")
    refused = sum("refused" in kernel for kernel in kernels)
    print(f"{len(kernels)} kernels, {refused} refused, {path.stat().st_size / 1e6:.1f} MB")


def built_here(rows: list[dict[str, Any]], target: Target) -> list[Built | Measurement]:
    """The kernels by this toolchain, or why there is none, with all cores."""
    with Builder(target, timeout_s=120) as builder:
        tokens = [
            builder.submit(Candidate(workload_of(row), template, template.current(row["config"])))
            for row in rows
            for template in [load_template(row["template"])]
        ]
        results = dict(builder.drain())
    return [results[token] for token in tokens]


def of_file(row: dict[str, Any]) -> Built:
    artifact = Artifact(base64.b64decode(row["code"]), LaunchPlan.from_json(row["plan"]))
    return Built(artifact, Resources(), sha256_hex(row["code"]), 0.0)


def raced(runner: Runner, row: dict[str, Any], own: Built | Measurement | str) -> dict[str, Any]:
    """The row's kernel of the file, and that of this toolchain or of another file, in one race; a text says why none is."""
    found = {**({"suite": row["suite"]} if "suite" in row else {}), "template": row["template"]}
    found["workload"] = workload_of(row).label
    if "refused" in row:
        return {**found, "problem": f"the other toolchain: {row['refused']}"}
    if isinstance(own, Measurement | str):
        return {**found, "problem": f"this toolchain: {own if isinstance(own, str) else own.message}"}
    other = of_file(row)
    here, there = runner.race(workload_of(row), [own, other])
    if not here.ok or not there.ok:
        return {**found, "problem": here.message or there.message}
    entrants = [Entrant(name, Config(), measured) for name, measured in (("here", here), ("there", there))]
    assert here.time_ns is not None and there.time_ns is not None
    return {
        **found,
        "here_ns": here.time_ns,
        "there_ns": there.time_ns,
        "ratio": here.time_ns / there.time_ns,
        "differ": Verdict.TIED not in judged(entrants),
    }


def race(path: Path, against: Path | None, out: str | None, time_s: float) -> None:
    data, target = json.loads(path.read_text()), schedsearch.detect("cuda")
    here = json.loads(against.read_text()) if against else {"toolchain": toolchain("cuda"), "kernels": []}
    began, rows = time.monotonic(), []
    owns: list[Any] = [row.get("refused") or of_file(row) for row in here["kernels"]] if against else []
    owns = owns or built_here(data["kernels"], target)
    with Runner(target) as runner:
        for row, own in zip(data["kernels"], owns):
            if time.monotonic() - began > time_s:
                print(f"{len(data['kernels']) - len(rows)} kernels are left out: the time is over")
                break
            rows.append(raced(runner, row, own))
            common.write(out, {**common.facts(), "here": here["toolchain"], "there": data["toolchain"], "rows": rows})
    timed = [row for row in rows if "ratio" in row]
    lines = [
        [row["template"], row["workload"], f"{row['here_ns'] / 1e3:.2f}", f"{row['there_ns'] / 1e3:.2f}",
         f"{row['ratio']:.3f}", "yes" if row["differ"] else ""]
        for row in timed
    ]  # fmt: skip
    print(common.table(["template", "workload", "here, us", "there, us", "here / there", "differ"], lines))
    for row in rows:
        if "problem" in row:
            print(f"{row['template']}: {row['problem'][:300]}")
    print(f"here {here['toolchain']}, there {data['toolchain']}")
    for suite in dict.fromkeys(row.get("suite") for row in timed):
        ratios = [row["ratio"] for row in timed if row.get("suite") == suite]
        mean = common.geometric_mean(ratios)
        print(f"here / there: {mean:.3f} in the geometric mean over {len(ratios)} {suite or 'template'} kernels")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("build", "race"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--against", type=Path, metavar="FILE", help="race against the kernels of this file")
    parser.add_argument("--out", help="also write the data here")
    parser.add_argument("--time", type=float, default=300.0, help="seconds, after which no race begins")
    parser.add_argument("--suites", nargs="+", default=[], choices=SUITES, help="build kernels of these layers")
    parser.add_argument("--templates", nargs="+", default=[""], metavar="WORD", help="build kernels of these templates")
    parser.add_argument("--each", type=int, default=1, help="kernels of each template")
    options = parser.parse_args()
    if options.action == "build":
        rows = rows_of_suites(options.suites) if options.suites else rows_of_templates(options.each, options.templates)
        build(options.file, rows)
    else:
        race(options.file, options.against, options.out, options.time)


if __name__ == "__main__":
    main()
