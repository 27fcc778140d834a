"""The tables of both compilers, of all cards, and of loads by TMA, for `render_tables`."""

from __future__ import annotations

from typing import Any

import compilers
import targets
from common import geometric_mean
from table_text import markdown


def _origin(data: dict[str, Any], name: str) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in data["toolchain"].items())
    commands = data["command"].replace("\n", "\n    ")
    said = f"\n\n{data['note']}" if "note" in data else ""
    return f"{versions}.\n\nData: `benchmarks/results/{name}.json`, made by\n\n    {commands}{said}"


def code(data: dict[str, Any]) -> str:
    head, cells = compilers.summary(data)
    total = f"{len(data['rows'])} candidates, compiled for an {data['target'].upper()}."
    table = markdown(head, [[f"`{name}`", *others] for name, *others in cells])
    return f"{table}\n\n{total} {_origin(data, 'compilers')}"


def counts(data: dict[str, Any]) -> str:
    head, cells = compilers.counts(data)
    return markdown(head, [[f"`{name}`", *others] for name, *others in cells])


def times(data: dict[str, Any]) -> str:
    """Of `toolchains.py`: here is numba-cuda, there numba-cuda-mlir."""
    timed = [row for row in data["rows"] if "ratio" in row]
    rows = [
        [f"`{row['template']}`", row["workload"], f"{row['here_ns'] / 1e3:.2f}", f"{row['there_ns'] / 1e3:.2f}",
         f"{row['there_ns'] / row['here_ns']:.3f}", "yes" if row["differ"] else ""]
        for row in timed
    ]  # fmt: skip
    head = ["template", "workload", "numba-cuda, us", "numba-cuda-mlir, us", "ratio", "more than noise"]
    failed = [f"- `{row['template']}`: {row['problem']}" for row in data["rows"] if "problem" in row]
    said = []
    for suite in dict.fromkeys(row.get("suite") for row in timed):
        ratios = [row["there_ns"] / row["here_ns"] for row in timed if row.get("suite") == suite]
        kernels = f"{len(ratios)} kernels" + (f" of {suite}" if suite else "")
        said.append(f"- {kernels}: {geometric_mean(ratios):.3f}")
    made = ", ".join(f"{package} {version}" for package, version in (data["here"] | data["there"]).items())
    means = "Ratios are numba-cuda-mlir over numba-cuda; their geometric means:\n\n" + "\n".join(said)
    return "\n\n".join(filter(None, [markdown(head, rows), means, "\n".join(failed), f"{made}."]))


def cards(data: dict[str, Any]) -> str:
    head, cells, reasons = targets.summary(data)
    refused = "No kernel, because:\n\n" + "\n".join(reasons)
    return f"{markdown(head, cells)}\n\n{refused}\n\n{_origin(data, 'targets')}"


def loads(data: dict[str, Any]) -> str:
    """Of `mma_loads.py`."""
    timed = [row for row in data["rows"] if "problem" not in row]
    ratios = [row["copies"]["ns"] / row["tma"]["ns"] for row in timed]
    rows = [
        [row["workload"].removeprefix("conv2d ").removesuffix(" f16 NHWC"), f"{row['copies']['ns'] / 1e3:.2f}",
         f"{row['tma']['ns'] / 1e3:.2f}", f"{ratio:.2f}", str(row["configurations"])]
        for row, ratio in zip(timed, ratios)
    ]  # fmt: skip
    failed = [f"- {row['workload']}: {row['problem']}" for row in data["rows"] if "problem" in row]
    said = f"Geometric mean of the ratios over {len(timed)} layers: {geometric_mean(ratios):.3f}."
    head = ["layer", "cp.async, us", "TMA, us", "ratio", "configurations with TMA"]
    return "\n\n".join(filter(None, [markdown(head, rows), said, "\n".join(failed)]))


def build_times(data: dict[str, Any]) -> str:
    """Of `build_speed.py`: a column for each compiler."""
    names = list(dict.fromkeys(row["compiler"] for row in data["rows"]))
    found = {(row["compiler"], row["how"]): row for row in data["rows"]}
    said = {
        "alone": "first of its shape", "shared": "next ones of its shape, cache empty", "cached": "later run of a search",
        "kept": "served again, code in the build cache",
    }  # fmt: skip
    rows = [
        [text, *(f"{found[name, how]['median_s']:.2f}" for name in names)]
        for how, text in said.items()
        if all((name, how) in found for name in names)
    ]
    template = data["rows"][0]["template"]
    table = markdown([f"CPU seconds of a candidate of `{template}`, median", *names], rows)
    commands = data["command"].replace("; ", "\n    ")
    return f"{table}\n\n{data['cpus']} cores. Data: `benchmarks/results/compile_times.json`, made by\n\n    {commands}"
