"""Helpers for the tests of depthwise_conv2d: the definition in NumPy, one tap of the kernel at a time, and TVM's cases."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from conv2d_support import as_dtype
from test_operator_cases_gpu import both, padding

from schedsearch import Workload, depthwise_conv2d
from schedsearch.ops.dtypes import decode, dtype

CASES = {
    "depthwise_conv2d": "forward",
    "depthwise_conv2d_backward_input_nhwc": "grad_input",
    "depthwise_conv2d_backward_weight_nhwc": "grad_weight",
}


def numpy_depthwise(workload: Workload, arrays: Mapping[str, Any], scalars: Mapping[str, float] | None = None) -> Any:
    """Every output by name, float64, before it is rounded. Gradients are scattered to the padded image, as a chain rule
    that follows the forward's loops does."""
    p, m = workload, workload.multiplier
    wide = {spec.name: wide_array(arrays[spec.name], spec.dtype) for spec in p.signature}
    logical = {spec.name: _ordered(wide[spec.name], spec.axes) for spec in p.signature if len(spec.axes) == 4}
    top, left, bottom, right = p.padding
    rows, columns = p.definition.output_hw(p.params)  # type: ignore[attr-defined]
    x = logical.get("x", np.zeros((p.n, p.c, p.h, p.w)))
    padded = np.repeat(np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right))), m, axis=1)
    weight = logical.get("weight", np.zeros((p.c * m, 1, p.r, p.s)))
    dy = logical.get("dy", np.zeros((p.n, p.c * m, rows, columns)))
    y, d_padded, dw = np.zeros_like(dy), np.zeros_like(padded), np.zeros_like(weight)
    for i, j in np.ndindex(p.r, p.s):
        h, w = i * p.dilation[0], j * p.dilation[1]
        seen = np.s_[
            :, :, h : h + (rows - 1) * p.stride[0] + 1 : p.stride[0], w : w + (columns - 1) * p.stride[1] + 1 : p.stride[1]
        ]
        y += padded[seen] * weight[None, :, 0, i, j, None, None]
        d_padded[seen] += dy * weight[None, :, 0, i, j, None, None]
        dw[:, 0, i, j] = np.sum(padded[seen] * dy, axis=(0, 2, 3))
    dx = d_padded[:, :, top : top + p.h, left : left + p.w].reshape(p.n, p.c, m, p.h, p.w).sum(axis=2)
    results = {"y": _stages(p, y, wide, scalars or {}) if p.direction == "forward" else y, "dx": dx, "dw": dw}
    found = {}
    for spec in p.outputs:
        order = "OIHW" if spec.name == "dw" else "NCHW"
        found[spec.name] = np.ascontiguousarray(results[spec.name].transpose([order.index(axis) for axis in spec.axes]))
        if p.accumulate:
            found[spec.name] = found[spec.name] + wide[f"{spec.name}_before"]
    return found


def _ordered(array: Any, axes: str) -> Any:
    return array.transpose([axes.index(axis) for axis in ("OIHW" if "O" in axes else "NCHW")])


def _stages(p: Workload, y: Any, wide: Mapping[str, Any], scalars: Mapping[str, float]) -> Any:
    def vector(name: str) -> Any:
        return wide[name][None, :, None, None]

    values = {each.name: np.float32(scalars.get(each.name, each.default)).astype(np.float64) for each in p.scalars}
    for stage in p.epilogue:
        if stage.name == "bias":
            y = y + vector("bias")
        elif stage.name == "scale_shift":
            y = y * vector("scale") + vector("shift")
        elif stage.name == "residual":
            y = y + _ordered(wide["residual"], p.layout)
        elif stage.name == "relu":
            y = np.where(y > 0, y, 0.0)
        elif stage.name == "leaky_relu":
            y = np.where(y > 0, y, y * values["leaky_relu_slope"])
        else:
            assert stage.name == "clip", stage
            y = np.clip(y, values["clip_min"], values["clip_max"])
    return y


def wide_array(array: Any, name: str) -> Any:
    """float64, also of the bits of a bfloat16."""
    return (decode(array, name) if array.dtype == dtype(name).storage else array).astype(np.float64)


def small_integers(workload: Workload, seed: int = 0) -> dict[str, Any]:
    """Arguments whose sums are exact in float32, so that a missing or doubled product shows."""
    rng = np.random.default_rng(seed)
    return {spec.name: as_dtype(rng.integers(-3, 4, spec.shape), spec.dtype) for spec in workload.signature}


def random_workload(rng: np.random.Generator, **given: Any) -> Workload:
    """A small workload with any stride, padding, dilation, multiplier, layout and direction."""

    def pick(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    while True:
        direction = given.get("direction", pick("forward", "grad_input", "grad_weight", "grad_both"))
        gradient = direction != "forward"
        params = {
            "n": pick(1, 2, 3), "c": int(rng.integers(1, 40)), "h": int(rng.integers(1, 14)), "w": int(rng.integers(1, 20)),
            "r": pick(1, 2, 3, 3, 5), "s": pick(1, 2, 3, 3, 5, 7),
            "stride": [pick(1, 1, 2, 3), pick(1, 1, 2, 3)], "dilation": [pick(1, 1, 2), pick(1, 1, 2)],
            "padding": [int(each) for each in rng.integers(0, 4, 4)], "multiplier": pick(1, 1, 2, 3),
            "layout": pick("NHWC", "NCHW"), "weight_layout": pick("OHWI", "OIHW", "HWOI", "HWIO"), "direction": direction,
            "accumulate": gradient and pick(True, False), "deterministic": gradient and "weight" in direction,
            "epilogue": () if gradient else pick((), ("bias", "relu"), ("scale_shift", "leaky_relu"), ("residual", "clip")),
            **given,
        }  # fmt: skip
        extents = [(params[k] - 1) * params["dilation"][i] + 1 for i, k in enumerate("rs")]
        top, left, bottom, right = params["padding"]
        if extents[0] <= params["h"] + top + bottom and extents[1] <= params["w"] + left + right:
            return depthwise_conv2d(**params)


def case_workloads(shared: Path) -> list[Workload]:
    """The depthwise cases of TVM's tests: forward with scale_shift and relu, and both gradients. Its NHWC kernels have the
    layout HWOI. Its one case of blocked channels stands for four, which are NCHW here."""
    families = json.loads((shared / "cases" / "operator_cases.json").read_text(encoding="utf-8"))["cases"]
    found = []
    for name, direction in CASES.items():
        for case in families[name]:
            for given, dilation in itertools.product(*(str(case.get(key, 1)).split("/") for key in ("padding", "dilation"))):
                one = {**case, "padding": int(given) if given.isdigit() else given, "dilation": int(dilation)}
                found.append(_workload(one, direction))
    return found


def _workload(case: Mapping[str, Any], direction: str) -> Workload:
    kernel, dilation, layout = both(case["kernel"]), both(case["dilation"]), case["layout"].removesuffix("c")
    return depthwise_conv2d(
        n=case["batch"], c=case["in_channel"], h=case["in_size"], w=case["in_size"], r=kernel[0], s=kernel[1],
        stride=case["stride"], dilation=dilation, padding=padding(dict(case), kernel, dilation),
        multiplier=case["channel_multiplier"], direction=direction, dtype=case.get("dtype", "float32"),
        layout=layout, weight_layout="HWOI" if layout == "NHWC" else "OIHW",
        epilogue=[name for name in ("scale_shift", "relu") if case.get(name)],
    )  # fmt: skip
