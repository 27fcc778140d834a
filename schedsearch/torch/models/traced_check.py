"""Whether a module is as it was when a plan was made, as a function that torch.compile can trace.

What it reads becomes a guard of the compiled graph: after a change the model is compiled again. Its source is written for
each plan, so that what it expects lies in the code. torch.compile would guard a table of it as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from schedsearch.torch.models.plan import Plan
from schedsearch.torch.models.settings import Object, is_constant

_HELD = {"PARAMETER": "_parameters", "BUFFER": "_buffers"}


def traced_check(plan: Plan) -> Callable[[nn.Module], list[Any] | None]:
    """A function that returns the tensors of a module that a plan takes, or None if the module has changed.

    Settings that are not constants, such as arrays and functions, are not compared.
    """
    writer = _Writer()
    children = {name: 0 for name, _ in plan.modules}
    for name, _ in plan.modules:
        if name:
            children[name.rpartition(".")[0]] += 1
    for name, cls in plan.modules:
        writer.module(name, cls, children[name])
    for name, own in plan.settings.items():
        writer.settings(writer.modules[name], own)
    for name, cls in plan.modules:
        for base in cls.__mro__:
            seen = {each: value for each, value in plan.of_classes.get(base, {}).items() if _is_seen(cls, base, each)}
            hidden = plan.settings.get(name, {}).keys()
            writer.settings(writer.modules[name], {each: value for each, value in seen.items() if each not in hidden})
    for name, held, last in plan.absent:
        writer.refuse_unless(f"{writer.modules[name]}.{_HELD[held]}.get({last!r}) is None")
    tensors = [writer.tensor(kind, path, facts) for (kind, path), facts in zip(plan.paths(), plan.tensors)]
    for (owner, held, last), (kind, path) in plan.ties:
        writer.refuse_unless(f"{writer.modules[owner]}.{held}.get({last!r}) is {writer.place(kind, path)}")
    return writer.function(tensors)


def _is_seen(kind: type, base: type, name: str) -> bool:
    """Whether an attribute of a class is what its subclass has under this name."""
    return next(each for each in kind.__mro__ if name in vars(each)) is base


class _Writer:
    """Source of the function.

    Attributes:
        modules: name -> variable.
    """

    def __init__(self) -> None:
        self.modules: dict[str, str] = {}
        self._lines: list[str] = []
        self._names: dict[str, Any] = {}
        self._numbers = itertools.count()

    def refuse_unless(self, condition: str) -> None:
        self._lines.append(f"if not ({condition}): return None")

    def module(self, name: str, kind: type, children: int) -> None:
        parent, _, last = name.rpartition(".")
        variable = self.modules[name] = f"m{len(self.modules)}"
        self._lines.append(f"{variable} = {f'{self.modules[parent]}._modules.get({last!r})' if name else 'module'}")
        self.refuse_unless(f"type({variable}) is {self._constant(kind)}")
        self.refuse_unless(f"len({variable}._modules) == {children}")
        if name:
            self.refuse_unless(f"not {variable}.training")

    def settings(self, owner: str, own: Mapping[str, Any]) -> None:
        for name, value in own.items():
            if not name.isidentifier():
                continue
            if isinstance(value, Object):
                if getattr(value.value, "__dict__", None):
                    self.settings(f"{owner}.{name}", value.attributes)
            elif is_constant(value):
                self.refuse_unless(f"{owner}.{name} == {self._constant(value)}")

    def place(self, kind: str, path: str) -> str:
        owner, _, name = path.rpartition(".")
        held = _HELD.get(kind)
        return f"getattr({self.modules[owner]}, {name!r})" if held is None else f"{self.modules[owner]}.{held}.get({name!r})"

    def tensor(self, kind: str, path: str, facts: tuple[torch.dtype, torch.Size, torch.device]) -> str:
        """The variable of a tensor that the plan takes."""
        variable = self._fresh("t")
        self._lines.append(f"{variable} = {self.place(kind, path)}")
        dtype, shape, device = facts
        self.refuse_unless(f"{variable} is not None")
        self.refuse_unless(f"{variable}.dtype == {self._constant(dtype)} and {variable}.shape == {tuple(shape)}")
        self.refuse_unless(f"{variable}.device == {self._constant(device)}")
        return variable

    def function(self, tensors: list[str]) -> Callable[[nn.Module], list[Any] | None]:
        body = "\n    ".join([*self._lines, f"return [{', '.join(tensors)}]"])
        exec(compile(f"def unchanged(module):\n    {body}\n", "<unchanged>", "exec"), self._names)
        found: Callable[[nn.Module], list[Any] | None] = self._names["unchanged"]
        return found

    def _constant(self, value: Any) -> str:
        """The literal of a value, or a name of the function's globals that stands for it."""
        if _has_literal(value):
            return repr(value)
        name = self._fresh("c")
        self._names[name] = value
        return name

    def _fresh(self, letter: str) -> str:
        return f"{letter}{next(self._numbers)}"


def _has_literal(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_has_literal, value))
    if type(value) is dict:
        return all(map(_has_literal, value)) and all(map(_has_literal, value.values()))
    return type(value) in (bool, int, str, type(None)) or (type(value) is float and math.isfinite(value))
