"""Models that cannot be optimized, each with its reason."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils import _pytree as pytree

from schedsearch.torch.arguments import check_devices
from schedsearch.torch.layers.requirements import check_kind
from schedsearch.torch.refusal import Refusal

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "FSDPModule")


def device_of(model: nn.Module, args: tuple[object, ...]) -> torch.device:
    """The device of a model and of its example.

    Args:
        args: what `checked_example` returned.

    Raises:
        Refusal: the model cannot be optimized; the text has the remedy.
        ArgumentError: the example lies elsewhere.
    """
    for module in model.modules():
        name = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            raise Refusal(f"{name} is scripted, so that its layers cannot be seen; give the module from before torch.jit")
        if name in _WRAPPERS or any(base.__name__ in _WRAPPERS for base in type(module).__mro__):
            raise Refusal(f"it contains {name}; call optimize_ on the module before it is wrapped")
        if hasattr(module, "_orig_mod"):
            raise Refusal("it is compiled already; call optimize_ first, then torch.compile")
        if type(module).__module__.startswith(("torch.ao.nn.quantized", "torch.nn.quantized", "torch.ao.nn.intrinsic")):
            raise Refusal(f"{name} is quantised; allowed: float16, bfloat16 and float32")
    tensors = [*model.parameters(), *model.buffers()]
    if any(nn.parameter.is_lazy(each) for each in tensors):
        raise Refusal("it has lazy modules without a shape; call the model once before")
    for each in tensors:
        if type(each) not in (torch.Tensor, nn.Parameter):
            raise Refusal(f"it has parameters of type {type(each).__name__}, which are not plain tensors")
    devices = {each.device for each in tensors}
    if len(devices) > 1:
        raise Refusal(f"the model lies on several devices: {', '.join(sorted(map(str, devices)))}")
    inputs = [each for each in pytree.tree_leaves(args) if isinstance(each, torch.Tensor)]
    device = next(iter(devices), inputs[0].device)
    check_kind(device)
    check_devices(device if devices else None, args)
    return device
