"""The short path of a call: for tensors of torch, or arrays of NumPy, that look like those of an earlier call, which was
checked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from schedsearch.ops.layout import is_torch_tensor
from schedsearch.runtime.prepared import PreparedArgument
from schedsearch.runtime.repeated import address_of, array_address, facts_of, numpy_facts, tensor_facts
from schedsearch.runtime.streams import current_stream, raw_stream


class Launch(Protocol):
    """A bound kernel, or several on common arrays."""

    def set_pointer(self, buffer: str, address: int) -> None:
        """Raises ArgumentError if the address lacks the alignment that a kernel requires."""

    def launch(self, stream: int = 0) -> None:
        """Raises DeviceError if it fails."""


class ShortCall:
    """Launches the bound kernel if the arguments match; otherwise it declines.

    An argument matches if its facts are those of the checked call; its address may differ. See
    `schedsearch.runtime.repeated`. A prepared argument must be the same object. Nothing changes until all arguments have
    matched.

    Args:
        bound: the kernel, bound to the tensors of the checked call and the default scalars; nobody else binds it anew while
            this object is in use.
        arguments: name -> tensor, array or prepared argument of the checked call, in the order of the kernel's signature.
        outputs: name -> output of the checked call.
        device: (cpu or cuda, ordinal).
        library: torch or numpy, whose all of them are.
    """

    __slots__ = ("_address", "_arguments", "_bound", "_current_stream", "_device", "_facts", "_library", "_outputs")

    def __init__(
        self,
        bound: Launch,
        arguments: Mapping[str, Any],
        outputs: Mapping[str, Any],
        device: tuple[str, int],
        library: str = "torch",
    ) -> None:
        self._bound, self._device, self._library = bound, device, library
        is_torch = library == "torch"
        self._facts: Callable[[Any], object] = tensor_facts if is_torch else numpy_facts
        self._address: Callable[[Any], int] = (lambda tensor: tensor.data_ptr()) if is_torch else array_address
        self._arguments = [_Argument(name, given) for name, given in arguments.items()]
        self._outputs = [_Output(name, array) for name, array in outputs.items()]
        self._current_stream = current_stream(library, device)

    def __call__(self, args: tuple[Any, ...], stream: Any) -> Any:
        """Allocates the outputs, launches and returns them (a tuple when there are several), or returns None: no match.

        Raises:
            ArgumentError: an address lacks the alignment that the kernel requires, or `stream` is not a stream.
            DeviceError: the launch failed.
        """
        if len(args) != len(self._arguments):
            return None
        facts_now, address_now = self._facts, self._address
        moved: list[tuple[_Argument, int]] | None = None
        for tensor, last in zip(args, self._arguments):
            if last.prepared is not None:
                if tensor is not last.prepared:
                    return None
                continue
            if facts_now(tensor) != last.facts:
                return None
            pointer = address_now(tensor)
            if pointer != last.pointer:
                if not pointer:  # a tensor without memory
                    return None
                if moved is None:
                    moved = []
                moved.append((last, pointer))
        bound = self._bound
        if moved is not None:
            for last, pointer in moved:
                bound.set_pointer(last.name, pointer)
                last.pointer = pointer
        first = self._allocate(self._outputs[0])
        others = tuple(map(self._allocate, self._outputs[1:])) if len(self._outputs) > 1 else ()
        bound.launch(self._current_stream() if stream is None else raw_stream(stream, self._library, self._device))
        return (first, *others) if others else first

    def _allocate(self, output: _Output) -> Any:
        tensor = output.empty()
        pointer = self._address(tensor)
        if pointer != output.pointer:
            self._bound.set_pointer(output.name, pointer)
            output.pointer = pointer
        return tensor


def short_call(
    bound: Launch | None, given: Sequence[object], results: Sequence[object], device: tuple[str, int]
) -> ShortCall | None:
    """The short path of a network, whose ports are input0, input1, ..., output0, ...; None if there is none for such arrays.

    Args:
        bound: as of `ShortCall`.
        given, results: the inputs and outputs of a call that was checked.
    """
    arrays = (*given, *results)
    is_numpy = all(type(each) is np.ndarray for each in arrays)
    if bound is None or not (is_numpy or all(is_torch_tensor(each) for each in arrays)):
        return None
    inputs = {f"input{number}": array for number, array in enumerate(given)}
    outputs = {f"output{number}": array for number, array in enumerate(results)}
    return ShortCall(bound, inputs, outputs, device, "numpy" if is_numpy else "torch")


class _Argument:
    """What is compared with the next call's tensor."""

    __slots__ = ("facts", "name", "pointer", "prepared")

    def __init__(self, name: str, given: Any) -> None:
        self.name = name
        self.prepared = given if isinstance(given, PreparedArgument) else None
        array = given.array if isinstance(given, PreparedArgument) else given
        self.facts = facts_of(array) if type(array) is np.ndarray else tensor_facts(array)
        self.pointer = address_of(array)


class _Output:
    """How to allocate an output, and the address that is bound."""

    __slots__ = ("empty", "name", "pointer")

    def __init__(self, name: str, array: Any) -> None:
        self.name = name
        self.pointer = address_of(array)
        self.empty = _empty_like(array)


def _empty_like(array: Any) -> Callable[[], Any]:
    """A function that makes arrays of the same shape, strides and dtype."""
    if type(array) is np.ndarray:
        order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
        if order == list(range(array.ndim)) or array.flags.c_contiguous:
            return functools.partial(np.empty, array.shape, array.dtype)
        stored, back = tuple(array.shape[axis] for axis in order), np.argsort(order)
        return lambda: np.empty(stored, array.dtype).transpose(back)
    import torch

    return functools.partial(
        torch.empty_strided, tuple(array.shape), tuple(array.stride()), dtype=array.dtype, device=array.device
    )
