"""The reference of softmax in float64, element by element of a row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from schedsearch.ops.softmax import SoftmaxParams, along
from schedsearch.target import Target
from schedsearch.template import KernelSource, Reference
from schedsearch.templates.parts.reference import gather, reader, reference_source, sharer, writer
from schedsearch.workload import Workload

_ERRORS = 8.0  # of two exponentials, a division and the conversions, beside those of the sum
_NEGLIGIBLE = 2.0**-24  # a sum of exponentials that is so small beside 1, however often it is rounded


class SoftmaxReference(Reference[SoftmaxParams]):
    """Each item is a row along the axis.

    The magnitude counts the roundoffs of float32 that a number may have, relative to it:

    - An exponent x - m that is rounded is an error of 2 |x - m| in its exponential, and in the sum that of their mean.
    - Each addition to the sum is one, in any order. It is none if all exponentials but those of m, which are ones, are
      negligible: additions of ones are exact, and those of negligible numbers err by no more than these.

    It is multiplied by the length of the row, so it is divided by it here.
    """

    def kernel(self, workload: Workload[SoftmaxParams], target: Target) -> KernelSource:
        outer, length, inner = along(workload.params)
        read, write, items, log = reader(target, workload.params.dtype), writer(target), sharer(target), workload.params.log

        def softmax(x: Any, y: Any, magnitude: Any, start: Any, stop: Any) -> None:
            for row in items(start, stop):
                first = row // inner * length * inner + row % inner
                largest = read(x, first)
                for i in range(length):
                    largest = max(largest, read(x, first + i * inner))
                total, spread, negligible = 0.0, 0.0, 0.0
                for i in range(length):
                    distance = read(x, first + i * inner) - largest
                    term = math.exp(distance)
                    total += term
                    spread -= term * distance
                    negligible += term if distance < 0.0 else 0.0
                additions = float(length) if negligible * length > _NEGLIGIBLE else 1.0
                for i in range(length):
                    distance = read(x, first + i * inner) - largest
                    share = math.exp(distance) / total
                    errors = (additions + _ERRORS + 2.0 * (spread / total - distance)) / length
                    if log:
                        write(y, first + i * inner, distance - math.log(total))
                        write(magnitude, first + i * inner, errors * (1.0 + math.log(total)))
                    else:
                        write(y, first + i * inner, share)
                        write(magnitude, first + i * inner, errors * share)

        return reference_source(workload, target, softmax, items=outer * inner)

    def points(
        self,
        workload: Workload[SoftmaxParams],
        arrays: Mapping[str, Any],
        scalars: Mapping[str, float],
        flat_indices: Any,
        output: str = "y",
    ) -> np.ndarray[Any, np.dtype[Any]]:
        outer, length, inner = along(workload.params)
        row, column, lane = np.unravel_index(np.asarray(flat_indices, np.int64), (outer, length, inner))
        found = np.empty(len(row))
        for place, (i, j, k) in enumerate(zip(row, column, lane)):
            x = gather(arrays, workload.signature[0], (i * length + np.arange(length)) * inner + k)
            shifted = x - x.max()
            total = np.exp(shifted).sum()
            found[place] = shifted[j] - np.log(total) if workload.params.log else np.exp(shifted[j]) / total
        return found
