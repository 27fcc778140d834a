"""Graphs of PyTorch as layers see them: which call a node is, what it makes, and what a layer is.

Graphs of torch.export and those that torch.compile gives to its backends differ only in how a call is written.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from schedsearch.typed import GivenParams
from schedsearch.workload import Workload

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
_aten = torch.ops.aten

# Function or name of a method -> kind, and the names of its arguments in order.
_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_NORM = ("input", "weight", "bias", "mean", "var", "training", "momentum", "eps")
_ADD = ("input", "other", "alpha")
_Call = tuple[str, tuple[str, ...]]
_CALLS: dict[Any, _Call] = {
    **dict.fromkeys((torch.conv2d, functional.conv2d, _aten.conv2d.default, _aten.conv2d.padding), ("conv", _CONV)),
    **dict.fromkeys((torch.batch_norm, _aten.batch_norm.default), ("norm", _NORM)),
    functional.batch_norm: ("norm", ("input", "mean", "var", "weight", "bias", "training", "momentum", "eps")),
    **dict.fromkeys(
        (functional.relu, torch.relu, torch.relu_, _aten.relu.default, _aten.relu_.default, "relu", "relu_"),
        ("relu", ("input", "inplace")),
    ),
    **dict.fromkeys((functional.relu6, _aten.relu6.default, _aten.relu6_.default), ("relu6", ("input", "inplace"))),
    **dict.fromkeys(
        (functional.hardtanh, _aten.hardtanh.default, _aten.hardtanh_.default),
        ("hardtanh", ("input", "min", "max", "inplace")),
    ),
    **dict.fromkeys(
        (torch.clamp, torch.clamp_, _aten.clamp.default, _aten.clamp_.default, "clamp", "clamp_"),
        ("clip", ("input", "min", "max")),
    ),
    **dict.fromkeys(
        (functional.leaky_relu, _aten.leaky_relu.default, _aten.leaky_relu_.default),
        ("leaky_relu", ("input", "slope", "inplace")),
    ),
    **dict.fromkeys((functional.prelu, torch.prelu, _aten.prelu.default), ("prelu", ("input", "weight"))),
    **dict.fromkeys((operator.add, torch.add, _aten.add.Tensor, "add"), ("add", _ADD)),
    **dict.fromkeys((operator.iadd, _aten.add_.Tensor, "add_"), ("add_", _ADD)),
    **dict.fromkeys((torch.conv1d, functional.conv1d, _aten.conv1d.default, _aten.conv1d.padding), ("conv1d", _CONV)),
    **dict.fromkeys((functional.silu, _aten.silu.default, _aten.silu_.default), ("silu", ("input", "inplace"))),
    _aten.slice.Tensor: ("slice", ("input", "dim", "start", "end", "step")),
    operator.getitem: ("getitem", ("input", "index")),
    **dict.fromkeys((functional.pad, torch._C._nn.pad, _aten.pad.default), ("pad", ("input", "pad", "mode", "value"))),
    _aten.constant_pad_nd.default: ("pad", ("input", "pad", "value")),
    **dict.fromkeys((torch.transpose, _aten.transpose.int, "transpose"), ("transpose", ("input", "dim0", "dim1"))),
    **dict.fromkeys((torch.permute, _aten.permute.default, "permute"), ("permute", ("input", "dims"))),
    **dict.fromkeys((torch.pixel_shuffle, _aten.pixel_shuffle.default), ("shuffle", ("input", "block"))),
    **dict.fromkeys((torch.pixel_unshuffle, _aten.pixel_unshuffle.default), ("unshuffle", ("input", "block"))),
}


@dataclass(frozen=True)
class Norm:
    """A batch norm in evaluation mode: nodes of its four vectors, and its epsilon."""

    weight: fx.Node
    bias: fx.Node
    mean: fx.Node
    var: fx.Node
    eps: float


# Name -> operator and its further arguments. That of results takes itself back.
VIEWS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "channels last": (_aten.transpose.int, (1, 2)),  # (n, c, t) as (n, t, c)
    "taps": (_aten.squeeze.dim, (1,)),  # filters (c, 1, taps) as (c, taps)
}


def viewed(name: str | None, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as a kernel has it."""
    if name is None:
        return tensor
    operator, arguments = VIEWS[name]
    view: torch.Tensor = operator(tensor, *arguments)
    return view


@dataclass
class Layer:
    """A layer that a kernel may compute.

    Attributes:
        name: of the module that makes the convolution, such as layer1.0.conv1; else that of the node.
        nodes: in order; the last one's value is the layer's.
        workload: what the kernel computes.
        arguments: argument of the workload -> the node whose value it is; those of `scale` and `shift` are missing.
        norm: what `scale` and `shift` are made of.
        scalars: that differ from their defaults.
        views: argument, or y -> the view of VIEWS in which the kernel has it; others are as PyTorch has them.
    """

    name: str
    nodes: list[fx.Node]
    workload: Workload
    arguments: dict[str, fx.Node]
    norm: Norm | None = None
    scalars: dict[str, float] = field(default_factory=dict)
    views: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    """A layer that no workload describes, and why."""

    name: str
    reason: str


class NoWorkload(Exception):
    """Why a layer has no workload."""


def called(node: fx.Node) -> tuple[str, GivenParams] | None:
    """The kind of a node and its arguments by name; None if it is of no kind that matters here."""
    if node.op not in ("call_function", "call_method"):
        return None
    call = _CALLS.get(node.target)
    if call is None:
        return None
    names = {"self": "input", "running_mean": "mean", "running_var": "var", "min_val": "min", "max_val": "max"}
    names |= {"negative_slope": "slope", "upscale_factor": "block", "downscale_factor": "block"}
    return call[0], {**dict(zip(call[1], node.args)), **{names.get(key, key): each for key, each in node.kwargs.items()}}


def value_of(node: object) -> Any:
    """The fake tensor that a node makes; None if unknown."""
    if not isinstance(node, fx.Node):
        return None
    value = node.meta.get("val", node.meta.get("example_value"))
    return value if isinstance(value, torch.Tensor) else None


def writes(node: fx.Node) -> bool:
    """Whether a node may change a tensor that it did not make."""
    target = node.target
    if node.op == "call_method":
        return str(target).endswith("_") and not str(target).endswith("__")
    if node.op != "call_function":
        return bool(node.op == "call_module")
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    name = getattr(target, "__name__", "")
    in_place = getattr(target, "__module__", "") == "_operator" and name in _IN_PLACE
    return in_place or (name.endswith("_") and not name.endswith("__")) or bool(node.kwargs.get("inplace"))


_IN_PLACE = {name for name in dir(operator) if name.startswith("i") and hasattr(operator, f"__{name}__")} - {"inv", "invert"}
_IN_PLACE |= {"setitem", "delitem"}


def pair(given: Any) -> list[int]:
    """A number for height and width each."""
    numbers = [int(each) for each in given] if isinstance(given, Iterable) else [int(given)]
    return numbers * 2 if len(numbers) == 1 else numbers


def padding(given: Any, kernel: tuple[int, int], dilation: list[int]) -> list[int]:
    """Top, left, bottom and right; `given` is a number, two of them, valid or same."""
    if given == "valid":
        return [0, 0, 0, 0]
    if given == "same":
        totals = [step * (extent - 1) for extent, step in zip(kernel, dilation)]
        before = [total // 2 for total in totals]
        return [*before, *(total - first for total, first in zip(totals, before))]
    return pair(given) * 2


def name_of(node: fx.Node) -> str:
    """The path of the module that made a node, from the model."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    path = re.sub(r"^L\['\w+'\]", "", path)  # torch.compile begins with the name of a variable
    path = re.sub(r"_modules\['([^']+)'\]", r"\1", path)  # that of PyTorch 2.9 names children so
    return path.removeprefix("._orig_mod").strip(".") or node.name
