"""Operators, which say what to compute: parameters, arguments, outputs, work and epilogue stages, as plain data."""

from __future__ import annotations

from schedsearch.ops.base import ArgSpec, Op, Parameter, ScalarSpec, Work
from schedsearch.ops.checks import Domain
from schedsearch.ops.dependence import Dependence, ShapeFunction
from schedsearch.ops.dtypes import DTYPES, DType, decode, dtype, encode
from schedsearch.ops.layout import Layout
from schedsearch.ops.registry import operator, operator_names, operators
from schedsearch.ops.stages import STAGES, Operand, Stage, StageKind

__all__ = [
    "DTYPES",
    "STAGES",
    "ArgSpec",
    "DType",
    "Dependence",
    "Domain",
    "Layout",
    "Op",
    "Operand",
    "Parameter",
    "ScalarSpec",
    "ShapeFunction",
    "Stage",
    "StageKind",
    "Work",
    "decode",
    "dtype",
    "encode",
    "operator",
    "operator_names",
    "operators",
]
