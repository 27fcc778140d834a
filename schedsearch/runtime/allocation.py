"""Functions that allocate one kind of tensor of PyTorch again and again, in the way that costs least host time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any


def torch_allocator(shape: Sequence[int], strides: Sequence[int], dtype: Any, device: Any) -> Callable[[], Any]:
    """A function that allocates a tensor of a shape, strides in elements, a dtype and a device of PyTorch.

    That is the function of Inductor's generated code, which allocates on the current GPU. Where there may be another one, it
    copies a tensor whose memory was freed, which costs less than shape and strides in Python.
    """
    import torch

    quick = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if quick is not None and (device.type == "cpu" or torch.cuda.device_count() == 1):
        return functools.partial(quick, tuple(shape), tuple(strides), dtype)
    like = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device=device)
    like.untyped_storage().resize_(0)
    return functools.partial(torch.empty_like, like)
