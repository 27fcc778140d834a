"""The references of topk, nonzero and unique in NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from schedsearch.ops.nonzero import NonZeroParams
from schedsearch.ops.topk import TopKParams
from schedsearch.ops.unique import UniqueParams
from schedsearch.templates.parts.whole_reference import WholeReference
from schedsearch.workload import Workload

Array = np.ndarray[Any, np.dtype[Any]]


class TopKReference(WholeReference[TopKParams]):
    def compute(self, workload: Workload[TopKParams], arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        p = workload.params
        x, axis = np.asarray(arrays["x"]), p.axis
        if "x_extents" in arrays:
            x = x[: int(arrays["x_extents"][0])]
        length = x.shape[axis]
        if p.largest:  # of equal numbers the one with the lower index, from the back
            order = length - 1 - np.flip(np.argsort(np.flip(x, axis), axis=axis, kind="stable"), axis)
        else:
            order = np.argsort(x, axis=axis, kind="stable")
        indices = np.take(order, np.arange(min(p.k, length)), axis=axis)
        return {"y": np.take_along_axis(x, indices, axis=axis), "indices": indices}


class NonZeroReference(WholeReference[NonZeroParams]):
    def compute(self, workload: Workload[NonZeroParams], arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        return {"y": np.array(np.nonzero(np.asarray(arrays["x"])), np.int64)}


class UniqueReference(WholeReference[UniqueParams]):
    def compute(self, workload: Workload[UniqueParams], arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        p = workload.params
        x = np.asarray(arrays["x"])
        axis = None if p.flat else p.axis
        ranks = np.unique(x, return_inverse=True)[1].reshape(x.shape)  # of slices NumPy takes NaNs as different
        _, indices, inverse, counts = np.unique(ranks, True, True, True, axis=axis)
        inverse = inverse.reshape(-1)
        if p.order == "first":
            order = np.argsort(indices, kind="stable")
            place = np.empty_like(order)
            place[order] = np.arange(len(order))
            indices, counts, inverse = indices[order], counts[order], place[inverse]
        return {"y": np.take(x, indices, axis=axis), "indices": indices, "inverse": inverse, "counts": counts}
