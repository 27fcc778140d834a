"""depthwise_conv2d_cpu beside PyTorch on the depthwise layers of MobileNetV1: forward and gradients, float32, both layouts.

    python benchmarks/cpu_depthwise.py [--batch N] [--threads N] [--rounds N] [--layers N] [--out FILE.json]

schedsearch runs its default configuration, which nobody tuned; PyTorch runs oneDNN with tensors in the same layout. They
take turns, because other programs may use the machine, and the best time of each counts. Every result is checked against
PyTorch's. PyTorch's times include its dispatcher and the allocation of the result.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from schedsearch import Workload, depthwise_conv2d
from schedsearch.backend import compile_source, toolchain
from schedsearch.config import Config
from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.target import Target
from schedsearch.templates.depthwise_conv2d.cpu import DepthwiseConv2dCpu

LAYERS = (  # channels, h = w, stride: those of MobileNetV1, arXiv 1704.04861
    (32, 112, 1), (64, 112, 2), (128, 56, 1), (128, 56, 2), (256, 28, 1), (256, 28, 2), (512, 14, 1), (512, 14, 2),
    (1024, 7, 1),
)  # fmt: skip
DIRECTIONS = ("forward", "grad_input", "grad_weight")
TURN_S = 0.01  # how long each runs before the other has its turn


def turns(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Best seconds of each, which take turns."""
    best = dict.fromkeys(runs, math.inf)
    for _ in range(rounds):
        for name, run in runs.items():
            end = time.perf_counter() + TURN_S
            while (begin := time.perf_counter()) < end or best[name] == math.inf:
                run()
                best[name] = min(best[name], time.perf_counter() - begin)
    return best


def torch_run(workload: Workload, arrays: dict[str, Any]) -> Callable[[], Any]:
    """PyTorch's grouped convolution or its gradient, on tensors that share the arrays' memory."""
    p = workload
    order = {"NHWC": (0, 3, 1, 2), "OHWI": (0, 3, 1, 2)}
    given = {
        spec.name: torch.from_numpy(arrays[spec.name]).permute(order.get(spec.axes, (0, 1, 2, 3))) for spec in p.signature
    }
    memory = torch.channels_last if p.layout == "NHWC" else torch.contiguous_format
    blank_x = torch.empty((p.n, p.c, p.h, p.w)).to(memory_format=memory)
    blank_weight = torch.empty((p.c, 1, p.r, p.s))
    if p.direction == "forward":
        x, weight = given["x"], given["weight"]
        return lambda: torch.nn.functional.conv2d(x, weight, None, p.stride, p.padding[:2], p.dilation, p.c)
    mask = [p.direction == "grad_input", p.direction == "grad_weight", False]
    rest = (None, p.stride, p.padding[:2], p.dilation, False, (0, 0), p.c, mask)
    dy, x, weight = given["dy"], given.get("x", blank_x), given.get("weight", blank_weight)
    return lambda: torch.ops.aten.convolution_backward(dy, x, weight, *rest)[mask.index(True)]


def measure(workload: Workload, target: Target, options: argparse.Namespace) -> dict[str, Any]:
    rng, device, template = np.random.default_rng(0), open_device(target), DepthwiseConv2dCpu()
    arrays = {spec.name: rng.standard_normal(spec.shape, dtype=np.float32) for spec in workload.signature}
    output = workload.output
    space = template.space(workload, target)
    config = Config({**template.default(workload, target, space), "threads": options.threads})
    built = compile_source(template.kernel(workload, target, config), target)
    kernel = device.load(built.artifact)
    buffers = {name: device.allocate(array.nbytes) for name, array in arrays.items()}
    for name, array in arrays.items():
        device.copy_in(buffers[name], memoryview(array))
    buffers[output.name] = device.allocate(output.nbytes)
    launch, peer = kernel.bind(buffers, {}).launch, torch_run(workload, arrays)
    launch()
    device.synchronize()
    found = np.empty(output.shape, np.float32)
    device.copy_out(memoryview(found), buffers[output.name])
    back = (0, 2, 3, 1) if output.axes in ("NHWC", "OHWI") else (0, 1, 2, 3)
    expected = peer().permute(back).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * math.sqrt(workload.work.reduction))
    best = turns({"schedsearch": launch, "torch": peer}, options.rounds)
    kernel.close()
    device.close()
    return {
        "workload": json.loads(workload.json), "label": workload.label, "config": dict(config), "compile_s": built.compile_s,
        **{f"{name}_us": seconds * 1e6 for name, seconds in best.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each (default 15)")
    parser.add_argument("--layers", type=int, default=len(LAYERS), help="only the first N layers")
    parser.add_argument("--threads", type=int, default=detect("cpu").sms, help="default: all that this process may use")
    parser.add_argument("--out", type=Path, help="write the data as JSON")
    options = parser.parse_args()
    target = detect("cpu")
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    print(f"{target.key}, {options.threads} threads, PyTorch {torch.__version__}")
    print(f"{'workload':62}{'ours us':>9}{'torch us':>10}{'torch / ours':>14}")
    rows = []
    for direction in DIRECTIONS:
        for layout in ("NHWC", "NCHW"):
            for c, size, stride in LAYERS[: options.layers]:
                workload = depthwise_conv2d(
                    n=options.batch, c=c, h=size, w=size, r=3, s=3, stride=stride, padding=1, direction=direction,
                    dtype="float32", layout=layout,
                )  # fmt: skip
                row = measure(workload, target, options)
                rows.append(row)
                ours, theirs = row["schedsearch_us"], row["torch_us"]
                print(f"{row['label']:62}{ours:9.0f}{theirs:10.0f}{theirs / ours:14.2f}", flush=True)
    means = {}
    for direction in DIRECTIONS:
        for layout in ("NHWC", "NCHW"):
            chosen = [r for r in rows if r["workload"]["params"].get("direction", "forward") == direction]
            chosen = [r for r in chosen if r["workload"]["params"].get("layout", "NHWC") == layout]
            logs = [math.log(row["torch_us"] / row["schedsearch_us"]) for row in chosen]
            means[f"{direction} {layout}"] = math.exp(sum(logs) / len(logs))
            print(f"{direction} {layout}: {means[f'{direction} {layout}']:.2f} times PyTorch's speed in geometric mean")
    if options.out:
        data = {
            "command": " ".join(["python", *sys.argv]), "target": target.facts(), "toolchain": toolchain("cpu"),
            "torch": torch.__version__, "threads": options.threads, "geometric_means": means, "rows": rows,
        }  # fmt: skip
        options.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
