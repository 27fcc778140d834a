"""Cases of gather and scatter: workloads, arguments, and what NumPy makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from schedsearch import Workload, gather, scatter
from schedsearch.template import load_template
from schedsearch.templates.indexing import cuda_kernels, places

TEMPLATES = {op: (load_template(f"{op}_cuda"), load_template(f"{op}_cpu")) for op in ("gather", "scatter")}
MODULES = cuda_kernels, places


GATHERS: list[dict[str, Any]] = [
    dict(x=(7, 24), indices=(5, 3)),
    dict(x=(3, 6, 5), indices=(4,), axis=1, dtype="uint8", index_dtype="int32"),
    dict(x=(2, 3, 40), indices=(9,), axis=-1, dtype="float32"),
    dict(x=(4, 6, 3), indices=(3, 8, 2), axis=1, by="elements", dtype="int64"),
    dict(x=(2, 5, 4, 8), indices=(2, 7, 2), by="tuples", batch_dims=1, dtype="float32"),
    dict(x=(5, 4), indices=(6, 2), by="tuples", dtype="bfloat16"),
]
SCATTERS: list[dict[str, Any]] = [
    dict(x=(7, 5), indices=(4, 3), axis=0, dtype="int32"),
    dict(x=(6, 24), indices=(9, 1), by="tuples", dtype="float16"),
    dict(x=(4, 5, 3), indices=(8, 2), by="tuples", dtype="uint8", index_dtype="int32"),
    dict(x=(6, 10), indices=(9, 1), by="tuples", reduction="add", dtype="float32"),
    dict(x=(4, 9), indices=(4, 12), axis=1, reduction="max", dtype="int64"),
    dict(x=(4, 9), indices=(3, 12), axis=1, reduction="min", dtype="float32"),
]
WORKLOADS = [*(gather(**each) for each in GATHERS), *(scatter(**each) for each in SCATTERS)]
OPEN: list[dict[str, bool]] = [
    {"dynamic": True},
    {"dynamic_x": True},
    {"dynamic": True, "dynamic_x": True},
]  # what is known at run time only


def axes_of_indices(workload: Workload) -> list[int]:
    """The axes of x that the indices of a row count along."""
    if workload.by == "tuples":
        first = workload.params.get("batch_dims", 0)
        return list(range(first, first + workload.indices[-1]))
    return [workload.axis]


def extents(workload: Workload, rng: Any, least: int = 0) -> dict[str, Any]:
    """Legal extents in use of x and indices: those that both share are equal, or indices have no more."""
    is_open = {"x": workload.dynamic_x, "indices": workload.dynamic}
    x, indices = (
        [int(rng.integers(min(least, n), n + 1)) if is_open[name] else n for n in workload.params[name]] for name in is_open
    )
    along = axes_of_indices(workload)
    for axis in along:
        x[axis] = max(x[axis], 1)
    if workload.by == "tuples":
        indices[-1] = workload.indices[-1]
        for axis in range(workload.params.get("batch_dims", 0)):
            fewer = max(min(x[axis], indices[axis]), 1)  # ONNX's reference takes no fewer
            x[axis] = indices[axis] = fewer if all(is_open.values()) else workload.x[axis]
    elif workload.by == "elements":
        for axis in set(range(len(x))) - set(along):
            if workload.dynamic:
                indices[axis] = min(indices[axis], x[axis])
            else:
                x[axis] = max(indices[axis], x[axis])
    return {"x": np.array(x), "indices": np.array(indices)}


def example(workload: Workload, seed: int = 0, wrong: bool = True, least: int = 0) -> dict[str, Any]:
    """Integers; indices of both signs and, if `wrong`, some that are out of range. Some of these are just beyond the
    extents, and some are far away. Extents that are known at run time only are `least` or more."""
    rng = np.random.default_rng(seed)
    used = extents(workload, rng, least)
    shortest = min(used["x"][axes_of_indices(workload)])
    found = {}
    for spec in workload.signature:
        low, high = (0, 200) if spec.dtype == "uint8" else (-100, 101)
        if spec.name.endswith("_extents"):
            found[spec.name] = used[spec.name.removesuffix("_extents")]
            continue
        if spec.name == "indices":
            low, high = -shortest, shortest
        found[spec.name] = rng.integers(low, high, spec.shape)
        if wrong and spec.name == "indices":
            longest = max(used["x"][axes_of_indices(workload)])
            for place, index in enumerate((max(workload.x) + 20, longest, -longest - 1)):
                found[spec.name].reshape(-1)[place::5] = index
    return found
