"""Operators on every number, and on rows of them."""

from __future__ import annotations

from collections.abc import Sequence

from schedsearch.constructors import made
from schedsearch.ops.elementwise import ELEMENTWISE, ElementwiseParams
from schedsearch.ops.layer_norm import LAYER_NORM, LayerNormParams
from schedsearch.ops.softmax import SOFTMAX, SoftmaxParams
from schedsearch.workload import Workload


def elementwise(
    *,
    y: Sequence[int],
    expression: str,
    inputs: Sequence[object] | None = None,
    dtype: str = "float16",
    out_dtype: str | None = None,
    slice_of: Sequence[int] = (),
) -> Workload[ElementwiseParams]:
    """An expression of arrays, computed for every element in one kernel.

    Args:
        y: extents of y.
        expression: e.g. "relu(a + b)" or "t = a * scale + shift; t * sigmoid(t)". It has + - * /, ** with a constant
            exponent, numbers, names and the functions relu, leaky_relu(x, slope), clip(x, low, high), sigmoid, silu,
            hard_sigmoid(x, alpha=0.2, beta=0.5), hard_swish, tanh, gelu, erf, exp, log, sqrt, abs, min(a, b), max(a, b),
            round, quantise(x, scale, zero_point) and dequantise(q, scale, zero_point).
        inputs: each a name, (name, dtype) or (name, dtype, extents); default: the names in the expression, all like y.
            (name, dtype, extents, slice_of, begin, strides) is a slice of a larger array with the extents slice_of, which
            kernels take whole; begin and strides have a number for each axis, and strides may be left out.
        dtype: of inputs that do not say, and of y: float16, bfloat16, float32, int8 or uint8.
        out_dtype: of y; default: dtype.
        slice_of: extents of a larger array of which y is a slice along one axis. Kernels then take a slice of it as `out`.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> inputs = ["a", ("scale", "float32", (64,)), "b"]
        >>> layer = elementwise(y=(1, 56, 56, 64), expression="relu(a*scale+b)", inputs=inputs)
        >>> layer.expression, layer.signature[1].shape
        ('relu(a * scale + b)', (64,))
    """
    return made(ELEMENTWISE, locals())


def softmax(*, x: Sequence[int], axis: int = -1, log: bool = False, dtype: str = "float16") -> Workload[SoftmaxParams]:
    """The softmax along one axis.

    Args:
        x: extents of x.
        axis: counted from 0, or from -1 for the last one backwards.
        log: the logarithm of the result (log_softmax).
        dtype: of x and y: float16, bfloat16 or float32.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> softmax(x=(32, 1000)).label
        'softmax 32x1000 f16'
    """
    return made(SOFTMAX, locals())


def layer_norm(
    *,
    x: Sequence[int],
    axis: int = -1,
    epsilon: float = 1e-5,
    centred: bool = True,
    bias: bool = True,
    dtype: str = "float16",
) -> Workload[LayerNormParams]:
    """The layer norm over the last axes, or the norm by the root of the mean square.

    Args:
        x: extents of x.
        axis: the first of the axes that make a row, counted from 0, or from -1 for the last one backwards.
        epsilon: added to the variance.
        centred: subtract the mean; false for rms_norm.
        bias: add a bias to the scaled numbers.
        dtype: of x and y: float16, bfloat16 or float32. Scale and bias are float32.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> layer_norm(x=(1, 56, 56, 96)).label
        'layer_norm 1x56x56x96 f16+bias'
    """
    return made(LAYER_NORM, locals())
