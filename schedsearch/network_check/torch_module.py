"""Torch modules: whether an export of one computes what the module does."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.network.model import simplified
from schedsearch.network.torch_export import exported
from schedsearch.network_check.check import Checker
from schedsearch.network_check.draws import Wanted
from schedsearch.network_check.rule import Difference
from schedsearch.network_check.source import Source
from schedsearch.network_check.subjects import NO_CHECK
from schedsearch.typed import Array

if TYPE_CHECKING:
    import onnx_ir as ir


def checked_export(module: object, example: object, dtype: str | None) -> tuple[ir.Model, Source]:
    """The simplified graph of a module, whose export computes what the module computes, and that export.

    Args:
        example, dtype: as of `schedsearch.build`.

    Raises:
        ModelError: as `torch_export.export`.
        WrongNetworkError: PyTorch's exporter made another model of the module.
    """
    name, started = type(module).__name__, time.monotonic()
    program = exported(module, example)
    arguments = example if isinstance(example, tuple) else (example,)
    source = Source.of_graph(program.model, name)
    began = time.monotonic()
    Checker(source, lambda text: None, started).check(_Module(module, arguments, program, source))
    source.dtype, source.compared_s = dtype, time.monotonic() - began
    return simplified(program.model, name), source


class _Module:
    """A module in eager PyTorch, and the values of its exported graph."""

    def __init__(self, module: Any, example: tuple[Any, ...], program: Any, source: Source) -> None:
        import torch
        from torch.utils import _pytree as pytree

        self._module, self._example, self._program = module, example, program
        leaves, self._spec = pytree.tree_flatten(example)
        self._places = [place for place, each in enumerate(leaves) if isinstance(each, torch.Tensor)]
        self._leaves = leaves
        self.what = f"{source.name} in PyTorch"
        self.inputs = [
            Wanted(name, tuple(leaf.shape), _dtype(leaf), _below(leaf), like=_array(leaf))
            for name, leaf in zip(source.inputs, (leaves[place] for place in self._places))
        ]
        nodes = program.exported_program.graph.nodes
        known = {node.name: node.meta.get("val") for node in nodes if node.op == "call_function"}
        self.sizes: Mapping[str, int] = {
            name: each.numel() for name, each in known.items() if isinstance(each, torch.Tensor)
        }

    def dtype(self, value: str) -> str:
        return "float32"

    def outputs(self, inputs: Mapping[str, Array]) -> list[Array]:
        import torch
        from torch.utils import _pytree as pytree

        args = self._arguments(inputs)
        training = self._module.training
        try:
            with torch.no_grad():
                found = self._module.eval()(*args)
        finally:
            self._module.train(training)
        return [_array(each) for each in pytree.tree_leaves(found) if isinstance(each, torch.Tensor)]

    def values(self, inputs: Mapping[str, Array], names: Collection[str]) -> dict[str, Array]:
        import torch
        from torch.utils import _pytree as pytree

        found: dict[str, Array] = {}
        runner = torch.fx.Interpreter(self._program.exported_program.module())
        plain_run = runner.run_node

        def run_node(node: torch.fx.Node) -> Any:
            value = plain_run(node)
            if node.name in names and isinstance(value, torch.Tensor):
                found[node.name] = _array(value)
            return value

        runner.run_node = run_node
        with torch.no_grad():
            runner.run(*pytree.tree_leaves(self._arguments(inputs)))
        return found

    def untaken(self) -> list[str]:
        return []

    def complaint(self, value: str, apart: Difference, source: str) -> str:
        import torch

        return (
            f"PyTorch's exporter to ONNX does not keep what {source} computes; the first value that differs is {value}: "
            f"{apart.text('the module', 'its export')}. This is a fault of PyTorch {torch.__version__}: write the layer in "
            f"another way. {NO_CHECK} builds what was exported"
        )

    def _arguments(self, inputs: Mapping[str, Array]) -> tuple[Any, ...]:
        """What the module takes, like the example."""
        import torch
        from torch.utils import _pytree as pytree

        leaves = list(self._leaves)
        for place, each in zip(self._places, self.inputs):
            like = self._leaves[place]
            leaves[place] = torch.from_numpy(np.ascontiguousarray(inputs[each.name])).to(like.device, like.dtype)
        args: tuple[Any, ...] = pytree.tree_unflatten(leaves, self._spec)
        return args


def _dtype(tensor: Any) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return "uint8" if name == "bool" else name


def _below(tensor: Any) -> int | None:
    return 2 if str(tensor.dtype) == "torch.bool" else None


def _array(tensor: Any) -> Array:
    found = tensor.detach().cpu()
    found = found.float() if found.is_floating_point() and str(found.dtype) != "torch.float64" else found
    array: Array = found.numpy()
    return array
