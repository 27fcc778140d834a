"""Operators on images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from schedsearch.constructors import ImageOptions, ResizeOptions, WindowOptions, made
from schedsearch.ops.dyn_resize import DYN_RESIZE, DynResizeParams
from schedsearch.ops.nms import LOWEST, NMS, NmsParams
from schedsearch.ops.pool2d import POOL2D, Pool2dParams
from schedsearch.ops.resize import RESIZE, ResizeParams
from schedsearch.ops.roi_align import ROI_ALIGN, RoiAlignParams
from schedsearch.ops.squeeze_excite import SQUEEZE_EXCITE, SqueezeExciteParams
from schedsearch.workload import Workload


class _PoolOptions(WindowOptions, ImageOptions, total=False):
    ceil_mode: bool
    count_include_pad: bool


def pool2d(
    *, n: int, c: int, h: int, w: int, r: int, s: int, mode: str = "max", **options: Unpack[_PoolOptions]
) -> Workload[Pool2dParams]:
    """A pool over windows of an image; a global pool is the case r = h, s = w.

    Args:
        n, c, h, w: batch, channels, height and width of x.
        r, s: kernel height and width.
        mode: "max" or "average".
        stride, dilation: one number, or (vertical, horizontal); default: 1.
        padding: one number, (vertical, horizontal), or (top, left, bottom, right); less than the kernel; default: 0.
        ceil_mode: the last window along an axis may reach beyond the padding; default: false.
        count_include_pad: an average divides by the number of pixels with those of the padding; default: false.
        dtype: of x and y: float16, the default, bfloat16, float32, int8 or uint8.
        layout: NHWC, the default, NCHW or NCHW[x]c of x and y.
        slice_of: extents of a larger array of which y is a slice along one axis. Kernels then take a slice of it as `out`.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> pool2d(n=32, c=64, h=112, w=112, r=3, s=3, stride=2, padding=1).output.shape
        (32, 56, 56, 64)
        >>> pool2d(n=1, c=2048, h=7, w=7, r=7, s=7, mode="average", layout="NCHW").output.shape
        (1, 2048, 1, 1)
    """
    return made(POOL2D, locals())


def resize(
    *, n: int, c: int, h: int, w: int, oh: int, ow: int, slice_of: Sequence[int] = (), **options: Unpack[ResizeOptions]
) -> Workload[ResizeParams]:
    """An image of another height and width.

    Args:
        n, c, h, w: batch, channels, height and width of x.
        oh, ow: height and width of y.
        mode: "nearest", the default, or "linear".
        coordinates: "half_pixel", the default, "pytorch_half_pixel", "asymmetric" or "align_corners", as ONNX defines them.
        rounding: of mode nearest: "round_prefer_floor", the default, "round_prefer_ceil", "floor" or "ceil".
        scale: (vertical, horizontal) if it is not exactly y's size over x's; ONNX's `scales`.
        dtype: of x and y: float16, the default, bfloat16 or float32; nearest also int8 or uint8.
        layout: NHWC, the default, NCHW or NCHW[x]c of x and y.
        slice_of: extents of a larger array of which y is a slice along one axis. Kernels then take a slice of it as `out`.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> resize(n=1, c=128, h=180, w=320, oh=360, ow=640, mode="linear").output.shape
        (1, 360, 640, 128)
    """
    return made(RESIZE, locals())


def dyn_resize(
    *, n: int, c: int, h: int, w: int, oh: int, ow: int, **options: Unpack[ResizeOptions]
) -> Workload[DynResizeParams]:
    """An image of another height and width, where both sizes are known at run time only.

    Args:
        n, c, h, w: upper bounds of batch, height and width of x, and its channels.
        oh, ow: upper bounds of height and width of y.
        scale: (vertical, horizontal): y has the height and width of x times these, rounded down. Default: they are in the
            argument `sizes`.
        mode, coordinates, rounding, dtype, layout: as in `resize`.

    Returns:
        A workload with the arguments x, x_extents (int64, one for each axis of x) and, without a scale, sizes (int64[2]),
        and the outputs y and y_extents (int64).

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> workload = dyn_resize(n=1, c=128, h=100, w=100, oh=200, ow=200, mode="linear")
        >>> [argument.name for argument in workload.signature]
        ['x', 'x_extents', 'sizes']
    """
    return made(DYN_RESIZE, locals())


def roi_align(
    *,
    n: int,
    c: int,
    h: int,
    w: int,
    rois: int,
    oh: int,
    ow: int,
    mode: str = "average",
    coordinates: str = "half_pixel",
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
    dtype: str = "float16",
    rois_dtype: str = "float32",
    layout: str = "NHWC",
    dynamic: bool = False,
) -> Workload[RoiAlignParams]:
    """Parts of images, each as oh x ow pixels.

    Its arguments are x, rois (rois, 4) with (x1, y1, x2, y2) in each row, and batch_indices, int64 (rois,).

    Args:
        n, c, h, w: batch, channels, height and width of x.
        rois: how many regions.
        oh, ow: height and width of y.
        mode: "average" or "max".
        coordinates: "half_pixel" or "output_half_pixel".
        sampling_ratio: samples along each side of a bin; 0: as many as it has pixels.
        spatial_scale: pixels of x for a unit of rois.
        dtype: of x and y: float16, bfloat16 or float32.
        rois_dtype: of rois.
        layout: NHWC or NCHW.
        dynamic: a last argument, `rois_extents`, says how many regions are in use, and a second output, `y_extents`, how
            much of y.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> roi_align(n=1, c=256, h=200, w=304, rois=1000, oh=7, ow=7, spatial_scale=0.25).output.shape
        (1000, 7, 7, 256)
    """
    return made(ROI_ALIGN, locals())


def nms(
    *,
    n: int,
    classes: int,
    boxes: int,
    max_output: int,
    iou_threshold: float = 0.0,
    score_threshold: float = LOWEST,
    center_point_box: bool = False,
) -> Workload[NmsParams]:
    """Non-maximum suppression for each image and class: y, int64 (kept boxes at most, 3), and its extents in use.

    Its arguments are boxes, float32 (n, boxes, 4), and scores, float32 (n, classes, boxes).

    Args:
        n, classes, boxes: how many.
        max_output: boxes to keep of an image and class, at most.
        iou_threshold: boxes that overlap more with a kept one are dropped.
        score_threshold: boxes must score more.
        center_point_box: boxes are (x, y, width, height), not (y1, x1, y2, x2).

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> nms(n=1, classes=80, boxes=1000, max_output=100, iou_threshold=0.5).outputs[0].shape
        (8000, 3)
    """
    return made(NMS, locals())


def squeeze_excite(
    *,
    n: int,
    c: int,
    h: int,
    w: int,
    squeezed: int,
    activation: str = "relu",
    gate: str = "sigmoid",
    alpha: float = 1 / 6,
    beta: float = 0.5,
    dtype: str = "float16",
    layout: str = "NHWC",
) -> Workload[SqueezeExciteParams]:
    """Channels of images times gates, which follow from the means of all channels by two matrix products.

    Its arguments are x, reduce (squeezed, c), reduce_bias (squeezed), expand (squeezed, c) and expand_bias (c); biases are
    float32.

    Args:
        n, c, h, w: batch, channels, height and width of x and y.
        squeezed: channels between the two products.
        activation: between the products: "relu", "silu" or "hard_swish".
        gate: behind the products: "sigmoid" or "hard_sigmoid".
        alpha, beta: factor and addend of hard_sigmoid.
        dtype: of x, y and the weights: float16, the default, bfloat16 or float32.
        layout: NHWC, the default, or NCHW of x and y. Kernels take NHWC.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> workload = squeeze_excite(n=1, c=960, h=7, w=7, squeezed=240, gate="hard_sigmoid")
        >>> [argument.shape for argument in workload.signature]
        [(1, 7, 7, 960), (240, 960), (240,), (240, 960), (960,)]
    """
    return made(SQUEEZE_EXCITE, locals())
