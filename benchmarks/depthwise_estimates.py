"""How well the estimated times of depthwise_conv2d choose: configurations around the defaults, measured.

    python benchmarks/depthwise_estimates.py --out benchmarks/results/depthwise_estimates_h200.json
    python benchmarks/depthwise_estimates.py --suite random --only 7x7 --time 60
    python benchmarks/depthwise_estimates.py --replay benchmarks/results/depthwise_estimates_h200.json

The layers are those of `depthwise.py`, whose options select them. Of each, the default is measured, the configurations that
the estimate ranks first, at most two of a patch, and random ones whose estimate is at most four times the least. The table
has the default's time, that of the configuration with the least estimate among those measured, the best one's, and the
correlation of ranks. --replay makes the table anew from a file, with the estimates as they are now, and needs no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import common
import depthwise
import numpy as np

import schedsearch
from schedsearch.config import Config
from schedsearch.executable.build_options import network_mode
from schedsearch.measure import Builder, Runner
from schedsearch.processes.builder import Built, Candidate
from schedsearch.target import PRESETS, Target
from schedsearch.template import Template, load_template
from schedsearch.templates.depthwise_conv2d.cuda_space import Shape
from schedsearch.templates.depthwise_conv2d.estimates import filters_us, pixels_us
from schedsearch.workload import Workload

HEADER = ("layer", "configurations", "default us", "least estimate us", "best us", "rank correlation")
DRAWN = 4000  # random configurations of a layer, from which the plausible ones are taken


def template_of(workload: Workload) -> Template:
    return load_template("depthwise_conv2d_dw_cuda" if workload.direction == "grad_weight" else "depthwise_conv2d_cuda")


def estimated_us(workload: Workload, target: Target, configs: Sequence[Config]) -> list[float]:
    space, shape = template_of(workload).space(workload, target), Shape.of(workload)
    estimate = filters_us if workload.direction == "grad_weight" else pixels_us
    return [estimate(shape, target, each, int(space.derived["shared_bytes"](each))) for each in configs]


def chosen(workload: Workload, target: Target, ranked: int, drawn: int, seed: int) -> list[Config]:
    """The default, the first by the estimate and random ones."""
    template = template_of(workload)
    space = template.space(workload, target)
    rng = np.random.default_rng(seed)
    legal = [Config(each) for each in space.sample(DRAWN, rng)]
    us = estimated_us(workload, target, legal)
    first, of_patch = list[Config](), dict[tuple[Any, ...], int]()
    for _, number in sorted(zip(us, itertools.count())):
        patch = tuple(legal[number][knob] for knob in ("vector", "tile_h", "tile_w", "buffers"))
        of_patch[patch] = of_patch.get(patch, 0) + 1
        if of_patch[patch] <= 2:
            first.append(legal[number])
    plausible = [config for config, each in zip(legal, us) if each <= 4 * min(us)]
    others = [plausible[int(i)] for i in rng.permutation(len(plausible))[:drawn]]
    return list(dict.fromkeys([template.default(workload, target, space), *first[:ranked], *others]))


def measured(workloads: Sequence[Workload], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row of each layer: its configurations with their times, of those that are right."""
    target, began = schedsearch.detect("cuda"), time.monotonic()
    with Builder(target) as builder, Runner(target, mode=network_mode(target)) as runner:
        for workload in workloads:
            if options.time and time.monotonic() - began > options.time:
                return
            configs = chosen(workload, target, options.ranked, options.drawn, options.seed)
            tokens = [builder.submit(Candidate(workload, template_of(workload), each)) for each in configs]
            built, least, found = dict(builder.drain()), None, []
            for token, config in zip(tokens, configs):
                one = built[token]
                if isinstance(one, Built) and (time_ns := runner.measure(workload, one, least).time_ns):
                    least = min(least or time_ns, time_ns)
                    found.append({"config": dict(config), "us": time_ns / 1e3})
            yield {"label": workload.label, "workload": workload.json, "rows": found}


def table(layers: Sequence[dict[str, Any]], target: Target) -> str:
    lines, lost = [], []
    for layer in layers:
        workload = Workload.from_json(layer["workload"])
        configs = [template_of(workload).current(row["config"]) for row in layer["rows"]]
        times, estimates = np.array([row["us"] for row in layer["rows"]]), estimated_us(workload, target, configs)
        ranks = np.corrcoef(np.argsort(np.argsort(estimates)), np.argsort(np.argsort(times)))[0, 1]
        picked = times[int(np.argmin(estimates))]
        lost.append(picked / times.min())
        lines.append((layer["label"], len(times), f"{times[0]:.2f}", f"{picked:.2f}", f"{times.min():.2f}", f"{ranks:.2f}"))
    lines.append(("geometric mean over the best", "", "", f"{common.geometric_mean(lost):.2f}", "", ""))
    return common.table(HEADER, lines)


def main() -> None:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--ranked", type=int, default=16, help="configurations that the estimate ranks first")
    own.add_argument("--drawn", type=int, default=16, help="random ones")
    own.add_argument("--replay", metavar="FILE.json", help="measure nothing; make the table of this file")
    mine, rest = own.parse_known_args()
    options = argparse.Namespace(**vars(depthwise.arguments(rest)), **vars(mine))
    if options.replay:
        print(table(json.loads(Path(options.replay).read_text())["layers"], PRESETS["h200"]))
        return
    layers: list[dict[str, Any]] = []
    for layer in measured(depthwise.chosen(options), options):
        layers.append(layer)
        common.write(options.out, {"layers": layers})
        print(f"{layer['label']}: {len(layer['rows'])} configurations", flush=True)
    print(table(layers, schedsearch.detect("cuda")))


if __name__ == "__main__":
    main()
