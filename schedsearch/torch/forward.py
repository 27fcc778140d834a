"""What an optimized module calls in place of its own `forward`: a plan for calls like the example, else what was there."""

from __future__ import annotations

import contextlib
import copy
import itertools
import types
import weakref
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from schedsearch.torch import patterns
from schedsearch.torch.formats import allows_tf32

_REPLICATE = "_replicate_for_data_parallel"  # DataParallel calls it on each module
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
    """

    def __init__(self, program: Any, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.graph: fx.Graph = program.graph_module.graph
        self.networks: list[Any] = []
        self._root = program.graph_module
        self._paths: list[tuple[str, str]] = []  # kind and path of the tensors of the module that the graph takes
        self._constants: list[Any] = []
        self._read_signature(program)
        leaves, self._in_spec = pytree.tree_flatten((args, {}))
        _record_strides(self._root, [*self._held(module), *leaves])
        self.tf32 = allows_tf32()
        on_gpu = any(each.device.type == "cuda" for each in pytree.tree_leaves(args) if isinstance(each, torch.Tensor))
        self.found = patterns.find(self.graph, tf32=self.tf32 and on_gpu)
        self._run: fx.GraphModule | None = None
        self._out_spec = program.call_spec.out_spec
        self._expected = [_facts(each) for each in leaves]
        self.modules = [(name, type(each)) for name, each in module.named_modules(remove_duplicate=False)]
        self.tensors = [_tensor_facts(_resolve(module, kind, path)[2]) for kind, path in self._paths if path]

    def _read_signature(self, program: Any) -> None:
        """Raises ValueError for an input that is neither a tensor of the module nor of the call."""
        for spec in program.graph_signature.input_specs:
            kind = spec.kind.name
            if kind in ("PARAMETER", "BUFFER"):
                self._paths.append((kind, spec.target))
            elif kind == "CONSTANT_TENSOR":
                self._paths.append((kind, ""))
                self._constants.append(program.constants[spec.target])
            elif kind != "USER_INPUT":
                raise ValueError(f"the graph has an input of kind {kind}")

    def _held(self, module: nn.Module) -> list[Any]:
        """The inputs of the graph that are not those of a call."""
        constants = iter(self._constants)
        return [_resolve(module, kind, path)[2] if path else next(constants) for kind, path in self._paths]

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...]) -> Self:
        """Raises what torch.export raises."""
        with torch.no_grad(), evaluating(module), without_plans(module):
            program = torch.export.export(module, args, strict=False)
            return cls(program, module, args)

    def seal(self) -> None:
        """Makes the graph callable, after it was rewritten."""
        self._run = fx.GraphModule(self._root, self.graph)
        for node in self.graph.nodes:  # fake tensors of the export
            node.meta.clear()
        del self._root

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """The inputs of a call like the example; None of another."""
        if kwargs:
            return None
        leaves: list[Any]
        leaves, spec = pytree.tree_flatten((args, {}))
        if spec != self._in_spec or len(leaves) != len(self._expected):
            return None
        for given, expected in zip(leaves, self._expected):
            if not _is_like(given, expected):
                return None
        return leaves

    def run(self, tensors: list[Any], leaves: list[Any]) -> Any:
        assert self._run is not None
        given, constants = iter(tensors), iter(self._constants)
        held = [next(given if path else constants) for _, path in self._paths]
        return pytree.tree_unflatten(list(self._run.forward(*held, *leaves)), self._out_spec)


class _StrideRecorder(fx.Interpreter):
    """Runs a graph and notes the strides of each value; fake tensors may have others than cuDNN's results."""

    def run_node(self, node: fx.Node) -> Any:
        found, fake = super().run_node(node), node.meta.get("val")
        if isinstance(found, torch.Tensor) and isinstance(fake, torch.Tensor) and fake.stride() != found.stride():
            with fake.fake_mode:
                like = {"dtype": found.dtype, "device": found.device}
                node.meta["val"] = torch.empty_strided(tuple(found.shape), found.stride(), **like)
        return found


def _record_strides(root: fx.GraphModule, inputs: list[Any]) -> None:
    """Gives the values of a graph the strides that they really have."""
    _StrideRecorder(root).run(*(each.clone() if isinstance(each, torch.Tensor) else each for each in inputs))


class Links:
    """Where a module holds the modules and tensors that a plan depends on.

    Attributes:
        name: of these links in this process; torch.compile reads it, see `_unchanged`.
        whole: whether the module has the structure that the plan was made for.
    """

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        self.name = _named(self)
        held = list(module.named_modules(remove_duplicate=False))
        self.whole = [(name, type(each)) for name, each in held] == plan.modules
        self._modules: list[_Slot] = []
        self._slots: list[_Slot] = []
        self._ties: list[_Slot] = []  # other places of the same tensors
        if not self.whole:
            return
        by_name = dict(held)
        for name, each in held:
            parent, _, last = name.rpartition(".")
            if name:
                self._modules.append((by_name[parent]._modules, last, each))
        facts = iter(plan.tensors)
        for kind, path in plan._paths:
            if path:
                where, last, _ = _resolve(module, kind, path)
                self._slots.append((where, last, next(facts)))
        first = {id(where[last]): (where, last) for where, last, _ in self._slots}
        for each in by_name.values():
            for where in (each._parameters, each._buffers):
                for last, tensor in where.items():
                    if (held_first := first.get(id(tensor))) not in (None, (where, last)):
                        self._ties.append((where, last, held_first))

    def unchanged(self) -> bool:
        """Whether modules are the same objects, in evaluation mode, without hooks, and tensors have the same formats."""
        for where, name, module in self._modules:
            if where.get(name) is not module:
                return False
            held = module.__dict__
            if held["training"] or held["_forward_hooks"] or held["_forward_pre_hooks"] or "forward" in held:
                return False
        for where, name, facts in self._slots:
            tensor = where.get(name)
            if tensor is None or tensor.dtype is not facts[0] or tensor.shape != facts[1] or tensor.device != facts[2]:
                return False
        return all(where.get(name) is first[0].get(first[1]) for where, name, first in self._ties)

    def tensors(self) -> list[Any]:
        return [where[name] for where, name, _ in self._slots]


class OptimizedForward:
    """The `forward` of an optimized module. It lies in the instance, so that the class and other instances are untouched."""

    def __init__(self, module: nn.Module, before: Any) -> None:
        self._module, self._before = module, before
        self._plans: list[tuple[Plan, Links]] = []

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

    def enter(self) -> None:
        """Becomes the module's forward."""
        self._module.__dict__ |= {"forward": self, _REPLICATE: _Replicate(self._module)}

    def remove(self) -> None:
        """Gives the module the forward that it had."""
        self._module.__dict__.pop(_REPLICATE, None)
        if self._before is None:
            del self._module.__dict__["forward"]
        else:
            self._module.__dict__["forward"] = self._before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for plan, links in self._plans:
            leaves = plan.leaves(args, kwargs)
            if leaves is not None and self._may_serve(plan, links, leaves):
                return plan.run(links.tensors(), leaves)
        return self.original(*args, **kwargs)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's forward was before."""
        if self._before is None:
            return type(self._module).forward(self._module, *args, **kwargs)
        return self._before(*args, **kwargs)

    def _may_serve(self, plan: Plan, links: Links, leaves: list[Any]) -> bool:
        if self._module.training or torch.are_deterministic_algorithms_enabled() or plan.tf32 != allows_tf32():
            return False
        if torch.is_autocast_enabled(_device_type(leaves)):
            return False
        if not _unchanged(links):
            return False
        if torch.is_grad_enabled():
            for each in (*leaves, *links.tensors()):
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    return False
        return True

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
        return _plain_forward, (self._module,)


class _Replicate:
    """How DataParallel copies an optimized module: without the plan, whose tensors are those of the module itself."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

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


def _plain_forward(module: nn.Module) -> Any:
    return types.MethodType(type(module).forward, module)


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


def _named(links: Links | _LateLinks) -> str:
    """A name under which `_links` holds these links as long as anybody else does."""
    name = next(_names)
    _links[name] = links
    return name


@torch.compiler.assume_constant_result
def _checked_while_tracing(name: str) -> bool:
    return bool(_links[name].unchanged())


def _unchanged(links: Links) -> bool:
    if torch.compiler.is_compiling():  # before PyTorch 2.13 the argument of a constant must be one: a text, not an object
        return bool(_checked_while_tracing(links.name))
    return links.unchanged()


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
    held = [each.__dict__["forward"] for each in module.modules() if _is_optimized(each)]
    for forward in held:
        forward.remove()
    try:
        yield
    finally:
        for forward in held:
            forward.enter()


def _is_optimized(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get("forward"), OptimizedForward)


def _facts(leaf: Any) -> Any:
    """What a leaf of later calls must be like; see `_is_like`."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    form = next((each for each in (torch.channels_last, torch.contiguous_format) if _has_form(leaf, each)), None)
    return leaf.dtype, tuple(leaf.shape), leaf.device, form, None if form is not None else leaf.stride()


def _has_form(tensor: torch.Tensor, form: torch.memory_format) -> bool:
    if form is torch.channels_last and tensor.dim() != 4:
        return False
    return bool(tensor.is_contiguous(memory_format=form))


def _is_like(given: Any, expected: Any) -> bool:
    if not isinstance(given, torch.Tensor):
        return type(given) is type(expected) and bool(given == expected)
    if not isinstance(expected, tuple) or len(expected) != 5 or type(given) not in (torch.Tensor, nn.Parameter):
        return False
    dtype, shape, device, form, strides = expected
    if given.dtype != dtype or tuple(given.shape) != shape or given.device != device:
        return False
    return bool(given.is_contiguous(memory_format=form) if form is not None else given.stride() == strides)


def _tensor_facts(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, torch.device]:
    return tensor.dtype, tensor.shape, tensor.device


def _resolve(module: nn.Module, kind: str, path: str) -> tuple[dict[str, Any], str, Any]:
    """Where a parameter or buffer is held, and the tensor."""
    owner, _, name = path.rpartition(".")
    part = module.get_submodule(owner)
    where: dict[str, Any] = part._parameters if kind == "PARAMETER" else part._buffers
    return where, name, where[name]


def _device_type(leaves: list[Any]) -> str:
    return next((str(each.device.type) for each in leaves if isinstance(each, torch.Tensor)), "cpu")
