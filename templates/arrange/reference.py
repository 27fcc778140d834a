"""The references of arange, expand, reshape, where and dyn_concat in NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from schedsearch.ops.arange import ArangeParams
from schedsearch.ops.bounded import extents_of, in_use
from schedsearch.ops.dyn_concat import DynConcatParams
from schedsearch.ops.reshape import ReshapeParams
from schedsearch.templates.parts.whole_reference import WholeReference
from schedsearch.workload import Workload

Array = np.ndarray[Any, np.dtype[Any]]


class _Arranged(WholeReference):
    """Subclasses compute y as NumPy would, of arguments as they are; what NumPy refuses, or exceeds the bound, is empty."""

    def compute(self, workload: Workload, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        given = {}
        for spec in workload.signature:
            array = np.asarray(arrays[spec.name]).reshape(spec.shape)
            extents = arrays.get(extents_of(spec.name))
            given[spec.name] = array if extents is None else array[in_use(spec.shape, np.asarray(extents))]
        bound = workload.outputs[0].shape
        try:
            y = self.of(workload, given)
        except ValueError:
            return {"y": np.zeros((0,) * len(bound))}
        return {"y": y if all(n <= most for n, most in zip(y.shape, bound)) else np.zeros((0,) * len(bound))}

    def of(self, workload: Workload, arrays: Mapping[str, Array]) -> Array:
        raise NotImplementedError


class ArangeReference(WholeReference):
    """A count beyond the bound is given as it is, for floats that only the kernel counts."""

    def compute(self, workload: Workload, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        p = ArangeParams.of(workload.params)
        (start, limit, delta), most = (float(arrays[name][0]) for name in ("start", "limit", "delta")), p.bound
        count = 0 if delta == 0 else max(0, int(np.ceil((limit - start) / delta)))
        if p.dtype != "float32":
            begin, step = int(arrays["start"][0]), int(arrays["delta"][0])
            return {"y": begin + step * np.arange(count if count <= most else 0)}
        y = np.float32(start) + np.arange(min(count, most)).astype(np.float32) * np.float32(delta)
        return {"y": y, extents_of("y"): np.array([count], np.int64)}


class ExpandReference(_Arranged):
    def of(self, workload: Workload, arrays: Mapping[str, Array]) -> Array:
        shape = tuple(int(n) for n in arrays["shape"])
        return np.broadcast_to(arrays["x"], np.broadcast_shapes(arrays["x"].shape, shape))


class ReshapeReference(_Arranged):
    def of(self, workload: Workload, arrays: Mapping[str, Array]) -> Array:
        x, shape = arrays["x"], [int(n) for n in arrays["shape"]]
        if not ReshapeParams.of(workload.params).allowzero:
            if any(n == 0 and axis >= x.ndim for axis, n in enumerate(shape)):
                raise ValueError("x has no such axis")
            shape = [n or x.shape[axis] for axis, n in enumerate(shape)]
        return x.reshape(shape)


class WhereReference(_Arranged):
    def of(self, workload: Workload, arrays: Mapping[str, Array]) -> Array:
        return np.where(arrays["c"] != 0, arrays["a"], arrays["b"])


class DynConcatReference(_Arranged):
    def of(self, workload: Workload, arrays: Mapping[str, Array]) -> Array:
        p = DynConcatParams.of(workload.params)
        return np.concatenate([arrays[f"x{number}"] for number in range(len(p.x))], axis=p.axis)
