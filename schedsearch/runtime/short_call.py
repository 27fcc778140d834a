"""The short path of a call: for tensors of torch, or arrays of NumPy, that look like those of an earlier call, which was
checked."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from schedsearch.ops.layout import is_torch_tensor
from schedsearch.runtime.allocation import torch_allocator
from schedsearch.runtime.prepared import PreparedArgument
from schedsearch.runtime.repeated import address_of, array_address, matcher
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

    __slots__ = (
        "_address", "_bound", "_count", "_current_stream", "_device", "_library", "_matches", "_outputs", "_places",
        "_pointers", "_prepared",
    )  # fmt: skip

    def __init__(
        self,
        bound: Launch,
        arguments: Mapping[str, Any],
        outputs: Mapping[str, Any],
        device: tuple[str, int],
        library: str = "torch",
    ) -> None:
        self._bound, self._device, self._library = bound, device, library
        self._address: Callable[[Any], int] = operator.methodcaller("data_ptr") if library == "torch" else array_address
        self._count = len(arguments)
        given = list(enumerate(arguments.items()))
        self._prepared = [(place, each) for place, (_, each) in given if isinstance(each, PreparedArgument)]
        kept = [(place, name, each) for place, (name, each) in given if not isinstance(each, PreparedArgument)]
        self._places = [place for place, _, _ in kept]
        self._matches = matcher([each for _, _, each in kept])
        self._pointers = [_Pointer(name, address_of(each)) for _, name, each in kept]
        self._outputs = [(_Pointer(name, address_of(array)), _empty_like(array)) for name, array in outputs.items()]
        self._current_stream = current_stream(library, device)

    def __call__(self, args: Sequence[Any], stream: Any) -> Any:
        """Allocates the outputs, launches and returns them (a tuple when there are several), or returns None: no match.

        Raises:
            ArgumentError: an address lacks the alignment that the kernel requires, or `stream` is not a stream.
            DeviceError: the launch failed.
        """
        if len(args) != self._count:
            return None
        if self._prepared:
            for place, argument in self._prepared:
                if args[place] is not argument:
                    return None
            args = [args[place] for place in self._places]
        if not self._matches(*args):
            return None
        address_now = self._address
        moved: list[tuple[_Pointer, int]] | None = None
        for tensor, pointer in zip(args, self._pointers):
            address = address_now(tensor)
            if address != pointer.address:
                if not address:  # a tensor without memory
                    return None
                if moved is None:
                    moved = []
                moved.append((pointer, address))
        bound = self._bound
        if moved is not None:
            for pointer, address in moved:
                bound.set_pointer(pointer.name, address)
                pointer.address = address
        results = []
        for pointer, allocate in self._outputs:
            tensor = allocate()
            address = address_now(tensor)
            if address != pointer.address:
                bound.set_pointer(pointer.name, address)
                pointer.address = address
            results.append(tensor)
        bound.launch(self._current_stream() if stream is None else raw_stream(stream, self._library, self._device))
        return tensor if len(results) == 1 else tuple(results)


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


class _Pointer:
    """A buffer and the address that is bound for it."""

    __slots__ = ("address", "name")

    def __init__(self, name: str, address: int) -> None:
        self.name, self.address = name, address


def _empty_like(array: Any) -> Callable[[], Any]:
    """A function that makes arrays of the same shape, strides and dtype."""
    if type(array) is np.ndarray:
        order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
        if order == list(range(array.ndim)) or array.flags.c_contiguous:
            return functools.partial(np.empty, array.shape, array.dtype)
        stored, back = tuple(array.shape[axis] for axis in order), np.argsort(order)
        return lambda: np.empty(stored, array.dtype).transpose(back)
    return torch_allocator(tuple(array.shape), array.stride(), array.dtype, array.device)
