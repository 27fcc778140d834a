"""Helpers of the conv2d tests: random arguments, an independent NumPy convolution, running a kernel on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from schedsearch.backend import compile_source
from schedsearch.device.cpu import CpuDevice
from schedsearch.template import KernelSource
from schedsearch.workload import Config, Workload

NUMPY_DTYPES = {"float16": np.float16, "float32": np.float32, "bfloat16": np.uint16}


def integer_arguments(workload: Workload, seed: int = 0) -> dict[str, Any]:
    """Small integers: sums are exact in float32, so a missing or doubled product always shows."""
    rng = np.random.default_rng(seed)
    return {arg.name: as_dtype(rng.integers(-3, 4, arg.shape), arg.dtype) for arg in workload.signature}


def as_dtype(values: Any, dtype: str) -> Any:
    """An array in a storable form; bfloat16 as its bits (exact for the small integers of these tests)."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.ascontiguousarray(values, dtype=NUMPY_DTYPES[dtype])


def as_float64(array: Any) -> Any:
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def numpy_conv2d(
    p: Workload, arrays: Mapping[str, Any], scalars: Mapping[str, float] | None = None, absolute: bool = False
) -> Any:
    """The definition, one kernel tap at a time over whole padded images, float64, in the output's layout.

    With `absolute`, |x| and |weight| are convolved and the epilogue is left out.
    """
    given = {scalar.name: scalar.default for scalar in p.scalars} | dict(scalars or {})
    values = {name: as_float64(array) for name, array in arrays.items()}
    x = values["x"].transpose([p.layout.index(axis) for axis in "NCHW"])
    weight = values["weight"].transpose([p.weight_layout.index(axis) for axis in "OIHW"])
    if absolute:
        x, weight = np.abs(x), np.abs(weight)
    top, left, bottom, right = p.padding
    x = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    oh, ow = (
        (size - (kernel - 1) * d - 1) // s + 1 for size, kernel, d, s in zip(x.shape[2:], (p.r, p.s), p.dilation, p.stride)
    )
    inputs, outputs = p.c // p.groups, p.k // p.groups
    y = np.zeros((p.n, p.k, oh, ow))
    for r in range(p.r):
        for s in range(p.s):
            h, w = r * p.dilation[0], s * p.dilation[1]
            tap = x[:, :, h : h + (oh - 1) * p.stride[0] + 1 : p.stride[0], w : w + (ow - 1) * p.stride[1] + 1 : p.stride[1]]
            for g in range(p.groups):
                into = slice(g * outputs, (g + 1) * outputs)
                y[:, into] += np.tensordot(
                    tap[:, g * inputs : (g + 1) * inputs], weight[into, :, r, s], axes=(1, 1)
                ).transpose(0, 3, 1, 2)
    y = y.transpose(["NCHW".index(axis) for axis in p.layout])

    def per_channel(name: str) -> Any:
        return values[name] if p.layout == "NHWC" else values[name][:, None, None]

    for stage in () if absolute else p.epilogue:
        if stage == "bias":
            y = y + per_channel("bias")
        elif stage == "scale_shift":
            y = y * per_channel("scale") + per_channel("shift")
        elif stage == "residual":
            y = y + values["residual"]
        elif stage == "relu":
            y = np.where(y > 0, y, 0)
        elif stage == "leaky_relu":
            y = np.where(y > 0, y, y * np.float64(np.float32(given["leaky_relu_slope"])))
        else:
            assert stage == "clip"
            y = np.clip(y, given["clip_min"], given["clip_max"])
    return y


def run_on_cpu(
    device: CpuDevice,
    source: KernelSource,
    arrays: Mapping[str, Any],
    outputs: Mapping[str, tuple[tuple[int, ...], Any]],
    scalars: Mapping[str, float] | None = None,
    launches: int = 1,
) -> dict[str, Any]:
    """Compiles, loads and launches; every byte of outputs and workspaces is poisoned (NaN) first."""
    artifact = compile_source(source, device.target).artifact
    buffers, results = {}, {name: np.empty(shape, dtype) for name, (shape, dtype) in outputs.items()}
    try:
        for name, array in {**arrays, **results}.items():
            buffers[name] = device.allocate(array.nbytes)
        for name, array in arrays.items():
            device.copy_in(buffers[name], memoryview(array))
        for name, array in results.items():
            device.fill(buffers[name], 0xFF, array.nbytes)
        kernel = device.load(artifact)
        bound = kernel.bind(buffers, scalars or {})
        for _ in range(launches):
            bound.launch()
        device.synchronize()
        for name, array in results.items():
            device.copy_out(memoryview(array), buffers[name])
        kernel.close()
    finally:
        for address in buffers.values():
            device.free(address)
    return results


def covering(drawn: Iterable[tuple[Workload, Config]]) -> list[tuple[Workload, Config]]:
    """A few of the candidates in which every knob value, dtype and epilogue stage of all of them occurs."""
    facets = {
        candidate: {*candidate[1].items(), *candidate[0].epilogue, not candidate[0].epilogue}
        | {("dtypes", candidate[0].dtype, candidate[0].out_dtype)}
        for candidate in drawn
    }
    missing: set[Any] = set().union(*facets.values())
    chosen = []
    while missing:
        chosen.append(max(facets, key=lambda candidate: len(facets[candidate] & missing)))
        missing -= facets[chosen[-1]]
    return chosen
