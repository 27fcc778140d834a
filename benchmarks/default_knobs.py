"""What defaults lose by one knob: each default configuration raced with the same that has other values of the knob.

    python benchmarks/default_knobs.py depthwise_conv2d_cuda filters --workloads benchmarks/tuned/{first,depthwise}_1.yaml
    python benchmarks/default_knobs.py depthwise_conv2d_cuda filters --where shared --out depthwise_filters_h200.json ...

All workloads of the files that the template computes take part, with --where only those whose default has that value. Values
that are not legal with the rest of the configuration are left out. Times are taken as networks ask for them on the device.
The table has the time of the default and, for each other value, its time over the default's: below 1 the default loses.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import common

import schedsearch
from schedsearch.config import Config
from schedsearch.executable.build_options import network_mode
from schedsearch.measure import Builder, Runner
from schedsearch.measurement import Measurement
from schedsearch.processes.builder import Built, Candidate
from schedsearch.target import Target
from schedsearch.template import Template, load_template
from schedsearch.workload import Workload
from schedsearch.workload_file import load


@dataclass(frozen=True)
class Case:
    """A workload with its default configuration, which is the first, and those with other values of the knob."""

    workload: Workload
    configs: tuple[Config, ...]


def cases(template: Template, knob: str, where: str | None, files: list[str], target: Target) -> list[Case]:
    found = []
    for workload in [task.workload for file in files for task in load(file).resolve(target).tasks if task.of_range is None]:
        if workload.op not in template.ops or template.validate(workload, target):
            continue
        space = template.space(workload, target)
        default = template.default(workload, target, space)
        if where is not None and str(default[knob]) != where:
            continue
        (values,) = (each.values for each in space.knobs if each.name == knob)
        others = [Config({**default, knob: value}) for value in values if value != default[knob]]
        legal = [each for each in others if not space.check(each)]
        if legal:
            found.append(Case(workload, (default, *legal)))
    return found


def raced(runner: Runner, case: Case, built: list[Built | Measurement], knob: str) -> dict[str, Any]:
    ready = [(config, each) for config, each in zip(case.configs, built) if isinstance(each, Built)]
    times = runner.race(case.workload, [each for _, each in ready])
    row: dict[str, Any] = {"workload": case.workload.label, "default": dict(case.configs[0]), "times_ns": {}}
    for (config, _), measured in zip(ready, times):
        row["times_ns"][str(config[knob])] = measured.time_ns
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("template")
    parser.add_argument("knob")
    parser.add_argument("--workloads", nargs="+", required=True, metavar="FILE.yaml")
    parser.add_argument("--where", metavar="VALUE", help="only where the default has this value")
    parser.add_argument("--target", default="auto")
    parser.add_argument("--out", help="also write the data here")
    options = parser.parse_args()
    target = schedsearch.detect(options.target)
    template, mode = load_template(options.template), network_mode(target)
    chosen = cases(template, options.knob, options.where, options.workloads, target)
    if not chosen:
        raise SystemExit("no default of these workloads has another value of the knob; give other files, or no --where")
    with Builder(target) as builder:
        tokens = [[builder.submit(Candidate(case.workload, template, each)) for each in case.configs] for case in chosen]
        results = dict(builder.drain())
    rows = []
    with Runner(target, mode=mode) as runner:
        for case, numbers in zip(chosen, tokens):
            rows.append(raced(runner, case, [results[number] for number in numbers], options.knob))
            common.write(options.out, {"mode": mode, "rows": rows})
    lines, ratios = [], []
    for row in rows:
        value = str(row["default"][options.knob])
        time_ns = row["times_ns"].get(value)
        others = {name: each / time_ns for name, each in row["times_ns"].items() if name != value and each and time_ns}
        ratios += others.values()
        told = ", ".join(f"{name} {ratio:.3f}" for name, ratio in others.items())
        lines.append([row["workload"], value, "" if time_ns is None else f"{time_ns / 1e3:.2f}", told])
    print(common.table(["workload", "default", "us", "others over it"], lines))
    print(f"geometric mean of the ratios: {common.geometric_mean(ratios):.3f} over {len(ratios)}")


if __name__ == "__main__":
    main()
