"""The `forward` of an optimized module, which says once when a call is unlike every example."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils import _pytree as pytree

from schedsearch.torch.models.forward import OptimizedForward


class TellingForward(OptimizedForward):
    """As `OptimizedForward`; copies of the module do not say it again."""

    _told = False

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's forward was before."""
        if not self._told and not torch.compiler.is_compiling():
            self._tell(args, kwargs)
        return super().original(*args, **kwargs)

    def _tell(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._module.training or any(plan.leaves(args, kwargs) is not None for plan, _ in self._plans):
            return
        self._told = True
        given = ", ".join(map(_shown, pytree.tree_leaves((args, kwargs))))
        examples = "; ".join(", ".join(map(_fact, plan._expected)) for plan, _ in self._plans)
        warnings.warn(
            f"a call of the optimized {type(self._module).__name__} with {given} runs as before: kernels are made for "
            f"{examples}; {_advice(args, kwargs)}",
            stacklevel=4,
        )


def _advice(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    if any(each.layout is torch.strided and not _is_dense(each) for each in tensors):
        return "an image with gaps in memory has to be copied: x.contiguous(memory_format=torch.channels_last)"
    return "call optimize_ with an example like it, too"


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie one after the other, in some order of the axes."""
    expected = 1
    for stride, extent in sorted((stride, extent) for stride, extent in zip(tensor.stride(), tensor.shape) if extent != 1):
        if stride != expected:
            return False
        expected *= extent
    return True


def _shown(each: Any) -> str:
    if not isinstance(each, torch.Tensor):
        return f"{each!r:.60}"
    return f"{_words(each.dtype, tuple(each.shape))} with strides {each.stride()}"


def _fact(expected: Any) -> str:
    if not isinstance(expected, tuple) or len(expected) != 5:
        return f"{expected!r:.60}"
    dtype, shape, _, form, strides = expected
    return f"{_words(dtype, shape)} in {str(form).removeprefix('torch.')}" if form is not None else f"strides {strides}"


def _words(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
