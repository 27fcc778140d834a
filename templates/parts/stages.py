"""How templates compute the stages of an epilogue: one entry of `STAGE_CODES` for each stage.

`schedsearch.ops.STAGES` says what a stage is. An entry here says how kernels compute it: PTX for CUDA templates, a Python
function for CPU templates. Every template asks `epilogue_problem` in `validate`, which refuses a stage without an entry.

All arithmetic is float32, on the accumulator, before the cast to the output's dtype. Every stage keeps NaN, as PyTorch
does, so that poison in the data shows in the result. Sums of integers stay in 32-bit integers up to `requantise` or
`dequantise`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedsearch.errors import did_you_mean
from schedsearch.launch import Float32, Param, Pointer, Scalar
from schedsearch.ops import ArgSpec, Stage
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.epilogues import computing
from schedsearch.ops.sum_of_products import FactorParams
from schedsearch.workload import Workload

_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
_SIXTH, _SQRT_HALF = np.float32(1 / 6), np.float32(math.sqrt(0.5))

# Stages that change the output's dtype; every template that stores 8-bit integers and floats takes all of them.
CONVERTING = ("requantise", "requantise_add", "dequantise", "quantise")
BYTES = ("int8", "uint8")  # of a quantised residual; every template that stores 8-bit integers reads it


@dataclass(frozen=True)
class StageCode:
    """The arithmetic of one stage.

    Attributes:
        ptx: instructions that change the float32 register `{value}`. They name operands and scalars of the stage as
            `{name}` (float32 registers, read only), its numeric parameters as `{name}` (literals), the limits of a format
            that a parameter names as `{name_lowest}` and `{name_largest}` (literals), and may use the predicate register
            `q`. Elements of 8 bits are float32 numbers, `{name_base}` (a literal) more than what they stand for: see
            `epilogue_text.load_bytes`. A brace of PTX is doubled.
        function: `function(value, operands) -> value`, the same in Python. `operands` is the tuple of the stage's operands,
            scalars and numeric parameters, in the order in which its kind declares them. They are float32; integer
            parameters are int.
        temporaries: `{temporary0}`, `{temporary1}` ...: further float32 registers that `ptx` may write.
        integer: the instructions for a value that is a 32-bit integer; "" if the stage cannot take one. `{int}` is its type,
            s32 or u32. Registers may hold either kind of number.
        after_relu: `integer` for a value that is not negative, if that takes fewer instructions; else "".
        with_relu: `integer` for a stage whose parameter `relu` is true; "" if it has no such parameter.
        vector: `vector(math, value, operands) -> value`, `function` for whole vectors of float32, in the operations of
            `schedsearch.backend.cpu_finish.VectorMath`; None if there is none.
        older: `ptx` without instructions of compute capability 8.0; "" if it has none.
    """

    ptx: str
    function: Callable[..., Any] | None
    temporaries: int = 0
    integer: str = ""
    older: str = ""
    after_relu: str = ""
    with_relu: str = ""
    vector: Callable[[Any, Any, Any], Any] | None = None


def _add(value: Any, operands: Any) -> Any:
    return value + operands[0]


def _scale_shift(value: Any, operands: Any) -> Any:
    scale, shift = operands
    return value * scale + shift


def _relu(value: Any, operands: Any) -> Any:
    return _ZERO if value < _ZERO else value


def _leaky_relu(value: Any, operands: Any) -> Any:
    return value * operands[0] if value < _ZERO else value


def _clip(value: Any, operands: Any) -> Any:
    low, high = operands
    value = low if value < low else value
    return high if value > high else value


def _sigmoid(value: Any, operands: Any) -> Any:
    return np.float32(_ONE / (_ONE + np.float32(math.exp(-value))))


def _silu(value: Any, operands: Any) -> Any:
    return np.float32(value / (_ONE + np.float32(math.exp(-value))))


def _hard_swish(value: Any, operands: Any) -> Any:
    gate = np.float32(value * _SIXTH) + _HALF
    gate = _ZERO if gate < _ZERO else gate
    return value * (_ONE if gate > _ONE else gate)


def _gelu(value: Any, operands: Any) -> Any:
    return np.float32(_HALF * value) * (_ONE + np.float32(math.erf(value * _SQRT_HALF)))


def _add_vector(m: Any, value: Any, operands: Any) -> Any:
    return m.add(value, operands[0])


def _scale_shift_vector(m: Any, value: Any, operands: Any) -> Any:
    return m.add(m.multiply(value, operands[0]), operands[1])


def _relu_vector(m: Any, value: Any, operands: Any) -> Any:
    return m.larger(value, m.number(0))


def _leaky_relu_vector(m: Any, value: Any, operands: Any) -> Any:
    return m.where(m.less(value, m.number(0)), m.multiply(value, operands[0]), value)


def _clip_vector(m: Any, value: Any, operands: Any) -> Any:
    return m.smaller(m.larger(value, operands[0]), operands[1])


def _sigmoid_vector(m: Any, value: Any, operands: Any) -> Any:
    return m.divide(m.number(1), m.add(m.number(1), m.exp(m.subtract(m.number(0), value))))


def _silu_vector(m: Any, value: Any, operands: Any) -> Any:
    return m.divide(value, m.add(m.number(1), m.exp(m.subtract(m.number(0), value))))


def _hard_swish_vector(m: Any, value: Any, operands: Any) -> Any:
    gate = m.add(m.multiply(value, m.number(_SIXTH)), m.number(0.5))
    return m.multiply(value, m.smaller(m.larger(gate, m.number(0)), m.number(1)))


# The product is rounded to an integer, half to even, by adding 1.5 * 2^23: from 2^23 to 2^24, neighbours in float32 are
# 1 apart. The bits of the sum, less those of 1.5 * 2^23, are then the integer. cvt.rni.s32.f32 would have a quarter of
# the rate, and add.sat.s32 would take five instructions. Beyond 2^22 any large number will do, as the result saturates to 8
# bits: larger sums have larger bits. Negative sums would have smaller ones, hence the maximum, which relu makes needless.
# Source: Hecker, "Let's get to the (floating) point", Game Developer Magazine, 1996.
_SCALED = "cvt.rn.f32.{int} {value}, {value}; mul.rn.f32 {value}, {value}, {requantise_scale}; "
_WHOLE = (
    "cvt.rni.s32.f32 {temporary0}, {y_zero_point}; sub.s32 {temporary0}, {temporary0}, 0x4B400000; "
    "add.s32 {value}, {value}, {temporary0};"
)
_ROUNDED = "add.rn.f32 {value}, {value}, 0f4B400000; " + _WHOLE
_REQUANTISED = _SCALED + "max.f32 {value}, {value}, 0fCA800000; " + _ROUNDED


# Makes temporary1, a scale, -scale, and temporary0 1 / scale, rounded to nearest: two Newton steps, and one bit for scales
# for which they round the wrong way, whose significands have all bits set. All values share these instructions. One step
# more then makes value / scale of it, rounded to nearest: tests/test_requantise_add.py looks for all quotients that could
# come out on the wrong side of a half, and computes them exactly. Scales must be within 2^-100 ... 2^100. div.rn.f32 would
# call a function for scales outside of 2^-126 ... 2^126, and ptxas serialises wgmma in a kernel with a call.
# Source: Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990.
_RECIPROCAL = (
    "rcp.approx.ftz.f32 {temporary0}, {temporary1}; neg.f32 {temporary1}, {temporary1}; "
    + 2
    * (
        "fma.rn.f32 {temporary2}, {temporary1}, {temporary0}, 0f3F800000; "
        "fma.rn.f32 {temporary0}, {temporary0}, {temporary2}, {temporary0}; "
    )
    + "and.b32 {temporary2}, {temporary1}, 0x007FFFFF; setp.eq.s32 q, {temporary2}, 0x007FFFFF; "
    "@q add.s32 {temporary0}, {temporary0}, 1; "
)

# Quotients beyond 2^20 saturate, so the value is limited to the scale times 2^20 before: then no step overflows, and the sum
# that rounds (see above) is between 2^23 and 2^24.
_QUANTISED = (
    "mul.rn.f32 {temporary3}, {quantise_scale}, 0f49800000; min.f32 {value}, {value}, {temporary3}; "
    "neg.f32 {temporary3}, {temporary3}; max.f32 {value}, {value}, {temporary3}; mov.b32 {temporary1}, {quantise_scale}; "
    + _RECIPROCAL
    + "mul.rn.f32 {temporary2}, {value}, {temporary0}; fma.rn.f32 {temporary1}, {temporary1}, {temporary2}, {value}; "
    "fma.rn.f32 {value}, {temporary1}, {temporary0}, {temporary2}; " + _ROUNDED
)

# The same for values whose negative ones become 0. All quotients are divided by 512: `.sat` then limits them to 0 ... 512 at
# no cost, beyond which 8 bits saturate with every zero point.
_QUANTISED_FROM_ZERO = (
    "mul.rn.f32 {temporary1}, {quantise_scale}, 0f44000000; "
    + _RECIPROCAL
    + "mul.rn.sat.f32 {temporary2}, {value}, {temporary0}; fma.rn.f32 {temporary1}, {temporary1}, {temporary2}, {value}; "
    "fma.rn.sat.f32 {value}, {temporary1}, {temporary0}, {temporary2}; "
    "fma.rn.f32 {value}, {value}, 0f44000000, 0f4B400000; " + _WHOLE
)

# The middle less its zero point is limited before it is rounded, because its limits are integers. It is then so small
# that adding and subtracting 1.5 * 2^23 rounds it. Every `.rn` keeps ptxas from fusing a product with the sum behind it.
_ADDED = (
    _SCALED + "sub.rn.f32 {temporary0}, {middle_lowest}, {middle_zero_point}; max.f32 {value}, {value}, {temporary0}; "
    "sub.rn.f32 {temporary0}, {middle_largest}, {middle_zero_point}; min.f32 {value}, {value}, {temporary0}; "
    "add.rn.f32 {value}, {value}, 0f4B400000; sub.rn.f32 {value}, {value}, 0f4B400000; "
    "mul.rn.f32 {value}, {value}, {middle_scale}; add.rn.f32 {temporary0}, {residual_zero_point}, {residual_base}; "
    "sub.rn.f32 {temporary0}, {residual}, {temporary0}; mul.rn.f32 {temporary0}, {temporary0}, {residual_scale}; "
    "add.rn.f32 {value}, {value}, {temporary0}; "
)

# 1 / (1 + exp(-x)) with the approximate exponential and reciprocal: relative errors of 2^-22 and 2^-23. The exponential of a
# large -x is infinite, and its reciprocal 0.
_GATE = (
    "mul.f32 {temporary0}, {value}, 0fBFB8AA3B; ex2.approx.ftz.f32 {temporary0}, {temporary0}; "
    "add.f32 {temporary0}, {temporary0}, 0f3F800000; rcp.approx.ftz.f32 {temporary0}, {temporary0}; "
)

# max(x, 0) - |x| erfc(|x| / sqrt(2)) / 2. The complementary error function is a polynomial of t = 1 / (1 + p z) times
# exp(-z^2), with an error of 1.5e-7 (Abramowitz and Stegun, "Handbook of Mathematical Functions", 1964, 7.1.26). Beyond 16
# it is 0.
_GELU = (
    "abs.f32 {temporary0}, {value}; min.f32 {temporary0}, {temporary0}, 0f41800000; "
    "mul.f32 {temporary0}, {temporary0}, 0f3F3504F3; fma.rn.f32 {temporary1}, {temporary0}, 0f3EA7BA05, 0f3F800000; "
    "rcp.approx.ftz.f32 {temporary1}, {temporary1}; "
    "fma.rn.f32 {temporary2}, {temporary1}, 0f3F87DC22, 0fBFBA00E3; "
    "fma.rn.f32 {temporary2}, {temporary2}, {temporary1}, 0f3FB5F0E3; "
    "fma.rn.f32 {temporary2}, {temporary2}, {temporary1}, 0fBE91A98E; "
    "fma.rn.f32 {temporary2}, {temporary2}, {temporary1}, 0f3E827906; "
    "mul.f32 {temporary2}, {temporary2}, {temporary1}; "
    "mul.f32 {temporary1}, {temporary0}, {temporary0}; mul.f32 {temporary1}, {temporary1}, 0fBFB8AA3B; "
    "ex2.approx.ftz.f32 {temporary1}, {temporary1}; mul.f32 {temporary2}, {temporary2}, {temporary1}; "
    "mul.f32 {temporary0}, {temporary0}, 0f3F3504F3; mul.f32 {temporary2}, {temporary2}, {temporary0}; "
    "setp.lt.f32 q, {value}, 0f00000000; selp.f32 {value}, 0f00000000, {value}, q; "
    "sub.f32 {value}, {value}, {temporary2};"
)

STAGE_CODES: dict[str, StageCode] = {
    "bias": StageCode(
        "add.f32 {value}, {value}, {bias};", _add, integer="add.{int} {value}, {value}, {bias};", vector=_add_vector
    ),
    "scale_shift": StageCode("fma.rn.f32 {value}, {value}, {scale}, {shift};", _scale_shift, vector=_scale_shift_vector),
    "residual": StageCode(
        "add.f32 {value}, {value}, {residual};", _add, integer="add.{int} {value}, {value}, {residual};", vector=_add_vector
    ),
    "relu": StageCode(
        "max.NaN.f32 {value}, {value}, 0f00000000;",
        _relu,
        integer="max.{int} {value}, {value}, 0;",
        older="setp.lt.f32 q, {value}, 0f00000000; selp.f32 {value}, 0f00000000, {value}, q;",
        vector=_relu_vector,
    ),
    "leaky_relu": StageCode(
        "mul.f32 {temporary0}, {value}, {leaky_relu_slope}; setp.gt.f32 q, {value}, 0f00000000; "
        "selp.f32 {value}, {value}, {temporary0}, q;",
        _leaky_relu,
        temporaries=1,
        vector=_leaky_relu_vector,
    ),
    "clip": StageCode(
        "max.NaN.f32 {value}, {value}, {clip_min}; min.NaN.f32 {value}, {value}, {clip_max};",
        _clip,
        integer="cvt.rpi.{int}.f32 {temporary0}, {clip_min}; max.{int} {value}, {value}, {temporary0}; "
        "cvt.rmi.{int}.f32 {temporary0}, {clip_max}; min.{int} {value}, {value}, {temporary0};",
        temporaries=1,
        older="setp.lt.f32 q, {value}, {clip_min}; selp.f32 {value}, {clip_min}, {value}, q; "
        "setp.gt.f32 q, {value}, {clip_max}; selp.f32 {value}, {clip_max}, {value}, q;",
        vector=_clip_vector,
    ),
    "sigmoid": StageCode(_GATE + "mov.f32 {value}, {temporary0};", _sigmoid, temporaries=1, vector=_sigmoid_vector),
    "silu": StageCode(_GATE + "mul.f32 {value}, {value}, {temporary0};", _silu, temporaries=1, vector=_silu_vector),
    "hard_swish": StageCode(
        "fma.rn.sat.f32 {temporary0}, {value}, 0f3E2AAAAB, 0f3F000000; mul.f32 {value}, {value}, {temporary0};",
        _hard_swish,
        temporaries=1,
        vector=_hard_swish_vector,
    ),
    "gelu": StageCode(_GELU, _gelu, temporaries=3),
    # The result is not saturated to 8 bits: the instruction that packs it does so.
    "requantise": StageCode("", None, integer=_REQUANTISED, temporaries=1, after_relu=_SCALED + _ROUNDED),
    "requantise_add": StageCode(
        "",
        None,
        integer=_ADDED + _QUANTISED.replace("{quantise_scale}", "{y_scale}"),
        temporaries=4,
        with_relu=_ADDED + _QUANTISED_FROM_ZERO.replace("{quantise_scale}", "{y_scale}"),
    ),
    "dequantise": StageCode(
        "mul.rn.f32 {value}, {value}, {dequantise_scale};",
        None,
        integer="cvt.rn.f32.{int} {value}, {value}; mul.rn.f32 {value}, {value}, {dequantise_scale};",
    ),
    "quantise": StageCode(_QUANTISED, None, temporaries=4),
}


# Operands with these names have fixed places in the parameters of every kernel; absent ones are zero. Kernels with different
# epilogues therefore share a run of the front end, and their machine code is the same as before other stages existed.
# Operands of other stages follow if a workload has them.
_FIXED_ARRAYS = ("bias", "scale", "shift", "residual")
_FIXED_SCALARS = ("leaky_relu_slope", "clip_min", "clip_max")


@dataclass(frozen=True)
class EpilogueOperand:
    """One operand of an epilogue, in the order of a kernel's `*operands`.

    Attributes:
        axes: K: an array with one element for each output channel; y: an array like the output; empty: a float32 scalar.
        dtype: of the array's elements.
        present: whether the workload has it; otherwise the kernel gets zero.
    """

    name: str
    axes: str
    dtype: str
    present: bool = True

    @property
    def param(self) -> Param:
        """The launch parameter."""
        if self.axes:
            return Pointer(self.name, optional=not self.present)
        return Scalar(self.name) if self.present else Float32(0.0)


def epilogue_operands(workload: Workload) -> tuple[EpilogueOperand, ...]:
    """The operands that a kernel of `workload` takes as `*operands`."""
    arrays = {arg.name: arg for arg in workload.signature}
    found = {
        operand.name: EpilogueOperand(operand.name, operand.axes, arrays[operand.name].dtype)
        for stage in FactorParams.of(workload.params).epilogue
        for operand in stage.kind.operands
    }
    found |= {scalar.name: EpilogueOperand(scalar.name, "", "float32") for scalar in workload.scalars}
    fixed = [found.pop(name, EpilogueOperand(name, "K", "float32", present=False)) for name in _FIXED_ARRAYS]
    fixed += [found.pop(name, EpilogueOperand(name, "", "float32", present=False)) for name in _FIXED_SCALARS]
    return (*fixed, *found.values())


def reads_bytes(workload: Workload) -> bool:
    """Whether the epilogue reads an array like the output with 8 bits."""
    return any(operand.axes == "y" and operand.dtype in BYTES for operand in epilogue_operands(workload))


def numeric_parameters(stage: Stage) -> dict[str, int | float]:
    """Parameters that the arithmetic of a stage may use, in the order in which its kind declares them."""
    values = {name: stage.params[name] for name in stage.kind.parameters}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def format_limits(stage: Stage) -> dict[str, float]:
    """The least and the largest number of each integer format that a parameter names, and the base of its elements.

    {"to_lowest": -128.0, "to_largest": 127.0, "to_base": 2.0**23 + 128, ...}; see `epilogue_text.load_bytes`.
    """
    formats = {name: dtype_of(value) for name, value in stage.params.items() if value in BYTES}
    limits = {f"{name}_lowest": row.lowest for name, row in formats.items()}
    limits |= {f"{name}_largest": row.largest for name, row in formats.items()}
    return limits | {f"{name}_base": 2.0**23 - row.lowest for name, row in formats.items()}


def epilogue_problem(
    workload: Workload,
    *,
    dtypes: Sequence[str] = ("float16", "bfloat16", "float32"),
    staged: Sequence[str] | None = None,
    converting: Sequence[str] = (),
    shuffles: bool = False,
    slices: bool = False,
    x_slices: bool = False,
) -> str | None:
    """Why a template cannot fuse the epilogue of `workload` (one sentence: what, got, allowed), or None if it can.

    Every template calls this in `validate`. It refuses a stage without an entry in `STAGE_CODES`. It also refuses a stage
    that changes the shape or dtype of the output, because most templates store the output as they accumulate it.

    Args:
        dtypes: allowed for arrays that stages read.
        converting: stages that may change the output's dtype.
        shuffles: the template stores through depth_to_space.
        slices: it stores into a slice of a larger array (`ArgSpec.slice_of`).
        x_slices: it reads x out of a larger array (`x_slice` of conv2d).
        staged: the arrays like the output that the kernel loads to shared memory, if it can read no others; None: it reads
            all of them from global memory.
    """
    if workload.output.slice_of and not slices:
        return f"y is a slice of an array of shape {workload.output.slice_of}; allowed: an array of its own"
    if workload.params.get("x_slice") and not x_slices:
        return f"x is a slice of an array of {workload.params['x_slice'][0]} channels; allowed: an array of its own"
    for stage in FactorParams.of(workload.params).epilogue:
        if stage.kind.moves and not shuffles:
            return f"the epilogue has {stage}; allowed: stages that leave every element where it is"
        if stage.name not in STAGE_CODES and not stage.kind.moves:
            hint = did_you_mean(stage.name, STAGE_CODES)
            return f"epilogue stage {stage.name!r} is unknown to the template{hint}; allowed: {', '.join(STAGE_CODES)}"
    for stage, before, after in _outputs(workload):
        if stage.name not in converting and (before.axes, before.shape, before.dtype) != (
            after.axes, after.shape, after.dtype,
        ):  # fmt: skip
            return (
                f"epilogue stage {stage.name!r} makes {_described(after)} of {_described(before)}; "
                "allowed: stages that keep shape and dtype of the output"
            )
    for operand in epilogue_operands(workload):
        if operand.present and operand.dtype not in dtypes:
            return f"the epilogue's {operand.name} is {operand.dtype}; allowed: {', '.join(dtypes)}"
        if operand.axes == "y" and staged is not None and operand.name not in staged:
            return f"the epilogue reads {operand.name}, an array like the output; allowed: {', '.join(staged)}"
    return None


def moved_residual_problem(workload: Workload) -> str | None:
    """Why a kernel that finds arrays like the output at the output's own offsets cannot run the workload, or None."""
    given = FactorParams.of(workload.params).epilogue
    if not any(operand.axes == "y" for stage in given for operand in stage.kind.operands):
        return None
    if computing(given) != given:
        return "the epilogue has depth_to_space after residual; allowed: without an array like the output"
    if workload.output.slice_of:
        return "y is a slice, and the epilogue has residual; allowed: without an array like the output"
    return None


def _outputs(workload: Workload) -> Iterator[tuple[Stage, ArgSpec, ArgSpec]]:
    """Each stage with the output before and after it."""
    before = workload.replace(epilogue=()).output if FactorParams.of(workload.params).epilogue else workload.output
    for stage in computing(FactorParams.of(workload.params).epilogue):
        after = stage.kind.output(before, stage.params)
        yield stage, before, after
        before = after


def stage_inputs(workload: Workload) -> list[str]:
    """The dtype of the numbers that each stage of the epilogue gets: float32, or that of 32-bit sums of integers."""
    return [before.dtype if not dtype_of(before.dtype).is_float else "float32" for _, before, _ in _outputs(workload)]


def _described(spec: ArgSpec) -> str:
    return f"{spec.dtype} {spec.axes} {'x'.join(map(str, spec.shape))}"
