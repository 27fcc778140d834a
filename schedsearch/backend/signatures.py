"""The Numba types of a kernel's arguments, from its launch parameters."""

from __future__ import annotations

import inspect
from typing import Any

from schedsearch.launch import Literal, NumbaArray, Number, Param, Scalar
from schedsearch.template import KernelStep


def signature(step: KernelStep) -> tuple[Any, ...]:
    """One type for each launch parameter; those of `*operands` form a tuple, and those of `run_time` follow.

    Raises:
        ValueError: Numba has no type for the elements of an array.
    """
    from numba import types

    kinds, late = [_type(param) for param in step.params], [_type(param) for param in step.run_time]
    code = step.function.__code__
    if not code.co_flags & inspect.CO_VARARGS:
        return (*kinds, *late)
    return (*kinds[: code.co_argcount], types.Tuple(tuple(kinds[code.co_argcount :])), *late)


def _type(param: Param) -> Any:
    from numba import types

    if isinstance(param, NumbaArray):
        element = getattr(types, param.dtype, None)
        if element is None:
            raise ValueError(f"Numba has no arrays of {param.dtype}, the dtype of {param.buffer}")
        return types.Array(element, len(param.shape), param.layout)
    if isinstance(param, Literal):
        return types.literal(param.value)
    if isinstance(param, Scalar | Number):
        return types.boolean if param.dtype == "bool" else getattr(types, param.dtype)
    by_kind = {
        "pointer": types.uint64,
        "tensor_map": types.uint64,
        "i32": types.int32,
        "i64": types.int64,
        "f32": types.float32,
    }
    return by_kind[param.kind]
