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

from schedsearch.errors import ArgumentError
from schedsearch.runtime import arrays
from schedsearch.runtime.kernel import Kernel
from schedsearch.runtime.streams import current_stream
from schedsearch.torch.formats import torch_dtype


class BoundCall:
    """Computes a workload on tensors. The caller looks it up by dtypes, shapes, strides and devices, which it does not check
    again.

    Calls may come from any thread and go to any stream.

    Args:
        kernel: what runs.
        tensors: argument of the workload -> a tensor like those of all calls, with the logical axes N, C, H, W.
        scalars: values of all scalars of the workload.

    Raises:
        ArgumentError: a tensor is not what the kernel takes.
    """

    def __init__(self, kernel: Kernel, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> None:
        self.kernel = kernel
        workload, plan = kernel.workload, kernel.artifact.plan
        first = next(iter(tensors.values()))
        self._names = [spec.name for spec in workload.signature]
        self._turn = [_turn(arrays.forms(spec), tensors[spec.name]) for spec in workload.signature]
        self._turns = any(self._turn)
        given = [self._turned(place, tensors[name]) for place, name in enumerate(self._names)]
        for spec, tensor in zip(workload.signature, given):
            arrays.check(spec, arrays.view(tensor, spec.name), kernel.device)
        options = {"device": first.device}
        self._made: list[tuple[str, Callable[[], torch.Tensor]]] = [
            (like.name, _allocator(like.shape, like.strides, dtype=torch_dtype(like.dtype), **options))
            for like in arrays.output_like(workload, "channels_last")
        ]
        self._results = len(self._made)
        self._made += [
            (name, _allocator((nbytes,), (1,), dtype=torch.uint8, **options)) for name, nbytes in plan.workspaces.items()
        ]
        made = [(name, allocate()) for name, allocate in self._made]
        self._buffers = (*self._names, *(name for name, _ in made))
        self._addresses = [tensor.data_ptr() for tensor in (*given, *(each for _, each in made))]
        self._scalars: Mapping[str, float] = dict(scalars)
        aligned = {
            name: address - address % plan.alignments.get(name, 1) for name, address in zip(self._buffers, self._addresses)
        }
        self._bound = kernel.bind_addresses(aligned, self._scalars)
        self._addresses = [0] * len(self._buffers)  # so that the first call sets and checks them
        self._only = self._made[0][1] if len(self._made) == 1 else None
        self._stream = current_stream("torch", kernel.device)
        self._lock = threading.Lock()

    def __call__(self, tensors: Sequence[torch.Tensor], scalars: Mapping[str, float]) -> Any:
        """Enqueues the kernel on torch's current stream.

        Args:
            tensors: in the order of the workload's signature.
            scalars: values of all scalars; the mapping must not change afterwards.

        Returns:
            The output, or a tuple of several.

        Raises:
            DeviceError: the launch failed.
        """
        if self._turns:
            tensors = [self._turned(place, tensor) for place, tensor in enumerate(tensors)]
        made = (self._only(),) if self._only is not None else tuple([allocate() for _, allocate in self._made])
        try:
            self._launch([each.data_ptr() for each in (*tensors, *made)], scalars)
        except ArgumentError:  # an address lacks the alignment that vector loads need
            tensors = [tensor.clone() for tensor in tensors]
            self._launch([each.data_ptr() for each in (*tensors, *made)], scalars)
        return made[0] if self._results == 1 else made[: self._results]

    def _launch(self, addresses: list[int], scalars: Mapping[str, float]) -> None:
        bound = self._bound
        with self._lock:
            last = self._addresses
            if addresses != last:
                for place, address in enumerate(addresses):
                    if address != last[place]:
                        bound.set_pointer(self._buffers[place], address)
                        last[place] = address
            if scalars is not self._scalars:
                for name, value in scalars.items():
                    bound.set_scalar(name, value)
                self._scalars = scalars
            bound.launch(self._stream())

    def _turned(self, place: int, tensor: torch.Tensor) -> torch.Tensor:
        turn = self._turn[place]
        return tensor if turn is None else turn(tensor)


def _allocator(shape: Sequence[int], strides: Sequence[int], **options: Any) -> Callable[[], torch.Tensor]:
    """A function that allocates such a tensor. It copies a tensor whose memory was freed: that costs less host time than
    shape and strides in Python."""
    like = torch.empty_strided(tuple(shape), tuple(strides), **options)
    like.untyped_storage().resize_(0)
    return functools.partial(torch.empty_like, like)


def _turn(forms: Sequence[arrays.Form], tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What makes a tensor of this description one that the kernel takes; None if it is one."""
    if any(form.matches(tuple(tensor.shape), tensor.stride()) for form in forms):
        return None
    last = any(form.name == "channels_last" for form in forms)
    memory = torch.channels_last if last else torch.contiguous_format
    return lambda each: each.contiguous(memory_format=memory)
