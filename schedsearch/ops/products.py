"""Products of matrices: what the operators dense and batch_matmul share.

    y[m, n] = epilogue(sum over k of x[m, k] * weight[n, k])

Formats, zero points, precisions and epilogues are those of conv2d, without stages that move elements.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TypeVar

from schedsearch.errors import Problem
from schedsearch.ops.conv2d_formats import (
    FORMAT_PARAMETERS,
    format_problems,
)
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.epilogues import (
    epilogue_arguments,
    epilogue_output,
    parse_epilogue,
)
from schedsearch.ops.params import judge
from schedsearch.ops.specs import ArgSpec, Work
from schedsearch.ops.sum_of_products import SumOfProducts, SumOfProductsParams, default_out_dtype, number_problems
from schedsearch.typed import GivenParams, ParamsByName

WEIGHT_LAYOUTS = ("NK", "KN")


class MatrixProductParams(SumOfProductsParams):
    m: int
    n: int
    k: int
    weight_layout: str


M = TypeVar("M", bound=MatrixProductParams)


class MatrixProduct(SumOfProducts[M]):
    """A base of operators. A subclass has the parameters n and k, those of FORMAT_PARAMETERS, an epilogue and its own."""

    @abstractmethod
    def factors(self, p: M) -> tuple[ArgSpec, ArgSpec]:
        """x and weight."""

    def shape_problems(self, p: M) -> list[Problem]:
        """Sizes and layouts that are possible one by one but not together."""
        return []

    def defaults(self, params: GivenParams) -> ParamsByName:
        return {
            "dtype": "float16",
            "weight_dtype": params.get("dtype", "float16"),
            "out_dtype": default_out_dtype(params),
            "precision": "fp32",
            "zero_points": (),
            "weight_layout": "NK",
            "epilogue": (),
        }

    def normalise(self, params: Mapping[str, object]) -> tuple[ParamsByName, list[Problem]]:
        known = self.parameters()
        params, out, problems = self.completed(params)
        for key in (key for key in out if key in params and key not in (*FORMAT_PARAMETERS, "epilogue")):
            if complaint := judge(out[key], known[key].schema):
                problems.append(Problem(key, f"{key} {complaint}"))
        problems += format_problems(out, params)
        out["epilogue"], wrong = parse_epilogue(out["epilogue"])
        problems += wrong
        if not problems:
            p = self.typed(out)
            problems += [*self.shape_problems(p), *number_problems(p, self.accumulator(p), p.out_dtype)]
        return out, problems

    def arguments(self, p: M) -> tuple[ArgSpec, ...]:
        return (*self.factors(p), *epilogue_arguments(p.epilogue, self.accumulator(p), p.n, p.dtype))

    def outputs(self, p: M) -> tuple[ArgSpec, ...]:
        return (epilogue_output(p.epilogue, self.accumulator(p)),)

    def work(self, p: M) -> Work:
        """As `least_flops` of a convolution of one tap: `roofline` allows for algorithms such as Strassen's."""
        size = self.accumulator(p).size
        flops = 2 * size * p.k
        read = sum(factor.nbytes for factor in self.factors(p))
        return Work(flops, super().work(p).nbytes, p.k, flops, read + size * dtype_of(p.out_dtype).nbytes)

    def last_words(self, p: M) -> str:
        """The end of a label: formats, zero points and the epilogue."""
        return " ".join(self.format_words(p)) + "".join(f"+{stage}" for stage in p.epilogue)
