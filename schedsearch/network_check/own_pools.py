"""Pools after ONNX's definitions: onnx's reference evaluator (1.23) gives some of them the wrong size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx.reference.op_run import OpRun

from schedsearch.typed import Array


@dataclass(frozen=True)
class _Axis:
    """Windows along one axis.

    Attributes:
        size: pixels of the image.
        window, stride, dilation: of the pool.
        before, behind: padding that counts as part of the image.
        count: of windows. The last one may reach beyond the padding.
    """

    size: int
    window: int
    stride: int
    dilation: int
    before: int
    behind: int
    count: int

    def places(self) -> Array:
        """Where in the image each element of each window lies, [count, window]; outside of it in the padding or behind."""
        starts = np.arange(self.count)[:, None] * self.stride - self.before
        return np.asarray(starts + np.arange(self.window) * self.dilation)


def _axis(size: int, window: int, stride: int, dilation: int, pads: tuple[int, int], auto_pad: str, ceil_mode: int) -> _Axis:
    span = (window - 1) * dilation + 1
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        count = -(-size // stride)
        missing = max(0, (count - 1) * stride + span - size)
        less, more = missing // 2, missing - missing // 2
        pads = (less, more) if auto_pad == "SAME_UPPER" else (more, less)
        return _Axis(size, window, stride, dilation, *pads, count)
    before, behind = (0, 0) if auto_pad == "VALID" else pads
    room = size + before + behind - span
    count = (-(-room // stride) if ceil_mode else room // stride) + 1
    if ceil_mode and (count - 1) * stride >= size + before:  # it would begin in the padding behind the image
        count -= 1
    return _Axis(size, window, stride, dilation, before, behind, max(0, count))


class _Pool(OpRun):  # type: ignore[misc]
    """What the pools have in common."""

    op_domain = ""

    def _windows(
        self,
        x: Array,
        kernel_shape: Sequence[int],
        strides: Sequence[int] | None,
        dilations: Sequence[int] | None,
        pads: Sequence[int] | None,
        auto_pad: str | None,
        ceil_mode: int | None,
    ) -> tuple[Array, Array, Array, Array]:
        """Each window as one row.

        Returns:
            The numbers [n, c, *counts, elements of a window], and for each of [*counts, elements]: whether it lies in the
            image, whether in the image or its padding, and its place in a plane.
        """
        rank = len(kernel_shape)
        ones, ends = [1] * rank, pads or [0] * 2 * rank
        axes = [
            _axis(size, window, stride, dilation, (ends[place], ends[place + rank]), auto_pad or "NOTSET", ceil_mode or 0)
            for place, (size, window, stride, dilation) in enumerate(
                zip(x.shape[2:], kernel_shape, strides or ones, dilations or ones)
            )
        ]
        counts, elements = [axis.count for axis in axes], math.prod(kernel_shape)
        inside = padded = np.ones((), bool)
        plane = np.zeros((), np.int64)
        for place, axis in enumerate(axes):
            shape = [1] * 2 * rank
            shape[place], shape[rank + place] = axis.count, axis.window
            at = axis.places().reshape(shape)
            inside = inside & (at >= 0) & (at < axis.size)
            padded = padded & (at >= -axis.before) & (at < axis.size + axis.behind)
            plane = plane * axis.size + np.clip(at, 0, axis.size - 1)
        inside, padded, plane = (each.reshape(*counts, elements) for each in (inside, padded, plane))
        return x.reshape(*x.shape[:2], -1)[:, :, plane], inside, padded, plane


class MaxPool(_Pool):
    """With the places of the largest numbers, counted from the start of the array."""

    def _run(
        self,
        x: Array,
        auto_pad: str | None = None,
        ceil_mode: int | None = None,
        dilations: Sequence[int] | None = None,
        kernel_shape: Sequence[int] = (),
        pads: Sequence[int] | None = None,
        storage_order: int | None = None,
        strides: Sequence[int] | None = None,
    ) -> tuple[Array, ...]:
        windows, inside, _, plane = self._windows(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
        least = np.array(-np.inf if np.issubdtype(x.dtype, np.floating) else np.iinfo(x.dtype).min, x.dtype)
        windows = np.where(inside, windows, least)
        y = windows.max(-1)
        if len(self.onnx_node.output) < 2:
            return (y,)
        first = windows.argmax(-1)[..., None]
        places = np.take_along_axis(np.broadcast_to(plane, windows.shape), first, -1)[..., 0]
        if storage_order:
            unravelled = np.unravel_index(places, x.shape[2:])
            places = np.ravel_multi_index(unravelled[::-1], x.shape[:1:-1])
        planes = np.arange(math.prod(x.shape[:2])).reshape(*x.shape[:2], *[1] * (x.ndim - 2))
        return y, places + planes * math.prod(x.shape[2:])


class AveragePool(_Pool):
    def _run(
        self,
        x: Array,
        auto_pad: str | None = None,
        ceil_mode: int | None = None,
        count_include_pad: int | None = None,
        dilations: Sequence[int] | None = None,
        kernel_shape: Sequence[int] = (),
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> tuple[Array]:
        windows, inside, padded, _ = self._windows(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
        counted = (padded if count_include_pad else inside).sum(-1)
        sums = np.where(inside, windows, 0).sum(-1, dtype=np.float64)
        return ((sums / counted).astype(x.dtype),)


class LpPool(_Pool):
    def _run(
        self,
        x: Array,
        auto_pad: str | None = None,
        ceil_mode: int | None = None,
        dilations: Sequence[int] | None = None,
        kernel_shape: Sequence[int] = (),
        p: int | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> tuple[Array]:
        windows, inside, _, _ = self._windows(x, kernel_shape, strides, dilations, pads, auto_pad, ceil_mode)
        power = 2 if p is None else p
        sums = np.where(inside, np.abs(windows.astype(np.float64)) ** power, 0).sum(-1)
        return ((sums ** (1 / power)).astype(x.dtype),)


class GlobalMaxPool(OpRun):  # type: ignore[misc]
    """Of images of any number of axes."""

    op_domain = ""

    def _run(self, x: Array) -> tuple[Array]:
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)
