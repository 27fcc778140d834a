"""conv2d_cpu against its own default, a plain seven-loop Numba kernel on one thread, and PyTorch's CPU convolution.

    python benchmarks/cpu_conv2d.py [--configs N] [--seed N] [--threads N] [--out FILE.json]

Every configuration is checked against float64 NumPy before it is timed. Times are the best of `--repeats` launches with
warm caches and include packing. PyTorch, if it is installed, is timed in the same way, with weights in its own layout.
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
from numba import njit

from schedsearch.backend import compile_source, toolchain
from schedsearch.config import Config
from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.target import Target
from schedsearch.template import load_reference
from schedsearch.templates.conv2d.cpu import Conv2dCpu
from schedsearch.workload import Workload

SHAPES = (  # h = w, c, k, r = s, padding
    (56, 64, 64, 3, 1),
    (28, 128, 128, 3, 1),
    (14, 256, 256, 3, 1),
    (7, 512, 512, 3, 1),
    (56, 64, 256, 1, 0),
)
CHECKED_POINTS = 2000
COLUMNS = ("workload", "best us", "GFLOP/s", "default us", "/best", "plain us", "/best", "torch us", "compile s")


@njit
def seven_loops(x, weight, y, stride, padding):  # type: ignore[no-untyped-def]
    """The kernel that one writes first: x (n, h, w, c), weight (k, r, s, c), y (n, p, q, k), float32."""
    for n in range(y.shape[0]):
        for p in range(y.shape[1]):
            for q in range(y.shape[2]):
                for k in range(y.shape[3]):
                    total = np.float32(0)
                    for r in range(weight.shape[1]):
                        for s in range(weight.shape[2]):
                            h, w = p * stride - padding + r, q * stride - padding + s
                            if 0 <= h < x.shape[1] and 0 <= w < x.shape[2]:
                                for c in range(x.shape[3]):
                                    total += x[n, h, w, c] * weight[k, r, s, c]
                    y[n, p, q, k] = total


def best_seconds(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


class Bench:
    """One workload with random arguments in a device's memory."""

    def __init__(self, workload: Workload, target: Target, repeats: int) -> None:
        rng = np.random.default_rng(0)
        self.workload, self.target, self.repeats = workload, target, repeats
        self.template = Conv2dCpu()
        self.device = open_device(target)
        self.arrays = {arg.name: rng.standard_normal(arg.shape, dtype=np.float32) for arg in workload.signature}
        self.buffers = {name: self.device.allocate(array.nbytes) for name, array in self.arrays.items()}
        for name, array in self.arrays.items():
            self.device.copy_in(self.buffers[name], memoryview(array))
        self.buffers["y"] = self.device.allocate(workload.output.nbytes)
        self.points = rng.integers(0, workload.output.size, CHECKED_POINTS)
        self.expected = load_reference(workload.op).points(workload, self.arrays, {}, self.points)

    def seconds(self, config: Config) -> tuple[float, float]:
        """Best seconds of a launch, and seconds to compile. Raises AssertionError if the result is wrong."""
        built = compile_source(self.template.kernel(self.workload, self.target, config), self.target)
        kernel = self.device.load(built.artifact)
        self.device.fill(self.buffers["y"], 0xFF, self.workload.output.nbytes)
        seconds = best_seconds(kernel.bind(self.buffers, {}).launch, self.repeats)
        y = np.empty(self.workload.output.size, np.float32)
        self.device.copy_out(memoryview(y), self.buffers["y"])
        np.testing.assert_allclose(y[self.points], self.expected, rtol=1e-4, atol=1e-3, err_msg=str(config))
        kernel.close()
        return seconds, built.compile_s

    def plain_seconds(self) -> float:
        y = np.empty(self.workload.output.shape, np.float32)
        arguments = (self.arrays["x"], self.arrays["weight"], y, self.workload.stride[0], self.workload.padding[0])
        return best_seconds(lambda: seven_loops(*arguments), 2)

    def torch_seconds(self, threads: int) -> float | None:
        try:
            import torch
        except ImportError:
            return None
        torch.set_num_threads(threads)
        x = torch.from_numpy(self.arrays["x"]).permute(0, 3, 1, 2)  # logical NCHW, channels_last in memory
        weight = torch.from_numpy(self.arrays["weight"]).permute(0, 3, 1, 2)
        padding = self.workload.padding[:2]
        forms = ((x, weight), (x.contiguous(), weight.contiguous()))
        with torch.inference_mode():
            return min(
                best_seconds(lambda x=x, w=w: torch.nn.functional.conv2d(x, w, padding=padding), self.repeats)
                for x, w in forms
            )


def measure(shape: tuple[int, ...], target: Target, options: argparse.Namespace) -> dict[str, Any]:
    size, c, k, r, padding = shape
    workload = Workload.conv2d(n=1, h=size, w=size, c=c, k=k, r=r, s=r, padding=padding, dtype="float32", layout="NHWC")
    bench = Bench(workload, target, options.repeats)
    space = bench.template.space(workload, target).restrict({"threads": [options.threads]})
    default = Config(
        {**bench.template.default(workload, target, bench.template.space(workload, target)), "threads": options.threads}
    )
    sampled = space.sample(options.configs, np.random.default_rng(options.seed))
    results = {config: bench.seconds(config) for config in dict.fromkeys([default, *sampled])}
    # Once more, side by side, so that a passing disturbance does not decide the comparison.
    leaders = sorted(results, key=lambda config: results[config][0])[:3]
    raced = {config: bench.seconds(config)[0] for config in dict.fromkeys([default, *leaders])}
    best = min(raced, key=lambda config: raced[config])
    row = {
        "workload": json.loads(workload.json),
        "label": workload.label,
        "flops": workload.flops,
        "best_us": raced[best] * 1e6,
        "best_config": dict(best),
        "default_us": raced[default] * 1e6,
        "default_config": dict(default),
        "plain_us": bench.plain_seconds() * 1e6,
        "torch_us": None,
        "compile_s_median": float(np.median([compile_s for _, compile_s in results.values()])),
        "configs": len(results),
    }
    torch_s = bench.torch_seconds(options.threads)
    row["torch_us"] = None if torch_s is None else torch_s * 1e6
    bench.device.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=int, default=30, help="random configurations per shape (default 30)")
    parser.add_argument("--repeats", type=int, default=50, help="launches; the best one counts (default 50)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads", type=int, default=detect("cpu").sms, help="threads; default: all that this process may use"
    )
    parser.add_argument("--out", type=Path, help="write the data as JSON")
    options = parser.parse_args()
    target = detect("cpu")
    print(f"{target.key}, {options.threads} threads, {options.configs} random configurations per shape, seed {options.seed}")
    print("{:42}{:>9}{:>9}{:>11}{:>7}{:>10}{:>7}{:>10}{:>11}".format(*COLUMNS))
    rows = []
    for shape in SHAPES:
        row = measure(shape, target, options)
        rows.append(row)
        best, default, plain = row["best_us"], row["default_us"], row["plain_us"]
        print(
            f"{row['label']:42}{best:9.0f}{row['flops'] / best / 1e3:9.0f}{default:11.0f}{default / best:7.2f}"
            f"{plain:10.0f}{plain / best:7.1f}{row['torch_us'] or math.nan:10.0f}{row['compile_s_median']:11.2f}",
            flush=True,
        )
    gain = math.exp(sum(math.log(row["plain_us"] / row["best_us"]) for row in rows) / len(rows))
    print(f"geometric mean over the plain kernel: {gain:.1f}x")
    if options.out:
        data = {
            "command": " ".join([Path(sys.executable).name, *sys.argv]),
            "target": target.facts(),
            "toolchain": toolchain("cpu"),
            "threads": options.threads,
            "rows": rows,
        }
        options.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
