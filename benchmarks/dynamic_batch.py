"""A dynamic batch beside kernels that were tuned for each batch alone, in one run.

Each convolution of ResNet-50 is tuned once as a range n = 1 to 64, and then at sizes that the range was not tuned for, each
alone, with the trials of one size. Both kernels of a size are timed in turns. Layers are done as long as `--time` lasts; the
data file keeps those of earlier runs.

    python benchmarks/dynamic_batch.py --networks networks.json --out dynamic_batch.json --trials 64 --time 90
    python benchmarks/dynamic_batch.py --layers 14,14,256,256,3,1,1 --sizes 3,21 --trials 8 --target cpu

Needs a device of the target. `networks.json` is the file of benchmarks/conv2d_fp16.py. With torch, the host time that a call
of the range's kernel takes beyond that of the size's kernel is measured, too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

import schedsearch
from schedsearch.device.detect import detect
from schedsearch.launch import Artifact
from schedsearch.measure import Runner
from schedsearch.measurement import Resources
from schedsearch.processes.builder import Built
from schedsearch.records.store import Store
from schedsearch.size_table import SizeTable
from schedsearch.target import Target

LOW, HIGH = 1, 64
SIZES = (3, 5, 7, 9, 11, 13, 18, 21, 26, 29, 35, 39, 45, 51, 57, 63)
CALLS, ROUNDS = 2000, 9


def layer(text: str) -> schedsearch.Workload:
    """h,w,c,k,kernel,stride,padding with bias and relu."""
    h, w, c, k, kernel, stride, padding = map(int, text.split(","))
    return schedsearch.Workload.conv2d(
        n=LOW, h=h, w=w, c=c, k=k, r=kernel, s=kernel, stride=stride, padding=padding, epilogue=("bias", "relu")
    )


def batches(text: str) -> list[int]:
    """Numbers of a range's sizes, separated by commas."""
    found = [int(size) for size in text.split(",")]
    if wrong := [size for size in found if not LOW <= size <= HIGH]:
        raise argparse.ArgumentTypeError(f"{wrong[0]} is not in the range; allowed: {LOW} to {HIGH}")
    return found


def resnet50(path: str) -> list[schedsearch.Workload]:
    """The distinct convolutions, the most frequent first."""
    found: dict[str, int] = {}
    for h, w, c, k, r, _, stride, _, padding, *rest in json.loads(Path(path).read_text())["resnet50"]["layers"]:
        found[f"{h},{w},{c},{k},{r},{stride},{padding}"] = rest[-1]
    return [layer(text) for text in sorted(found, key=lambda text: -found[text])]


def raced(runner: Runner, workload: schedsearch.Workload, one: Artifact, other: Artifact) -> tuple[float, float]:
    """Microseconds of two kernels of a workload, timed in turns."""
    built = [Built(artifact, Resources(), str(number), 0.0) for number, artifact in enumerate((one, other))]
    times = runner.race(workload, built)
    if bad := [each.message for each in times if each.time_ns is None]:
        raise RuntimeError(f"{workload.label}: {bad[0]}")
    return times[0].time_ns / 1e3, times[1].time_ns / 1e3  # type: ignore[operator]


def best_artifact(db: str, workload: schedsearch.Workload, target: Target) -> Artifact:
    with Store.open(db, create=False) as store:
        record = store.best(workload, target.key, "cold-graph-v1")
        artifact = store.artifact(record.artifact) if record and record.artifact else None
    if artifact is None:
        raise RuntimeError(f"no kernel for {workload.label}")
    return artifact


def measured(workload: schedsearch.Workload, sizes: list[int], target: Target, trials: int, ends_s: float) -> dict[str, Any]:
    """One layer: tuned as a range, and at each size alone as far as the time goes."""
    of_range = workload.with_dynamic("n", LOW, HIGH)
    with tempfile.TemporaryDirectory() as folder:
        db, apart = f"{folder}/range.db", f"{folder}/apart.db"
        began = time.perf_counter()
        summary = schedsearch.tune([of_range], db, target=target, trials=trials)
        took_s = time.perf_counter() - began
        (found,) = summary.ranges
        if found.table is None:
            return {"layer": of_range.label, "problem": found.problem}
        alone, apart_s = [], 0.0
        for size in sizes:
            began = time.perf_counter()
            if time.perf_counter() + apart_s > ends_s:
                break
            schedsearch.tune([workload.replace(n=size)], apart, target=target, trials=trials)
            alone.append(size)
            apart_s = time.perf_counter() - began
        rows = []
        with Runner(target) as runner:
            for size in alone:
                at = workload.replace(n=size)
                pair = found.table.kernel_for(size).artifact(size), best_artifact(apart, at, target)
                range_us, alone_us = raced(runner, at, *pair)
                rows.append({"n": size, "range_us": range_us, "alone_us": alone_us, "ratio": range_us / alone_us})
        dispatch_us = dispatch(of_range, db, target)
    text, code = found.table.to_bytes()
    return {
        "layer": of_range.label, "sizes": rows, "trials": summary.new_trials + found.trials, "trials_of_one_size": trials,
        "tuning_s": took_s, "table_bytes": len(text) + len(code), "kernels": len(found.table.kernels),
        "serves": stretches(found.table), "gains": found.table.gains, "dispatch_us": dispatch_us,
    }  # fmt: skip


def stretches(table: SizeTable) -> list[list[Any]]:
    return [
        [low, high, table.kernels[index].template, dict(table.kernels[index].config)] for low, high, index in table.serves
    ]


def dispatch(of_range: schedsearch.WorkloadRange, db: str, target: Target) -> float | None:
    """Host microseconds that a call of a range's kernel takes beyond a call of the size's kernel; None without torch."""
    try:
        import torch
    except ImportError:
        return None
    with schedsearch.compile(of_range, db, target=target) as kernel:
        size = of_range.low
        formats = {"float16": torch.float16, "float32": torch.float32}
        arrays = [
            torch.zeros(spec.shape, dtype=formats[spec.dtype], device=target.kind) for spec in of_range.at(size).signature
        ]
        fixed = kernel.at(size)
        for _ in range(20):
            kernel(*arrays), fixed(*arrays)
        pairs = [(host_us(lambda: kernel(*arrays)), host_us(lambda: fixed(*arrays))) for _ in range(ROUNDS)]
    return statistics.median(one - other for one, other in pairs)


def host_us(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - began) / CALLS * 1e6


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if "problem" in row:
            print(f"{row['layer']}: {row['problem']}")
            continue
        print(
            f"\n{row['layer']}: {row['trials']} trials ({row['trials_of_one_size']} of one size), {row['tuning_s']:.0f} s, "
            f"{row['kernels']} kernels, {row['table_bytes'] / 1e3:.0f} KB, dispatch {row['dispatch_us']} us"
        )
        cells = [
            [each["n"], *(f"{each[name]:.{digits}f}" for name, digits in (("range_us", 2), ("alone_us", 2), ("ratio", 3)))]
            for each in row["sizes"]
        ]
        print(common.table(["n", "range us", "alone us", "ratio"], cells))
    ratios = [each["ratio"] for row in rows for each in row.get("sizes", ())]
    if ratios:
        mean = common.geometric_mean(ratios)
        print(f"\n{len(ratios)} sizes: geometric mean {mean:.3f}, largest {max(ratios):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", metavar="FILE", help="networks.json; its ResNet-50 gives the layers")
    parser.add_argument("--layers", nargs="+", type=layer, default=[], metavar="H,W,C,K,KERNEL,STRIDE,PADDING")
    parser.add_argument("--sizes", type=batches, default=list(SIZES), help="batches that are tuned alone, too, e.g. 3,21")
    parser.add_argument("--trials", type=int, default=64, help="of one size")
    parser.add_argument("--time", type=float, default=float("inf"), help="seconds after which no new layer begins")
    parser.add_argument("--dtype", default=None, help="default: float16, on a CPU float32")
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--out", metavar="FILE")
    options = parser.parse_args()
    began = time.perf_counter()
    target = detect(options.target)
    layers = options.layers or (resnet50(options.networks) if options.networks else [])
    if not layers:
        parser.error("give --layers or --networks")
    dtype = options.dtype or ("float16" if target.kind == "cuda" else "float32")
    rows: list[dict[str, Any]] = []
    if options.out and Path(options.out).exists():
        rows = [row for row in json.loads(Path(options.out).read_text())["rows"] if "problem" not in row]
    known = {row["layer"] for row in rows}
    for workload, number in zip(layers, itertools.count()):
        workload = workload.replace(dtype=dtype)
        label = workload.with_dynamic("n", LOW, HIGH).label
        if label in known:
            continue
        if number and time.perf_counter() - began > options.time:
            break
        try:
            rows.append(measured(workload, options.sizes, target, options.trials, began + options.time))
        except Exception as error:  # the other layers go on, and a later run tries this one again
            rows.append({"layer": label, "problem": f"{type(error).__name__}: {error}"})
        common.write(options.out, {"rows": rows})
    show(rows)


if __name__ == "__main__":
    main()
