"""Convolutions that the benchmarks time, and how the data of several runs make one file."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import common

import schedsearch

Layer = tuple[schedsearch.Workload, str, int]  # with its network and how often that runs it

# n, h, w, c, k, kernel, stride, padding
SHAPES = [
    (32, 56, 56, 64, 64, 3, 1, 1),
    (32, 28, 28, 128, 128, 3, 1, 1),
    (32, 14, 14, 256, 256, 3, 1, 1),
    (32, 7, 7, 512, 512, 3, 1, 1),
    (32, 56, 56, 64, 256, 1, 1, 0),
    (32, 28, 28, 512, 128, 1, 1, 0),
    (1, 56, 56, 64, 64, 3, 1, 1),
    (1, 28, 28, 128, 128, 3, 1, 1),
    (1, 14, 14, 256, 256, 3, 1, 1),
    (1, 7, 7, 512, 512, 3, 1, 1),
    (1, 56, 56, 64, 256, 1, 1, 0),
    (1, 28, 28, 512, 128, 1, 1, 0),
    (32, 300, 300, 64, 64, 3, 1, 1),
]


def square(
    n: int, h: int, w: int, c: int, k: int, kernel: int, stride: int, padding: int, groups: int = 1
) -> schedsearch.Workload:
    return schedsearch.Workload.conv2d(
        n=n, h=h, w=w, c=c, k=k, r=kernel, s=kernel, stride=stride, padding=padding, groups=groups
    )


def network_layers(path: str) -> list[Layer]:
    """(workload, network, multiplicity) of every convolution at batch 1, and also of ResNet-50 at batch 32.

    The file is a JSON object with resnet50, vgg16 and inception_v3, each {"layers": [[H, W, Cin, Cout, KH, KW, stride_h,
    stride_w, pad_h, pad_w, dil_h, dil_w, groups, how often the network has the layer], ...]}; H and W are the input's.
    """
    data = json.loads(Path(path).read_text())
    found = []
    for name, batch in (("resnet50", 1), ("vgg16", 1), ("inception_v3", 1), ("resnet50", 32)):
        for layer in data[name]["layers"]:
            h, w, c, k, r, s, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups, times = layer
            workload = schedsearch.Workload.conv2d(
                n=batch, h=h, w=w, c=c, k=k, r=r, s=s, stride=(stride_h, stride_w), padding=(pad_h, pad_w),
                dilation=(dilation_h, dilation_w), groups=groups,
            )  # fmt: skip
            found.append((workload, f"{name} batch {batch}", times))
    return found


def integer_cases(path: str) -> list[schedsearch.Workload]:
    """The int8 and uint8 convolutions of recorded cases in NHWC, each shape once.

    The file is a JSON object whose `cases` has lists of cases by operator; a case has batch, in_channel, in_size,
    num_filter, kernel, stride, dilation, padding (a number, two or four of them, SAME or VALID) and perhaps groups. Cases of
    4-bit numbers are left out.
    """
    found = []
    for operator, cases in json.loads(Path(path).read_text())["cases"].items():
        for case in cases if "conv2d" in operator else ():
            if (case.get("in_dtype") or case.get("dtype")) not in ("int8", "uint8"):
                continue
            (h, w), (r, s), stride, dilation = (_both(case[key]) for key in ("in_size", "kernel", "stride", "dilation"))
            around = [(r - 1) * dilation[0], (s - 1) * dilation[1]]
            before = [-(-each // 2) for each in around]
            named = {"VALID": 0, "SAME": (*before, *(a - b for a, b in zip(around, before)))}
            given = case["padding"]
            workload = schedsearch.Workload.conv2d(
                n=case["batch"], h=h, w=w, c=case["in_channel"], k=case["num_filter"], r=r, s=s, stride=stride,
                padding=named[given] if isinstance(given, str) else given, dilation=dilation, groups=case.get("groups", 1),
            )  # fmt: skip
            found.append(workload)
    return list(dict.fromkeys(found))


def _both(value: int | Sequence[int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def layers_of(
    path: str, wanted: Sequence[str] | None, params: Mapping[str, Any]
) -> tuple[list[schedsearch.Workload], list[Layer]]:
    """The convolutions of the networks named in `wanted` (all if None), each once; and the layers of all networks.

    Raises:
        SystemExit: the file has no such network.
    """
    layers = [(workload.replace(**params), network, times) for workload, network, times in network_layers(path)]
    networks = list(dict.fromkeys(network for _, network, _ in layers))
    wanted = wanted or networks
    if unknown := [network for network in wanted if network not in networks]:
        raise SystemExit(f"no network {', '.join(map(repr, unknown))}; allowed: {', '.join(networks)}")
    return list(dict.fromkeys(workload for workload, network, _ in layers if network in wanted)), layers


def run_facts(started: float, summary: schedsearch.RunSummary) -> dict[str, Any]:
    """What a data file says about the tuning: its command, seconds since `started` (`time.perf_counter`), trials, shares."""
    return {
        "command": common.facts()["command"],
        "tuning_s": time.perf_counter() - started,
        "new_trials": sum(task.new_trials for task in summary.tasks),
        "shares": {name: round(getattr(summary.shares, name), 3) for name in ("device", "preparing", "build", "tuner")},
    }


def fastest_by_template(workload: schedsearch.Workload, db: str) -> dict[str, float]:
    """Microseconds of each template's fastest verified configuration, as the search measured it."""
    from schedsearch.measurement import COLD_GRAPH, Outcome
    from schedsearch.records.store import Store

    fastest: dict[str, float] = {}
    with Store.open(db, create=False, readonly=True) as store:
        for record in store.rows(workload, mode=COLD_GRAPH, outcomes={Outcome.OK}):
            assert record.measurement.time_ns is not None
            time_us = record.measurement.time_ns / 1e3
            fastest[record.template] = min(time_us, fastest.get(record.template, time_us))
    return fastest


def kept(path: str | None, suite: str) -> dict[str, Any]:
    """The data of earlier runs for --add: `rows` and `runs`, both empty if there is no file.

    Raises:
        SystemExit: the file has another suite, another machine or other versions.
    """
    if not path or not Path(path).exists():
        return {"rows": [], "runs": []}
    data: dict[str, Any] = json.loads(Path(path).read_text())
    facts = {"suite": suite, **common.facts()}
    other = [name for name in ("suite", "card", "cpus", "python", "versions") if data.get(name) != facts[name]]
    if other or "runs" not in data:
        raise SystemExit(f"{path} cannot be added to: it differs in {', '.join(other) or 'format'}; give another --out")
    return data


def report(suite: str, earlier: dict[str, Any], rows: Sequence[dict[str, Any]], run: dict[str, Any]) -> dict[str, Any]:
    """The data of a file: rows by workload (a new row replaces an earlier one), and totals over all runs.

    Args:
        earlier: the result of `kept`.
        rows: the rows of this run.
        run: its command, tuning_s, new_trials and shares.
    """
    merged = {row["workload"]: row for row in (*earlier["rows"], *rows)}
    runs = [*earlier["runs"], run]
    tuning_s = sum(each["tuning_s"] for each in runs)
    return {
        "suite": suite,
        "command": "\n".join(each["command"] for each in runs),
        "rows": list(merged.values()),
        "geometric_mean_ratio": common.geometric_mean([row["ratio"] for row in merged.values() if "ratio" in row]),
        "tuning_s": tuning_s,
        "trials_per_s": sum(each["new_trials"] for each in runs) / tuning_s,
        "shares": {
            name: round(sum(each["shares"][name] * each["tuning_s"] for each in runs) / tuning_s, 3)
            for name in run["shares"]
        },
        "runs": runs,
    }


def network_sums(layers: Sequence[Layer], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds of all convolutions of one pass, ours and cuDNN's, of every network that has a row.

    If the rows have a time of our fp16 kernel, its sum is there too.
    """
    measured = {row["workload"]: row for row in rows if "ratio" in row}
    sums: dict[str, Any] = {}
    for workload, network, times in layers:
        entry = sums.setdefault(network, {"ms": 0.0, "cudnn_ms": 0.0, "layers": 0, "missing": 0})
        row = measured.get(workload.label)
        entry["layers" if row else "missing"] += times
        if row:
            entry["ms"] += row["us"] * times / 1e3
            entry["cudnn_ms"] += row["cudnn_us"] * times / 1e3
            if "fp16_us" in row:
                entry["fp16_ms"] = entry.get("fp16_ms", 0.0) + row["fp16_us"] * times / 1e3
    return {network: entry for network, entry in sums.items() if entry["layers"]}
