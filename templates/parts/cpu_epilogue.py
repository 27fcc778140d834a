"""The fused epilogue of a CPU kernel: the functions of its stages, chained in the workload's order.

`stages.STAGE_CODES` has the functions for float32 and `cpu_integers.INTEGER_STAGES` those for 32-bit integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from schedsearch.backend.cpu_finish import StageOperand, Stages
from schedsearch.backend.cpu_moves import read_op
from schedsearch.backend.cpu_ops import as_array, narrow_op, widen_op
from schedsearch.launch import Param
from schedsearch.ops import ArgSpec, Layout, Stage
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.sum_of_products import FactorParams
from schedsearch.templates.parts.casts import u16
from schedsearch.templates.parts.cpu_integers import INTEGER_STAGES, quantise
from schedsearch.templates.parts.stages import (
    BYTES,
    STAGE_CODES,
    EpilogueOperand,
    epilogue_operands,
    numeric_parameters,
    stage_inputs,
)
from schedsearch.workload import Workload

OPERAND_DTYPES = ("float32", "int32", "uint32", "float16", "bfloat16", *BYTES)  # that a CPU kernel can read


class CpuEpilogue:
    """The stages after the accumulation in a CPU kernel for `workload`, in float32, or in 32-bit integers up to the stage
    that makes other numbers of them.

    Attributes:
        params: launch parameters of the kernel's `*operands`: addresses of arrays and float32 scalars, zeros for operands
            that the workload does not have.
        element: Numba's type of an element of y in memory; uint16 for a 16-bit float.
        apply: `apply(value, k, at, operands) -> element`, for the accumulator `value` (float32, int32 or uint32) of output
            channel k, whose offset in y is `at` elements; `operands` is the kernel's tuple.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload, self._operands = workload, epilogue_operands(workload)
        self.params: tuple[Param, ...] = tuple(operand.param for operand in self._operands)
        self.element = _element(workload.output.dtype)
        self.apply: Callable[..., Any] = _identity
        dense = _dense_offset(workload.output)
        for stage, number in zip(FactorParams.of(workload.params).epilogue, stage_inputs(workload)):
            self.apply = _after(self.apply, stage, number, self._operands, dense)
        if self.element == u16:
            self.apply = _rounded(self.apply, narrow_op(workload.output.dtype))

    @property
    def vector_stages(self) -> Stages | None:
        """The stages for `finish_op`; None if not all is in float32, or if arrays like y do not lie as y does."""
        stages = FactorParams.of(self._workload.params).epilogue
        numbers = {*stage_inputs(self._workload), self._workload.output.dtype}
        numbers |= {operand.dtype for operand in self._operands if operand.present}
        dense = not self._workload.output.slice_of or all(operand.axes != "y" for operand in self._operands)
        if numbers != {"float32"} or not dense:
            return None
        found = [(STAGE_CODES[stage.name].vector, self._vector_operands(stage)) for stage in stages]
        return tuple((vector, named) for vector, named in found if vector is not None) if all(v for v, _ in found) else None

    def _vector_operands(self, stage: Stage) -> tuple[StageOperand, ...]:
        names = [operand.name for operand in self._operands]
        arrays = [
            StageOperand("elements" if each.axes == "y" else "channels", names.index(each.name))
            for each in stage.kind.operands
        ]
        scalars = [StageOperand("scalar", names.index(each.name)) for each in stage.kind.scalars]
        return (*arrays, *scalars, *(StageOperand("constant", 0, value) for value in numeric_parameters(stage).values()))

    def index(self, name: str) -> int | None:
        """The index of the operand `name` in `params` and therefore in a kernel's `*operands`; None if it has none."""
        names = [operand.name for operand in self._operands if operand.present]
        return [operand.name for operand in self._operands].index(name) if name in names else None


def _element(dtype: str) -> Any:
    return u16 if dtype in ("float16", "bfloat16") else getattr(types, dtype)


def _dense_offset(y: ArgSpec) -> Callable[..., Any] | None:
    """Where arrays like y have the element of channel k that lies at `at` in y; None if that is `at`, too.

    They are dense. If y is a slice of an array with more channels, the offset without its channel, which is the same for all
    lanes of a vector, tells how many elements of other channels were skipped.
    """
    if not y.slice_of:
        return None
    layout = Layout.parse(y.axes)
    channel = layout.axes.index("C")
    step = math.prod(y.shape[channel + 1 :])  # between channels
    run, skipped = (step * count for count in (y.slice_of[channel], y.slice_of[channel] - y.shape[channel]))

    def dense(k, at):  # type: ignore[no-untyped-def]
        first = at - k * step
        return first - first // run * skipped + k * step

    return dense


def _identity(value, k, at, operands):  # type: ignore[no-untyped-def]
    return value


def _nothing(k, at, operands):  # type: ignore[no-untyped-def]
    return ()


def _rounded(before: Callable[..., Any], narrow: Any) -> Callable[..., Any]:
    def apply(value, k, at, operands):  # type: ignore[no-untyped-def]
        return narrow(before(value, k, at, operands))

    return apply


def _after(
    before: Callable[..., Any],
    stage: Stage,
    number: str,
    operands: tuple[EpilogueOperand, ...],
    dense: Callable[..., Any] | None,
) -> Callable[..., Any]:
    """The epilogue `before`, followed by `stage`, which gets numbers of the dtype `number`; `dense` as `_dense_offset`."""
    arithmetic: Callable[..., Any] | None
    if stage.name == "quantise":
        arithmetic = quantise(stage)
    elif dtype_of(number).is_float:
        arithmetic = STAGE_CODES[stage.name].function
    else:
        arithmetic = INTEGER_STAGES[stage.name](stage, getattr(types, number))
    assert arithmetic is not None, f"{stage.name} has no arithmetic for a CPU"  # the template's `validate` refuses it
    names = [operand.name for operand in operands]
    values: Callable[..., Any] = _nothing
    for constant in reversed(numeric_parameters(stage).values()):
        values = _with_constant(constant if isinstance(constant, int) else np.float32(constant), values)
    for scalar in reversed(stage.kind.scalars):
        values = _with_scalar(names.index(scalar.name), values)
    for each in reversed(stage.kind.operands):
        operand = operands[names.index(each.name)]
        index = names.index(each.name)
        if operand.axes == "y" and dense is not None:
            values = _with_dense_element(index, operand.dtype, dense, values)
        else:
            values = _with_element(index, operand.axes == "y", operand.dtype, values)

    def apply(value, k, at, operands):  # type: ignore[no-untyped-def]
        return arithmetic(before(value, k, at, operands), values(k, at, operands))

    return apply


def _with_constant(constant: Any, rest: Callable[..., Any]) -> Callable[..., Any]:
    def values(k, at, operands):  # type: ignore[no-untyped-def]
        return (constant, *rest(k, at, operands))

    return values


def _with_scalar(index: int, rest: Callable[..., Any]) -> Callable[..., Any]:
    def values(k, at, operands):  # type: ignore[no-untyped-def]
        return (operands[index], *rest(k, at, operands))

    return values


def _with_element(index: int, like_y: bool, dtype: str, rest: Callable[..., Any]) -> Callable[..., Any]:
    kind = _element(dtype)
    number = widen_op(dtype) if kind == u16 else kind  # a cast to its own type changes nothing

    read = read_op(kind)

    def of_channel(k, at, operands):  # type: ignore[no-untyped-def]
        return (number(read(operands[index], k)), *rest(k, at, operands))

    def of_element(k, at, operands):  # type: ignore[no-untyped-def]
        array = as_array(operands[index], (at + 1,), kind)  # which may be y
        return (number(array[at]), *rest(k, at, operands))

    return of_element if like_y else of_channel


def _with_dense_element(index: int, dtype: str, dense: Callable[..., Any], rest: Callable[..., Any]) -> Callable[..., Any]:
    kind = _element(dtype)
    number = widen_op(dtype) if kind == u16 else kind

    def values(k, at, operands):  # type: ignore[no-untyped-def]
        element = dense(k, at)
        array = as_array(operands[index], (element + 1,), kind)
        return (number(array[element]), *rest(k, at, operands))

    return values
