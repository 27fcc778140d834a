"""Fits how much sooner kernel calls are in a network than alone, from networks whose times were measured.

    python benchmarks/network_predictions.py benchmarks/results/chain_times_h200.json

The file is one of `chain_times.py`: of each network the sums of its kernels' times in each mode of timing, its number of
calls, and its time in a CUDA graph whose kernels begin early. `call_ns` of `network.residency.SAVINGS` and `behind_ns` of
`NEIGHBOURS` are those with the least squares of relative errors. The nanoseconds of a byte from the cache were fitted to a
network of batch 32 and stay. The last column of a mode is the error of a network that is left out of the fit.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import common
import numpy as np
import onnx_models

from schedsearch.measurement import CHAIN_GRAPH, COLD_GRAPH, COLD_GRAPH_PREPARED
from schedsearch.network.costs import costs_of
from schedsearch.network.lower import lower
from schedsearch.network.model import read_model
from schedsearch.network.plan import best_plan
from schedsearch.network.residency import SAVINGS, Residency
from schedsearch.target import PRESETS

TARGET = PRESETS["h200"]
BYTE_US = SAVINGS["NVIDIA H200"].ns_per_byte / 1e3
Numbers = np.ndarray[Any, np.dtype[np.float64]]


def cached_bytes(case: str) -> int:
    """The bytes of arrays that the calls of a network NAME:BATCH:FORMAT read from the cache."""
    with tempfile.TemporaryDirectory() as folder:
        path = onnx_models.saved(case, Path(folder))
        network = lower(read_model(path), dtype="float16").with_io_layout("NHWC")
        with costs_of(network, path.with_name("none.db"), TARGET, COLD_GRAPH) as costs:
            plan = best_plan(network, costs)
    counts = Counter([*plan.implementations.values(), *(each.workload for each in plan.conversions)])
    residency = Residency.of(network, TARGET, COLD_GRAPH)
    return sum(count * residency.cached_bytes(workload) for workload, count in counts.items())


def fitted(alone: Numbers, calls: Numbers, measured: Numbers) -> float:
    """Microseconds that each call takes less in the network than alone; least squares of relative errors."""
    scaled = (calls / measured)[:, None]
    return float(np.linalg.lstsq(scaled, (alone - measured) / measured, rcond=None)[0][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    rows = json.loads(parser.parse_args().file.read_text(encoding="utf-8"))["rows"]
    calls, measured = (np.array([row[key] for row in rows], float) for key in ("calls", "network_us"))
    cold, chain = (np.array([row["sums_us"][mode] for row in rows]) for mode in (COLD_GRAPH_PREPARED, CHAIN_GRAPH))
    cold_cached = cold - BYTE_US * np.array([cached_bytes(row["case"]) for row in rows])
    columns: list[list[str]] = [[f"{time:.1f}" for time in measured]]
    for name, sums, alone in (("call_ns", cold, cold_cached), ("behind_ns", chain, chain)):
        call_us = fitted(alone, calls, measured)
        print(f"{name} {1e3 * abs(call_us):.0f}")
        unseen = []
        for place in range(len(rows)):
            others = np.arange(len(rows)) != place
            unseen.append(alone[place] - calls[place] * fitted(alone[others], calls[others], measured[others]))
        for times in (sums, alone - calls * call_us, np.array(unseen)):
            columns.append([f"{100 * error:+.1f} %" for error in times / measured - 1])
    header = ["network", "us", "cold", "predicted", "left out", "chain", "predicted", "left out"]
    print(common.table(header, [[row["case"], *cells] for row, cells in zip(rows, zip(*columns, strict=True), strict=True)]))


if __name__ == "__main__":
    main()
