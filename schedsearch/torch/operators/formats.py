"""How tensors lie in memory, and what the operators allocate: one source for the fake kernels and for the real ones.

Tensors have the logical axes N, C, H, W. Memory in channels_last is our operators' layout NHWC, contiguous memory is NCHW.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from schedsearch.errors import ArgumentError
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.dtypes import from_library

_FORMATS = {"NHWC": torch.channels_last, "NCHW": torch.contiguous_format}


def layout_of(x: torch.Tensor, weight: torch.Tensor | None = None) -> str:
    """The layout in which an operator computes: NHWC or NCHW, by the strides of the image.

    An image of one channel, or of one pixel, is both. The weight then decides, and without one it is NCHW. An image that
    is neither is copied to NHWC if its channels are neighbours in memory, else to NCHW.
    """
    last, plain = x.is_contiguous(memory_format=torch.channels_last), x.is_contiguous()
    if last and plain:
        of_weight = weight is not None and x.shape[1] > 1 and weight.is_contiguous(memory_format=torch.channels_last)
        return "NHWC" if of_weight else "NCHW"
    if last or plain:
        return "NHWC" if last else "NCHW"
    return "NHWC" if x.dim() == 4 and x.stride(1) == 1 and x.shape[1] > 1 else "NCHW"


def empty(like: torch.Tensor, shape: Sequence[object], layout: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """What a kernel returns for an image of this logical shape: on the device of `like`, and of its dtype by default."""
    return torch.empty(tuple(shape), dtype=dtype or like.dtype, device=like.device, memory_format=_FORMATS[layout])


def in_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The tensor itself, or a copy that lies in this layout."""
    return tensor.contiguous(memory_format=_FORMATS[layout])


def allows_tf32() -> bool:
    """Whether PyTorch's convolutions may compute float32 in TF32 now.

    `torch.backends.cudnn.allow_tf32` cannot be read in programs that set the format of convolutions alone (PyTorch 2.9 and
    newer). torch.compile guards on it, but not on the format.
    """
    if torch.compiler.is_compiling():
        return bool(torch.backends.cudnn.allow_tf32) if _one_flag_tells() else _convolutions_take_tf32()
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")


@torch.compiler.assume_constant_result
def _one_flag_tells() -> bool:
    try:
        return torch.backends.cudnn.allow_tf32 is not None
    except RuntimeError:
        return False


@torch.compiler.assume_constant_result
def _convolutions_take_tf32() -> bool:
    return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """PyTorch's convolutions compute float32 in float32."""
    conv = torch.backends.cudnn.conv
    before = conv.fp32_precision
    conv.fp32_precision = "ieee"
    try:
        yield
    finally:
        conv.fp32_precision = before


def convolved(size: Any, kernel: Any, before: int, after: int, stride: int, dilation: int) -> Any:
    """Extent of a convolution's output along an axis."""
    return (size + before + after - dilation * (kernel - 1) - 1) // stride + 1


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Our name of a dtype of torch; torch's own if we do not have it."""
    return from_library(str(dtype).removeprefix("torch."))


@functools.cache
def torch_dtype(name: str) -> torch.dtype:
    """The dtype of torch with our name. Raises ArgumentError if this torch does not have it."""
    found = getattr(torch, dtype_of(name).library, None)
    if not isinstance(found, torch.dtype):
        raise ArgumentError(f"PyTorch {torch.__version__} has no dtype {name}; update PyTorch, or take another format")
    return found
