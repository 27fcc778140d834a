"""batch_matmul: y[b, m, n] = epilogue(sum over k of x[b, m, k] * weight[b, n, k]), one product of matrices for each b."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from schedsearch.errors import Problem
from schedsearch.ops.conv2d_formats import FORMAT_PARAMETERS
from schedsearch.ops.epilogues import epilogue_parameter
from schedsearch.ops.params import MAX_INT, Parameter, Params, declared
from schedsearch.ops.products import WEIGHT_LAYOUTS, MatrixProduct, MatrixProductParams
from schedsearch.ops.specs import ArgSpec
from schedsearch.ops.stages import Stage
from schedsearch.typed import GivenParams, ParamsByName

X_LAYOUTS = ("MK", "KM")
_BATCH = {"type": "integer", "minimum": 1, "maximum": MAX_INT}


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchMatmulParams(MatrixProductParams):
    """See `batch_matmul`."""

    b: int = declared(Parameter.count("matrices of y"))
    m: int = declared(Parameter.count("rows of a matrix of y"))
    n: int = declared(Parameter.count("columns of a matrix of y"))
    k: int = declared(Parameter.count("length of the sums"))
    x_batch: int = declared(Parameter("matrices of x: b, or 1, which every product then takes; default b", _BATCH))
    weight_batch: int = declared(Parameter("matrices of weight: b, or 1, which every product then takes; default b", _BATCH))
    dtype: str = declared(FORMAT_PARAMETERS["dtype"])
    weight_dtype: str = declared(FORMAT_PARAMETERS["weight_dtype"])
    out_dtype: str = declared(FORMAT_PARAMETERS["out_dtype"])
    precision: str = declared(FORMAT_PARAMETERS["precision"])
    zero_points: tuple[str, ...] = declared(FORMAT_PARAMETERS["zero_points"])
    x_layout: str = declared(Parameter.choice("axes of a matrix of x in memory; default MK", X_LAYOUTS))
    weight_layout: str = declared(Parameter.choice("axes of a matrix of weight in memory; default NK", WEIGHT_LAYOUTS))
    epilogue: tuple[Stage, ...] = declared(epilogue_parameter())


class BatchMatmul(MatrixProduct[BatchMatmulParams]):
    params_type: ClassVar[type[Params]] = BatchMatmulParams
    name: ClassVar[str] = "batch_matmul"
    reference: ClassVar[str] = "schedsearch.templates.matmul.reference:MatmulReference"
    constructor: ClassVar[str] = "schedsearch:batch_matmul"

    def defaults(self, params: GivenParams) -> ParamsByName:
        batch = params.get("b", 1)
        return {**super().defaults(params), "x_batch": batch, "weight_batch": batch, "x_layout": "MK"}

    def shape_problems(self, p: BatchMatmulParams) -> list[Problem]:
        allowed = f"{p.b}, as b, or 1" if p.b > 1 else "1, as b"
        return [
            Problem(name, f"{name} is {p[name]}; allowed: {allowed}")
            for name in ("x_batch", "weight_batch")
            if p[name] not in (1, p.b)
        ]

    def factors(self, p: BatchMatmulParams) -> tuple[ArgSpec, ArgSpec]:
        sizes = {"M": p.m, "N": p.n, "K": p.k}
        x, weight = (tuple(sizes[axis] for axis in p[key]) for key in ("x_layout", "weight_layout"))
        return (
            ArgSpec("x", f"B{p.x_layout}", (p.x_batch, *x), p.dtype, role="factor"),
            ArgSpec("weight", f"B{p.weight_layout}", (p.weight_batch, *weight), p.weight_dtype, role="factor"),
        )

    def result(self, p: BatchMatmulParams, dtype: str) -> ArgSpec:
        return ArgSpec("y", "BMN", (p.b, p.m, p.n), dtype)

    def label(self, p: BatchMatmulParams) -> str:
        words = [f"batch_matmul {p.b}x{p.m}x{p.n}x{p.k}"]
        words += [f"{key}={p[key]}" for key in ("x_batch", "weight_batch") if p[key] != p.b]
        words += [f"{p.x_layout},{p.weight_layout}"] if (p.x_layout, p.weight_layout) != ("MK", "NK") else []
        return " ".join([*words, self.last_words(p)])


BATCH_MATMUL = BatchMatmul()
