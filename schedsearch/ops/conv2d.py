"""conv2d: y[n,p,q,k] = epilogue(sum over r,s,c of x[n, p*stride-pad+r*dilation, ..., c] * weight[k,r,s,c]).

Stride, padding and dilation are those of `schedsearch.ops.window`.

Integers (int8, uint8) are summed exactly in 32 bits. With zero points the factors are (x - x_zero_point) and
(weight - weight_zero_point), and padding adds nothing, as in ONNX's ConvInteger and QLinearConv. The stage `requantise`
makes 8-bit numbers of the sums, `dequantise` makes floating-point numbers.

Products of float8 are summed in float32, of which tensor cores keep 14 bits; see `FLOAT8_ROUNDING`. The stage `dequantise`
multiplies these sums by the scales of both factors, and makes the output's format of them.

Factors of float32 are multiplied as they are, or with `precision` tf32 after each was rounded or cut to TF32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from schedsearch.errors import Problem
from schedsearch.ops.conv2d_formats import (
    BLOCKED,
    BLOCKED_WEIGHT,
    FORMAT_PARAMETERS,
    WEIGHT_LAYOUTS,
    default_weight_layout,
    format_problems,
    layout_problems,
)
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.epilogues import (
    epilogue_arguments,
    epilogue_output,
    epilogue_parameter,
    parse_epilogue,
    pixel_shuffle,
)
from schedsearch.ops.layout import Layout
from schedsearch.ops.params import MAX_INT, Parameter, Params, declared, is_int
from schedsearch.ops.specs import ArgSpec, Work
from schedsearch.ops.stages import Stage
from schedsearch.ops.sum_of_products import SumOfProducts, SumOfProductsParams, default_out_dtype, number_problems
from schedsearch.ops.window import (
    WINDOW_DEFAULTS,
    WINDOW_PARAMETERS,
    Padding,
    Pair,
    WindowParams,
    counts_of,
    output_hw,
    reach,
    spread_window,
    window_problems,
    window_words,
)
from schedsearch.typed import GivenParams, ParamsByName


@dataclass(frozen=True, eq=False, kw_only=True)
class Conv2dParams(SumOfProductsParams, WindowParams):
    """See `conv2d`."""

    n: int = declared(Parameter.count("batch"))
    h: int = declared(Parameter.count("input height"))
    w: int = declared(Parameter.count("input width"))
    c: int = declared(Parameter.count("input channels"))
    k: int = declared(Parameter.count("output channels"))
    r: int = declared(Parameter.count("kernel height"))
    s: int = declared(Parameter.count("kernel width"))
    stride: Pair = declared(WINDOW_PARAMETERS["stride"])
    padding: Padding = declared(WINDOW_PARAMETERS["padding"])
    dilation: Pair = declared(WINDOW_PARAMETERS["dilation"])
    groups: int = declared(
        Parameter("divides c and k; default 1", {"type": "integer", "minimum": 1, "maximum": MAX_INT, "default": 1})
    )
    dtype: str = declared(FORMAT_PARAMETERS["dtype"])
    weight_dtype: str = declared(FORMAT_PARAMETERS["weight_dtype"])
    out_dtype: str = declared(FORMAT_PARAMETERS["out_dtype"])
    precision: str = declared(FORMAT_PARAMETERS["precision"])
    zero_points: tuple[str, ...] = declared(FORMAT_PARAMETERS["zero_points"])
    layout: str = declared(
        Parameter(
            "axes of x in memory, and of y unless output_layout differs: NHWC, NCHW, or NCHW[x]c with blocks of x channels "
            "(NCHW32c); default NHWC",
            {
                "anyOf": [{"enum": list(WEIGHT_LAYOUTS)}, {"type": "string", "pattern": f"^{BLOCKED.pattern}$"}],
                "default": "NHWC",
            },
        )
    )
    output_layout: str = declared(
        Parameter(
            "axes of y in memory: NHWC or NCHW, or the packed layout of x; default: layout",
            {"anyOf": [{"enum": list(WEIGHT_LAYOUTS)}, {"type": "string", "pattern": f"^{BLOCKED.pattern}$"}]},
        )
    )
    slice_of: int = declared(
        Parameter(
            "channels of a larger array in memory: y is a slice of it, and its others are left alone; default: those of y",
            {"type": "integer", "minimum": 1, "maximum": MAX_INT},
        )
    )
    x_slice: tuple[int, ...] = declared(
        Parameter(
            "x is a slice of the channels of a larger array, which kernels take: how many channels that has, and the first "
            "of x; default: x is an array of its own",
            {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": MAX_INT},
                "maxItems": 2,
                "default": [],
            },
        )
    )
    weight_layout: str = declared(
        Parameter(
            "OHWI, OIHW, or OIHW[x]o[x]i (OIHW32o32i); default: the one that belongs to layout",
            {
                "anyOf": [
                    {"enum": list(WEIGHT_LAYOUTS.values())},
                    {"type": "string", "pattern": f"^{BLOCKED_WEIGHT.pattern}$"},
                ]
            },
        )
    )
    epilogue: tuple[Stage, ...] = declared(epilogue_parameter(moves=True))


_PARAMETERS = Conv2dParams.parameters()
_SIZES = {name: parameter for name, parameter in _PARAMETERS.items() if parameter.size}


class Conv2d(SumOfProducts[Conv2dParams]):
    params_type: ClassVar[type[Params]] = Conv2dParams
    name: ClassVar[str] = "conv2d"
    reference: ClassVar[str] = "schedsearch.templates.conv2d.reference:Conv2dReference"
    constructor: ClassVar[str] = "schedsearch:conv2d"
    peers: ClassVar[Mapping[str, str]] = {"torch": "schedsearch.integrations.torch_peer:conv2d"}

    def defaults(self, params: GivenParams) -> ParamsByName:
        return {
            **WINDOW_DEFAULTS,
            "groups": 1,
            "dtype": "float16",
            "weight_dtype": params.get("dtype", "float16"),
            "out_dtype": default_out_dtype(params),
            "precision": "fp32",
            "zero_points": (),
            "layout": "NHWC",
            "output_layout": params.get("layout", "NHWC"),
            "slice_of": _own_channels(params),
            "x_slice": (),
            "weight_layout": default_weight_layout(params.get("layout", "NHWC")),
            "epilogue": (),
        }

    def normalise(self, params: Mapping[str, object]) -> tuple[ParamsByName, list[Problem]]:
        params, out, problems = self.completed(params)
        problems += counts_of(out, (*_SIZES, "groups"))
        problems += counts_of(out, ("slice_of",) if "slice_of" in params else ())
        problems += spread_window(out)
        problems += format_problems(out, params)
        problems += layout_problems(out)
        out["epilogue"], wrong = parse_epilogue(out["epilogue"], moves=True)
        out["x_slice"], of_x = _parse_x_slice(out["x_slice"])
        problems += [*wrong, *of_x]
        if not problems:
            p = self.typed(out)
            problems += [*_group_problems(p), *window_problems(p), *_block_problems(p)]
            problems += number_problems(p, self.accumulator(p), p.out_dtype, moves=True)
            problems = problems or [*_slice_problems(p), *_x_slice_problems(p)]
            if not problems and p.x_slice == (p.c, 0):
                out["x_slice"] = ()
        return out, problems

    def output_hw(self, p: Conv2dParams) -> tuple[int, int]:
        """Output height and width."""
        return output_hw(p)

    def arguments(self, p: Conv2dParams) -> tuple[ArgSpec, ...]:
        image = {"N": p.n, "C": p.x_slice[0] if p.x_slice else p.c, "H": p.h, "W": p.w}
        weight = {"O": p.k, "I": p.c // p.groups, "H": p.r, "W": p.s}
        weight_shape = Layout.parse(p.weight_layout).shape(weight)
        return (
            ArgSpec("x", p.layout, Layout.parse(p.layout).shape(image), p.dtype, role="factor"),
            ArgSpec("weight", p.weight_layout, weight_shape, p.weight_dtype, role="factor", constant=True),
            *epilogue_arguments(p.epilogue, self.accumulator(p), p.k, p.dtype),
        )

    def outputs(self, p: Conv2dParams) -> tuple[ArgSpec, ...]:
        y = epilogue_output(p.epilogue, self.accumulator(p))
        if p.slice_of == _own_channels(p):
            return (y,)
        out_h, out_w = self.output_hw(p)
        whole = {"N": p.n, "C": p.slice_of, "H": out_h, "W": out_w}
        return (replace(y, slice_of=Layout.parse(p.output_layout).shape(whole)),)

    def result(self, p: Conv2dParams, dtype: str) -> ArgSpec:
        out_h, out_w = self.output_hw(p)
        layout = Layout.parse(p.output_layout)
        return ArgSpec("y", p.output_layout, layout.shape({"N": p.n, "C": p.k, "H": out_h, "W": out_w}), dtype)

    def work(self, p: Conv2dParams) -> Work:
        out_h, out_w = self.output_hw(p)
        reduction = p.c // p.groups * p.r * p.s
        flops = 2 * p.n * out_h * out_w * p.k * reduction
        rows, columns = (reach(p, axis) for axis in (0, 1))
        channels = p.c // p.groups
        least_flops = 2 * p.n * rows.outputs * columns.outputs * p.k * channels
        read = p.n * p.c * rows.inputs * columns.inputs + p.k * channels * rows.taps * columns.taps
        written = p.n * out_h * out_w * p.k
        least_bytes = read * dtype_of(p.dtype).nbytes + written * dtype_of(p.out_dtype).nbytes
        # What lies around a slice need not be read.
        nbytes = super().work(p.replace(x_slice=()) if p.x_slice else p).nbytes
        return Work(flops, nbytes, reduction, least_flops, least_bytes)

    def label(self, p: Conv2dParams) -> str:
        words = [f"conv2d {p.n}x{p.h}x{p.w}x{p.c} k{p.k} {p.r}x{p.s}"]
        words += window_words(p)
        if p.groups != 1:
            words.append(f"g{p.groups}")
        words += self.format_words(p)
        words.append(p.layout if p.layout == p.output_layout else f"{p.layout}->{p.output_layout}")
        words += [f"x in {p.x_slice[0]} from {p.x_slice[1]} on"] if p.x_slice else []
        words += [f"into {p.slice_of}"] if p.slice_of != _own_channels(p) else []
        return " ".join(words) + "".join(f"+{stage}" for stage in p.epilogue)


CONV2D = Conv2d()


def _own_channels(params: Mapping[str, object]) -> Any:
    """The channels of y. Parameters may be missing or wrong; the answer then does not matter."""
    channels = params.get("k", 1)
    stages = parse_epilogue(params.get("epilogue", ()), moves=True)[0]
    if isinstance(channels, int) and (shuffle := pixel_shuffle(stages, channels)) is not None:
        return shuffle.out_channels
    return channels


def _group_problems(p: Conv2dParams) -> list[Problem]:
    """Channels that the groups do not divide."""
    allowed = f"groups that divide c and k: the divisors of {math.gcd(p.c, p.k)}"
    return [
        Problem(key, f"{key}={count} {meaning} channels do not divide into groups={p.groups}; allowed: {allowed}")
        for key, meaning, count in (("c", "input", p.c), ("k", "output", p.k))
        if count % p.groups
    ]


def _block_problems(p: Conv2dParams) -> list[Problem]:
    """Channels that do not fill the blocks of a packed layout."""
    blocked = BLOCKED.fullmatch(p.layout)
    if blocked is None:
        return []
    block = int(blocked[1])
    of_groups = f" of each of {p.groups} groups" if p.groups > 1 else ""
    return [
        Problem(
            key,
            f"the {count // p.groups} {meaning} channels{of_groups} do not fill blocks of {block} in {p.layout}; "
            f"pad them with zeros to a multiple of {block}, or give layout NCHW or NHWC",
        )
        for key, meaning, count in (("c", "input", p.c), ("k", "output", p.k))
        if count // p.groups % block
    ]


def _slice_problems(p: Conv2dParams) -> list[Problem]:
    """An array that y cannot be a slice of."""
    own, whole = _own_channels(p), p.slice_of
    if whole == own:
        return []
    block = Layout.parse(p.output_layout).block("C")
    if whole < own:
        return [Problem("slice_of", f"slice_of is {whole}; allowed: at least {own}, the channels of y")]
    if whole % block:
        return [Problem("slice_of", f"slice_of is {whole}; allowed: multiples of {block}, the blocks of {p.output_layout}")]
    if pixel_shuffle(p.epilogue, p.k) is not None:
        return [Problem("slice_of", f"slice_of is {whole}; leave it out or leave out depth_to_space: y has one of them")]
    return []


def first_channel(p: Conv2dParams) -> int:
    """The first channel of x in the array that kernels take."""
    return int(p.x_slice[1]) if p.x_slice else 0


def _parse_x_slice(value: object) -> tuple[tuple[int, ...], list[Problem]]:
    """Two integers or none, also of a list, as files have it."""
    values = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else None
    if values is not None and len(values) in (0, 2) and all(is_int(each) and 0 <= each <= MAX_INT for each in values):
        return values, []
    allowed = f"[channels of the array, first channel of x] as integers from 0 to {MAX_INT}, or []"
    return (), [Problem("x_slice", f"x_slice is {value!r}; allowed: {allowed}")]


def _x_slice_problems(p: Conv2dParams) -> list[Problem]:
    """An array that x cannot be a slice of."""
    if not p.x_slice:
        return []
    if p.x_slice[1] + p.c > p.x_slice[0]:
        got = f"x_slice is {list(p.x_slice)} and x has {p.c} channels"
        allowed = "[channels of the array, first channel of x], so that x lies inside of it"
        return [Problem("x_slice", f"{got}; allowed: {allowed}")]
    if Layout.parse(p.layout).blocks:
        return [Problem("x_slice", f"x_slice is {list(p.x_slice)} in {p.layout}; allowed: in NHWC and NCHW")]
    if p.zero_points:
        return [Problem("x_slice", f"x_slice is {list(p.x_slice)} with zero points; give x as an array of its own")]
    return []
