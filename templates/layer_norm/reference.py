"""The reference of layer_norm in float64, row by row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from schedsearch.ops.layer_norm import LayerNormParams, rows_of
from schedsearch.target import Target
from schedsearch.template import KernelSource, Reference
from schedsearch.templates.parts.reference import gather, reader, reference_source, sharer, writer
from schedsearch.workload import Workload

_ERRORS = 8.0  # of a difference, a root, a division, two products and a sum


class LayerNormReference(Reference[LayerNormParams]):
    """Each item is a row.

    The sums' errors grow with the length of a row, which multiplies the magnitude: those of the mean by the mean of |x|,
    those of the variance by half the normalised number. Errors of the other operations do not, so they are divided by it
    here.
    """

    def kernel(self, workload: Workload[LayerNormParams], target: Target) -> KernelSource:
        p = workload.params
        (rows, length), epsilon = rows_of(p), p.epsilon
        read, scales, write, items = (
            reader(target, p.dtype),
            reader(target, "float32"),
            writer(target),
            sharer(target),
        )
        centred, has_bias = p.centred, p.bias

        def normalise(x: Any, scale: Any, bias: Any, y: Any, magnitude: Any, start: Any, stop: Any) -> None:
            for row in items(start, stop):
                first = row * length
                mean, large, square = 0.0, 0.0, 0.0
                for i in range(length):
                    mean += read(x, first + i) / length
                    large += abs(read(x, first + i)) / length
                if not centred:
                    mean, large = 0.0, 0.0
                for i in range(length):
                    square += (read(x, first + i) - mean) ** 2 / length
                factor = 1.0 / math.sqrt(square + epsilon)
                for i in range(length):
                    number, weight = read(x, first + i), scales(scale, i) * factor
                    addend = 0.0
                    if has_bias:
                        addend = scales(bias, i)
                    own = abs((number - mean) * weight)
                    write(y, first + i, (number - mean) * weight + addend)
                    small = own + abs(addend) + abs(number * weight)
                    write(magnitude, first + i, own + abs(weight) * large + _ERRORS * small / length)

        if p.bias:
            return reference_source(workload, target, normalise, items=rows)

        def without_bias(x: Any, scale: Any, y: Any, magnitude: Any, start: Any, stop: Any) -> None:
            normalise(x, scale, scale, y, magnitude, start, stop)

        return reference_source(workload, target, without_bias, items=rows)

    def points(
        self,
        workload: Workload[LayerNormParams],
        arrays: Mapping[str, Any],
        scalars: Mapping[str, float],
        flat_indices: Any,
        output: str = "y",
    ) -> np.ndarray[Any, np.dtype[Any]]:
        p = workload.params
        _, length = rows_of(p)
        arguments = {spec.name: spec for spec in workload.signature}
        flat = np.asarray(flat_indices, np.int64)
        rows, own = np.unique(flat // length, return_inverse=True)
        x = np.stack([gather(arrays, arguments["x"], row * length + np.arange(length)) for row in rows])
        distance = x - x.mean(axis=1, keepdims=True) if p.centred else x
        normal = distance / np.sqrt((distance**2).mean(axis=1, keepdims=True) + p.epsilon)
        column = flat % length
        found = normal[own, column] * gather(arrays, arguments["scale"], column)
        if p.bias:
            found = found + gather(arrays, arguments["bias"], column)
        return np.asarray(found)
