"""NHWC convolution as an implicit GEMM through TMA's im2col mode: its sizes and limits.

y[m, k] = sum over taps (r, s) and channels c of x[pixel(m, r, s), c] * weight[k, (r, s), c], with m the output pixel
(n, oh, ow) flattened. TMA walks a bounding box of base pixels, given by its corners relative to the image, with the
convolution's strides. A tap is an offset from the base pixel. Positions outside of the image read as zero.

Source: CUDA driver API, "Tensor Map Object Management", cuTensorMapEncodeIm2col; PTX ISA, "Tensor im2col mode".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from schedsearch.ops.conv2d import CONV2D, Conv2dParams, first_channel
from schedsearch.ops.conv2d_formats import FLOAT8, INTEGERS
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.epilogues import pixel_shuffle
from schedsearch.ops.layout import Layout
from schedsearch.ops.pixel_shuffle import PixelShuffle
from schedsearch.target import Target
from schedsearch.templates.conv2d.limits import size_problem
from schedsearch.templates.parts.epilogue_fragments import ChannelOrder
from schedsearch.templates.parts.hopper import ALIGNMENT_BYTES, DTYPES
from schedsearch.templates.parts.stages import CONVERTING, epilogue_problem, moved_residual_problem
from schedsearch.templates.parts.window_sums import window_sums_problem
from schedsearch.templates.parts.zero_points import zero_point_problem
from schedsearch.workload import Workload

CORNER_RANGE = (-128, 127)  # at rank 4
MAX_TAP_OFFSET = 255  # at rank 4
MAX_ELEMENT_STRIDE = 8
MAX_COORDINATE = 2**31 - 1
MAX_MERGED = 16  # groups; more would multiply by more zeros than a kernel on CUDA cores takes time
MAX_BLOCKED_PIXELS = 2**21  # of a block of y: 256 columns of 4 bytes then lie within 2**31 bytes


@dataclass(frozen=True)
class Blocks:
    """How the channels and images of x or y lie in memory: slices of all pixels of an image x `size` channels.

        >>> Blocks.of(64, 8, "NHWC")
        Blocks(size=64, count=1, image_step=1, block_step=8)
        >>> Blocks.of(64, 8, "NCHW32c"), Blocks.folded(64, 8, 32)
        (Blocks(size=32, count=2, image_step=2, block_step=1), Blocks(size=32, count=2, image_step=1, block_step=8))

    Attributes:
        size, count: channels of a block, and blocks.
        image_step, block_step: slices from one image to the next, and from one block to the next.
    """

    size: int
    count: int
    image_step: int
    block_step: int

    @classmethod
    def of(cls, channels: int, images: int, layout: str) -> Blocks:
        """Those of NHWC, or of NCHW[x]c with whole blocks."""
        size = Layout.parse(layout).block("C")
        if size == 1 or size == channels:
            return cls.folded(channels, images, channels)
        return cls(size, channels // size, channels // size, 1)

    @classmethod
    def folded(cls, channels: int, images: int, size: int) -> Blocks:
        """Shape (C / size, N, H, W, size): the images of a block follow each other, and so do all of its pixels."""
        return cls(size, channels // size, 1, images)

    @property
    def plain(self) -> bool:
        """Whether all channels are one block, as in NHWC."""
        return self.count == 1


@dataclass(frozen=True)
class Im2col:
    """The GEMM of a workload.

    A tile has pixels of several images if those follow each other in memory; otherwise it has pixels of one image.

    Attributes:
        rows: M, output pixels of all images.
        columns: output channels.
        channels: input channels of a group, the part of the GEMM's depth that one tap has.
        out_h, out_w: output pixels of an image.
        kernel_h, kernel_w: taps.
        stride, dilation: (vertical, horizontal).
        lower, upper: corners of the bounding box of base pixels, each (horizontal, vertical): relative to the image's
            first and last pixel.
        images, image_rows: groups of output pixels that no tile straddles, and pixels of each. All images are one group, or
            each image is one.
        x, y: how they lie in memory.
        groups: of which each has `channels` input channels.
        filter_block: input and output channels of a block of the weights in OIHW[x]o[x]i; 0: the weights are OHWI.
        shuffle: depth_to_space through which y is stored. `y` is then the output before it.
        own_weights: each image has weights of its own, one set after the other in memory; no tile straddles two images.
        first_channel: of x in the array that has it, whose channels end with those of x; `x` is then that array.
    """

    rows: int
    columns: int
    channels: int
    out_h: int
    out_w: int
    kernel_h: int
    kernel_w: int
    stride: tuple[int, int]
    dilation: tuple[int, int]
    lower: tuple[int, int]
    upper: tuple[int, int]
    images: int
    image_rows: int
    x: Blocks
    y: Blocks
    groups: int
    filter_block: int
    shuffle: PixelShuffle | None = None
    own_weights: bool = False
    first_channel: int = 0

    @classmethod
    def of(cls, workload: Workload[Conv2dParams], x: Blocks | None = None, y: Blocks | None = None) -> Im2col:
        """The GEMM of a workload, whose x and y lie in memory as its layout says unless `x` or `y` says otherwise."""
        w = workload.params
        out_h, out_w = CONV2D.output_hw(w)
        top, left, bottom, right = w.padding
        upper = (right - (w.s - 1) * w.dilation[1], bottom - (w.r - 1) * w.dilation[0])
        x, y = x or Blocks.of(w.x_slice[0] if w.x_slice else w.c, w.n, w.layout), y or Blocks.of(w.k, w.n, w.layout)
        images = 1 if w.n == 1 or x.image_step == y.image_step == 1 else w.n
        rows = w.n * out_h * out_w
        return cls(
            rows, w.k, w.c // w.groups, out_h, out_w, w.r, w.s, w.stride, w.dilation, (-left, -top), upper, images,
            rows // images, x, y, w.groups,
            Layout.parse(w.weight_layout).block("I") if w.weight_layout != "OHWI" else 0,
            pixel_shuffle(w.epilogue, w.k), first_channel=first_channel(w),
        )  # fmt: skip

    @property
    def taps(self) -> int:
        return self.kernel_h * self.kernel_w

    def channel_steps(self, bk: Any) -> Any:
        """k steps of bk channels of one tap of a group; a step stays within a block."""
        if self.x.plain:
            return -(-self.channels // bk)
        return self.x.count // self.groups * -(-self.x.size // bk)

    def row_tiles(self, bm: Any) -> Any:
        return self.images * -(-self.image_rows // bm)

    @property
    def order(self) -> ChannelOrder | None:
        """The output channels of the columns if they are not the columns' numbers."""
        return channel_order(self.shuffle)

    def fits(self, rows_past_end: int) -> bool:
        """Whether tiles that end this far past the last row of each image have 32-bit coordinates."""
        return self.images * (self.image_rows + rows_past_end) <= MAX_COORDINATE

    def problem(self, max_tile_rows: int) -> str | None:
        """The limit of TMA that the convolution breaks (one sentence: what, got, allowed), or None."""
        for axis, number, kernel in (("horizontal", 1, self.kernel_w), ("vertical", 0, self.kernel_h)):
            stride, reach = self.stride[number], (kernel - 1) * self.dilation[number]
            if stride > MAX_ELEMENT_STRIDE:
                return f"the {axis} stride is {stride}; allowed: 1 to {MAX_ELEMENT_STRIDE}, TMA's element strides"
            if reach > MAX_TAP_OFFSET:
                return f"the {axis} kernel reaches (size - 1) * dilation = {reach}; allowed: up to {MAX_TAP_OFFSET}"
            least, most = CORNER_RANGE
            for corner, meaning in (
                (self.lower[1 - number], "-(padding before)"),
                (self.upper[1 - number], "padding after - (size - 1) * dilation"),
            ):
                if not least <= corner <= most:
                    return f"the {axis} {meaning} is {corner}; allowed: {least} to {most}, TMA's im2col corners"
        if not self.y.plain and self.image_rows >= MAX_BLOCKED_PIXELS:
            return f"a block of y has {self.image_rows} pixels; allowed: less than 2**21"
        if not self.fits(max_tile_rows):
            return f"the output has {self.rows} pixels; allowed: less than 2**31 - {max_tile_rows}, TMA's 32-bit coordinates"
        return None


def channel_order(shuffle: PixelShuffle | None) -> ChannelOrder | None:
    """The order of output channels in which those of one pixel of y are neighbours; None if they are so anyway."""
    if shuffle is None or shuffle.mode != "CRD" or shuffle.block == 1:
        return None
    return ChannelOrder(shuffle.out_channels, shuffle.pixels, 1)


def merged_groups(workload: Workload[Conv2dParams]) -> int:
    """How many neighbouring groups of small integers a kernel takes as one, with zero weights between them.

    It takes the number that wastes the least depth of a wgmma, and of these the largest, whose tiles are wider. The channels
    of the merged groups are multiples of 16, which TMA and interleaved columns need; all groups together always are.
    """
    w = workload.params
    if w.groups == 1 or w.layout != "NHWC":
        return 1
    inputs, outputs = w.c // w.groups, w.k // w.groups
    fitting = [m for m in range(1, min(w.groups, MAX_MERGED) + 1) if w.groups % m == 0]
    fitting = [m for m in fitting if m * inputs % 16 == m * outputs % 16 == 0]
    return min(fitting, key=lambda m: (-(-m * inputs // 32), -m), default=0)


def problem(
    workload: Workload[Conv2dParams],
    target: Target,
    *,
    every_dtype: bool = False,
    integers: bool = False,
    takes_blocks: bool = False,
    takes_groups: bool = False,
    shuffles: bool = False,
    slices: bool = False,
    weight_zero_point: bool = False,
    any_k: bool = False,
    x_slices: bool = False,
    staged: Sequence[str] | None = None,
) -> str | None:
    """Why no wgmma convolution can run the workload on the target (one sentence: what, got, allowed), or None.

    Args:
        every_dtype: takes TF32, integers and float8 too.
        integers: takes int8 and uint8 too.
        takes_blocks: takes NCHW[x]c.
        shuffles: stores through depth_to_space.
        slices: stores into a slice of a larger array.
        weight_zero_point: corrects sums for a zero point of the weight.
        any_k: stores 16-bit floats in rows that do not begin at multiples of 16 bytes (`parts.store_rows`).
        x_slices: reads x out of a larger array, if its channels are the last of it: others would not be zeros past the end.
        takes_groups: takes any groups; otherwise only those of integers whose rows of weights `weight_rows` can widen.
        staged: as in `stages.epilogue_problem`.
    """
    w = workload.params
    dtypes = (*DTYPES, "float32", *INTEGERS, *FLOAT8) if every_dtype else (*DTYPES, *INTEGERS * integers)
    if target.compute_capability != (9, 0):
        got = ".".join(map(str, target.compute_capability))
        remedy = "; without it, convert x and weight to float16" if w.dtype in FLOAT8 else ""
        return f"wgmma needs compute capability 9.0, got {got}{remedy}"
    if w.dtype not in dtypes:
        return f"dtype is {w.dtype}; allowed: {', '.join(dtypes)}"
    if w.dtype == "float32" and w.precision != "tf32":
        return f"dtype is float32 with precision {w.precision}; allowed: tf32, as wgmma cuts factors to 10 stored bits"
    if reason := zero_point_problem(workload, weight_zero_point) or window_sums_problem(workload):
        return reason
    if reason := _layout_problem(workload, takes_blocks):
        return reason
    of_bytes = {"dtypes": (*DTYPES, "float32", "int32", "uint32", *INTEGERS), "converting": CONVERTING}
    of_type = of_bytes if w.dtype in (*INTEGERS, *FLOAT8) else {}
    if reason := epilogue_problem(workload, staged=staged, shuffles=shuffles, slices=slices, x_slices=x_slices, **of_type):
        return reason
    if reason := _x_slice_problem(workload):
        return reason
    any_k = any_k and w.layout == "NHWC" and {w.dtype, w.out_dtype} <= set(DTYPES) and not pixel_shuffle(w.epilogue, w.k)
    if reason := _slice_problem(workload, any_k):
        return reason
    if reason := _shuffle_problem(workload):
        return reason
    if w.groups != 1 and not takes_groups:
        if w.dtype not in INTEGERS:
            return f"groups is {w.groups}; allowed: 1"
        if reason := _group_problem(workload):
            return reason
    y_bytes = dtype_of(w.out_dtype).nbytes
    columns = 1 if any_k else max(8, ALIGNMENT_BYTES // y_bytes)
    for name, multiple in (("c", ALIGNMENT_BYTES // dtype_of(w.dtype).nbytes), ("k", columns)):
        if w[name] % multiple:
            return f"{name} is {w[name]}; allowed: multiples of {multiple}, TMA's strides are of 16 bytes"
    return size_problem(workload)


def stores_by_tma(workload: Workload[Conv2dParams]) -> bool:
    """Whether y goes through shared memory and TMA: rows of y must begin at multiples of 16 bytes.

    Other rows of 16-bit numbers are stored as `parts.store_rows` says, those of 32-bit numbers straight from registers.
    """
    p = workload.params
    row_elements: int = p.slice_of or p.k
    return row_elements * dtype_of(p.out_dtype).nbytes % ALIGNMENT_BYTES == 0 and p.k % 8 == 0


def stores_rows(workload: Workload[Conv2dParams]) -> bool:
    """Whether y is stored as `parts.store_rows` says."""
    return dtype_of(workload.params.out_dtype).nbytes == 2 and not stores_by_tma(workload)


def _slice_problem(workload: Workload[Conv2dParams], any_pitch: bool) -> str | None:
    """Why the output cannot be stored into a slice by TMA."""
    w = workload.params
    if not workload.output.slice_of:
        return None
    if w.layout != "NHWC":
        return f"y is a slice in {w.layout}; allowed: slices in NHWC"
    multiple = 1 if any_pitch else ALIGNMENT_BYTES // dtype_of(w.out_dtype).nbytes
    if w.slice_of % multiple:
        return f"slice_of is {w.slice_of}; allowed: multiples of {multiple}, TMA's strides are of 16 bytes"
    return None


def _x_slice_problem(workload: Workload[Conv2dParams]) -> str | None:
    """Why x cannot be read out of a larger array by TMA."""
    w = workload.params
    if not w.x_slice:
        return None
    (whole, first), multiple = w.x_slice, ALIGNMENT_BYTES // dtype_of(w.dtype).nbytes
    if w.layout != "NHWC" or w.groups != 1 or first + w.c != whole:
        got = f"x is channels {first} to {first + w.c - 1} of {whole} in {w.layout} with {w.groups} groups"
        return f"{got}; allowed: the last channels, in NHWC, one group"
    if whole % multiple or first % multiple:
        return f"x_slice is {list(w.x_slice)}; allowed: multiples of {multiple}, TMA's strides are of 16 bytes"
    return None


def _shuffle_problem(workload: Workload[Conv2dParams]) -> str | None:
    """Why the output cannot be stored through depth_to_space by TMA."""
    w = workload.params
    shuffle = pixel_shuffle(w.epilogue, w.k)
    if shuffle is None:
        return None
    nbytes = dtype_of(w.out_dtype).nbytes
    if nbytes == 4:
        return f"depth_to_space of {w.out_dtype}; allowed: outputs of 2 bytes or 1, which are stored by TMA"
    run, multiple = w.k // shuffle.block, ALIGNMENT_BYTES // nbytes
    if run % multiple:
        return f"k / block of depth_to_space is {run}; allowed: multiples of {multiple}, TMA's strides are of 16 bytes"
    if shuffle.mode == "DCR" or shuffle.block == 1:
        return None
    if w.dtype in INTEGERS:
        return f"depth_to_space of {w.dtype} in mode CRD; allowed: DCR"
    if shuffle.out_channels % 8:
        return f"k / block**2 of depth_to_space in mode CRD is {shuffle.out_channels}; allowed: multiples of 8"
    return moved_residual_problem(workload)


def _group_problem(workload: Workload[Conv2dParams]) -> str | None:
    """Why groups of integers cannot be computed, merged or not."""
    w = workload.params
    inputs, outputs = w.c // w.groups, w.k // w.groups
    if inputs % 4:
        return f"a group has {inputs} input channels; allowed: multiples of 4"
    if merged_groups(workload) == 0 or (w.layout != "NHWC" and outputs % 16):
        return (
            f"groups of {inputs} input and {outputs} output channels do not merge to multiples of 16; allowed: those that "
            f"do, up to {MAX_MERGED} groups together, in NHWC"
        )
    return None


def _layout_problem(workload: Workload[Conv2dParams], takes_blocks: bool) -> str | None:
    w, block = workload.params, Layout.parse(workload.params.layout).block("C")
    if w.output_layout != w.layout:
        return f"output_layout is {w.output_layout}; allowed: {w.layout}, as that of x"
    if (w.layout, w.weight_layout) == ("NHWC", "OHWI"):
        return None
    if not takes_blocks or block == 1:
        also = ", or NCHW[x]c and OIHW[x]o[x]i" if takes_blocks else ""
        return f"layout and weight_layout are {w.layout} and {w.weight_layout}; allowed: NHWC and OHWI{also}"
    for name, dtype in (("x", w.dtype), ("y", w.out_dtype)):
        if block * dtype_of(dtype).nbytes % ALIGNMENT_BYTES:
            nbytes = block * dtype_of(dtype).nbytes
            return f"a block of {name} in {w.layout} has {nbytes} bytes; allowed: multiples of 16, TMA's strides"
    if block % 16 and block != 8:
        return f"layout is {w.layout}; allowed: blocks of 8 channels or of multiples of 16"
    return None
