"""The truth about a user's kernel: the user's function over NumPy arrays, or the kernel's default configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.own_kernel import Argument, OwnKernelParams, arguments_of
from schedsearch.target import Target
from schedsearch.template import Config, KernelSource, Reference
from schedsearch.templates.own_kernel.definition import definition_of
from schedsearch.templates.own_kernel.templates import OwnKernelCpu, OwnKernelCuda
from schedsearch.workload import Workload


class OwnKernelReference(Reference[OwnKernelParams]):
    """Answers with whole arrays. A kernel without a reference of its own has no truth about single elements."""

    pointwise: ClassVar[bool] = False

    def kernel(self, workload: Workload[OwnKernelParams], target: Target) -> KernelSource:
        """The default configuration, which writes outputs in their own formats."""
        template = OwnKernelCuda() if target.kind == "cuda" else OwnKernelCpu()
        return template.kernel(workload, target, Config(definition_of(workload).default))

    def truths(
        self,
        workload: Workload[OwnKernelParams],
        arrays: Mapping[str, Any],
        scalars: Mapping[str, float],
        run: Callable[[KernelSource], Mapping[str, Any]],
        target: Target,
    ) -> Mapping[str, Any]:
        definition = definition_of(workload)
        arguments = arguments_of(workload.params)
        if definition.reference is None:
            return run(self.kernel(workload, target))
        given = [_given(each, arrays, scalars) for each in arguments if each.role != "out"]
        with np.errstate(all="ignore"):
            found = definition.reference(*given)
        outputs = [each for each in arguments if each.role in ("out", "inout")]
        results = found if isinstance(found, tuple | list) else (found,)
        if len(results) != len(outputs):
            names = ", ".join(each.name for each in outputs)
            raise ValueError(f"it returned {len(results)} arrays; allowed: {len(outputs)}, for {names}")
        return {each.buffer: _in_memory_order(each, result) for each, result in zip(outputs, results)}

    def points(
        self,
        workload: Workload[OwnKernelParams],
        arrays: Mapping[str, Any],
        scalars: Mapping[str, float],
        flat_indices: Any,
        output: str,
    ) -> Any:
        raise NotImplementedError("truths() gives whole arrays")


def _given(argument: Argument, arrays: Mapping[str, Any], scalars: Mapping[str, float]) -> Any:
    """What the reference gets for an argument: float64 or int64 in the caller's shape, or a number. It may change them."""
    if argument.role == "scalar":
        return scalars[argument.name]
    if argument.role == "fixed":
        return argument.value
    wide = np.float64 if dtype_of(argument.dtype).is_float else np.int64
    flat = np.asarray(arrays[argument.name], wide).reshape(-1)
    strides = tuple(flat.itemsize * stride for stride in argument.strides)
    return np.lib.stride_tricks.as_strided(flat, argument.shape, strides).copy()


def _in_memory_order(argument: Argument, result: Any) -> Any:
    found = np.asarray(result)
    if found.shape != argument.shape:
        raise ValueError(f"it returned shape {found.shape} for {argument.name}; allowed: {argument.shape}")
    is_float = dtype_of(argument.dtype).is_float
    if found.dtype.kind not in "biuf" or (not is_float and found.dtype.kind == "f"):
        raise ValueError(
            f"it returned {found.dtype} for {argument.name}, whose format is {argument.dtype}; allowed: "
            f"{'numbers' if is_float else 'integers'}"
        )
    order = argument.memory_order
    assert order is not None  # the operator refuses written arrays with gaps
    return np.ascontiguousarray(found.transpose(order))
