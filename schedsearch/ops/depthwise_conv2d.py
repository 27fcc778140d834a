"""depthwise_conv2d: a convolution that filters each channel on its own, and its gradients.

With m = `multiplier`, output channel o = c * m + j belongs to input channel c (as in PyTorch with groups = channels)::

    forward      y[n,p,q,o] = epilogue(sum over i,l of x[n,h,w,c] * weight[o,i,l])
    grad_input   dx[n,h,w,c] = sum over j,i,l of dy[n,p,q,c*m+j] * weight[c*m+j,i,l]
    grad_weight  dw[o,i,l] = sum over n,p,q of x[n,h,w,c] * dy[n,p,q,o]
    grad_both    dx and dw in one call

Here h = p * stride - top + i * dilation and w = q * stride - left + l * dilation; x is zero outside the image.

Integers (int8, uint8) are summed exactly in 32 bits, forward only: with zero points the factors are
(x - x_zero_point) and (weight - weight_zero_point), and padding adds nothing, as in conv2d with groups of one channel.

`h` and `w` are those of x in every direction; `output_hw` gives those of y and dy. Stride, padding and dilation are those of
`schedsearch.ops.window`. Sums of floats are float32, whatever the arrays' format; the result is rounded once.

Kernels take these arrays, in this order, all of the format `dtype`:

=============  ==================================================  ========
direction      arguments                                           outputs
=============  ==================================================  ========
forward        x, weight, operands of the epilogue                 y
grad_input     dy, weight, dx_before if `accumulate`               dx
grad_weight    x, dy, dw_before if `accumulate`                    dw
grad_both      x, weight, dy, dx_before and dw_before likewise     dx, dw
=============  ==================================================  ========

- x and dx have the channels `c`; y and dy have `c * multiplier`. All four have the layout `layout`.
- weight and dw have the layout `weight_layout` with I = 1. OIHW (o, 1, r, s) and OHWI (o, r, s, 1) are one order in memory,
  and so are HWIO (r, s, 1, o) and HWOI (r, s, o, 1). The last is TVM's; TensorFlow's (r, s, c, m) is the same memory.
- `accumulate`: the gradient is added to dx_before or dw_before before it is rounded. That argument may be the output's own
  memory (`ArgSpec.aliases`), so a kernel must read an element before it writes it, and not read it again.
- `deterministic` belongs to grad_weight and grad_both. Two calls on the same arguments must then return the same bits, so
  templates must not add with atomics in an order that varies. The other directions are always deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from schedsearch.errors import Problem
from schedsearch.ops.base import Op
from schedsearch.ops.checks import Domain, Rounding, sum_sigma
from schedsearch.ops.conv2d_formats import FORMAT_PARAMETERS, INTEGERS, fitting, zero_point_problems
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.epilogues import (
    epilogue_arguments,
    epilogue_check_inputs,
    epilogue_check_scalars,
    epilogue_output,
    epilogue_parameter,
    epilogue_scalars,
    parse_epilogue,
)
from schedsearch.ops.layout import Layout
from schedsearch.ops.params import Parameter, Params, declared, judge, one_of
from schedsearch.ops.specs import ArgSpec, ScalarSpec, Work
from schedsearch.ops.stages import STAGES, Stage
from schedsearch.ops.sum_of_products import (
    FactorParams,
    accumulator_dtype,
    default_out_dtype,
    number_problems,
    zero_point_checks,
    zero_point_scalars,
)
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

DIRECTIONS = ("forward", "grad_input", "grad_weight", "grad_both")
DTYPES = ("float16", "bfloat16", "float32", *INTEGERS)
LAYOUTS = ("NHWC", "NCHW")
WEIGHT_LAYOUTS = ("OHWI", "OIHW", "HWOI", "HWIO")
_WEIGHT_LAYOUT = {"NHWC": "OHWI", "NCHW": "OIHW"}  # as conv2d's
# Bits of a factor in the numbers for verification, so that a kernel that adds in a shorter format than float32 fails. They
# are 10 of the 11 bits of float16, because sums of longer numbers could exceed its largest.
_FACTOR_BITS = {"float32": 24, "float16": 10, "bfloat16": 8}


@dataclass(frozen=True, eq=False, kw_only=True)
class DepthwiseConv2dParams(WindowParams, FactorParams):
    """See `depthwise_conv2d`."""

    n: int = declared(Parameter.count("batch"))
    c: int = declared(Parameter.count("input channels"))
    h: int = declared(Parameter.count("input height"))
    w: int = declared(Parameter.count("input width"))
    r: int = declared(Parameter.count("kernel height"))
    s: int = declared(Parameter.count("kernel width"))
    stride: Pair = declared(WINDOW_PARAMETERS["stride"])
    padding: Padding = declared(WINDOW_PARAMETERS["padding"])
    dilation: Pair = declared(WINDOW_PARAMETERS["dilation"])
    multiplier: int = declared(
        Parameter("output channels for each input channel; default 1", {**Parameter.count("").schema, "default": 1})
    )
    direction: str = declared(
        Parameter.choice("forward: y; grad_input: dx; grad_weight: dw; grad_both: dx and dw; default forward", DIRECTIONS)
    )
    dtype: str = declared(Parameter.choice("of x, and of all other arrays if it is a float; default float16", DTYPES))
    weight_dtype: str = declared(
        Parameter("of the weight: int8 or uint8 if x is one of the two; default: dtype", {"enum": list(DTYPES)})
    )
    zero_points: tuple[str, ...] = declared(FORMAT_PARAMETERS["zero_points"])
    layout: str = declared(Parameter.choice("axes of x, y and their gradients in memory; default NHWC", LAYOUTS))
    weight_layout: str = declared(
        Parameter(
            "axes of the weight and its gradient, with I = 1; default OHWI for NHWC and OIHW for NCHW",
            {"enum": list(WEIGHT_LAYOUTS)},
        )
    )
    accumulate: bool = declared(
        Parameter(
            "a gradient is added to dx_before or dw_before, which may be the same memory; default false",
            {"type": "boolean", "default": False},
        )
    )
    deterministic: bool = declared(
        Parameter(
            "dw has the same bits in every call, so that its sums use no atomics; default false",
            {"type": "boolean", "default": False},
        )
    )
    epilogue: tuple[Stage, ...] = declared(epilogue_parameter())


_PARAMETERS = DepthwiseConv2dParams.parameters()
_SIZES = {name: parameter for name, parameter in _PARAMETERS.items() if parameter.size}
_CHOICES = ("direction", "dtype", "layout", "weight_layout")


class DepthwiseConv2d(Op[DepthwiseConv2dParams]):
    params_type: ClassVar[type[Params]] = DepthwiseConv2dParams
    name: ClassVar[str] = "depthwise_conv2d"
    reference: ClassVar[str] = "schedsearch.templates.depthwise_conv2d.reference:DepthwiseConv2dReference"
    constructor: ClassVar[str] = "schedsearch:depthwise_conv2d"

    def defaults(self, params: GivenParams) -> ParamsByName:
        return {
            **WINDOW_DEFAULTS,
            "multiplier": 1,
            "direction": "forward",
            "dtype": "float16",
            "weight_dtype": params.get("dtype", "float16"),
            "zero_points": (),
            "layout": "NHWC",
            "weight_layout": _WEIGHT_LAYOUT.get(str(params.get("layout", "NHWC")), "OHWI"),
            "accumulate": False,
            "deterministic": False,
            "epilogue": (),
        }

    def normalise(self, params: Mapping[str, object]) -> tuple[ParamsByName, list[Problem]]:
        params, out, problems = self.completed(params)
        problems += counts_of(out, (*_SIZES, "multiplier"))
        problems += spread_window(out)
        for key in _CHOICES:
            problems += one_of(key, out[key], _PARAMETERS[key].schema["enum"])
        known = out["dtype"] in DTYPES
        if known or "weight_dtype" in params:
            allowed = INTEGERS if out["dtype"] in INTEGERS else (out["dtype"],) if known else DTYPES
            problems += fitting("weight_dtype", out, allowed)
        problems += zero_point_problems(out)
        for key in ("accumulate", "deterministic"):
            if complaint := judge(out[key], _PARAMETERS[key].schema):
                problems.append(Problem(key, f"{key} {complaint}"))
        out["epilogue"], wrong = parse_epilogue(out["epilogue"])
        problems += wrong
        if not problems:
            p = self.typed(out)
            problems += window_problems(p) + _direction_problems(p)
            problems = problems or self._stage_problems(p)
        return out, problems

    def _stage_problems(self, p: DepthwiseConv2dParams) -> list[Problem]:
        """Stages that do not fit the numbers that they get."""
        if p.dtype in INTEGERS:
            return number_problems(p, self._accumulator(p), default_out_dtype(p))
        for place, stage in enumerate(p.epilogue):
            problem = stage.kind.problem(self._accumulator(p))
            if stage.name == "quantise":
                of_floats = [name for name, kind in STAGES.items() if "float" in kind.takes and not kind.moves]
                allowed = ", ".join(name for name in of_floats if name != "quantise")
                problem = f"follows sums of int8 or uint8, but dtype is {p.dtype}; allowed: {allowed}"
            if problem:
                return [Problem("epilogue", f"stage {stage.name} {problem}", path=(place,))]
        return []

    def output_hw(self, p: DepthwiseConv2dParams) -> tuple[int, int]:
        """Height and width of y and dy."""
        return output_hw(p)

    def arguments(self, p: DepthwiseConv2dParams) -> tuple[ArgSpec, ...]:
        x, y, weight = (spec(p) for spec in (_image, _output_image, _weight))
        before = [
            ArgSpec(f"{each.name}_before", each.axes, each.shape, each.dtype, "addend", aliases=each.name)
            for each in (self.outputs(p) if p.accumulate else ())
        ]
        if p.direction == "forward":
            operands = epilogue_arguments(p.epilogue, self._accumulator(p), p.c * p.multiplier, p.dtype)
            return (_factor("x", x), _factor("weight", weight, constant=True), *operands)
        if p.direction == "grad_input":
            return (_factor("dy", y), _factor("weight", weight), *before)
        if p.direction == "grad_weight":
            return (_factor("x", x), _factor("dy", y), *before)
        return (_factor("x", x), _factor("weight", weight), _factor("dy", y), *before)

    def outputs(self, p: DepthwiseConv2dParams) -> tuple[ArgSpec, ...]:
        dx, dw = (ArgSpec(name, *spec(p)) for name, spec in (("dx", _image), ("dw", _weight)))
        if p.direction == "forward":
            return (epilogue_output(p.epilogue, self._accumulator(p)),)
        return {"grad_input": (dx,), "grad_weight": (dw,), "grad_both": (dx, dw)}[p.direction]

    def _accumulator(self, p: DepthwiseConv2dParams) -> ArgSpec:
        """y before the epilogue."""
        axes, shape, dtype = _output_image(p)
        if p.dtype in INTEGERS:
            dtype = accumulator_dtype(p.dtype, p.weight_dtype, p.zero_points)
        return ArgSpec("y", axes, shape, dtype)

    def scalars(self, p: DepthwiseConv2dParams) -> tuple[ScalarSpec, ...]:
        return (*zero_point_scalars(p), *epilogue_scalars(p.epilogue))

    def rounding(self, p: DepthwiseConv2dParams) -> Rounding:
        if p.dtype in INTEGERS:
            return Rounding()
        return Rounding(factor_bits=_FACTOR_BITS[p.dtype])

    def check_scalars(self, p: DepthwiseConv2dParams, spread: float = 1.0) -> Mapping[str, float]:
        return {**zero_point_checks(p), **epilogue_check_scalars(p.epilogue, spread)}

    def check_inputs(self, p: DepthwiseConv2dParams) -> Mapping[str, Domain]:
        """Every sum has two factors. With grad_both, dy is a factor of both sums, and has the numbers of the longer one."""
        if p.direction == "grad_both":
            halves = [p.replace(direction=each) for each in ("grad_input", "grad_weight")]
            halves.sort(key=_reduction)
            both = {name: domain for half in halves for name, domain in self.check_inputs(half).items()}
            return {argument.name: both[argument.name] for argument in self.arguments(p)}
        domains = dict(super().check_inputs(p))
        spread = sum_sigma(self.arguments(p), _reduction(p), domains)
        return {**domains, **epilogue_check_inputs(p.epilogue, spread)}

    def work(self, p: DepthwiseConv2dParams) -> Work:
        """The three sums are transposes of each other, so that no algorithm needs fewer multiplications for one of them."""
        out_h, out_w = output_hw(p)
        filters = p.c * p.multiplier
        both = 2 if p.direction == "grad_both" else 1
        flops = both * 2 * p.n * out_h * out_w * filters * p.r * p.s
        rows, columns = (reach(p, axis) for axis in (0, 1))
        reached = {
            "x": p.n * p.c * rows.inputs * columns.inputs,
            "dy": p.n * filters * rows.outputs * columns.outputs,
            "weight": filters * rows.taps * columns.taps,
        }
        read = sum(reached.get(argument.name, 0) for argument in self.arguments(p))
        written = sum(output.size * (2 if p.accumulate else 1) for output in self.outputs(p))
        least_bytes = (read + written) * dtype_of(p.dtype).nbytes
        return Work(flops, super().work(p).nbytes, _reduction(p), both * 2 * reached["dy"], least_bytes)

    def label(self, p: DepthwiseConv2dParams) -> str:
        words = [f"depthwise_conv2d {p.n}x{p.h}x{p.w}x{p.c} {p.r}x{p.s}"]
        words += [f"m{p.multiplier}"] if p.multiplier > 1 else []
        words += window_words(p)
        words += [p.direction] if p.direction != "forward" else []
        words += [dtype_of(p.dtype).short]
        if p.dtype in INTEGERS:
            out = default_out_dtype(p)
            factors = words.pop() + (f"x{dtype_of(p.weight_dtype).short}" if p.weight_dtype != p.dtype else "")
            words += [factors if out == p.dtype else f"{factors}->{dtype_of(out).short}"]
            words += [f"zp({','.join(p.zero_points)})"] if p.zero_points else []
        words += [p.layout]
        words += [p.weight_layout] if p.weight_layout != _WEIGHT_LAYOUT[p.layout] else []
        words += [name for name in ("accumulate", "deterministic") if p[name]]
        return " ".join(words) + "".join(f"+{stage}" for stage in p.epilogue)


DEPTHWISE_CONV2D = DepthwiseConv2d()


def _reduction(p: DepthwiseConv2dParams) -> int:
    """Products in the longest sum."""
    out_h, out_w = output_hw(p)
    of_dx: int = p.multiplier * p.r * p.s
    of_dw: int = p.n * out_h * out_w
    if p.direction == "forward":
        return int(p.r * p.s)
    return {"grad_input": of_dx, "grad_weight": of_dw, "grad_both": max(of_dx, of_dw)}[p.direction]


def _image(p: DepthwiseConv2dParams) -> tuple[str, tuple[int, ...], str]:
    """Axes, shape and format of x and dx."""
    sizes = {"N": p.n, "C": p.c, "H": p.h, "W": p.w}
    return p.layout, Layout.parse(p.layout).shape(sizes), p.dtype


def _output_image(p: DepthwiseConv2dParams) -> tuple[str, tuple[int, ...], str]:
    """The same of y and dy."""
    out_h, out_w = output_hw(p)
    sizes = {"N": p.n, "C": p.c * p.multiplier, "H": out_h, "W": out_w}
    return p.layout, Layout.parse(p.layout).shape(sizes), p.dtype


def _weight(p: DepthwiseConv2dParams) -> tuple[str, tuple[int, ...], str]:
    """The same of weight and dw."""
    sizes = {"O": p.c * p.multiplier, "I": 1, "H": p.r, "W": p.s}
    return p.weight_layout, Layout.parse(p.weight_layout).shape(sizes), p.weight_dtype


def _factor(name: str, spec: tuple[str, tuple[int, ...], str], constant: bool = False) -> ArgSpec:
    return ArgSpec(name, *spec, role="factor", constant=constant)


def _direction_problems(p: DepthwiseConv2dParams) -> list[Problem]:
    """Options of another direction than the one that is given."""
    problems, direction = [], p.direction
    if direction != "forward" and p.dtype in INTEGERS:
        message = f"direction is {direction}, but dtype is {p.dtype}; allowed: forward, or a dtype of floats"
        problems.append(Problem("direction", message))
    if p.dtype in INTEGERS and p.weight_layout not in _WEIGHT_LAYOUT.values():
        allowed = ", ".join(_WEIGHT_LAYOUT.values())
        message = f"weight_layout is {p.weight_layout}, but dtype is {p.dtype}; allowed: {allowed}"
        problems.append(Problem("weight_layout", message))
    if direction == "forward" and p.accumulate:
        problems.append(
            Problem(
                "accumulate",
                "accumulate belongs to the gradients, but direction is forward; leave it out, or add an array to the output "
                "by the stage residual",
            )
        )
    if direction in ("forward", "grad_input") and p.deterministic:
        problems.append(
            Problem(
                "deterministic",
                f"deterministic belongs to grad_weight and grad_both; {direction} always is, so leave it out",
            )
        )
    if direction != "forward" and p.epilogue:
        problems.append(
            Problem("epilogue", f"an epilogue belongs to direction forward, but direction is {direction}; leave it out")
        )
    return problems
