"""The operators as functions, with the defaults and the words of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from schedsearch.errors import ArgumentError, did_you_mean
from schedsearch.ops.layout import Layout
from schedsearch.torch import epilogues
from schedsearch.torch.convolutions import convolve
from schedsearch.torch.depthwise import Depthwise
from schedsearch.torch.moves import Shuffled

_ACTIVATIONS = ("relu", "relu6", "leaky_relu", "clip")
_Pair = int | Sequence[int]


def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    scale: torch.Tensor | None = None,
    stride: _Pair = 1,
    padding: _Pair | str = 0,
    dilation: _Pair = 1,
    groups: int = 1,
    activation: str | None = None,
    negative_slope: float = 0.01,
    low: float = 0.0,
    high: float = 6.0,
    residual_last: bool = False,
    pixel_shuffle: int = 1,
    precision: str | None = None,
) -> torch.Tensor:
    """A 2-d convolution with its epilogue: activation(conv(x, weight) * scale + bias + residual).

    The best recorded kernel computes it (`schedsearch.torch.use` names the database); without one, or where gradients are
    wanted, PyTorch does. The result is in channels_last if x is, or if x is a copy that its strides bring near to it.

    Args:
        x: (n, c, h, w), float16, bfloat16 or float32; contiguous or in channels_last. Other strides cost a copy.
        weight: (k, c / groups, r, s) of the same dtype, best in the memory format of x.
        bias: (k).
        residual: like the result; added before the activation.
        scale: (k), multiplied before the bias is added, for a batch norm in evaluation mode; needs a bias.
        stride, dilation: one number or (vertical, horizontal).
        padding: one number, (vertical, horizontal), (top, left, bottom, right), "valid" or "same".
        groups: divides c and k.
        activation: relu, relu6, leaky_relu (with `negative_slope`), clip (to `low` ... `high`), or None.
        residual_last: the residual is added behind the activation.
        pixel_shuffle: the factor of a torch.nn.PixelShuffle behind everything else; no residual then.
        precision: of products of float32: fp32 or tf32; by default as torch.backends.cudnn.allow_tf32 says.

    Raises:
        ArgumentError: arguments that do not fit each other.

    Example:
        >>> y = conv2d(x, weight, bias, padding=1, activation="relu")
    """
    if pixel_shuffle == 1 and 1 < groups == x.shape[1]:
        return depthwise_conv2d(
            x, weight, bias, residual, scale=scale, stride=stride, padding=padding, dilation=dilation,
            activation=activation, negative_slope=negative_slope, low=low, high=high, residual_last=residual_last,
        )  # fmt: skip
    x, weight, bias, scale, residual = _cast(x, weight, bias, scale, residual)
    window = _window(weight, stride, padding, dilation)
    stage, low, high = _activation(activation, negative_slope, low, high)
    epilogue = _epilogue(bias, scale, residual, stage, residual_last, pixel_shuffle)
    if _wants_gradients(x, weight, bias, scale, residual):
        y = convolve(x, weight, *window, groups)
        return epilogues.computed(y, epilogue, bias, scale, residual, low, high)
    return torch.ops.schedsearch.conv2d(
        x, weight, bias, scale, residual, *window, groups, epilogue, low, high, precision or _precision(x)
    )


def depthwise_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    scale: torch.Tensor | None = None,
    stride: _Pair = 1,
    padding: _Pair | str = 0,
    dilation: _Pair = 1,
    activation: str | None = None,
    negative_slope: float = 0.01,
    low: float = 0.0,
    high: float = 6.0,
    residual_last: bool = False,
) -> torch.Tensor:
    """A depthwise convolution (groups = channels), in training as well: kernels compute both gradients.

    Where gradients are wanted, a kernel computes the convolution, and PyTorch its epilogue with its gradients. The gradient
    of the weight has the same bits in every call if `torch.use_deterministic_algorithms` asks for it. There is no second
    derivative: a backward pass with create_graph=True raises RuntimeError when it is differentiated again.

    Args:
        x: (n, c, h, w), float16, bfloat16 or float32.
        weight: (c * m, 1, r, s); output channel i * m + j belongs to input channel i.
        bias, residual, scale, stride, padding, dilation, activation, negative_slope, low, high, residual_last: as `conv2d`.

    Raises:
        ArgumentError: arguments that do not fit each other.
    """
    x, weight, bias, scale, residual = _cast(x, weight, bias, scale, residual)
    window = _window(weight, stride, padding, dilation)
    stage, low, high = _activation(activation, negative_slope, low, high)
    epilogue = _epilogue(bias, scale, residual, stage, residual_last)
    if _wants_gradients(x, weight, bias, scale, residual):
        y = Depthwise.apply(x, weight, *window)
        return epilogues.computed(y, epilogue, bias, scale, residual, low, high)
    return torch.ops.schedsearch.depthwise_conv2d(x, weight, bias, scale, residual, *window, epilogue, low, high)


def pixel_shuffle(x: torch.Tensor, upscale_factor: int) -> torch.Tensor:
    """torch.nn.functional.pixel_shuffle by the best recorded kernel. The result has the memory format of x.

    Args:
        x: (n, c, h, w), c a multiple of upscale_factor ** 2; any dtype.

    Raises:
        ArgumentError: x has other axes, or its channels do not divide.
    """
    if _wants_gradients(x):
        return Shuffled.apply(x, upscale_factor, False)
    return torch.ops.schedsearch.pixel_shuffle(x, upscale_factor)


def pixel_unshuffle(x: torch.Tensor, downscale_factor: int) -> torch.Tensor:
    """torch.nn.functional.pixel_unshuffle by the best recorded kernel. The result has the memory format of x.

    Args:
        x: (n, c, h, w), h and w multiples of downscale_factor; any dtype.

    Raises:
        ArgumentError: x has other axes, or its height or width does not divide.
    """
    if _wants_gradients(x):
        return Shuffled.apply(x, downscale_factor, True)
    return torch.ops.schedsearch.pixel_unshuffle(x, downscale_factor)


def layout_transform(x: torch.Tensor, layout: str, to: str, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """An array in another layout, e.g. in blocks of channels.

    Args:
        x: an array whose axes are those of `layout`, in this order.
        layout, to: NCHW, NHWC, NCHW32c, OIHW, OHWI, OIHW32o32i ...; see `schedsearch.ops.Layout`.
        sizes: logical extents of the axes of `layout` (its capital letters); by default the blocks are full.

    Returns:
        A contiguous array; the padding of its last blocks is zero.

    Raises:
        ArgumentError, UsageError: a text is not a layout, or x does not have this one.

    Example:
        >>> layout_transform(torch.zeros(1, 48, 7, 7), "NCHW", "NCHW32c").shape
        torch.Size([1, 2, 7, 7, 32])
    """
    if sizes is None:
        source = Layout.parse(layout)
        sizes = [extent * source.block(axis) for extent, axis in zip(x.shape, source.axes)]
    return torch.ops.schedsearch.layout_transform(x, sizes, layout, to)


def _epilogue(
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    residual_last: bool,
    block: int = 1,
) -> str:
    """The epilogue's text; see `epilogues`."""
    if scale is not None and bias is None:
        raise ArgumentError("there is a scale without a bias; give torch.zeros_like(scale) as the bias")
    sums = "" if bias is None else "bias" if scale is None else "scale_shift"
    added = "" if residual is None else "residual"
    moved = "" if block == 1 else f"depth_to_space:{block}"
    order = (sums, activation, added, moved) if residual_last else (sums, added, activation, moved)
    return ",".join([word for word in order if word])


def _window(weight: torch.Tensor, stride: _Pair, padding: _Pair | str, dilation: _Pair) -> tuple[list[int], ...]:
    """Stride, padding and dilation in full."""
    strides, dilations = _pair("stride", stride), _pair("dilation", dilation)
    if isinstance(padding, str):
        if padding not in ("valid", "same"):
            hint = did_you_mean(padding, ("valid", "same"))
            raise ArgumentError(f"padding is {padding!r}{hint}; allowed: numbers, 'valid' or 'same'")
        if padding == "same" and strides != [1, 1]:
            raise ArgumentError(f"padding 'same' needs stride 1, got {strides}")
        whole = [0, 0] if padding == "valid" else [dilations[i] * (weight.shape[2 + i] - 1) for i in (0, 1)]
        pads = [whole[0] // 2, whole[1] // 2, whole[0] - whole[0] // 2, whole[1] - whole[1] // 2]
    else:
        numbers = [padding, padding] if isinstance(padding, int) else list(padding)
        pads = numbers * 2 if len(numbers) == 2 else numbers
    return strides, pads, dilations


def _pair(name: str, value: _Pair) -> list[int]:
    numbers = [value, value] if isinstance(value, int) else list(value)
    if len(numbers) != 2:
        raise ArgumentError(f"{name} is {value}; allowed: one number or two, (vertical, horizontal)")
    return numbers


def _activation(name: str | None, slope: float, low: float, high: float) -> tuple[str, float, float]:
    """The stage, and the operator's low and high."""
    if name is None or name == "relu":
        return name or "", 0.0, 0.0
    if name == "leaky_relu":
        return name, slope, 0.0
    if name in ("relu6", "clip"):
        return "clip", *((0.0, 6.0) if name == "relu6" else (low, high))
    hint = did_you_mean(name, _ACTIVATIONS)
    raise ArgumentError(f"there is no activation {name!r}{hint}; allowed: {', '.join(_ACTIVATIONS)} or None")


def _precision(x: torch.Tensor) -> str:
    """What PyTorch would do with products of float32."""
    return "tf32" if x.is_cuda and torch.backends.cudnn.allow_tf32 else "fp32"


def _wants_gradients(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _cast(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """The tensors in autocast's dtype where autocast is on, as PyTorch's convolutions take them."""
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(None if tensor is None else _cast_one(tensor, dtype) for tensor in tensors)


def _cast_one(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not torch.float64 else tensor
