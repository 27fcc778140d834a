"""When a call of a model records or transforms operations, instead of computing numbers now."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def transforming() -> bool:
    """Whether vmap, jvp or another transform of torch.func is under way, or forward-mode differentiation: operators of ours
    have no rules for them."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


@torch.compiler.assume_constant_result
def transformed_while_tracing() -> bool:
    """As `transforming`, for a call that torch.compile traces."""
    return transforming()


def transformed() -> bool:
    """As `transforming`, for calls that torch.compile may trace."""
    return bool(transformed_while_tracing()) if torch.compiler.is_compiling() else transforming()


@torch.compiler.assume_constant_result
def _computes_while_tracing() -> bool:
    # Traced, `is_exporting` would be a constant of torch.compile, which is True before PyTorch 2.13.
    return not torch.compiler.is_exporting() and not transforming()


def computes() -> bool:
    """Whether calls compute, or are compiled to compute here. Exported and traced graphs go elsewhere, where there are no
    kernels."""
    if torch.compiler.is_compiling():
        return bool(_computes_while_tracing())
    return not torch.jit.is_tracing() and not transforming()
