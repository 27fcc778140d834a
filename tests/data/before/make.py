"""Writes what a run leaves behind with the schedsearch at hand: a database with a user's kernel, an exchange
file, a report.

The files here were written by an earlier version, and later ones must open them. The code is for any x86-64 processor.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from kernels import smooth

import schedsearch
from schedsearch.measurement import Measurement, Outcome, Record
from schedsearch.records.store import Store

FOLDER = Path(__file__).parent
BASELINE = {"64bit", "cmov", "cx8", "fxsr", "mmx", "sse", "sse2", "x87"}  # features of every x86-64 processor


def main() -> None:
    features = llvm.get_host_cpu_features()
    features.update({name: name in BASELINE for name in features})
    llvm.get_host_cpu_features = lambda: features
    llvm.get_host_cpu_name = lambda: "x86-64"
    target = replace(schedsearch.detect("cpu"), name="any", sms=1, simd_bits=128)
    x = np.zeros(1000, np.float32)
    workload = smooth.workload(x, 0.5, x.copy())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own_kernel.db"
        with schedsearch.compile(workload, path, target=target, allow=("default",)) as kernel:
            measured = Measurement(Outcome.OK, times_ns=(4000.0, 4100.0, 4200.0), max_error=0.0, build_s=0.5, run_s=0.25)
            found: Any = kernel.provenance
            record = Record(
                workload=workload, target=target.key, template=found.template, template_version=1, config=found.config,
                measurement=measured, run="20260101T000000-00000000", started_at=1.7e9, finished_at=1.7e9 + 1,
                artifact=kernel.artifact.sha256,
            )  # fmt: skip
            with Store.open(path) as store:
                store.promote(store.append(record), kernel.artifact)
        with sqlite3.connect(path) as connection:
            (FOLDER / "own_kernel.sql").write_text("\n".join(connection.iterdump()) + "\n")
        run: list[Any] = [sys.executable, "-m", "schedsearch"]
        subprocess.run([*run, "records", "export", "--db", path, "--artifacts", FOLDER / "records.jsonl"], check=True)
        subprocess.run([*run, "report", "-o", FOLDER / "report.json", path], check=True)
        report = FOLDER / "report.json"
        report.write_text(report.read_text().replace(folder, "FOLDER"))


if __name__ == "__main__":
    main()
