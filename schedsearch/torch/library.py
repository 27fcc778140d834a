"""Registers `torch.ops.schedsearch`: schemas, implementations for CPU and CUDA, and fake kernels.

It uses `Library.define` and `impl`, whose calls cost less host time than those of `torch.library.custom_op`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from schedsearch.torch import convolution, depthwise, moves, quantized
from schedsearch.torch.dispatch import Operation, fake

_OPERATORS: tuple[tuple[type[Operation], Callable[..., Any]], ...] = (
    (convolution.Conv2d, convolution.conv2d),
    (quantized.QuantizedConv2d, quantized.quantized_conv2d),
    (depthwise.DepthwiseConv2d, depthwise.depthwise_conv2d),
    (depthwise.GradInput, depthwise.grad_input),
    (depthwise.GradWeight, depthwise.grad_weight),
    (depthwise.GradBoth, depthwise.grad_both),
    (moves.PixelShuffle, moves.pixel_shuffle),
    (moves.PixelUnshuffle, moves.pixel_unshuffle),
    (moves.LayoutTransform, moves.layout_transform),
)

_library = torch.library.Library("schedsearch", "FRAGMENT")
for _kind, _compute in _OPERATORS:
    _library.define(_kind.schema, tags=(torch.Tag.pt2_compliant_tag,))
    for _key in ("CPU", "CUDA"):
        _library.impl(_kind.name, _compute, _key)
    _library.impl(_kind.name, torch.library.fallthrough_kernel, "Autograd")  # `run` refuses
    torch.library.register_fake(f"schedsearch::{_kind.name}", fake(_kind), lib=_library)
