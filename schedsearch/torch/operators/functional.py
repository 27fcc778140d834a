"""The operators as functions, with the defaults and the words of PyTorch."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from schedsearch.errors import ArgumentError, did_you_mean
from schedsearch.ops.layout import Layout
from schedsearch.text import type_text
from schedsearch.torch.operators import (
    epilogues,
    quantized,  # noqa: F401, which declares its operator
)
from schedsearch.torch.operators.depthwise import Depthwise
from schedsearch.torch.operators.formats import allows_tf32
from schedsearch.torch.operators.library import eager
from schedsearch.torch.operators.moves import Shuffled
from schedsearch.torch.operators.transforms import transformed, transformed_while_tracing, transforming
from schedsearch.torch.operators.window import check_convolution, check_operands, convolve, output_shape, text
from schedsearch.torch.operators.window import parameters as parsed

_ACTIVATIONS = (*epilogues.ACTIVATIONS, "relu6", "leaky_relu", "clip")
_Pair = int | Sequence[int]
_Options = tuple[Any, ...]  # stride, padding, dilation, groups, precision, activation, residual_last, pixel_shuffle
_LISTS = list, tuple
_ops = torch.ops.schedsearch
_eager_conv2d, _eager_depthwise_conv2d = eager("conv2d"), eager("depthwise_conv2d")
_texts: dict[Any, str] = {}
_EIGHT_BITS = {torch.int8: (-128, 127), torch.uint8: (0, 255)}
_OF_INTEGERS = (None, "relu", "relu6", "clip")
_LARGEST_FACTOR = 1 << 15  # of a pixel shuffle
_checked: set[Any] = set()  # descriptions of tensors, see `_check_once`
_MOST_CHECKED = 4096


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
        activation: relu, relu6, leaky_relu (with `negative_slope`), clip (to `low` ... `high`), sigmoid, silu, hard_swish,
            gelu, or None.
        residual_last: the residual is added behind the activation.
        pixel_shuffle: the factor of a torch.nn.PixelShuffle behind everything else; no residual then.
        precision: of products of float32: fp32 or tf32; by default as torch.backends.cudnn.allow_tf32 says.

    Raises:
        ArgumentError: arguments that do not fit each other.

    Examples:
        >>> y = conv2d(x, weight, bias, padding=1, activation="relu")
    """
    if not (isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor)):
        _check_tensors(x, weight)
    if type(groups) is not int:
        groups = _whole("groups", groups)
    if pixel_shuffle != 1:
        pixel_shuffle = _factor("pixel_shuffle", pixel_shuffle)
    depthwise = groups > 1 and x.dim() == 4 and groups == x.shape[1] and pixel_shuffle == 1
    if torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu"):
        x, weight, bias, scale, residual = _cast(x, weight, bias, scale, residual)
    if depthwise:
        groups, precision = 1, "fp32"
    elif precision is None:
        precision = _precision(x) if x.dtype is torch.float32 else "fp32"
    options = (stride, padding, dilation, groups, precision, activation, residual_last, pixel_shuffle)
    numbers = () if activation is None else _numbers(activation, negative_slope, low, high)
    return _convolution(depthwise, x, weight, bias, scale, residual, options, numbers)


def quantized_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    output_scale: torch.Tensor | None = None,
    x_zero_point: int = 0,
    weight_zero_point: int = 0,
    y_zero_point: int = 0,
    stride: _Pair = 1,
    padding: _Pair | str = 0,
    dilation: _Pair = 1,
    groups: int = 1,
    activation: str | None = None,
    negative_slope: float = 0.01,
    low: float = 0.0,
    high: float = 6.0,
) -> torch.Tensor:
    """A 2-d convolution of 8-bit numbers. The factors are x - x_zero_point and weight - weight_zero_point; padding adds
    nothing. `out_dtype` says what becomes of their sums:

    - int32: activation(sums + bias + residual), exact; bias and residual are int32.
    - int8 or uint8: round(activation(sums + bias + residual) * scale) + y_zero_point, saturated; scale is the scale of x
      times that of the weight, divided by that of y; bias and residual are int32.
    - int8 or uint8 with `output_scale`: round(activation(sums * scale + bias + residual) / output_scale) + y_zero_point,
      saturated; bias and residual are float32.
    - float32, float16 or bfloat16: activation(sums * scale + bias + residual); bias is float32, residual has the output's
      dtype.

    Without a kernel PyTorch computes it in float64, slowly; on a GPU it has no such operator. There are no gradients.

    Args:
        x: (n, c, h, w) of int8 or uint8; or of float8_e4m3fn or float8_e5m2, for an output of floats.
        weight: (k, c / groups, r, s) of either format of the same kind.
        bias, scale, output_scale: (k); scales are float32.
        residual: like the output before the last rounding.
        out_dtype: by default int32 without a scale, else the dtype of x, or float16 for float8.
        stride, padding, dilation, groups, activation, negative_slope, low, high: as `conv2d`; sums of integers take
            relu and clip only.

    Raises:
        ArgumentError: arguments that do not fit each other.
    """
    _check_tensors(x, weight)
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise ArgumentError(f"out_dtype is {out_dtype!r}; allowed: a torch.dtype, e.g. torch.int8")
    x_zero_point, weight_zero_point, y_zero_point = (
        _whole(f"{name}_zero_point", value)
        for name, value in (("x", x_zero_point), ("weight", weight_zero_point), ("y", y_zero_point))
    )
    groups = _whole("groups", groups)
    if out_dtype is None:
        out_dtype = torch.float16 if x.dtype.is_floating_point else torch.int32 if scale is None else x.dtype
    for label, zero_point, dtype in (
        ("x", x_zero_point, x.dtype),
        ("weight", weight_zero_point, weight.dtype),
        ("y", y_zero_point, out_dtype),
    ):
        if zero_point and dtype in _EIGHT_BITS and not _EIGHT_BITS[dtype][0] <= zero_point <= _EIGHT_BITS[dtype][1]:
            raise ArgumentError(
                f"{label}_zero_point is {zero_point}; allowed: {_EIGHT_BITS[dtype][0]} to {_EIGHT_BITS[dtype][1]}, the "
                f"numbers of {dtype}"
            )
    if not out_dtype.is_floating_point and output_scale is None and activation not in _OF_INTEGERS:
        raise ArgumentError(
            f"activation {activation!r} is of floats, and the sums are integers; allowed: relu, relu6, clip or None; "
            "or give an output_scale, or an out_dtype of floats"
        )
    # Sums of two uint8 would be uint32, in which PyTorch hardly computes; with a zero point, even 0, they are int32.
    of_x = x_zero_point != 0 or (x.dtype == weight.dtype == torch.uint8)
    zero_points = ("x," if of_x else "") + ("weight" if weight_zero_point != 0 else "")
    numbers = () if activation is None else _numbers(activation, negative_slope, low, high)
    middle = _epilogue((bias is not None, False, residual is not None), activation, False, 1)
    name = str(out_dtype).removeprefix("torch.")
    if out_dtype.is_floating_point or output_scale is not None:
        words = [f"dequantise:{name if output_scale is None else 'float32'}", middle]
        words += [] if output_scale is None else [f"quantise:{name}"]
    else:
        words = [middle] if out_dtype is torch.int32 else [middle, f"requantise:{name}"]
    epilogue = ",".join([word for word in words if word])
    parameters = text(*_window(weight, stride, padding, dilation), groups, epilogue, "fp32", zero_points.rstrip(","))
    return _ops.quantized_conv2d.default(
        x, weight, bias, scale, residual, output_scale, parameters, *(numbers or (0.0, 0.0)),
        x_zero_point, weight_zero_point, y_zero_point,
    )  # fmt: skip


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
    if not (isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor)):
        _check_tensors(x, weight)
    if torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu"):
        x, weight, bias, scale, residual = _cast(x, weight, bias, scale, residual)
    options = (stride, padding, dilation, 1, "fp32", activation, residual_last, 1)
    numbers = () if activation is None else _numbers(activation, negative_slope, low, high)
    return _convolution(True, x, weight, bias, scale, residual, options, numbers)


def pixel_shuffle(x: torch.Tensor, upscale_factor: int) -> torch.Tensor:
    """torch.nn.functional.pixel_shuffle by the best recorded kernel. The result has the memory format of x.

    Args:
        x: (n, c, h, w), c a multiple of upscale_factor ** 2; any dtype.

    Raises:
        ArgumentError: x has other axes, or its channels do not divide.
    """
    _check_tensors(x)
    upscale_factor = _factor("upscale_factor", upscale_factor)
    if transformed():
        return functional.pixel_shuffle(x, upscale_factor)
    if torch.is_grad_enabled() and x.requires_grad:
        return Shuffled.apply(x, upscale_factor, False)
    return _ops.pixel_shuffle.default(x, upscale_factor)


def pixel_unshuffle(x: torch.Tensor, downscale_factor: int) -> torch.Tensor:
    """torch.nn.functional.pixel_unshuffle by the best recorded kernel. The result has the memory format of x.

    Args:
        x: (n, c, h, w), h and w multiples of downscale_factor; any dtype.

    Raises:
        ArgumentError: x has other axes, or its height or width does not divide.
    """
    _check_tensors(x)
    downscale_factor = _factor("downscale_factor", downscale_factor)
    if transformed():
        return functional.pixel_unshuffle(x, downscale_factor)
    if torch.is_grad_enabled() and x.requires_grad:
        return Shuffled.apply(x, downscale_factor, True)
    return _ops.pixel_unshuffle.default(x, downscale_factor)


def layout_transform(x: torch.Tensor, layout: str, to: str, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """An array in another layout, e.g. in blocks of channels.

    Args:
        x: an array whose axes are those of `layout`, in this order.
        layout, to: NCHW, NHWC, NCHW32c, OIHW, OHWI, OIHW32o32i ...; see `schedsearch.ops.Layout`.
        sizes: logical extents of the axes of `layout` (its capital letters); by default the blocks are full.

    Returns:
        A contiguous array; the padding of its last blocks is zero.

    Raises:
        ArgumentError, UsageError: a string is not a layout, or x does not have this one.

    Examples:
        >>> layout_transform(torch.zeros(1, 48, 7, 7), "NCHW", "NCHW32c").shape
        torch.Size([1, 2, 7, 7, 32])
    """
    _check_tensors(x)
    source = Layout.parse(layout)
    if sizes is None:
        sizes = [extent * source.block(axis) for extent, axis in zip(x.shape, source.axes)]
    if transformed():
        return Layout.parse(to).pack(source.unpack(x, dict(zip(source.axes, sizes))), source.axes)
    return _ops.layout_transform.default(x, sizes, layout, to)


def _convolution(
    depthwise: bool,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    residual: torch.Tensor | None,
    options: _Options,
    numbers: tuple[float, ...],
) -> Any:
    """A convolution by its operator, or with gradients where they are wanted.

    Eager code calls the operator without the Python function that PyTorch wraps it in.
    """
    operands = bias is not None, scale is not None, residual is not None
    compiling = torch.compiler.is_dynamo_compiling()
    by_pytorch = transformed_while_tracing() if compiling else transforming()
    if by_pytorch or (
        torch.is_grad_enabled()
        and (x.requires_grad or weight.requires_grad or (True in operands and _wants_gradients(bias, scale, residual)))
    ):
        epilogue = _epilogue(operands, *options[5:])
        if not compiling:
            _check_once(depthwise, x, weight, bias, scale, residual, options, epilogue)
        if by_pytorch and depthwise:
            depthwise, options = False, (*options[:3], x.shape[1], *options[4:])
        sums = _sums(depthwise, x, weight, options)
        return epilogues.computed(sums, epilogue, bias, scale, residual, *(numbers or (0.0, 0.0))) if epilogue else sums
    if compiling:
        compute = _ops.depthwise_conv2d.default if depthwise else _ops.conv2d.default
        return compute(x, weight, bias, scale, residual, _made_parameters(weight, operands, *options), *numbers)
    compute = _eager_depthwise_conv2d if depthwise else _eager_conv2d
    return compute(x, weight, bias, scale, residual, _kept_parameters(weight, operands, options), *numbers)


def _check_once(
    depthwise: bool,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    residual: torch.Tensor | None,
    options: _Options,
    epilogue: str,
) -> None:
    """Raises ArgumentError for what the operators refuse. Tensors like those before are not checked again."""
    given = {"x": x, "weight": weight, "bias": bias, "scale": scale, "residual": residual}
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    parameters = _parameters(weight, (False, False, False), (*options[:5], None, False, 1))
    key = depthwise, parameters, epilogue, *((name, each.dtype, each.shape) for name, each in tensors.items())
    if key in _checked:
        return
    name = "depthwise_conv2d" if depthwise else "conv2d"
    window, groups = parsed(parameters).window, options[3]
    check_convolution(name, tensors, window, x.shape[1] if depthwise and x.dim() == 4 else groups)
    check_operands(name, epilogue, tensors, output_shape(x, weight, window, epilogue))
    if len(_checked) < _MOST_CHECKED:
        _checked.add(key)


def _sums(depthwise: bool, x: torch.Tensor, weight: torch.Tensor, options: _Options) -> Any:
    """A convolution without an epilogue, with gradients."""
    if depthwise:
        return Depthwise.apply(x, weight, _parameters(weight, (False, False, False), (*options[:5], None, False, 1)))
    stride, padding, dilation, groups, *_ = options
    return convolve(x, weight, *_window(weight, stride, padding, dilation), groups)


def _parameters(weight: torch.Tensor, operands: tuple[bool, ...], options: _Options) -> str:
    """The operator's text (`window.text`); torch.compile cannot trace the dictionary of those that were seen before.

    Args:
        operands: whether there is a bias, a scale, a residual.
    """
    if torch.compiler.is_dynamo_compiling():
        return _made_parameters(weight, operands, *options)
    return _kept_parameters(weight, operands, options)


def _kept_parameters(weight: torch.Tensor, operands: tuple[bool, ...], options: _Options) -> str:
    key = (operands, options, weight.shape if options[1] == "same" else None)
    try:
        return _texts[key]
    except TypeError:  # lists
        return _made_parameters(weight, operands, *options)
    except KeyError:
        return _texts.setdefault(key, _made_parameters(weight, operands, *options))


def _made_parameters(
    weight: torch.Tensor,
    operands: tuple[bool, ...],
    stride: _Pair,
    padding: _Pair | str,
    dilation: _Pair,
    groups: int,
    precision: str,
    *stages: Any,
) -> str:
    if precision not in ("fp32", "tf32"):
        raise ArgumentError(f"precision is {precision!r}; allowed: fp32, tf32 or None")
    return text(*_window(weight, stride, padding, dilation), groups, _epilogue(operands, *stages), precision)


def _epilogue(operands: tuple[bool, ...], activation: str | None, residual_last: bool, block: int) -> str:
    """The epilogue's text; see `epilogues`.

    Args:
        operands: whether there is a bias, a scale, a residual.
        block: the factor of a pixel shuffle at the end.
    """
    bias, scale, residual = operands
    if scale and not bias:
        raise ArgumentError("there is a scale without a bias; give torch.zeros_like(scale) as the bias")
    if activation is not None and activation not in _ACTIVATIONS:
        hint = did_you_mean(str(activation), _ACTIVATIONS)
        raise ArgumentError(f"there is no activation {activation!r}{hint}; allowed: {', '.join(_ACTIVATIONS)} or None")
    sums = "scale_shift" if scale else "bias" if bias else ""
    added = "residual" if residual else ""
    then = "clip" if activation == "relu6" else activation or ""
    moved = f"depth_to_space:{block}" if block != 1 else ""
    order = (sums, then, added, moved) if residual_last else (sums, added, then, moved)
    return ",".join([word for word in order if word])


def _numbers(activation: str, slope: float, low: float, high: float) -> tuple[float, ...]:
    """The operator's low and high, for an activation that has any."""
    if not isinstance(activation, str):
        raise ArgumentError(f"activation is {activation!r}; allowed: {', '.join(_ACTIVATIONS)} or None")
    if activation == "relu6":
        return 0.0, 6.0
    if activation == "clip":
        return low, high
    return (slope, 0.0) if activation == "leaky_relu" else ()


def _window(
    weight: torch.Tensor, stride: _Pair, padding: _Pair | str, dilation: _Pair
) -> tuple[list[int], list[int], list[int]]:
    """Stride, padding and dilation in full."""
    strides, dilations = _pair("stride", stride), _pair("dilation", dilation)
    if isinstance(padding, str):
        if padding not in ("valid", "same"):
            hint = did_you_mean(padding, ("valid", "same"))
            raise ArgumentError(f"padding is {padding!r}{hint}; allowed: numbers, 'valid' or 'same'")
        if padding == "same" and strides != [1, 1]:
            raise ArgumentError(f"padding 'same' needs stride 1, got {strides}")
        if weight.dim() != 4:
            raise ArgumentError(f"weight has shape {tuple(weight.shape)}; allowed: four axes (k, c / groups, r, s)")
        whole = [0, 0] if padding == "valid" else [dilations[i] * (weight.shape[2 + i] - 1) for i in (0, 1)]
        pads = [whole[0] // 2, whole[1] // 2, whole[0] - whole[0] // 2, whole[1] - whole[1] // 2]
    else:
        numbers = _numbers_of("padding", padding)
        pads = numbers * 2 if len(numbers) == 2 else numbers
        if len(pads) != 4:
            raise ArgumentError(
                f"padding is {padding!r}; allowed: one integer, (vertical, horizontal) or (top, left, bottom, right)"
            )
    return strides, pads, dilations


def _pair(name: str, value: _Pair) -> list[int]:
    found = _numbers_of(name, value)
    if len(found) != 2:
        raise ArgumentError(f"{name} is {value!r}; allowed: one integer or two, (vertical, horizontal)")
    return found


def _numbers_of(name: str, value: Any) -> list[int]:
    """One number twice, or a sequence of numbers as a list."""
    found = list(value) if isinstance(value, _LISTS) else [value, value]
    try:
        return [_index(each) for each in found]
    except TypeError:
        raise ArgumentError(f"{name} is {value!r}; allowed: integers, e.g. {name}=1 or {name}=(1, 1)") from None


def _index(value: Any) -> Any:
    """An integer of any library as Python's, or a symbolic one. Raises TypeError for other values."""
    if isinstance(value, torch.SymInt) or type(value) is int:
        return value
    return operator.index(value)


def _whole(name: str, value: Any) -> int:
    try:
        found: int = _index(value)
        return found
    except TypeError:
        raise ArgumentError(f"{name} is {value!r}; allowed: an integer") from None


def _factor(name: str, value: Any) -> int:
    """The factor of a pixel shuffle."""
    factor = _whole(name, value)
    if not 1 <= factor <= _LARGEST_FACTOR:
        raise ArgumentError(f"{name} is {value!r}; allowed: an integer from 1 to {_LARGEST_FACTOR}")
    return factor


def _check_tensors(*tensors: Any) -> None:
    """Raises ArgumentError if the image or the weight is not a tensor."""
    for name, each in zip(("x", "weight"), tensors):
        if not isinstance(each, torch.Tensor):
            raise ArgumentError(f"{name} is {type_text(each)}; allowed: a torch.Tensor")


def _precision(x: torch.Tensor) -> str:
    """What PyTorch would do with products of float32."""
    return "tf32" if x.is_cuda and allows_tf32() else "fp32"


def _wants_gradients(*tensors: torch.Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _cast(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """The tensors in autocast's dtype, as PyTorch's convolutions take them."""
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    dtype = torch.get_autocast_dtype(device)
    return tuple(None if tensor is None else _cast_one(tensor, dtype) for tensor in tensors)


def _cast_one(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not torch.float64 else tensor
