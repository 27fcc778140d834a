"""References of operators of which every element depends on whole arguments: NumPy computes all outputs at once."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from schedsearch.ops.bounded import in_use
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.target import Target
from schedsearch.template import KernelSource, Reference
from schedsearch.template.contract import P
from schedsearch.workload import Workload

# As in `verification.compare`.
UNDEFINED = {"float64": math.nan, "int64": -(2**63)}

Array = np.ndarray[Any, np.dtype[Any]]


class WholeReference(Reference[P]):
    """Subclasses implement `compute`. Elements of bounded outputs that are not in use have no truth."""

    pointwise: ClassVar[bool] = False

    @abstractmethod
    def compute(self, workload: Workload[P], arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """Output -> numbers. A bounded output has the extents in use; the arrays with extents may be left out."""

    def truths(
        self,
        workload: Workload[P],
        arrays: Mapping[str, Any],
        scalars: Mapping[str, float],
        run: Callable[[KernelSource], Mapping[str, Any]],
        target: Target,
    ) -> Mapping[str, Any]:
        given = dict(self.compute(workload, arrays))
        found = {}
        for spec in workload.outputs:
            if spec.extents:
                given.setdefault(spec.extents, np.array(given[spec.name].shape, np.int64))
        for spec in workload.outputs:
            wide = np.float64 if dtype_of(spec.dtype).is_float else np.int64
            whole = np.full(spec.shape, UNDEFINED[wide.__name__], wide)
            whole[in_use(spec.shape, given[spec.extents]) if spec.extents else ...] = given[spec.name]
            found[spec.name] = whole
        return found

    def kernel(self, workload: Workload[P], target: Target) -> KernelSource:
        raise NotImplementedError("truths() computes whole arrays")

    def points(
        self,
        workload: Workload[P],
        arrays: Mapping[str, Any],
        scalars: Mapping[str, float],
        flat_indices: Any,
        output: str = "y",
    ) -> Any:
        whole = self.truths(workload, arrays, scalars, dict, None)  # type: ignore[arg-type]
        return whole[output].reshape(-1)[np.asarray(flat_indices, np.int64)]
