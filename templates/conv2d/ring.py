"""What conv2d_mma and conv2d_simt share: an implicit GEMM whose operands pass through a ring of stages in shared memory.

A stage has `bm` rows of x, then `bn` rows of the weight, each with `bk` elements of the reduction. Threads load and multiply
chunks of 16 bytes. The kernels capture the functions here, and they become part of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from schedsearch.launch import Grid
from schedsearch.templates.conv2d.tiles import Tiling, ceil_div
from schedsearch.templates.parts.casts import u32

CHUNK_BYTES = 16
RING_KNOBS = ("stages", "band", "persistent", "blocks_per_sm")  # of a `RingPlan`
OUTSIDE = -(2**30)  # a row coordinate that no tap can bring back into the image


@dataclass(frozen=True, kw_only=True)
class RingGemm:
    """The implicit GEMM of one workload.

    Attributes:
        groups: groups of channels, each of them a GEMM.
        images: images of the batch.
        pixels: output pixels of an image.
        k: output channels of a group.
        c: input channels of a group.
        depth: length of the reduction, in elements of `element_bytes`.
        element_bytes: bytes of an element of the reduction.
        vector: channels of y that one store takes.
    """

    groups: int
    images: int
    pixels: int
    k: int
    c: int
    depth: int
    element_bytes: int
    vector: int

    def tiling(self, bm: int, bn: int, *, bound: bool) -> Tiling:
        """See `Tiling`."""
        return Tiling(bm, bn, self.images, self.pixels, self.k, self.groups, bound)

    @property
    def m(self) -> int:
        """Output pixels of all images."""
        return self.images * self.pixels


G = TypeVar("G", bound=RingGemm)


@dataclass(frozen=True, kw_only=True)
class RingPlan(Generic[G]):
    """Sizes of one configuration.

    Attributes:
        gemm: the GEMM of the workload.
        bm, bn, bk: output pixels and channels of a block's tile, elements of a step.
        stages: buffers of the pipeline.
        band: pixel tiles that are walked before the next channel tile.
        persistent: whether blocks loop over tiles; otherwise there is one block per tile.
        blocks_per_sm: blocks of a persistent grid that share a multiprocessor.
        bound: a tile has pixels of one image; otherwise the pixels of all images are one long axis.
        own_weights: each image has weights of its own, one set after the other in memory; tiles are then bound.
    """

    gemm: G
    bm: int
    bn: int
    bk: int
    stages: int
    band: int
    persistent: bool
    blocks_per_sm: int
    bound: bool
    own_weights: bool = False

    @property
    def threads(self) -> int:
        raise NotImplementedError

    @property
    def tiling(self) -> Tiling:
        return self.gemm.tiling(self.bm, self.bn, bound=self.bound)

    @property
    def grid(self) -> Grid:
        return Grid(self.tiling.tiles, self.blocks_per_sm if self.persistent else 0)

    @property
    def steps(self) -> int:
        """Steps along the reduction."""
        return int(ceil_div(self.gemm.depth, self.bk))

    @property
    def row_bytes(self) -> int:
        return self.bk * self.gemm.element_bytes

    @property
    def chunks(self) -> int:
        """Chunks of a row in shared memory."""
        return self.row_bytes // CHUNK_BYTES

    @property
    def row_step(self) -> int:
        """Distance between the rows that one thread loads. Each thread loads one column of chunks."""
        return self.threads // self.chunks

    @property
    def rows_x(self) -> int:
        """Rows of x that one thread loads."""
        return int(ceil_div(self.bm, self.row_step))

    @property
    def rows_w(self) -> int:
        return int(ceil_div(self.bn, self.row_step))

    @property
    def x_bytes(self) -> int:
        """Bytes of x in a stage. The weights follow them."""
        return self.bm * self.row_bytes

    @property
    def stage_bytes(self) -> int:
        return (self.bm + self.bn) * self.row_bytes


def swizzle(chunks: int) -> Callable[[Any], Any]:
    """`flip(row)`: the number of a chunk XOR `flip(row)` is its place in a shared row of `chunks` chunks.

    Any 8 consecutive rows of one column of chunks then use all 32 banks. Rows whose distance is a multiple of 8 agree.
    """
    band, patterns = max(8 // chunks, 1), min(chunks, 8)  # rows that share 128 bytes, and distinct patterns

    def flip(row: Any) -> Any:
        return u32(row // band % patterns)

    return flip


def filter_sets(plan: RingPlan[Any], count: Any = u32) -> Callable[[Any, Any], Any]:
    """`set_of(image, group)`: the place of a group's filters among all filters, which may be those of several images.

    `count` is the type of the result.
    """
    groups = plan.gemm.groups

    def of_group(image: Any, group: Any) -> Any:
        return group

    def of_image(image: Any, group: Any) -> Any:
        return count(image * count(groups) + group)

    return of_image if plan.own_weights else of_group
