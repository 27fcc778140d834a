"""Kernels as candidates of Inductor's max-autotune, beside the code that Inductor makes of the same layer.

The operators are ours, so that nothing changes for PyTorch's own. Inductor passes tensors by position and leaves out those
that are None; so there is an operator for each number of arrays, and a key that says what they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from schedsearch.torch.layers import kernel_op
from schedsearch.torch.layers.selection import by_torch

_MOST = 6  # arrays of a layer: x, weight, bias, scale, shift and residual
_library = torch.library.Library("schedsearch", "FRAGMENT")


def operator_for(arrays: Sequence[object]) -> Any:
    """The operator `candidate_N(array_0, ..., key)` that computes as `call` does."""
    return getattr(torch.ops.schedsearch, f"candidate_{len(arrays)}").default


@functools.cache
def register() -> str:
    """Lets Inductor choose between a kernel and its own code; returns why it cannot, empty if it can."""
    if torch.__version__ < (2, 12):  # it takes operators of `torch.library.custom_op` only, or none
        return f"candidates of max-autotune need PyTorch 2.12 or newer (this is {torch.__version__})"
    from torch._inductor.kernel.custom_op import CustomOpConfig, register_custom_op_autotuning

    for count in range(1, _MOST + 1):
        operator = operator_for(range(count))
        captures = {"benchmark_with_cudagraphs": True} if torch.cuda.is_available() else {}
        try:
            register_custom_op_autotuning(operator, configs=[CustomOpConfig(_plain)], **captures)
        except TypeError:  # an older signature
            register_custom_op_autotuning(operator, configs=[CustomOpConfig(_plain)])
    return ""


def _run(*given: Any) -> torch.Tensor:
    return kernel_op._find(given[-1])(given[:-1])


def _fake(*given: Any) -> torch.Tensor:
    return kernel_op._find(given[-1]).fake(given[:-1])


def _plain(*arrays: torch.Tensor, key: str) -> torch.Tensor:
    """The same by operators of PyTorch, which Inductor compiles."""
    call = kernel_op._find(key)
    operands = {spec.name: each for spec, each in zip(call.workload.signature, arrays)}
    return by_torch(call.workload, operands, call.scalars)


def _define(count: int) -> None:
    names = ", ".join(f"Tensor array_{place}" for place in range(count))
    name = f"candidate_{count}"
    _library.define(f"{name}({names}, str key) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    run: Callable[..., torch.Tensor] = _run
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    torch.library.register_fake(f"schedsearch::{name}", _fake, lib=_library)


for _count in range(1, _MOST + 1):
    _define(_count)
