"""What operators have in common that sum up products of two arguments and end with an epilogue."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TypeVar

from schedsearch.errors import Problem
from schedsearch.ops.base import Op
from schedsearch.ops.checks import Domain, Rounding, sum_sigma
from schedsearch.ops.conv2d_formats import FLOAT8, FLOAT8_ROUNDING, INTEGERS, PRECISIONS, ZERO_POINTS
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.epilogues import (
    computing,
    epilogue_check_inputs,
    epilogue_check_scalars,
    epilogue_scalars,
    moving_problem,
    parse_epilogue,
)
from schedsearch.ops.params import Params
from schedsearch.ops.specs import ArgSpec, ScalarSpec
from schedsearch.ops.stages import Stage
from schedsearch.typed import GivenParams


class FactorParams(Params):
    dtype: str
    weight_dtype: str
    zero_points: tuple[str, ...]
    epilogue: tuple[Stage, ...]


class SumOfProductsParams(FactorParams):
    out_dtype: str
    precision: str


S = TypeVar("S", bound=SumOfProductsParams)


class SumOfProducts(Op[S]):
    """Scalars, rounding and numbers for verification. Parameters: dtype, weight_dtype, precision, zero_points, epilogue."""

    @abstractmethod
    def result(self, p: S, dtype: str) -> ArgSpec:
        """y before the epilogue, in this format."""

    def accumulator(self, p: S) -> ArgSpec:
        """y before the epilogue: integers in 32 bits, float32 for `dequantise`, else the output's format."""
        dtype = p.out_dtype
        if p.dtype in INTEGERS:
            dtype = accumulator_dtype(p.dtype, p.weight_dtype, p.zero_points)
        elif p.dtype in FLOAT8 and any(stage.name == "dequantise" for stage in p.epilogue):
            dtype = "float32"
        return self.result(p, dtype)

    def scalars(self, p: S) -> tuple[ScalarSpec, ...]:
        return (*zero_point_scalars(p), *epilogue_scalars(p.epilogue))

    def format_words(self, p: S) -> list[str]:
        """Formats and zero points, for labels."""
        short, weight_short, out_short = (dtype_of(p[key]).short for key in ("dtype", "weight_dtype", "out_dtype"))
        if p.precision == "tf32":
            short = weight_short = "tf32"
        factors = short if short == weight_short else f"{short}x{weight_short}"
        words = [factors if factors == out_short else f"{factors}->{out_short}"]
        return words + ([f"zp({','.join(p.zero_points)})"] if p.zero_points else [])

    def rounding(self, p: S) -> Rounding:
        if p.dtype in FLOAT8:
            return FLOAT8_ROUNDING
        return PRECISIONS[p.precision] if p.dtype == "float32" else Rounding()

    def check_scalars(self, p: S, spread: float = 1.0) -> Mapping[str, float]:
        return {**zero_point_checks(p), **epilogue_check_scalars(p.epilogue, spread)}

    def check_inputs(self, p: S) -> Mapping[str, Domain]:
        domains = dict(super().check_inputs(p))
        spread = sum_sigma(self.arguments(p), self.work(p).reduction, domains)
        return {**domains, **epilogue_check_inputs(p.epilogue, spread)}


def zero_point_scalars(p: FactorParams) -> tuple[ScalarSpec, ...]:
    """The zero points of x and weight."""
    formats = {"x": p.dtype, "weight": p.weight_dtype}
    return tuple(ScalarSpec(f"{name}_zero_point", 0.0, formats[name]) for name in p.zero_points)


def zero_point_checks(p: FactorParams) -> dict[str, float]:
    """Their values for verification: not 0, so that a kernel that ignores one shows; every 8-bit format has 3 and 5."""
    return {f"{name}_zero_point": float(2 * ZERO_POINTS.index(name) + 3) for name in p.zero_points}


def number_problems(p: FactorParams, value: ArgSpec, out_dtype: str, *, moves: bool = False) -> list[Problem]:
    """Stages that do not fit the numbers that they get, and an output that the epilogue does not make.

    Args:
        value: the output before the epilogue.
        out_dtype: of the output.
        moves: the operator takes stages that move elements.
    """
    if moves and (problem := moving_problem(p.epilogue, value)):
        return [problem]
    for place, stage in enumerate(p.epilogue):
        if reason := stage.kind.problem(value, of_float8=p.dtype in FLOAT8):
            return [Problem("epilogue", f"stage {stage.name} {reason}", path=(place,))]
        if stage.name == "quantise" and p.dtype not in INTEGERS:
            reason = f"follows sums of int8 or uint8, but dtype is {p.dtype}; leave it out"
            return [Problem("epilogue", f"stage {stage.name} {reason}", path=(place,))]
        value = stage.kind.output(value, stage.params)
    if p.dtype in (*INTEGERS, *FLOAT8) and value.dtype != out_dtype:
        of_integers = "requantise makes int8 or uint8 of it, quantise of a float, " if p.dtype in INTEGERS else ""
        stages = f"{of_integers}dequantise makes float32, float16 or bfloat16"
        return [
            Problem(
                "out_dtype",
                f"out_dtype is {out_dtype}, but the epilogue leaves {value.dtype}; leave out_dtype out, or change "
                f"the epilogue ({stages})",
            )
        ]
    return []


def accumulator_dtype(dtype: str, weight_dtype: str, zero_points: Sequence[str]) -> str:
    """The format of sums of 8-bit products. With a zero point even those of uint8 may be negative."""
    return "uint32" if dtype == weight_dtype == "uint8" and not zero_points else "int32"


def default_out_dtype(params: GivenParams) -> str:
    """The format of y that the factors and the epilogue lead to. If parameters are missing or wrong, any format."""
    dtype = params.get("dtype", "float16")
    stages = computing(parse_epilogue(params.get("epilogue", ()), moves=True)[0])
    if dtype in FLOAT8:
        return next((stage.params["to"] for stage in stages if stage.name == "dequantise"), "float16")
    if dtype not in INTEGERS:
        return str(dtype)
    found = ArgSpec(
        "y", "K", (1,), accumulator_dtype(dtype, params.get("weight_dtype", dtype), params.get("zero_points", ()))
    )
    for stage in stages:
        found = stage.kind.output(found, stage.params)
    return found.dtype
