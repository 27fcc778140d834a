"""The references of gather and scatter, from the definitions of ONNX's operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from schedsearch.ops.bounded import extents_of, in_use
from schedsearch.ops.dependence import evaluate
from schedsearch.ops.index_map import ByIndicesParams
from schedsearch.templates.parts.whole_reference import WholeReference
from schedsearch.workload import Workload

Array = np.ndarray[Any, np.dtype[Any]]
_COMBINE: Mapping[str, Callable[..., Any]] = {"add": np.add.at, "max": np.maximum.at, "min": np.minimum.at}


class GatherReference(WholeReference[ByIndicesParams]):
    def compute(self, workload: Workload[ByIndicesParams], arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        used = {name: _extents(workload, arrays, name) for name in ("x", "indices")}
        places, valid = chosen(workload.params, _indices(workload, arrays), used["x"])
        x = np.asarray(arrays["x"]).reshape(-1)
        y = np.where(valid, x[np.where(valid, places, 0)], np.zeros((), x.dtype))
        function = workload.shape_functions.get("y")
        if function is None:
            return {"y": y}
        extents = evaluate(function, y.ndim, used)
        return {"y": y[in_use(y.shape, extents)], "y_extents": np.array(extents, np.int64)}


class ScatterReference(WholeReference[ByIndicesParams]):
    def compute(self, workload: Workload[ByIndicesParams], arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        p = workload.params
        used = _extents(workload, arrays, "x")
        places, valid = chosen(p, _indices(workload, arrays), used)
        updates = np.asarray(arrays["updates"])[tuple(slice(0, n) for n in places.shape)]
        y = np.array(arrays["x"]).reshape(-1)
        at, values = places[valid], updates[valid]
        if p.reduction == "none":
            for place, value in zip(at, values):  # the last one stays
                y[place] = value
        else:
            _COMBINE[p.reduction](y, at, values)
        return {"y": y.reshape(p.x)[in_use(p.x, used) if p.dynamic_x else ...]}


def chosen(p: Mapping[str, Any], indices: Array, extents: Sequence[int]) -> tuple[Array, Array]:
    """For each element of the dense array: its flat place in the indexed array, and whether its indices are in range.

    Args:
        indices: those in use.
        extents: of x, not beyond its bounds.
    """
    x, by = p["x"], p["by"]
    everywhere = np.arange(int(np.prod(x)), dtype=np.int64).reshape(x)

    def wrapped(index: Array, axis: int) -> tuple[Array, Array]:
        extent = extents[axis]
        inside = (index >= -extent) & (index < extent)
        return np.where(inside, np.where(index < 0, index + extent, index), 0), inside

    if by == "tuples":
        batch, depth = p.get("batch_dims", 0), indices.shape[-1]
        found, inside = zip(*(wrapped(indices[..., j], batch + j) for j in range(depth)))
        grid = np.ogrid[tuple(slice(0, n) for n in indices.shape[:-1])][:batch]
        places = everywhere[(*grid, *found)]
        valid = np.logical_and.reduce(inside)
    else:
        axis = p["axis"]
        index, valid = wrapped(indices, axis)
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


def _indices(workload: Workload[ByIndicesParams], arrays: Mapping[str, Array]) -> Array:
    """The indices in use; tuples are whole."""
    p = workload.params
    used = list(_extents(workload, arrays, "indices"))
    if p.by == "tuples":
        used[-1] = p.indices[-1]
    return np.asarray(arrays["indices"], np.int64)[in_use(p.indices, used)]


def _extents(workload: Workload[ByIndicesParams], arrays: Mapping[str, Array], name: str) -> list[int]:
    """The extents in use of an argument."""
    bound = workload.params[name]
    return [min(int(used), most) for used, most in zip(arrays.get(extents_of(name), bound), bound)]
