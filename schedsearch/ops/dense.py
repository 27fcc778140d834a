"""dense: y[m, n] = epilogue(sum over k of x[m, k] * weight[n, k]), a fully connected layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from schedsearch.ops.base import ArgSpec
from schedsearch.ops.conv2d_formats import FORMAT_PARAMETERS
from schedsearch.ops.epilogues import epilogue_parameter
from schedsearch.ops.params import Parameter, Params, declared
from schedsearch.ops.products import WEIGHT_LAYOUTS, MatrixProduct, MatrixProductParams
from schedsearch.ops.stages import Stage

if TYPE_CHECKING:
    from schedsearch.workload import Workload


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


def dense(
    *,
    m: int,
    n: int,
    k: int,
    dtype: str = "float16",
    weight_dtype: str | None = None,
    out_dtype: str | None = None,
    precision: str = "fp32",
    zero_points: Sequence[str] = (),
    weight_layout: str = "NK",
    epilogue: Sequence[str | Stage | Mapping[str, Any]] = (),
) -> Workload[DenseParams]:
    """A fully connected layer: `y = x @ weight.T`, as torch.nn.functional.linear; with "KN", `y = x @ weight`.

    Args:
        m: rows of x (m, k) and y (m, n): the batch.
        n: columns of y; rows of weight (n, k). A vector of the epilogue, such as bias, has n elements.
        k: columns of x, the length of the sums.
        dtype: float16, bfloat16 or float32 of x, weight and the vectors of the epilogue; or int8, uint8, float8_e4m3
            (e4m3fn) or float8_e5m2 of x.
        weight_dtype: int8 or uint8, or float8_e4m3 or float8_e5m2, if x is one of the two; default: `dtype`.
        out_dtype: of y and the residual; default: the input's, float16 if that is float8, or what the epilogue makes of the
            32-bit sums.
        precision: of products of float32: "fp32", or "tf32", which may round or cut each factor to 10 stored bits first.
        zero_points: which of "x" and "weight" have a zero point; kernels then take x_zero_point and weight_zero_point.
        weight_layout: "NK", or "KN" for a weight of shape (k, n), as ONNX's MatMul has it.
        epilogue: stages applied to the sums in order, as those of `conv2d`, without depth_to_space.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Example:
        >>> layer = dense(m=1, n=1000, k=2048, epilogue=["bias"])
        >>> [(array.name, array.shape) for array in (*layer.signature, layer.output)]
        [('x', (1, 2048)), ('weight', (1000, 2048)), ('bias', (1000,)), ('y', (1, 1000))]
    """
    from schedsearch.workload import Workload

    params: dict[str, Any] = {
        "m": m, "n": n, "k": k, "dtype": dtype, "precision": precision, "zero_points": zero_points,
        "weight_layout": weight_layout, "epilogue": epilogue,
    }  # fmt: skip
    optional = {"weight_dtype": weight_dtype, "out_dtype": out_dtype}
    return Workload("dense", params | {name: value for name, value in optional.items() if value is not None})
