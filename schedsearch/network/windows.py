"""How a node slides over the spatial axes of its input: the one place that reads strides, dilations and padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from schedsearch.typed import Array, ParamsByName

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class Axis:
    """The windows along one axis.

    Attributes:
        size, windows, taps: pixels of the image, windows, and pixels of a window.
        stride, dilation: from a window to the next, and from a pixel of a window to the next.
        before: padding in front of the image.
    """

    size: int
    windows: int
    taps: int
    stride: int
    dilation: int
    before: int

    def starts(self) -> Array:
        """Where each window begins; negative in the padding."""
        return np.arange(self.windows, dtype=np.int64) * self.stride - self.before

    def pixels(self) -> Array:
        """Where each pixel of each window is, [windows, taps]: in the image or in the padding around it."""
        return self.starts()[:, None] + np.arange(self.taps, dtype=np.int64) * self.dilation


@dataclass(frozen=True)
class Window:
    """The window of a convolution or pool.

    Attributes:
        taps: its extent along each axis.
        strides, dilations: along each axis.
        auto_pad: NOTSET, VALID, SAME_UPPER or SAME_LOWER.
        given: the node's `pads`, which count if auto_pad is NOTSET: in front of each axis, then behind each.
    """

    taps: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    auto_pad: str
    given: tuple[int, ...]

    @classmethod
    def of(cls, node: ir.Node, taps: Sequence[int] | None = None) -> Window:
        """Reads a node.

        Args:
            taps: of its filters; default: its `kernel_shape`.
        """
        read = node.attributes
        taps = tuple(read.get_ints("kernel_shape", ()) if taps is None else taps)
        strides, dilations = (tuple(read.get_ints(name, (1,) * len(taps))) for name in ("strides", "dilations"))
        pads = tuple(read.get_ints("pads", (0,) * 2 * len(taps)))
        return cls(taps, strides, dilations, read.get_string("auto_pad", "NOTSET"), pads)

    @property
    def is_same(self) -> bool:
        """Whether the extents of the image decide about the padding."""
        return self.auto_pad.startswith("SAME")

    @property
    def fixed(self) -> list[int]:
        """The padding of a window that `is_same` does not hold for: as `given`."""
        return list(self.given) if self.auto_pad == "NOTSET" else [0] * 2 * len(self.taps)

    @property
    def reaches(self) -> list[int]:
        """Pixels from the first to the last of a window."""
        return [(taps - 1) * dilation + 1 for taps, dilation in zip(self.taps, self.dilations)]

    def pads(self, image: Sequence[int]) -> list[int]:
        """The padding, by ONNX's `auto_pad`: in front of each axis, then behind each.

        Args:
            image: extents of the spatial axes.
        """
        if not self.is_same:
            return self.fixed
        before, after = [], []
        for extent, reach, step in zip(image, self.reaches, self.strides):
            total = max((-(-extent // step) - 1) * step + reach - extent, 0)
            smaller, larger = total // 2, total - total // 2
            before.append(smaller if self.auto_pad == "SAME_UPPER" else larger)
            after.append(larger if self.auto_pad == "SAME_UPPER" else smaller)
        return [*before, *after]

    def axes(self, image: Sequence[int], windows: Sequence[int]) -> list[Axis]:
        """The windows along each axis.

        Args:
            image: extents of the spatial axes.
            windows: along each.
        """
        columns = (image, windows, self.taps, self.strides, self.dilations, self.pads(image))  # pads: those in front
        return [Axis(*each) for each in zip(*columns)]

    def params(self, image: Sequence[int]) -> ParamsByName:
        """Of the operators `conv2d` and `pool2d`."""
        return {"stride": list(self.strides), "dilation": list(self.dilations), "padding": self.pads(image)}
