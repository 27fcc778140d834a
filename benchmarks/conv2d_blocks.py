"""Which x is best in NCHW[x]c? int8 layers of ResNet-50 with their channels in blocks of x, for every x, at batch 1 and 32.

    python benchmarks/conv2d_blocks.py --networks networks.json --trials 50
    python benchmarks/conv2d_blocks.py --networks networks.json --batch 1 --x 32 --x C --x NCHW --out blocks.json
    python benchmarks/conv2d_blocks.py --networks networks.json --every 8 --trials 8 --time 60       each eighth layer

x and y are NCHW[x]c, the weight is OIHW[x]o[x]i; x = C is the limit NHWC. int8 to int8 with bias, relu and requantisation.
A layer whose channels x does not divide has no row for it. Every row has the fastest time of each template, so that dp4a
(conv2d_simt) can be compared with tensor cores, and the fastest for each value of the knob `batch` (`bound` to the grid, or
`folded` into the pixels) where a template has it. Times are those of the search: cold, in a CUDA graph.

NCHW is the plain layer, with weights in OIHW. Here kernels pack x themselves, and x is a knob of conv2d_packed. A second
table has conv2d_packed's fastest time for each x that the search tried, also of NHWC layers with odd channels.

Needs a CUDA device. Trials count across runs with one database. `--out` is written every few seconds
from the trials so far, and after an interrupt.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import common
from convolutions import network_layers

import schedsearch
from schedsearch.errors import Interrupted, SchedsearchError
from schedsearch.measurement import COLD_GRAPH, Outcome
from schedsearch.records.store import Store

XS = ("4", "8", "16", "32", "64", "C")
PLAIN = "NCHW"
PACKED_XS = ("16", "32", "64", "128", "C")  # values of conv2d_packed's knob x
PARAMS = {"dtype": "int8", "epilogue": ("bias", "relu", {"requantise": {"to": "int8"}})}


def blocked(workload: schedsearch.Workload, x: str) -> schedsearch.Workload | None:
    """The layer with blocks of x channels, or in plain NCHW; None if x does not divide its channels."""
    if x == PLAIN:
        return workload.replace(**PARAMS, layout="NCHW", weight_layout="OIHW")
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
    """The number of verified trials and their fastest times in microseconds: over all, by template, by the knob `batch`, and
    by conv2d_packed's `x`.
    """
    row: dict[str, Any] = {"trials": 0, "template_us": {}, "batch_us": {}, "packed_us": {}}
    with Store.open(db, create=False, readonly=True) as store:
        for record in store.rows(workload, mode=COLD_GRAPH, outcomes={Outcome.OK}):
            assert record.measurement.time_ns is not None
            row["trials"] += 1
            us, batch = record.measurement.time_ns / 1e3, record.config.get("batch")
            keys = {
                "template_us": record.template,
                "batch_us": batch,
                "packed_us": packed_x(workload, record.template, record.config),
            }
            for name, key in keys.items():
                if key is not None:
                    row[name][key] = min(us, row[name].get(key, us))
            if us < row.get("us", float("inf")):
                row |= {"us": us, "template": record.template, "config": dict(record.config)}
    return row


def packed_x(workload: schedsearch.Workload, template: str, config: Mapping[str, Any]) -> str | None:
    """The value of conv2d_packed's knob x, "C" if it has all channels; None without that knob."""
    if template != "conv2d_packed" or "x" not in config:
        return None
    return str(config["x"]) if config["x"] < workload.c else "C"


def winners(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Layer -> times by x, the best x, and how much slower the second-best x and x = 4 are."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if "us" in row and row["x"] in XS:
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


def packed_table(rows: Sequence[dict[str, Any]]) -> str:
    """conv2d_packed's fastest times by its knob x, and the fastest of all templates."""
    lines = [
        (
            row["layer"],
            "NHWC" if row["x"] == "C" else row["x"],
            *(f"{row['packed_us'][x]:.2f}" if x in row["packed_us"] else "" for x in PACKED_XS),
            f"{row['us']:.2f}",
            row["template"],
        )
        for row in rows
        if row.get("packed_us")
    ]
    return common.table(("layer, us", "layout", *(f"x = {x}" for x in PACKED_XS), "fastest", "template"), lines)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", metavar="FILE", required=True, help="JSON file; see convolutions.network_layers")
    parser.add_argument("--batch", type=int, action="append", help="batch size; default: 1 and 32")
    parser.add_argument("--x", choices=(*XS, PLAIN), action="append", help="block of channels, or plain NCHW; default: all")
    parser.add_argument("--layers", help="layers whose label contains this text")
    parser.add_argument("--every", type=int, default=1, help="each n-th of the chosen layers")
    parser.add_argument("--trials", type=int, default=50, help="per layer and x")
    parser.add_argument("--time", type=float, help="seconds of tuning over all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--db", default="benchmark.db")
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args(words)
    if options.every < 1:
        parser.error(f"--every must be at least 1, got {options.every}")
    return options


def chosen(options: argparse.Namespace) -> list[tuple[schedsearch.Workload, str, schedsearch.Workload]]:
    """(layer, x, workload) of the layers and blocks that the options select."""
    found = [layer for layer in layers(options.networks, options.batch or (1, 32)) if (options.layers or "") in layer.label]
    return [
        (layer, x, workload)
        for layer in found[:: options.every]
        for x in options.x or (*XS, PLAIN)
        if (workload := blocked(layer, x)) is not None
    ]


def rows_of(pairs: Sequence[tuple[schedsearch.Workload, str, schedsearch.Workload]], db: str) -> list[dict[str, Any]]:
    """A row for each layer and x, from the trials in the database so far."""
    rows = []
    for layer, x, workload in pairs:
        row: dict[str, Any] = {"layer": layer.label.removesuffix(" f16 NHWC"), "x": x, "workload": workload.label}
        try:
            row |= fastest(workload, db)
        except SchedsearchError as error:
            row["error"] = f"{type(error).__name__}: {error}"
        rows.append(row)
    return rows


class Writer(schedsearch.Observer):
    """Calls `write` with the number of trials, at most every `seconds`, while a run goes on."""

    def __init__(self, write: Callable[[int], None], seconds: float = 8.0) -> None:
        self._write, self._seconds, self._last, self._trials = write, seconds, time.perf_counter(), 0

    def on_trial(self, event: Any) -> None:
        self._trials += 1
        if time.perf_counter() - self._last >= self._seconds:
            self._write(self._trials)
            self._last = time.perf_counter()


def main() -> None:
    options = arguments()
    pairs, started = chosen(options), time.perf_counter()

    def write(trials: int) -> list[dict[str, Any]]:
        rows = rows_of(pairs, options.db)
        seconds = time.perf_counter() - started
        common.write(options.out, {"rows": rows, "trials": trials, "tuning_s": seconds, "winners": winners(rows)})
        return rows

    try:
        summary = schedsearch.tune(
            [workload for _, _, workload in pairs], options.db, target="cuda", trials=options.trials, time_s=options.time,
            seed=options.seed, observers=[Writer(write)],
        )  # fmt: skip
    except Interrupted as interrupted:
        summary = interrupted.summary
    trials = sum(task.new_trials for task in summary.tasks)
    rows = write(trials)
    print(table(rows), packed_table(rows), sep="\n\n")
    print(
        f"{sum(task.new_trials for task in summary.tasks)} trials in {time.perf_counter() - started:.0f} s; {summary.shares}"
    )


if __name__ == "__main__":
    main()
