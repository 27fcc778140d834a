"""depth_to_space at the end of an epilogue: groups of channels become neighbouring pixels.

    y[n, c, p * b + i, q * b + j] = value[n, (i * b + j) * C + c, p, q]      mode DCR: depth, column, row
    y[n, c, p * b + i, q * b + j] = value[n, c * b * b + i * b + j, p, q]    mode CRD; torch.nn.PixelShuffle

Here b is `block` and C = K / (b * b) are the channels of y. This is ONNX's DepthToSpace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from schedsearch.ops.layout import Layout
from schedsearch.ops.specs import ArgSpec

MODES = ("DCR", "CRD")
MAX_BLOCK = 64  # pixels along an axis


@dataclass(frozen=True)
class PixelShuffle:
    """depth_to_space of an array of `channels` channels.

        >>> PixelShuffle(12, 2, "DCR").channel(7), PixelShuffle(12, 2, "CRD").channel(7)
        ((1, 2), (1, 3))

    Attributes:
        channels: before; a multiple of block * block.
        block: pixels of y along each axis of the image for one pixel before.
        mode: how a channel is numbered: "DCR", or "CRD" as in torch.nn.PixelShuffle.
    """

    channels: int
    block: int
    mode: str

    @property
    def pixels(self) -> int:
        """Pixels of y for one pixel before."""
        return self.block * self.block

    @property
    def out_channels(self) -> int:
        """Channels of y."""
        return self.channels // self.pixels

    def channel(self, k: Any) -> tuple[Any, Any]:
        """(channel of y, number of the pixel in its block) of a channel before. Works on arrays and inside of kernels."""
        if self.mode == "CRD":
            return k // self.pixels, k % self.pixels
        return k % self.out_channels, k // self.out_channels

    def element(self, k: object, row: Any, column: Any) -> tuple[Any, Any, Any]:
        """(channel, row, column) in y of an element before. Works on arrays."""
        channel, pixel = self.channel(k)
        return channel, row * self.block + pixel // self.block, column * self.block + pixel % self.block

    def source(self, channel: Any, row: Any, column: Any) -> tuple[Any, Any, Any]:
        """The inverse of `element`."""
        pixel = row % self.block * self.block + column % self.block
        k = channel * self.pixels + pixel if self.mode == "CRD" else pixel * self.out_channels + channel
        return k, row // self.block, column // self.block


def shuffled(spec: ArgSpec, block: int) -> ArgSpec:
    """The output after depth_to_space of an output with axes N, C, H and W in any order. C need not divide."""
    sizes = {axis: (size // (block * block) if axis == "C" else size) for axis, size in zip(spec.axes, spec.shape)}
    sizes |= {axis: sizes[axis] * block for axis in "HW" if axis in sizes}
    return replace(spec, shape=tuple(sizes[axis] for axis in spec.axes))


def shuffle_problem(spec: ArgSpec, block: int) -> str:
    """Why the output cannot go through depth_to_space; empty if it can."""
    if set(spec.axes) != set("NCHW") or Layout.parse(spec.axes).blocks:
        return f"needs an output in NHWC or NCHW, got {spec.axes}; give output_layout or layout NHWC or NCHW"
    channels = spec.shape[spec.axes.index("C")]
    if channels % (block * block):
        return f"needs output channels that are a multiple of block * block = {block * block}, got {channels}"
    return ""
