"""The reference of dyn_resize: the sizes, then exact coordinates, and weights in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from schedsearch.ops.bounded import in_use
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.dyn_resize import DynResizeParams, height_and_width
from schedsearch.templates.parts.whole_reference import WholeReference
from schedsearch.templates.resize.reference import pixels
from schedsearch.workload import Workload

Array = np.ndarray[Any, np.dtype[Any]]


class DynResizeReference(WholeReference[DynResizeParams]):
    """Rows first, then columns. What is impossible, or exceeds the bound, is empty."""

    def compute(self, workload: Workload[DynResizeParams], arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        p, spec, bound = workload.params, workload.signature[0], workload.outputs[0].shape
        number = np.float64 if dtype_of(p.dtype).is_float else np.int64
        given = [int(extent) for extent in arrays["x_extents"]]
        sides = height_and_width(p)
        extents = list(given)
        for axis, place in enumerate(sides):
            if p.scale:
                extents[place] = math.floor(Fraction(p.scale[axis]) * given[place])
            else:
                extents[place] = int(arrays["sizes"][axis])
        x = np.asarray(arrays["x"]).reshape(spec.shape)[in_use(spec.shape, given)]
        empty = np.zeros((0,) * len(bound), number)
        if any(not 0 <= extent <= most for extent, most in zip(extents, bound)):
            return {"y": empty}
        if not math.prod(extents):
            impossible = not p.scale and not x.size and extents[0] and all(extents[place] for place in sides)
            return {"y": empty if impossible else np.zeros(extents, number)}
        if not x.size:
            return {"y": empty}
        y = x.astype(number)
        for axis, place in enumerate(sides):
            scale = Fraction(p.scale[axis]) if p.scale else None
            chosen, weights = pixels(workload, x.shape[place], extents[place], scale)
            along = [1] * y.ndim
            along[place] = -1
            parts = (
                np.take(y, at, axis=place) * weight.astype(number).reshape(along) for at, weight in zip(chosen, weights)
            )
            y = sum(parts)
        return {"y": y}
