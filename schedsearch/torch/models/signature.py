"""Arguments of calls beside those of an example: by keyword or with defaults, and what tensors must be like."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.utils import _pytree as pytree

_NONE = inspect.Parameter.empty
_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
_CONSTANTS = bool, int, float, str, type(None)


@dataclass(frozen=True)
class Arguments:
    """How a module's forward takes its arguments.

    Attributes:
        count: how many an example has.
        positional: (name, default) of each that may be given by position.
        named: name -> default of those that are given by keyword only.
    """

    count: int
    positional: tuple[tuple[str, Any], ...] = ()
    named: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, module: nn.Module, count: int) -> Self:
        try:
            parameters = inspect.signature(module.forward).parameters.values()
        except (TypeError, ValueError):
            return cls(count)
        positional = tuple((each.name, each.default) for each in parameters if each.kind in _POSITIONAL)
        named = {each.name: each.default for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}
        return cls(count, positional, named)

    def arranged(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[Any, ...] | None:
        """As many positional arguments as the example has, for the same call; None if there are none."""
        given, rest = list(args), dict(kwargs)
        for name, default in self.positional[len(args) :]:
            if name in rest:
                given.append(rest.pop(name))
            elif default is not _NONE:
                given.append(default)
            else:
                break
        for name, value in rest.items():
            if self.named is None or name not in self.named or not _is_default(value, self.named[name]):
                return None
        while len(given) > self.count:
            value = given.pop()
            if len(given) >= len(self.positional) or not _is_default(value, self.positional[len(given)][1]):
                return None
        return tuple(given) if len(given) == self.count else None


def _is_default(value: object, default: object) -> bool:
    return value is default or (type(value) is type(default) and type(value) in _CONSTANTS and bool(value == default))


def facts_of(leaf: object) -> Any:
    """What a leaf of later calls must be like; see `is_like`."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    form = next((each for each in (torch.channels_last, torch.contiguous_format) if _has_form(leaf, each)), None)
    return leaf.dtype, tuple(leaf.shape), leaf.device, form, None if form is not None else leaf.stride()


def _has_form(tensor: torch.Tensor, form: torch.memory_format) -> bool:
    if form is torch.channels_last and tensor.dim() != 4:
        return False
    return bool(tensor.is_contiguous(memory_format=form))


def is_like(given: object, expected: object) -> bool:
    if not isinstance(given, torch.Tensor):
        return type(given) is type(expected) and bool(given == expected)
    if not isinstance(expected, tuple) or len(expected) != 5 or type(given) not in (torch.Tensor, nn.Parameter):
        return False
    dtype, shape, device, form, strides = expected
    if given.dtype != dtype or tuple(given.shape) != shape or given.device != device:
        return False
    return bool(given.is_contiguous(memory_format=form) if form is not None else given.stride() == strides)


def unlike(args: tuple[object, ...], kwargs: dict[str, Any], examples: Sequence[Sequence[Any]]) -> str:
    """What is said of a call that is like none of some examples, each a list of facts."""
    given = ", ".join(map(_shown, pytree.tree_leaves((args, kwargs))))
    made_for = "; ".join(", ".join(map(_fact, each)) for each in examples)
    return f"{given} runs as before: kernels are made for {made_for}; {_advice(args, kwargs)}"


def _advice(args: tuple[object, ...], kwargs: dict[str, Any]) -> str:
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


def _shown(each: object) -> str:
    if not isinstance(each, torch.Tensor):
        return f"{each!r:.60}"
    return f"{_words(each.dtype, tuple(each.shape))} with strides {each.stride()}"


def _fact(expected: object) -> str:
    if not isinstance(expected, tuple) or len(expected) != 5:
        return f"{expected!r:.60}"
    dtype, shape, _, form, strides = expected
    return f"{_words(dtype, shape)} in {str(form).removeprefix('torch.')}" if form is not None else f"strides {strides}"


def _words(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
