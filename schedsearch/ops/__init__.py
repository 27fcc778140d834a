"""Operators, which say what to compute: parameters, arguments, outputs, work and epilogue stages, as plain data.

Each name is imported when it is first used: running kernels needs few of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schedsearch.ops.base import Op
    from schedsearch.ops.checks import Domain
    from schedsearch.ops.dependence import Dependence, ShapeFunction
    from schedsearch.ops.dtypes import DTYPES, DType, decode, dtype, encode
    from schedsearch.ops.epilogues import Epilogue
    from schedsearch.ops.layout import Layout
    from schedsearch.ops.params import Parameter
    from schedsearch.ops.registry import operator, operator_names, operators
    from schedsearch.ops.specs import ArgSpec, ScalarSpec, Work
    from schedsearch.ops.stages import STAGES, Operand, Stage, StageKind

_HOMES = {
    "DTYPES": "dtypes",
    "STAGES": "stages",
    "ArgSpec": "specs",
    "DType": "dtypes",
    "Dependence": "dependence",
    "Domain": "checks",
    "Epilogue": "epilogues",
    "Layout": "layout",
    "Op": "base",
    "Operand": "stages",
    "Parameter": "params",
    "ScalarSpec": "specs",
    "ShapeFunction": "dependence",
    "Stage": "stages",
    "StageKind": "stages",
    "Work": "specs",
    "decode": "dtypes",
    "dtype": "dtypes",
    "encode": "dtypes",
    "operator": "registry",
    "operator_names": "registry",
    "operators": "registry",
}

__all__ = [
    "DTYPES",
    "STAGES",
    "ArgSpec",
    "DType",
    "Dependence",
    "Domain",
    "Epilogue",
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


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"schedsearch.ops.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'schedsearch.ops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
