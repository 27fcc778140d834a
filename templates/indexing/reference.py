"""The references of gather and scatter, from the definitions of ONNX's operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from schedsearch.ops.index_map import dense_shape
from schedsearch.templates.parts.whole_reference import WholeReference
from schedsearch.workload import Workload

Array = np.ndarray[Any, np.dtype[Any]]
_COMBINE: Mapping[str, Callable[..., Any]] = {"add": np.add.at, "max": np.maximum.at, "min": np.minimum.at}


class GatherReference(WholeReference):
    def compute(self, workload: Workload, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        places, valid = chosen(dict(workload.params), _indices(arrays))
        x = np.asarray(arrays["x"]).reshape(-1)
        y = np.where(valid, x[np.where(valid, places, 0)], np.zeros((), x.dtype))
        whole = dense_shape(workload.params)
        shape = [used if n == whole_n else n for n, used, whole_n in zip(y.shape, y.shape, whole)]
        return {"y": y.reshape(shape)}


class ScatterReference(WholeReference):
    def compute(self, workload: Workload, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        indices = _indices(arrays)
        places, valid = chosen(workload.params, indices)
        updates = np.asarray(arrays["updates"])[tuple(slice(0, n) for n in places.shape)]
        y = np.array(arrays["x"]).reshape(-1)
        at, values = places[valid], updates[valid]
        if workload.reduction == "none":
            for place, value in zip(at, values):  # the last one stays
                y[place] = value
        else:
            _COMBINE[workload.reduction](y, at, values)
        return {"y": y.reshape(workload.x)}


def chosen(p: Mapping[str, Any], indices: Array) -> tuple[Array, Array]:
    """For each element of the dense array: its flat place in the indexed array, and whether its indices are in range.

    Args:
        indices: those in use, whose first axis may be shorter than that of the workload.
    """
    x, by = p["x"], p["by"]
    everywhere = np.arange(int(np.prod(x)), dtype=np.int64).reshape(x)

    def wrapped(index: Array, extent: int) -> tuple[Array, Array]:
        return np.where(index < 0, index + extent, index).clip(0, extent - 1), (index >= -extent) & (index < extent)

    if by == "tuples":
        batch, depth = p.get("batch_dims", 0), indices.shape[-1]
        found, inside = zip(*(wrapped(indices[..., j], x[batch + j]) for j in range(depth)))
        grid = np.ogrid[tuple(slice(0, n) for n in indices.shape[:-1])][:batch]
        places = everywhere[(*grid, *found)]
        valid = np.logical_and.reduce(inside)
    else:
        axis = p["axis"]
        index, valid = wrapped(indices, x[axis])
        if by == "slices":
            places = np.take(everywhere, index, axis=axis)
            valid = valid.reshape((1,) * axis + indices.shape)
        else:
            each = list(np.ogrid[tuple(slice(0, n) for n in indices.shape)])
            each[axis] = index
            places = everywhere[tuple(each)]
    places = places if places.ndim else places.reshape(1)
    valid = valid.reshape(valid.shape + (1,) * (places.ndim - valid.ndim))
    return places, np.broadcast_to(valid, places.shape)


def _indices(arrays: Mapping[str, Array]) -> Array:
    indices = np.asarray(arrays["indices"], np.int64)
    return indices[: int(arrays["indices_extents"][0])] if "indices_extents" in arrays else indices
