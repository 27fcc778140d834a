"""Products of matrices: what the operators dense and batch_matmul share.

    y[m, n] = epilogue(sum over k of x[m, k] * weight[n, k])

Formats, zero points, precisions and epilogues are those of conv2d, without stages that move elements.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from schedsearch.errors import Problem
from schedsearch.ops.base import (
    ArgSpec,
    Parameter,
    Work,
    judge,
    missing_parameters,
    one_of,
    plain,
    unknown_parameters,
)
from schedsearch.ops.conv2d import accumulator_dtype, default_out_dtype, number_problems
from schedsearch.ops.conv2d_formats import (
    DTYPES,
    FLOAT8,
    INTEGERS,
    OUT_DTYPES,
    PRECISIONS,
    ZERO_POINTS,
    fitting,
    precision_problems,
    zero_point_problems,
)
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.epilogues import (
    epilogue_arguments,
    epilogue_output,
    epilogue_parameter,
    parse_epilogue,
)
from schedsearch.ops.sum_of_products import SumOfProducts

WEIGHT_LAYOUTS = ("NK", "KN")

FORMAT_PARAMETERS = {
    "dtype": Parameter.choice(
        "of x; float16, bfloat16 and float32 also of the weight and the vectors of the epilogue; default float16", DTYPES
    ),
    "weight_dtype": Parameter(
        "of the weight: int8 or uint8, or float8_e4m3 or float8_e5m2, if x is one of the two; default: dtype",
        {"enum": list(DTYPES)},
    ),
    "out_dtype": Parameter(
        "of y; default: dtype; float16 if x is float8; for whole numbers what the epilogue makes of their 32-bit sums",
        {"enum": [*DTYPES[:3], "int32", "uint32", *INTEGERS]},
    ),
    "precision": Parameter.choice(
        "of products of float32: fp32, or tf32, which keeps 10 stored bits of each factor; default fp32", tuple(PRECISIONS)
    ),
    "zero_points": Parameter(
        "which of x and weight have a zero point, given at call time as x_zero_point and weight_zero_point; default none",
        {"type": "array", "items": {"enum": list(ZERO_POINTS)}, "maxItems": 2, "default": []},
    ),
    "epilogue": epilogue_parameter(),
}


class MatrixProduct(SumOfProducts):
    """A base of operators. A subclass has the parameters n and k, those of FORMAT_PARAMETERS and its own."""

    @abstractmethod
    def factors(self, p: Mapping[str, Any]) -> tuple[ArgSpec, ArgSpec]:
        """x and weight."""

    @abstractmethod
    def result(self, p: Mapping[str, Any], dtype: str) -> ArgSpec:
        """y in this format."""

    def shape_problems(self, p: Mapping[str, Any]) -> list[Problem]:
        """Sizes and layouts that are possible one by one but not together."""
        return []

    def defaults(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "dtype": "float16",
            "weight_dtype": params.get("dtype", "float16"),
            "out_dtype": default_out_dtype(params),
            "precision": "fp32",
            "zero_points": (),
            "weight_layout": "NK",
            "epilogue": (),
        }

    def normalise(self, params: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
        known = self.parameters()
        params = {key: plain(value) for key, value in params.items()}
        optional = self.defaults(params)
        problems = unknown_parameters(self.name, params, known)
        problems += missing_parameters(params, {key: known[key] for key in known if key not in optional})
        out = {**optional, **params}
        out = {key: out[key] for key in known if key in out}
        for key in (key for key in out if key in params and key not in FORMAT_PARAMETERS):
            if complaint := judge(out[key], known[key].schema):
                problems.append(Problem(key, f"{key} {complaint}"))
        problems += _format_problems(out, params)
        out["epilogue"], wrong = parse_epilogue(out["epilogue"])
        problems += wrong
        if not problems:
            problems += [*self.shape_problems(out), *number_problems(out, self._accumulator(out))]
        return out, problems

    def arguments(self, p: Mapping[str, Any]) -> tuple[ArgSpec, ...]:
        return (*self.factors(p), *epilogue_arguments(p["epilogue"], self._accumulator(p), p["n"], p["dtype"]))

    def outputs(self, p: Mapping[str, Any]) -> tuple[ArgSpec, ...]:
        return (epilogue_output(p["epilogue"], self._accumulator(p)),)

    def _accumulator(self, p: Mapping[str, Any]) -> ArgSpec:
        """y before the epilogue: whole numbers in 32 bits, float32 for `dequantise`, else the output's format."""
        dtype = p["out_dtype"]
        if p["dtype"] in INTEGERS:
            dtype = accumulator_dtype(p["dtype"], p["weight_dtype"], p["zero_points"])
        elif p["dtype"] in FLOAT8 and any(stage.name == "dequantise" for stage in p["epilogue"]):
            dtype = "float32"
        return self.result(p, dtype)

    def work(self, p: Mapping[str, Any]) -> Work:
        """As `least_flops` of a convolution of one tap: `roofline` allows for algorithms such as Strassen's."""
        size = self._accumulator(p).size
        flops = 2 * size * p["k"]
        read = sum(factor.nbytes for factor in self.factors(p))
        return Work(flops, super().work(p).nbytes, p["k"], flops, read + size * dtype_of(p["out_dtype"]).nbytes)

    def format_words(self, p: Mapping[str, Any]) -> str:
        """The end of a label: formats, zero points and the epilogue."""
        short, weight_short, out_short = (dtype_of(p[key]).short for key in ("dtype", "weight_dtype", "out_dtype"))
        if p["precision"] == "tf32":
            short = weight_short = "tf32"
        factors = short if short == weight_short else f"{short}x{weight_short}"
        words = [factors if factors == out_short else f"{factors}->{out_short}"]
        words += [f"zp({','.join(p['zero_points'])})"] if p["zero_points"] else []
        return " ".join(words) + "".join(f"+{stage}" for stage in p["epilogue"])


def _format_problems(out: dict[str, Any], given: Mapping[str, Any]) -> list[Problem]:
    """Formats that do not exist, or that do not go together."""
    problems = wrong = one_of("dtype", out["dtype"], DTYPES)
    if not wrong or "out_dtype" in given:
        problems = problems + fitting("out_dtype", out, OUT_DTYPES.get(str(out["dtype"]), DTYPES))
    if not wrong or "weight_dtype" in given:
        kinds = [kind for kind in (INTEGERS, FLOAT8) if out["dtype"] in kind]
        allowed = kinds[0] if kinds else (out["dtype"],) if out["dtype"] in DTYPES else DTYPES
        problems = problems + fitting("weight_dtype", out, allowed)
    return problems + precision_problems(out) + zero_point_problems(out)
