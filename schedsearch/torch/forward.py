"""What an optimized module calls in place of its own `forward`: a plan for calls like the example, else what was there.

See docs/decisions/137 for why modules stay, and 178 for why the checks are our own.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import types
import weakref
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import fx, nn
from torch.nn.modules import module as of_all_modules
from torch.utils import _pytree as pytree

from schedsearch.torch import patterns
from schedsearch.torch.exported import exported, record_strides
from schedsearch.torch.formats import allows_tf32
from schedsearch.torch.held import Refusal
from schedsearch.torch.places import is_attribute, resolve, tensor_facts, ties
from schedsearch.torch.settings import (
    OURS,
    Settings,
    Watches,
    hides,
    same_attributes,
    settings_of_classes,
    settled,
)
from schedsearch.torch.signature import Arguments, facts_of, is_like
from schedsearch.torch.traced_check import traced_check
from schedsearch.torch.transforms import computes

_REPLICATE = OURS[1]  # DataParallel calls it on each module
_OF_FUNCTIONS = ("__name__", "__qualname__", "__doc__", "__code__", "__globals__", "__defaults__", "__kwdefaults__")
_Slot = tuple[dict[str, Any], str, Any]  # where a tensor or a module is held, and facts about it
_names = (f"links {number}" for number in itertools.count())
_links: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # by name


class Plan:
    """The graph of a module for calls like an example.

    It holds no tensor of the module: parameters are looked up in every call.

    Attributes:
        graph: what is run; its inputs are parameters and buffers, then those of the call.
        found: its layers.
        networks: what its networks run in; they end with it.
        modules: name and class of each module that the graph was made of.
        settings: what these were set to.
        of_classes: the same for their classes.
        names: of the attributes of each module.
        traced: as `Links` for torch.compile: the tensors that the graph takes, or None if the module has changed.
        tensors: facts about the parameters and buffers that the graph takes.
        ties: module, kind and name of each other place of these tensors, with kind and path of the one that the graph takes.
        absent: module, kind and name of each parameter and buffer that is None.
    """

    def __init__(self, program: Any, module: nn.Module, args: tuple[Any, ...], settings: Settings) -> None:
        self.graph: fx.Graph = program.graph_module.graph
        self.networks: list[Any] = []
        self._root = program.graph_module
        self._paths: list[tuple[str, str]] = []  # kind and path of the tensors of the module that the graph takes
        self._constants: list[Any] = []
        self._read_signature(program, module)
        leaves, self._in_spec = pytree.tree_flatten((args, {}))
        record_strides(self._root, [*self._held(module), *leaves])
        self.tf32 = allows_tf32()
        on_gpu = any(each.device.type == "cuda" for each in pytree.tree_leaves(args) if isinstance(each, torch.Tensor))
        self.found = patterns.find(self.graph, tf32=self.tf32 and on_gpu)
        self._run: fx.GraphModule | None = None
        self._out_spec = program.call_spec.out_spec
        self._expected = [facts_of(each) for each in leaves]
        self.modules = [(name, type(each)) for name, each in module.named_modules(remove_duplicate=False)]
        self.settings = {name: dict(own) for name, own in settings.items()}
        self.of_classes = settings_of_classes(module)
        self.names = {name: frozenset(vars(each)) for name, each in module.named_modules()}
        self._arguments = Arguments.of(module, len(args))
        for kind, path in self._paths:
            if kind == "CONSTANT_TENSOR" and path:  # it is looked up in each call
                owner, _, name = path.rpartition(".")
                self.settings.get(owner, {}).pop(name, None)
        self.absent = [  # a convolution may get a bias
            (name, kind, last)
            for name, each in module.named_modules()
            for kind, where in (("PARAMETER", each._parameters), ("BUFFER", each._buffers))
            for last, tensor in where.items()
            if tensor is None
        ]
        self.tensors = [tensor_facts(resolve(module, kind, path)[2]) for kind, path in self.paths()]
        self.ties = ties(module, self.paths())

    def paths(self) -> list[tuple[str, str]]:
        """Kind and path of each tensor of the module that the graph takes, in its order."""
        return [(kind, path) for kind, path in self._paths if path]

    def _read_signature(self, program: Any, module: nn.Module) -> None:
        """Raises ValueError for an input that is neither a tensor of the module nor of the call, and an output that is not
        one of the call."""
        for spec in program.graph_signature.input_specs:
            kind = spec.kind.name
            if kind in ("PARAMETER", "BUFFER"):
                self._paths.append((kind, spec.target))
            elif kind == "CONSTANT_TENSOR":
                if is_attribute(module, spec.target):
                    self._paths.append((kind, spec.target))
                    continue
                self._paths.append((kind, ""))
                self._constants.append(program.constants[spec.target])
            elif kind != "USER_INPUT":
                raise ValueError(f"the graph has an input of kind {kind}")
        for spec in program.graph_signature.output_specs:
            if spec.kind.name != "USER_OUTPUT":
                raise ValueError(f"the graph has an output of kind {spec.kind.name}")

    def _held(self, module: nn.Module) -> list[Any]:
        """The inputs of the graph that are not those of a call."""
        constants = iter(self._constants)
        return [resolve(module, kind, path)[2] if path else next(constants) for kind, path in self._paths]

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...]) -> Self:
        """Raises Refusal for a module in which something would stop the plan from ever serving, and what torch.export
        raises."""
        with torch.no_grad(), evaluating(module), without_plans(module):
            if why := _obstacle(module):
                raise Refusal(why)
            settings = settled(module, args)
            with same_attributes(module):
                program = exported(module, args)
            return cls(program, module, args, settings)

    def seal(self) -> None:
        """Makes the graph callable, after it was rewritten."""
        self._run = fx.GraphModule(self._root, self.graph)
        self.traced = traced_check(self)
        for node in self.graph.nodes:  # fake tensors of the export
            node.meta.clear()
        del self._root

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """The inputs of a call like the example; None of another."""
        if kwargs or len(args) != self._arguments.count:
            arranged = self._arguments.arranged(args, kwargs)
            if arranged is None:
                return None
            args = arranged
        leaves: list[Any]
        leaves, spec = pytree.tree_flatten((args, {}))
        if spec != self._in_spec or len(leaves) != len(self._expected):
            return None
        for given, expected in zip(leaves, self._expected):
            if not is_like(given, expected):
                return None
        return leaves

    def run(self, tensors: list[Any], leaves: list[Any]) -> Any:
        assert self._run is not None
        given, constants = iter(tensors), iter(self._constants)
        held = [next(given if path else constants) for _, path in self._paths]
        return pytree.tree_unflatten(list(self._run.forward(*held, *leaves)), self._out_spec)


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
            if "forward" in held and _is_replaced(module):
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


class OptimizedForward:
    """The `forward` of an optimized module. It lies in the instance, so that the class and other instances are untouched.

    It has the signature and the source of the forward that was there, as torch.export, torch.jit and callers look for them.

    Args:
        before: what lay in the instance; None: nothing, or the method of its class.
    """

    def __init__(self, module: nn.Module, before: Any) -> None:
        self._module, self._before = module, None if _is_own(module, before) else before
        self._plans: list[tuple[Plan, Links]] = []
        functools.update_wrapper(self, self._before or _own_forward(module), _OF_FUNCTIONS, ())

    @classmethod
    def install(cls, module: nn.Module, plan: Plan) -> None:
        """Lets a module run a rewritten plan for calls like its example."""
        plan.seal()
        forward = module.__dict__.get("forward")
        if not isinstance(forward, OptimizedForward):
            forward = cls(module, forward)
            forward.enter()
        kept = [each for each in forward._plans if each[0]._expected != plan._expected]
        forward._plans = [(plan, Links(module, plan)), *kept]

    @classmethod
    def drop(cls, module: nn.Module, plan: Plan) -> None:
        """Undoes `install`."""
        forward = module.__dict__.get("forward")
        if isinstance(forward, OptimizedForward):
            forward._plans = [each for each in forward._plans if each[0] is not plan]
            if not forward._plans:
                forward.remove()

    def give_up(self) -> None:
        """Runs what was there before, from now on."""
        self._plans = []

    def enter(self) -> None:
        """Becomes the module's forward."""
        self._module.__dict__ |= {"forward": self, _REPLICATE: _Replicate(self._module, self)}

    def remove(self) -> None:
        """Gives the module the forward that it had."""
        self._module.__dict__.pop(_REPLICATE, None)
        if self._before is None:
            del self._module.__dict__["forward"]
        else:
            self._module.__dict__["forward"] = self._before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not computes():
            return OptimizedForward.original(self, *args, **kwargs)
        for plan, links in self._plans:
            leaves = plan.leaves(args, kwargs)
            if leaves is not None and (tensors := self._tensors(plan, links, leaves)) is not None:
                return plan.run(tensors, leaves)
        return self.original(*args, **kwargs)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's forward was before."""
        if self._before is None:
            return type(self._module).forward(self._module, *args, **kwargs)
        return self._before(*args, **kwargs)

    def _tensors(self, plan: Plan, links: Links, leaves: list[Any]) -> list[Any] | None:
        """The module's tensors that a plan takes; None if it must not serve a call."""
        if self._module.training or torch.are_deterministic_algorithms_enabled() or plan.tf32 != allows_tf32():
            return None
        if torch.is_autocast_enabled(_device_type(leaves)):
            return None
        tensors = _linked(self._module, plan, links)
        if tensors is not None and torch.is_grad_enabled():
            for each in (*leaves, *tensors):
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    return None
        return tensors

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizedForward:
        module = copy.deepcopy(self._module, memo)  # the copy under way, or one that this makes
        found = OptimizedForward(module, copy.deepcopy(self._before, memo))
        memo[id(self)] = found
        found._plans = [(plan, _LateLinks(module, plan)) for plan, _ in self._plans]  # type: ignore[misc]
        return found

    def __reduce__(self) -> Any:
        """A saved model is one that was not optimized."""
        if self._before is not None:
            return _same, (self._before,)
        return _own_forward, (self._module,)


class _Replicate:
    """How DataParallel copies an optimized module: without the plan, whose tensors are those of the module itself.

    Attributes:
        forward: of the module when it was optimized, which somebody may have wrapped since.
    """

    def __init__(self, module: nn.Module, forward: Any) -> None:
        self._module, self.forward = module, forward

    def __call__(self) -> Any:
        replica = type(self._module)._replicate_for_data_parallel(self._module)
        forward = replica.__dict__.pop("forward", None)
        del replica.__dict__[_REPLICATE]
        before = getattr(forward, "_before", None)  # a model that was saved has the forward of its class
        if before is not None:
            replica.__dict__["forward"] = before
        return replica


def _same(value: Any) -> Any:
    return value


def _own_forward(module: nn.Module) -> Any:
    return types.MethodType(type(module).forward, module)


def _is_own(module: nn.Module, forward: Any) -> bool:
    """Whether a `forward` in an instance is the method of its class, as in a model that was saved."""
    return isinstance(forward, types.MethodType) and forward == _own_forward(module)


class _LateLinks:
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


def _is_replaced(module: nn.Module) -> bool:
    """Whether somebody gave an instance another forward than that of its class."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, OptimizedForward):
        forward = forward._before
    return forward is not None and not _is_own(module, forward)


def _obstacle(module: nn.Module) -> str:
    """What in a module a plan would pass by; empty if nothing."""
    if of_all_modules._global_forward_hooks or of_all_modules._global_forward_pre_hooks:
        return "this process has hooks for all modules, which kernels would pass by; remove them first"
    for name, each in module.named_modules():
        if name and (each._forward_hooks or each._forward_pre_hooks):
            return f"{name} has hooks, which kernels would pass by; remove them first"
        if name and _is_replaced(each):
            return f"{name} has another forward than its class, which kernels would pass by; undo that first"
    return ""


def restore(module: nn.Module) -> None:
    """Gives a module the forward that it had before it was optimized, also if it was saved meanwhile. A forward that calls
    the optimized one remains, and calls what was there before."""
    forward, replicate = module.__dict__.get("forward"), module.__dict__.get(_REPLICATE)
    if isinstance(forward, OptimizedForward):
        forward.remove()
    elif isinstance(replicate, _Replicate):
        del module.__dict__[_REPLICATE]
        if _is_own(module, forward):
            del module.__dict__["forward"]
        elif isinstance(replicate.forward, OptimizedForward):
            replicate.forward.give_up()


def _named(links: Links | _LateLinks) -> str:
    """A name under which `_links` holds these links as long as anybody else does."""
    name = next(_names)
    _links[name] = links
    return name


@torch.compiler.assume_constant_result
def _checked_while_tracing(name: str) -> bool:
    return bool(_links[name].unchanged())


def _linked(module: nn.Module, plan: Plan, links: Links) -> list[Any] | None:
    """The tensors of a module that a plan takes; None if the module is not as it was."""
    if not torch.compiler.is_compiling():
        return links.tensors() if links.unchanged() else None
    # Before PyTorch 2.13 the argument of a constant must be one: a string, not an object.
    return plan.traced(module) if _checked_while_tracing(links.name) else None


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
def without_plans(module: nn.Module) -> Iterator[None]:
    """Lets optimized modules run as they did before."""
    held = [each.__dict__["forward"] for each in module.modules() if is_optimized(each)]
    for forward in held:
        forward.remove()
    try:
        yield
    finally:
        for forward in held:
            forward.enter()


def is_optimized(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get("forward"), OptimizedForward)


def _device_type(leaves: list[Any]) -> str:
    return next((str(each.device.type) for each in leaves if isinstance(each, torch.Tensor)), "cpu")
