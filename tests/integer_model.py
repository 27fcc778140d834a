"""Convolutions of int8 and uint8 in NumPy's int64, with the stages of integers, and random arguments for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from schedsearch.config import Config
from schedsearch.device import open_device
from schedsearch.ops.layout import Layout
from schedsearch.target import Target
from schedsearch.template import Template
from schedsearch.workload import Workload

Array = np.ndarray[Any, Any]
# Zero points that every 8-bit format has, and bounds with fractions, which integers never reach.
SCALARS = {
    "x_zero_point": 3.0, "weight_zero_point": 5.0, "y_zero_point": 7.0,
    "middle_scale": 0.7, "middle_zero_point": 4.0, "residual_scale": 0.35, "residual_zero_point": 9.0,
    "y_scale": 0.7, "clip_min": -1000.5, "clip_max": 30000.25, "leaky_relu_slope": 0.25,
}  # fmt: skip


def arguments(w: Workload, seed: int = 0) -> dict[str, Array]:
    """x and weight over their whole formats, the operands of stages, all in the workload's layouts; floats are exact."""
    rng = np.random.default_rng(seed)
    arrays = {}
    spread = 74.0**2 * (w.c // w.groups * w.r * w.s) ** 0.5  # standard deviation of the sums
    unit = 2.0 ** round(np.log2(32 / spread))
    for spec in w.signature:
        if spec.role == "scale":
            some = {
                "requantise_scale": [unit, unit * 0.75, unit * 1.37],
                "dequantise_scale": [2.0**-6, -(2.0**-5)],
                "quantise_scale": [2.0**-6 / unit, 0.75 * 2.0**-6 / unit],
            }
            arrays[spec.name] = rng.choice(np.array(some.get(spec.name, [0.5, -2.0]), np.float32), spec.shape)
        elif spec.dtype in ("int8", "uint8"):
            low, high = limits(spec.dtype)
            arrays[spec.name] = rng.integers(low, high + 1, spec.shape).astype(spec.dtype)
        elif spec.dtype in ("int32", "uint32"):
            low = 0 if spec.dtype == "uint32" else -10000
            arrays[spec.name] = rng.integers(low, 10000, spec.shape).astype(spec.dtype)
        else:
            values = rng.integers(-8, 9, spec.shape).astype(np.float32)
            arrays[spec.name] = values if spec.dtype == "float32" else stored(values, spec.dtype)
    return arrays


def exactly(
    template: Template,
    workload: Workload,
    target: Target,
    seed: int = 0,
    launches: int = 1,
    truth_of: Callable[[Workload, dict[str, Array]], Array] | None = None,
) -> Callable[[Config], None]:
    """A check that a configuration's result on the GPU is right in every bit. `truth_of`: other than `expected`."""
    from conv2d_support import run_on_cpu  # it takes any device

    arrays = arguments(workload, seed)
    storage = np.dtype(np.uint16 if workload.output.dtype in ("float16", "bfloat16") else workload.output.dtype)
    truth = (truth_of or expected)(workload, arrays).view(storage)
    scalars = {scalar.name: SCALARS[scalar.name] for scalar in workload.scalars}

    def check(config: Config) -> None:
        device = open_device(target)
        try:
            source = template.kernel(workload, target, config)
            y = run_on_cpu(device, source, arrays, {"y": (truth.shape, storage)}, scalars, launches)["y"]
        finally:
            device.close()
        np.testing.assert_array_equal(y, truth, err_msg=f"{workload.label} {config}")

    return check


def limits(dtype: str) -> tuple[int, int]:
    return (-128, 127) if dtype == "int8" else (0, 255)


def stored(values: Array, dtype: str) -> Array:
    """Numbers that a 16-bit float format rounds to, as NumPy holds them; bfloat16 as its bits."""
    if dtype == "float16":
        return values.astype(np.float16)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def logical(w: Workload, name: str, array: Array) -> Array:
    """An argument as int64 NCHW or OIHW."""
    if name == "x":
        sizes = {"N": w.n, "C": w.c, "H": w.h, "W": w.w}
        return Layout.parse(w.layout).unpack(array, sizes, "NCHW").astype(np.int64)
    sizes = {"O": w.k, "I": w.c // w.groups, "H": w.r, "W": w.s}
    return Layout.parse(w.weight_layout).unpack(array, sizes, "OIHW").astype(np.int64)


def sums(w: Workload, arrays: Mapping[str, Array], zero_points: Mapping[str, float] | None = None) -> Array:
    """The convolution without its epilogue, int64 NCHW, exact."""
    given = dict.fromkeys(("x", "weight"), 0) | {name: int(SCALARS[f"{name}_zero_point"]) for name in w.zero_points}
    given |= {name: int(value) for name, value in (zero_points or {}).items()}
    x = logical(w, "x", arrays["x"]) - given["x"]
    weight = logical(w, "weight", arrays["weight"]) - given["weight"]
    top, left, bottom, right = w.padding
    x = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    out_h, out_w = w.definition.output_hw(w.params)  # type: ignore[attr-defined]
    inputs, outputs = w.c // w.groups, w.k // w.groups
    y = np.zeros((w.n, w.groups, outputs, out_h, out_w))
    by_group = weight.reshape(w.groups, outputs, inputs, w.r, w.s).astype(np.float64)  # sums are below 2^53
    for r in range(w.r):
        for s in range(w.s):
            rows = slice(r * w.dilation[0], r * w.dilation[0] + (out_h - 1) * w.stride[0] + 1, w.stride[0])
            columns = slice(s * w.dilation[1], s * w.dilation[1] + (out_w - 1) * w.stride[1] + 1, w.stride[1])
            taps = x[:, :, rows, columns].reshape(w.n, w.groups, inputs, -1).astype(np.float64)
            y += (by_group[None, :, :, :, r, s] @ taps).reshape(y.shape)
    return y.reshape(w.n, w.k, out_h, out_w).astype(np.int64)


def expected(w: Workload, arrays: Mapping[str, Array]) -> Array:
    """y in the workload's layout, as a kernel writes it. Stages after `dequantise` must be exact in float32."""
    layout = Layout.parse(w.layout)
    total = sums(w, arrays)
    sizes = {"N": w.n, "C": w.k, "H": total.shape[2], "W": total.shape[3]}
    value: Array = total

    def like_y(array: Array) -> Array:
        if array.dtype == np.uint16:
            array = (array.astype(np.uint32) << 16).view(np.float32)
        return layout.unpack(array, sizes, "NCHW")

    for stage in w.epilogue:
        name = stage.name
        if name == "bias":
            value = value + arrays["bias"].astype(value.dtype)[:, None, None]
        elif name == "residual":
            value = value + like_y(arrays["residual"]).astype(value.dtype)
        elif name == "relu":
            value = np.maximum(value, 0)
        elif name == "leaky_relu":
            value = np.where(value < 0, value * np.float32(SCALARS["leaky_relu_slope"]), value)
        elif name == "clip":
            low, high = SCALARS["clip_min"], SCALARS["clip_max"]
            if value.dtype == np.int64:
                low, high = math.ceil(low), math.floor(high)
            value = np.minimum(np.maximum(value, low), high)
        elif name == "scale_shift":
            value = value * arrays["scale"][:, None, None] + arrays["shift"][:, None, None]
        elif name == "requantise":
            product = value.astype(np.float32) * arrays["requantise_scale"][:, None, None]
            low, high = limits(stage.params["to"])
            value = np.clip(np.rint(product).astype(np.int64) + int(SCALARS["y_zero_point"]), low, high)
        elif name == "requantise_add":
            value = added(value, like_y(arrays["residual"]), arrays["requantise_scale"][:, None, None], stage.params)
        elif name == "quantise":
            quotient = value.astype(np.float32) / arrays["quantise_scale"][:, None, None]
            low, high = limits(stage.params["to"])
            value = np.clip(np.rint(quotient).astype(np.int64) + int(SCALARS["y_zero_point"]), low, high)
        else:
            assert name == "dequantise"
            value = value.astype(np.float32) * arrays["dequantise_scale"][:, None, None]
    out = w.output.dtype
    packed = layout.pack(value, "NCHW")
    return stored(packed.astype(np.float32), out) if out in ("float16", "bfloat16") else packed.astype(out)


def added(total: Array, residual: Array, scale: Array, params: Mapping[str, Any]) -> Array:
    """Sums requantised, and added to a quantised residual as a graph of DequantizeLinear, Add and QuantizeLinear says."""
    middle = np.clip(np.rint(total.astype(np.float32) * scale) + SCALARS["middle_zero_point"], *limits(params["middle"]))
    numbers = [
        (each.astype(np.int64) - int(SCALARS[f"{name}_zero_point"])).astype(np.float32)
        * np.float32(SCALARS[f"{name}_scale"])
        for each, name in ((middle, "middle"), (residual, "residual"))
    ]
    sums: Array = numbers[0] + numbers[1]
    sums = np.maximum(sums, np.float32(0)) if params["relu"] else sums
    codes = np.rint(sums / np.float32(SCALARS["y_scale"])).astype(np.int64) + int(SCALARS["y_zero_point"])
    return np.clip(codes, *limits(params["to"]))
