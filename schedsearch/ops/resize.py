"""resize: an image of another height and width, by its nearest pixels or linearly between them, as ONNX's Resize.

Position p of y lies at a coordinate of x, along h and w alike; s is the scale, y's size over x's unless it is given:

    half_pixel          (p + 0.5) / s - 0.5
    pytorch_half_pixel  the same; 0 if y has one position
    asymmetric          p / s
    align_corners       p * (size of x - 1) / (size of y - 1); 0 if y has one position

`nearest` takes the pixel that `rounding` chooses. `linear` takes the two pixels around the coordinate, along h and w,
weighted by how near they are. Beyond the image there are copies of its border. Coordinates are exact fractions, so a kernel
never takes another pixel because of a rounding error. Linear kernels compute in float32 and round once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

from schedsearch.errors import Problem
from schedsearch.ops.base import Op
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.images import IMAGE_LAYOUT, IMAGE_SIZES, ImageParams, image, image_layout_problems, planes_of
from schedsearch.ops.params import Parameter, Params, declared, is_int, plain
from schedsearch.ops.slices import SLICE_OF, slice_problems, slice_words, sliced, without_own_shape
from schedsearch.ops.specs import ArgSpec, Work
from schedsearch.typed import GivenParams, ParamsByName

MODES = ("nearest", "linear")
COORDINATES = ("half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners")
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
DTYPES = ("float16", "bfloat16", "float32", "int8", "uint8")
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-16, 2.0**16
LARGEST_PRODUCT = 2**62  # of kernels that compute coordinates


class ResizeGeometry(ImageParams):
    oh: int
    ow: int
    mode: str
    coordinates: str
    rounding: str
    scale: tuple[float, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class ResizeParams(ResizeGeometry):
    """See `resize`."""

    n: int = declared(IMAGE_SIZES["n"])
    c: int = declared(IMAGE_SIZES["c"])
    h: int = declared(IMAGE_SIZES["h"])
    w: int = declared(IMAGE_SIZES["w"])
    oh: int = declared(Parameter.count("output height"))
    ow: int = declared(Parameter.count("output width"))
    mode: str = declared(
        Parameter.choice("nearest: copies pixels; linear: between two pixels along each axis; default nearest", MODES)
    )
    coordinates: str = declared(Parameter.choice("where a position of y lies in x; default half_pixel", COORDINATES))
    rounding: str = declared(Parameter.choice("which pixel is the nearest; default round_prefer_floor", ROUNDINGS))
    scale: tuple[float, ...] = declared(
        Parameter(
            "[vertical, horizontal], in float32; default: y's height and width over x's",
            {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
        )
    )
    dtype: str = declared(Parameter.choice("of x and y; int8 and uint8 for nearest only; default float16", DTYPES))
    layout: str = declared(IMAGE_LAYOUT)
    slice_of: tuple[int, ...] = declared(SLICE_OF)


_PARAMETERS = ResizeParams.parameters()


class Resize(Op[ResizeParams]):
    params_type: ClassVar[type[Params]] = ResizeParams
    name: ClassVar[str] = "resize"
    reference: ClassVar[str] = "schedsearch.templates.resize.reference:ResizeReference"
    constructor: ClassVar[str] = "schedsearch:resize"

    def defaults(self, params: GivenParams) -> GivenParams:
        return {**super().defaults(params), "scale": ()}

    def normalise(self, params: Mapping[str, object]) -> tuple[ParamsByName, list[Problem]]:
        """A scale that is the default, or that the coordinates do not depend on, is written as ()."""
        params = {key: plain(value) for key, value in params.items()}
        if params.get("scale") in ((), [], None):
            params.pop("scale", None)
        found, problems = super().normalise(params)
        if not problems and found["scale"]:
            scale = tuple(as_float32(each) for each in found["scale"])
            sizes = ((found["oh"], found["h"]), (found["ow"], found["w"]))
            same = all(each == as_float32(out / size) for each, (out, size) in zip(scale, sizes))
            found["scale"] = () if same or found["coordinates"] == "align_corners" else scale
        if not problems:
            y = self.outputs(self.typed(found | {"slice_of": ()}))[0]
            problems = slice_problems(y, found["slice_of"])
            found["slice_of"] = without_own_shape(y, found["slice_of"])
        if not problems and found["mode"] == "linear":
            found["rounding"] = ROUNDINGS[0]
        return found, problems

    def problems(self, params: ResizeParams) -> Iterable[Problem]:
        found = list(own_problems(params))
        yield from found
        if any(problem.key == "scale" for problem in found):
            return
        for axis, out in ((0, "oh"), (1, "ow")):
            line = nearest(params, axis)
            if line.factor * params[out] + abs(line.shift) + line.divisor >= LARGEST_PRODUCT:
                yield Problem(
                    out, f"{out} {params[out]} is too large for such a scale; products of both must stay below 2**62"
                )

    def arguments(self, params: ResizeParams) -> tuple[ArgSpec, ...]:
        return (image("x", params, params.h, params.w),)

    def outputs(self, params: ResizeParams) -> tuple[ArgSpec, ...]:
        return (sliced(image("y", params, params.oh, params.ow), params),)

    def equality(self, params: ResizeParams) -> Literal["exact", "rounded"]:
        return "exact" if params.mode == "nearest" else "rounded"

    def work(self, params: ResizeParams) -> Work:
        """Pixels of x that no position of y is near need not be read."""
        return Work(
            0,
            super().work(params).nbytes,
            4 if params.mode == "linear" else 1,
            least_bytes=self.outputs(params)[0].nbytes,
        )

    def label(self, params: ResizeParams) -> str:
        p = params
        words = [f"resize {p.n}x{p.h}x{p.w}x{p.c} to {p.oh}x{p.ow}", p.mode]
        words += [p[name] for name in ("coordinates", "rounding") if p[name] != _PARAMETERS[name].schema["default"]]
        words += ["scale " + "x".join(f"{each:g}" for each in p.scale)] if p.scale else []
        return " ".join([*words, dtype_of(p.dtype).short, p.layout, *slice_words(p)])


RESIZE = Resize()


def own_problems(params: ResizeGeometry) -> Iterable[Problem]:
    """Mistakes in layout, dtype and scale."""
    yield from image_layout_problems(params.layout)
    if params.mode == "linear" and not dtype_of(params.dtype).is_float:
        allowed = ", ".join(DTYPES[:3])
        yield Problem("dtype", f"mode linear does not take {params.dtype}; allowed: {allowed}, or mode nearest")
    for given in params.scale:
        if not (_SMALLEST_SCALE <= given <= _LARGEST_SCALE):
            yield Problem("scale", f"scale has {given}; allowed: {_SMALLEST_SCALE:g} to {_LARGEST_SCALE:g}")
            return


@dataclass(frozen=True)
class Line:
    """(factor * p + shift) / divisor, exactly; integers."""

    factor: int
    shift: int
    divisor: int


def coordinate(p: ResizeParams, axis: int) -> Line:
    """Where position p of y lies in x, along h (axis 0) or w (axis 1)."""
    size, out = ((p.h, p.oh), (p.w, p.ow))[axis]
    if out == 1 and p.coordinates in ("align_corners", "pytorch_half_pixel"):
        return Line(0, 0, 1)
    if p.coordinates == "align_corners":
        return Line(size - 1, 0, out - 1)
    scale = Fraction(as_float32(p.scale[axis])) if p.scale else Fraction(out, size)
    above, below = scale.numerator, scale.denominator
    if p.coordinates == "asymmetric":
        return Line(below, 0, above)
    return Line(2 * below, below - above, 2 * above)


def nearest(p: ResizeParams, axis: int) -> Line:
    """The line whose floor is the nearest pixel, before it is limited to the image."""
    line = coordinate(p, axis)
    factor, shift, divisor = line.factor, line.shift, line.divisor
    if p.rounding == "floor":
        return line
    if p.rounding == "ceil":
        return Line(factor, shift + divisor - 1, divisor)
    half = divisor - 1 if p.rounding == "round_prefer_floor" else divisor
    return Line(2 * factor, 2 * shift + half, 2 * divisor)


def positions(p: ResizeGeometry) -> tuple[int, int, int, int]:
    """(planes, height, width, channels) of y."""
    planes, channels = planes_of(p)
    return planes, p.oh, p.ow, channels


def as_float32(value: float) -> float:
    """The nearest float32."""
    import numpy as np

    return float(value) if is_int(value) and abs(value) < 2**24 else float(np.float32(value))
