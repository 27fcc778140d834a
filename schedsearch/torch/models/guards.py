"""Whether a module is as it was when a plan was made: the guards of a plan, as two functions that are written for it.

One is for calls from Python, and compares everything. The other is for torch.compile: what it reads becomes a guard of the
compiled graph, and after a change the model is compiled again. It therefore reads constants only, which lie in its code;
torch.compile would guard a table of them as well. Both find everything from the module that they are given, so that they
serve copies of it, too.

See docs/decisions/178-optimized-models-keep-their-own-checks.md for why they are not those of torch.compile.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_all_modules

from schedsearch.torch.models.instance_forward import is_replaced
from schedsearch.torch.models.places import HOLDERS
from schedsearch.torch.models.plan import Plan
from schedsearch.torch.models.settings import Object, hides, is_constant

Guard = Callable[[nn.Module], list[Any] | None]  # the tensors of a module that a plan takes; None if it has changed


def guard_of_calls(plan: Plan, module: nn.Module) -> Guard:
    """The guard for calls from Python.

    Modules must be of the same classes, in evaluation mode, without hooks and with the same settings, and tensors of the
    same dtypes, shapes and devices.
    """
    writer = _Writer(plan, traced=False)
    writer.refuse_if(f"{writer.constant(of_all_modules)}._global_forward_hooks")
    writer.refuse_if(f"{writer.constant(of_all_modules)}._global_forward_pre_hooks")
    writer.structure()
    held = dict(module.named_modules())
    for name, names in plan.names.items():
        variable = writer.modules[name]
        hidden = f"{writer.constant(hides)}({variable}, {writer.constant(names)})"
        writer.refuse_if(f"len({writer.vars(variable)}) != {len(vars(held[name]))} and {hidden}")
    for name, own in plan.settings.items():
        writer.compare(own, writer.vars(writer.modules[name]))
    for kind, own in plan.of_classes.items():
        writer.compare(own, writer.constant(vars(kind)))
    guard = writer.function()

    def unchanged(module: nn.Module) -> list[Any] | None:
        try:
            return guard(module)
        except Exception:  # an attribute is not there, or what is there now has no truth value, such as an array
            return None

    return unchanged


def guard_of_traces(plan: Plan) -> Guard:
    """The guard that torch.compile traces. Settings that are no constants, as arrays and functions, are not compared."""
    writer = _Writer(plan, traced=True)
    writer.structure()
    for name, own in plan.settings.items():
        writer.settings(writer.modules[name], own)
    for name, cls in plan.modules:
        for base in cls.__mro__:
            seen = {each: value for each, value in plan.of_classes.get(base, {}).items() if _is_seen(cls, base, each)}
            hidden = plan.settings.get(name, {}).keys()
            writer.settings(writer.modules[name], {each: value for each, value in seen.items() if each not in hidden})
    return writer.function()


def _is_seen(kind: type, base: type, name: str) -> bool:
    """Whether an attribute of a class is what its subclass has under this name."""
    return next(each for each in kind.__mro__ if name in vars(each)) is base


class _Writer:
    """Source of a guard.

    Attributes:
        modules: name -> variable.
    """

    def __init__(self, plan: Plan, *, traced: bool) -> None:
        self._plan, self._traced = plan, traced
        self.modules: dict[str, str] = {}
        self._lines: list[str] = []
        self._names: dict[str, Any] = {}
        self._numbers = itertools.count()

    def refuse_if(self, condition: str) -> None:
        self._lines.append(f"if {condition}: return None")

    def vars(self, module: str) -> str:
        """The attributes of a module by its variable."""
        return f"of_{module}"

    def _attribute(self, module: str, name: str) -> str:
        """From the dictionary, which is several times faster than asking the module; torch.compile traces the latter."""
        return f"{module}.{name}" if self._traced else f"{self.vars(module)}[{name!r}]"

    def structure(self) -> None:
        """Compares modules, and tensors with their facts."""
        plan = self._plan
        children = dict.fromkeys((name for name, _ in plan.modules), 0)
        for name, _ in plan.modules:
            if name:
                children[name.rpartition(".")[0]] += 1
        for name, kind in plan.modules:
            self._module(name, kind, children[name])
        for name, holder, last in plan.absent:
            self.refuse_if(f"{self._attribute(self.modules[name], holder)}.get({last!r}) is not None")
        self._tensors = {path: self._tensor(*path, facts) for path, facts in zip(plan.paths(), plan.tensors)}
        for (name, holder, last), path in plan.ties:
            tensor = self._place(*path) if self._traced else self._tensors[path]
            self.refuse_if(f"{self._attribute(self.modules[name], holder)}.get({last!r}) is not {tensor}")

    def _module(self, name: str, kind: type, children: int) -> None:
        parent, _, last = name.rpartition(".")
        variable = self.modules[name] = f"m{len(self.modules)}"
        found = f"{self._attribute(self.modules[parent], '_modules')}.get({last!r})" if name else "module"
        self._lines.append(f"{variable} = {found}")
        first = self._plan.shared.get(name)
        if first is not None and not self._traced:  # one module under two names
            self._lines.append(f"{self.vars(variable)} = {self.vars(self.modules[first])}")
            self.refuse_if(f"{variable} is not {self.modules[first]}")
            return
        self.refuse_if(f"type({variable}) is not {self.constant(kind)}")
        if not self._traced:
            self._lines.append(f"{self.vars(variable)} = {variable}.__dict__")
        changes = [f"len({self._attribute(variable, '_modules')}) != {children}"]
        changes += [self._attribute(variable, "training")] if name else []
        if name and not self._traced:
            changes += [self._attribute(variable, hooks) for hooks in ("_forward_hooks", "_forward_pre_hooks")]
            changes.append(f"('forward' in {self.vars(variable)} and {self.constant(is_replaced)}({variable}))")
        self.refuse_if(" or ".join(changes))

    def _place(self, kind: str, path: str) -> str:
        owner, _, name = path.rpartition(".")
        holder, module = HOLDERS.get(kind), self.modules[owner]
        if holder is not None:
            return f"{self._attribute(module, holder)}.get({name!r})"
        return f"getattr({module}, {name!r})" if self._traced else f"{self.vars(module)}.get({name!r})"

    def _tensor(self, kind: str, path: str, facts: tuple[torch.dtype, torch.Size, torch.device]) -> str:
        """The variable of a tensor that the plan takes."""
        variable, (dtype, shape, device) = self._fresh("t"), facts
        self._lines.append(f"{variable} = {self._place(kind, path)}")
        self.refuse_if(
            f"{variable} is None or {variable}.dtype != {self.constant(dtype)} or {variable}.shape != {tuple(shape)} "
            f"or {variable}.device != {self.constant(device)}"
        )
        return variable

    def compare(self, own: Mapping[str, object], attributes: str) -> None:
        """All settings at once."""
        if own:
            get = operator.itemgetter(*own)
            # Not the other way round, see `settings._Frozen`.
            self.refuse_if(f"{self.constant(get(own))} != {self.constant(get)}({attributes})")

    def settings(self, owner: str, own: Mapping[str, object]) -> None:
        """Each constant, also in objects."""
        for name, value in own.items():
            if not name.isidentifier():
                continue
            if isinstance(value, Object):
                if getattr(value.value, "__dict__", None):
                    self.settings(f"{owner}.{name}", value.attributes)
            elif is_constant(value):
                self.refuse_if(f"not ({owner}.{name} == {self.constant(value)})")

    def function(self) -> Guard:
        body = "\n    ".join([*self._lines, f"return [{', '.join(self._tensors.values())}]"])
        exec(compile(f"def unchanged(module):\n    {body}\n", "<guard>", "exec"), self._names)
        found: Guard = self._names["unchanged"]
        return found

    def constant(self, value: Any) -> str:
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
