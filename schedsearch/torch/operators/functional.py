"""The operators as functions, with the defaults and the words of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch.nn import functional

from schedsearch.errors import ArgumentError, did_you_mean
from schedsearch.ops.epilogues import Epilogue
from schedsearch.ops.layout import Layout
from schedsearch.text import type_text
from schedsearch.torch.operators import (
    epilogues,
    quantized,  # noqa: F401, which declares its operator
)
from schedsearch.torch.operators.depthwise import Depthwise
from schedsearch.torch.operators.formats import allows_tf32
from schedsearch.torch.operators.integers import Pair, shuffle_factor, whole, whole_window
from schedsearch.torch.operators.library import eager
from schedsearch.torch.operators.moves import Shuffled
from schedsearch.torch.operators.transforms import transformed, transformed_while_tracing, transforming
from schedsearch.torch.operators.window import check_convolution, check_operands, convolve, output_shape, text
from schedsearch.torch.operators.window import parameters as parsed

_ops = torch.ops.schedsearch
_eager_conv2d, _eager_depthwise_conv2d = eager("conv2d"), eager("depthwise_conv2d")
_texts: dict[Any, str] = {}
_EIGHT_BITS = {torch.int8: (-128, 127), torch.uint8: (0, 255)}
_OF_INTEGERS = (None, "relu", "relu6", "clip")
_checked: set[Any] = set()  # descriptions of tensors, see `_check_once`
_MOST_CHECKED = 4096


class _ActivationArguments(TypedDict, total=False):
    activation: str | None
    negative_slope: float
    low: float
    high: float


class _FloatArguments(_ActivationArguments, total=False):
    """Of an `Epilogue` of floats, as keywords."""

    scale: torch.Tensor | None
    residual_last: bool


class _Conv2dArguments(_FloatArguments, total=False):
    pixel_shuffle: int


class _QuantizedArguments(_ActivationArguments, total=False):
    """Of an `Epilogue` of sums of integers, as keywords."""

    output_scale: torch.Tensor | None
    y_zero_point: int


class _Window(NamedTuple):
    """Where a convolution reads, and how it multiplies."""

    stride: Pair
    padding: Pair | str
    dilation: Pair
    groups: int = 1
    precision: str = "fp32"


def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
    precision: str | None = None,
    epilogue: Epilogue[torch.Tensor] | None = None,
    **stages: Unpack[_Conv2dArguments],
) -> torch.Tensor:
    """A 2-d convolution with its epilogue: activation(conv(x, weight) * scale + bias + residual).

    The best recorded kernel computes it (`schedsearch.torch.use` names the database); without one, or where gradients are
    wanted, PyTorch does. The result is in channels_last if x is, or if x is a copy that its strides bring near to it.

    Args:
        x: (n, c, h, w), float16, bfloat16 or float32; contiguous or in channels_last. Other strides cost a copy.
        weight: (k, c / groups, r, s) of the same dtype, best in the memory format of x.
        bias: (k).
        residual: like the result; added before the activation.
        stride, dilation: one number or (vertical, horizontal).
        padding: one number, (vertical, horizontal), (top, left, bottom, right), "valid" or "same".
        groups: divides c and k.
        precision: of products of float32: fp32 or tf32; by default as torch.backends.cudnn.allow_tf32 says.
        epilogue: what follows the convolution as one value, instead of bias, residual and `stages`.
        stages: or its parts as keywords. scale: (k), multiplied before the bias is added, for a batch norm in evaluation
            mode; needs a bias. activation: relu, relu6, leaky_relu (with `negative_slope`), clip (to `low` ... `high`),
            sigmoid, silu, hard_swish, gelu, or None. residual_last: the residual is added behind the activation.
            pixel_shuffle: the factor of a torch.nn.PixelShuffle behind everything else; no residual then.

    Raises:
        ArgumentError: arguments that do not fit each other.
        TypeError: there is no such keyword.

    Examples:
        >>> y = conv2d(x, weight, bias, padding=1, activation="relu")
        >>> y = conv2d(x, weight, padding=1, epilogue=Epilogue(bias=bias, activation="relu"))
    """
    if not (isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor)):
        _check_tensors(x, weight)
    if type(groups) is not int:
        groups = whole("groups", groups)
    epilogue = _collected("conv2d", _OF_CONV2D, epilogue, bias, residual, stages)
    if epilogue.pixel_shuffle != 1:
        epilogue = epilogue._replace(pixel_shuffle=shuffle_factor("pixel_shuffle", epilogue.pixel_shuffle))
    depthwise = groups > 1 and x.dim() == 4 and groups == x.shape[1] and epilogue.pixel_shuffle == 1
    if torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu"):
        x, weight, epilogue = _cast(x, weight, epilogue)
    if depthwise:
        groups, precision = 1, "fp32"
    elif precision is None:
        precision = _precision(x) if x.dtype is torch.float32 else "fp32"
    return _convolution(depthwise, x, weight, _Window(stride, padding, dilation, groups, precision), epilogue)


def quantized_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    x_zero_point: int = 0,
    weight_zero_point: int = 0,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
    epilogue: Epilogue[torch.Tensor] | None = None,
    **stages: Unpack[_QuantizedArguments],
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
        bias, scale: (k); scales are float32.
        residual: like the output before the last rounding.
        out_dtype: by default int32 without a scale, else the dtype of x, or float16 for float8.
        stride, padding, dilation, groups: as `conv2d`.
        epilogue: what follows the convolution as one value, instead of bias, scale, residual, out_dtype and `stages`.
        stages: or its parts as keywords. output_scale: (k), float32. y_zero_point. activation, negative_slope, low, high:
            as `conv2d`; sums of integers take relu and clip only.

    Raises:
        ArgumentError: arguments that do not fit each other.
        TypeError: there is no such keyword.
    """
    _check_tensors(x, weight)
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise ArgumentError(f"out_dtype is {out_dtype!r}; allowed: a torch.dtype, e.g. torch.int8")
    given = {"scale": scale, "out_dtype": None if out_dtype is None else str(out_dtype).removeprefix("torch.")}
    known = {name: value for name, value in given.items() if value is not None}
    epilogue = _collected("quantized_conv2d", _OF_QUANTIZED, epilogue, bias, residual, {**stages, **known})
    x_zero_point, weight_zero_point, y_zero_point = (
        whole(f"{name}_zero_point", value)
        for name, value in (("x", x_zero_point), ("weight", weight_zero_point), ("y", epilogue.y_zero_point))
    )
    groups = whole("groups", groups)
    if epilogue.out_dtype is None:
        like = "float16" if x.dtype.is_floating_point else str(x.dtype).removeprefix("torch.")
        integers = epilogue.scale is None and not x.dtype.is_floating_point
        epilogue = epilogue._replace(out_dtype="int32" if integers else like)
    out = getattr(torch, str(epilogue.out_dtype), None)
    if not isinstance(out, torch.dtype):
        raise ArgumentError(f"out_dtype is {epilogue.out_dtype!r}; allowed: a name of a dtype, e.g. 'int8'")
    for label, zero_point, dtype in (
        ("x", x_zero_point, x.dtype),
        ("weight", weight_zero_point, weight.dtype),
        ("y", y_zero_point, out),
    ):
        if zero_point and dtype in _EIGHT_BITS and not _EIGHT_BITS[dtype][0] <= zero_point <= _EIGHT_BITS[dtype][1]:
            raise ArgumentError(
                f"{label}_zero_point is {zero_point}; allowed: {_EIGHT_BITS[dtype][0]} to {_EIGHT_BITS[dtype][1]}, the "
                f"numbers of {dtype}"
            )
    if not out.is_floating_point and epilogue.output_scale is None and epilogue.activation not in _OF_INTEGERS:
        raise ArgumentError(
            f"activation {epilogue.activation!r} is of floats, and the sums are integers; allowed: relu, relu6, clip or "
            "None; or give an output_scale, or an out_dtype of floats"
        )
    # Sums of two uint8 would be uint32, in which PyTorch hardly computes; with a zero point, even 0, they are int32.
    of_x = x_zero_point != 0 or (x.dtype == weight.dtype == torch.uint8)
    zero_points = ("x," if of_x else "") + ("weight" if weight_zero_point != 0 else "")
    window = whole_window(weight, stride, padding, dilation)
    parameters = text(*window, groups, epilogue.text, "fp32", zero_points.rstrip(","))
    return _ops.quantized_conv2d.default(
        x, weight, epilogue.bias, epilogue.scale, epilogue.residual, epilogue.output_scale, parameters,
        *(epilogue.limits or (0.0, 0.0)), x_zero_point, weight_zero_point, y_zero_point,
    )  # fmt: skip


def depthwise_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    epilogue: Epilogue[torch.Tensor] | None = None,
    **stages: Unpack[_FloatArguments],
) -> torch.Tensor:
    """A depthwise convolution (groups = channels), in training as well: kernels compute both gradients.

    Where gradients are wanted, a kernel computes the convolution, and PyTorch its epilogue with its gradients. The gradient
    of the weight has the same bits in every call if `torch.use_deterministic_algorithms` asks for it. There is no second
    derivative: a backward pass with create_graph=True raises RuntimeError when it is differentiated again.

    Args:
        x: (n, c, h, w), float16, bfloat16 or float32.
        weight: (c * m, 1, r, s); output channel i * m + j belongs to input channel i.
        bias, residual, stride, padding, dilation, epilogue, stages: as `conv2d`, without pixel_shuffle.

    Raises:
        ArgumentError: arguments that do not fit each other.
        TypeError: there is no such keyword.
    """
    if not (isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor)):
        _check_tensors(x, weight)
    epilogue = _collected("depthwise_conv2d", _OF_FLOATS, epilogue, bias, residual, stages)
    if torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu"):
        x, weight, epilogue = _cast(x, weight, epilogue)
    return _convolution(True, x, weight, _Window(stride, padding, dilation), epilogue)


def pixel_shuffle(x: torch.Tensor, upscale_factor: int) -> torch.Tensor:
    """torch.nn.functional.pixel_shuffle by the best recorded kernel. The result has the memory format of x.

    Args:
        x: (n, c, h, w), c a multiple of upscale_factor ** 2; any dtype.

    Raises:
        ArgumentError: x has other axes, or its channels do not divide.
    """
    _check_tensors(x)
    upscale_factor = shuffle_factor("upscale_factor", upscale_factor)
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
    downscale_factor = shuffle_factor("downscale_factor", downscale_factor)
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


_OF_FLOATS = _FloatArguments.__optional_keys__
_OF_CONV2D = _Conv2dArguments.__optional_keys__
_OF_QUANTIZED = _QuantizedArguments.__optional_keys__ | {"scale", "out_dtype"}
_NO_EPILOGUE: Epilogue[torch.Tensor] = Epilogue()


def _collected(
    function: str,
    known: frozenset[str],
    epilogue: Epilogue[torch.Tensor] | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    parts: Any,
) -> Epilogue[torch.Tensor]:
    """The epilogue of a call, which gives it as one value or in parts.

    Args:
        known: names of an `Epilogue` that the function takes besides bias and residual.
        parts: those that are given as keywords.
    """
    for name in parts:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{did_you_mean(name, known)}")
    if epilogue is None:
        return Epilogue(bias=bias, residual=residual, **parts)
    if not isinstance(epilogue, Epilogue):
        raise ArgumentError(f"epilogue is {type_text(epilogue)}; allowed: an Epilogue")
    if bias is not None or residual is not None or parts:
        raise ArgumentError("an epilogue and parts of one are given; allowed: either of both")
    for name, value, default in zip(Epilogue._fields, epilogue, _NO_EPILOGUE):
        if value is not default and name not in known and name not in ("bias", "residual"):
            raise ArgumentError(f"{function} takes no {name}; allowed: {', '.join(sorted(known))}, bias, residual")
    if isinstance(epilogue.bias, bool) or isinstance(epilogue.residual, bool):
        raise ArgumentError("the epilogue is one of a workload; give the tensors of bias and residual")
    return epilogue


def _convolution(
    depthwise: bool, x: torch.Tensor, weight: torch.Tensor, window: _Window, epilogue: Epilogue[torch.Tensor]
) -> Any:
    """A convolution by its operator, or with gradients where they are wanted.

    Eager code calls the operator without the Python function that PyTorch wraps it in.
    """
    bias, scale, residual = epilogue.bias, epilogue.scale, epilogue.residual
    compiling = torch.compiler.is_dynamo_compiling()
    by_pytorch = transformed_while_tracing() if compiling else transforming()
    if by_pytorch or (
        torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or _wants_gradients(bias, scale, residual))
    ):
        if not compiling:
            _check_once(depthwise, x, weight, window, epilogue)
        if by_pytorch and depthwise:
            depthwise, window = False, window._replace(groups=x.shape[1])
        sums, stages = _sums(depthwise, x, weight, window), epilogue.text
        limits = epilogue.limits or (0.0, 0.0)
        return epilogues.computed(sums, stages, bias, scale, residual, *limits) if stages else sums
    if compiling:
        compute = _ops.depthwise_conv2d.default if depthwise else _ops.conv2d.default
        return compute(x, weight, bias, scale, residual, _made_parameters(weight, window, epilogue), *epilogue.limits)
    compute = _eager_depthwise_conv2d if depthwise else _eager_conv2d
    return compute(x, weight, bias, scale, residual, _kept_parameters(weight, window, epilogue), *epilogue.limits)


def _check_once(
    depthwise: bool, x: torch.Tensor, weight: torch.Tensor, window: _Window, epilogue: Epilogue[torch.Tensor]
) -> None:
    """Raises ArgumentError for what the operators refuse. Tensors like those before are not checked again."""
    given = {"x": x, "weight": weight, "bias": epilogue.bias, "scale": epilogue.scale, "residual": epilogue.residual}
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    stages = epilogue.text
    parameters = _parameters(weight, window)
    key = depthwise, parameters, stages, *((name, each.dtype, each.shape) for name, each in tensors.items())
    if key in _checked:
        return
    name, whole = "depthwise_conv2d" if depthwise else "conv2d", parsed(parameters).window
    check_convolution(name, tensors, whole, x.shape[1] if depthwise and x.dim() == 4 else window.groups)
    check_operands(name, stages, tensors, output_shape(x, weight, whole, stages))
    if len(_checked) < _MOST_CHECKED:
        _checked.add(key)


def _sums(depthwise: bool, x: torch.Tensor, weight: torch.Tensor, window: _Window) -> Any:
    """A convolution without an epilogue, with gradients."""
    if depthwise:
        return Depthwise.apply(x, weight, _parameters(weight, window))
    return convolve(x, weight, *whole_window(weight, *window[:3]), window.groups)


def _parameters(weight: torch.Tensor, window: _Window, epilogue: Epilogue[torch.Tensor] = _NO_EPILOGUE) -> str:
    """The operator's text (`window.text`); torch.compile cannot trace the dictionary of those that were seen before."""
    if torch.compiler.is_dynamo_compiling():
        return _made_parameters(weight, window, epilogue)
    return _kept_parameters(weight, window, epilogue)


def _kept_parameters(weight: torch.Tensor, window: _Window, epilogue: Epilogue[torch.Tensor]) -> str:
    operands = epilogue.bias is None, epilogue.scale is None, epilogue.residual is None
    stages = epilogue.activation, epilogue.residual_last, epilogue.pixel_shuffle
    key = operands, stages, window, weight.shape if window.padding == "same" else None
    try:
        return _texts[key]
    except TypeError:  # lists
        return _made_parameters(weight, window, epilogue)
    except KeyError:
        return _texts.setdefault(key, _made_parameters(weight, window, epilogue))


def _made_parameters(weight: torch.Tensor, window: _Window, epilogue: Epilogue[torch.Tensor]) -> str:
    if window.precision not in ("fp32", "tf32"):
        raise ArgumentError(f"precision is {window.precision!r}; allowed: fp32, tf32 or None")
    return text(*whole_window(weight, *window[:3]), window.groups, epilogue.text, window.precision)


def _check_tensors(*tensors: object) -> None:
    """Raises ArgumentError if the image or the weight is not a tensor."""
    for name, each in zip(("x", "weight"), tensors):
        if not isinstance(each, torch.Tensor):
            raise ArgumentError(f"{name} is {type_text(each)}; allowed: a torch.Tensor")


def _precision(x: torch.Tensor) -> str:
    """What PyTorch would do with products of float32."""
    return "tf32" if x.is_cuda and allows_tf32() else "fp32"


def _wants_gradients(*tensors: torch.Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _cast(
    x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, Epilogue[torch.Tensor]]:
    """The tensors in autocast's dtype, as PyTorch's convolutions take them."""
    dtype = torch.get_autocast_dtype(x.device.type)
    bias, scale, residual = (
        None if tensor is None else _cast_one(tensor, dtype) for tensor in (epilogue.bias, epilogue.scale, epilogue.residual)
    )
    return _cast_one(x, dtype), _cast_one(weight, dtype), epilogue._replace(bias=bias, scale=scale, residual=residual)


def _cast_one(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not torch.float64 else tensor
