"""softmax along one axis: y = exp(x - m) / sum of exp(x - m), where m is the largest number along the axis.

With `log` it is the logarithm of that, x - m - log(sum). Kernels compute in float32 and round once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from schedsearch.ops.along_axis import AlongAxisParams, Normalisation, axis_number
from schedsearch.ops.checks import Domain
from schedsearch.ops.data_movement import AXES, extents, shown
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.params import Parameter, Params, declared

_LONG = 1024  # numbers of a row
_FAR = 64  # e^-56 is less than 2^-24 / 2^31: negligible in every row
DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True, eq=False, kw_only=True)
class SoftmaxParams(AlongAxisParams):
    """See `softmax`."""

    x: tuple[int, ...] = declared(extents(f"extents of x, 1 to {len(AXES)} of them"))
    axis: int = declared(
        axis_number("the axis along which numbers sum to 1, counted from 0, or from -1 for the last one backwards", -1)
    )
    log: bool = declared(Parameter("the logarithm of the result; default false", {"type": "boolean", "default": False}))
    dtype: str = declared(Parameter.choice("of x and y; default float16", DTYPES))


class Softmax(Normalisation[SoftmaxParams]):
    params_type: ClassVar[type[Params]] = SoftmaxParams
    name: ClassVar[str] = "softmax"
    reference: ClassVar[str] = "schedsearch.templates.softmax.reference:SoftmaxReference"
    constructor: ClassVar[str] = "schedsearch:softmax"

    def row_length(self, params: SoftmaxParams) -> int:
        return int(params.x[params.axis])

    def check_inputs(self, params: SoftmaxParams) -> Mapping[str, Domain]:
        """Quarters within +-8: exponentials of larger numbers would be one number and zeros.

        In a long row a single one of these would not show beside the rounding of the sum or of y. There, some numbers are 0
        and the others so far below that the sum is exactly the count of zeros. These are at most half of the row, and so few
        that a missing one shows in y's format. The second numbers are quarters in any case."""
        quarters = Domain(tuple(number / 4 for number in range(-32, 33)))
        length, roundoff = self.row_length(params), dtype_of(params.dtype).roundoff
        if length <= _LONG:
            return {"x": quarters}
        far = tuple(number / 4 - _FAR for number in range(-32, 33))
        return {"x": Domain(far, rare=(0.0,), rarity=min(0.5, 0.25 / roundoff / length), second=quarters)}

    def label(self, params: SoftmaxParams) -> str:
        name = "log_softmax" if params.log else "softmax"
        axis = f"axis {params.axis} " if params.axis != -1 else ""
        return f"{name} {shown(params.x)} {axis}{dtype_of(params.dtype).short}"


SOFTMAX = Softmax()


def along(p: AlongAxisParams) -> tuple[int, int, int]:
    """(outer, length, inner): x as an array of three dimensions whose second one is the axis."""
    shape, axis = p.x, p.axis + len(p.x)
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
