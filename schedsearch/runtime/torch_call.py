"""The short path of a kernel's call: for torch tensors that look like those of an earlier call, which was checked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from schedsearch.runtime.prepared import PreparedArgument
from schedsearch.runtime.repeated import tensor_facts
from schedsearch.runtime.streams import current_stream, raw_stream


class Launch(Protocol):
    """A bound kernel, or several on common arrays."""

    def set_pointer(self, buffer: str, address: int) -> None:
        """Raises ArgumentError if the address lacks the alignment that a kernel requires."""

    def launch(self, stream: int = 0) -> None:
        """Raises DeviceError if it fails."""


class TorchCall:
    """Launches the bound kernel if the arguments match; otherwise it declines.

    An argument matches if its facts are those of the checked call; its address may differ. See
    `schedsearch.runtime.repeated`. A prepared argument must be the same object. Nothing changes until all arguments have
    matched.

    Args:
        bound: the kernel, bound to the tensors of the checked call and the default scalars; nobody else binds it anew while
            this object is in use.
        arguments: name -> tensor or prepared argument of the checked call, in the order of the kernel's signature.
        outputs: name -> output tensor of the checked call.
        device: (cpu or cuda, ordinal).
    """

    __slots__ = ("_arguments", "_bound", "_current_stream", "_device", "_outputs")

    def __init__(
        self, bound: Launch, arguments: Mapping[str, Any], outputs: Mapping[str, Any], device: tuple[str, int]
    ) -> None:
        self._bound, self._device = bound, device
        self._arguments = [_Argument(name, given) for name, given in arguments.items()]
        self._outputs = [_Output(name, tensor) for name, tensor in outputs.items()]
        self._current_stream = current_stream("torch", device)

    def __call__(self, args: tuple[Any, ...], stream: Any) -> Any:
        """Allocates the outputs, launches and returns them (a tuple when there are several), or returns None: no match.

        Raises:
            ArgumentError: an address lacks the alignment that the kernel requires, or `stream` is not a stream.
            DeviceError: the launch failed.
        """
        if len(args) != len(self._arguments):
            return None
        moved: list[tuple[_Argument, int]] | None = None
        for tensor, last in zip(args, self._arguments):
            if last.prepared is not None:
                if tensor is not last.prepared:
                    return None
                continue
            if tensor_facts(tensor) != last.facts:
                return None
            pointer = tensor.data_ptr()
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
        bound.launch(self._current_stream() if stream is None else raw_stream(stream, "torch", self._device))
        return (first, *others) if others else first

    def _allocate(self, output: _Output) -> Any:
        tensor = output.empty()
        pointer = tensor.data_ptr()
        if pointer != output.pointer:
            self._bound.set_pointer(output.name, pointer)
            output.pointer = pointer
        return tensor


class _Argument:
    """What is compared with the next call's tensor."""

    __slots__ = ("facts", "name", "pointer", "prepared")

    def __init__(self, name: str, given: Any) -> None:
        self.name = name
        self.prepared = given if isinstance(given, PreparedArgument) else None
        tensor = given.array if isinstance(given, PreparedArgument) else given
        self.facts = tensor_facts(tensor)
        self.pointer: int = tensor.data_ptr()


class _Output:
    """How to allocate an output, and the address that is bound."""

    __slots__ = ("empty", "name", "pointer")

    def __init__(self, name: str, tensor: Any) -> None:
        import torch

        self.name = name
        self.pointer: int = tensor.data_ptr()
        self.empty: Callable[[], Any] = functools.partial(
            torch.empty_strided, tuple(tensor.shape), tuple(tensor.stride()), dtype=tensor.dtype, device=tensor.device
        )
