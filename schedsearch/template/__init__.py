"""Templates: their contract, the values that they are made of, and the set of installed ones.

A template author finds everything here: what a template declares (`Knob`, `Constraint`, `ConfigSpace`), what it returns
(`KernelSource`, `KernelStep`, `Grid` and the kinds of parameters), and `device_op` for inline PTX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from schedsearch.config import Config
from schedsearch.launch import Float32, Grid, Int32, Int64, Literal, NumbaArray, Number, Pointer, Scalar, TensorMap
from schedsearch.space import Columns, ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template.contract import Reference, Template, magnitude_of
from schedsearch.template.registry import TemplateSet, load_reference, load_template, load_templates, template_names
from schedsearch.template.renamed import Renamed
from schedsearch.template.source import KernelSource, KernelStep
from schedsearch.workload import Workload

if TYPE_CHECKING:
    from schedsearch.backend.ops import device_op

__all__ = [
    "Columns",
    "Config",
    "ConfigSpace",
    "Constraint",
    "Float32",
    "Grid",
    "Int32",
    "Int64",
    "KernelSource",
    "KernelStep",
    "Knob",
    "Literal",
    "NumbaArray",
    "Number",
    "Pointer",
    "Reference",
    "Renamed",
    "Scalar",
    "Target",
    "Template",
    "TemplateSet",
    "TensorMap",
    "Workload",
    "device_op",
    "load_reference",
    "load_template",
    "load_templates",
    "magnitude_of",
    "template_names",
]

_LAZY = {"device_op": "schedsearch.backend.ops"}  # imports Numba, which a list of templates does not need


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'schedsearch.template' has no attribute {name!r}")
