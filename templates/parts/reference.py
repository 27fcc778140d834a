"""Shared by references: numbers of any dtype by index, one kernel for both kinds of target, and the stages of an epilogue.

A reference's kernel is a plain function. Its parameters are the addresses of the workload's arguments, then those of each
output's truth and, where it may be rounded, magnitude, then the call-time scalars, then the range of items to share::

    read, write, items = reader(target, "float32"), writer(target), sharer(target)

    def twice(x, y, magnitude, start, stop):
        for i in items(start, stop):
            value = 2 * read(x, i)
            write(y, i, value)
            write(magnitude, i, abs(value))

    return reference_source(workload, target, twice, items=workload.output.size)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any, Literal

import numpy as np

from schedsearch.backend.access import access
from schedsearch.launch import Grid, Int64, Param, Pointer, Scalar
from schedsearch.ops import ArgSpec, Stage, decode
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.epilogues import computing
from schedsearch.ops.sum_of_products import FactorParams
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, magnitude_of
from schedsearch.templates.parts.casts import f32, f64, i64
from schedsearch.workload import Workload

_CUDA_THREADS = 128
_CUDA_MAX_BLOCKS = 1 << 20  # beyond this, threads loop

_UNKNOWN_STAGE = "the reference cannot compute the epilogue stage {name!r}; known: {known}"


def reader(target: Target, dtype: str) -> Callable[[Any, Any], Any]:
    """A function `read(array, index)` for kernels: element `index` of the array at an address.

    Floats of every format become float64, integers int64. The kernel must not write to arrays that it reads.
    """
    load, itemsize = access(target.kind).load(dtype), dtype_of(dtype).nbytes

    def read(array: Any, index: Any) -> Any:
        return load(i64(array) + itemsize * index)

    return read


def writer(target: Target, wide: Literal["float64", "int64"] = "float64") -> Callable[[Any, Any, Any], None]:
    """A function `write(array, index, value)` for kernels: stores a truth, float64 for float outputs, otherwise int64."""
    store = access(target.kind).store(wide)

    def write(array: Any, index: Any, value: Any) -> None:
        store(i64(array) + 8 * index, value)

    return write


def truth_writer(target: Target, rounded: bool) -> Callable[[Any, Any, Any, Any, Any], None]:
    """A function `write(y, magnitude, index, value, bound)` for kernels that compute in float64: stores a truth.

    `bound` goes to `magnitude` if the output may be rounded; otherwise the value is an integer. These are two functions,
    not two branches of one, as kernels that differ in captured numbers share a run of Numba only if each branch has types.
    """
    write = writer(target, "float64" if rounded else "int64")

    def write_rounded(y: Any, magnitude: Any, index: Any, value: Any, bound: Any) -> None:
        write(y, index, value)
        write(magnitude, index, bound)

    def write_exact(y: Any, magnitude: Any, index: Any, value: Any, bound: Any) -> None:
        write(y, index, i64(value))

    return write_rounded if rounded else write_exact


def sharer(target: Target) -> Callable[[Any, Any], Any]:
    """A function `items(start, stop)` for kernels: the loop over the work items of the calling thread."""
    first, step = access(target.kind).first, access(target.kind).step

    def items(start: Any, stop: Any) -> Any:
        return range(start + first(), stop, step())

    return items


def reference_source(
    workload: Workload,
    target: Target,
    function: Callable[..., None],
    items: int,
    *,
    operands: Sequence[Param] = (),
) -> KernelSource:
    """The return value of `Reference.kernel`.

    Args:
        function: as described in the module. With `operands`: `f(x ..., y, ..., *operands, start, stop)` on the CPU,
            `f(x ..., y, ..., start, stop, *operands)` on CUDA.
        items: extent of the range that is shared among threads.
        operands: parameters that are passed as `*operands` and not before the range.
    """
    apart = {param.buffer for param in operands if isinstance(param, Pointer)}
    apart |= {param.name for param in operands if isinstance(param, Scalar)}
    rounded = workload.definition.equality(workload.params) == "rounded"
    params: list[Param] = [Pointer(argument.name) for argument in workload.signature if argument.name not in apart]
    for output in workload.outputs:
        params.append(Pointer(output.name))
        if output.roundings or (rounded and dtype_of(output.dtype).is_float):
            params.append(Pointer(magnitude_of(output.name)))
    params += [Scalar(scalar.name) for scalar in workload.scalars if scalar.name not in apart]
    step = reference_step(target, function, params, items, operands=operands)
    return KernelSource(target.kind, "native", (step,))


def reference_step(
    target: Target,
    function: Callable[..., None],
    params: Sequence[Param],
    items: int,
    *,
    operands: Sequence[Param] = (),
) -> KernelStep:
    """One of several steps of a reference's kernel; the arguments are those of `reference_source`.

    Args:
        params: parameters before the range; `reference_source` takes all of the workload.
    """
    if target.kind == "cpu":
        return KernelStep(function, (*params, *operands), Grid(items), target.sms)
    blocks = min(math.ceil(items / _CUDA_THREADS), _CUDA_MAX_BLOCKS)
    params = (*params, Int64(0), Int64(items), *operands)
    return KernelStep(function, params, Grid(blocks), _CUDA_THREADS, shaped_by=frozenset(_slots(function)))


def _slots(function: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of the indices into `*operands` that a function captures: constants, as elements differ in type."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        if isinstance(cell.cell_contents, FunctionType):
            yield from _slots(cell.cell_contents, f"{prefix}{name}.")
        elif name.startswith("slot"):
            yield prefix + name


def of_two_factors(compute: Callable[..., None], target: Target, rounded: bool) -> Callable[..., None]:
    """The function for `reference_source` of an operator with the arguments x and weight and an epilogue.

    Args:
        compute: f(x, weight, y, magnitude, operands of the epilogue, start, stop). It ignores `magnitude` unless `rounded`.
    """

    def on_cpu(x: Any, weight: Any, y: Any, magnitude: Any, *operands: Any, start: Any, stop: Any) -> None:
        compute(x, weight, y, magnitude, operands, start, stop)

    def on_cuda(x: Any, weight: Any, y: Any, magnitude: Any, start: Any, stop: Any, *operands: Any) -> None:
        compute(x, weight, y, magnitude, operands, start, stop)

    def exact_on_cpu(x: Any, weight: Any, y: Any, *operands: Any, start: Any, stop: Any) -> None:
        compute(x, weight, y, 0, operands, start, stop)

    def exact_on_cuda(x: Any, weight: Any, y: Any, start: Any, stop: Any, *operands: Any) -> None:
        compute(x, weight, y, 0, operands, start, stop)

    if target.kind == "cpu":
        return on_cpu if rounded else exact_on_cpu
    return on_cuda if rounded else exact_on_cuda


# ---- stages of an epilogue

# (value, magnitude, channel, index in the output, operands) -> (value, magnitude)
Apply = Callable[[Any, Any, Any, Any, Any], Any]
# (channel, index in the output, operands) -> float64
Fetch = Callable[[Any, Any, Any], Any]


def stage_operands(workload: Workload) -> tuple[Param, ...]:
    """The arrays of a workload's epilogue and all scalars, as `*operands` of a reference's kernel."""
    arrays = [operand.name for stage in FactorParams.of(workload.params).epilogue for operand in stage.kind.operands]
    return (*map(Pointer, arrays), *(Scalar(scalar.name) for scalar in workload.scalars))


def operand_names(workload: Workload) -> list[str]:
    """The names of `stage_operands`, whose places are the slots of `*operands`."""
    return [_name(param) for param in stage_operands(workload)]


def computed_output(workload: Workload) -> ArgSpec:
    """The output before stages that only move elements, as an array of its own: truths have no gaps."""
    given = FactorParams.of(workload.params).epilogue
    stages = computing(given)
    output = workload.output if stages == given else workload.replace(epilogue=stages).output
    return replace(output, slice_of=())


def stages_function(workload: Workload, target: Target) -> Apply:
    """`finish(value, magnitude, channel, index, operands) -> (value, magnitude)` for kernels: all stages in float64.

    Args of `finish`:
        channel: output channel of the element.
        index: position of the element in the memory of `computed_output`.
        operands: those of `stage_operands`.

    Raises:
        NotImplementedError: this module does not know a stage.
    """
    slots = {name: slot for slot, name in enumerate(operand_names(workload))}
    arguments = {argument.name: argument for argument in workload.signature}
    finish: Apply = _nothing
    for stage in computing(FactorParams.of(workload.params).epilogue):
        fetches = [
            _array(reader(target, arguments[operand.name].dtype), slots[operand.name], operand.axes)
            for operand in stage.kind.operands
        ]
        fetches += [_scalar(slots[scalar.name]) for scalar in stage.kind.scalars]
        finish = _then(finish, _known(stage)(*fetches, **stage.params))
    return finish


def zero_points_function(p: Workload) -> Callable[[Any], Any]:
    """`zero_points(operands)` for kernels: those of x and weight, integers if x is; of `stage_operands`."""
    slots = {name: slot for slot, name in enumerate(operand_names(p))}
    slot_x, slot_weight = (slots.get(f"{name}_zero_point") for name in ("x", "weight"))
    if dtype_of(FactorParams.of(p.params).dtype).is_float:
        return lambda operands: (0.0, 0.0)

    def none(operands: Any) -> Any:
        return 0, 0

    def of_x(operands: Any) -> Any:
        return i64(operands[slot_x]), 0

    def of_weight(operands: Any) -> Any:
        return 0, i64(operands[slot_weight])

    def of_both(operands: Any) -> Any:
        return i64(operands[slot_x]), i64(operands[slot_weight])

    if slot_x is None:
        return none if slot_weight is None else of_weight
    return of_x if slot_weight is None else of_both


def apply_stages(
    workload: Workload, value: Any, arrays: Mapping[str, Any], scalars: Mapping[str, float], channel: Any, index: Any
) -> Any:
    """The same in NumPy, from the definitions in `schedsearch.ops.STAGES`.

    Args:
        value: float64 (p,), some elements before the epilogue.
        arrays: the workload's arguments by name.
        channel, index: int (p,): each element's output channel, and its position in the memory of `computed_output`.
    """
    arguments = {argument.name: argument for argument in workload.signature}
    for stage in FactorParams.of(workload.params).epilogue:
        operands = {
            operand.name: gather(arrays, arguments[operand.name], channel if operand.axes == "K" else index)
            for operand in stage.kind.operands
        }
        value = stage.kind.apply(value, operands, scalars, stage.params)
    return value


def gather(arrays: Mapping[str, Any], argument: ArgSpec, where: Any) -> Any:
    """As `elements`, as float64."""
    return elements(arrays, argument, where).astype(np.float64)


def elements(arrays: Mapping[str, Any], argument: ArgSpec, where: Any) -> Any:
    """Elements of an argument. Only these are decoded, because an array may have gigabytes.

    Args:
        where: flat indices, or a tuple of indices for each dimension.
    """
    array = np.asarray(arrays[argument.name])
    found = array[where] if isinstance(where, tuple) else array.reshape(-1)[where]
    row = dtype_of(argument.dtype)
    if row.storage != row.decoded and found.dtype == row.storage:  # its bits
        found = decode(found, argument.dtype)
    return found


def _name(param: Param) -> str:
    return param.buffer if isinstance(param, Pointer) else param.name  # type: ignore[union-attr]


def _array(read: Callable[[Any, Any], Any], slot: int, axes: str) -> Fetch:
    def of_channel(channel: Any, index: Any, operands: Any) -> Any:
        return read(operands[slot], channel)

    def of_element(channel: Any, index: Any, operands: Any) -> Any:
        return read(operands[slot], index)

    return of_channel if axes == "K" else of_element


def _scalar(slot: int) -> Fetch:
    def scalar(channel: Any, index: Any, operands: Any) -> Any:
        return f64(operands[slot])

    return scalar


def _nothing(value: Any, bound: Any, channel: Any, index: Any, operands: Any) -> Any:
    return value, bound


def _then(before: Apply, stage: Apply) -> Apply:
    def both(value: Any, bound: Any, channel: Any, index: Any, operands: Any) -> Any:
        value, bound = before(value, bound, channel, index, operands)
        return stage(value, bound, channel, index, operands)

    return both


def _known(stage: Stage) -> Callable[..., Apply]:
    if stage.name not in _STAGES:
        raise NotImplementedError(_UNKNOWN_STAGE.format(name=stage.name, known=", ".join(_STAGES)))
    return _STAGES[stage.name]


def _add(operand: Fetch) -> Apply:
    def add(value: Any, bound: Any, channel: Any, index: Any, operands: Any) -> Any:
        addend = operand(channel, index, operands)
        return value + addend, bound + abs(addend)

    return add


def _scale_shift(scale: Fetch, shift: Fetch) -> Apply:
    def scale_shift(value: Any, bound: Any, channel: Any, index: Any, operands: Any) -> Any:
        factor, addend = scale(channel, index, operands), shift(channel, index, operands)
        return value * factor + addend, bound * abs(factor) + abs(addend)

    return scale_shift


def _relu() -> Apply:
    def relu(value: Any, bound: Any, channel: Any, index: Any, operands: Any) -> Any:
        return (0.0 if value < 0.0 else value), bound

    return relu


def _leaky_relu(slope: Fetch) -> Apply:
    def leaky_relu(value: Any, bound: Any, channel: Any, index: Any, operands: Any) -> Any:
        factor = slope(channel, index, operands)
        return (value * factor if value < 0.0 else value), bound * max(1.0, abs(factor))

    return leaky_relu


def _clip(low: Fetch, high: Fetch) -> Apply:
    def clip(value: Any, bound: Any, channel: Any, index: Any, operands: Any) -> Any:
        least, most = low(channel, index, operands), high(channel, index, operands)
        value = least if value < least else value
        return (most if value > most else value), bound

    return clip


def _activation(function: Callable[[Any], Any]) -> Callable[[], Apply]:
    def make() -> Apply:
        def activation(value: Any, bound: Any, channel: Any, index: Any, operands: Any) -> Any:
            return function(value), 4.0 * bound

        return activation

    return make


def _sigmoid(x: Any) -> Any:
    return 0.5 + 0.5 * math.tanh(0.5 * x)


def _silu(x: Any) -> Any:
    return x * (0.5 + 0.5 * math.tanh(0.5 * x))


def _hard_swish(x: Any) -> Any:
    return x * min(max(x / 6.0 + 0.5, 0.0), 1.0)


def _gelu(x: Any) -> Any:
    return 0.5 * x * (1.0 + math.erf(x * 0.7071067811865476))


def _requantise(scale: Fetch, zero_point: Fetch, *, to: str) -> Apply:
    lowest, largest = float(dtype_of(to).lowest), float(dtype_of(to).largest)

    def requantise(value: Any, bound: Any, channel: Any, index: Any, operands: Any) -> Any:
        product = f32(f32(value) * f32(scale(channel, index, operands)))
        value = half_to_even(f64(product)) + zero_point(channel, index, operands)
        return min(max(value, lowest), largest), bound

    return requantise


def _requantise_add(
    scale: Fetch, addend: Fetch, middle_scale: Fetch, middle_zero: Fetch, addend_scale: Fetch, addend_zero: Fetch,
    divisor: Fetch, zero_point: Fetch, *, to: str, middle: str, residual: str, relu: bool,
) -> Apply:  # fmt: skip
    """Products, sums and quotients of two float32 are rounded to float32 as if at once when float64 rounds them first."""
    requantise = _requantise(scale, middle_zero, to=middle)
    lowest, largest = float(dtype_of(to).lowest), float(dtype_of(to).largest)

    def requantise_add(value: Any, bound: Any, channel: Any, index: Any, operands: Any) -> Any:
        whole, bound = requantise(value, bound, channel, index, operands)
        whole = whole - middle_zero(channel, index, operands)
        other = addend(channel, index, operands) - addend_zero(channel, index, operands)
        product = f32(whole * middle_scale(channel, index, operands))
        added = f32(other * addend_scale(channel, index, operands))
        total = f64(f32(f64(product) + f64(added)))
        total = max(total, 0.0) if relu else total
        quotient = f32(total / divisor(channel, index, operands))
        value = half_to_even(f64(quotient)) + zero_point(channel, index, operands)
        return min(max(value, lowest), largest), bound

    return requantise_add


def _dequantise(scale: Fetch, *, to: str) -> Apply:
    def dequantise(value: Any, bound: Any, channel: Any, index: Any, operands: Any) -> Any:
        factor = scale(channel, index, operands)
        return value * factor, bound * abs(factor)

    return dequantise


def _quantise(scale: Fetch, zero_point: Fetch, *, to: str) -> Apply:
    lowest, largest = float(dtype_of(to).lowest), float(dtype_of(to).largest)

    def quantise(value: Any, bound: Any, channel: Any, index: Any, operands: Any) -> Any:
        divisor = scale(channel, index, operands)
        quotient = value / divisor + zero_point(channel, index, operands)
        return min(max(quotient, lowest), largest), bound / abs(divisor)

    return quantise


def half_to_even(value: Any) -> Any:
    """The nearest integer of a float64 that a float32 can hold; halves round to the even neighbour."""
    magnitude = abs(value)
    if magnitude >= 4503599627370496.0:  # 2**52, from where on float64 has no fractions
        return value
    rounded = (magnitude + 4503599627370496.0) - 4503599627370496.0
    return -rounded if value < 0.0 else rounded


# How a kernel computes each stage: a function of its operands and scalars, in the order of its kind, and its parameters.
# Stages that clamp a value (relu, clip) leave its magnitude unchanged.
_STAGES: Mapping[str, Callable[..., Apply]] = {
    "bias": _add,
    "scale_shift": _scale_shift,
    "residual": _add,
    "relu": _relu,
    "leaky_relu": _leaky_relu,
    "clip": _clip,
    "sigmoid": _activation(_sigmoid),
    "silu": _activation(_silu),
    "hard_swish": _activation(_hard_swish),
    "gelu": _activation(_gelu),
    "requantise": _requantise,
    "requantise_add": _requantise_add,
    "dequantise": _dequantise,
    "quantise": _quantise,
}
