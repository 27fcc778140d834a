"""Compares the machine code of both compilers: instructions, registers, spills and the time that it takes to make it.

The candidates are the first of `machine_code.py`, a few of every CUDA template. Both compilers must be installed, and
nvdisasm must be found (PATH, or --nvdisasm). No GPU is needed. Times are those of the processor, of one process, without
the build cache; numba-cuda shares work between kernels of the same shape, of which a process sees some. With --resume the
candidates of the file stay as they are, and only others are compiled.

Run: python benchmarks/compilers.py --out benchmarks/results/compilers.json [--each 5] [--time 1500] [--resume]
     python benchmarks/compilers.py --show benchmarks/results/compilers.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import machine_code
from common import facts, table, write

from schedsearch import Workload, load_templates
from schedsearch.backend import CompileError, RejectedError, compile_source, toolchain
from schedsearch.target import PRESETS

COMPILERS = ("numba-cuda", "numba-cuda-mlir")
TENSOR = ("HGMMA", "IGMMA", "QGMMA", "HMMA", "IMMA", "QMMA")
COPIES = ("UTMALDG", "UTMASTG", "LDGSTS")
LOCAL = ("LDL", "STL")
COUNTED = (*TENSOR, *COPIES, *LOCAL)


def instructions(cubin: bytes, nvdisasm: str) -> dict[str, int]:
    """Opcode -> how often it is in the code, for those of `COUNTED`; and `all`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", text, flags=re.MULTILINE)
    counts = Counter(found)
    return {"all": len(found) - counts["NOP"], **{name: counts[name] for name in COUNTED if counts[name]}}


def compared(given: tuple[dict[str, Any], str]) -> dict[str, Any]:
    """The candidate with what each compiler made of it."""
    row, nvdisasm = given
    made = dict[str, Any]()
    for compiler in COMPILERS:
        os.environ["SCHEDSEARCH_COMPILER"] = compiler
        target, template = PRESETS["h200"], load_templates([row["template"]])[row["template"]]
        source = template.kernel(Workload.from_json(json.dumps(row["workload"])), target, template.current(row["config"]))
        started = time.process_time()
        try:
            built = compile_source(source, target)
        except (CompileError, RejectedError) as error:
            made[compiler] = {"refused": f"{type(error).__name__}: {error}"[:300]}
            continue
        took_s = time.process_time() - started
        made[compiler] = {
            "instructions": instructions(built.artifact.code, nvdisasm),
            "registers": built.resources.registers,
            "spill_bytes": built.resources.spill_bytes,
            "local_bytes": built.resources.local_bytes,
            "shared_bytes": built.resources.shared_bytes,
            "cpu_s": round(took_s, 3),
            "shared": built.shared,
        }
    return {**row, "by": made}


def differences(row: dict[str, Any]) -> list[str]:
    """What the code of the compilers differs in."""
    one, other = (row["by"][compiler] for compiler in COMPILERS)
    if "refused" in one or "refused" in other:
        reasons = (one.get("refused", ""), other.get("refused", ""))
        return [] if all(reasons) else [f"only {COMPILERS[not reasons[0]]} refuses"]
    names = [name for name in COUNTED if one["instructions"].get(name, 0) != other["instructions"].get(name, 0)]
    return names + [name for name in ("spill_bytes", "shared_bytes") if one[name] != other[name]]


def summary(result: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Head and cells of a table, a row for each template."""
    rows = result["rows"]
    cells = []
    for name in dict.fromkeys(row["template"] for row in rows):
        own = [row for row in rows if row["template"] == name]
        both = [row["by"] for row in own if not any("refused" in row["by"][each] for each in COMPILERS)]
        only = [sum("refused" in row["by"][each] for row in own) for each in COMPILERS]

        def ratio(key: Any, both: list[Any] = both) -> str:
            pairs = [(key(by[COMPILERS[1]]), key(by[COMPILERS[0]])) for by in both]
            parts = [other / max(one, 1e-9) for other, one in pairs if other is not None and one is not None]
            return f"{statistics.geometric_mean(parts):.2f}" if parts else "-"

        tensor = [row for row in own if any(name in TENSOR + COPIES for name in differences(row))]
        local = [row for row in own if any(name in LOCAL or name == "spill_bytes" for name in differences(row))]
        cells.append(
            [
                name, len(own), *only, len(tensor), len(local), ratio(lambda made: made["instructions"]["all"]),
                ratio(lambda made: made["registers"]), ratio(lambda made: made["cpu_s"]),
            ]
        )  # fmt: skip
    head = [
        "template", "candidates", "refused: numba-cuda", "mlir", "other tensor or copy instructions", "other local memory",
        "instructions", "registers", "CPU time",
    ]  # fmt: skip
    return head, cells


def counts(result: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Head and cells of a table of instructions, a row for each template: "numba-cuda / numba-cuda-mlir", summed over the
    candidates that both compile; one number where they agree. And registers of the largest kernel, and bytes of spills."""
    cells = []
    for name in dict.fromkeys(row["template"] for row in result["rows"]):
        made = [[row["by"][each] for each in COMPILERS] for row in result["rows"] if row["template"] == name]
        made = [both for both in made if not any("refused" in each for each in both)]
        sums = [[sum(both[number]["instructions"].get(each, 0) for both in made) for number in (0, 1)] for each in COUNTED]
        most = [max(both[number]["registers"] or 0 for both in made) for number in (0, 1)]
        spills = [sum(both[number]["spill_bytes"] or 0 for both in made) for number in (0, 1)]
        cells.append([name, *(_side_by_side(*pair) for pair in (*sums, most, spills))])
    shown = [number for number in range(len(cells[0])) if any(row[number] for row in cells)]
    head = ["template", *COUNTED, "registers", "bytes of spills"]
    return [head[number] for number in shown], [[row[number] for number in shown] for row in cells]


def _side_by_side(one: int, other: int) -> str:
    return f"{one} / {other}" if one != other else str(one or "")


def chosen_rows(each: int) -> list[dict[str, Any]]:
    """The first `each` candidates of every template, so ordered that every beginning holds all templates alike."""
    numbered = Counter[str]()
    found = []
    for row in machine_code.candidates():
        if numbered[row["template"]] < each:
            found.append((numbered[row["template"]], row))
        numbered[row["template"]] += 1
    return [row for _, row in sorted(found, key=lambda pair: pair[0])]


def key(row: dict[str, Any]) -> str:
    return json.dumps([row["template"], row["workload"], row["config"]], sort_keys=True)


def begun(file: Path, versions: dict[str, str]) -> dict[str, Any]:
    """What an earlier run has written, with this run's command behind its own.

    Raises:
        SystemExit: it had other compilers.
    """
    earlier: dict[str, Any] = json.loads(file.read_text())
    if earlier["toolchain"] != versions:
        sys.exit(f"{file} was made with {earlier['toolchain']}; here are {versions}. Leave out --resume")
    return {**earlier, "command": f"{earlier['command']}\n{facts()['command']}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="FILE")
    parser.add_argument("--show", metavar="FILE", type=Path, help="only print the table of such a file")
    parser.add_argument("--each", type=int, default=5, help="candidates of each template")
    parser.add_argument("--time", type=float, default=1e9, metavar="S", help="begin no candidate after so many seconds")
    parser.add_argument("--resume", action="store_true", help="compile only the candidates that --out does not have")
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--templates", metavar="WORD", nargs="+", default=[""])
    parser.add_argument("--nvdisasm", default=shutil.which("nvdisasm"))
    args = parser.parse_args()
    if args.show:
        print(table(*summary(json.loads(args.show.read_text()))))
        return
    if args.resume and not (args.out and Path(args.out).exists()):
        parser.error("--resume needs --out with the file of an earlier run")
    if args.nvdisasm is None:
        sys.exit("nvdisasm is not in PATH; pip install nvidia-cuda-nvdisasm, or give --nvdisasm")
    os.environ["SCHEDSEARCH_BUILD_CACHE"] = "off"
    stop = time.monotonic() + args.time
    given = [row for row in chosen_rows(args.each) if any(word in row["template"] for word in args.templates)]
    versions = {}
    for compiler in COMPILERS:
        os.environ["SCHEDSEARCH_COMPILER"] = compiler
        versions |= toolchain("cuda")
    result: dict[str, Any] = {**facts(), "toolchain": versions, "target": "h200", "rows": []}
    if args.resume:
        result = begun(Path(args.out), versions)
        known = {key(row) for row in result["rows"]}
        given = [row for row in given if key(row) not in known]
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        for row in pool.imap(compared, [(row, args.nvdisasm) for row in given], chunksize=1):
            result["rows"].append(row)
            said = differences(row)
            print(
                len(result["rows"]),
                row["template"],
                *said,
                *[row["by"][each].get("refused", "") for each in COMPILERS],
                flush=True,
            )
            if len(result["rows"]) % 10 == 0:
                write(args.out, result)
            if time.monotonic() > stop:
                pool.terminate()
                break
    write(args.out, result)
    print(table(*summary(result)))


if __name__ == "__main__":
    main()
