"""Inputs of a model that become constants: their values are given when it is read.

A rate or a mode that decides a branch is one thing for a network, not an argument of each call. Such an input is no input of
the network that is built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.errors import did_you_mean
from schedsearch.network.invalid import ModelError
from schedsearch.text import quoted, type_text

if TYPE_CHECKING:
    import onnx

Given = int | float | bool | Sequence[Any] | np.ndarray
Inputs = Mapping[str, Given]


def with_given_inputs(model: onnx.ModelProto, inputs: Inputs, what: str) -> None:
    """Puts constants in the place of inputs; the model is changed.

    Args:
        inputs: input -> its value: a number, nested lists of numbers, or an array of the input's shape and dtype. Numbers
            take the dtype of the input if they keep their value; one number fills an input of one element.
        what: the model, for messages.

    Raises:
        ModelError: the model has no such input, or the value has another dtype or shape.
    """
    from onnx import numpy_helper

    if not isinstance(inputs, Mapping):
        raise ModelError(f"inputs is {type_text(inputs)}; give a dictionary from inputs to values: {{'sr': 16000}}")
    if not inputs:
        return
    graph = model.graph
    weights = {each.name for each in graph.initializer}
    known = {each.name: each for each in graph.input if each.name not in weights}
    for name, given in inputs.items():
        if name not in known:
            allowed = ", ".join(known) or "none"
            raise ModelError(f"{what} has no input {quoted(name)}{did_you_mean(str(name), known)}; it has {allowed}")
        array = _array(given, known[name], f"{what}: input {name!r}")
        graph.initializer.append(numpy_helper.from_array(array, name))
    kept = [each for each in graph.input if each.name not in inputs]
    del graph.input[:]
    graph.input.extend(kept)


def _array(given: object, declared: onnx.ValueInfoProto, where: str) -> np.ndarray[Any, Any]:
    """A value as an array of the dtype and shape that an input has."""
    import onnx

    if not declared.type.HasField("tensor_type"):
        raise ModelError(f"{where} is not an array; allowed: arrays. Change the model")
    kind = declared.type.tensor_type
    wanted = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
    try:
        array = np.asarray(given)
    except ValueError as error:  # lists of several lengths
        raise ModelError(f"{where} is given {quoted(given)}; allowed: numbers, or an array ({error})") from error
    if array.dtype.kind not in "biuf" and array.dtype != wanted:
        raise ModelError(f"{where} is given {quoted(given)}; allowed: numbers, or an array of {wanted.name}")
    with np.errstate(all="ignore"):
        converted = array.astype(wanted)
    if not _fits(array, converted, isinstance(given, np.ndarray | np.generic)):
        raise ModelError(
            f"{where} is {wanted.name} and is given {quoted(given)} ({array.dtype.name}); allowed: {wanted.name}"
        )
    extents = [each.dim_value if each.HasField("dim_value") else None for each in kind.shape.dim]
    if array.size == 1 and array.ndim == 0 and kind.HasField("shape") and all(each in (1, None) for each in extents):
        converted = converted.reshape([1] * len(extents))
    shape = list(converted.shape)
    if kind.HasField("shape") and (
        len(shape) != len(extents) or any(old not in (None, new) for old, new in zip(extents, shape))
    ):
        declared_shape = ["?" if each is None else each for each in extents]
        raise ModelError(f"{where} has shape {declared_shape}, but its value has {shape}; give a value of that shape")
    return converted


def _fits(array: np.ndarray[Any, Any], converted: np.ndarray[Any, Any], is_typed: bool) -> bool:
    """Whether numbers may take another dtype. Arrays keep theirs; numbers without one must keep their value, and truths and
    numbers are not the same."""
    if array.dtype == converted.dtype:
        return True
    if is_typed or (array.dtype.kind == "b") != (converted.dtype.kind == "b"):
        return False
    if array.dtype.kind == "f" and converted.dtype.kind in "iu":
        return False
    if converted.dtype.kind in "iu":
        return bool(np.array_equal(array, converted.astype(object)))
    return bool(np.isfinite(converted).all() or not np.isfinite(array).all())


def parsed(text: str) -> int | float | bool | list[Any]:
    """The value that text such as 16000, 0.5, true or 1,2,3 names.

    Raises:
        ValueError: it is no such text.
    """
    words = text.split(",")
    numbers = [_number(word.strip()) for word in words]
    return numbers if len(words) > 1 else numbers[0]


def _number(word: str) -> int | float | bool:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    try:
        return int(word)
    except ValueError:
        found = float(word)
        if math.isnan(found):
            raise ValueError(word) from None
        return found
