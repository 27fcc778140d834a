"""The graph of a module for calls like an example, and what it was made from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import fx, nn
from torch.nn.modules import module as of_all_modules
from torch.utils import _pytree as pytree

from schedsearch.torch.layers import patterns
from schedsearch.torch.models.exported import exported, record_strides
from schedsearch.torch.models.instance_forward import is_replaced, without_plans
from schedsearch.torch.models.places import HOLDERS, is_attribute, resolve, tensor_facts, ties
from schedsearch.torch.models.settings import Settings, evaluating, same_attributes, settings_of_classes, settled
from schedsearch.torch.models.signature import Arguments, facts_of, is_like
from schedsearch.torch.operators.formats import allows_tf32
from schedsearch.torch.refusal import Refusal


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
        tensors: facts about the parameters and buffers that the graph takes.
        ties: module, holder and name of each other place of these tensors, with kind and path of the one that is taken.
        absent: module, holder and name of each parameter and buffer that is None.
        shared: name of a module that has several -> its first name.
    """

    def __init__(self, program: Any, module: nn.Module, args: tuple[Any, ...], settings: Settings) -> None:
        self.graph: fx.Graph = program.graph_module.graph
        self.networks: list[Any] = []
        self._root = program.graph_module
        self._paths: list[tuple[str, str]] = []  # kind and path of the tensors of the module that the graph takes
        self._constants: list[Any] = []
        self._read_signature(program, module)
        leaves, self._in_spec = pytree.tree_flatten((args, {}))
        record_strides(self._root, [*self.tensors_of(module), *leaves])
        self.tf32 = allows_tf32()
        on_gpu = any(each.device.type == "cuda" for each in pytree.tree_leaves(args) if isinstance(each, torch.Tensor))
        self.found = patterns.find(self.graph, tf32=self.tf32 and on_gpu)
        self._run: fx.GraphModule | None = None
        self._out_spec = program.call_spec.out_spec
        self._expected = [facts_of(each) for each in leaves]
        self.modules = [(name, type(each)) for name, each in module.named_modules(remove_duplicate=False)]
        first = {each: name for name, each in module.named_modules()}
        self.shared = {
            name: first[each] for name, each in module.named_modules(remove_duplicate=False) if first[each] != name
        }
        self.settings = {name: dict(own) for name, own in settings.items()}
        self.of_classes = settings_of_classes(module)
        self.names = {name: frozenset(vars(each)) for name, each in module.named_modules()}
        self._arguments = Arguments.of(module, len(args))
        for kind, path in self._paths:
            if kind == "CONSTANT_TENSOR" and path:  # it is looked up in each call
                owner, _, name = path.rpartition(".")
                self.settings.get(owner, {}).pop(name, None)
        self.absent = [  # a convolution may get a bias
            (name, holder, last)
            for name, each in module.named_modules()
            for holder in HOLDERS.values()
            for last, tensor in getattr(each, holder).items()
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

    def tensors_of(self, module: nn.Module) -> list[Any]:
        """The inputs of the graph that are not those of a call."""
        constants = iter(self._constants)
        return [resolve(module, kind, path)[2] if path else next(constants) for kind, path in self._paths]

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...]) -> Self:
        """Raises Refusal for a module in which something would stop the plan from ever serving, and what torch.export
        raises."""
        with torch.no_grad(), evaluating(module), without_plans(module):
            if why := obstacle(module):
                raise Refusal(why)
            settings = settled(module, args)
            with same_attributes(module):
                program = exported(module, args)
            return cls(program, module, args, settings)

    def seal(
        self, unchanged: Callable[[nn.Module], list[Any] | None], traced: Callable[[nn.Module], list[Any] | None]
    ) -> None:
        """Makes the graph callable, after it was rewritten.

        Args:
            unchanged, traced: return the tensors of a module that the graph takes, or None if the module has changed; the
                latter for torch.compile.
        """
        self.unchanged, self.traced = unchanged, traced
        self._run = fx.GraphModule(self._root, self.graph)
        for node in self.graph.nodes:  # fake tensors of the export
            node.meta.clear()
        del self._root

    def leaves(self, args: tuple[object, ...], kwargs: dict[str, Any]) -> list[Any] | None:
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
        tensors_and_constants = [next(given if path else constants) for _, path in self._paths]
        return pytree.tree_unflatten(list(self._run.forward(*tensors_and_constants, *leaves)), self._out_spec)


def obstacle(module: nn.Module) -> str:
    """What in a module a plan would pass by; empty if nothing."""
    if of_all_modules._global_forward_hooks or of_all_modules._global_forward_pre_hooks:
        return "this process has hooks for all modules, which kernels would pass by; remove them first"
    for name, each in module.named_modules():
        if name and (each._forward_hooks or each._forward_pre_hooks):
            return f"{name} has hooks, which kernels would pass by; remove them first"
        if name and is_replaced(each):
            return f"{name} has another forward than its class, which kernels would pass by; undo that first"
    return ""
