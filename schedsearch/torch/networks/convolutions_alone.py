"""The convolutions of a subgraph alone: what PyTorch's compiler makes of it takes at least as long.

Inductor in its default mode calls a library for each convolution in two dimensions, in the memory format of the model or in
channels_last, and writes code for what is around them (`torch/_inductor/kernel/conv.py`). Timing these calls takes a second;
compiling a network takes ten or more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from schedsearch.torch.layers.graph_nodes import value_of

_CONVOLUTIONS = torch.ops.aten.conv2d.default, torch.ops.aten.conv2d.padding
_FORMATS = torch.preserve_format, torch.channels_last


def convolutions_alone(module: fx.GraphModule, device: torch.device) -> list[Callable[[], None]]:
    """The convolutions of a graph of torch.export with its tensors as they are, and with tensors in channels_last: two runs,
    of which the faster is the bound. Empty if there are none, if one has no batch, if Inductor is set to write them, or if
    the device has no memory for their tensors.

    They compute on zeros, without biases, which Inductor adds elsewhere; tensors of one form share their memory."""
    from torch._inductor import config

    nodes = [node for node in module.graph.nodes if node.target in _CONVOLUTIONS and not node.kwargs]
    operands = [[value_of(each) for each in node.args[:2]] for node in nodes]
    if config.max_autotune or config.max_autotune_gemm or config.conv_1x1_as_mm:
        return []
    if not nodes or any(each is None or each.dim() != 4 for pair in operands for each in pair):  # images without a batch
        return []
    try:
        return [_run(nodes, operands, device, form) for form in _FORMATS]
    except torch.OutOfMemoryError:
        return []


def _run(
    nodes: list[fx.Node], operands: list[list[torch.Tensor]], device: torch.device, form: torch.memory_format
) -> Callable[[], None]:
    made: dict[Any, torch.Tensor] = {}

    def zeros(like: torch.Tensor) -> torch.Tensor:
        key = tuple(like.shape), like.stride(), like.dtype
        if key not in made:
            empty = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
            made[key] = empty.zero_().clone(memory_format=form)
        return made[key]

    calls: list[tuple[Any, Any]] = [
        (node.target, (*map(zeros, pair), None, *node.args[3:])) for node, pair in zip(nodes, operands)
    ]

    def run() -> None:
        for convolution, given in calls:
            convolution(*given)

    return run
