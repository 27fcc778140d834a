"""A base of references for operators that sum up products of x and weight and end with an epilogue."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from schedsearch.ops import ArgSpec
from schedsearch.ops.dtypes import dtype
from schedsearch.template import Reference
from schedsearch.template.contract import P
from schedsearch.workload import Workload

_PRODUCTS = 1 << 22  # that `points` holds at once


class SumReference(Reference[P]):
    """The magnitude is the sum of |x| |weight| after the epilogue of `schedsearch.templates.parts.reference`."""

    @abstractmethod
    def sums(self, workload: Workload[P], arrays: Mapping[str, Any], scalars: Mapping[str, float], flat: Any) -> Any:
        """`points` of a few indices (int64): float64, not yet as integers. `scalars` holds all of them."""

    def points(
        self,
        workload: Workload[P],
        arrays: Mapping[str, Any],
        scalars: Mapping[str, float],
        flat_indices: Any,
        output: str = "y",
    ) -> np.ndarray[Any, np.dtype[Any]]:
        """See `Reference.points`. Omitted scalars have their defaults. Arrays of bfloat16 may hold values or their bits."""
        indices = np.asarray(flat_indices, dtype=np.int64)
        chunk = max(_PRODUCTS // workload.work.reduction, 1)
        values = {scalar.name: float(np.float32(scalars.get(scalar.name, scalar.default))) for scalar in workload.scalars}
        parts = [self.sums(workload, arrays, values, indices[at : at + chunk]) for at in range(0, len(indices), chunk)]
        found = np.concatenate(parts) if parts else np.empty(0)
        return found if is_float(workload.output) else found.astype(np.int64)


def is_float(output: ArgSpec) -> bool:
    """Whether the truth is a float: the output is one, or is rounded from one."""
    return dtype(output.dtype).is_float or output.roundings > 0
