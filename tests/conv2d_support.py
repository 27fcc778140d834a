"""Helpers for the tests of convolutions: random arguments, running a kernel on the CPU, few candidates that cover many.

The convolution in NumPy is `conv2d_numpy`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.template import KernelSource
from schedsearch.workload import Workload

NUMPY_DTYPES = {"float16": np.float16, "float32": np.float32, "bfloat16": np.uint16}


def integer_arguments(workload: Workload) -> dict[str, Any]:
    """Small integers: sums are exact in float32, so a missing or doubled product always shows."""
    rng = np.random.default_rng(0)
    return {arg.name: as_dtype(rng.integers(-3, 4, arg.shape), arg.dtype) for arg in workload.signature}


def as_dtype(values: Any, dtype: str) -> Any:
    """An array in a form that memory can hold: bfloat16 as its bits (exact for the small integers of these tests)."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.ascontiguousarray(values, dtype=NUMPY_DTYPES[dtype])


def run_on_cpu(
    device: CpuDevice,
    source: KernelSource,
    arrays: Mapping[str, Any],
    outputs: Mapping[str, tuple[tuple[int, ...], Any]],
    scalars: Mapping[str, float] | None = None,
    launches: int = 1,
    also: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Compiles, loads and launches. It first poisons every byte of outputs and workspaces (NaN). `also` has addresses of
    optional buffers."""
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
        bound = kernel.bind({**buffers, **(also or {})}, scalars or {})
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


def covering(
    drawn: Iterable[tuple[Workload, Config]],
    also: Callable[[Workload, Config], set[Any]] = lambda *_: set(),
    but: Collection[str] = (),
) -> list[tuple[Workload, Config]]:
    """A few of the candidates that together have every knob value, dtype and epilogue stage of all candidates, and every
    value of `also`. Knobs in `but` do not count: their values are sizes that depend on the layer."""
    facets = {
        candidate: {(knob, value) for knob, value in candidate[1].items() if knob not in but}
        | {*candidate[0].epilogue, not candidate[0].epilogue}
        | {("dtypes", candidate[0].dtype, candidate[0].out_dtype)}
        | also(*candidate)
        for candidate in drawn
    }
    missing: set[Any] = set().union(*facets.values())
    chosen = []
    while missing:
        chosen.append(max(facets, key=lambda candidate: len(facets[candidate] & missing)))
        missing -= facets[chosen[-1]]
    return chosen
