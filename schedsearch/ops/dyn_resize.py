"""dyn_resize: resize of an image whose batch, height and width are known only when it runs.

y has the height and width that the argument `sizes` holds, or those of x times `scale`, rounded down: ONNX's Resize with
sizes or with scales. Where a position of y lies in x follows from the sizes of the run, as `ops.resize` says; arithmetic is
exact, too. x and y have the strides of their bounds; see `ops.bounded`.

Where sizes are negative or exceed the bound, or x has no pixels to make some of, all extents of y become 0 and nothing is
written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Literal

from schedsearch.errors import Problem
from schedsearch.ops.base import Op
from schedsearch.ops.bounded import bounded, extents_of
from schedsearch.ops.checks import Domain
from schedsearch.ops.data_movement import whole_numbers
from schedsearch.ops.dependence import Dependence, ShapeFunction
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.images import image
from schedsearch.ops.layout import Layout
from schedsearch.ops.params import MAX_INT, Parameter, Params, declared, plain
from schedsearch.ops.resize import LARGEST_PRODUCT, RESIZE, ROUNDINGS, ResizeGeometry, as_float32, own_problems
from schedsearch.ops.specs import ArgSpec, Work
from schedsearch.typed import GivenParams, ParamsByName

_SIZES = {
    "n": Parameter.count("bound of the batch"),
    "c": Parameter.count("channels"),
    "h": Parameter.count("bound of x's height"),
    "w": Parameter.count("bound of x's width"),
    "oh": Parameter.count("bound of y's height"),
    "ow": Parameter.count("bound of y's width"),
}
_SCALE = "[vertical, horizontal], in float32; default: the argument `sizes` holds y's height and width"
_SHARED = RESIZE.parameters()


@dataclass(frozen=True, eq=False, kw_only=True)
class DynResizeParams(ResizeGeometry):
    """See `dyn_resize`."""

    n: int = declared(_SIZES["n"])
    c: int = declared(_SIZES["c"])
    h: int = declared(_SIZES["h"])
    w: int = declared(_SIZES["w"])
    oh: int = declared(_SIZES["oh"])
    ow: int = declared(_SIZES["ow"])
    mode: str = declared(_SHARED["mode"])
    coordinates: str = declared(_SHARED["coordinates"])
    rounding: str = declared(_SHARED["rounding"])
    scale: tuple[float, ...] = declared(Parameter(_SCALE, _SHARED["scale"].schema))
    dtype: str = declared(_SHARED["dtype"])
    layout: str = declared(_SHARED["layout"])


_PARAMETERS = DynResizeParams.parameters()


class DynResize(Op[DynResizeParams]):
    params_type: ClassVar[type[Params]] = DynResizeParams
    name: ClassVar[str] = "dyn_resize"
    reference: ClassVar[str] = "schedsearch.templates.resize.dyn_reference:DynResizeReference"
    constructor: ClassVar[str] = "schedsearch:dyn_resize"

    def defaults(self, params: GivenParams) -> GivenParams:
        return {**super().defaults(params), "scale": ()}

    def normalise(self, params: Mapping[str, object]) -> tuple[ParamsByName, list[Problem]]:
        """Scales are float32. Linear kernels have no rounding."""
        params = {key: plain(value) for key, value in params.items()}
        if params.get("scale") in ((), [], None):
            params.pop("scale", None)
        found, problems = super().normalise(params)
        if not problems:
            found["scale"] = tuple(as_float32(each) for each in found["scale"])
        if not problems and found["mode"] == "linear":
            found["rounding"] = ROUNDINGS[0]
        return found, problems

    def problems(self, params: DynResizeParams) -> Iterable[Problem]:
        found = list(own_problems(params))
        if found:
            return found
        for axis, out in ((0, "oh"), (1, "ow")):
            if largest_numerator(params, axis) >= LARGEST_PRODUCT:
                message = f"{out} {params[out]} is too large for such a scale; products of both must stay below 2**62"
                found.append(Problem(out, message))
        for name, spec in (("h", self._x(params)), ("oh", self._y(params))):
            if spec.size > MAX_INT:
                found.append(Problem(name, f"{spec.name} has up to {spec.size} elements; allowed: up to {MAX_INT}"))
        return found

    def _x(self, params: DynResizeParams) -> ArgSpec:
        return image("x", params, params.h, params.w)

    def _y(self, params: DynResizeParams) -> ArgSpec:
        return image("y", params, params.oh, params.ow)

    def arguments(self, params: DynResizeParams) -> tuple[ArgSpec, ...]:
        x, name = self._x(params), extents_of("x")
        extents = ArgSpec(name, "A", (len(x.shape),), "int64")
        sizes = ArgSpec("sizes", "A", (2,), "int64", role="index", below=MAX_INT)
        return (replace(x, extents=name), extents, *(() if params.scale else (sizes,)))

    def outputs(self, params: DynResizeParams) -> tuple[ArgSpec, ...]:
        return bounded(self._y(params))

    def shape_functions(self, params: DynResizeParams) -> Mapping[str, ShapeFunction]:
        vertical, horizontal = height_and_width(params)
        if not params.scale:
            return {"y": _of_sizes(vertical, horizontal)}
        scales = {vertical: given_scale(params, 0), horizontal: given_scale(params, 1)}
        by_axis = [scales.get(axis) or Fraction(1) for axis in range(len(self._y(params).shape))]
        return {"y": _of_scale(tuple(each.numerator for each in by_axis), tuple(each.denominator for each in by_axis))}

    def equality(self, params: DynResizeParams) -> Literal["exact", "rounded"]:
        return "exact" if params.mode == "nearest" else "rounded"

    def check_inputs(self, params: DynResizeParams) -> Mapping[str, Domain]:
        """The largest sizes that the bounds allow; then one less of each."""
        x, sides = self._x(params), dict(zip(height_and_width(params), range(2)))
        most = list(x.shape)
        for place, axis in sides.items():
            if scale := given_scale(params, axis):
                limit = (params.oh, params.ow)[axis]
                most[place] = min(most[place], ((limit + 1) * scale.denominator - 1) // scale.numerator)
        less = tuple(max(1, n - 1) if place in (0, *sides) else n for place, n in enumerate(most))
        sizes = (params.oh, params.ow)
        found = {
            "x": whole_numbers(params.dtype) if params.mode == "nearest" else Domain(range(-8, 9)),
            extents_of("x"): Domain(tuple(most), ordered=True, second=Domain(less, ordered=True)),
        }
        if not params.scale:
            fewer = Domain(tuple(max(1, n - 1) for n in sizes), ordered=True)
            found["sizes"] = Domain(sizes, ordered=True, second=fewer)
        return found

    def timing_inputs(self, params: DynResizeParams) -> Mapping[str, Domain]:
        """As much of the bounds as can be in use."""
        return {name: domain for name, domain in self.check_inputs(params).items() if domain.ordered}

    def work(self, params: DynResizeParams) -> Work:
        return Work(0, super().work(params).nbytes, 4 if params.mode == "linear" else 1, least_bytes=0)

    def label(self, params: DynResizeParams) -> str:
        p = params
        words = [f"{self.name} {p.n}x{p.h}x{p.w}x{p.c} to {p.oh}x{p.ow}", p.mode]
        words += [p[name] for name in ("coordinates", "rounding") if p[name] != _PARAMETERS[name].schema["default"]]
        words += ["scale " + "x".join(f"{each:g}" for each in p.scale)] if p.scale else []
        return " ".join([*words, dtype_of(p.dtype).short, p.layout])


DYN_RESIZE = DynResize()


def height_and_width(params: DynResizeParams) -> tuple[int, int]:
    """The axes of both in x and y."""
    axes = Layout.parse(params.layout).axes
    return axes.index("H"), axes.index("W")


def given_scale(params: DynResizeParams, axis: int) -> Fraction | None:
    """The scale along h (axis 0) or w (axis 1), exactly; None if it follows from the sizes of the run."""
    return Fraction(as_float32(params.scale[axis])) if params.scale else None


def largest_numerator(params: DynResizeParams, axis: int) -> int:
    """A limit of the integers by which kernels find the pixels along an axis; see `templates.resize.dyn_axes`."""
    size: int = params["hw"[axis]]
    out: int = params[("oh", "ow")[axis]]
    scale = given_scale(params, axis)
    above, below = (out, size) if scale is None else (max(scale.numerator, out), max(scale.denominator, size))
    return 2 * (2 * below * out + below + 4 * above)


def _of_scale(times: tuple[int, ...], over: tuple[int, ...]) -> ShapeFunction:
    def extent(axis: int, x: Sequence[int]) -> int:
        return x[axis] * times[axis] // over[axis]

    return ShapeFunction({"x": Dependence.SHAPE}, extent)


def _of_sizes(vertical: int, horizontal: int) -> ShapeFunction:
    def extent(axis: int, x: Sequence[int], sizes: Sequence[int]) -> int:
        if axis == vertical:
            return sizes[0]
        if axis == horizontal:
            return sizes[1]
        return x[axis]

    def problem(x: Sequence[int], sizes: Sequence[int]) -> int:
        if sizes[0] < 0 or sizes[1] < 0:
            return 1
        if sizes[0] > 0 and sizes[1] > 0 and x[0] > 0 and (x[vertical] < 1 or x[horizontal] < 1):
            return 2
        return 0

    messages = (
        "sizes has a negative number; allowed: 0 or more, the height and width of y",
        "x has no pixels, but y has; allowed: images of one pixel or more, or sizes with a 0",
    )
    return ShapeFunction({"x": Dependence.SHAPE, "sizes": Dependence.VALUE}, extent, problem, messages)
