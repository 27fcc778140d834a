"""What lies in a module beside its parameters and buffers: settings such as a convolution's stride, and plain tensors.

A graph that was made of a model has them as constants.
"""

from __future__ import annotations

import contextlib
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from schedsearch.torch.held import Refusal

OURS = ("forward", "_replicate_for_data_parallel")  # what optimized modules have
_NAMES = frozenset(vars(nn.Module())) | {*OURS}  # of which none is a setting
_SINGLE = bool, int, float, str, types.NoneType, torch.dtype, types.FunctionType, types.BuiltinFunctionType
Settings = dict[str, dict[str, Any]]  # the name of a module -> the name of an attribute -> its value


class _Same:
    """Equal to one tensor only."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __eq__(self, other: object) -> bool:
        return self._tensor is (other._tensor if isinstance(other, _Same) else other)

    __hash__ = None  # type: ignore[assignment]


class Watches:
    """Whether modules still have their settings.

    Args:
        modules: by name, as in `expected`.
        expected: their settings.
    """

    def __init__(self, modules: Mapping[str, nn.Module], expected: Settings) -> None:
        self._each: list[tuple[Callable[[Any], Any], dict[str, Any], Any]] = []
        for name, own in expected.items():
            if own:
                get = operator.itemgetter(*own)
                self._each.append((get, vars(modules[name]), get(own)))

    def unchanged(self) -> bool:
        try:
            for get, held, expected in self._each:
                if expected != get(held):  # not the other way round, see `_Same`
                    return False
        except KeyError:
            return False
        return True


def settings_of(module: nn.Module) -> Settings:
    """The settings of a module and of all in it."""
    return {name: _own(each) for name, each in module.named_modules()}


def settled(module: nn.Module, args: tuple[Any, ...]) -> Settings:
    """The settings of a module after a call, which another call would leave as they are.

    Raises:
        Refusal: each call changes them: it counts, or it leaves results in the module, which a graph would not do.
    """
    before = settings_of(module)
    for _ in range(2):  # the first may fill a cache
        module(*own_copies(args))
        after = settings_of(module)
        if after == before:
            return after
        changed, before = _changed(before, after), after
    raise Refusal(f"each call of {type(module).__name__} changes {changed}, which kernels would not do")


def own_copies(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with copies of their tensors, because a model may write to its inputs."""
    copies: tuple[Any, ...] = pytree.tree_map_only(torch.Tensor, lambda each: each.detach().clone(), args)
    return copies


@contextlib.contextmanager
def same_attributes(module: nn.Module) -> Iterator[set[nn.Module]]:
    """Gives a module and all in it the attributes back that they had, where a run of it or torch.export gave them others.

    Yields:
        Modules that keep what they have in the end.
    """
    before = [(each, _attributes(each)) for each in module.modules()]
    left: set[nn.Module] = set()
    try:
        yield left
    finally:
        for each, held in before:
            if each not in left:
                for name in _attributes(each).keys() - held.keys():
                    del vars(each)[name]
                vars(each).update(held)


@contextlib.contextmanager
def same_buffers(module: nn.Module) -> Iterator[None]:
    """Gives the buffers of a module the values back that they had: a model may count its calls in one."""
    before = [
        (each._buffers, name, buffer, buffer.clone())
        for each in module.modules()
        for name, buffer in each._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for where, name, buffer, values in before:
                where[name] = buffer
                if not torch.equal(buffer, values):
                    buffer.copy_(values)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in OURS}


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: _frozen(value) for name, value in vars(module).items() if name not in _NAMES and _is_setting(value)}


def _is_setting(value: Any) -> bool:
    if type(value) in (list, tuple, torch.Size):
        return all(map(_is_setting, value))
    if type(value) is dict:
        return all(map(_is_setting, value.values()))
    return isinstance(value, (*_SINGLE, torch.Tensor))


def _frozen(value: Any) -> Any:
    """A copy that is equal to a value as long as that does not change."""
    if isinstance(value, torch.Tensor):
        return _Same(value)
    if type(value) is dict:
        return {name: _frozen(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_frozen, value))
    return value


def _changed(before: Settings, after: Settings) -> str:
    """The first attribute that differs."""
    for module, own in after.items():
        for name in own.keys() | before.get(module, {}).keys():
            if name not in own or name not in before.get(module, {}) or own[name] != before[module][name]:
                return f"its attribute {f'{module}.{name}'.strip('.')}"
    return "its modules"
