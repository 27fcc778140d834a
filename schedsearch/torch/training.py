"""Depthwise convolutions of graphs that are trained: by our kernels where a step was measured to be faster.

Everything else of such a graph is left to Inductor, which compiles forward and backward around the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from schedsearch.torch import patterns
from schedsearch.torch.choose import MARGIN
from schedsearch.torch.functional import depthwise_conv2d
from schedsearch.torch.report import LayerReport
from schedsearch.torch.timing import Timer, sets_needed

_Convolve = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def swap_depthwise(graph: fx.Graph, timer: Timer, cache_bytes: int) -> list[LayerReport]:
    """Replaces depthwise convolutions for which a forward and a backward pass take less time with our kernels.

    Args:
        graph: of torch.compile; nothing but the convolutions changes.
        timer: measures both.
        cache_bytes: the device's last-level cache.
    """
    known: dict[_Description, tuple[float, float]] = {}
    rows = []
    for node in list(graph.nodes):
        kind = patterns.called(node)
        if kind is None or kind[0] != "conv" or not _is_depthwise(node, kind[1]):
            continue
        found = _Description.of(node, kind[1])
        if found is None:
            rows.append(LayerReport(patterns.name_of(node), reason="its shape is dynamic; kernels are made for one shape"))
            continue
        if found not in known:
            known[found] = found.times(timer, cache_bytes)
        ours, theirs = known[found]
        wins = ours <= MARGIN * theirs
        reason = "" if wins else "PyTorch is as fast or faster, or there is no record; see schedsearch.torch.served()"
        rows.append(LayerReport(patterns.name_of(node), str(found), wins, reason, ours / 1e3, theirs / 1e3))
        if wins:
            _replace(graph, node, kind[1])
    return rows


@dataclass(frozen=True)
class _Description:
    """A depthwise convolution, by what its time depends on."""

    x: tuple[int, ...]
    weight: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    window: tuple[tuple[str, Any], ...]
    needs_dx: bool

    @classmethod
    def of(cls, node: fx.Node, given: Mapping[str, Any]) -> _Description | None:
        x, weight, y = (patterns.value_of(each) for each in (given["input"], given["weight"], node))
        if not all(isinstance(each, int) for value in (x, weight) for each in (*value.shape, *value.stride())):
            return None
        window = tuple((name, _frozen(each)) for name, each in _window(given).items())
        return cls(tuple(x.shape), tuple(weight.shape), x.stride(), y.dtype, x.device, window, bool(x.requires_grad))

    def __str__(self) -> str:
        n, c, h, w = self.x
        return f"depthwise_conv2d {n}x{h}x{w}x{c} {self.weight[2]}x{self.weight[3]} {self.dtype}, forward and backward"

    def times(self, timer: Timer, cache_bytes: int) -> tuple[float, float]:
        """Nanoseconds of a forward and a backward pass: with our kernels, and with PyTorch's own."""
        options = dict(self.window)
        convolve: tuple[_Convolve, _Convolve] = (
            lambda x, weight: depthwise_conv2d(x, weight, **options),
            lambda x, weight: functional.conv2d(x, weight, groups=self.x[1], **options),
        )
        x = torch.empty_strided(self.x, self.strides, dtype=self.dtype, device=self.device).normal_()
        memory = torch.channels_last if x.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
        weight = torch.randn(self.weight, dtype=self.dtype, device=self.device).contiguous(memory_format=memory)
        sets = sets_needed(3 * x.nbytes, cache_bytes)
        operands = [(x.clone().requires_grad_(self.needs_dx), weight.clone().requires_grad_()) for _ in range(sets)]
        benchmark, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
        try:
            ours, theirs = (timer.ns([_step(each, *pair) for pair in operands]) for each in convolve)
        finally:
            torch.backends.cudnn.benchmark = benchmark
        return ours, theirs


def _step(convolve: _Convolve, x: torch.Tensor, weight: torch.Tensor) -> Callable[[], Any]:
    wanted = [each for each in (x, weight) if each.requires_grad]

    def run() -> Any:
        with torch.enable_grad():
            y = convolve(x, weight)
        return torch.autograd.grad(y, wanted, torch.ones_like(y))

    return run


def _is_depthwise(node: fx.Node, given: Mapping[str, Any]) -> bool:
    x, weight, y = (patterns.value_of(each) for each in (given.get("input"), given.get("weight"), node))
    if x is None or weight is None or y is None or x.dim() != 4 or y.dtype not in patterns.DTYPES:
        return False
    return given.get("groups", 1) == x.shape[1] and int(x.shape[1]) > 1


def _replace(graph: fx.Graph, node: fx.Node, given: Mapping[str, Any]) -> None:
    with graph.inserting_before(node):
        operands = given["input"], given["weight"], given.get("bias")
        new = graph.call_function(depthwise_conv2d, operands, _window(given))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _window(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given.get(name, default) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))}


def _frozen(each: Any) -> Any:
    return tuple(each) if isinstance(each, list | tuple) else each
