"""Depthwise convolutions of graphs that are trained: by our kernels where a step was measured to be faster.

Everything else of such a graph is left to Inductor, which compiles forward and backward around the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from schedsearch.constructors.convolutions import depthwise_conv2d as depthwise_conv2d_workload
from schedsearch.deadline import NEVER, Deadline
from schedsearch.torch.comparison.benchmark import NO_TIME, PYTORCH, SLOWER, Result, benchmark
from schedsearch.torch.comparison.state import cudnn_searches
from schedsearch.torch.comparison.timing import Candidate, Timer, sets_needed
from schedsearch.torch.layers import graph_nodes, patterns
from schedsearch.torch.layers.graph_nodes import Layer
from schedsearch.torch.layers.report import LayerReport, us
from schedsearch.torch.layers.selection import KERNEL, causal_by_torch
from schedsearch.torch.operators.causal import causal_conv1d
from schedsearch.torch.operators.functional import depthwise_conv2d
from schedsearch.typed import GivenParams, ParamsByName
from schedsearch.workload import Workload

_Convolve = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def swap_depthwise(graph: fx.Graph, timer: Timer, cache_bytes: int, deadline: Deadline = NEVER) -> list[LayerReport]:
    """Replaces depthwise convolutions for which a forward and a backward pass take less time with our kernels.

    Args:
        graph: of torch.compile; nothing but the convolutions changes.
        timer: measures both.
        cache_bytes: the device's last-level cache.
        deadline: layers that are not measured by then are PyTorch's.
    """
    known: dict[_Description | _OverTime, Result] = {}
    rows = []
    for node, found in _depthwise(graph):
        if found is None:
            rows.append(
                LayerReport(graph_nodes.name_of(node), reason="its shape is dynamic; kernels are made for one shape")
            )
            continue
        if found not in known:
            if deadline.passed:
                rows.append(LayerReport(graph_nodes.name_of(node), str(found), reason=NO_TIME.format("measure it")))
                continue
            known[found] = found.result(timer, cache_bytes, deadline)
        result = known[found]
        wins, reason = result.winner == KERNEL, result.problems.get(KERNEL, "")
        reason += ", or there is no record; see schedsearch.torch.served()" if reason == SLOWER else ""
        ours_us, torch_us = (us(result.times_ns.get(name)) for name in (KERNEL, PYTORCH))
        rows.append(LayerReport(graph_nodes.name_of(node), str(found), wins, reason, ours_us, torch_us))
        if wins:
            found.replace(graph, node)
    return rows


def workloads(graph: fx.Graph) -> list[tuple[str, Workload]]:
    """What the depthwise convolutions of a graph compute in a forward and a backward pass: name of a layer, and workload."""
    named = [(graph_nodes.name_of(node), found) for node, found in _depthwise(graph)]
    return [(name, workload) for name, found in named if found is not None for workload in found.workloads()]


def _depthwise(graph: fx.Graph) -> list[tuple[fx.Node, _Description | _OverTime | None]]:
    """Depthwise convolutions of images and over time; without a description if a shape is dynamic."""
    return [*_of_images(graph), *_causal(graph)]


def _of_images(graph: fx.Graph) -> list[tuple[fx.Node, _Description | None]]:
    called = [
        (node, kind[1]) for node in graph.nodes if (kind := graph_nodes.called(node)) is not None and kind[0] == "conv"
    ]
    return [(node, _Description.of(node, given)) for node, given in called if _is_depthwise(node, given)]


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
    def of(cls, node: fx.Node, given: GivenParams) -> _Description | None:
        x, weight, y = (graph_nodes.value_of(each) for each in (given["input"], given["weight"], node))
        if not all(isinstance(each, int) for value in (x, weight) for each in (*value.shape, *value.stride())):
            return None
        window = tuple((name, _frozen(each)) for name, each in _window(given).items())
        return cls(tuple(x.shape), tuple(weight.shape), x.stride(), y.dtype, x.device, window, bool(x.requires_grad))

    def __str__(self) -> str:
        n, c, h, w = self.x
        return f"depthwise_conv2d {n}x{h}x{w}x{c} {self.weight[2]}x{self.weight[3]} {self.dtype}, forward and backward"

    def workloads(self) -> list[Workload]:
        """Those of all directions that a step may need."""
        options, (n, c, h, w), (k, _, r, s) = dict(self.window), self.x, self.weight
        like = torch.empty_strided(self.x, self.strides, device="meta")
        dilation = graph_nodes.pair(options["dilation"])
        fixed: ParamsByName = {
            "n": n, "c": c, "h": h, "w": w, "r": r, "s": s, "multiplier": k // c, "dilation": dilation,
            "stride": graph_nodes.pair(options["stride"]),
            "padding": graph_nodes.padding(options["padding"], (r, s), dilation),
            "dtype": graph_nodes.DTYPES[self.dtype],
            "layout": "NHWC" if like.is_contiguous(memory_format=torch.channels_last) else "NCHW",
        }  # fmt: skip
        directions = ("forward", "grad_input", "grad_weight", "grad_both") if self.needs_dx else ("forward", "grad_weight")
        changes: list[ParamsByName] = [{"direction": each} for each in directions]
        for each in changes:
            if each["direction"] in ("grad_weight", "grad_both"):
                each["deterministic"] = torch.are_deterministic_algorithms_enabled()
        return [depthwise_conv2d_workload(**fixed, **each) for each in changes]

    def result(self, timer: Timer, cache_bytes: int, deadline: Deadline) -> Result:
        """A benchmark of a forward and a backward pass with our kernels, and with PyTorch's own."""
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
        with cudnn_searches(True):
            ours, theirs = (
                Candidate(name, *(_step(each, *pair) for pair in operands))
                for name, each in zip((KERNEL, PYTORCH), convolve)
            )
            return benchmark([timer], theirs, [ours], deadline)

    def replace(self, graph: fx.Graph, node: fx.Node) -> None:
        called = graph_nodes.called(node)
        assert called is not None
        given = called[1]
        with graph.inserting_before(node):
            operands = given["input"], given["weight"], given.get("bias")
            new = graph.call_function(depthwise_conv2d, operands, _window(given))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


@dataclass(frozen=True)
class _OverTime:
    """A causal depthwise convolution over time, by what its time depends on."""

    workload: Workload
    strides: tuple[int, ...]
    device: torch.device
    needs_dx: bool
    layer: Layer = field(compare=False)

    @classmethod
    def of(cls, layer: Layer) -> _OverTime:
        x = graph_nodes.value_of(layer.arguments["x"])
        return cls(layer.workload, x.stride(), x.device, bool(x.requires_grad), layer)

    def __str__(self) -> str:
        return f"{self.workload.label}, forward and backward"

    def workloads(self) -> list[Workload]:
        return [self.workload, self.workload.replace(direction="backward")]

    def result(self, timer: Timer, cache_bytes: int, deadline: Deadline) -> Result:
        """As that of images."""
        p = self.workload.params
        dtype = getattr(torch, p["dtype"])
        x = torch.empty_strided((p["n"], p["c"], p["t"]), self.strides, dtype=dtype, device=self.device).normal_()
        weight, bias = (torch.randn(shape, dtype=dtype, device=self.device) for shape in ((p["c"], p["taps"]), (p["c"],)))
        sets = sets_needed(3 * x.nbytes, cache_bytes)
        operands = [(x.clone().requires_grad_(self.needs_dx), weight.clone().requires_grad_()) for _ in range(sets)]
        stages = [stage.name for stage in p["epilogue"]]
        options: dict[str, Any] = {
            "bias": bias if "bias" in stages else None,
            "activation": "silu" if "silu" in stages else None,
        }

        def theirs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return causal_by_torch(x, weight[:, None], options["bias"], p["dilation"], "silu" in stages)

        ours, pytorch = (
            Candidate(name, *(_step(each, *pair) for pair in operands))
            for name, each in ((KERNEL, lambda x, weight: causal_conv1d(x, weight, dilation=p["dilation"], **options)),
                               (PYTORCH, theirs))
        )  # fmt: skip
        return benchmark([timer], pytorch, [ours], deadline)

    def replace(self, graph: fx.Graph, node: fx.Node) -> None:
        p, arguments = self.workload.params, self.layer.arguments
        last = self.layer.nodes[-1]
        silu = "silu" if any(stage.name == "silu" for stage in p["epilogue"]) else None
        with graph.inserting_before(last):
            weight = graph.call_function(torch.squeeze, (arguments["weight"], 1))
            options = {"activation": silu, "dilation": p["dilation"]}
            new = graph.call_function(causal_conv1d, (arguments["x"], weight, arguments.get("bias")), options)
        new.meta = dict(last.meta)
        last.replace_all_uses_with(new)
        for old in reversed(self.layer.nodes):
            graph.erase_node(old)


def _causal(graph: fx.Graph) -> list[tuple[fx.Node, _OverTime]]:
    """Convolutions over time whose results have the length of their input, of which no step sees a later one."""
    found = []
    for layer in patterns.over_time(graph):
        p = layer.workload.params
        if tuple(p["padding"]) == ((p["taps"] - 1) * p["dilation"], 0):
            found.append((layer.nodes[0], _OverTime.of(layer)))
    return found


def _step(convolve: _Convolve, x: torch.Tensor, weight: torch.Tensor) -> Callable[[], Any]:
    wanted = [each for each in (x, weight) if each.requires_grad]

    def run() -> Any:
        with torch.enable_grad():
            y = convolve(x, weight)
        return torch.autograd.grad(y, wanted, torch.ones_like(y))

    return run


def _is_depthwise(node: fx.Node, given: Mapping[str, object]) -> bool:
    x, weight, y = (graph_nodes.value_of(each) for each in (given.get("input"), given.get("weight"), node))
    if x is None or weight is None or y is None or x.dim() != 4 or y.dtype not in graph_nodes.DTYPES:
        return False
    return given.get("groups", 1) == x.shape[1] and int(x.shape[1]) > 1


def _window(given: Mapping[str, object]) -> ParamsByName:
    return {name: given.get(name, default) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))}


def _frozen(each: object) -> Any:
    return tuple(each) if isinstance(each, list | tuple) else each
