"""What lies in a module beside its parameters and buffers: settings such as a convolution's stride, and plain tensors.

A graph that was made of a model has them as constants. Settings of a class count as well, as an instance may have others.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import types
from collections.abc import Iterator, Set
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from schedsearch.torch.refusal import Refusal

OURS = ("forward", "_replicate_for_data_parallel")  # what optimized modules have
_NAMES = frozenset(vars(nn.Module())) | {*OURS}  # of which none is a setting
_OF_MODULES = frozenset(dir(nn.Module))
_SINGLE = bool, int, float, complex, str, bytes, types.NoneType, torch.dtype, torch.device
_DEEPEST = 4  # objects within objects that are looked into
Settings = dict[str, dict[str, Any]]  # the name of a module -> the name of an attribute -> its value


class _Frozen:
    """Equal to a value as long as that does not change; and to another one of these that is equal."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return bool(self._is(other.value if type(other) is type(self) else other))

    def _is(self, other: object) -> bool:
        """Whether another value is the same: this one's or a live one."""
        return self.value is other

    __hash__ = None  # type: ignore[assignment]


class _Array(_Frozen):
    """An array of NumPy."""

    def _is(self, other: Any) -> bool:
        return isinstance(other, np.ndarray) and other.dtype == self.value.dtype and np.array_equal(self.value, other)


class _Mapping(_Frozen):
    """A dictionary of a class of its own."""

    def _is(self, other: object) -> bool:
        return isinstance(other, dict) and bool(self.value == dict(other))


class Object(_Frozen):
    """An object by its class and its attributes: name -> frozen value."""

    def __init__(self, value: Any, attributes: dict[str, Any]) -> None:
        super().__init__(value)
        self.kind, self.attributes = type(value), attributes

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Object):
            return self.kind is other.kind and self.attributes == other.attributes
        return type(other) is self.kind and self.attributes == _attributes_of(other)


def settings_of(module: nn.Module) -> Settings:
    """The settings of a module and of all in it."""
    return {name: _own(each) for name, each in module.named_modules()}


def settings_of_classes(module: nn.Module) -> dict[type, dict[str, Any]]:
    """The constants in the classes of a module and of all in it, without PyTorch's own."""
    kinds = dict.fromkeys(kind for each in module.modules() for kind in type(each).__mro__)
    return {
        kind: {
            name: _frozen(value) for name, value in vars(kind).items() if not name.startswith("__") and is_constant(value)
        }
        for kind in kinds
        if issubclass(kind, nn.Module) and not kind.__module__.startswith("torch.")
    }


def hides(module: nn.Module, names: Set[str]) -> bool:
    """Whether a module has an attribute with another name than these that hides one of its class."""
    return any(hasattr(type(module), name) for name in vars(module).keys() - names - _NAMES - _OF_MODULES)


def settled(module: nn.Module, args: tuple[object, ...]) -> Settings:
    """The settings of a module after a call, which another call would leave as they are.

    Raises:
        Refusal: each call changes them: it counts, or it leaves results in the module, which a graph would not do; or there
            are modules of which PyTorch does not know.
    """
    for name, each in module.named_modules():
        for last, value in vars(each).items():
            if last not in _NAMES and _has_modules(value):
                raise Refusal(
                    f"its attribute {f'{name}.{last}'.strip('.')} holds modules that are not registered, whose changes "
                    "cannot be noticed; use nn.ModuleList or nn.ModuleDict"
                )
    before = settings_of(module)
    for _ in range(2):  # the first may fill a cache
        module(*own_copies(args))
        after = settings_of(module)
        if after == before:
            return after
        changed, before = _changed(before, after), after
    raise Refusal(f"each call of {type(module).__name__} changes {changed}, which kernels would not do")


def own_copies(args: tuple[object, ...]) -> tuple[Any, ...]:
    """Arguments with copies of their tensors, because a model may write to its inputs."""
    copies: tuple[Any, ...] = pytree.tree_map_only(torch.Tensor, lambda each: each.detach().clone(), args)
    return copies


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Sets a module and everything in it to evaluation mode, and back to what each was."""
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, training in modes:
            each.training = training


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
    return {name: _frozen(value) for name, value in vars(module).items() if name not in _NAMES}


def is_constant(value: Any) -> bool:
    """Whether a value consists of numbers, strings and the like, which torch.compile can compare."""
    if type(value) in (list, tuple, torch.Size):
        return all(map(is_constant, value))
    if type(value) is dict:
        return all(map(is_constant, value)) and all(map(is_constant, value.values()))
    return type(value) in _SINGLE


def _has_modules(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_modules, value.values()))
    if isinstance(value, list | tuple | set):
        return any(map(_has_modules, value))
    return isinstance(value, nn.Module)


def _frozen(value: object, depth: int = 0) -> Any:
    """What is equal to a value as long as that does not change."""
    if type(value) in _SINGLE:
        return value
    if depth > _DEEPEST or isinstance(value, torch.Tensor):
        return _Frozen(value)
    if isinstance(value, np.ndarray):
        return _Array(value.copy())
    if isinstance(value, dict):
        items = {name: _frozen(each, depth + 1) for name, each in value.items()}
        return items if type(value) is dict else _Mapping(items)
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(_frozen(each, depth + 1) for each in value)
    if isinstance(value, set | frozenset):
        return frozenset(value)
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.ModuleType | nn.Module):
        return _Frozen(value)
    if attributes := _attributes_of(value):
        return Object(value, {name: _frozen(each, depth + 1) for name, each in attributes.items()})
    if any("__eq__" in vars(kind) for kind in type(value).__mro__[:-1]):  # a range, a number of NumPy, a deque
        with contextlib.suppress(Exception):
            return copy.copy(value)
    return _Frozen(value)


def _attributes_of(value: object) -> dict[str, Any]:
    """The attributes of an object, by name."""
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, types.MethodType):
        return {"__func__": value.__func__}
    if isinstance(value, enum.Enum):
        return {}
    slots = [name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name)]
    return {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}


def _slots(kind: type) -> tuple[str, ...]:
    names = kind.__dict__.get("__slots__", ())
    return tuple(name for name in ([names] if isinstance(names, str) else names) if not name.startswith("__"))


def _changed(before: Settings, after: Settings) -> str:
    """The first attribute that differs."""
    for module, own in after.items():
        for name in own.keys() | before.get(module, {}).keys():
            if name not in own or name not in before.get(module, {}) or own[name] != before[module][name]:
                return f"its attribute {f'{module}.{name}'.strip('.')}"
    return "its modules"
