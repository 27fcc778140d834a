"""Operators that move data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from schedsearch.constructors import BlockOptions, SliceOptions, made
from schedsearch.ops.concat import CONCAT, ConcatParams
from schedsearch.ops.depth_to_space import DEPTH_TO_SPACE, SPACE_TO_DEPTH, BlockParams
from schedsearch.ops.dyn_strided_slice import DYN_STRIDED_SLICE, DynStridedSliceParams
from schedsearch.ops.fill_margin import FILL_MARGIN, FillMarginParams
from schedsearch.ops.layout_transform import LAYOUT_TRANSFORM, LayoutTransformParams
from schedsearch.ops.pad import PAD, PadParams
from schedsearch.ops.params import MAX_INT
from schedsearch.ops.strided_slice import STRIDED_SLICE, StridedSliceParams
from schedsearch.ops.transpose import TRANSPOSE, TransposeParams
from schedsearch.workload import Workload


def transpose(*, x: Sequence[int], permutation: Sequence[int], **options: Unpack[SliceOptions]) -> Workload[TransposeParams]:
    """A transposition: dimension i of y is dimension permutation[i] of x.

    Args:
        x: extents of x.
        permutation: each dimension of x once; negative ones count from the last.
        dtype: any of 1, 2 or 4 bytes; default: float16. The bits of the elements do not change.
        slice_of: extents of a larger array of which y is a slice along one axis. Kernels then take a slice of it as `out`.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> transpose(x=(8, 56, 56, 64), permutation=(0, 3, 1, 2)).output.shape
        (8, 64, 56, 56)
    """
    return made(TRANSPOSE, locals())


def depth_to_space(*, n: int, c: int, h: int, w: int, block: int, **options: Unpack[BlockOptions]) -> Workload[BlockParams]:
    """Channels become blocks of block x block pixels.

    Args:
        n, c, h, w: batch, channels, height and width of x; block * block divides c.
        block: height and width of a block.
        mode: "DCR" (TensorFlow; the default, as in ONNX) or "CRD" (PyTorch's PixelShuffle).
        layout: "NCHW", the default, or "NHWC", of x and y.
        dtype: any of 1, 2 or 4 bytes; default: float16. The bits of the elements do not change.
        slice_of: extents of a larger array of which y is a slice along one axis. Kernels then take a slice of it as `out`.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> depth_to_space(n=1, c=48, h=720, w=1280, block=4, mode="CRD").output.shape
        (1, 3, 2880, 5120)
    """
    return made(DEPTH_TO_SPACE, locals())


def space_to_depth(*, n: int, c: int, h: int, w: int, block: int, **options: Unpack[BlockOptions]) -> Workload[BlockParams]:
    """Blocks of block x block pixels become channels: the inverse of `depth_to_space` with the same block, mode and layout.

    Args:
        n, c, h, w: batch, channels, height and width of x; block divides h and w.
        block: height and width of a block.
        mode, layout, dtype, slice_of: as in `depth_to_space`.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> space_to_depth(n=1, c=3, h=224, w=224, block=2, layout="NHWC").output.shape
        (1, 112, 112, 12)
    """
    return made(SPACE_TO_DEPTH, locals())


def strided_slice(
    *,
    x: Sequence[int],
    begin: Sequence[int | None] = (),
    end: Sequence[int | None] = (),
    strides: Sequence[int] = (),
    axes: Sequence[int] = (),
    mode: str = "end",
    **options: Unpack[SliceOptions],
) -> Workload[StridedSliceParams]:
    """A slice of x: y[i, j, ...] = x[begin[0] + i * strides[0], begin[1] + j * strides[1], ...].

    Lists may be shorter than the rank of x; the remaining axes are taken whole.

    Args:
        x: extents of x.
        begin, end: positions along `axes`, as in a slice of Python: negative ones count from the end, None is the end of the
            dimension, and what lies beyond the dimension is cut.
        strides: distances; negative ones go backwards; default 1.
        axes: the dimensions that the lists are about; default 0, 1, ...
        mode: "end", or "size" if `end` holds the number of elements (-1: all that follow).
        dtype, slice_of: as in `transpose`.

    Returns:
        A workload; its `output.shape` may have extents of 0.

    Raises:
        WorkloadError: a stride is 0, an axis does not exist or is named twice, or lists have wrong lengths.

    Examples:
        >>> strided_slice(x=(1, 224, 224, 3), begin=(0, 20, 20, 0), end=(1, 140, 140, 3)).output.shape
        (1, 120, 120, 3)
        >>> strided_slice(x=(10, 8), begin=(-1,), end=(None,), strides=(-3,), axes=(1,)).output.shape
        (10, 3)
    """
    steps = [*strides, *[1] * max(len(begin), len(end))]
    first = [_position(at, 0 if step > 0 else MAX_INT) for at, step in zip(begin, steps)]
    last = [_position(at, MAX_INT if step > 0 else -MAX_INT - 1) for at, step in zip(end, steps)]
    given = {"x": x, "begin": first, "end": last, "strides": strides, "axes": axes, "mode": mode}
    return made(STRIDED_SLICE, {**given, **options})


def dyn_strided_slice(
    *,
    x: Sequence[int],
    entries: int | None = None,
    axes: Sequence[int] = (),
    mode: str = "end",
    strided: bool | None = None,
    bound: Sequence[int] | None = None,
    dynamic: bool = False,
    dtype: str = "float16",
    index_dtype: str = "int64",
) -> Workload[DynStridedSliceParams]:
    """A slice of x whose begin, end and strides are arrays on the device; see `DynStridedSlice`.

    Args:
        x: extents of x; with `dynamic` upper bounds of them.
        entries: length of begin, end and strides; default: one for each of axes, or for each dimension.
        bound: upper bounds of y's extents; default: x.

    Returns:
        A workload with the arguments x, x_extents (if dynamic), begin, end and strides (if strided), and the outputs y and
        y_extents.

    Raises:
        WorkloadError: lists have wrong lengths, an axis does not exist or is named twice, or mode size has strides.

    Examples:
        >>> [argument.name for argument in dyn_strided_slice(x=(64, 1024)).signature]
        ['x', 'begin', 'end', 'strides']
    """
    return made(DYN_STRIDED_SLICE, locals())


def concat(*, x: Sequence[Sequence[int]], axis: int, **options: Unpack[SliceOptions]) -> Workload[ConcatParams]:
    """A concatenation of x0, x1, ... along one dimension.

    Args:
        x: extents of each argument, up to 32 of them. They differ along `axis` only.
        axis: the dimension; negative ones count from the last.
        dtype, slice_of: as in `transpose`.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> concat(x=[(1, 64, 28, 28), (1, 32, 28, 28)], axis=1).output.shape
        (1, 96, 28, 28)
    """
    return made(CONCAT, locals())


def pad(
    *,
    x: Sequence[int],
    before: Sequence[int] = (),
    after: Sequence[int] = (),
    axes: Sequence[int] = (),
    value: float = 0,
    **options: Unpack[SliceOptions],
) -> Workload[PadParams]:
    """A padding of x with a constant. Lists may be shorter than the rank of x; the remaining axes are not padded.

    Args:
        x: extents of x.
        before, after: new elements before and after x along `axes`; negative numbers cut so many elements of x.
        axes: the dimensions that the lists are about; default 0, 1, ...
        value: of the new elements, rounded to the dtype.
        dtype, slice_of: as in `transpose`.

    Returns:
        A workload; its `output.shape` may have extents of 0 if x is cut.

    Raises:
        WorkloadError: an axis does not exist or is named twice, more is cut than x has, or the dtype does not hold `value`.

    Examples:
        >>> pad(x=(1, 56, 56, 64), before=(1, 1), after=(2, 2), axes=(1, 2)).output.shape
        (1, 59, 59, 64)
    """
    return made(PAD, locals())


def layout_transform(
    *,
    h: int,
    w: int,
    layout: str,
    to: str,
    n: int = 0,
    c: int = 0,
    o: int = 0,
    i: int = 0,
    dtype: str = "float16",
) -> Workload[LayoutTransformParams]:
    """A change of layout: y holds the elements of x, with zeros in the padding of its blocks.

    Args:
        h, w: height and width.
        layout: of x. Images have the axes N, C, H, W (NCHW, NHWC, NCHW32c ...), filters O, I, H, W (OIHW, OHWI, OIHW32o32i).
        to: layout of y, over the same axes. Blocks of one axis must nest: 4 and 32, but not 4 and 6.
        n, c: batch and channels of images.
        o, i: output and input channels of filters.
        dtype: any of 1, 2 or 4 bytes. The bits of the elements do not change.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> layout_transform(n=1, c=48, h=7, w=7, layout="NCHW", to="NCHW32c", dtype="int8").output.shape
        (1, 2, 7, 7, 32)
        >>> layout_transform(o=64, i=3, h=7, w=7, layout="OIHW", to="OHWI").output.shape
        (64, 7, 7, 3)
    """
    return made(LAYOUT_TRANSFORM, locals())


def fill_margin(
    *, x: Sequence[int], margin: Sequence[int], value: str = "zero", dtype: str = "float16"
) -> Workload[FillMarginParams]:
    """x, with one number in the elements just beyond its extents in use.

    Args:
        x: bounds of the extents of x.
        margin: how many elements to fill along each axis, beyond its extent in use; at most those of the bound.
        value: "zero", or "lowest": the lowest finite number of the format.
        dtype: of x and y: any format.

    Returns:
        A workload with the arguments x and x_extents (int64, one for each axis) and the output y, which may be x's memory.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> fill_margin(x=(4, 800, 800, 64), margin=(0, 1, 1, 0)).label
        'fill_margin 4x800x800x64 margin 0,1,1,0 f16'
    """
    return made(FILL_MARGIN, locals())


def _position(at: int | None, default: int) -> int:
    """A position that no extent reaches, such as ONNX's 2**63 - 1 for "to the end", becomes one of 32 bits."""
    return default if at is None else min(max(at, -MAX_INT - 1), MAX_INT)
