"""Convolutions over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

from schedsearch.constructors import Stages, made
from schedsearch.ops.depthwise_conv1d import DEPTHWISE_CONV1D, DepthwiseConv1dParams
from schedsearch.workload import Workload


class SequenceOptions(TypedDict, total=False):
    """Where a sequence begins and ends; see `depthwise_conv1d`."""

    initial_state: bool
    final_state: bool
    seq_idx: bool


def depthwise_conv1d(
    *,
    n: int,
    c: int,
    t: int,
    taps: int,
    padding: Sequence[int] | None = None,
    dilation: int = 1,
    direction: str = "forward",
    dtype: str = "float16",
    weight_dtype: str | None = None,
    layout: str = "NTC",
    epilogue: Stages = (),
    **options: Unpack[SequenceOptions],
) -> Workload[DepthwiseConv1dParams]:
    """A depthwise convolution over time, or its gradients.

    Forward: y[n,t,c] = epilogue(sum over k of x[n, t - left + k * dilation, c] * weight[c,k]). Its arguments are x,
    weight (c, taps), bias (c), initial_state, seq_idx. Backward: x, weight, bias, dy, initial_state, d_final_state,
    seq_idx; outputs dx, dw, db, d_initial_state. Arrays that the parameters do not ask for are left out.

    Args:
        n, c, t, taps: batch, channels, steps of x, and weights of a channel (1 to 256).
        padding: steps of zeros (before, behind); default: causal, ((taps - 1) * dilation, 0).
        dilation: steps between taps.
        direction: forward or backward.
        dtype: of x, y and states: float16, bfloat16 or float32.
        weight_dtype: of weight and bias; default: dtype.
        layout: NTC or NCT, the axes of x and y in memory.
        epilogue: "bias", "silu", or both in this order.
        initial_state: an argument (n, c, (taps - 1) * dilation) has what came before x; causal only.
        final_state: an output of this shape has the last inputs; causal only.
        seq_idx: an argument (n, t), int32, has the number of each step's sequence; a step sees steps of its own only.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> depthwise_conv1d(n=8, c=4096, t=2048, taps=4, dtype="bfloat16", epilogue=["bias", "silu"]).label
        'depthwise_conv1d 8x2048x4096 k4 bf16 NTC+bias+silu'
    """
    return made(DEPTHWISE_CONV1D, locals())
