"""pool2d: the largest or the average pixel of a window that slides over an image, one channel at a time.

    max      y[n,p,q,c] = max over i,l of x[n,h,w,c]
    average  y[n,p,q,c] = (sum over i,l of x[n,h,w,c]) / count

Here h = p * stride - top + i * dilation and w = q * stride - left + l * dilation, as in `schedsearch.ops.window`. Pixels
outside of the image are left out. `count` is the number of pixels inside of the image, or with `count_include_pad` inside of
the image with its padding. With `ceil_mode` the last window along an axis may reach beyond the padding, if it starts before
the image's end. These are the meanings of ONNX's MaxPool and AveragePool (opset 22) and of PyTorch.

A global pool is the case r = h, s = w.

Kernels take one array x and write y, in one format and layout. Sums are float32 and rounded once. The largest of numbers
with a NaN among them is NaN. Averages of int8 and uint8 are rounded half to even; scale and zero point of y are those of x.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from schedsearch.errors import Problem
from schedsearch.ops.base import Op
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.images import IMAGE_LAYOUT, IMAGE_SIZES, ImageParams, image, image_layout_problems, planes_of
from schedsearch.ops.params import Parameter, Params, declared, judge, one_of
from schedsearch.ops.slices import SLICE_OF, slice_problems, slice_words, sliced, without_own_shape
from schedsearch.ops.specs import ArgSpec, Work
from schedsearch.ops.window import (
    WINDOW_DEFAULTS,
    WINDOW_PARAMETERS,
    Padding,
    Pair,
    WindowParams,
    counts_of,
    output_hw,
    reach,
    spread_window,
    window_problems,
    window_words,
)
from schedsearch.typed import GivenParams, ParamsByName

MODES = ("max", "average")
DTYPES = ("float16", "bfloat16", "float32", "int8", "uint8")
MOST_EXACT = (
    2**18
)  # numbers up to 8: their sum is exact in float32, and roundings of its quotient are less than a number's part
MOST_AVERAGED = 2**16 - 1  # numbers of 8 bits: their sum and its quotient are then exact enough in float32


@dataclass(frozen=True, eq=False, kw_only=True)
class Pool2dParams(ImageParams, WindowParams):
    """See `pool2d`."""

    n: int = declared(IMAGE_SIZES["n"])
    c: int = declared(IMAGE_SIZES["c"])
    h: int = declared(IMAGE_SIZES["h"])
    w: int = declared(IMAGE_SIZES["w"])
    r: int = declared(Parameter.count("kernel height"))
    s: int = declared(Parameter.count("kernel width"))
    mode: str = declared(Parameter.choice("max: the largest pixel; average: their mean; default max", MODES))
    stride: Pair = declared(WINDOW_PARAMETERS["stride"])
    padding: Padding = declared(WINDOW_PARAMETERS["padding"])
    dilation: Pair = declared(WINDOW_PARAMETERS["dilation"])
    ceil_mode: bool = declared(
        Parameter(
            "the last window along an axis may reach beyond the padding; default false",
            {"type": "boolean", "default": False},
        )
    )
    count_include_pad: bool = declared(
        Parameter(
            "an average divides by the number of pixels with those of the padding; default false",
            {"type": "boolean", "default": False},
        )
    )
    dtype: str = declared(Parameter.choice("of x and y; default float16", DTYPES))
    layout: str = declared(IMAGE_LAYOUT)
    slice_of: tuple[int, ...] = declared(SLICE_OF)


_PARAMETERS = Pool2dParams.parameters()
_SIZES = {name: parameter for name, parameter in _PARAMETERS.items() if parameter.size}


class Pool2d(Op[Pool2dParams]):
    params_type: ClassVar[type[Params]] = Pool2dParams
    name: ClassVar[str] = "pool2d"
    reference: ClassVar[str] = "schedsearch.templates.pool2d.reference:Pool2dReference"
    constructor: ClassVar[str] = "schedsearch:pool2d"

    def defaults(self, params: GivenParams) -> ParamsByName:
        return {
            "mode": "max",
            **WINDOW_DEFAULTS,
            "ceil_mode": False,
            "count_include_pad": False,
            "dtype": "float16",
            "layout": "NHWC",
            "slice_of": (),
        }

    def normalise(self, params: Mapping[str, object]) -> tuple[ParamsByName, list[Problem]]:
        """Equal pools have equal parameters: `ceil_mode` and `count_include_pad` are false where they change nothing."""
        params, out, problems = self.completed(params)
        problems += counts_of(out, tuple(_SIZES)) + spread_window(out)
        for key in ("mode", "dtype"):
            problems += one_of(key, out[key], _PARAMETERS[key].schema["enum"])
        for key in ("ceil_mode", "count_include_pad", "slice_of"):
            if complaint := judge(out[key], _PARAMETERS[key].schema):
                problems.append(Problem(key, f"{key} {complaint}"))
        problems += image_layout_problems(out["layout"])
        if not problems:
            p = self.typed(out)
            problems = window_problems(p) or list(self.problems(p))
        if not problems:
            y = self.outputs(p.replace(slice_of=()))[0]
            problems = slice_problems(y, out["slice_of"])
            out["slice_of"] = without_own_shape(y, out["slice_of"])
        if not problems:
            out["ceil_mode"] = p.ceil_mode and pooled_hw(p) != output_hw(p)
            out["count_include_pad"] = p.count_include_pad and any(p.padding)
        return out, problems

    def problems(self, params: Pool2dParams) -> Iterable[Problem]:
        top, left, bottom, right = params.padding
        for axis, size, kernel, padding, dilation in (
            ("h", params.h, params.r, (top, bottom), params.dilation[0]),
            ("w", params.w, params.s, (left, right), params.dilation[1]),
        ):
            extent = (kernel - 1) * dilation + 1
            if max(padding) >= extent or (any(padding) and dilation > size):
                message = (
                    f"padding {padding[0]}+{padding[1]} along {axis} makes windows without a pixel (kernel {kernel}, "
                    f"dilation {dilation}, {axis}={size}); allowed: less than {extent}, and a dilation of at most {size}"
                )
                yield Problem("padding", message)
        if params.count_include_pad and params.mode == "max":
            yield Problem("count_include_pad", "count_include_pad belongs to mode average, but mode is max; leave it out")
        taps = params.r * params.s
        if params.mode == "average" and not dtype_of(params.dtype).is_float and taps > MOST_AVERAGED:
            yield Problem("r", f"an average of {params.dtype} has {taps} pixels; allowed: up to {MOST_AVERAGED}")

    def arguments(self, params: Pool2dParams) -> tuple[ArgSpec, ...]:
        return (image("x", params, params.h, params.w),)

    def outputs(self, params: Pool2dParams) -> tuple[ArgSpec, ...]:
        return (sliced(image("y", params, *pooled_hw(params)), params),)

    def equality(self, params: Pool2dParams) -> Literal["exact", "rounded"]:
        rounded = params.mode == "average" and dtype_of(params.dtype).is_float
        return "rounded" if rounded else "exact"

    def exact_step(self, params: Pool2dParams) -> float | None:
        """The sums of an average are those of small integers, and divided once."""
        taps = params.r * params.s
        rounded = params.mode == "average" and dtype_of(params.dtype).is_float
        return 1 / taps if rounded and taps <= MOST_EXACT else None

    def work(self, params: Pool2dParams) -> Work:
        """An average adds up the pixels of a window and divides once."""
        enlarged = params.replace(padding=reached_padding(params))
        rows, columns = (reach(enlarged, axis) for axis in (0, 1))
        planes, channels = planes_of(params)
        read = planes * channels * rows.inputs * columns.inputs * dtype_of(params.dtype).nbytes
        reduction = params.r * params.s if params.mode == "average" else 1
        return Work(0, super().work(params).nbytes, reduction, least_bytes=read + self.outputs(params)[0].nbytes)

    def label(self, params: Pool2dParams) -> str:
        p = params
        whole = (p.r, p.s) == (p.h, p.w) and not any(p.padding)
        words = [f"pool2d {p.n}x{p.h}x{p.w}x{p.c}", p.mode, "global" if whole else f"{p.r}x{p.s}"]
        words += window_words(p) + [name for name in ("ceil_mode", "count_include_pad") if p[name]]
        return " ".join([*words, dtype_of(p.dtype).short, p.layout, *slice_words(p)])


POOL2D = Pool2d()


def pooled_hw(p: Pool2dParams) -> tuple[int, int]:
    """Height and width of y."""
    if not p.ceil_mode:
        return output_hw(p)
    top, left, bottom, right = p.padding
    found = []
    for size, kernel, stride, dilation, before, after in (
        (p.h, p.r, p.stride[0], p.dilation[0], top, bottom),
        (p.w, p.s, p.stride[1], p.dilation[1], left, right),
    ):
        count = -(-(size + before + after - (kernel - 1) * dilation - 1) // stride) + 1
        found.append(count - ((count - 1) * stride >= size + before))  # a window must start before the image's end
    return found[0], found[1]


def reached_padding(p: Pool2dParams) -> tuple[int, int, int, int]:
    """(top, left, bottom, right) so large that all windows lie inside of the padded image, with ceil_mode too."""
    top, left, bottom, right = p.padding
    height, width = pooled_hw(p)
    reached_h = (height - 1) * p.stride[0] + (p.r - 1) * p.dilation[0] + 1
    reached_w = (width - 1) * p.stride[1] + (p.s - 1) * p.dilation[1] + 1
    return top, left, max(bottom, reached_h - top - p.h), max(right, reached_w - left - p.w)
