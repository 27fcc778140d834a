"""fill_margin: the elements just beyond the extents in use become one number, in place.

A graph whose sizes are known at run time only keeps arrays at their bounds; see `ops.bounded`. A window over an image reads
as many rows and columns beyond the extents in use as its padding has: these have to be what padding stands for.

y is x, but along each axis with a margin the elements from `x_extents` on, `margin` of them and none beyond the bound, are
zero or the lowest finite number of the format. x and y may share memory; kernels then write the margin only. Extents beyond
the bound, or below 0, count as the bound or 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from schedsearch.errors import Problem
from schedsearch.ops.base import Op
from schedsearch.ops.bounded import extents_of
from schedsearch.ops.checks import Domain
from schedsearch.ops.data_movement import AXES, extents, shown, too_large, whole_numbers
from schedsearch.ops.dtypes import DTYPES, encode
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.params import MAX_INT, Parameter, Params, declared
from schedsearch.ops.specs import ArgSpec, Work

VALUES = ("zero", "lowest")
_BITS = {1: "uint8", 2: "uint16", 4: "int32", 8: "int64"}


@dataclass(frozen=True, eq=False, kw_only=True)
class FillMarginParams(Params):
    """See `fill_margin`."""

    x: tuple[int, ...] = declared(extents(f"bounds of the extents of x, 1 to {len(AXES)} of them"))
    margin: tuple[int, ...] = declared(
        Parameter(
            "elements to fill along each axis, beyond its extent in use",
            {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_INT}, "maxItems": len(AXES)},
            size=True,
        )
    )
    value: str = declared(
        Parameter.choice("of the elements: zero, or the lowest number of the format; default zero", VALUES, "zero")
    )
    dtype: str = declared(Parameter.choice("of x and y; default float16", tuple(DTYPES), "float16"))


class FillMargin(Op[FillMarginParams]):
    params_type: ClassVar[type[Params]] = FillMarginParams
    name: ClassVar[str] = "fill_margin"
    reference: ClassVar[str] = "schedsearch.templates.arrange.margin:FillMarginReference"
    constructor: ClassVar[str] = "schedsearch:fill_margin"

    def problems(self, params: FillMarginParams) -> Iterable[Problem]:
        x, margin = params.x, params.margin
        if len(margin) != len(x):
            return [Problem("margin", f"margin has {len(margin)} numbers; allowed: {len(x)}, one for each axis of x")]
        if not any(margin):
            return [Problem("margin", "margin is 0 along every axis; allowed: above 0 along one at least")]
        wide = [axis for axis, (width, extent) in enumerate(zip(margin, x)) if width > extent]
        if wide:
            return [Problem("margin", f"margin is {margin[wide[0]]} along axis {wide[0]}; allowed: 0 to {x[wide[0]]}")]
        return too_large("x", x, dtype_of(params.dtype).nbytes)

    def arguments(self, params: FillMarginParams) -> tuple[ArgSpec, ...]:
        x, rank = params.x, len(params.x)
        name = extents_of("x")
        spec = ArgSpec("x", AXES[:rank], x, params.dtype, aliases="y")
        return (spec, ArgSpec(name, "A", (rank,), "int64", role="index", below=max(x) + 1))

    def outputs(self, params: FillMarginParams) -> tuple[ArgSpec, ...]:
        return (ArgSpec("y", AXES[: len(params.x)], params.x, params.dtype),)

    def equality(self, params: FillMarginParams) -> Literal["exact", "rounded"]:
        return "exact"

    def check_inputs(self, params: FillMarginParams) -> Mapping[str, Domain]:
        """Extents that leave room for the margin and one element more; then margins that end at the bound, in part."""
        sizes = list(zip(params.x, params.margin))
        room = tuple(max(n - width - 1, 0) if width else n for n, width in sizes)
        narrow = tuple(max(n - (width + 1) // 2, 0) for n, width in sizes)
        inputs = {"x": whole_numbers(params.dtype)}
        return {**inputs, extents_of("x"): Domain(room, ordered=True, second=Domain(narrow, ordered=True))}

    def timing_inputs(self, params: FillMarginParams) -> Mapping[str, Domain]:
        return {extents_of("x"): self.check_inputs(params)[extents_of("x")]}

    def work(self, params: FillMarginParams) -> Work:
        """x is copied to y where they do not share memory."""
        (y,) = self.outputs(params)
        return Work(0, 2 * y.nbytes, least_bytes=0)

    def label(self, params: FillMarginParams) -> str:
        words = [self.name, shown(params.x), "margin", ",".join(map(str, params.margin))]
        return " ".join([*words, *(["lowest"] if params.value == "lowest" else []), dtype_of(params.dtype).short])


FILL_MARGIN = FillMargin()


def margin_bits(value: str, dtype: str) -> tuple[int, str]:
    """The bits of a margin's elements as an integer, and its format."""
    import numpy as np

    row = dtype_of(dtype)
    bits = _BITS[row.nbytes]
    if value == "zero":
        return 0, bits
    stored = np.asarray(encode(np.array([row.lowest], np.float64 if row.is_float else np.int64), dtype))
    return int(stored.view(bits)[0]), bits
