"""Element types and layouts of sums of products, and what is wrong with a choice of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from schedsearch.errors import Problem, did_you_mean
from schedsearch.ops.checks import Rounding
from schedsearch.ops.params import Parameter, one_of
from schedsearch.typed import ParamsByName

# What x may be, what y may be for each x, and what the weight may be.
OUT_DTYPES = {
    "float16": ("float16", "bfloat16", "float32"),
    "bfloat16": ("float16", "bfloat16", "float32"),
    "float32": ("float32",),
    "int8": ("int32", "int8", "uint8", "float32", "float16", "bfloat16"),
    "uint8": ("int32", "uint32", "int8", "uint8", "float32", "float16", "bfloat16"),
    "float8_e4m3": ("float16", "bfloat16", "float32"),
    "float8_e5m2": ("float16", "bfloat16", "float32"),
}
DTYPES = tuple(OUT_DTYPES)
INTEGERS = ("int8", "uint8")
FLOAT8 = ("float8_e4m3", "float8_e5m2")
# Hopper's tensor cores add products of float8 in an accumulator with 13 stored bits, and cut what is below them. Others have
# measured that (DeepSeek-V3 Technical Report, 3.3.2: about 14 bits; PyTorch's blog calls the format e8m13).
FLOAT8_ROUNDING = Rounding(additions=2.0**-13, factor_bits=4)
# How kernels may round products of float32, and how many bits of a factor they must keep.
PRECISIONS = {
    "fp32": Rounding(factor_bits=24),
    "tf32": Rounding(factors=2.0**-10, factor_bits=11),
}
WEIGHT_LAYOUTS = {"NHWC": "OHWI", "NCHW": "OIHW"}
MAX_BLOCK = 256  # channels
BLOCKED = re.compile(r"NCHW([1-9][0-9]{0,2})c")
BLOCKED_WEIGHT = re.compile(r"OIHW([1-9][0-9]{0,2})o([1-9][0-9]{0,2})i")
ZERO_POINTS = ("x", "weight")  # arguments that may have one

FORMAT_PARAMETERS = {
    "dtype": Parameter.choice(
        "of x; float16, bfloat16 and float32 also of the weight and the vectors of the epilogue; default float16", DTYPES
    ),
    "weight_dtype": Parameter(
        "of the weight: int8 or uint8, or float8_e4m3 or float8_e5m2, if x is one of the two; default: dtype",
        {"enum": list(DTYPES)},
    ),
    "out_dtype": Parameter(
        "of y; default: dtype; float16 if x is float8; for integers what the epilogue makes of their 32-bit sums",
        {"enum": [*DTYPES[:3], "int32", "uint32", *INTEGERS]},
    ),
    "precision": Parameter.choice(
        "of products of float32: fp32, or tf32, which keeps 10 stored bits of each factor; default fp32", tuple(PRECISIONS)
    ),
    "zero_points": Parameter(
        "which of x and weight have a zero point, given at call time as x_zero_point and weight_zero_point; default none",
        {"type": "array", "items": {"enum": list(ZERO_POINTS)}, "maxItems": 2, "default": []},
    ),
}


def default_weight_layout(layout: object) -> str:
    """The layout of weights that belongs to a layout of x; any text for what is not a layout."""
    blocked = BLOCKED.fullmatch(layout) if isinstance(layout, str) else None
    return f"OIHW{blocked[1]}o{blocked[1]}i" if blocked else WEIGHT_LAYOUTS.get(str(layout), "OHWI")


def fitting(key: str, p: Mapping[str, object], allowed: Sequence[str]) -> list[Problem]:
    """A problem if the format `key` is not one of those that go with `dtype`."""
    known = [*DTYPES, *(each for formats in OUT_DTYPES.values() for each in formats)]
    if p["dtype"] in DTYPES and p[key] in known and p[key] not in allowed:
        return [Problem(key, f"{key} {p[key]} does not go with dtype {p['dtype']}; allowed: {', '.join(allowed)}")]
    return one_of(key, p[key], allowed)


def zero_point_problems(p: ParamsByName) -> list[Problem]:
    """Sorts the zero points, and says what is wrong with them."""
    given = p["zero_points"]
    if isinstance(given, str) or not isinstance(given, Sequence) or any(each not in ZERO_POINTS for each in given):
        return [Problem("zero_points", f"zero_points must be a list of some of {', '.join(ZERO_POINTS)}, got {given!r}")]
    p["zero_points"] = tuple(name for name in ZERO_POINTS if name in given)
    if p["zero_points"] and p["dtype"] not in INTEGERS:
        return [Problem("zero_points", f"zero_points belong to int8 and uint8, but dtype is {p['dtype']}; leave them out")]
    return []


def precision_problems(p: Mapping[str, object]) -> list[Problem]:
    """A precision that does not exist, or that the factors' format does not have."""
    if p["precision"] == "tf32" and p["dtype"] != "float32" and p["dtype"] in DTYPES:
        return [Problem("precision", f"precision tf32 belongs to float32, but dtype is {p['dtype']}; leave it out")]
    return one_of("precision", p["precision"], tuple(PRECISIONS))


def format_problems(p: ParamsByName, given: Mapping[str, object]) -> list[Problem]:
    """Formats that do not exist, or that do not go together. Sorts the zero points.

    Args:
        p: the parameters with their defaults.
        given: the parameters without. A default that follows from a wrong format is not reported.
    """
    problems = wrong = one_of("dtype", p["dtype"], DTYPES)
    if not wrong or "out_dtype" in given:
        problems = problems + fitting("out_dtype", p, OUT_DTYPES.get(str(p["dtype"]), DTYPES))
    if not wrong or "weight_dtype" in given:
        kinds = [kind for kind in (INTEGERS, FLOAT8) if p["dtype"] in kind]
        allowed = kinds[0] if kinds else (p["dtype"],) if p["dtype"] in DTYPES else DTYPES
        problems = problems + fitting("weight_dtype", p, allowed)
    return problems + precision_problems(p) + zero_point_problems(p)


def layout_problems(p: Mapping[str, object]) -> list[Problem]:
    """Layouts that do not exist, or that do not belong together."""
    problems = []
    layout, weight_layout = p["layout"], p["weight_layout"]
    blocked = BLOCKED.fullmatch(layout) if isinstance(layout, str) else None
    if blocked is None and one_of("layout", layout, tuple(WEIGHT_LAYOUTS)):
        allowed = ", ".join([*WEIGHT_LAYOUTS, "NCHW[x]c (e.g. NCHW32c)"])
        hint = _meant_layout(layout) if isinstance(layout, str) else ""
        problems.append(Problem("layout", f"layout {layout!r} is not possible{hint}; allowed: {allowed}"))
    elif blocked is not None and int(blocked[1]) > MAX_BLOCK:
        problems.append(Problem("layout", f"layout {layout} has blocks of {blocked[1]} channels; allowed: 1 to {MAX_BLOCK}"))
    elif blocked is not None and weight_layout != default_weight_layout(layout):
        problems.append(
            Problem(
                "weight_layout",
                f"weight_layout {weight_layout!r} does not fit {layout}; allowed: {default_weight_layout(layout)}",
            )
        )
    elif blocked is None:
        problems += one_of("weight_layout", weight_layout, tuple(WEIGHT_LAYOUTS.values()))
    if not problems:
        allowed_outputs = (layout,) if blocked is not None else tuple(WEIGHT_LAYOUTS)
        problems += one_of("output_layout", p["output_layout"], allowed_outputs)
    return problems


def _meant_layout(layout: str) -> str:
    """' (did you mean NCHW32c?)' for a slip such as nchw32c, NCHW32C or NCHW32, else what `did_you_mean` says."""
    packed = re.fullmatch(r"NCHW([1-9][0-9]{0,2})C?", layout.upper())
    if packed is not None and int(packed[1]) <= MAX_BLOCK:
        return f" (did you mean 'NCHW{packed[1]}c'?)"
    return did_you_mean(layout.upper(), WEIGHT_LAYOUTS)
