"""dense and batch_matmul in NumPy, random arguments for them, and the recorded operator cases as workloads."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from integer_model import SCALARS, limits, stored

from schedsearch import batch_matmul, dense
from schedsearch.workload import Workload

Array = np.ndarray[Any, Any]
CASES = {  # name in the file -> number of cases
    "dense_tensorcore": 7,
    "dense": 9,
    "batch_matmul_tensorcore": 6,
    "batch_matmul": 4,
    "batch_matmul_int8": 3,
}


def cases(shared: Path, families: Iterable[str] = CASES) -> list[Workload]:
    """All recorded cases, or those of some families, in order. Those of 4-bit numbers have 8-bit ones."""
    found = json.loads((shared / "cases" / "operator_cases.json").read_text(encoding="utf-8"))["cases"]
    assert {name: len(found[name]) for name in CASES} == CASES
    return [_workload(case) for name in families for case in found[name]]


def _workload(case: Mapping[str, Any]) -> Workload:
    dtype = str(case.get("in_dtype") or case["dtype"]).replace("int4", "int8")
    epilogue = ["bias"] * case.get("use_bias", False)
    if "in_dim" in case:
        return dense(m=case["batch"], n=case["out_dim"], k=case["in_dim"], dtype=dtype, epilogue=epilogue)
    sizes = {"m": case["M"], "n": case["N"], "k": case["K"], "b": max(case["x_batch"], case["y_batch"])}
    return batch_matmul(**sizes, x_batch=case["x_batch"], weight_batch=case["y_batch"], dtype=dtype)


def arguments(w: Workload, seed: int = 0) -> dict[str, Array]:
    """The arguments as memory holds them: 8-bit factors over their whole format, floats so small that sums are exact."""
    rng = np.random.default_rng(seed)
    unit = 2.0 ** round(math.log2(32 / (74.0**2 * w.k**0.5)))
    scales = {
        "requantise_scale": [unit, unit * 0.75, unit * 1.37],
        "dequantise_scale": [2.0**-6, 2.0**-5],
        "quantise_scale": [2.0**-6 / unit, 0.75 * 2.0**-6 / unit],
    }
    arrays: dict[str, Array] = {}
    for spec in w.signature:
        if spec.role == "scale":
            drawn: Array = rng.choice(np.array(scales.get(spec.name, [0.5, -2.0]), np.float32), spec.shape)
        elif spec.dtype in ("int8", "uint8"):
            low, high = limits(spec.dtype)
            drawn = rng.integers(low, high + 1, spec.shape)
        else:
            least = 0 if spec.dtype == "uint32" else -2
            drawn = rng.integers(least, 3, spec.shape) * (5000 if spec.dtype.endswith("int32") else 1)
        arrays[spec.name] = as_stored(drawn, spec.dtype)
    return arrays


def as_stored(values: Array, dtype: str) -> Array:
    return stored(values.astype(np.float32), dtype) if dtype in ("float16", "bfloat16") else values.astype(dtype)


def numbers(array: Array) -> Array:
    """float64 numbers of an array; bfloat16 as its bits."""
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def expected(w: Workload, arrays: Mapping[str, Array]) -> Array:
    """y as a kernel writes it: the product by NumPy in float64, then the stages one by one."""
    x, weight = (numbers(arrays[name]) for name in ("x", "weight"))
    x = x - SCALARS["x_zero_point"] * ("x" in w.zero_points)
    weight = weight - SCALARS["weight_zero_point"] * ("weight" in w.zero_points)
    x = np.swapaxes(x, -1, -2) if w.params.get("x_layout") == "KM" else x
    value: Array = x @ (weight if w.weight_layout == "KN" else np.swapaxes(weight, -1, -2))
    if w.dtype in ("int8", "uint8"):
        value = value.astype(np.int64)
    for stage in w.epilogue:
        value = _after(stage.name, dict(stage.params), value, {name: numbers(array) for name, array in arrays.items()})
    return as_stored(value, w.output.dtype)


def _after(stage: str, params: Mapping[str, Any], value: Array, operands: Mapping[str, Array]) -> Array:
    if stage in ("bias", "residual"):
        return value + operands[stage].astype(value.dtype)
    if stage == "scale_shift":
        return value * operands["scale"] + operands["shift"]
    if stage == "relu":
        return np.maximum(value, 0)
    if stage == "leaky_relu":
        return np.where(value < 0, value * SCALARS["leaky_relu_slope"], value)
    if stage == "clip":
        low, high = SCALARS["clip_min"], SCALARS["clip_max"]
        return np.clip(value, math.ceil(low), math.floor(high)) if value.dtype == np.int64 else np.clip(value, low, high)
    if stage == "dequantise":
        return value.astype(np.float32) * operands["dequantise_scale"].astype(np.float32)
    scale = operands[f"{stage}_scale"].astype(np.float32)
    scaled = value.astype(np.float32) * scale if stage == "requantise" else value.astype(np.float32) / scale
    return np.clip(np.rint(scaled).astype(np.int64) + int(SCALARS["y_zero_point"]), *limits(params["to"]))


def scalars(w: Workload) -> dict[str, float]:
    return {scalar.name: SCALARS[scalar.name] for scalar in w.scalars}
