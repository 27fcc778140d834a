"""dense: y[m, n] = epilogue(sum over k of x[m, k] * weight[n, k]), a fully connected layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from schedsearch.ops.conv2d_formats import FORMAT_PARAMETERS
from schedsearch.ops.epilogues import epilogue_parameter
from schedsearch.ops.params import Parameter, Params, declared
from schedsearch.ops.products import WEIGHT_LAYOUTS, MatrixProduct, MatrixProductParams
from schedsearch.ops.specs import ArgSpec
from schedsearch.ops.stages import Stage


@dataclass(frozen=True, eq=False, kw_only=True)
class DenseParams(MatrixProductParams):
    """See `dense`."""

    m: int = declared(Parameter.count("rows of x and y: the batch"))
    n: int = declared(Parameter.count("columns of y: outputs"))
    k: int = declared(Parameter.count("columns of x: inputs"))
    dtype: str = declared(FORMAT_PARAMETERS["dtype"])
    weight_dtype: str = declared(FORMAT_PARAMETERS["weight_dtype"])
    out_dtype: str = declared(FORMAT_PARAMETERS["out_dtype"])
    precision: str = declared(FORMAT_PARAMETERS["precision"])
    zero_points: tuple[str, ...] = declared(FORMAT_PARAMETERS["zero_points"])
    weight_layout: str = declared(Parameter.choice("axes of the weight in memory; default NK", WEIGHT_LAYOUTS))
    epilogue: tuple[Stage, ...] = declared(epilogue_parameter())


class Dense(MatrixProduct[DenseParams]):
    params_type: ClassVar[type[Params]] = DenseParams
    name: ClassVar[str] = "dense"
    reference: ClassVar[str] = "schedsearch.templates.matmul.reference:MatmulReference"
    constructor: ClassVar[str] = "schedsearch:dense"

    def factors(self, p: DenseParams) -> tuple[ArgSpec, ArgSpec]:
        shape = tuple({"N": p.n, "K": p.k}[axis] for axis in p.weight_layout)
        return (
            ArgSpec("x", "MK", (p.m, p.k), p.dtype, role="factor"),
            ArgSpec("weight", p.weight_layout, shape, p.weight_dtype, role="factor", constant=True),
        )

    def result(self, p: DenseParams, dtype: str) -> ArgSpec:
        return ArgSpec("y", "MN", (p.m, p.n), dtype)

    def label(self, p: DenseParams) -> str:
        layout = " KN" if p.weight_layout == "KN" else ""
        return f"dense {p.m}x{p.n}x{p.k}{layout} {self.last_words(p)}"


DENSE = Dense()
