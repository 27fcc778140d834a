"""Where a module holds what a plan depends on, and whether that is as it was: the guards of a plan.

See docs/decisions/178 for why they are not those of torch.compile.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_all_modules

from schedsearch.torch.models.instance_forward import is_replaced
from schedsearch.torch.models.places import resolve
from schedsearch.torch.models.plan import Plan
from schedsearch.torch.models.settings import Watches, hides

_Slot = tuple[dict[str, Any], str, Any]  # where a tensor or a module is held, and facts about it
_names = (f"links {number}" for number in itertools.count())
_links: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # by name


class Links:
    """Where a module holds the modules and tensors that a plan depends on.

    Attributes:
        name: of these links in this process; torch.compile reads it, see `_unchanged`.
        whole: whether the module has the structure and the tensors that the plan was made for.
    """

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        self.name = _named(self)
        held = list(module.named_modules(remove_duplicate=False))
        self.whole = [(name, type(each)) for name, each in held] == plan.modules
        self._root = module, type(module), len(module._modules)
        self._modules: list[tuple[dict[str, Any], str, nn.Module, type, int]] = []
        self._names: list[tuple[nn.Module, int, frozenset[str]]] = []
        self._settings = Watches({}, {}, {})
        self._absent: list[tuple[dict[str, Any], str]] = []
        self._slots: list[_Slot] = []
        self._ties: list[_Slot] = []  # other places of the same tensors
        if not self.whole:
            return
        by_name = dict(held)
        for name, each in held:
            parent, _, last = name.rpartition(".")
            if name:
                self._modules.append((by_name[parent]._modules, last, each, type(each), len(each._modules)))
        self._names = [(by_name[name], len(vars(by_name[name])), names) for name, names in plan.names.items()]
        if any(hides(each, names) for each, _, names in self._names):
            self.whole = False
            return
        self._settings = Watches(by_name, plan.settings, plan.of_classes)
        tensors = {"PARAMETER": "_parameters", "BUFFER": "_buffers"}
        self._absent = [(getattr(by_name[name], tensors[kind]), last) for name, kind, last in plan.absent]
        facts = iter(plan.tensors)
        for kind, path in plan._paths:
            if path:
                try:
                    where, last, _ = resolve(module, kind, path)
                except KeyError:  # it was parametrised, for one
                    self.whole = False
                    return
                self._slots.append((where, last, next(facts)))
        taken = {path: (where, last) for path, (where, last, _) in zip(plan.paths(), self._slots)}
        self._ties = [(getattr(by_name[name], held), last, taken[path]) for (name, held, last), path in plan.ties]

    def unchanged(self) -> bool:
        """Whether modules are the same objects, in evaluation mode, without hooks and with the same settings, and tensors
        have the same formats."""
        if of_all_modules._global_forward_hooks or of_all_modules._global_forward_pre_hooks:
            return False
        root, kind, count = self._root
        if type(root) is not kind or len(root._modules) != count:
            return False
        for where, name, module, kind, count in self._modules:
            if where.get(name) is not module or type(module) is not kind:
                return False
            held = module.__dict__
            if len(held["_modules"]) != count:
                return False
            if held["training"] or held["_forward_hooks"] or held["_forward_pre_hooks"]:
                return False
            if "forward" in held and is_replaced(module):
                return False
        for module, length, names in self._names:
            if len(module.__dict__) != length and hides(module, names):
                return False
        if not self._settings.unchanged():
            return False
        for where, name, facts in self._slots:
            tensor = where.get(name)
            if tensor is None or tensor.dtype is not facts[0] or tensor.shape != facts[1] or tensor.device != facts[2]:
                return False
        for where, name in self._absent:
            if where.get(name) is not None:
                return False
        return all(where.get(name) is first[0].get(first[1]) for where, name, first in self._ties)

    def tensors(self) -> list[Any]:
        return [where[name] for where, name, _ in self._slots]


class LateLinks:
    """`Links` of a module whose copy is not complete yet."""

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        self.name = _named(self)
        self._module, self._plan = module, plan
        self._links: Links | None = None

    def _ready(self) -> Links:
        if self._links is None:
            self._links = Links(self._module, self._plan)
        return self._links

    def unchanged(self) -> bool:
        links = self._ready()
        return links.whole and links.unchanged()

    def tensors(self) -> list[Any]:
        return self._ready().tensors()


def _named(links: Links | LateLinks) -> str:
    """A name under which `_links` holds these links as long as anybody else does."""
    name = next(_names)
    _links[name] = links
    return name


@torch.compiler.assume_constant_result
def _checked_while_tracing(name: str) -> bool:
    return bool(_links[name].unchanged())


def linked(module: nn.Module, plan: Plan, links: Links) -> list[Any] | None:
    """The tensors of a module that a plan takes; None if the module is not as it was."""
    if not torch.compiler.is_compiling():
        return links.tensors() if links.unchanged() else None
    # Before PyTorch 2.13 the argument of a constant must be one: a string, not an object.
    return plan.traced(module) if _checked_while_tracing(links.name) else None
