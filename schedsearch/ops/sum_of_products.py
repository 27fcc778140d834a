"""What operators have in common that sum up products of two arguments and end with an epilogue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schedsearch.ops.base import Op, ScalarSpec
from schedsearch.ops.checks import Domain, Rounding, sum_sigma
from schedsearch.ops.conv2d_formats import FLOAT8, FLOAT8_ROUNDING, PRECISIONS, ZERO_POINTS
from schedsearch.ops.epilogues import epilogue_check_inputs, epilogue_check_scalars, epilogue_scalars


class SumOfProducts(Op):
    """Scalars, rounding and numbers for verification. Parameters: dtype, weight_dtype, precision, zero_points, epilogue."""

    def scalars(self, p: Mapping[str, Any]) -> tuple[ScalarSpec, ...]:
        formats = {"x": p["dtype"], "weight": p["weight_dtype"]}
        zero_points = tuple(ScalarSpec(f"{name}_zero_point", 0.0, formats[name]) for name in p["zero_points"])
        return (*zero_points, *epilogue_scalars(p["epilogue"]))

    def rounding(self, p: Mapping[str, Any]) -> Rounding:
        if p["dtype"] in FLOAT8:
            return FLOAT8_ROUNDING
        return PRECISIONS[p["precision"]] if p["dtype"] == "float32" else Rounding()

    def check_scalars(self, p: Mapping[str, Any], spread: float = 1.0) -> Mapping[str, float]:
        # Not 0, so that a kernel that ignores one shows; 3 and 5 are zero points of every 8-bit format.
        zero_points = {f"{name}_zero_point": float(2 * ZERO_POINTS.index(name) + 3) for name in p["zero_points"]}
        return {**zero_points, **epilogue_check_scalars(p["epilogue"], spread)}

    def check_inputs(self, p: Mapping[str, Any]) -> Mapping[str, Domain]:
        domains = dict(super().check_inputs(p))
        spread = sum_sigma(self.arguments(p), self.work(p).reduction, domains)
        return {**domains, **epilogue_check_inputs(p["epilogue"], spread)}
