"""The fused epilogue of a CPU kernel: the functions of `stages.STAGE_CODES`, chained in the workload's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from schedsearch.backend.cpu_ops import as_array
from schedsearch.launch import Param
from schedsearch.ops import Stage
from schedsearch.templates.parts.stages import STAGE_CODES, EpilogueOperand, epilogue_operands, numeric_parameters
from schedsearch.workload import Workload


class CpuEpilogue:
    """The stages after the accumulation in a CPU kernel for `workload`, all in float32.

    Attributes:
        params: launch parameters of the kernel's `*operands`: addresses of arrays and float32 scalars, zeros for operands
            that the workload does not have.
        apply: `apply(value, k, at, operands) -> float32`, for the float32 accumulator `value` of output channel k, whose
            offset in y is `at` elements; `operands` is the kernel's tuple.
    """

    def __init__(self, workload: Workload) -> None:
        operands = epilogue_operands(workload)
        self.params: tuple[Param, ...] = tuple(operand.param for operand in operands)
        self.apply: Callable[..., Any] = _identity
        for stage in workload.epilogue:
            self.apply = _after(self.apply, stage, operands)


def _identity(value, k, at, operands):  # type: ignore[no-untyped-def]
    return value


def _nothing(k, at, operands):  # type: ignore[no-untyped-def]
    return ()


def _after(before: Callable[..., Any], stage: Stage, operands: tuple[EpilogueOperand, ...]) -> Callable[..., Any]:
    """The epilogue `before`, followed by `stage`."""
    arithmetic = STAGE_CODES[stage.name].function
    assert arithmetic is not None, f"{stage.name} has no arithmetic for a CPU"  # the template's `validate` refuses it
    names = [operand.name for operand in operands]
    values: Callable[..., Any] = _nothing
    for constant in reversed(numeric_parameters(stage).values()):
        values = _with_constant(constant if isinstance(constant, int) else np.float32(constant), values)
    for scalar in reversed(stage.kind.scalars):
        values = _with_scalar(names.index(scalar.name), values)
    for operand in reversed(stage.kind.operands):
        values = _with_element(names.index(operand.name), operand.axes == "y", values)

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


def _with_element(index: int, like_y: bool, rest: Callable[..., Any]) -> Callable[..., Any]:
    def values(k, at, operands):  # type: ignore[no-untyped-def]
        element = at if like_y else k
        array = as_array(operands[index], (element + 1,), types.float32)
        return (array[element], *rest(k, at, operands))

    return values
