"""The fused epilogue of a CPU kernel: one small function per stage, chained in the workload's order.

All arithmetic is float32. Comparisons are written so that NaN passes through: poison in the data shows in the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numba import types

from schedsearch.launch import Float32, Param, Pointer, Scalar
from schedsearch.workload import Workload

_POINTERS = ("bias", "scale", "shift", "residual")
_SCALARS = ("leaky_relu_slope", "clip_min", "clip_max")
_ZERO = types.float32(0)


def epilogue_params(workload: Workload) -> tuple[Param, ...]:
    """Seven launch parameters: addresses of bias, scale, shift (K,), residual (as y), then the scalars; 0 where unused."""
    arrays = {arg.name for arg in workload.signature}
    scalars = {scalar.name for scalar in workload.scalars}
    return (
        *(Pointer(name, optional=name not in arrays) for name in _POINTERS),
        *(Scalar(name) if name in scalars else Float32(0.0) for name in _SCALARS),
    )


def epilogue_function(stages: Sequence[str]) -> Callable[..., Any]:
    """`apply(value, k, at, vectors, scalars) -> float32` for one element.

    Its arguments: value, the float32 accumulator; k, its output channel; at, its offset in y in elements; vectors, the
    float32 arrays (bias, scale, shift, residual); scalars, the float32s (slope, minimum, maximum).
    """
    apply: Callable[..., Any] = _identity
    for stage in stages:
        apply = _STAGES[stage](apply)
    return apply


def _identity(value, k, at, vectors, scalars):  # type: ignore[no-untyped-def]
    return value


def _bias(before):  # type: ignore[no-untyped-def]
    def bias(value, k, at, vectors, scalars):  # type: ignore[no-untyped-def]
        return before(value, k, at, vectors, scalars) + vectors[0][k]

    return bias


def _scale_shift(before):  # type: ignore[no-untyped-def]
    def scale_shift(value, k, at, vectors, scalars):  # type: ignore[no-untyped-def]
        return before(value, k, at, vectors, scalars) * vectors[1][k] + vectors[2][k]

    return scale_shift


def _residual(before):  # type: ignore[no-untyped-def]
    def residual(value, k, at, vectors, scalars):  # type: ignore[no-untyped-def]
        return before(value, k, at, vectors, scalars) + vectors[3][at]

    return residual


def _relu(before):  # type: ignore[no-untyped-def]
    def relu(value, k, at, vectors, scalars):  # type: ignore[no-untyped-def]
        value = before(value, k, at, vectors, scalars)
        return _ZERO if value < _ZERO else value

    return relu


def _leaky_relu(before):  # type: ignore[no-untyped-def]
    def leaky_relu(value, k, at, vectors, scalars):  # type: ignore[no-untyped-def]
        value = before(value, k, at, vectors, scalars)
        return value * scalars[0] if value < _ZERO else value

    return leaky_relu


def _clip(before):  # type: ignore[no-untyped-def]
    def clip(value, k, at, vectors, scalars):  # type: ignore[no-untyped-def]
        value = before(value, k, at, vectors, scalars)
        value = scalars[1] if value < scalars[1] else value
        return scalars[2] if value > scalars[2] else value

    return clip


_STAGES: dict[str, Callable[[Any], Any]] = {
    "bias": _bias,
    "scale_shift": _scale_shift,
    "residual": _residual,
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "clip": _clip,
}
