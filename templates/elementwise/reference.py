"""The reference of elementwise: the expression in float64, with a bound of float32's roundoff errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from schedsearch.launch import Pointer
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.elementwise import ElementwiseParams, reads_of
from schedsearch.ops.expressions import Expression, parse_expression
from schedsearch.target import Target
from schedsearch.template import KernelSource, Reference, magnitude_of
from schedsearch.templates.elementwise.bounded_functions import BOUNDED, given
from schedsearch.templates.elementwise.broadcast import Spread
from schedsearch.templates.elementwise.programs import program
from schedsearch.templates.parts.casts import i64
from schedsearch.templates.parts.reference import gather, reader, reference_step, sharer, writer
from schedsearch.workload import Workload


class ElementwiseReference(Reference[ElementwiseParams]):
    """Integer outputs are not rounded, but limited to their format: see `ArgSpec.roundings`."""

    def kernel(self, workload: Workload[ElementwiseParams], target: Target) -> KernelSource:
        compute = program(_expression(workload), [spec.name for spec in workload.signature], BOUNDED)
        items, write, limit = sharer(target), writer(target), _limit(workload.params.out_dtype)
        fetch: Callable[..., Any] = _no_numbers
        for slot, read in enumerate(reads_of(workload.params)):
            fetch = _then(fetch, slot, reader(target, read.dtype), Spread.of(read, workload.params.y).offset(i64))

        def apply(y: Any, magnitude: Any, arrays: Any, start: Any, stop: Any) -> None:
            for at in items(start, stop):
                value, bound = compute(fetch(arrays, at))
                write(y, at, limit(value))
                write(magnitude, at, bound)

        def on_cpu(y: Any, magnitude: Any, *arrays: Any, start: Any, stop: Any) -> None:
            apply(y, magnitude, arrays, start, stop)

        def on_cuda(y: Any, magnitude: Any, start: Any, stop: Any, *arrays: Any) -> None:
            apply(y, magnitude, arrays, start, stop)

        function = on_cpu if target.kind == "cpu" else on_cuda
        step = reference_step(
            target,
            function,
            (Pointer("y"), Pointer(magnitude_of("y"))),
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
            values[spec.name] = gather(arrays, spec, index)
        found = np.broadcast_to(_expression(workload).evaluate(values), np.shape(flat_indices)).astype(np.float64)
        row = dtype_of(workload.params.out_dtype)
        return found if row.is_float else np.clip(found, row.lowest, row.largest)


def _expression(workload: Workload[ElementwiseParams]) -> Expression:
    found = parse_expression(workload.params.expression)
    return found if dtype_of(workload.params.out_dtype).is_float else found.without_last_rounding()


def _limit(dtype: str) -> Callable[[Any], Any]:
    row = dtype_of(dtype)
    lowest, largest = float(row.lowest), float(row.largest)

    def same(value: Any) -> Any:
        return value

    def limited(value: Any) -> Any:
        return min(max(value, lowest), largest)

    return same if row.is_float else limited


def _no_numbers(arrays: Any, at: Any) -> Any:
    return ()


def _then(before: Callable[..., Any], slot: int, read: Any, offset: Any) -> Callable[..., Any]:
    def numbers(arrays: Any, at: Any) -> Any:
        return before(arrays, at) + (given(read(arrays[slot], offset(at))),)  # noqa: RUF005 - Numba knows no *

    return numbers
