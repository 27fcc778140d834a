"""conv2d_cpu_int8 against conv2d_cpu in fp32, a plain seven-loop Numba kernel of int8, and PyTorch's quantised conv2d.

    python benchmarks/cpu_conv2d_int8.py [--repeats N] [--threads N] [--out FILE.json]

Every kernel has its template's default configuration, and its result is compared with NumPy. Contestants take turns, so that
other work on the machine disturbs all of them; the best launch of each counts. Times include packing of x, and packing of
weights unless the name says that they are prepared. PyTorch packs weights before; it takes part if it is installed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cpu_conv2d import SHAPES
from numba import njit

from schedsearch.backend import compile_source, toolchain
from schedsearch.config import Config
from schedsearch.constructors.convolutions import conv2d
from schedsearch.device import Device, open_device
from schedsearch.device.detect import detect
from schedsearch.target import Target
from schedsearch.template import Template, load_reference
from schedsearch.templates.conv2d.cpu import Conv2dCpu
from schedsearch.templates.conv2d.cpu_int8 import Conv2dCpuInt8
from schedsearch.workload import Workload

REQUANTISED = ("bias", "relu", {"requantise": {"to": "int8"}})
CONTESTANTS: dict[str, tuple[type[Template], dict[str, Any]]] = {
    "fp32 NHWC": (Conv2dCpu, {"dtype": "float32"}),
    "int8 NHWC": (Conv2dCpuInt8, {"dtype": "int8"}),
    "int8 NHWC, requantised": (Conv2dCpuInt8, {"dtype": "int8", "epilogue": REQUANTISED}),
    "int8 NCHW, requantised": (Conv2dCpuInt8, {"dtype": "int8", "layout": "NCHW", "epilogue": REQUANTISED}),
    "int8 NCHW32c, requantised": (Conv2dCpuInt8, {"dtype": "int8", "layout": "NCHW32c", "epilogue": REQUANTISED}),
}
PREPARED = "uint8 NHWC, requantised, weights prepared"
QUANTISED = {
    "dtype": "uint8", "weight_dtype": "int8", "zero_points": ["x"],
    "epilogue": ["bias", "relu", {"requantise": {"to": "uint8"}}],
}  # fmt: skip
X_ZERO_POINT = 3
CHECKED_POINTS = 500


@njit
def seven_loops(x, weight, y, padding):  # type: ignore[no-untyped-def]
    """The kernel that one writes first: x (n, h, w, c), weight (k, r, s, c), y (n, p, q, k); int8 summed in int32."""
    for n in range(y.shape[0]):
        for p in range(y.shape[1]):
            for q in range(y.shape[2]):
                for k in range(y.shape[3]):
                    total = np.int32(0)
                    for r in range(weight.shape[1]):
                        for s in range(weight.shape[2]):
                            h, w = p - padding + r, q - padding + s
                            if 0 <= h < x.shape[1] and 0 <= w < x.shape[2]:
                                for c in range(x.shape[3]):
                                    total += np.int32(x[n, h, w, c]) * np.int32(weight[k, r, s, c])
                    y[n, p, q, k] = total


def arguments(w: Workload) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    drawn: dict[str, Any] = {}
    for spec in w.signature:
        if spec.dtype == "float32":
            drawn[spec.name] = rng.standard_normal(spec.shape, dtype=np.float32)
        else:
            low, high = (0, 256) if spec.dtype == "uint8" else (-128, 128)
            drawn[spec.name] = rng.integers(low, high, spec.shape).astype(spec.dtype)
    if "requantise_scale" in drawn:
        drawn["requantise_scale"] = np.full(w.k, 2.0**-12, np.float32)
    return drawn


def contestant(
    device: Device, template: Template, w: Workload, threads: int, prepared: bool = False
) -> Callable[[], object]:
    """A launch of the template's default kernel, after its result has been compared with the reference's points.

    Args:
        prepared: weights are packed once, before.
    """
    target = device.target
    config = Config({**template.default(w, target, template.space(w, target)), "threads": threads})
    arrays = arguments(w)
    y = np.empty(w.output.size, w.output.dtype)
    buffers = {name: device.allocate(array.nbytes) for name, array in {**arrays, "y": y}.items()}
    for name, array in arrays.items():
        device.copy_in(buffers[name], memoryview(array).cast("B"))
    kernel = device.load(compile_source(template.kernel(w, target, config), target).artifact)
    workspaces = kernel.prepare(buffers) if prepared else None
    scalars = {scalar.name: X_ZERO_POINT if scalar.name == "x_zero_point" else 0.0 for scalar in w.scalars}
    launch = kernel.bind(buffers, scalars, workspaces).launch
    launch()
    device.copy_out(memoryview(y).cast("B"), buffers["y"])
    points = np.random.default_rng(1).integers(0, y.size, CHECKED_POINTS)
    expected = load_reference(w.op).points(w, arrays, scalars, points)
    if w.dtype == "float32":
        np.testing.assert_allclose(y[points], expected, rtol=1e-4, atol=1e-3)
    else:
        np.testing.assert_array_equal(y[points], expected)
    return launch


def by_pytorch(w: Workload, threads: int) -> Callable[[], object] | None:
    """A call of PyTorch's quantised convolution with the same numbers, checked likewise; None without PyTorch."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(threads)
    arrays = arguments(w)
    # One scale of 2^-12 for x_scale * w_scale / y_scale, so that PyTorch's scales are exact, too.
    x = torch.from_numpy(arrays["x"]).permute(0, 3, 1, 2)  # channels_last
    weight = torch.from_numpy(arrays["weight"]).permute(0, 3, 1, 2)
    x_quantised = torch._make_per_tensor_quantized_tensor(x, 2.0**-6, X_ZERO_POINT)
    scales, zeros = torch.full((w.k,), 2.0**-6, dtype=torch.float64), torch.zeros(w.k, dtype=torch.int64)
    bias = torch.from_numpy(arrays["bias"].astype(np.float32)) * 2.0**-12
    weight_quantised = torch._make_per_channel_quantized_tensor(weight, scales, zeros, 0)
    packed = torch.ops.quantized.conv2d_prepack(
        weight_quantised, bias, list(w.stride), list(w.padding[:2]), list(w.dilation), w.groups
    )

    def launch() -> Any:
        return torch.ops.quantized.conv2d_relu(x_quantised, packed, 1.0, 0)

    y = launch().int_repr().permute(0, 2, 3, 1).contiguous().numpy().ravel()
    points = np.random.default_rng(1).integers(0, y.size, CHECKED_POINTS)
    expected = load_reference(w.op).points(w, arrays, {"x_zero_point": X_ZERO_POINT, "y_zero_point": 0.0}, points)
    np.testing.assert_allclose(y[points].astype(np.int64), expected, rtol=0, atol=1)  # the other neighbour of a half
    return launch


def measure(shape: tuple[int, ...], target: Target, options: argparse.Namespace) -> dict[str, Any]:
    size, c, k, r, padding = shape
    sizes = {"n": 1, "h": size, "w": size, "c": c, "k": k, "r": r, "s": r, "padding": padding}
    device = open_device(target)
    launches: dict[str, Callable[[], object]] = {}
    for name, (template, more) in CONTESTANTS.items():
        launches[name] = contestant(device, template(), conv2d(**sizes, **more), options.threads)
    quantised = conv2d(**sizes, **QUANTISED)
    launches[PREPARED] = contestant(device, Conv2dCpuInt8(), quantised, options.threads, prepared=True)
    if (torch_launch := by_pytorch(quantised, options.threads)) is not None:
        launches["PyTorch, " + PREPARED] = torch_launch
    w = conv2d(**sizes, dtype="int8")
    x, weight = (arguments(w)[name] for name in ("x", "weight"))
    y = np.empty(w.output.shape, np.int32)
    plain = "plain loops, int8"
    launches[plain] = lambda: seven_loops(x, weight, y, padding)
    launches[plain]()  # compiles
    best = dict.fromkeys(launches, float("inf"))
    for turn in range(options.repeats):
        for name, launch in launches.items():
            if name == plain and turn % 10:  # slow, and on one thread
                continue
            begin = time.perf_counter()
            launch()
            best[name] = min(best[name], time.perf_counter() - begin)
    device.close()
    return {"label": w.label, "flops": w.flops, "us": {name: seconds * 1e6 for name, seconds in best.items()}}


def torch_version() -> str:
    """Version and engine of PyTorch; empty without it."""
    try:
        import torch
    except ImportError:
        return ""
    return f"{torch.__version__}, engine {torch.backends.quantized.engine}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50, help="launches of each contestant (default 50)")
    parser.add_argument("--threads", type=int, default=1, help="default 1")
    parser.add_argument("--out", type=Path, help="write the data as JSON")
    options = parser.parse_args()
    target = detect("cpu")
    rows = []
    for shape in SHAPES:
        rows.append(measure(shape, target, options))
        print(rows[-1]["label"], {name: round(us) for name, us in rows[-1]["us"].items()}, flush=True)
    if options.out:
        data = {
            "command": " ".join([Path(sys.executable).name, *sys.argv]), "target": target.facts(),
            "toolchain": toolchain("cpu"), "torch": torch_version(), "threads": options.threads, "rows": rows,
        }  # fmt: skip
        options.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
