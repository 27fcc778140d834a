"""Which x is best in NCHW[x]c? int8 layers of ResNet-50 with their channels in blocks of x, for every x, at batch 1 and 32.

    python benchmarks/conv2d_blocks.py --networks networks.json --trials 50
    python benchmarks/conv2d_blocks.py --networks networks.json --batch 1 --x 32 --x C --out blocks_h200.json

x and y are NCHW[x]c, the weight is OIHW[x]o[x]i; x = C is the limit NHWC. int8 to int8 with bias, relu and requantisation.
A layer whose channels x does not divide has no row for it. Every row has the fastest time of each template, so that dp4a
(conv2d_simt) can be compared with tensor cores, and the fastest for each value of the knob `batch` (`bound` to the grid, or
`folded` into the pixels) where a template has it. Times are those of the search: cold, in a CUDA graph.

Needs a CUDA device. Trials count across runs with one database.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import common
from convolutions import network_layers

import schedsearch
from schedsearch.errors import SchedsearchError
from schedsearch.measurement import COLD_GRAPH, Outcome
from schedsearch.records.store import Store

XS = ("4", "8", "16", "32", "64", "C")
PARAMS = {"dtype": "int8", "epilogue": ("bias", "relu", {"requantise": {"to": "int8"}})}


def blocked(workload: schedsearch.Workload, x: str) -> schedsearch.Workload | None:
    """The layer with blocks of x channels, or None if x does not divide its channels."""
    if x == "C":
        return workload.replace(**PARAMS)
    size = int(x)
    if workload.c % size or workload.k % size:
        return None
    return workload.replace(**PARAMS, layout=f"NCHW{x}c", weight_layout=f"OIHW{x}o{x}i")


def layers(path: str, batches: Sequence[int]) -> list[schedsearch.Workload]:
    """ResNet-50's convolutions, each once for every batch size."""
    found = [workload for workload, network, _ in network_layers(path) if network == "resnet50 batch 1"]
    return [workload.replace(n=batch) for batch in batches for workload in dict.fromkeys(found)]


def fastest(workload: schedsearch.Workload, db: str) -> dict[str, Any]:
    """The fastest verified times in microseconds: over all, by template, and by the knob `batch`."""
    row: dict[str, Any] = {"template_us": {}, "batch_us": {}}
    with Store.open(db, create=False, readonly=True) as store:
        for record in store.rows(workload, mode=COLD_GRAPH, outcomes={Outcome.OK}):
            assert record.measurement.time_ns is not None
            us, batch = record.measurement.time_ns / 1e3, record.config.get("batch")
            for times, key in ((row["template_us"], record.template), (row["batch_us"], batch)):
                if key is not None:
                    times[key] = min(us, times.get(key, us))
            if us < row.get("us", float("inf")):
                row |= {"us": us, "template": record.template, "config": dict(record.config)}
    return row


def winners(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Layer -> times by x, the best x, and how much slower the second-best x and x = 4 are."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if "us" in row:
            found.setdefault(row["layer"], {"times": {}})["times"][row["x"]] = row["us"]
    for entry in found.values():
        order = sorted(entry["times"], key=lambda x: entry["times"][x])
        entry["best"] = order[0]
        least = entry["times"][order[0]]
        if len(order) > 1:
            entry["second"] = entry["times"][order[1]] / least
        if "4" in entry["times"]:
            entry["four"] = entry["times"]["4"] / least
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    found = winners(rows)
    lines = [
        (
            layer,
            *(f"{entry['times'][x]:.2f}" if x in entry["times"] else "" for x in XS),
            entry["best"],
            f"{entry['second']:.2f}" if "second" in entry else "",
        )
        for layer, entry in found.items()
    ]
    return common.table(("layer, us", *(f"x = {x}" for x in XS), "best", "second / best"), lines)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", metavar="FILE", required=True, help="JSON file; see convolutions.network_layers")
    parser.add_argument("--batch", type=int, action="append", help="batch size; default: 1 and 32")
    parser.add_argument("--x", choices=XS, action="append", help="block of channels; default: all")
    parser.add_argument("--trials", type=int, default=50, help="per layer and x")
    parser.add_argument("--time", type=float, help="seconds of tuning over all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--db", default="benchmark.db")
    parser.add_argument("--out", help="JSON file to write")
    return parser.parse_args(words)


def main() -> None:
    options = arguments()
    pairs = [
        (layer, x, workload)
        for layer in layers(options.networks, options.batch or (1, 32))
        for x in options.x or XS
        if (workload := blocked(layer, x)) is not None
    ]
    started = time.perf_counter()
    summary = schedsearch.tune(
        [workload for _, _, workload in pairs], options.db, target="cuda", trials=options.trials, time_s=options.time,
        seed=options.seed,
    )  # fmt: skip
    rows = []
    for (layer, x, workload), task in zip(pairs, summary.tasks):
        row: dict[str, Any] = {"layer": layer.label, "x": x, "workload": workload.label, "trials": task.trials}
        try:
            row |= fastest(workload, options.db)
        except SchedsearchError as error:
            row["error"] = f"{type(error).__name__}: {error}"
        rows.append(row)
    common.write(options.out, {"rows": rows, "tuning_s": time.perf_counter() - started, "winners": winners(rows)})
    print(table(rows))
    print(summary.shares)


if __name__ == "__main__":
    main()
