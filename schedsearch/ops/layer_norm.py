"""layer_norm over the last axes: y = (x - mean) / sqrt(variance + epsilon) * scale + bias.

Mean and variance are those of the numbers of a row, which are all that the last axes hold. Without `centred` it is the norm
by the root of the mean square: y = x / sqrt(mean of x^2 + epsilon) * scale. Kernels compute in float32 and round once.

Source: Ba, Kiros and Hinton, "Layer normalization", 2016; Zhang and Sennrich, "Root mean square layer normalization", 2019.
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
from schedsearch.ops.specs import ArgSpec

DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerNormParams(AlongAxisParams):
    """See `layer_norm`."""

    x: tuple[int, ...] = declared(extents(f"extents of x, 1 to {len(AXES)} of them"))
    axis: int = declared(
        axis_number("the first of the axes that make a row, counted from 0, or from -1 for the last one backwards", -1)
    )
    epsilon: float = declared(
        Parameter(
            "added to the variance; default 1e-5", {"type": "number", "minimum": 1e-30, "maximum": 1e30, "default": 1e-5}
        )
    )
    centred: bool = declared(Parameter("subtract the mean; default true", {"type": "boolean", "default": True}))
    bias: bool = declared(Parameter("add a bias; default true", {"type": "boolean", "default": True}))
    dtype: str = declared(Parameter.choice("of x and y; default float16", DTYPES))


class LayerNorm(Normalisation[LayerNormParams]):
    params_type: ClassVar[type[Params]] = LayerNormParams
    name: ClassVar[str] = "layer_norm"
    reference: ClassVar[str] = "schedsearch.templates.layer_norm.reference:LayerNormReference"
    constructor: ClassVar[str] = "schedsearch:layer_norm"

    def row_length(self, params: LayerNormParams) -> int:
        return rows_of(params)[1]

    def arguments(self, params: LayerNormParams) -> tuple[ArgSpec, ...]:
        """Scale and bias are float32, one for each number of a row."""
        shape = (self.row_length(params),)
        vectors = [ArgSpec("scale", "K", shape, "float32", role="scale", constant=True)]
        if params.bias:
            vectors.append(ArgSpec("bias", "K", shape, "float32", role="addend", constant=True))
        return (*super().arguments(params), *vectors)

    def check_inputs(self, params: LayerNormParams) -> Mapping[str, Domain]:
        """Numbers around 3, so that the mean matters."""
        found = {
            "x": Domain(tuple(3 + number / 4 for number in range(-16, 17))),
            "scale": Domain((-2.0, -1.0, 0.5, 1.0, 1.5)),
            "bias": Domain(tuple(number / 2 for number in range(-4, 5))),
        }
        return found if params.bias else {name: found[name] for name in ("x", "scale")}

    def label(self, params: LayerNormParams) -> str:
        name = "layer_norm" if params.centred else "rms_norm"
        axis = f"axis {params.axis} " if params.axis != -1 else ""
        bias = "+bias" if params.bias else ""
        return f"{name} {shown(params.x)} {axis}{dtype_of(params.dtype).short}{bias}"


LAYER_NORM = LayerNorm()


def rows_of(p: LayerNormParams) -> tuple[int, int]:
    """(rows, numbers of a row)."""
    shape, axis = p.x, p.axis + len(p.x)
    return math.prod(shape[:axis]), math.prod(shape[axis:])
