"""What a batch that is a number of the launch costs, beside machine code for one batch.

    python benchmarks/run_time_batch.py --out benchmarks/results/run_time_batch_h200.json

For layers of ResNet-50 and a depthwise one, each in the template's default configuration for n = 33: one machine code for
all sizes that share it is compiled, and one for each size alone. Both are verified and timed in one run. Needs a CUDA
device.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import common

from schedsearch import Workload, load_templates
from schedsearch.backend import compile_source
from schedsearch.backend.relaunch import relaunched
from schedsearch.backend.run_time import shared_code
from schedsearch.device.detect import detect
from schedsearch.measure import Runner
from schedsearch.processes.builder import Built
from schedsearch.target import Target

RELU = ("bias", "relu")
LAYERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("conv2d_wgmma", "conv2d", dict(h=14, w=14, c=256, k=1024, r=1, s=1, epilogue=("bias", "residual", "relu"))),
    ("conv2d_halo", "conv2d", dict(h=56, w=56, c=64, k=64, r=3, s=3, padding=1, epilogue=RELU)),
    ("conv2d_wgmma", "conv2d", dict(h=28, w=28, c=128, k=128, r=3, s=3, padding=1, epilogue=RELU)),
    ("conv2d_stem", "conv2d", dict(h=224, w=224, c=3, k=64, r=7, s=7, stride=2, padding=3, epilogue=RELU)),
    ("conv2d_mma", "conv2d", dict(h=7, w=7, c=512, k=512, r=3, s=3, padding=1, epilogue=RELU)),
    ("depthwise_conv2d_cuda", "depthwise_conv2d", dict(h=56, w=56, c=64, r=3, s=3, padding=1)),
    ("pool2d_cuda", "pool2d", dict(h=112, w=112, c=64, r=3, s=3, stride=2, padding=1, mode="max")),
)
SIZES = (17, 33, 63, 64)
DEFAULT_OF = 33


def compare(runner: Runner, target: Target, name: str, op: str, params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each size that can share its machine code with others."""
    template = load_templates([name])[name]
    workloads = {n: Workload(op, {**params, "n": n}) for n in SIZES}
    config = template.default(workloads[DEFAULT_OF], target, template.space(workloads[DEFAULT_OF], target))
    sources = {
        n: template.kernel(workload, target, config)
        for n, workload in workloads.items()
        if not template.space(workload, target).check(config)
    }
    group = max(shared_code(sources), key=len)
    made_for = max(group)
    one = compile_source(group[made_for], target)
    for n in sorted(group):
        shared = relaunched(one.artifact, group[made_for], group[n])
        assert shared is not None, f"sizes {n} and {made_for} of {name} do not share their code"
        alone = compile_source(sources[n], target)
        times_us = []
        for artifact, resources in ((shared, one.resources), (alone.artifact, alone.resources)):
            measured = runner.measure(workloads[n], Built(artifact, resources, "", 0.0))
            if measured.time_ns is None:
                raise RuntimeError(f"{workloads[n].label}: {measured.outcome} {measured.message}")
            times_us.append(measured.time_ns / 1e3)
        yield {
            "template": name,
            "workload": workloads[n].label,
            "run_time_batch_us": round(times_us[0], 2),
            "fixed_batch_us": round(times_us[1], 2),
            "ratio": round(times_us[0] / times_us[1], 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file for the data")
    options = parser.parse_args()
    target, rows = detect("cuda"), []
    with Runner(target) as runner:
        for layer in LAYERS:
            try:
                for row in compare(runner, target, *layer):
                    print("  ".join(map(str, row.values())), flush=True)
                    rows.append(row)
                    common.write(options.out, {"rows": rows})
            except Exception as error:  # the other layers go on
                print(f"{layer[0]}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
