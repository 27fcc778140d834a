"""Strips of output pixels: the tiles of conv2d_mma when x is loaded as patches, each input pixel once and not once per tap.

An image of y is cut into vertical strips of `width` pixels. The rows of a strip follow each other, those of all images in
one sequence, and a tile has `bm` consecutive pixels of it. The patch of a tile is all of x that its taps read: rows of an
image and its padding, then those of the next image. In shared memory they are `pitch` positions apart:

    position = (row of the patch) * pitch + (column of the strip)        a tap adds the same number to every position

Eight neighbouring pixels must have positions that differ modulo 8, otherwise ldmatrix has bank conflicts. Within a row of
the strip they are neighbours. From its end to the next row they stay so if `pitch` and `width` differ by a multiple of 8.
"""

from __future__ import annotations

from dataclasses import dataclass

from schedsearch.ops.conv2d import CONV2D, Conv2dParams
from schedsearch.templates.conv2d.tiles import ceil_div
from schedsearch.workload import Workload

MAX_BOX = 256  # positions of a row that one TMA instruction loads
ROW_BYTES = 128  # of a position, the swizzle's width
PATTERN_BYTES = 1024  # after which the swizzle repeats
PATCH_SHARE = 1 / 16  # what a position of a patch costs, in multiplications of an output pixel


@dataclass(frozen=True)
class Strips:
    """The strips of a workload for tiles of `bm` pixels.

        >>> workload = Workload.conv2d(n=32, h=28, w=28, c=128, k=128, r=3, s=3, padding=1)
        >>> strips = Strips.of(workload, 192)
        >>> strips.width, strips.count, strips.rows, strips.pitch, strips.pixels
        (28, 1, 12, 36, 25088)

    Attributes:
        width, count: columns of a strip, and strips; the last one may end past the image.
        out_h, out_w: output pixels of an image.
        images: of the batch.
        reach: rows and columns of x that the taps of a pixel cover, less one.
        rows: of a patch, the most that a tile needs.
        pitch: positions from one row of a patch to the next.
    """

    width: int
    count: int
    out_h: int
    out_w: int
    images: int
    reach: tuple[int, int]
    rows: int
    pitch: int

    @classmethod
    def of(cls, workload: Workload[Conv2dParams], bm: int) -> Strips:
        """The strips with the least multiplications past the image and the smallest patches."""
        w = workload.params
        widest = max(1, MAX_BOX - (w.s - 1) * w.dilation[1])  # TMA's im2col mode leaves at least one
        found = (cls._of_width(w, bm, width) for width in range(1, min(CONV2D.output_hw(w)[1], widest) + 1))
        return min(found, key=lambda strips: (strips._cost(bm), -strips.width))

    @classmethod
    def _of_width(cls, w: Conv2dParams, bm: int, width: int) -> Strips:
        out_h, out_w = CONV2D.output_hw(w)
        reach = (w.r - 1) * w.dilation[0], (w.s - 1) * w.dilation[1]
        own_rows = bm // width if bm % width == 0 else (bm - 2) // width + 2
        apart = bm % width == 0 and out_h % own_rows == 0  # no tile has rows of two images
        images = 1 if apart else 1 + ceil_div(own_rows - 1, out_h)
        box = width + reach[1]
        pitch = box if width % 8 == 0 else box + (width - box) % 8
        return cls(width, ceil_div(out_w, width), out_h, out_w, w.n, reach, own_rows + images * reach[0], pitch)

    def _cost(self, bm: int) -> float:
        return self.count * self.width / self.out_w * (1 + PATCH_SHARE * self.rows * self.pitch / bm)

    @property
    def box(self) -> int:
        """Positions of a row that are loaded."""
        return self.width + self.reach[1]

    @property
    def pixels(self) -> int:
        """Pixels of a strip, in all images."""
        return self.images * self.out_h * self.width

    @property
    def patch_bytes(self) -> int:
        """Distance from one patch to the next in shared memory."""
        return -(-self.rows * self.pitch * ROW_BYTES // PATTERN_BYTES) * PATTERN_BYTES
