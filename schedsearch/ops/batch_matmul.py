"""batch_matmul: y[b, m, n] = epilogue(sum over k of x[b, m, k] * weight[b, n, k]), one product of matrices for each b."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from schedsearch.errors import Problem
from schedsearch.ops.base import ArgSpec
from schedsearch.ops.conv2d_formats import FORMAT_PARAMETERS
from schedsearch.ops.epilogues import epilogue_parameter
from schedsearch.ops.params import MAX_INT, Parameter, Params, declared
from schedsearch.ops.products import WEIGHT_LAYOUTS, MatrixProduct, MatrixProductParams
from schedsearch.ops.stages import Stage

if TYPE_CHECKING:
    from schedsearch.workload import Workload

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

    def defaults(self, params: Mapping[str, Any]) -> dict[str, Any]:
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


def batch_matmul(
    *,
    b: int,
    m: int,
    n: int,
    k: int,
    x_batch: int | None = None,
    weight_batch: int | None = None,
    dtype: str = "float16",
    weight_dtype: str | None = None,
    out_dtype: str | None = None,
    precision: str = "fp32",
    zero_points: Sequence[str] = (),
    x_layout: str = "MK",
    weight_layout: str = "NK",
    epilogue: Sequence[str | Stage | Mapping[str, Any]] = (),
) -> Workload[BatchMatmulParams]:
    """Products of matrices, one for each b: `y[b] = x[b] @ weight[b].T`; with weight_layout "KN", `y[b] = x[b] @ weight[b]`.

    Args:
        b: matrices of y (b, m, n).
        m, n: rows and columns of a matrix of y. A vector of the epilogue, such as bias, has n elements.
        k: length of the sums.
        x_batch, weight_batch: matrices of x (x_batch, m, k) and of weight (weight_batch, n, k): b, or 1 if all products have
            the same one. Default: b.
        dtype, weight_dtype, out_dtype, precision, zero_points, epilogue: as in `dense`. The residual has the shape of y.
        x_layout: "MK", or "KM" for matrices of shape (k, m).
        weight_layout: "NK", or "KN" for matrices of shape (k, n), as in ONNX's MatMul and torch.bmm.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Example:
        >>> scores = batch_matmul(b=12, m=128, n=128, k=64)
        >>> [(array.name, array.shape) for array in (*scores.signature, scores.output)]
        [('x', (12, 128, 64)), ('weight', (12, 128, 64)), ('y', (12, 128, 128))]
    """
    from schedsearch.workload import Workload

    params: dict[str, Any] = {
        "b": b, "m": m, "n": n, "k": k, "dtype": dtype, "precision": precision, "zero_points": zero_points,
        "x_layout": x_layout, "weight_layout": weight_layout, "epilogue": epilogue,
    }  # fmt: skip
    optional = {
        "x_batch": x_batch, "weight_batch": weight_batch, "weight_dtype": weight_dtype, "out_dtype": out_dtype,
    }  # fmt: skip
    return Workload("batch_matmul", params | {name: value for name, value in optional.items() if value is not None})
