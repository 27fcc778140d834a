"""The references of topk, nonzero and unique in NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from schedsearch.templates.parts.whole_reference import WholeReference
from schedsearch.workload import Workload

Array = np.ndarray[Any, np.dtype[Any]]


class TopKReference(WholeReference):
    def compute(self, workload: Workload, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        x, axis = np.asarray(arrays["x"]), workload.axis
        if "x_extents" in arrays:
            x = x[: int(arrays["x_extents"][0])]
        length = x.shape[axis]
        if workload.largest:  # of equal numbers the one with the lower index, from the back
            order = length - 1 - np.flip(np.argsort(np.flip(x, axis), axis=axis, kind="stable"), axis)
        else:
            order = np.argsort(x, axis=axis, kind="stable")
        indices = np.take(order, np.arange(min(workload.k, length)), axis=axis)
        return {"y": np.take_along_axis(x, indices, axis=axis), "indices": indices}


class NonZeroReference(WholeReference):
    def compute(self, workload: Workload, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        return {"y": np.array(np.nonzero(np.asarray(arrays["x"])), np.int64)}


class UniqueReference(WholeReference):
    def compute(self, workload: Workload, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        x = np.asarray(arrays["x"])
        axis = None if workload.flat else workload.axis
        ranks = np.unique(x, return_inverse=True)[1].reshape(x.shape)  # of slices NumPy takes NaNs as different
        _, indices, inverse, counts = np.unique(ranks, True, True, True, axis=axis)
        inverse = inverse.reshape(-1)
        if workload.order == "first":
            order = np.argsort(indices, kind="stable")
            place = np.empty_like(order)
            place[order] = np.arange(len(order))
            indices, counts, inverse = indices[order], counts[order], place[inverse]
        return {"y": np.take(x, indices, axis=axis), "indices": indices, "inverse": inverse, "counts": counts}
