"""Convolutions over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

from schedsearch.constructors import Stages, made
from schedsearch.constructors.convolutions import conv2d
from schedsearch.errors import Problem, WorkloadError
from schedsearch.ops.causal_conv1d_update import CAUSAL_CONV1D_UPDATE, CausalConv1dUpdateParams
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.ops.depthwise_conv1d import DEPTHWISE_CONV1D, DepthwiseConv1dParams
from schedsearch.workload import Workload

_IMAGES = {"NTC": "NHWC", "NCT": "NCHW"}  # of one row: the same bytes


def conv1d(
    *,
    n: int,
    c: int,
    t: int,
    k: int,
    taps: int,
    stride: int = 1,
    padding: int | Sequence[int] = 0,
    dilation: int = 1,
    groups: int = 1,
    dtype: str = "float16",
    layout: str = "NTC",
    epilogue: Stages = (),
) -> Workload[Conv2dParams]:
    """A convolution over time: that of images of one row, `conv2d` with h = r = 1.

    Its arrays have the bytes of those over time: x (n, t, c) is (n, 1, t, c), and a weight (k, c // groups, taps) of PyTorch
    is (k, c // groups, 1, taps). For one filter for each channel see `depthwise_conv1d`.

    Args:
        n, c, t: batch, channels and steps of x.
        k, taps: output channels, and steps that a filter reaches.
        stride, dilation: in steps.
        padding: steps of zeros, one number or (before, behind).
        groups: divides c and k.
        dtype: of all arrays; see `conv2d`.
        layout: NTC or NCT, the axes of x and y in memory.
        epilogue: as of `conv2d`.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> conv1d(n=1, c=80, t=3000, k=512, taps=3, padding=1, epilogue=["bias", "gelu"]).label
        'conv2d 1x1x3000x80 k512 1x3 p0,1 f16 NHWC+bias+gelu'
    """
    before, behind = _before_and_behind(padding, {"t": t, "taps": taps, "stride": stride, "dilation": dilation}, layout)
    return conv2d(
        n=n, c=c, h=1, w=t, k=k, r=1, s=taps, stride=(1, stride), padding=(0, before, 0, behind), dilation=(1, dilation),
        groups=groups, dtype=dtype, layout=_IMAGES[layout], epilogue=epilogue,
    )  # fmt: skip


def _before_and_behind(padding: Any, sizes: Mapping[str, Any], layout: str) -> tuple[int, int]:
    """The padding of a `conv1d`. Raises WorkloadError for what `conv2d` would name by its own parameters."""
    problems = [
        Problem(name, f"{name} must be an integer of at least 1, got {size!r}")
        for name, size in sizes.items()
        if not _is_whole(size, 1)
    ]
    if layout not in _IMAGES:
        problems.append(Problem("layout", f"layout {layout!r} is not possible; allowed: {', '.join(_IMAGES)}"))
    both = padding if isinstance(padding, Sequence) else (padding, padding)
    if len(both) != 2 or not all(_is_whole(each, 0) for each in both):
        problems.append(Problem("padding", f"padding must be an integer >= 0 or [before, behind], got {padding!r}"))
    if not problems:
        steps, reach = sizes["t"] + sum(both), (sizes["taps"] - 1) * sizes["dilation"] + 1
        if steps < reach:
            problems.append(
                Problem("taps", f"taps span {reach} steps, and x with its padding has {steps}; enlarge the padding")
            )
    if problems:
        raise WorkloadError(problems)
    return int(both[0]), int(both[1])


def _is_whole(number: Any, least: int) -> bool:
    return not isinstance(number, bool) and hasattr(number, "__index__") and bool(number >= least)


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


class FormatOptions(TypedDict, total=False):
    """Of arrays over time; see `depthwise_conv1d`."""

    dtype: str
    weight_dtype: str | None
    layout: str
    epilogue: Stages


def causal_conv1d_update(
    *,
    n: int,
    c: int,
    t: int,
    taps: int,
    length: int,
    rows: int | None = None,
    indices: bool = False,
    positions: bool = False,
    **options: Unpack[FormatOptions],
) -> Workload[CausalConv1dUpdateParams]:
    """The next steps of causal depthwise convolutions, with states that are updated in place, as in decoding.

    Its arguments are x, weight (c, taps), bias (c), state_before (rows, c, length), indices (n), positions (n), those that
    there are; its outputs y, and state, which may be the memory of state_before.

    Args:
        n, c, t, taps: batch, channels, new steps, and weights of a channel.
        length: inputs of a state, at least taps - 1. The newest is the last.
        rows: how many states there are; default: n.
        indices: an argument, int32, says which state each row continues; one below 0 stands for none, whose y is 0.
        positions: an argument, int32, has how many inputs each row had. States are then rings, in which the input of step s
            is at s modulo `length`.
        dtype, weight_dtype, layout, epilogue: as `depthwise_conv1d`.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> causal_conv1d_update(n=32, c=4096, t=1, taps=4, length=4, dtype="bfloat16", epilogue=["silu"]).label
        'causal_conv1d_update 32x1x4096 k4 of 32x4 bf16 NTC+silu'
    """
    return made(CAUSAL_CONV1D_UPDATE, locals())
