"""The part of a depthwise convolution that a block of `depthwise_conv2d_mma` computes: see docs/kernels/depthwise.md.

A *strip* is 8 columns of a plane and `height` rows of targets. A warp takes one channel at a time and up to 16 strips of it:
those of `down` rows of `across` strips, of `together` images. For a row of sources, the matrix A of mma.sync has a row for
each strip: the window of 16 columns that the strip's 8 targets meet. The matrix B is a *band*: a row of the filter along its
diagonals, so that A x B is what the row of sources adds to a row of targets of every strip. Other rows of targets meet the
same sources with another row of the filter: the windows are loaded once for all of them.

A block stages the sources of its warps in shared memory, planes one after the other, whatever the layout.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from schedsearch.ops.depthwise_conv2d import DepthwiseConv2dParams
from schedsearch.templates.depthwise_conv2d.cuda_space import Shape
from schedsearch.templates.depthwise_conv2d.estimates import bank_turns
from schedsearch.templates.depthwise_conv2d.patches import Axis
from schedsearch.templates.parts.casts import i32, u32
from schedsearch.workload import Workload

ELEMENT_BYTES, WORD_BYTES = 2, 4
STRIPS = 16  # rows of A
STRIP_COLUMNS = 8  # columns of B
STEP_COLUMNS = 16  # columns of A: sources of one product
MATRIX_WORDS = 4  # of a row of a matrix of ldmatrix: 8 columns


@dataclass(frozen=True)
class Reach:
    """The sources that a target meets along an axis with stride 1.

    Attributes:
        taps, first: of the filter, and the source of the first one, relative to the target.
        step: sources from a tap to the next.
        turned: whether the filter's last tap meets the first source, as in a gradient.
    """

    taps: int
    first: int
    step: int
    turned: bool

    @classmethod
    def of(cls, axis: Axis) -> Reach:
        last = (axis.taps - 1) * axis.tap_step
        return cls(axis.taps, axis.shift + min(last, 0), abs(axis.tap_step), axis.tap_step < 0)

    @property
    def extent(self) -> int:
        """Sources from the first to the last."""
        return (self.taps - 1) * self.step + 1

    def products(self, slack: int) -> int:
        """Products that the window of a strip takes, if it begins `slack` columns before the first source."""
        return -(-(slack + self.extent + STRIP_COLUMNS - 1) // STEP_COLUMNS)

    def tap(self, number: int) -> int:
        """The tap that meets source `first + number * step`."""
        return self.taps - 1 - number if self.turned else number


@dataclass(frozen=True)
class StripBlocks:
    """How blocks share the strips of all images, and where their sources lie in shared memory.

    Attributes:
        rows, columns: the two axes; their strides are 1.
        images, channels: of the arrays.
        channels_last: NHWC.
        of_copy: elements of an access to global memory; they divide the channels of NHWC, or the columns of NCHW.
            Those of NCHW are aligned in shared memory, too, but do not make a window need another product.
        block_channels: of a block.
        each: of a warp, one after the other.
        height: rows of a strip.
        across, down, together: strips of a warp, along the columns, rows and images.
        tiles: that a block computes one after the other.
    """

    rows: Axis
    columns: Axis
    images: int
    channels: int
    channels_last: bool
    of_copy: int
    block_channels: int
    each: int
    height: int
    across: int
    down: int
    together: int
    tiles: int

    @classmethod
    def of(
        cls, workload: Workload[DepthwiseConv2dParams], block_channels: int, each: int, height: int, across: int, down: int,
        together: int, tiles: int,
    ) -> StripBlocks:  # fmt: skip
        shape = Shape.of(workload)
        reach, last = Reach.of(shape.columns), shape.channels_last
        longest, neighbours = (block_channels, shape.channels) if last else (STRIP_COLUMNS, shape.columns.sources)
        of_copy = next(
            n
            for n in (8, 4, 2, 1)
            if n <= longest and neighbours % n == 0 and (last or reach.products(reach.first % n) == reach.products(0))
        )
        return cls(
            shape.rows, shape.columns, shape.images, shape.channels, shape.channels_last, of_copy, block_channels, each,
            height, across, down, together, tiles,
        )  # fmt: skip

    # ---- blocks

    @property
    def warps(self) -> int:
        return self.block_channels // self.each

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def channel_blocks(self) -> int:
        return -(-self.channels // self.block_channels)

    @property
    def column_tiles(self) -> int:
        return -(-self.columns.targets // (STRIP_COLUMNS * self.across))

    @property
    def row_tiles(self) -> int:
        return -(-self.rows.targets // (self.height * self.down))

    @property
    def tile_count(self) -> int:
        """Tiles of a block of channels."""
        return self.column_tiles * self.row_tiles * -(-self.images // self.together)

    @property
    def count(self) -> int:
        return self.channel_blocks * -(-self.tile_count // self.tiles)

    def place(self) -> Callable[[Any], Any]:
        """tile -> its first (image, row, column)."""
        column_tiles, row_tiles, together = self.column_tiles, self.row_tiles, self.together
        tile_rows, tile_columns = self.height * self.down, STRIP_COLUMNS * self.across

        def place_of(tile: Any) -> Any:
            rest = u32(tile // u32(column_tiles))
            group = u32(rest // u32(row_tiles))
            row, column = i32(rest - group * row_tiles), i32(tile - rest * column_tiles)
            return i32(i32(group) * together), i32(row * tile_rows), i32(column * tile_columns)

        return place_of

    @property
    def strips(self) -> int:
        """Of a warp."""
        return self.across * self.down * self.together

    def strip_place(self) -> Callable[[Any], Any]:
        """strip of a warp -> (image, row, column) of its first target within the tile."""
        across, down, height = self.across, self.down, self.height

        def place_of(strip: Any) -> Any:
            rest = u32(strip // u32(across))
            image = u32(rest // u32(down))
            return i32(image), i32(i32(rest - image * down) * height), i32(i32(strip - rest * across) * STRIP_COLUMNS)

        return place_of

    # ---- the windows of a strip

    @cached_property
    def down_reach(self) -> Reach:
        return Reach.of(self.rows)

    @cached_property
    def across_reach(self) -> Reach:
        return Reach.of(self.columns)

    @property
    def slack(self) -> int:
        """Columns of a window before the first that its first target meets."""
        return 0 if self.channels_last else self.across_reach.first % self.of_copy

    @property
    def steps(self) -> int:
        """Products that a window takes."""
        return self.across_reach.products(self.slack)

    # ---- shared memory

    @cached_property
    def sources(self) -> StagedPlanes:
        """What is staged of the sources: the windows of all strips."""
        above, left = self.down_reach.first, self.across_reach.first - self.slack
        columns = STRIP_COLUMNS * (self.across - 1) + STEP_COLUMNS * self.steps
        rows = self.height * self.down + self.down_reach.extent - 1
        return self._staged((self.rows.sources, self.columns.sources), (above, left), (rows, columns), self.of_copy)

    @cached_property
    def targets(self) -> StagedPlanes:
        """The same of the targets, if they are read: those of all strips."""
        of_copy = self.of_copy if self.channels_last else next(n for n in (8, 4, 2, 1) if self.columns.targets % n == 0)
        extents = self.height * self.down, STRIP_COLUMNS * self.across
        return self._staged((self.rows.targets, self.columns.targets), (0, 0), extents, of_copy)

    def _staged(
        self, plane: tuple[int, int], first: tuple[int, int], extents: tuple[int, int], of_copy: int
    ) -> StagedPlanes:
        row, image = _pitches(extents[1] // 2, extents[0], self.across, self.down, self.together, self.height)
        of_group = of_copy if self.channels_last else 1
        pitches = row, image, image * self.together
        return StagedPlanes(plane, first, extents, of_copy, of_group, pitches, self.block_channels)


@dataclass(frozen=True)
class StagedPlanes:
    """What a block stages of one array: a part of the planes of its channels and of some images.

    Attributes:
        plane: rows and columns of a whole plane.
        first: row and column of the first element, relative to the first target of a tile.
        extents: rows and columns.
        of_copy: elements of an access to global memory.
        of_group: channels that lie a plane's pitch apart: those of an access to NHWC.
        pitches: words of shared memory from a row, an image and a plane to the next.
        channels: of the block.
    """

    plane: tuple[int, int]
    first: tuple[int, int]
    extents: tuple[int, int]
    of_copy: int
    of_group: int
    pitches: tuple[int, int, int]
    channels: int

    @property
    def group_words(self) -> int:
        """Words from a group of planes to the next. In NHWC a warp writes to all groups at once, to other banks."""
        words = self.of_group * self.pitches[2]
        if self.of_group in (1, self.channels):
            return words
        return words + (max(32 * self.of_group // self.channels, MATRIX_WORDS) - words) % 32

    @property
    def nbytes(self) -> int:
        """Of shared memory."""
        return self.channels // self.of_group * self.group_words * WORD_BYTES

    def plane_place(self) -> Callable[[Any], Any]:
        """channel of the block -> bytes from the first plane in shared memory to its own."""
        of_group = self.of_group
        plane_bytes, group_bytes = self.pitches[2] * WORD_BYTES, self.group_words * WORD_BYTES

        def place_of(channel: Any) -> Any:
            group = i32(channel // of_group)
            return i32(group * group_bytes + (channel - group * of_group) * plane_bytes)

        return place_of


@functools.cache
def _pitches(row: int, rows: int, across: int, down: int, together: int, height: int) -> tuple[int, int]:
    """The least pitches of rows and images, in words, with which 8 strips' rows of a matrix meet in the fewest banks.

    Args:
        row, rows: words of a row, and rows of an image.
    """

    def turns(row_pitch: int, image_pitch: int) -> int:
        words = set[int]()
        for strip in range(min(STRIPS // 2, across * down * together)):
            rest, column = divmod(strip, across)
            image, line = divmod(rest, down)
            first = image * image_pitch + line * height * row_pitch + column * STRIP_COLUMNS // 2
            words.update(range(first, first + MATRIX_WORDS))
        return bank_turns(words)

    found = []
    for more, further in itertools.product(
        range(0, 16 if down > 1 else 1, MATRIX_WORDS), range(0, 32 if together > 1 else 1, MATRIX_WORDS)
    ):
        pitches = row + more, (row + more) * rows + further
        found.append((turns(*pitches), pitches[1], *pitches))
    return min(found)[2:]
