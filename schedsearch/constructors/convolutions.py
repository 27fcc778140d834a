"""Convolutions and products of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from schedsearch.constructors import FactorOptions, ProductOptions, WindowOptions, made
from schedsearch.ops.batch_matmul import BATCH_MATMUL, BatchMatmulParams
from schedsearch.ops.conv2d import CONV2D, Conv2dParams
from schedsearch.ops.dense import DENSE, DenseParams
from schedsearch.ops.depthwise_conv2d import DEPTHWISE_CONV2D, DepthwiseConv2dParams
from schedsearch.workload import Workload


class _Conv2dOptions(WindowOptions, ProductOptions, total=False):
    output_layout: str | None
    slice_of: int | None
    x_slice: Sequence[int]
    weight_layout: str | None


class _DepthwiseOptions(WindowOptions, FactorOptions, total=False):
    direction: str
    weight_layout: str | None
    accumulate: bool
    deterministic: bool


class _BatchOptions(ProductOptions, total=False):
    x_batch: int | None
    weight_batch: int | None
    x_layout: str


def conv2d(
    *,
    n: int,
    h: int,
    w: int,
    c: int,
    k: int,
    r: int,
    s: int,
    groups: int = 1,
    layout: str = "NHWC",
    **options: Unpack[_Conv2dOptions],
) -> Workload[Conv2dParams]:
    """A 2-d convolution (cross-correlation, as in every deep-learning library).

    Args:
        n, h, w, c: input batch, height, width, channels.
        k: output channels.
        r, s: kernel height and width.
        stride, dilation: one number, or (vertical, horizontal); default: 1.
        padding: one number, (vertical, horizontal), or (top, left, bottom, right); default: 0.
        groups: divides c and k.
        dtype: float16, bfloat16 or float32 of x, weight and the per-channel vectors; or int8, uint8, float8_e4m3 (e4m3fn) or
            float8_e5m2 of x. Default: float16.
        weight_dtype: int8 or uint8, or float8_e4m3 or float8_e5m2, if x is one of the two; default: `dtype`.
        out_dtype: of y and the residual; default: the input's, float16 if that is float8, or what the epilogue makes of the
            32-bit sums.
        precision: of products of float32. "fp32" multiplies the factors as they are; "tf32" may round or cut each to a
            significand of 10 stored bits first, as tensor cores do. Sums are float32 in both. Default: "fp32".
        zero_points: which of "x" and "weight" have a zero point; kernels then take x_zero_point and weight_zero_point.
        layout: axes of x in memory: NHWC, NCHW, or NCHW[x]c with blocks of x channels, which must fill them.
        output_layout: axes of y in memory: NHWC or NCHW if x has one of these; default: `layout`.
        slice_of: channels of a larger array that holds y. Kernels then take a slice of it along the channels as `out`, and
            leave its other channels alone: a concatenation of several results costs nothing. Default: the channels of y.
        x_slice: channels of a larger array, and which of them is the first of x. Kernels then take the larger array, in NHWC
            or NCHW, so that half of an array needs no copy. Default: x is an array of its own.
        weight_layout: OHWI, OIHW or OIHW[x]o[x]i; default: the one that belongs to `layout`.
        epilogue: an `Epilogue`, or stages applied to the accumulator in order; see `schedsearch.ops.STAGES`.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> conv2d(n=1, h=14, w=14, c=64, k=64, r=3, s=3, padding=1, epilogue=["bias", "relu"]).output.shape
        (1, 14, 14, 64)
        >>> from schedsearch.ops import Epilogue
        >>> conv2d(n=1, h=14, w=14, c=64, k=64, r=3, s=3, epilogue=Epilogue(bias=True, activation="relu")).label
        'conv2d 1x14x14x64 k64 3x3 f16 NHWC+bias+relu'
        >>> packed = conv2d(
        ...     n=1, h=14, w=14, c=64, k=64, r=3, s=3, padding=1, dtype="int8", layout="NCHW32c",
        ...     epilogue=["bias", "relu", {"requantise": {"to": "uint8"}}],
        ... )
        >>> packed.output.shape, packed.output.dtype
        ((1, 2, 14, 14, 32), 'uint8')
        >>> conv2d(
        ...     n=1, h=14, w=14, c=64, k=128, r=3, s=3, padding=1, output_layout="NCHW",
        ...     epilogue=["bias", {"depth_to_space": {"block": 2, "mode": "CRD"}}],
        ... ).output.shape
        (1, 32, 28, 28)
        >>> conv2d(n=1, h=14, w=14, c=64, k=32, r=1, s=1, slice_of=256).output.strides("NHWC")
        (50176, 3584, 256, 1)
        >>> conv2d(n=1, h=14, w=14, c=58, k=58, r=1, s=1, x_slice=(116, 58)).signature[0].shape
        (1, 14, 14, 116)
    """
    return made(CONV2D, locals())


def depthwise_conv2d(
    *,
    n: int,
    c: int,
    h: int,
    w: int,
    r: int,
    s: int,
    multiplier: int = 1,
    layout: str = "NHWC",
    **options: Unpack[_DepthwiseOptions],
) -> Workload[DepthwiseConv2dParams]:
    """A depthwise 2-d convolution, or one of its gradients.

    Args:
        n, c, h, w: batch, channels, height and width of x, in every direction.
        r, s: kernel height and width.
        stride, padding, dilation: as in `conv2d`.
        multiplier: output channels for each input channel: channel c makes c * multiplier ... (c + 1) * multiplier - 1.
        direction: "forward", the default: (x, weight) -> y; "grad_input": (dy, weight) -> dx;
            "grad_weight": (x, dy) -> dw; "grad_both": (x, weight, dy) -> (dx, dw).
        dtype: float16, bfloat16 or float32 of all arrays, with sums in float32; or int8 or uint8 of x, with sums in 32
            bits. Default: float16.
        weight_dtype: int8 or uint8 if x is one of the two; default: `dtype`.
        zero_points: which of "x" and "weight" have a zero point; kernels then take x_zero_point and weight_zero_point.
        layout: axes of x, y, dx and dy in memory: NHWC or NCHW.
        weight_layout: of weight and dw, with one input channel: OHWI, OIHW, HWOI or HWIO; default: OHWI for NHWC, OIHW for
            NCHW.
        accumulate: kernels of a gradient take dx_before or dw_before too, and add the gradient to it. It may be the same
            memory as the result. Default: false.
        deterministic: dw has the same bits in every call; default: false.
        epilogue: an `Epilogue`, or stages after the sums of `forward`, in order; see `schedsearch.ops.STAGES`.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> depthwise_conv2d(n=1, c=64, h=56, w=56, r=3, s=3, padding=1, epilogue=["bias", "relu"]).output.shape
        (1, 56, 56, 64)
        >>> grad = depthwise_conv2d(n=1, c=64, h=56, w=56, r=3, s=3, padding=1, direction="grad_weight", layout="NCHW")
        >>> [(array.name, array.shape) for array in (*grad.signature, grad.output)]
        [('x', (1, 64, 56, 56)), ('dy', (1, 64, 56, 56)), ('dw', (64, 1, 3, 3))]
    """
    return made(DEPTHWISE_CONV2D, locals())


def dense(*, m: int, n: int, k: int, weight_layout: str = "NK", **options: Unpack[ProductOptions]) -> Workload[DenseParams]:
    """A fully connected layer: `y = x @ weight.T`, as torch.nn.functional.linear; with "KN", `y = x @ weight`.

    Args:
        m: rows of x (m, k) and y (m, n): the batch.
        n: columns of y; rows of weight (n, k). A vector of the epilogue, such as bias, has n elements.
        k: columns of x, the length of the sums.
        dtype: float16, bfloat16 or float32 of x, weight and the vectors of the epilogue; or int8, uint8, float8_e4m3
            (e4m3fn) or float8_e5m2 of x. Default: float16.
        weight_dtype: int8 or uint8, or float8_e4m3 or float8_e5m2, if x is one of the two; default: `dtype`.
        out_dtype: of y and the residual; default: the input's, float16 if that is float8, or what the epilogue makes of the
            32-bit sums.
        precision: of products of float32: "fp32", the default, or "tf32", which may round or cut each factor to 10 stored
            bits first.
        zero_points: which of "x" and "weight" have a zero point; kernels then take x_zero_point and weight_zero_point.
        weight_layout: "NK", or "KN" for a weight of shape (k, n), as ONNX's MatMul has it.
        epilogue: an `Epilogue`, or stages applied to the sums in order, as those of `conv2d`, without depth_to_space.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> layer = dense(m=1, n=1000, k=2048, epilogue=["bias"])
        >>> [(array.name, array.shape) for array in (*layer.signature, layer.output)]
        [('x', (1, 2048)), ('weight', (1000, 2048)), ('bias', (1000,)), ('y', (1, 1000))]
    """
    return made(DENSE, locals())


def batch_matmul(
    *, b: int, m: int, n: int, k: int, weight_layout: str = "NK", **options: Unpack[_BatchOptions]
) -> Workload[BatchMatmulParams]:
    """Products of matrices, one for each b: `y[b] = x[b] @ weight[b].T`; with weight_layout "KN", `y[b] = x[b] @ weight[b]`.

    Args:
        b: matrices of y (b, m, n).
        m, n: rows and columns of a matrix of y. A vector of the epilogue, such as bias, has n elements.
        k: length of the sums.
        x_batch, weight_batch: matrices of x (x_batch, m, k) and of weight (weight_batch, n, k): b, or 1 if all products have
            the same one. Default: b.
        dtype, weight_dtype, out_dtype, precision, zero_points, epilogue: as in `dense`. The residual has the shape of y.
        x_layout: "MK", the default, or "KM" for matrices of shape (k, m).
        weight_layout: "NK", or "KN" for matrices of shape (k, n), as in ONNX's MatMul and torch.bmm.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> scores = batch_matmul(b=12, m=128, n=128, k=64)
        >>> [(array.name, array.shape) for array in (*scores.signature, scores.output)]
        [('x', (12, 128, 64)), ('weight', (12, 128, 64)), ('y', (12, 128, 128))]
    """
    return made(BATCH_MATMUL, locals())
