"""Registers `torch.ops.schedsearch`: schemas, implementations for CPU and CUDA, and fake kernels.

It uses `Library.define` and `impl`, whose calls cost less host time than those of `torch.library.custom_op`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("schedsearch", "FRAGMENT")
_first: dict[str, Callable[..., Any]] = {}  # name of an operator -> what calls of it in Python go to first

# Tensors whose memory is no array of numbers.
_FORMATS = (
    *(f"{format}{device}" for format in ("Sparse", "SparseCsr", "Quantized", "NestedTensor") for device in ("CPU", "CUDA")),
    "MkldnnCPU",
)


def register(
    schema: str,
    compute: Callable[..., object],
    fake: Callable[..., object],
    *,
    refuses_gradients: bool = False,
    refuse: Callable[..., object] | None = None,
    around: Callable[[Callable[..., Any]], Callable[..., Any] | None] = lambda operator: None,
) -> None:
    """Makes an operator of `torch.ops.schedsearch`.

    Args:
        schema: its name, arguments and results.
        compute: computes it, on any device.
        fake: makes its results without memory.
        refuse: is called with tensors of which one is sparse, quantised or nested; PyTorch raises its own error without it.
        refuses_gradients: `compute` raises where a gradient is wanted; otherwise PyTorch's own rule holds.
        around: makes what calls in Python go to first from the operator without it; None: they go to the operator.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _library.impl(name, compute, key)
    for key in _FORMATS if refuse is not None else ():
        _library.impl(name, refuse, key)
    if refuses_gradients:
        _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"schedsearch::{name}", fake, lib=_library)
    packet = getattr(torch.ops.schedsearch, name)
    first = around(packet._op)
    if first is not None:  # still PyTorch's object in all that it compares, traces and prints, but for calls
        packet.__class__ = type("OpOverloadPacket", (type(packet),), {"__call__": staticmethod(first)})
        _first[name] = first


def eager(name: str) -> Callable[..., Any]:
    """A registered operator without the Python function that PyTorch wraps it in; torch.compile cannot trace it."""
    if name in _first:
        return _first[name]
    operator = getattr(torch.ops.schedsearch, name).default
    found: Callable[..., Any] = getattr(operator, "_op", operator)
    return found
