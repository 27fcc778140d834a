"""The operators of PyTorch for an export: schemas and tables for `runtime/schedsearch_torch.cpp`."""

from __future__ import annotations

import keyword
import math
from collections.abc import Sequence

from schedsearch.c_export.chosen import Chosen
from schedsearch.c_export.text import parameter_names, string
from schedsearch.ops import ArgSpec, ScalarSpec
from schedsearch.ops.dtypes import MAX_RANK
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.runtime.arrays import forms

NAMESPACE = "schedsearch_c"
_KINDS = {"float32": "f", "float64": "d", "bool": "b"}
_SCHEMA_TYPES = {"f": "float", "d": "float", "b": "bool", "i": "int"}


def torch_source(kernels: Sequence[Chosen]) -> str:
    """The .cpp that describes and registers one operator for each kernel that can be one; see `problem`."""
    chosen = [each for each in kernels if problem(each) is None]
    tables = "\n".join(_tables(number, each) for number, each in enumerate(chosen))
    rows = "\n".join(f"    {_row(number, each)}," for number, each in enumerate(chosen))
    defined = "\n".join(f"    m.def({string(schema(each))});" for each in chosen)
    includes = "\n".join(f'#include "{each.name}.h"' for each in chosen)

    def implemented(function: str) -> str:
        return "\n".join(f'    m.impl("{each.name}", schedsearch_torch::{function}<{n}>);' for n, each in enumerate(chosen))

    return f"""// The operators of this export. Written by schedsearch.
#include "schedsearch_torch.h"

{includes}

namespace schedsearch_torch {{
{tables}
const Operator operators[] = {{
{rows}
}};

}} // namespace schedsearch_torch

STABLE_TORCH_LIBRARY_FRAGMENT({NAMESPACE}, m)
{{
{defined}
}}

STABLE_TORCH_LIBRARY_IMPL({NAMESPACE}, CUDA, m)
{{
{implemented("computed")}
}}

STABLE_TORCH_LIBRARY_IMPL({NAMESPACE}, Meta, m)
{{
{implemented("pretended")}
}}
"""


def schema(chosen: Chosen) -> str:
    """The operator as PyTorch writes it: `NAME(Tensor x, Tensor weight, float slope=0.01) -> Tensor`."""
    workload = chosen.workload
    arguments = [spec.name for spec in workload.signature]
    scalars = [scalar.name for scalar in workload.scalars]
    names = parameter_names((*arguments, *scalars), (*keyword.kwlist, *keyword.softkwlist))
    given = [f"Tensor {name}" for name in names[: len(arguments)]]
    given += [_scalar(scalar, name) for scalar, name in zip(workload.scalars, names[len(arguments) :])]
    outputs = ", ".join(["Tensor"] * len(workload.outputs))
    return f"{chosen.name}({', '.join(given)}) -> {outputs if len(workload.outputs) == 1 else f'({outputs})'}"


def _kind(scalar: ScalarSpec) -> str:
    return _KINDS.get(scalar.dtype, "i")


def _scalar(scalar: ScalarSpec, name: str) -> str:
    kind = _kind(scalar)
    if not math.isfinite(scalar.default):
        return f"{_SCHEMA_TYPES[kind]} {name}"
    default = {"b": str(bool(scalar.default)), "i": str(int(scalar.default))}.get(kind, repr(float(scalar.default)))
    return f"{_SCHEMA_TYPES[kind]} {name}={default}"


def _tables(number: int, chosen: Chosen) -> str:
    workload = chosen.workload
    parts = [
        _table("Array", f"arguments_{number}", [_array(spec) for spec in workload.signature]),
        _table("Array", f"outputs_{number}", [_array(spec) for spec in workload.outputs]),
        _table("Number", f"numbers_{number}", [_number(scalar) for scalar in workload.scalars]),
    ]
    return "".join(parts)


def _number(scalar: ScalarSpec) -> str:
    low, high = 0, 0
    if _kind(scalar) == "i":
        row = dtype_of(scalar.dtype) if scalar.dtype != "uint64" else dtype_of("int64")
        low, high = max(int(row.lowest), -(2**63) + 1), int(row.largest)  # C++ has no literal of the smallest int64
    return f"{{{string(scalar.name)}, '{_kind(scalar)}', {low if scalar.dtype != 'uint64' else 0}, {high}}}"


def _table(kind: str, name: str, rows: Sequence[str]) -> str:
    lines = "".join(f"    {row},\n" for row in rows)
    return f"static const {kind} {name}[] = {{\n{lines}}};\n" if rows else ""


def _array(spec: ArgSpec) -> str:
    held = forms(spec)
    rows = [f"{{{len(each.shape)}, {_numbers(each.shape)}, {_numbers(each.strides)}}}" for each in held]
    function = f"aoti_torch_dtype_{dtype_of(spec.dtype).library}"
    return f"{{{string(spec.name)}, {function}, {len(held)}, {{{', '.join(rows)}}}}}"


def _numbers(values: Sequence[int]) -> str:
    return f"{{{', '.join(map(str, values))}}}"


def _row(number: int, chosen: Chosen) -> str:
    workload = chosen.workload
    tables = [("arguments", len(workload.signature)), ("outputs", len(workload.outputs)), ("numbers", len(workload.scalars))]
    fields = [f"{f'{name}_{number}' if count else 'nullptr'}, {count}" for name, count in tables]
    return f"{{&{chosen.name}_kernel, {', '.join(fields)}}}"


def problem(chosen: Chosen) -> str | None:
    """Why a kernel cannot become an operator of PyTorch; None if it can."""
    specs = (*chosen.workload.signature, *chosen.workload.outputs)
    if not chosen.workload.signature:
        return "it has no argument whose device an operator of PyTorch could use"
    if deep := [spec for spec in specs if len(spec.shape) > MAX_RANK]:
        return f"{deep[0].name} has {len(deep[0].shape)} axes; an operator of PyTorch has room for {MAX_RANK}"
    return None
