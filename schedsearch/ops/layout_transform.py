"""layout_transform: y holds the elements of x in another layout.

The layouts are words of `schedsearch.ops.Layout`, over the axes N, C, H, W for images or O, I, H, W for filters. Elements
that fill up the last block of an axis are zeros in y, and those of x are not read.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from schedsearch.errors import Problem, UsageError
from schedsearch.ops.base import Op
from schedsearch.ops.checks import Domain
from schedsearch.ops.data_movement import DTYPES, whole_numbers
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.layout import Layout
from schedsearch.ops.params import MAX_INT, Parameter, Params, declared
from schedsearch.ops.specs import ArgSpec, Work

FAMILIES = {"NCHW": "images", "OIHW": "filters"}
_MOST_BLOCKS = 4
_WORD = r"[A-Z]{4}([1-9][0-9]{0,3}[a-z])*"


def _size(doc: str) -> Parameter:
    return Parameter(doc, {"type": "integer", "minimum": 0, "maximum": MAX_INT, "default": 0}, size=True)


def _layout(doc: str) -> Parameter:
    return Parameter(doc, {"type": "string", "pattern": f"^{_WORD}$"})


@dataclass(frozen=True, eq=False, kw_only=True)
class LayoutTransformParams(Params):
    """See `layout_transform`."""

    n: int = declared(_size("batch of images; left out for filters"))
    c: int = declared(_size("channels of images; left out for filters"))
    o: int = declared(_size("output channels of filters; left out for images"))
    i: int = declared(_size("input channels of filters; left out for images"))
    h: int = declared(Parameter.count("height"))
    w: int = declared(Parameter.count("width"))
    layout: str = declared(_layout("of x: NCHW, NHWC, NCHW32c, OIHW, OHWI, OIHW32o32i ..."))
    to: str = declared(_layout("layout of y, over the same axes"))
    dtype: str = declared(Parameter.choice("of x and y: any of 1, 2 or 4 bytes, or int64; default float16", DTYPES))


_PARAMETERS = LayoutTransformParams.parameters()


class LayoutTransform(Op[LayoutTransformParams]):
    params_type: ClassVar[type[Params]] = LayoutTransformParams
    name: ClassVar[str] = "layout_transform"
    reference: ClassVar[str] = "schedsearch.templates.layout_transform.reference:LayoutTransformReference"
    constructor: ClassVar[str] = "schedsearch:layout_transform"

    def problems(self, params: LayoutTransformParams) -> Iterable[Problem]:
        found = [problem for key in ("layout", "to") if (problem := _layout_problem(key, params[key]))]
        if found:
            return found
        source, to = Layout.parse(params.layout), Layout.parse(params.to)
        if sorted(source.axes) != sorted(to.axes):
            return [
                Problem("to", f"to is {to}, but layout {source} has the axes {source.axes}; allowed: layouts of these axes")
            ]
        return [*_size_problems(params, source.axes), *_block_problems(source, to)]

    def arguments(self, params: LayoutTransformParams) -> tuple[ArgSpec, ...]:
        return (ArgSpec("x", params.layout, Layout.parse(params.layout).shape(sizes(params)), params.dtype),)

    def outputs(self, params: LayoutTransformParams) -> tuple[ArgSpec, ...]:
        return (ArgSpec("y", params.to, Layout.parse(params.to).shape(sizes(params)), params.dtype),)

    def work(self, params: LayoutTransformParams) -> Work:
        """No arithmetic. Padding of x counts as bytes of the argument, but no kernel has to read it."""
        nbytes = super().work(params).nbytes
        elements = 1
        for extent in sizes(params).values():
            elements *= extent
        return Work(0, nbytes, least_bytes=elements * dtype_of(params.dtype).nbytes + self.outputs(params)[0].nbytes)

    def equality(self, params: LayoutTransformParams) -> Literal["exact", "rounded"]:
        return "exact"

    def check_inputs(self, params: LayoutTransformParams) -> Mapping[str, Domain]:
        """All integers that the format holds exactly, so that every byte of an element counts."""
        return {"x": whole_numbers(params.dtype)}

    def label(self, params: LayoutTransformParams) -> str:
        extents = "x".join(str(params[axis.lower()]) for axis in Layout.parse(params.layout).axes)
        return f"layout_transform {params.layout} {extents} to {params.to} {dtype_of(params.dtype).short}"


LAYOUT_TRANSFORM = LayoutTransform()


def sizes(params: LayoutTransformParams) -> dict[str, int]:
    """Axis -> logical extent, of normalised parameters."""
    return {axis: params[axis.lower()] for axis in Layout.parse(params.layout).axes}


def _layout_problem(key: str, word: str) -> Problem | None:
    allowed = "allowed: an order of N, C, H, W or of O, I, H, W, then blocks, e.g. NHWC, NCHW32c or OIHW32o32i"
    if not re.fullmatch(_WORD, word):
        return Problem(key, f"{key} {word!r} is not a layout; {allowed}")
    try:
        layout = Layout.parse(word)
    except UsageError as error:
        return Problem(key, f"{key}: {error}")
    if all(sorted(layout.axes) != sorted(family) for family in FAMILIES):
        return Problem(key, f"{key} {word} has the axes {layout.axes}; {allowed}")
    if len(layout.blocks) > _MOST_BLOCKS:
        return Problem(key, f"{key} {word} has {len(layout.blocks)} blocks; allowed: up to {_MOST_BLOCKS}")
    return None


def _size_problems(params: LayoutTransformParams, axes: str) -> list[Problem]:
    """Axes of the layout without a size, and sizes of axes that it does not have."""
    found = []
    for name in ("n", "c", "o", "i"):
        given = params[name]
        if name.upper() in axes and not given:
            found.append(Problem(name, f"{name} ({_PARAMETERS[name].doc}) is missing; layout {params.layout} needs it"))
        if name.upper() not in axes and given:
            found.append(
                Problem(name, f"{name} is {given}, but layout {params.layout} has no axis {name.upper()}; leave it out")
            )
    return found


def _block_problems(source: Layout, to: Layout) -> list[Problem]:
    """Blocks of an axis that cut it at places which do not nest."""
    found = []
    for axis in source.axes:
        units = sorted({*source.units(axis), *to.units(axis)})
        uneven = [(a, b) for a, b in itertools.pairwise(units) if b % a]
        if uneven:
            a, b = uneven[0]
            found.append(
                Problem(
                    "to",
                    f"layouts {source} and {to} have blocks of {a} and {b} along {axis}, and neither divides the other; "
                    "transform twice, by way of a layout without these blocks",
                )
            )
    return found
