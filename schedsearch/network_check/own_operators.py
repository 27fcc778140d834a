"""Operators that onnx's reference evaluator (1.23) lacks, cannot run on every shape or computes wrong, after ONNX's
definitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_attention import Attention_24, Attention_25
from onnx.reference.ops.op_conv_transpose import ConvTranspose as _OfOneGroup
from onnx.reference.ops.op_grid_sample import GridSample as _ClampedFirst
from onnx.reference.ops.op_negative_log_likelihood_loss import NegativeLogLikelihoodLoss as _OfLikelihoods
from onnx.reference.ops.op_random_uniform_like import RandomUniformLike as _OfArrays
from onnx.reference.ops.op_resize import Resize as _OfCentres
from onnx.reference.ops.op_softmax_cross_entropy_loss import SoftmaxCrossEntropyLoss as _OfScores

from schedsearch.network_check import own_old_softmaxes
from schedsearch.network_check.own_pools import AveragePool, GlobalMaxPool, LpPool, MaxPool
from schedsearch.network_check.own_recurrences import GRU, LSTM, RNN
from schedsearch.network_check.own_softmaxes import LogSoftmax
from schedsearch.typed import Array

_FIRST_KNOWN = 19  # the opset from which onnx's evaluator has DequantizeLinear
_ONE_AXIS = 13  # the opset from which the axis of a softmax is one; before, all from there on are
_WINDOWS = 25  # the opset from which Attention has windows
_BATCH_NORM_MISREAD = range(7, 14)  # opsets of a BatchNormalization that onnx's evaluator takes for one in training


class RandomUniformLike(_OfArrays):  # type: ignore[misc]
    """Of scalars, too: there onnx's own draws a number of Python, and fails."""

    op_domain = ""

    def _run(self, x: Array, **attributes: object) -> tuple[Array]:
        (drawn,) = super()._run(x.reshape(-1), **attributes)
        return (np.asarray(drawn).reshape(x.shape),)


class GridSample(_ClampedFirst):  # type: ignore[misc]
    """By the names of opset 16, too. Onnx's own moves a place outside of the image to its border before it takes the pixels
    around it; with cubic weights, ONNX Runtime and PyTorch move the pixels only."""

    op_domain = ""

    def _run(self, x: Array, grid: Array, **given: Any) -> tuple[Array]:
        mode = given.get("mode") or "linear"
        given["mode"] = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
        self._moves_pixels_only = given["mode"] == "cubic"
        found: tuple[Array] = super()._run(x, grid, **given)
        return found

    def _clamp(self, place: Any, low: float, high: float) -> Any:
        if self._moves_pixels_only and not isinstance(place, int):
            return place
        return super()._clamp(place, low, high)


class NegativeLogLikelihoodLoss(_OfLikelihoods):  # type: ignore[misc]
    """Onnx's own counts ignored items in the mean if ignore_index is -1 and there are no weights."""

    op_domain = ""

    def _run(self, x: Array, target: Array, weight: Array | None = None, **given: Any) -> tuple[Array]:
        found: tuple[Array] = super()._run(x, target, _ones(x) if weight is None else weight, **given)
        return found


class SoftmaxCrossEntropyLoss(_OfScores):  # type: ignore[misc]
    """As NegativeLogLikelihoodLoss."""

    op_domain = ""

    def _run(self, x: Array, target: Array, weight: Array | None = None, **given: Any) -> tuple[Array, ...]:
        found: tuple[Array, ...] = super()._run(x, target, _ones(x) if weight is None else weight, **given)
        return found


def _ones(scores: Array) -> Array:
    return np.ones(scores.shape[1], scores.dtype)


class Resize(_OfCentres):  # type: ignore[misc]
    """The only pixel along an axis lies at 0 by pytorch_half_pixel. Onnx's own takes -0.5, where cubic weights differ."""

    op_domain = ""

    def _run(
        self, x: Array, roi: Array | None = None, scales: Array | None = None, sizes: Array | None = None, **given: Any
    ) -> tuple[Array]:
        is_cubic = given.get("mode") == "cubic" and not given.get("antialias")
        stretches = given.get("keep_aspect_ratio_policy") in (None, "stretch")
        if is_cubic and stretches and given.get("coordinate_transformation_mode") == "pytorch_half_pixel":
            axes = given.get("axes") or range(x.ndim)
            factors = None if scales is None or not scales.size else np.array(scales)
            for place, axis in enumerate(axes):
                made = np.floor(x.shape[axis] * factors[place]) if factors is not None else np.asarray(sizes)[place]
                if made == 1:
                    x = x.take([0], axis)
                    if factors is not None:
                        factors[place] = 1
            scales = factors
        found: tuple[Array] = super()._run(x, roi, scales, sizes, **given)
        return found


class DequantizeLinear(OpRun):  # type: ignore[misc]
    """(x - zero point) * scale, as opsets 10 and 13 define it: one scale, or one for each index along an axis."""

    op_domain = ""

    def _run(self, x: Array, scale: Array, zero_point: Array | None = None, axis: int = 1, **others: object) -> tuple[Array]:
        shape = [1] * x.ndim
        if scale.size > 1:
            shape[axis] = scale.size
        shifted = x.astype(np.float64)
        if zero_point is not None:
            shifted = shifted - zero_point.astype(np.float64).reshape(shape)
        return ((shifted * scale.astype(np.float64).reshape(shape)).astype(scale.dtype),)


class BatchNormalization(OpRun):  # type: ignore[misc]
    """With the mean and the variance that are given, as opsets 7 to 13 define it where there is one result."""

    op_domain = ""

    def _run(
        self,
        x: Array,
        scale: Array,
        bias: Array,
        mean: Array,
        var: Array,
        epsilon: float = 1e-5,
        **others: object,
    ) -> tuple[Array]:
        shape = (-1, *[1] * (x.ndim - 2))
        wide = [each.astype(np.float64).reshape(shape) for each in (scale, bias, mean, var)]
        y = wide[0] * (x.astype(np.float64) - wide[2]) / np.sqrt(wide[3] + epsilon) + wide[1]
        return (y.astype(x.dtype),)


class LRN(OpRun):  # type: ignore[misc]
    """Of every channel of every image; onnx's own goes over as many channels as there are images."""

    op_domain = ""

    def _run(self, x: Array, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0, size: int = 1) -> tuple[Array]:
        wide = x.astype(np.float64)
        before, behind = (size - 1) // 2, size // 2
        reach = [(0, 0)] * x.ndim
        reach[1] = (before, behind)
        squares = np.pad(wide**2, reach)
        sums = sum(squares[:, first : first + x.shape[1]] for first in range(size))
        return ((wide / (bias + alpha / size * sums) ** beta).astype(x.dtype),)


class ConvTranspose(_OfOneGroup):  # type: ignore[misc]
    """Group by group; onnx's own gives each group the whole bias, and fails if a group has several output channels."""

    op_domain = ""

    def _run(
        self, x: Array, w: Array, b: Array | None = None, group: int | None = None, **attributes: object
    ) -> tuple[Array]:
        groups = group or 1
        biases = [None] * groups if b is None else np.split(b, groups)
        parts = zip(np.split(x, groups, axis=1), np.split(w, groups), biases)
        done = [super(ConvTranspose, self)._run(*each, group=1, **attributes)[0] for each in parts]
        return (np.concatenate(done, axis=1),)


def _normalised(x: Array, axis: int, epsilon: float, centred: bool) -> tuple[Array, Array, Array]:
    """In float64, with mean and the inverse of the deviation; onnx's own add squares in the type of x."""
    axes = tuple(range(axis % x.ndim, x.ndim))
    wide = x.astype(np.float64)
    mean = wide.mean(axis=axes, keepdims=True) * centred
    inverse = 1 / np.sqrt(((wide - mean) ** 2).mean(axis=axes, keepdims=True) + epsilon)
    return (wide - mean) * inverse, mean, inverse


class LayerNormalization(OpRun):  # type: ignore[misc]
    """With mean and deviation in float32, as stash_type 1 asks, also of float16."""

    op_domain = ""

    def _run(
        self, x: Array, scale: Array, bias: Array | None = None, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
    ) -> tuple[Array, Array, Array]:
        y, mean, inverse = _normalised(x, axis, epsilon, True)
        scaled = y.astype(x.dtype) * scale
        return (scaled if bias is None else scaled + bias), mean.astype(np.float32), inverse.astype(np.float32)


class RMSNormalization(OpRun):  # type: ignore[misc]
    """With the mean of the squares in float32, as stash_type 1 asks, also of float16."""

    op_domain = ""

    def _run(self, x: Array, scale: Array, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> tuple[Array]:
        return (_normalised(x, axis, epsilon, False)[0].astype(x.dtype) * scale,)


class LpNormalization(OpRun):  # type: ignore[misc]
    """By the sum of absolute values, or of squares; onnx's own sums values with their signs. A row of zeros stays zero."""

    op_domain = ""

    def _run(self, x: Array, axis: int = -1, p: int = 2) -> tuple[Array]:
        wide = x.astype(np.float64)
        norm = np.linalg.norm(wide, ord=p, axis=axis, keepdims=True)
        return (np.divide(wide, norm, out=np.zeros_like(wide), where=norm != 0).astype(x.dtype),)


class ReduceLogSumExp(OpRun):  # type: ignore[misc]
    """Minus infinity of a row of these, where onnx's own gives NaN."""

    op_domain = ""

    def _run(
        self, x: Array, axes: Array | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0, **others: object
    ) -> tuple[Array]:
        given = () if axes is None else tuple(int(axis) for axis in np.ravel(axes))
        along = given if given or noop_with_empty_axes else None
        found = np.logaddexp.reduce(x.astype(np.float64), axis=along, keepdims=True)
        return ((found if keepdims else np.squeeze(found, along)).astype(x.dtype),)


def _attention(of_onnx: type[OpRun]) -> type[OpRun]:
    class Attention(of_onnx):  # type: ignore[misc]
        """Its fourth output, with mode 0, is that of the products; onnx's own gives these behind the softcap."""

        op_domain = ""

        def _run(self, *arrays: Array | None, **attributes: Any) -> tuple[Array, ...]:
            found: tuple[Array, ...] = super()._run(*arrays, **attributes)
            if attributes.get("softcap") and not attributes.get("qk_matmul_output_mode"):
                products = super()._run(*arrays, **{**attributes, "softcap": None})[3]
                found = (*found[:3], products, *found[4:])
            return found

    return Attention


_ALWAYS: Sequence[type[OpRun]] = (
    RandomUniformLike,
    GridSample,
    NegativeLogLikelihoodLoss,
    SoftmaxCrossEntropyLoss,
    LRN,
    LSTM,
    GRU,
    RNN,
    MaxPool,
    AveragePool,
    LpPool,
    GlobalMaxPool,
    ConvTranspose,
    LayerNormalization,
    RMSNormalization,
    LpNormalization,
    ReduceLogSumExp,
    Resize,
)


def of_opset(version: int) -> list[type[OpRun]]:
    """What a model of this opset needs in the place of onnx's operators."""
    found = [*_ALWAYS, *([LogSoftmax] if version >= _ONE_AXIS else own_old_softmaxes.ALL)]
    found.append(_attention(Attention_24 if version < _WINDOWS else Attention_25))
    if version < _FIRST_KNOWN:
        found.append(DequantizeLinear)
    if version in _BATCH_NORM_MISREAD:
        found.append(BatchNormalization)
    return found
