"""The reference of elementwise: the expression in float64, with a bound of float32's roundoff errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from schedsearch.launch import Pointer
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.elementwise import ElementwiseParams, reads_of, typed_of
from schedsearch.ops.expression_functions import wrap as wrap_numpy
from schedsearch.ops.expression_types import Typed, is_whole
from schedsearch.target import Target
from schedsearch.template import KernelSource, Reference, magnitude_of
from schedsearch.templates.elementwise.bounded_functions import BOUNDED, UNDECIDED, given, given_whole
from schedsearch.templates.elementwise.broadcast import Spread
from schedsearch.templates.elementwise.programs import program
from schedsearch.templates.elementwise.whole_functions import wrap
from schedsearch.templates.parts.casts import f64, i64
from schedsearch.templates.parts.reference import gather, reader, reference_step, sharer, writer
from schedsearch.workload import Workload

_UNDEFINED = -(2**63)  # the truth about an integer that float32 decides; NaN is that about a float


class ElementwiseReference(Reference[ElementwiseParams]):
    """Integer outputs are not rounded, but limited to their format: see `ArgSpec.roundings`."""

    def kernel(self, workload: Workload[ElementwiseParams], target: Target) -> KernelSource:
        found, row = _typed(workload), dtype_of(workload.params.out_dtype)
        compute = program(found.expression, [spec.name for spec in workload.signature], BOUNDED)
        exact = found.whole and not row.is_float
        keep, undefined = wrap(row.name) if exact else i64, _UNDEFINED
        items, write = sharer(target), writer(target, "int64" if exact else "float64")
        limit = _limit(row.name, workload.output.undecided)
        fetch: Callable[..., Any] = _no_numbers
        for slot, read in enumerate(reads_of(workload.params)):
            of_input = given_whole if is_whole(read.dtype) else given
            fetch = _then(fetch, slot, reader(target, read.dtype), Spread.of(read, workload.params.y).offset(i64), of_input)

        def apply(y: Any, magnitude: Any, arrays: Any, start: Any, stop: Any) -> None:
            for at in items(start, stop):
                value, bound = compute(fetch(arrays, at))
                write(y, at, limit(value, bound))
                write(magnitude, at, bound)

        def apply_exact(y: Any, arrays: Any, start: Any, stop: Any) -> None:
            for at in items(start, stop):
                value, bound = compute(fetch(arrays, at))
                write(y, at, keep(value) if bound == 0.0 else undefined)

        def on_cpu(y: Any, magnitude: Any, *arrays: Any, start: Any, stop: Any) -> None:
            apply(y, magnitude, arrays, start, stop)

        def on_cuda(y: Any, magnitude: Any, start: Any, stop: Any, *arrays: Any) -> None:
            apply(y, magnitude, arrays, start, stop)

        def exact_on_cpu(y: Any, *arrays: Any, start: Any, stop: Any) -> None:
            apply_exact(y, arrays, start, stop)

        def exact_on_cuda(y: Any, start: Any, stop: Any, *arrays: Any) -> None:
            apply_exact(y, arrays, start, stop)

        on_both = (exact_on_cpu, exact_on_cuda) if exact else (on_cpu, on_cuda)
        function = on_both[target.kind != "cpu"]
        magnitudes = () if exact else (Pointer(magnitude_of("y")),)
        step = reference_step(
            target,
            function,
            (Pointer("y"), *magnitudes),
            workload.output.size,
            operands=[Pointer(spec.name) for spec in workload.signature],
        )
        return KernelSource(target.kind, "native", (step,))

    def points(
        self,
        workload: Workload[ElementwiseParams],
        arrays: Mapping[str, Any],
        scalars: Mapping[str, float],
        flat_indices: Any,
        output: str = "y",
    ) -> np.ndarray[Any, np.dtype[Any]]:
        places = np.unravel_index(np.asarray(flat_indices, np.int64), workload.params.y)
        values = {}
        for spec, read in zip(workload.signature, reads_of(workload.params)):
            own = places[len(places) - len(read.shape) :]
            index = tuple(
                first + step * (at if n > 1 else at * 0)
                for at, n, first, step in zip(own, read.shape, read.starts, read.steps)
            )
            whole = is_whole(read.dtype)  # float64 has not all of them
            values[spec.name] = np.asarray(arrays[spec.name])[index] if whole else gather(arrays, spec, index)
        found = _typed(workload)
        numbers = np.broadcast_to(found.evaluate(values), np.shape(flat_indices))
        row = dtype_of(workload.params.out_dtype)
        if found.whole and not row.is_float:
            return np.asarray(wrap_numpy(row.name)(numbers))
        numbers = numbers.astype(np.float64)
        return numbers if row.is_float else np.clip(numbers, row.lowest, row.largest)


def _typed(workload: Workload[ElementwiseParams]) -> Typed:
    """A float that becomes an integer is not rounded."""
    found = typed_of(workload.params)
    if found.whole or dtype_of(workload.params.out_dtype).is_float:
        return found
    return replace(found, expression=found.expression.without_last_rounding())


def _limit(dtype: str, undecided: bool) -> Callable[[Any, Any], Any]:
    """NaN, which is not compared, where float32 decides."""
    row = dtype_of(dtype)
    lowest, largest = float(row.lowest), float(row.largest)

    def same(value: Any, bound: Any) -> Any:
        return f64(value)

    def limited(value: Any, bound: Any) -> Any:
        return min(max(value, lowest), largest)

    def decided(value: Any, bound: Any) -> Any:
        return min(max(value, lowest), largest) if bound < UNDECIDED else math.nan

    return same if row.is_float else decided if undecided else limited


def _no_numbers(arrays: Any, at: Any) -> Any:
    return ()


def _then(before: Callable[..., Any], slot: int, read: Any, offset: Any, given: Any) -> Callable[..., Any]:
    def numbers(arrays: Any, at: Any) -> Any:
        return before(arrays, at) + (given(read(arrays[slot], offset(at))),)  # noqa: RUF005 - Numba knows no *

    return numbers
