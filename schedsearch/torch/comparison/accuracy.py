"""How far a result may be from PyTorch's in float32: one table for single layers and for whole networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Errors(NamedTuple):
    """Largest differences from PyTorch in float32, over the largest magnitude of that.

    Attributes:
        ours: of the kernel or network; NaN if its result has one.
        torch: of PyTorch in the dtype of the result.
    """

    ours: float
    torch: float


def errors_of(exact: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> Errors:
    """The errors of two results of one shape; `exact` is PyTorch's in float32."""
    reference = exact.float()
    most = float(reference.abs().max()) or 1.0
    return Errors(*(float((each.float() - reference).abs().max()) / most for each in (ours, theirs)))


@dataclass(frozen=True)
class Allowed:
    """What errors a result may have.

    Attributes:
        by_dtype: dtype of the result -> the error that is always allowed; results of other dtypes have to be exact.
        by_tf32: the same for float32 whose products are computed in TF32.
        times_torch: as many times PyTorch's own error are allowed as well, if that is more.
    """

    by_dtype: dict[torch.dtype, float]
    by_tf32: float
    times_torch: float

    def excess(self, errors: Errors, dtype: torch.dtype, *, tf32: bool = False) -> str:
        """Why a result is not accepted; empty if it is.

        Args:
            tf32: whether its products are computed in TF32.
        """
        most = max(self.by_tf32 if tf32 else self.by_dtype.get(dtype, 0.0), self.times_torch * errors.torch)
        if errors.ours <= most:  # false for NaN
            return ""
        return f"its error against float32 is {errors.ours:.1e}; allowed: {most:.1e} (PyTorch's own: {errors.torch:.1e})"


LAYER = Allowed({torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-5}, by_tf32=2e-3, times_torch=4.0)
# The errors of many layers add up, in PyTorch's result as well.
NETWORK = Allowed({torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-3}, by_tf32=1e-3, times_torch=2.0)
