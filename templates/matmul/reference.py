"""The reference for dense and batch_matmul: a naive kernel in float64 or int64, and NumPy at single points.

A thread computes four neighbours of a row of y, so it reads x once for four products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedsearch.backend.access import access
from schedsearch.ops import ArgSpec
from schedsearch.ops.dtypes import dtype
from schedsearch.ops.products import MatrixProductParams
from schedsearch.target import Target
from schedsearch.template import KernelSource
from schedsearch.templates.parts.casts import f64, i64
from schedsearch.templates.parts.reference import (
    apply_stages,
    gather,
    of_two_factors,
    reference_source,
    sharer,
    stage_operands,
    stages_function,
    truth_writer,
    zero_points_function,
)
from schedsearch.templates.parts.sum_reference import SumReference, is_float
from schedsearch.workload import Workload

_COLUMNS = 4  # of y per thread; the kernel has one line for each


@dataclass(frozen=True)
class Strides:
    """Elements between neighbours of a factor.

    Attributes:
        matrix: from the factor of one product to that of the next; 0 if all products have the same one.
        row, depth: along m or n, and along k.
    """

    matrix: int
    row: int
    depth: int

    @classmethod
    def of(cls, factor: ArgSpec) -> Strides:
        """
        >>> Strides.of(ArgSpec("weight", "BKN", (1, 5, 3), "float32"))
        Strides(matrix=0, row=1, depth=3)
        """
        rows = "M" if "M" in factor.axes else "N"
        matrix, row, depth = (
            math.prod(factor.shape[factor.axes.index(axis) + 1 :]) if axis in factor.axes else 0 for axis in f"B{rows}K"
        )
        return cls(matrix if factor.shape[0] > 1 else 0, row, depth)


class MatmulReference(SumReference[MatrixProductParams]):
    def kernel(self, workload: Workload[MatrixProductParams], target: Target) -> KernelSource:
        y = workload.output
        items = y.size // workload.params.n * math.ceil(workload.params.n / _COLUMNS)
        return reference_source(workload, target, _kernel(workload, target), items, operands=stage_operands(workload))

    def sums(
        self, workload: Workload[MatrixProductParams], arrays: Mapping[str, Any], scalars: Mapping[str, float], flat: Any
    ) -> Any:
        p = workload.params
        matrix, row, column = flat // (p.n * p.m), flat // p.n % p.m, flat % p.n
        depth = np.arange(p.k)
        products = []
        for spec, along in zip(workload.signature, (row, column)):
            strides = Strides.of(spec)
            at = (matrix * strides.matrix + along * strides.row)[:, None] + depth * strides.depth
            products.append(gather(arrays, spec, at) - scalars.get(f"{spec.name}_zero_point", 0.0))
        return apply_stages(workload, np.einsum("pk,pk->p", *products), arrays, scalars, column, flat)


def _kernel(workload: Workload[MatrixProductParams], target: Target) -> Callable[..., None]:
    """f(x, weight, y, magnitude, operands of the epilogue, start, stop) for addresses, float32s, and a range of items."""
    p = workload.params
    load, load_weight = access(target.kind).load(p.dtype), access(target.kind).load(p.weight_dtype)
    integers, rounded = not dtype(p.dtype).is_float, is_float(workload.output)
    zero = 0 if integers else 0.0
    write, items = truth_writer(target, rounded), sharer(target)
    finish, zero_points = stages_function(workload, target), zero_points_function(workload)
    x_at, w_at = (Strides.of(spec) for spec in workload.signature[:2])
    x_bytes, w_bytes = dtype(p.dtype).nbytes, dtype(p.weight_dtype).nbytes
    x_matrix, x_row, x_step = (x_bytes * stride for stride in (x_at.matrix, x_at.row, x_at.depth))
    w_matrix, w_row, w_step = (w_bytes * stride for stride in (w_at.matrix, w_at.row, w_at.depth))
    rows, columns, depth = p.m, p.n, p.k
    quads = math.ceil(columns / _COLUMNS)

    def multiply(x: Any, weight: Any, y: Any, magnitude: Any, operands: Any, start: Any, stop: Any) -> None:
        x, weight = i64(x), i64(weight)
        x_zero, weight_zero = zero_points(operands)
        for item in items(start, stop):
            first = item % quads * _COLUMNS
            row = item // quads % rows
            matrix = item // (quads * rows)
            x_at = x + matrix * x_matrix + row * x_row
            weights = weight + matrix * w_matrix
            # Columns past the last one repeat it and are not stored.
            w0 = weights + first * w_row
            w1 = weights + min(first + 1, columns - 1) * w_row
            w2 = weights + min(first + 2, columns - 1) * w_row
            w3 = weights + min(first + 3, columns - 1) * w_row
            sum0 = sum1 = sum2 = sum3 = zero
            bound0 = bound1 = bound2 = bound3 = zero
            for k in range(depth):
                value = load(x_at + k * x_step) - x_zero
                product = value * (load_weight(w0 + k * w_step) - weight_zero)
                sum0 += product
                bound0 += abs(product)
                product = value * (load_weight(w1 + k * w_step) - weight_zero)
                sum1 += product
                bound1 += abs(product)
                product = value * (load_weight(w2 + k * w_step) - weight_zero)
                sum2 += product
                bound2 += abs(product)
                product = value * (load_weight(w3 + k * w_step) - weight_zero)
                sum3 += product
                bound3 += abs(product)
            for j in range(min(_COLUMNS, columns - first)):
                total = sum0 if j == 0 else sum1 if j == 1 else sum2 if j == 2 else sum3
                bound = bound0 if j == 0 else bound1 if j == 1 else bound2 if j == 2 else bound3
                at = (matrix * rows + row) * columns + first + j
                # Sums of integers are exact in float64, too.
                value, bound = finish(f64(total), f64(bound), first + j, at, operands)
                write(y, magnitude, at, value, bound)

    return of_two_factors(multiply, target, rounded)
