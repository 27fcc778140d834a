"""A kernel bound for tensors of one description: a call sets addresses that have changed, allocates and launches.

Workspaces come from torch's allocator in every call, so that calls on several streams do not share them and CUDA graphs may
capture a call.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from schedsearch.errors import ArgumentError, UsageError
from schedsearch.runtime import arrays
from schedsearch.runtime.allocation import torch_allocator
from schedsearch.runtime.kernel import Kernel
from schedsearch.runtime.repeated import same_numbers
from schedsearch.runtime.streams import current_stream
from schedsearch.torch.operators.formats import torch_dtype


class BoundCall:
    """Computes a workload on tensors. The caller looks it up by dtypes, shapes, strides and devices, which it does not check
    again.

    Calls may come from any thread and go to any stream.

    Args:
        kernel: what runs.
        places: where each argument of the workload's signature stands among the tensors of a call; these have the logical
            axes N, C, H, W.
        scalars: scalar of the workload -> its place among the numbers of a call.
        tensors, numbers: of a first call, which is not made; all calls have tensors like these.
        in_place: output that is the memory of a tensor of the call -> its place; it is not returned.

    Raises:
        ArgumentError: a tensor is not what the kernel takes.
    """

    def __init__(
        self,
        kernel: Kernel,
        places: Sequence[int],
        scalars: Mapping[str, int],
        tensors: Sequence[torch.Tensor | None],
        numbers: Sequence[float],
        in_place: Mapping[str, int] | None = None,
    ) -> None:
        self.kernel = kernel
        workload, plan = kernel.workload, kernel.artifact.plan
        given: dict[int, Any] = {place: tensors[place] for place in places}
        self._turn = {
            place: turn
            for place, spec in zip(places, workload.signature)
            if (turn := _turn(arrays.forms(spec), given[place])) is not None
        }
        given |= {place: turn(given[place]) for place, turn in self._turn.items()}
        for spec, tensor in zip(workload.signature, given.values()):
            arrays.check(spec, arrays.view(tensor, spec.name), kernel.device)
        device = given[places[0]].device
        self._made = [
            (like.name, torch_allocator(like.shape, like.strides, torch_dtype(like.dtype), device))
            for like in arrays.output_like(workload, "channels_last")
            if like.name not in (in_place or {})
        ]
        self._results = len(self._made)
        self._made += [
            (name, torch_allocator((nbytes,), (1,), torch.uint8, device)) for name, nbytes in plan.workspaces.items()
        ]
        self._only = self._made[0][1] if len(self._made) == 1 else None  # allocates all that a call needs
        made = {name: allocate() for name, allocate in self._made}
        tensors_of = {spec.name: tensor for spec, tensor in zip(workload.signature, given.values())} | made
        tensors_of |= {name: given[place] for name, place in (in_place or {}).items()}
        aligned = {
            name: tensor.data_ptr() - tensor.data_ptr() % plan.alignments.get(name, 1) for name, tensor in tensors_of.items()
        }
        bound = kernel.bind_addresses(aligned, {name: numbers[place] for name, place in scalars.items()})
        self._launch, self._set_scalar = bound.launch, bound.set_scalar
        buffers = dict(zip(places, (spec.name for spec in workload.signature)))
        setters = {name: functools.partial(bound.set_pointer, name) for name in tensors_of}
        self._set_addresses: list[Callable[[int], None] | None] = [
            setters.get(buffers.get(place, "")) for place in range(len(tensors))
        ]
        for name, place in (in_place or {}).items():
            self._set_addresses[place] = _both(setters[buffers[place]], setters[name])
        self._set_own: list[Callable[[int], None]] = [setters[name] for name in made]
        self._unknown = (None,) * len(tensors)
        self._addresses: tuple[int | None, ...] = self._unknown  # as they were set
        self._own: tuple[int, ...] | int | None = None  # the same for `_made`, a number if it is one; None: unknown
        self._scalars, self._numbers = scalars, numbers
        self._stream = current_stream("torch", kernel.device)
        self._lock = threading.Lock()

    def __call__(self, tensors: Sequence[torch.Tensor | None], addresses: tuple[int, ...], numbers: Sequence[float]) -> Any:
        """Enqueues the kernel on torch's current stream.

        Args:
            tensors: those of the call.
            addresses: of their first elements; 0 without a tensor.
            numbers: those of the call.

        Returns:
            The output, or a tuple of several.

        Raises:
            DeviceError: the launch failed.
            UsageError: a tensor's memory was freed.
        """
        if self._turn:
            self._check_memory(addresses)  # PyTorch would read what was freed
            tensors = [self._turn[place](tensor) if place in self._turn else tensor for place, tensor in enumerate(tensors)]
            addresses = _addresses(tensors)
        if self._only is not None:
            result = self._only()
            own: tuple[int, ...] | int = result.data_ptr()
        else:
            made = tuple([allocate() for _, allocate in self._made])
            own = _addresses(made)
            result = made[0] if self._results == 1 else made[: self._results]
        try:
            with self._lock:
                if addresses != self._addresses or (self._scalars and not same_numbers(numbers, self._numbers)):
                    self._update(addresses, numbers)
                if own != self._own:
                    self._move(own)
                self._launch(self._stream())
        except ArgumentError:  # an address lacks the alignment that vector loads need
            copies = [tensor if tensor is None else tensor.clone() for tensor in tensors]
            with self._lock:
                self._update(_addresses(copies), numbers)
                self._move(own)
                self._launch(self._stream())
        return result

    def _move(self, own: tuple[int, ...] | int) -> None:
        """Writes the addresses of what a call allocates to the argument block."""
        self._own = None
        if isinstance(own, int):
            self._set_own[0](own)
        else:
            for set_own, address in zip(self._set_own, own):
                set_own(address)
        self._own = own

    def _update(self, addresses: tuple[int, ...], numbers: Sequence[float]) -> None:
        """Writes what has changed of a caller's to the argument block. Raises ArgumentError if an address lacks an
        alignment, and UsageError if a tensor has no memory."""
        before, self._addresses = self._addresses, self._unknown
        if addresses != before:
            self._check_memory(addresses)  # of all: the others may be copied if one lacks an alignment
            for set_address, address, last in zip(self._set_addresses, addresses, before):
                if address != last and set_address is not None:
                    set_address(address)
        self._addresses = addresses
        if not same_numbers(numbers, self._numbers):
            for name, place in self._scalars.items():
                self._set_scalar(name, numbers[place])
            self._numbers = numbers

    def _check_memory(self, addresses: tuple[int, ...]) -> None:
        """Raises UsageError if a tensor that the kernel reads has no memory."""
        if any(set_address is not None and not address for set_address, address in zip(self._set_addresses, addresses)):
            raise UsageError(f"a tensor of {self.kernel.workload.label} has no memory; it was freed, give another")


def _both(one: Callable[[int], None], other: Callable[[int], None]) -> Callable[[int], None]:
    def set_both(address: int) -> None:
        one(address)
        other(address)

    return set_both


def _addresses(tensors: Sequence[torch.Tensor | None]) -> tuple[int, ...]:
    return tuple([0 if tensor is None else tensor.data_ptr() for tensor in tensors])


def _turn(forms: Sequence[arrays.Form], tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What makes a tensor of this description one that the kernel takes; None if it is one."""
    if any(form.matches(tuple(tensor.shape), tensor.stride()) for form in forms):
        return None
    last = any(form.name == "channels_last" for form in forms)
    memory = torch.channels_last if last else torch.contiguous_format
    return lambda each: each.contiguous(memory_format=memory)
