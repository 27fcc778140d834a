"""Arguments of calls beside those of an example: by keyword or with defaults, and what tensors must be like."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

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

    def arranged(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
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


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and type(value) in _CONSTANTS and bool(value == default))


def facts_of(leaf: Any) -> Any:
    """What a leaf of later calls must be like; see `is_like`."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    form = next((each for each in (torch.channels_last, torch.contiguous_format) if _has_form(leaf, each)), None)
    return leaf.dtype, tuple(leaf.shape), leaf.device, form, None if form is not None else leaf.stride()


def _has_form(tensor: torch.Tensor, form: torch.memory_format) -> bool:
    if form is torch.channels_last and tensor.dim() != 4:
        return False
    return bool(tensor.is_contiguous(memory_format=form))


def is_like(given: Any, expected: Any) -> bool:
    if not isinstance(given, torch.Tensor):
        return type(given) is type(expected) and bool(given == expected)
    if not isinstance(expected, tuple) or len(expected) != 5 or type(given) not in (torch.Tensor, nn.Parameter):
        return False
    dtype, shape, device, form, strides = expected
    if given.dtype != dtype or tuple(given.shape) != shape or given.device != device:
        return False
    return bool(given.is_contiguous(memory_format=form) if form is not None else given.stride() == strides)
